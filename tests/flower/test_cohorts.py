"""Who takes part: the simulator's cohorts, whatever the node ids and the order of arrival."""

import copy
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedglad import Glad, Guard
from fedglad.averages import EMA
from fedglad.clients.method import Plain
from fedglad.core.layout import split
from fedglad.estimators import VARP
from fedglad.filters import Filter
from fedglad.flower import FedGLAD
from fedglad.flower.nodes import largest_usual
from fedglad.optimizers import SGD, Adam
from fedglad.records import Several
from fedglad.samplers.adafl import AdaFL
from fedglad.samplers.base import Sampler
from fedglad.samplers.clustered import Clustered
from fedglad.samplers.md import MD
from fedglad.samplers.power_of_choice import PowerOfChoice
from fedglad.samplers.scripted import Scripted
from fedglad.samplers.uniform import Uniform
from fedglad.simulation.engines.base import Updates
from fedglad.simulation.simulation import Parts, Simulation
from fedglad.weights import Samples

from .grid import Arrays, Clock, Linear, LocalGrid, bits, by, clients, model, record, who

ROUNDS = 8
COUNT = 9


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


def cohorts(grid: LocalGrid, rounds: int = ROUNDS, **settings: Any) -> list[list[Any]]:
    shape: dict[str, Any] = {"fraction_evaluate": 0.0, "nodes": "partition-id"}
    strategy = FedGLAD(**shape | settings)
    strategy.start(grid, record(model()), num_rounds=rounds)
    return [who(told) for told in strategy.records]


# --------------------------------------------------------------------------------- the simulator's


class Engine:
    """The simulator's engine over the same NumPy clients."""

    def __init__(self, population: list[Linear], module: nn.Module) -> None:
        self.population, self.layout = population, split(module)[0]

    def start(self, job: Any) -> "Engine":
        return self

    def _arrays(self, packed: Any) -> Arrays:
        views = self.layout.views(packed[0])
        return {name: views[name].numpy().copy() for name in ("weight", "bias")}

    def train(self, t: int, cohort: Sequence[int], packed: Any, sent: Any) -> Updates:
        arrays = self._arrays(packed)
        for k in cohort:
            found = by(self.population)(k, arrays)
            trained = self.layout.pack(
                {n: torch.as_tensor(x) for n, x in (found.model or {}).items()}
            )
            yield Several([replace(found, model=None, delta=packed[0] - trained)])

    def losses(self, asked: Sequence[int], packed: Any) -> list[float]:
        return [self.population[k].loss(self._arrays(packed)) for k in asked]

    def evaluate(self, packed: Any) -> dict[str, float]:
        return {"loss": 0.0, "accuracy": 0.0}

    def close(self) -> None: ...


class Data:
    """Of the data only the sizes are asked for."""

    def __init__(self, population: list[Linear]) -> None:
        self.population, self.clients = population, len(population)

    def size(self, k: int) -> int:
        return self.population[k].n

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    test = cast(Any, client)


def simulated(sampler: Sampler, seed: int) -> tuple[list[list[int]], Any]:
    """Cohorts and the last model of a run of the simulator."""
    module = nn.Linear(3, 2)
    module.load_state_dict({n: torch.from_numpy(x) for n, x in model().items()})
    population = clients(COUNT)
    plan = Parts(
        rounds=ROUNDS,
        seed=seed,
        eval_every=100,
        model=module,
        data=Data(population),
        client=Plain(),
        sampler=sampler,
        optimizer=SGD(),
        adapter=Glad(),
        filter=Filter(),
        weighting=Samples(),
        guard=Guard(),
        engine=Engine(population, module),
    )
    with closing(Simulation(plan)) as simulation:
        found = [list(played.cohort) for played in simulation.rounds()]
        return found, bits(copy.deepcopy(simulation.server.state))


