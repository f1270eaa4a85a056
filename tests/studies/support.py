"""The paper's experiments on tiny data: the same cells, with digits in place of every data set."""

from dataclasses import replace
from typing import Any

from fedglad.studies.paper.cells import Cell, Experiment
from fedglad.studies.paper.experiments import EXPERIMENTS

ROUNDS, BAD = 3, 1
RATES = {"sgd": 1.0, "momentum": 0.5, "adam": 0.01}

DIGITS: dict[str, Any] = {
    "rounds": ROUNDS,
    "data.name": "digits",
    "data.clients": 20,
    "model.name": "mlp",
    "model.features": 64,
    "model.hidden": [8],
    "client.lr": 0.5,
    "client.batch_size": 16,
    "client.clip_norm": 1.0,
    "sampler.clients_per_round": 3,
    "engine.name": "serial",
}


def tiny(cell: Cell, **others: Any) -> Cell:
    """The cell with its own method, adapter and sampler; all data sets have the same rates."""
    own = {key: value for key, value in cell.overrides.items() if not key.startswith("model.")}
    merged = {**own, **DIGITS, **others}
    if own["server.lr"] != 0.8:  # the control's
        merged["server.lr"] = RATES[own["server.name"]]
    if "client.mu" in own:
        merged["client.mu"] = 0.1
    merged["client.epochs"] = 1 + int(own.get("client.epochs", 5)) // 5
    if "sampler.cohorts" in own:
        merged["sampler.cohorts"] = {str(BAD): [4, 5, 6]}
    if "sampler.clients_per_round" in own:
        merged["sampler.clients_per_round"] = int(own["sampler.clients_per_round"]) // 5 + 1
    return replace(cell, preset="digits", overrides=merged)


def shrunk(experiment: Experiment, **others: Any) -> Experiment:
    """The experiment with tiny cells."""
    cells = tuple(tiny(cell, **others) for cell in experiment.cells)
    return replace(experiment, cells=cells, least_rounds=min(experiment.least_rounds, BAD + 1))


TINY = {name: shrunk(experiment) for name, experiment in EXPERIMENTS.items()}
