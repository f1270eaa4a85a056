"""Schedules of the server's rate: numbers by hand, and that only the step sees them."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglad import Server
from fedglad.optimizers import REGISTRY, SGD, Adagrad, Adam, Momentum, Optimizer, Yogi


def steps(optimizer: Optimizer, means: list[float]) -> list[float]:
    """By how much θ falls in each round of one client, in float64."""
    server = Server({"w": torch.zeros((), dtype=torch.float64)}, optimizer=optimizer)
    thetas = [0.0]
    for mean in means:
        server.step([{"w": torch.tensor(mean, dtype=torch.float64)}])
        thetas.append(float(server.params["w"]))
    return [before - after for before, after in pairwise(thetas)]


def test_cosine_by_hand():
    # cos 0, π/4, π/2, 3π/4, π: 2·(1, (1 + √½)/2, ½, (1 - √½)/2, 0), and 0 for ever
    half = math.sqrt(0.5)
    expected = [2, 1 + half, 1, 1 - half, 0, 0]
    optimizer = SGD(lr=2, schedule="cosine", over=4)
    assert steps(optimizer, [1] * 6) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert optimizer.rate(4) == optimizer.rate(1000) == 0


def test_step_by_hand():
    # after every two rounds a half: .8, .8, .4, .4, .2
    optimizer = SGD(lr=0.8, schedule="step", over=2, drop=0.5)
    assert steps(optimizer, [1] * 5) == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2], rel=1e-12)
    # a tenth is the default
    assert SGD(schedule="step", over=30).rate(89) == pytest.approx(0.01, rel=1e-12)


def test_a_moment_does_not_see_the_schedule():
    # ḡ = 1: m = 1, 1.9, 2.71; rates 1, .5, .25
    optimizer = Momentum(schedule="step", over=1, drop=0.5)
    assert steps(optimizer, [1, 1, 1]) == pytest.approx([1, 0.95, 0.6775], rel=1e-12)


ALL: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {}),
    (Momentum, {}),
    (Momentum, {"nesterov": True}),
    (Adam, {}),
    (Adam, {"form": "reddi"}),
    (Adagrad, {}),
    (Adagrad, {"beta1": 0.9}),
    (Yogi, {}),
]
MEANS = [1.0, -0.5, 0.25, 2.0, 1e-3, -1.0]
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "cosine", "over": 5},
    {"schedule": "step", "over": 2, "drop": 0.3},
]


def test_every_optimizer_is_tested():
    assert {cls for cls, _ in ALL} == set(REGISTRY.values())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["schedule"])
@pytest.mark.parametrize(("cls", "own"), ALL, ids=repr)
def test_every_step_is_the_constant_one_times_the_rate(cls: Any, own: Any, schedule: Any):
    plain = steps(cls(lr=0.5, **own), MEANS)
    scheduled = cls(lr=0.5, **own, **schedule)
    rates = [scheduled.rate(t) for t in range(len(MEANS))]
    expected = [step * rate / 0.5 for step, rate in zip(plain, rates, strict=True)]
    assert len(set(rates)) >= 3
    assert steps(scheduled, MEANS) == pytest.approx(expected, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("cls", "own"), ALL, ids=repr)
def test_a_constant_rate_is_the_rate_itself(cls: Any, own: Any):
    optimizer = cls(lr=0.3, **own)
    assert {optimizer.rate(t) for t in range(1000)} == {0.3}
    assert steps(optimizer, MEANS) == steps(cls(lr=0.3, over=3, drop=0.5, **own), MEANS)


def test_within_gives_a_cosine_its_end_and_changes_nothing_else():
    assert SGD(schedule="cosine").within(50) == SGD(schedule="cosine", over=50)
    assert Adam(schedule="cosine", lr=0.1).within(8) == Adam(schedule="cosine", lr=0.1, over=8)
    for other in (SGD(), SGD(schedule="cosine", over=3), SGD(schedule="step", over=3)):
        assert other.within(50) is other


def test_a_cosine_without_an_end_is_refused_before_the_first_round():
    message = r"SGD\(over=0\): must be the rounds until the rate is 0: set over=50, say, or call wi"
    with pytest.raises(ValueError, match=message):
        Server({"w": torch.zeros(1)}, optimizer=SGD(schedule="cosine"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "exp"}, r"\(schedule='exp'\): must be 'constant', 'cosine', 'step' or"),
        ({"over": -1}, r"\(over=-1\): must be 0 or more"),
        ({"schedule": "step"}, r"\(over=0\): must be 1 or more with schedule='step': the rounds b"),
        ({"schedule": "step", "over": 2, "drop": 0}, r"\(drop=0\): must be in \(0, 1\]"),
        ({"drop": 1.5}, r"\(drop=1.5\): must be in \(0, 1\]"),
        ({"drop": math.nan}, r"\(drop=nan\): must be in \(0, 1\]"),
    ],
)
@pytest.mark.parametrize("name", REGISTRY)
def test_a_bad_schedule_is_refused(name: str, settings: Any, message: str):
    cls: Any = REGISTRY[name]
    with pytest.raises(ValueError, match=cls.__name__ + message):
        cls(**settings)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["schedule"])
def test_a_schedule_goes_on_after_a_resume_and_a_skipped_round_does_not_count(
    schedule: Any, tmp_path: Path
):
    def server() -> Server:
        return Server({"w": torch.zeros(1)}, optimizer=Momentum(**schedule), min_clients=1)

    whole, first = server(), server()
    for k in range(6):
        whole.step([{"w": torch.ones(1) * (k + 1)}])
    for k in range(3):
        assert first.step([]).status == "skipped"
        first.step([{"w": torch.ones(1) * (k + 1)}])
    first.save(tmp_path / "state")
    resumed = Server.load(tmp_path / "state", {"w": torch.zeros(1)})
    assert resumed.optimizer == Momentum(**schedule)
    for k in range(3, 6):
        resumed.step([{"w": torch.ones(1) * (k + 1)}])
    assert torch.equal(resumed.params["w"], whole.params["w"])


@pytest.mark.parametrize("name", REGISTRY)
def test_a_rate_that_has_fallen_to_nothing_leaves_the_model_where_it_is(name: str):
    cls: Any = REGISTRY[name]
    for schedule in (
        {"schedule": "cosine", "over": 1},
        {"schedule": "step", "over": 1, "drop": 1e-200},
    ):
        server = Server({"w": torch.ones(3)}, optimizer=cls(**schedule))
        server.step([{"w": torch.ones(3)}])
        before = server.params["w"].clone()
        for _ in range(3):
            server.step([{"w": torch.ones(3)}])
        assert torch.equal(server.params["w"], before)
        assert before.isfinite().all()