SAMPLERS: dict[str, Sampler] = {
    "uniform": Uniform(clients_per_round=4),
    "uniform, by the run": Uniform(clients_per_round=4, seed="run"),
    "uniform, by a number": Uniform(clients_per_round=4, seed=11),
    "uniform, of those that can be reached": Uniform(
        clients_per_round=4, availability="bernoulli", reachable=0.6
    ),
    "md": MD(clients_per_round=4),
    "adafl": AdaFL(clients_per_round=4, alpha=0.2),
    "clustered": Clustered(clients_per_round=3, by="similarity"),
    "clustered by size": Clustered(clients_per_round=3, by="size"),
    "power of choice": PowerOfChoice(clients_per_round=3, candidates=6),
    "scripted": Scripted(clients_per_round=4, cohorts={"0": [8, 1], "3": [2, 5, 7]}),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_cohorts_and_model_are_the_simulators(name: str):
    expected, last = simulated(SAMPLERS[name], seed=5)
    strategy = FedGLAD(fraction_evaluate=0.0, sampler=SAMPLERS[name], seed=5, nodes="partition-id")
    found = strategy.start(LocalGrid(clients(COUNT)), record(model()), num_rounds=ROUNDS)
    assert [who(told) for told in strategy.records] == expected
    assert bits(found.arrays) == last
    assert len({tuple(cohort) for cohort in expected}) > 2


def test_by_default_the_cohorts_are_uniform_and_of_flowers_size():
    """N = 9: max(int(9 · 0.5), 2) = 4, and max(int(9 · 0.1), 3) = 3."""
    drawn = simulated(Uniform(clients_per_round=4), seed=0)[0]
    assert cohorts(LocalGrid(clients(COUNT)), fraction_train=0.5) == drawn
    drawn = simulated(Uniform(clients_per_round=3), seed=0)[0]
    found = cohorts(LocalGrid(clients(COUNT)), fraction_train=0.1, min_train_nodes=3)
    assert found == drawn


# ------------------------------------------------------------------------------- identity of nodes


ANYHOW = [*((name, "partition-id") for name in SAMPLERS), ("adafl", "name"), ("md", "key")]


@pytest.mark.parametrize(("name", "nodes"), ANYHOW)
def test_neither_node_ids_nor_arrival_change_the_cohorts(name: str, nodes: Any):
    def run(**settings: Any) -> Any:
        grid = LocalGrid(clients(COUNT), named=True, keyed=True, **settings)
        strategy = FedGLAD(fraction_evaluate=0.0, sampler=SAMPLERS[name], nodes=nodes)
        last = strategy.start(grid, record(model()), num_rounds=4).arrays
        return [who(told) for told in strategy.records], bits(last), set(grid.nodes)

    one = run()
    other = run(late={1: 3, 4: 1})
    assert not one[2] & other[2]
    assert one[:2] == other[:2]


def test_clients_are_called_by_what_tells_them_apart():
    everything = LocalGrid(clients(3), named=True, keyed=True)
    names = {"site-00", "site-01", "site-02"}
    assert set(cohorts(everything, 1, nodes="auto")[0]) == names
    assert set(cohorts(everything, 1, nodes="name")[0]) == names
    assert set(cohorts(everything, 1, nodes="partition-id")[0]) == {0, 1, 2}
    stateful = AdaFL(clients_per_round=3)
    assert set(cohorts(LocalGrid(clients(3)), 1, nodes="auto", sampler=stateful)[0]) == {0, 1, 2}
    keyed = LocalGrid(clients(3), keyed=True)
    by_key = cohorts(keyed, 1, nodes="key")[0]
    assert by_key == cohorts(LocalGrid(clients(3), keyed=True), 1, nodes="key")[0]
    assert len({*map(str, by_key)}) == 3
    assert not {*map(str, by_key)} & {"0", "1", "2"}


def app() -> ClientApp:
    """A real ClientApp without a query function, as users have it."""
    found = ClientApp()

    @found.train()
    def train(message: Message, context: Context) -> Message:
        return Linear(int(context.node_config["partition-id"]))(message, context)

    @found.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Linear(int(context.node_config["partition-id"]))(message, context)

    return found


def test_clients_without_a_query_function_still_train():
    grid = LocalGrid([app() for _ in range(4)])
    strategy = FedGLAD()
    found = strategy.start(grid, record(model()), num_rounds=2)
    asked = {str(client) for told in strategy.records for client in who(told)}
    assert asked == {str(number) for number in grid.nodes}
    assert list(found.evaluate_metrics_clientapp) == [1, 2]


def test_nobody_is_asked_who_it_is_unless_something_needs_it(tmp_path: Path):
    """A message of a kind that a ClientApp has no function for costs a page of its log."""
    plain: list[dict[str, Any]] = [{}, {"average": EMA()}, {"optimizer": Adam()}]
    for settings in plain:
        grid = LocalGrid(clients(6))
        FedGLAD(fraction_train=0.5, **settings).start(grid, record(model()), num_rounds=3)
        assert grid.asked("query.fedglad") == []
    mute = LocalGrid([app() for _ in range(6)])
    FedGLAD(checkpoint_dir=tmp_path / "run").start(mute, record(model()), num_rounds=2)
    assert len(mute.asked("query.fedglad")) == 1  # to go on one day; the first cannot answer
    needed: list[dict[str, Any]] = [
        {"sampler": MD(clients_per_round=3)},
        {"sampler": AdaFL(clients_per_round=3)},
        {"estimator": VARP()},
        {"checkpoint_dir": tmp_path / "other"},
    ]
    for settings in needed:
        grid = LocalGrid(clients(6))
        FedGLAD(**settings).start(grid, record(model()), num_rounds=3)
        assert sorted(grid.asked("query.fedglad")) == [0, 1, 2, 3, 4, 5]


def test_a_real_client_app_that_answers_the_query():
    found = app()

    @found.query("fedglad")
    def query(message: Message, context: Context) -> Message:
        return Linear(int(context.node_config["partition-id"]))(message, context)

    assert sorted(cohorts(LocalGrid([found] * 4), 1)[0]) == [0, 1, 2, 3]


def test_if_only_some_answer_the_query_nobody_is_left_out():
    """`auto` takes what all nodes have: their ids."""
    population = [Linear(0), Linear(1), app(), app()]
    grid = LocalGrid(population)
    asked = cohorts(grid, 2, nodes="auto", sampler=AdaFL(clients_per_round=4))[1]
    assert {*map(str, asked)} == {str(number) for number in grid.nodes}


def test_names_that_are_asked_for_and_missing_are_refused():
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)name"):
        cohorts(LocalGrid(clients(3)), nodes="name")
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)key"):
        cohorts(LocalGrid(clients(3)), nodes="key")
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)partition-id"):
        cohorts(LocalGrid([app() for _ in range(3)]), nodes="partition-id")


