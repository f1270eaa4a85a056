"""Configurations that come with the library, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What is not the default, as a TOML file would say it."""

    about: str
    tree: Mapping[str, Any]
    server_lr: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """The tuned rate of each server optimizer, by data.alpha; the first is for all others."""


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
    # The recipe of FedGLAD's paper: its appendix, and what its authors' code does.
    "mnist": Preset(
        "MNIST as in the paper: 100 clients of 600 images, mostly one digit each; CNN; 15 minutes",
        {
            "rounds": 50,
            "data": {"name": "mnist", "clients": 100, "alpha": 0.1},
            "model": {"name": "cnn"},
            "client": {
                "optimizer": "sgdm",
                "lr": 0.01,
                "batch_size": 64,
                "epochs": 5,
                "drop_last": True,
                "clip_norm": 1.0,
            },
            "sampler": {"clients_per_round": 10},
        },
        server_lr={
            "sgd": {0.1: 1.0, 1.0: 1.0},
            "momentum": {0.1: 0.5, 1.0: 0.5},
            "adam": {0.1: 1e-2, 1.0: 1e-2},
        },
    ),
    "cifar10": Preset(
        "CIFAR-10 as in the paper: 100 clients of 500 images; ResNet-56; days on a few cores",
        {
            "rounds": 500,
            "data": {"name": "cifar10", "clients": 100, "alpha": 0.1},
            "model": {"name": "resnet56"},
            "client": {
                "optimizer": "sgdm",
                "lr": 0.1,
                "batch_size": 64,
                "epochs": 5,
                "drop_last": True,
                "clip_norm": 1.0,
            },
            "sampler": {"clients_per_round": 10},
        },
        server_lr={
            "sgd": {0.1: 0.5, 1.0: 0.5},
            "momentum": {0.1: 0.2, 1.0: 0.1},
            "adam": {0.1: 5e-3, 1.0: 5e-3},
        },
    ),
}
