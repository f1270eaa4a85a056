"""Configurations that come with the library, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What is not the default, as a TOML file would say it."""

    about: str
    tree: Mapping[str, Any]


PRESETS = {
    "digits": Preset(
        "50 clients with handwritten digits, mostly one or two kinds each; a small CNN; seconds",
        {
            "rounds": 60,
            "data": {"name": "digits"},
            "model": {"name": "small-cnn"},
            "client": {"lr": 0.05, "batch_size": 16, "epochs": 5, "clip_norm": 1.0},
            "sampler": {"clients_per_round": 5},
        },
    ),
    "synthetic": Preset(
        "100 clients, or a million, that label their own inputs by their own rule; softmax",
        {
            "rounds": 100,
            "data": {"name": "synthetic"},
            "model": {"name": "softmax"},
            "client": {"optimizer": "sgd", "lr": 0.01, "batch_size": 10, "epochs": 5},
            "sampler": {"clients_per_round": 10},
        },
    ),
}