def test_a_partition_id_that_two_nodes_have_is_refused_or_not_used():
    population = [Linear(0), Linear(1, partition=7), Linear(2, partition=7)]
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)partition-id.*7"):
        cohorts(LocalGrid(population), nodes="partition-id")
    grid = LocalGrid(population)
    asked = cohorts(grid, 1, nodes="auto", sampler=AdaFL(clients_per_round=3))[0]
    assert {*map(str, asked)} == {str(number) for number in grid.nodes}


def test_a_partition_id_that_a_newcomer_has_too_does_not_change_hands():
    """Two nodes that are both connected do not take turns as one client."""
    grid = LocalGrid(clients(4))
    strategy = FedGLAD(fraction_evaluate=0.0, nodes="partition-id")
    joining = changing(grid, {2: [Linear(9, partition=2)]})
    try:
        strategy.start(grid, record(model()), num_rounds=6, evaluate_fn=joining)
    except (ValueError, RuntimeError) as error:
        refused = str(error)
    else:
        refused = "partition-id 2"
    assert "partition-id 2" in refused
    assert 4 not in grid.asked() or 2 not in grid.asked()[12:]


def test_sizes_that_a_sampler_needs_and_nobody_tells_are_asked_for():
    for sampler in (MD(clients_per_round=2), PowerOfChoice(clients_per_round=2)):
        with pytest.raises((ValueError, RuntimeError), match=r"num-examples|query"):
            cohorts(LocalGrid([app() for _ in range(4)]), sampler=sampler)


def test_a_cohort_larger_than_the_federation_waits_or_says_so(clock: Clock):
    """As Flower does, it waits for the nodes that are missing; here three join after a while."""
    grid = LocalGrid(clients(2))
    joining = [Linear(k) for k in range(2, 5)]

    def join() -> None:
        if joining and len(clock.naps) > 3:
            grid.join(joining.pop(0))

    clock.on_nap = join
    found = cohorts(grid, 1, min_available_nodes=5)
    assert sorted(found[0]) == [0, 1, 2, 3, 4]
    assert joining == []


# ------------------------------------------------------------------------- nodes that come and go


