"""The paper's presets on the real images, for three rounds of a tiny cohort."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_support import cli

from fedglad.config.presets import PRESETS
from fedglad.config.schema import load
from fedglad.data import store
from fedglad.data.sources import DataError
from fedglad.runs import Run

TINY = ["--set", "rounds=3", "--set", "sampler.clients_per_round=2", "--set", "client.epochs=1"]


def need(name: str) -> None:
    if store.entry_of(name) is None and not shutil.which("npm"):
        pytest.skip(f"{name} is not in the cache, and there is no npm to get it with")
    try:
        store.get(name)
    except DataError as reason:
        pytest.skip(f"{name} cannot be had here: {reason}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "steps", "size", "buffers"), [("mnist", 9, 600, 0), ("cifar10", 7, 500, 174)]
)
def test_three_rounds_of_a_preset(preset: str, steps: int, size: int, buffers: int, tmp_path: Path):
    need(preset)
    told = cli("run", preset, *TINY, "--set", "eval_every=3", "--out", tmp_path / "run", "--json")
    assert told.returncode == 0, told.stderr
    summary = json.loads(told.stdout)
    assert summary["rounds"] == 3
    assert summary["skipped"] == 0
    assert 0.05 < summary["final_accuracy"] < 1
    rounds = Run(tmp_path / "run").rounds()
    plan = load(preset)[1].plan()
    assert [plan.client.count(plan.data.size(k)) for k in (0, 99)] == [5 * steps] * 2
    assert plan.data.size(0) == size
    tensors = sum(1 for _ in plan.model.parameters())
    for played in rounds:
        assert [client["weight"] for client in played["clients"]] == [0.5, 0.5]
        assert len(played["groups"]) == len(played["tensors"]) == tensors
        assert all(group["gsi"] >= 1 - 1e-6 for group in played["groups"].values())
    assert rounds[0]["test_accuracy"] is None
    assert rounds[2]["test_accuracy"] == summary["final_accuracy"]
    assert sum(1 for _ in plan.model.buffers()) == buffers


RATES = {
    ("mnist", "sgd"): (1.0, 1.0),
    ("mnist", "momentum"): (0.5, 0.5),
    ("mnist", "adam"): (0.01, 0.01),
    ("cifar10", "sgd"): (0.5, 0.5),
    ("cifar10", "momentum"): (0.2, 0.1),
    ("cifar10", "adam"): (0.005, 0.005),
}
"""The paper's table of tuned server rates: at α = 0.1, and at 1.0."""


@pytest.mark.parametrize(("preset", "server"), RATES)
def test_the_papers_server_rates(preset: str, server: str):
    for alpha, rate in zip((0.1, 1.0), RATES[preset, server], strict=True):
        given: dict[str, Any] = {"server.name": server, "data.alpha": alpha}
        assert load(preset, given)[1].sections["server"].lr == rate
        assert load(preset, {**given, "server.lr": 0.7})[1].sections["server"].lr == 0.7


def test_a_server_that_the_paper_has_no_rate_for_keeps_its_own():
    assert load("mnist", {"server.name": "yogi"})[1].sections["server"].lr == 0.01


@pytest.mark.parametrize("preset", ["mnist", "cifar10"])
def test_the_papers_local_recipe(preset: str):
    _, config = load(preset)
    client, tree = config.sections["client"], PRESETS[preset].tree
    assert (client.optimizer, client.momentum, client.weight_decay) == ("sgdm", 0.9, 0)
    assert (client.batch_size, client.epochs, client.drop_last) == (64, 5, True)
    assert client.clip_norm == 1.0
    assert client.lr == {"mnist": 0.01, "cifar10": 0.1}[preset]
    assert config.rounds == {"mnist": 50, "cifar10": 500}[preset]
    assert config.sections["sampler"].clients_per_round == 10
    assert config.sections["data"].clients == tree["data"]["clients"] == 100
    assert (config.sections["adapter"].gamma, config.sections["adapter"].beta) == (0.02, 0.9)


@pytest.mark.parametrize("preset", ["mnist", "cifar10"])
def test_centralised_training_takes_whole_steps(preset: str):
    _, config = load(preset, {"data.partition": "centralised"})
    assert config.sections["server"].lr == 1.0
