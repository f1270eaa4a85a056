"""What the paper publishes, from paper.toml: data sets, the settings of its appendix, its tables.

What it leaves open is marked as ours.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglad.config.presets import PRESETS
from fedglad.config.schema import ConfigError

ALPHAS = (0.1, 1.0)
SEEDS = (1, 2, 3)
CLIENTS, COHORT = 100, 10
GAMMA, BETA = 0.02, 0.9

PAPER: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text("utf-8"))


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A row of Tables 5 (statistics, model, rounds) and 14 (local training)."""

    title: str
    images: bool  # or texts
    train: int
    test: int
    classes: int
    model: str
    rounds: int
    lr: float
    batch_size: int
    optimizer: str
    epochs: int


DATA = {name: DataSet(**row) for name, row in PAPER["data"].items()}
"""By the name that the data set and its preset have here."""

METHODS: Mapping[str, Mapping[str, str]] = PAPER["methods"]
"""What the paper's names are called in a configuration."""

SERVER_LR: Mapping[str, Mapping[str, Mapping[float, float]]] = {
    method: {data: PRESETS[data].server_lr[names["server.name"]] for data in DATA}
    for method, names in METHODS.items()
}
"""Table 16: the server's rate by method, data set and α; a preset has them by its optimizer."""

MU = {data: dict(zip(ALPHAS, row, strict=True)) for data, row in PAPER["mu"].items()}
"""Table 13: FedProx's μ by data set and α."""

GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = PAPER["grids"]
"""Table 15: where the server's rates were searched, by server.name, for images and for texts."""
MU_GRID = (1.0, 0.1, 0.01, 0.001)
GAMMA_GRID = (0.01, 0.02, 0.03, 0.04, 0.05)
EPOCHS_GRID = (1, 3, 5, 10)


def grid(key: str, tree: Mapping[str, Any]) -> tuple[float, ...]:
    """Where the paper searched for a key of this configuration, to which it may be only similar.

    >>> grid("client.mu", {})
    (1.0, 0.1, 0.01, 0.001)
    """
    others = {"client.mu": MU_GRID, "adapter.gamma": GAMMA_GRID, "client.epochs": EPOCHS_GRID}
    if key in others:
        return others[key]
    if key != "server.lr":
        known = ", ".join(("server.lr", *others))
        raise ConfigError(f"--grid {key}=paper: the paper has grids of {known}")
    data, server = tree["data"]["name"], tree["server"]["name"]
    images = DATA[data].images if data in DATA else not data.startswith(("20news", "agnews"))
    if server not in GRIDS:
        raise ConfigError(
            f"--grid server.lr=paper: the paper has no grid for server.name = {server!r}"
        )
    return tuple(GRIDS[server]["images" if images else "texts"])


def written_out(grids: Sequence[str], tree: Mapping[str, Any]) -> list[str]:
    """Grids of a command line, KEY=paper replaced by the paper's values for a configuration.

    >>> written_out(["client.epochs=paper", "seed=1,2"], {})
    ['client.epochs=1,3,5,10', 'seed=1,2']
    """
    written: list[str] = []
    for text in grids:
        key, _, values = text.partition("=")
        paper = grid(key.strip(), tree) if values.strip() == "paper" else ()
        written.append(f"{key}={','.join(map(str, paper))}" if paper else text)
    return written


SCAFFOLD_EPOCHS = 1  # on images; with E = 5 it did not converge, on CIFAR-10 not even so


BILSTM: Mapping[str, Mapping[str, Any]] = PAPER["bilstm"]
"""Table 17 by data set: rounds, γ, and the local settings as `client`."""

BILSTM_LR = {
    data: {
        method: PRESETS[f"{data}-bilstm"].server_lr[METHODS[method]["server.name"]][0.1]
        for method in ("FedAvg", "FedAvgM")
    }
    for data in BILSTM
}
"""The server's rates in the same table, by data set and method."""

# ------------------------------------------------------------------------------------- the tables

Key = tuple[str | float | bool, ...]


@dataclass(frozen=True)
class Value:
    """A published mean, with its deviation where there is one."""

    mean: float
    std: float | None = None


def _values(columns: Sequence[Sequence[str | float]], rows: Mapping[str, str]) -> dict[Key, Value]:
    values = dict[Key, Value]()
    for row, numbers in rows.items():
        before: Key = ()
        for word in row.split():
            before += (word,) if word in DATA else (word.rstrip("+"), word.endswith("+"))
        for column, text in zip(columns, numbers.split(), strict=True):
            key = sorted((*before, *column), key=lambda part: part not in DATA)  # the data first
            values[tuple(key)] = Value(*map(float, text.split("±")))
    return values


TABLES = {name: _values(one["columns"], one["rows"]) for name, one in PAPER["tables"].items()}
"""By their names in paper.toml: {(data set, method, with FedGLAD, …what else a column is): value}.

Where a table has no methods, its keys have none.
"""

SIMILARITY = Value(0.4753)
"""Pearson's r of GSI and label similarity over the rounds of CIFAR-10, in the text."""

# ------------------------------------------------------------------ what the paper does not publish

RETUNED = "the server's rate: re-tuned in the paper and not published, here that of the main table"
"""Of the tables of sampling ratios and sampling strategies."""

CENTRALISED_EPOCHS: Mapping[str, int] = {"cifar10": 100, "mnist": 20, "20news": 10, "agnews": 5}
UNPUBLISHED_EPOCHS = "the number of epochs"

GAMMAS = (0.0, *GAMMA_GRID, float("inf"))
UNPUBLISHED_GAMMAS = "the values of γ between 0 and ∞: those the paper recommends to search"

THEIR_DRAWS: Mapping[str, str] = {"data.partition": "fednlp", "sampler.name": "fedml"}
"""The clients and cohorts of the authors' code, which seeds NumPy's legacy generator with 0 for the
partition of images and with the round for a cohort."""

BAD_ROUND = 39  # the 40th
BAD_COHORT = (8, 17, 20, 29, 31, 36, 46, 50, 51, 56)
"""The ten clients of MNIST's partition (α = 0.1, data.seed 0) with the largest shares of one class:
of all their images 94.6 % are zeros."""
UNPUBLISHED_COHORT = "the clients of the bad round: the ten that hold most of one digit"