def changing(grid: LocalGrid, changes: dict[int, Any]) -> Any:
    """An evaluate_fn that lets nodes join or leave after the rounds named."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        for change in changes.get(server_round, ()):
            if isinstance(change, Linear):
                grid.join(change)
            else:
                grid.leave(change)
        return None

    return evaluate


@pytest.mark.parametrize("nodes", ["auto", "partition-id", "name", "id"])
def test_nodes_join_and_leave_between_rounds(nodes: Any):
    grid = LocalGrid(clients(5), named=nodes == "name")
    strategy = FedGLAD(fraction_evaluate=0.0, nodes=nodes)
    changes = {2: [1, 3], 4: [Linear(5), Linear(6)]}
    grid_ids = {str(number): node.index for number, node in grid.nodes.items()}

    def index(client: Any) -> int:
        known = {str(number): node.index for number, node in grid.nodes.items()} | grid_ids
        text = str(client).removeprefix("site-")
        return known.get(text) if text in known else int(text)  # pyright: ignore

    strategy.start(grid, record(model()), num_rounds=6, evaluate_fn=changing(grid, changes))
    found = [sorted(map(index, who(told))) for told in strategy.records]
    assert found == [[0, 1, 2, 3, 4]] * 2 + [[0, 2, 4]] * 2 + [[0, 2, 4, 5, 6]] * 2
    assert all(told["status"] == "stepped" for told in strategy.records)


def test_one_that_comes_back_under_another_node_id_is_the_same_client():
    """AdaFL's probabilities are kept by client: a node that restarted has a new id."""

    def run(restarts: bool) -> list[list[Any]]:
        grid = LocalGrid(clients(6), named=False)

        def evaluate(server_round: int, arrays: ArrayRecord) -> None:
            if restarts and server_round == 3:
                old, node = next((n, x) for n, x in grid.nodes.items() if x.index == 2)
                del grid.nodes[old]
                node.info.node_id = old ^ 1
                grid.nodes[old ^ 1] = node

        strategy = FedGLAD(
            fraction_evaluate=0.0,
            sampler=AdaFL(clients_per_round=3, alpha=0.1),
            nodes="partition-id",
        )
        strategy.start(grid, record(model()), num_rounds=8, evaluate_fn=cast(Any, evaluate))
        return [who(told) for told in strategy.records]

    assert run(restarts=True) == run(restarts=False)


def test_a_node_that_is_gone_when_it_is_asked_is_a_failed_client():
    """It leaves after its message was sent."""
    grid = LocalGrid(clients(5))
    gone = lambda call, kind: call == "pull" and kind == "train" and grid.leave(2)  # noqa: E731
    grid.fails = cast(Any, gone)
    strategy = FedGLAD(fraction_evaluate=0.0, nodes="partition-id")
    strategy.start(grid, record(model()), num_rounds=2)
    first, second = strategy.records
    assert [c["id"] for c in first["clients"] if "rejected" in c] == [2]
    assert sorted(who(second)) == [0, 1, 3, 4]


def test_if_all_nodes_leave_the_rounds_are_skipped():
    grid = LocalGrid(clients(3))
    strategy = FedGLAD(round_timeout=30.0, on_short="skip")
    leaving = changing(grid, {2: [0, 1, 2]})
    strategy.start(grid, record(model()), num_rounds=4, evaluate_fn=leaving)
    assert [told["status"] for told in strategy.records] == ["stepped"] * 2 + ["skipped"] * 2
    assert "0 nodes" in strategy.records[-1]["reason"]


def test_evaluation_asks_as_many_as_flower():
    """int(9 · 0.5) = 4 of nine, and the same ones in a second run with other node ids."""
    grids = [LocalGrid(clients(9)) for _ in range(2)]
    for grid in grids:
        FedGLAD(fraction_evaluate=0.5, nodes="partition-id").start(
            grid, record(model()), num_rounds=3
        )
    assert len(grids[0].asked("evaluate")) == 12
    assert grids[0].asked("evaluate") == grids[1].asked("evaluate")
    none = LocalGrid(clients(9))
    FedGLAD(fraction_evaluate=0.0).start(none, record(model()), num_rounds=3)
    assert none.asked("evaluate") == []


def test_numpy_is_all_the_randomness_there_is():
    """The global generators are neither read nor moved."""
    import random

    def legacy() -> Any:
        return cast(Any, np.random.get_state())[1].tolist()  # noqa: NPY002

    before = random.getstate(), legacy()
    one = cohorts(LocalGrid(clients(COUNT)), fraction_train=0.4)
    assert (random.getstate(), legacy()) == before
    random.seed(99)
    assert cohorts(LocalGrid(clients(COUNT)), fraction_train=0.4) == one


def test_the_largest_number_of_samples_that_can_be_meant_is_by_the_upper_median():
    # 10,000 times 3, of 1, 1, 3, 3; of two clients nobody knows which is unusual
    assert largest_usual([3, 1, 3, 1]) == 30_000
    assert largest_usual([1, 3, 1]) == 10_000
    assert largest_usual([1, 10**9]) == math.inf
