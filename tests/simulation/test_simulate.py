"""`fedglad.simulate`: rounds from Python, own objects, and runs that can be compared."""

import json
import math
import time
from contextlib import closing
from types import GeneratorType
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, facts, tiny_data
from torch import Tensor, nn

import fedglad
from fedglad.config.schema import ConfigError, load
from fedglad.records import Record, Round
from fedglad.simulation.simulation import Simulation

SERIAL = {**TINY, "engine.name": "serial", "rounds": 3}


def run(overrides: dict[str, Any] | None = None, **own: Any) -> list[Round]:
    return list(fedglad.simulate("digits", {**SERIAL, **(overrides or {})}, **own))


def test_it_yields_rounds_one_by_one():
    rounds = fedglad.simulate("digits", SERIAL)
    assert isinstance(rounds, GeneratorType)
    found = next(rounds)
    assert isinstance(found, Round)
    assert isinstance(found.record, Record)
    assert found.t == 0
    assert len(found.cohort) == 3
    assert found.test_loss is not None
    assert found.test_accuracy is not None
    assert 0 <= found.test_accuracy <= 1
    assert found.seconds.keys() >= {"train", "test"}
    assert [later.t for later in rounds] == [1, 2]


def test_learning_happens():
    rounds = run({"rounds": 40, "client.epochs": 2, "data.alpha": 100.0})
    assert rounds[-1].test_accuracy is not None
    assert rounds[-1].test_accuracy > 0.8


def test_a_record_can_be_written_as_json():
    for found in run():
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


def test_the_same_call_gives_the_same_rounds_and_another_seed_others():
    def once(seed: int) -> list[Any]:
        given = {"rounds": 3, "engine.name": "serial", "client.epochs": 1, "seed": seed}
        return [facts(found) for found in fedglad.simulate("digits", given)]

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_an_average_that_the_optimizer_keeps_is_tested_as_one():
    free = {"server.name": "schedule-free", "average.name": "none"}
    rounds = run(free)
    assert all(done.averaged_accuracy is not None for done in rounds)
    # x is θ after the first round, and not after the second
    assert rounds[0].averaged_loss == rounds[0].test_loss
    assert rounds[1].averaged_loss != rounds[1].test_loss
    with pytest.raises(ConfigError, match="ScheduleFree keeps an average itself"):
        run({**free, "average.name": "ema"})


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_eval_every(every: int):
    rounds = run({"rounds": 5, "eval_every": every})
    tested = [found.t for found in rounds if found.test_accuracy is not None]
    assert tested == [t for t in range(5) if (t + 1) % every == 0 or t == 4]
    assert [f.t for f in rounds if f.test_loss is not None] == tested


def test_testing_less_often_changes_nothing_else():
    def trained(every: int) -> list[Any]:
        return [found.record.to_dict() for found in run({"eval_every": every})]

    assert trained(1) == trained(3)


# ------------------------------------------------------------------------------------ own objects


class Least:
    """The least that data must have, as the docstring of `simulate` says."""

    clients = 6

    def __init__(self) -> None:
        self.inner = tiny_data(*range(5, 11), features=4)

    def size(self, k: int) -> int:
        return self.inner.size(k)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return self.inner.client(k)

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_an_own_model_and_own_data(engine: str):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"rounds": 2, "engine.name": engine, "sampler.clients_per_round": 6}
    rounds = list(fedglad.simulate("digits", given, model=model, data=Least()))
    assert [sorted(found.cohort) for found in rounds] == [[0, 1, 2, 3, 4, 5]] * 2
    assert rounds[0].label_similarity is None  # it has no labels(k)
    shares = {c["id"]: c["weight"] for c in rounds[0].record.clients}
    assert shares == pytest.approx({k: (5 + k) / 45 for k in range(6)})
    assert rounds[0].record.statistics is not None
    assert rounds[0].record.statistics.N == 6
    # The simulation works on a copy; the caller's model is where it started.
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_an_own_model_starts_where_it_is():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model[1].weight.fill_(0.25)  # type: ignore[union-attr]
    plan = load("digits", SERIAL)[1].plan(model=model)
    with closing(Simulation(plan)) as simulation:
        assert simulation.server.params["1.weight"].eq(0.25).all()


def test_a_client_without_samples_is_left_out_with_a_reason_one_understands():
    class Holey(Least):
        def client(self, k: int) -> tuple[Tensor, Tensor]:
            x, y = super().client(k)
            return (x[:0], y[:0]) if k == 2 else (x, y)

        def size(self, k: int) -> int:
            return 0 if k == 2 else super().size(k)

    given = {"rounds": 1, "engine.name": "serial", "sampler.clients_per_round": 6}
    (found,) = fedglad.simulate("digits", given, model=nn.Linear(4, 10), data=Holey())
    assert found.record.stepped
    assert found.record.rejected.keys() == {2}
    assert "sample" in found.record.rejected[2]


