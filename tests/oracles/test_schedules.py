"""Schedules of rates: numbers by hand, and that only the step sees the server's."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedglad import Server, schedules
from fedglad.clients import FedSGD, Plain
from fedglad.core import checkpoint
from fedglad.core.checkpoint import CheckpointError
from fedglad.optimizers import (
    REGISTRY,
    SGD,
    Adagrad,
    Adam,
    DoG,
    FedEve,
    Momentum,
    Optimizer,
    ScheduleFree,
    Yogi,
)
from fedglad.schedules import Schedule


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


def test_linear_by_hand():
    # 2·(1, ¾, ½, ¼, 0), and 0 for ever
    optimizer = SGD(lr=2, schedule="linear", over=4)
    assert steps(optimizer, [1] * 6) == [2, 1.5, 1, 0.5, 0, 0]
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
    (FedEve, {}),
]
HISTORIES: list[tuple[type[Optimizer], dict[str, Any]]] = [(ScheduleFree, {}), (DoG, {})]
"""Rules whose later steps depend on where the earlier ones led."""
MEANS = [1.0, -0.5, 0.25, 2.0, 1e-3, -1.0]
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "linear", "over": 5},
    {"schedule": "cosine", "over": 5},
    {"schedule": "step", "over": 2, "drop": 0.3},
    {"schedule": "exponential", "over": 2, "drop": 0.3},
]


def test_every_optimizer_is_tested():
    assert {cls for cls, _ in ALL + HISTORIES} == set(REGISTRY.values())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["schedule"])
@pytest.mark.parametrize(("cls", "own"), ALL, ids=repr)
def test_every_step_is_the_constant_one_times_the_rate(cls: Any, own: Any, schedule: Any):
    plain = steps(cls(lr=0.5, **own), MEANS)
    scheduled = cls(lr=0.5, **own, **schedule)
    rates = [scheduled.rate(t) for t in range(len(MEANS))]
    expected = [step * rate / 0.5 for step, rate in zip(plain, rates, strict=True)]
    assert len(set(rates)) >= 3
    assert steps(scheduled, MEANS) == pytest.approx(expected, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("cls", "own"), ALL + HISTORIES, ids=repr)
def test_a_constant_rate_is_the_rate_itself(cls: Any, own: Any):
    optimizer = cls(lr=0.3, **own)
    assert {optimizer.rate(t) for t in range(1000)} == {0.3}
    assert steps(optimizer, MEANS) == steps(cls(lr=0.3, over=3, drop=0.5, **own), MEANS)


def test_within_gives_a_falling_rate_its_end_and_changes_nothing_else():
    assert SGD(schedule="cosine").within(50) == SGD(schedule="cosine", over=50)
    assert SGD(schedule="linear").within(50) == SGD(schedule="linear", over=50)
    assert Adam(schedule="cosine", lr=0.1).within(8) == Adam(schedule="cosine", lr=0.1, over=8)
    for other in (SGD(), SGD(schedule="cosine", over=3), SGD(schedule="step", over=3)):
        assert other.within(50) is other


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_without_an_end_is_refused_before_the_first_round(schedule: Any):
    message = r"SGD\(over=0\): must be the rounds until the rate is 0: set over=50, say, or call wi"
    with pytest.raises(ValueError, match=message):
        Server({"w": torch.zeros(1)}, optimizer=SGD(schedule=schedule))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedule": "poly"},
            r"\(schedule='poly'\): must be 'constant', 'linear', 'cosine', 's",
        ),
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
        {"schedule": "linear", "over": 1},
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


def test_exponential_by_hand():
    # a quarter after every 2 rounds: 1, ½, ¼, ⅛
    optimizer = SGD(schedule="exponential", over=2, drop=0.25)
    assert steps(optimizer, [1] * 4) == pytest.approx([1, 0.5, 0.25, 0.125], rel=1e-12)
    # of a run of 8 rounds, the whole of it: 0.0001^(t/8)
    whole = SGD(schedule="exponential", drop=1e-4).within(8)
    assert [whole.rate(t) for t in (0, 4, 8)] == pytest.approx([1, 1e-2, 1e-4], rel=1e-12)


@dataclass(frozen=True, kw_only=True)
class Rising(Schedule):
    """An own one: it rises in the first `rounds`, and then stays."""

    ends: ClassVar[bool] = False

    def factor(self, t: int, rounds: int) -> float:
        return min((t + 1) / rounds, 1)


@dataclass(frozen=True, kw_only=True)
class Negative(Schedule):
    ends: ClassVar[bool] = False

    def factor(self, t: int, rounds: int) -> float:
        return -1.0


RISING = f"{__name__}:Rising"


def test_an_own_schedule_is_named_and_a_file_may_not_name_it(tmp_path: Path):
    assert steps(SGD(schedule=RISING, over=4), [1] * 5) == [0.25, 0.5, 0.75, 1, 1]
    server = Server({"w": torch.zeros(1)}, optimizer=SGD(schedule=RISING, over=4))
    server.step([{"w": torch.ones(1)}])
    server.save(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"saved with an own optimizer \(SGD\): pass it agai"):
        Server.load(tmp_path / "state", {"w": torch.zeros(1)})
    own = SGD(schedule=RISING, over=4)
    again = Server.load(tmp_path / "state", {"w": torch.zeros(1)}, optimizer=own)
    assert again.optimizer.rate(again.round) == 0.5


def test_a_forged_file_that_names_code_is_refused_and_nothing_is_loaded(tmp_path: Path):
    registry: dict[str, type] = dict(REGISTRY)
    with pytest.raises(CheckpointError, match="it names code, 'os:system', which no file may do"):
        checkpoint.build({"name": "sgd", "schedule": "os:system"}, registry)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Schedule", r"\(schedule='no_such.*must be one that can be loaded: No mod"),
        ("fedglad.optimizers:SGD", "must be a dataclass that is derived from fedglad.schedules.Sc"),
        (f"{__name__}:Negative", r"must be positive: it is -1.0 in round 0"),
    ],
)
def test_an_own_schedule_that_cannot_be_one_is_refused(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        SGD(schedule=name).rate(0)


@pytest.mark.parametrize("name", schedules.REGISTRY)
def test_every_row_begins_at_the_rate_and_never_rises(name: str):
    made = schedules.schedule(name, drop=0.5)
    factors = [made.factor(t, 7) for t in range(20)]
    assert factors[0] == 1
    assert all(0 <= after <= before for before, after in pairwise(factors))
    assert Plain(rounds_schedule=name, over=7).of_round(0).lr == Plain().lr


@pytest.mark.parametrize("name", schedules.REGISTRY)
def test_clients_and_server_have_the_same_rates(name: str):
    settings: dict[str, Any] = {"over": 3, "drop": 0.3}
    client = Plain(lr=0.2, rounds_schedule=name, **settings).within(3)
    server = SGD(lr=0.2, schedule=name, **settings)
    assert [client.of_round(t).lr for t in range(3)] == [server.rate(t) for t in range(3)]
    assert client.of_round(2).of_round(1) == client.of_round(2)  # it is the round's already


def test_a_clients_rate_may_not_fall_to_nothing():
    client = Plain(rounds_schedule="linear", over=5)
    assert client.within(5) is client
    message = r"Plain\(over=5\): clients would learn nothing in round 5: set over=8, or 0, for the"
    with pytest.raises(ValueError, match=message):
        client.within(8)
    assert Plain(rounds_schedule="linear").within(8).over == 8
    with pytest.raises(
        ValueError, match=r"FedSGD\(rounds_schedule='linear'\): .*set server.lr|use"
    ):
        FedSGD(rounds_schedule="linear")
