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
    toy: bool = False
    """For trying things out: fewer rounds of it are not called shortened."""


IMAGES: Mapping[str, Any] = {
    "optimizer": "sgdm",
    "batch_size": 64,
    "epochs": 5,
    "drop_last": True,
    "clip_norm": 1.0,
}
"""How the paper trains on images; the rate depends on the data set."""

DISTILBERT: Mapping[str, Any] = {
    "optimizer": "adamw",
    "batch_size": 32,
    "epochs": 1,
    "shuffle": "once",
    "clip_norm": 1.0,
    "schedule": "linear",
    "warmup": 0.06,
}
"""How the paper trains DistilBERT; the rate depends on the data set."""

BILSTM: Mapping[str, Any] = {
    "optimizer": "adam",
    "lr": 0.001,
    "amsgrad": True,
    "weight_decay": 1e-4,
    "batch_size": 32,
    "epochs": 1,
}
"""How the paper trains the BiLSTM."""

AGNEWS_BILSTM: Mapping[str, Mapping[float, float]] = {"sgd": {0.1: 0.5}, "momentum": {0.1: 0.05}}
"""The server's rates for the BiLSTM on AG News, also on our smaller part of it."""


def _shared(
    rounds: int,
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    client: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """The paper's federation: 100 clients with data of α = 0.1, of which ten train in a round."""
    return {
        "rounds": rounds,
        "data": {"clients": 100, "alpha": 0.1, **data},
        "model": model,
        "client": client,
        "sampler": {"clients_per_round": 10},
        **more,
    }


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
        toy=True,
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
        toy=True,
    ),
    # The recipe of FedGLAD's paper: its appendix, and what its authors' code does.
    "mnist": Preset(
        "MNIST as in the paper: 100 clients of 600 images, mostly one digit each; CNN; 15 minutes",
        _shared(50, {"name": "mnist"}, {"name": "cnn"}, {**IMAGES, "lr": 0.01}),
        server_lr={
            "sgd": {0.1: 1.0, 1.0: 1.0},
            "momentum": {0.1: 0.5, 1.0: 0.5},
            "adam": {0.1: 1e-2, 1.0: 1e-2},
        },
    ),
    "cifar10": Preset(
        "CIFAR-10 as in the paper: 100 clients of 500 images; ResNet-56; days on a few cores",
        _shared(500, {"name": "cifar10"}, {"name": "resnet56"}, {**IMAGES, "lr": 0.1}),
        server_lr={
            "sgd": {0.1: 0.5, 1.0: 0.5},
            "momentum": {0.1: 0.2, 1.0: 0.1},
            "adam": {0.1: 5e-3, 1.0: 5e-3},
        },
    ),
    "20news": Preset(
        "20 Newsgroups as in the paper: 100 clients of 113 texts; DistilBERT, from the hub",
        _shared(
            100,
            {"name": "20news", "tokenizer": "distilbert-base-uncased"},
            {"name": "encoder", "source": "distilbert-base-uncased", "classes": 20},
            {**DISTILBERT, "lr": 5e-5},
        ),
        server_lr={
            "sgd": {0.1: 7.0, 1.0: 6.0},
            "momentum": {0.1: 2.0, 1.0: 2.0},
            "adam": {0.1: 3e-4, 1.0: 3e-4},
        },
    ),
    "agnews": Preset(
        "AG News as in the paper: 100 clients of 1,200 texts; DistilBERT, from the hub",
        _shared(
            100,
            {"name": "agnews", "tokenizer": "distilbert-base-uncased"},
            {"name": "encoder", "source": "distilbert-base-uncased", "classes": 4},
            {**DISTILBERT, "lr": 2e-5},
        ),
        server_lr={
            "sgd": {0.1: 1.0, 1.0: 1.0},
            "momentum": {0.1: 0.5, 1.0: 0.5},
            "adam": {0.1: 2e-4, 1.0: 1e-4},
        },
    ),
    "20news-bilstm": Preset(
        "20 Newsgroups as in the paper, with its BiLSTM over GloVe vectors of 300 numbers",
        _shared(
            200,
            {"name": "20news", "tokenizer": "words"},
            {"name": "bilstm", "data": "20news", "classes": 20},
            BILSTM,
            adapter={"gamma": 0.01},
        ),
        server_lr={"sgd": {0.1: 1.0}, "momentum": {0.1: 0.1}},
    ),
    "agnews-bilstm": Preset(
        "AG News as in the paper, with its BiLSTM over GloVe vectors of 300 numbers",
        _shared(
            100,
            {"name": "agnews", "tokenizer": "words"},
            {"name": "bilstm", "data": "agnews", "classes": 4},
            BILSTM,
        ),
        server_lr=AGNEWS_BILSTM,
    ),
    # Not the paper's: what runs without a model hub, and without all of AG News.
    "20news-minilm": Preset(
        "20 Newsgroups with MiniLM, which installs as a package; padding left out",
        _shared(
            100,
            {"name": "20news", "tokenizer": "minilm"},
            {"name": "encoder", "source": "minilm", "classes": 20, "mask": True},
            {**DISTILBERT, "lr": 5e-4},
        ),
    ),
    "agnews-76k-minilm": Preset(
        "76,306 texts of AG News with MiniLM, which installs as a package; padding left out",
        _shared(
            100,
            {"name": "agnews-76k", "tokenizer": "minilm"},
            {"name": "encoder", "source": "minilm", "classes": 4, "mask": True},
            {**DISTILBERT, "lr": 5e-5},
        ),
    ),
    "agnews-76k-bilstm": Preset(
        "76,306 texts of AG News with the BiLSTM, over GloVe vectors of 100 numbers",
        _shared(
            100,
            {"name": "agnews-76k", "tokenizer": "words"},
            {
                "name": "bilstm",
                "vectors": "glove-6b-100d-341k",
                "data": "agnews-76k",
                "classes": 4,
            },
            BILSTM,
        ),
        server_lr=AGNEWS_BILSTM,
    ),
}


def shortened(settings: Mapping[str, Any]) -> str:
    """Of a run's dotted settings: "16 of 500 rounds" if a preset's run would have more; else "".

    A preset is known by its data set and model. Centralised, a round is an epoch.

    >>> shortened({"data.name": "mnist", "model.name": "cnn", "rounds": 2})
    '2 of 50 rounds'
    """
    rounds = settings.get("rounds")
    if not isinstance(rounds, int) or settings.get("data.partition") == "centralised":
        return ""
    for preset in PRESETS.values():
        known = {f"model.{key}": value for key, value in preset.tree["model"].items()}
        known["data.name"] = preset.tree["data"]["name"]
        if not preset.toy and all(settings.get(key) == value for key, value in known.items()):
            whole = preset.tree["rounds"]
            return f"{rounds} of {whole} rounds" if rounds < whole else ""
    return ""
