"""A run of every task: it learns, in every engine, and a killed one goes on to the same bits."""

import copy
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import facts, outcome
from torch import Tensor, nn

from fedglad.config.schema import Config, load
from fedglad.runs import execute
from fedglad.simulation.simulation import Simulation
from tasks.support import CASES, SETTINGS, Case, ids_alone, lora, masked_ids, unigram


def run(
    case: Case, model: nn.Module, **more: Any
) -> tuple[list[dict[str, Any]], dict[str, Tensor], list[Any]]:
    given = {**SETTINGS, "client.lr": 0.5, **case.overrides}
    given |= {key.replace("__", "."): value for key, value in more.items()}
    config = load("digits", given)[1]
    plan = config.plan(model=copy.deepcopy(model), data=case.data(), task=case.task)
    with closing(Simulation(plan)) as simulation:
        rounds = list(simulation.rounds())
        state = {name: value.clone() for name, value in simulation.server.state.items()}
    return [facts(found) for found in rounds], state, rounds


def built(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.model()


@pytest.mark.parametrize("name", CASES)
def test_it_learns_and_serial_is_local_to_the_bit(name: str):
    case = CASES[name]
    model = built(case)
    serial, state, rounds = run(case, model)
    assert all(found.record.status == "stepped" for found in rounds)
    assert not any(found.record.rejected for found in rounds)
    last = rounds[-1]
    assert last.test_loss < rounds[0].test_loss
    score = last.scored() if last.score.name != "accuracy" else last.test_accuracy
    x, y = case.data().test()
    targets: Any = x if y is None else y
    guess = case.guess(targets)
    if name == "function":
        assert last.test_loss < float((targets - targets.mean()).square().mean())
    else:
        assert last.score.better(score, guess), (score, guess)
    other, other_state, _ = run(case, model, engine__name="local", engine__workers=2)
    assert other == serial
    assert all(torch.equal(other_state[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.batched])
def test_batched_is_serial_but_for_the_last_digits(name: str):
    case = CASES[name]
    model = built(case)
    _, serial, rounds = run(case, model, rounds=3)
    _, state, side_by_side = run(case, model, rounds=3, engine__name="batched")
    assert not any(found.record.rejected for found in side_by_side)
    for key, value in serial.items():
        torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4)
    for a, b in zip(rounds, side_by_side, strict=True):
        assert b.test_loss == pytest.approx(a.test_loss, rel=1e-3)
        losses = [[c["loss"] for c in found.record.clients] for found in (a, b)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_an_lstm_is_refused_by_the_batched_engine_in_a_line():
    case = CASES["lstm"]
    with pytest.raises(ValueError, match=r"use engine.name = local") as caught:
        run(case, built(case), engine__name="batched")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "data"), [("serial", masked_ids), ("local", ids_alone), ("batched", ids_alone)]
)
def test_only_the_adapters_of_a_language_model_train(engine: str, data: Any):
    case = Case(data, lora, unigram, overrides={"task.name": "causal-lm", "client.lr": 1.0})
    model = built(case)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, state, rounds = run(case, model, engine__name=engine)
    assert not any(found.record.rejected for found in rounds)
    moved = {name for name, value in state.items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert rounds[-1].scored() < rounds[0].scored()


@pytest.mark.parametrize("name", ["tuple", "dict", "multilabel", "segmentation", "next-token"])
def test_a_validation_set_is_taken_out_of_any_samples(name: str):
    case = CASES[name]
    model = built(case)
    given = {"rounds": 2, "data__validation": 0.25}
    serial, _, rounds = run(case, model, **given)
    assert run(case, model, **given, engine__name="local")[0] == serial
    assert not any(found.record.rejected for found in rounds)
    for found in serial:
        assert found["validation_loss"] > 0
        assert found["validation_loss"] != found["test_loss"]


@pytest.mark.parametrize("name", ["tuple", "next-token"])
def test_clients_are_asked_for_the_loss_of_their_task(name: str):
    case = CASES[name]
    model = built(case)
    serial = run(case, model, rounds=2, sampler__name="power-of-choice")[0]
    local = run(case, model, rounds=2, sampler__name="power-of-choice", engine__name="local")[0]
    assert serial == local
    assert serial != run(case, model, rounds=2)[0]


# --------------------------------------------------------------------------------------- resuming


def killed(folder: Path, after: int, config: Config) -> None:
    """A run whose process is killed (kill -9) when a round was recorded."""

    def on_round(found: Any) -> None:
        if found.t == after:
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        try:
            execute("task", config, out=folder, on_round=on_round)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "task"),
    [
        ("characters", "Characters", {"name": "next-token"}),
        ("numbers", "one", {"name": "regression"}),
        ("several", "three", {"name": "multilabel"}),
        ("pixels", "convolution", {"name": "segmentation", "ignore": 255}),
        ("masked_ids", "lora", {"name": "causal-lm"}),
        ("numbers", "one", {"name": "tasks.support:Doubled"}),
    ],
    ids=["next-token", "regression", "multilabel", "segmentation", "causal-lm", "own"],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    data: str, model: str, task: dict[str, Any], tmp_path: Path
):
    given = {
        **SETTINGS,
        "rounds": 5,
        "checkpoint_every": 2,
        "server.name": "adam",
        "average.name": "ema",
        "data.name": f"tasks.support:{data}",
        "model.name": f"tasks.support:{model}",
        **{f"task.{key}": value for key, value in task.items()},
    }
    config = load("digits", given)[1]
    execute("task", config, out=tmp_path / "whole")
    killed(tmp_path / "cut", 3, config)
    execute("task", config, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    again = load(tmp_path / "cut" / "config.toml", trust_code=True)[1]
    assert again.hash() == config.hash()