def test_a_mistake_in_the_configuration_is_raised():
    with pytest.raises(ValueError, match="did you mean 'glad'"):
        next(iter(fedglad.simulate("digits", {"adapter.name": "gladd"})))
    with pytest.raises(ValueError, match="more than the 6 clients there are"):
        run({"sampler.clients_per_round": 7, "model.features": 4}, data=Least())


def test_a_large_population_costs_nothing_until_it_is_sampled():
    """Neither when the run starts nor in a round: a hundred times the clients, the same time."""

    def seconds(clients: int) -> float:
        given = {"engine.name": "serial", "rounds": 2, "data.clients": clients, "data.samples": 16}
        begin = time.perf_counter()
        list(fedglad.simulate("synthetic", given))
        return time.perf_counter() - begin

    seconds(100)
    few = seconds(1000)
    for many in (100_000, 10**6):
        assert seconds(many) < 5 * few + 0.5


# ------------------------------------------------------------------------------- label similarity


class Labelled:
    """Four clients with these class counts, and a zero input for every sample."""

    clients = 4
    counts = ((2, 0, 0), (0, 2, 0), (0, 0, 4), (1, 1, 0))

    def size(self, k: int) -> int:
        return sum(self.counts[k])

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        y = torch.from_numpy(np.repeat(np.arange(3), self.counts[k]))
        return torch.zeros(len(y), 2), y

    def test(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(3, 2), torch.arange(3)

    def labels(self, k: int) -> np.ndarray:
        return np.array(self.counts[k])


def test_label_similarity_by_hand():
    # Everybody: (3, 3, 4), of length √34.
    # Round 0, clients 0 and 1: (2, 2, 0), √8:  (6 + 6) / (√34 √8)      = 12 / √272
    # Round 1, client 2:        (0, 0, 4), 4:    16 / (4 √34)            = 4 / √34
    # Round 2, all:             (3, 3, 4):       1
    given = {
        "engine.name": "serial",
        "rounds": 3,
        "sampler": {
            "name": "scripted",
            "clients_per_round": 1,
            "cohorts": {"0": [0, 1], "1": [2], "2": [3, 1, 0, 2]},
        },
    }
    rounds = list(fedglad.simulate("digits", given, model=nn.Linear(2, 3), data=Labelled()))
    wanted = [12 / math.sqrt(272), 4 / math.sqrt(34), 1.0]
    assert [found.label_similarity for found in rounds] == pytest.approx(wanted, rel=1e-12)


# ----------------------------------------------------------------------------------------- paired


class Recording(nn.Linear):
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__(64, 10)
        with torch.no_grad():
            self.weight.fill_(0.01)
            self.bias.zero_()

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            type(self).seen.append(input.clone())
        return super().forward(input.flatten(1))


@pytest.mark.parametrize(
    "change",
    [
        {"adapter.name": "none"},
        {"server.name": "adam"},
        {"weighting.name": "equal"},
        {"filter.name": "norm-clip"},
    ],
    ids=str,
)
def test_two_runs_that_differ_in_their_method_meet_the_same_batches(change: dict[str, Any]):
    def shown(overrides: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[Tensor]]:
        Recording.seen = []
        rounds = run({"client.epochs": 2, **overrides}, model=Recording())
        return [found.cohort for found in rounds], Recording.seen

    cohorts, batches = shown({})
    other_cohorts, other_batches = shown(change)
    assert cohorts == other_cohorts
    assert len(batches) == len(other_batches) > 0
    assert all(a.equal(b) for a, b in zip(batches, other_batches, strict=True))


def test_two_runs_that_differ_in_the_adapter_are_equal_until_it_acts():
    cnn = {"model": {"name": "small-cnn"}, "rounds": 3, "engine.name": "serial"}
    glad = list(fedglad.simulate("digits", {**cnn, "adapter.gamma": 0.5}))
    none = list(fedglad.simulate("digits", {**cnn, "adapter.name": "none"}))
    # In round 0 the baseline is the indicator itself: the factor is 1 and all is equal, but for
    # the baseline, which only Glad has.
    first, other = facts(glad[0]), facts(none[0])
    for group in (*first["groups"].values(), *other["groups"].values()):
        assert group["scale"] == 1
        group.pop("baseline")
    assert first == other
    # In round 1 the clients still start from the same model.
    assert glad[1].record.clients == none[1].record.clients
    assert glad[1].test_loss != none[1].test_loss
    assert glad[2].cohort == none[2].cohort


def test_the_partition_depends_on_its_own_seed_alone():
    def sizes(**overrides: Any) -> list[list[int]]:
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        data: Any = load("digits", given)[1].sections["data"].load_federation()
        return [data.labels(k).tolist() for k in range(50)]

    assert sizes(seed=1) == sizes(seed=2)
    assert sizes(data__seed=1) != sizes(data__seed=2)


def test_the_first_model_depends_on_the_runs_seed():
    def start(**overrides: Any) -> Tensor:
        model = load("digits", overrides)[1].plan().model
        return nn.utils.parameters_to_vector(model.parameters())

    assert start(seed=1).equal(start(seed=1, rounds=3))
    assert not start(seed=1).equal(start(seed=2))
