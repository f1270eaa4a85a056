"""Every row of every registry of a run: killed (-9) in its second round, resumed, the same bits."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from run_support import outcome

from fedglad.config.schema import REGISTRIES, Config, ConfigError, load
from fedglad.records import Round
from fedglad.runs import execute

TINY: dict[str, Any] = {
    "rounds": 3,
    "checkpoint_every": 1,
    "data.clients": 12,
    "data.partition": "dirichlet",  # clients of unequal size
    "data.alpha": 1.0,
    "model.name": "softmax",
    "model.features": 64,
    "client.epochs": 1,
    "client.batch_size": 48,  # three steps of most clients
    "client.optimizer": "sgd",
    "client.clip_norm": 0.0,
    "sampler.clients_per_round": 6,
    "engine.name": "serial",
}
SECTIONS = (
    *("client", "sampler", "transform", "filter"),
    *("weighting", "estimator", "server", "adapter"),
)
ROWS = [(section, name, {}) for section in SECTIONS for name in REGISTRIES[section]]
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("client", "scaffold", {"client.option": "II"}),
    ("client", "scaffold", {"client.option": "II", "client.rounds_schedule": "exponential"}),
    ("client", "fednova", {"client.optimizer": "sgdm"}),
    ("client", "plain", {"client.personal": "*bias"}),
    ("sampler", "clustered", {"sampler.by": "similarity"}),
    ("sampler", "uniform", {"sampler.availability": "bernoulli"}),
    ("sampler", "md", {"sampler.availability": "markov"}),
    ("sampler", "adafl", {"sampler.availability": "cyclic"}),
    ("transform", "topk", {"filter.name": "norm-clip", "filter.max_norm": 0.1}),
    ("estimator", "varp", {"sampler.name": "md"}),
    ("estimator", "mifa", {"sampler.name": "power-of-choice"}),
    ("estimator", "strat", {"estimator.strata": "random", "estimator.most": 3}),
    ("server", "adam", {"server.schedule": "cosine"}),
    ("server", "momentum", {"server.schedule": "step", "server.over": 1}),
    ("server", "sgd", {"server.schedule": "linear"}),
    ("server", "dog", {"average.name": "poly", "average.gamma": 8}),
    ("weighting", "fedau", {"sampler.availability": "bernoulli"}),
]


def adapters(section: str, name: str) -> list[str]:
    """With which adapters a row is run: with FedGLAD, whose state has to come back too.

    The parts of a server resume with any two others in test_combinations.py; clients do not occur
    there, so that their methods are run here with and without it.
    """
    if section == "adapter":
        return [name]
    return ["none", "glad"] if section == "client" or name == "krum" else ["glad"]


CASES = [
    pytest.param(*row, adapter, id="-".join([row[1], *map(str, row[2].values()), adapter]))
    for row in [*ROWS, *VARIANTS]
    for adapter in adapters(*row[:2])
]


def settings(section: str, name: str, more: dict[str, Any], adapter: str) -> dict[str, Any]:
    kept = {key: value for key, value in TINY.items() if section != "client" or "client" not in key}
    named = {f"{section}.name": name, **more}
    if name in ("moon", "fedrep"):  # these need a layer before the last
        kept["model.name"] = "mlp"
    if name == "fedbn":
        kept = {k: v for k, v in kept.items() if k != "model.features"}
        kept["model.name"] = "run_support:Normed"
    if section == "client":
        local = {"client.optimizer": "sgd", "client.clip_norm": 0.0, "client.epochs": 1}
        named = {**({} if name == "fedsgd" else local), **named}
    if name == "schedule-free":
        named["average.name"] = "none"  # it keeps one itself
    return kept | named | {"adapter.name": adapter}


def configured(given: dict[str, Any]) -> Config:
    return load("digits", given)[1]


def play(config: Config, folder: Path, *, killed_in: int | None = None) -> None:
    """Runs in a process of its own, which ends itself as kill -9 would: its round is recorded then,
    and not yet saved."""

    def on_round(done: Round) -> None:
        if done.t == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        try:
            execute("row", config, out=folder, resume=True, keep_state=True, on_round=on_round)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize(("section", "name", "more", "adapter"), CASES)
def test_killed_and_resumed_to_the_same_bits(
    section: str, name: str, more: dict[str, Any], adapter: str, tmp_path: Path
):
    if (section, name, adapter) == ("filter", "krum", "glad"):
        with pytest.raises(ConfigError, match="leaves one update"):
            configured(settings(section, name, more, adapter))
        return
    config = configured(settings(section, name, more, adapter))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = execute("row", config, out=whole, keep_state=True)
    stepped = [played["status"] for played in run.rounds()]
    assert stepped.count("stepped") >= 2, [played.get("reason") for played in run.rounds()]
    play(config, broken, killed_in=1)
    execute("row", config, out=broken, resume=True, keep_state=True)
    assert outcome(broken) == outcome(whole)
