"""The numbers: dtypes kept, buffers averaged, the same bits in any order; few models in memory."""

import gc
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

from fedglad import Glad, Guard
from fedglad.adapters import REGISTRY as ADAPTERS
from fedglad.filters import MultiKrum
from fedglad.flower import FedGLAD
from fedglad.optimizers import REGISTRY as OPTIMIZERS
from fedglad.optimizers import SGD, Adam, Momentum
from fedglad.samplers.uniform import Uniform
from fedglad.weights import Equal

from .grid import (
    Clock,
    LocalGrid,
    Normed,
    bits,
    by,
    clients,
    close,
    facts,
    model,
    numpy,
    record,
    replay,
)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


def ours(**settings: Any) -> FedGLAD:
    shape: dict[str, Any] = {"fraction_evaluate": 0.0, "nodes": "partition-id"}
    return FedGLAD(**shape | settings)


# ------------------------------------------------------------------------------- dtypes and buffers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_are_kept_over_rounds(name: str):
    start = model(normed=True)
    grid = LocalGrid(clients(4, Normed))
    strategy = ours(optimizer=OPTIMIZERS[name]())
    found = numpy(strategy.start(grid, record(start), num_rounds=4).arrays)
    assert list(found) == list(start)
    assert {n: (x.dtype, x.shape) for n, x in found.items()} == {
        n: (x.dtype, x.shape) for n, x in start.items()
    }
    sent = {str(x.dtype) for message in grid.sent for x in _arrays(message).values()}
    assert sent == {"float32", "int64"}


def _arrays(message: Any) -> Any:
    return numpy(message.content["arrays"])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_model_of_another_precision_stays_so(dtype: Any):
    found = ours(optimizer=Adam()).start(LocalGrid(clients(4)), record(model(dtype)))
    assert {x.dtype for x in numpy(found.arrays).values()} == {np.dtype(dtype)}


def test_flowers_fedadam_turns_the_model_into_float64():
    """The difference that is tested above."""
    found = FedAdam(fraction_evaluate=0.0).start(LocalGrid(clients(4)), record(model()))
    assert {str(x.dtype) for x in numpy(found.arrays).values()} == {"float64"}
    normed = FedAvg(fraction_evaluate=0.0).start(
        LocalGrid(clients(4, Normed)), record(model(normed=True))
    )
    assert str(numpy(normed.arrays)["norm.num_batches_tracked"].dtype) == "float64"


def expected_buffers(rounds: int, count: int = 4) -> dict[str, np.ndarray]:
    """m ← .5 m + .1 Σ p_k k and v ← .2 v + .01 Σ p_k k, p_k by the samples; the largest counter.

    Four clients of 8, 13, 18 and 23 samples, 62 in all: Σ p_k k = (13 + 36 + 69)/62 = 118/62.
    """
    own = clients(count, Normed)
    mean_k = sum(c.n * c.partition for c in own) / sum(c.n for c in own)
    m, v, tracked = 0.0, 1.0, 0
    for _ in range(rounds):
        m, v, tracked = 0.5 * m + 0.1 * mean_k, 0.2 * v + 0.01 * mean_k, tracked + count
    return {
        "norm.running_mean": np.full(2, m),
        "norm.running_var": np.full(2, v),
        "norm.num_batches_tracked": np.array(tracked),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buffers_are_averaged_and_nothing_else(name: str):
    assert sum(c.n * c.partition for c in clients(4)) == 118
    strategy = ours(optimizer=OPTIMIZERS[name](lr=0.3), adapter=Glad(gamma=0.5))
    found = strategy.start(LocalGrid(clients(4, Normed)), record(model(normed=True)), num_rounds=5)
    oracle = expected_buffers(5)
    assert close({n: x for n, x in numpy(found.arrays).items() if n in oracle}, oracle)


def test_momentum_makes_flowers_variance_negative():
    """What averaging avoids: v falls from 1 to 0.2, and momentum carries it on below zero."""
    theirs = FedAvgM(fraction_evaluate=0.0, server_momentum=0.9).start(
        LocalGrid(clients(4, Normed)), record(model(normed=True)), num_rounds=4
    )
    assert numpy(theirs.arrays)["norm.running_var"].min() < 0
    found = ours(optimizer=Momentum()).start(
        LocalGrid(clients(4, Normed)), record(model(normed=True)), num_rounds=4
    )
    assert numpy(found.arrays)["norm.running_var"].min() > 0


def test_buffers_can_be_named():
    """`bias` as a buffer is averaged, whatever the rate."""
    population = clients(4)
    strategy = ours(optimizer=SGD(lr=0.1), buffers=["bias"])
    found = strategy.start(LocalGrid(population), record(model()), num_rounds=1)
    total = sum(own.n for own in population)
    mean = sum(own.n / total * own.train(model())["bias"] for own in population)
    assert np.allclose(numpy(found.arrays)["bias"], mean, atol=1e-6)


# ----------------------------------------------------------------------------------- the same bits

PARTS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": kind()} for name, kind in OPTIMIZERS.items()},
    **{name: {"adapter": kind()} for name, kind in ADAPTERS.items()},
    "multi-krum": {"filter": MultiKrum(f=1)},
    "equal": {"weighting": Equal()},
    "unguarded": {"guard": None},
    "guarded": {"guard": Guard(norm=2.0)},
}


@pytest.mark.parametrize("name", PARTS)
def test_equal_to_a_plain_server_given_the_same_updates(name: str):
    population, start = clients(6, Normed), model(normed=True)
    strategy = ours(**PARTS[name])
    found = strategy.start(LocalGrid(population), record(start), num_rounds=4)
    settings = {"adapter": Glad(), **PARTS[name]}
    if name == "multi-krum":  # it needs those that it leaves out
        for told in strategy.records:
            for client in told["clients"]:
                client.pop("rejected", None)
    assert bits(found.arrays) == bits(replay(strategy.records, by(population), start, **settings))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_neither_order_nor_lateness_of_replies_changes_a_bit(name: str):
    def run(**settings: Any) -> tuple[Any, Any]:
        strategy = ours(optimizer=OPTIMIZERS[name](), nodes="partition-id")
        grid = LocalGrid(clients(7, Normed), **settings)
        found = strategy.start(grid, record(model(normed=True)), num_rounds=4)
        return bits(found.arrays), facts(strategy.records)

    once = run()
    assert run(arrival=[6, 5, 4, 3, 2, 1, 0]) == once
    assert run(late={0: 5, 3: 1, 6: 9}) == once
    assert run(late={5: 20}, arrival=[3, 1, 4, 0, 5, 2, 6]) == once


def test_flowers_loop_gives_the_same_bits_in_any_order_of_arrival():
    """`aggregate_train` alone, called by Flower's loop: replies are put into the cohort's order."""

    def run(arrival: list[int]) -> Any:
        grid = LocalGrid(clients(7), arrival=arrival)
        strategy = ours(optimizer=Adam(), nodes="partition-id")
        return bits(Strategy.start(strategy, grid, record(model()), num_rounds=3).arrays)

    once = bits(ours(optimizer=Adam()).start(LocalGrid(clients(7)), record(model())).arrays)
    assert run([0, 1, 2, 3, 4, 5, 6]) == once
    assert run([6, 1, 4, 3, 2, 5, 0]) == once


@pytest.mark.parametrize("loops", [(FedGLAD, FedGLAD), (FedGLAD, Strategy), (Strategy, Strategy)])
def test_one_strategy_can_be_started_twice(loops: tuple[Any, Any]):
    """Its own loop or Flower's: the moments of the first run are not those of the second."""
    strategy = ours(optimizer=Adam())
    found: list[Any] = []
    for loop in loops:
        last = loop.start(strategy, LocalGrid(clients(4)), record(model()), num_rounds=2)
        found.append((bits(last.arrays), [told["gsi_all"] for told in strategy.records]))
    assert found[0] == found[1]


def test_what_was_given_is_not_changed():
    start = record(model())
    before = bits(start)
    found = ours().start(LocalGrid(clients(3)), start, num_rounds=1)
    assert bits(start) == before != bits(found.arrays)


# ----------------------------------------------------------------------------- against Flower's own


@pytest.mark.parametrize("kind", ["linear", "normed"])
def test_equal_to_flowers_fedavg(kind: str):
    """SGD at rate 1 without an adapter is FedAvg; float64 lets only the order of sums differ."""
    normed = kind == "normed"
    from .grid import Linear

    population = clients(6, Normed if normed else Linear)
    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-13)):
        start = model(dtype, normed=normed)
        theirs = FedAvg(fraction_evaluate=0.0).start(
            LocalGrid(population), record(start), num_rounds=5
        )
        found = ours(optimizer=SGD(lr=1.0), adapter=None).start(
            LocalGrid(population), record(start), num_rounds=5
        )
        first, second = numpy(theirs.arrays), numpy(found.arrays)
        first.pop("norm.num_batches_tracked", None)  # theirs is a mean, ours the largest
        second.pop("norm.num_batches_tracked", None)
        assert close(first, second, tolerance)


def test_equal_to_flowers_fedavgm():
    """Momentum without dampening, the first rate 1; parameters only."""
    theirs = FedAvgM(fraction_evaluate=0.0, server_momentum=0.6, server_learning_rate=1.0).start(
        LocalGrid(clients(5)), record(model(np.float64)), num_rounds=5
    )
    found = ours(optimizer=Momentum(lr=1.0, momentum=0.6), adapter=None).start(
        LocalGrid(clients(5)), record(model(np.float64)), num_rounds=5
    )
    assert close(numpy(theirs.arrays), numpy(found.arrays), 1e-12)


def test_glad_changes_the_step_by_the_recorded_factors():
    """θ' = θ − s ḡ, s per tensor from the record, ḡ by the clients' samples."""
    population, start = clients(5), model(np.float64)
    strategy = ours(adapter=Glad(gamma=0.5))
    found = strategy.start(LocalGrid(population), record(start), num_rounds=3)
    theta = dict(start)
    shares = np.array([own.n for own in population]) / sum(own.n for own in population)
    for told in strategy.records:
        trained = [own.train(theta) for own in population]
        for name in theta:
            g = [theta[name] - x[name] for x in trained]
            mean = sum(w * x for w, x in zip(shares, g, strict=True))
            spread = sum(w * np.square(x).sum() for w, x in zip(shares, g, strict=True))
            group = told["groups"][name]
            assert group["gsi"] == pytest.approx((spread / np.square(mean).sum()) ** 0.5)
            theta[name] = theta[name] - group["scale"] * mean
    assert {told["groups"]["weight"]["scale"] for told in strategy.records} != {1.0}
    assert close(numpy(found.arrays), theta, 1e-12)


# ------------------------------------------------------------------------------------------- memory


@pytest.fixture
def no_collector() -> Generator[None]:
    """What is let go must be gone by its references, not some time later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_replies_are_taken_one_by_one_and_let_go():
    theirs = LocalGrid(clients(30))
    FedAvg(fraction_evaluate=0.0).start(theirs, record(model()), num_rounds=1)
    assert theirs.most_alive == 30
    grid = LocalGrid(clients(30))
    ours().start(grid, record(model()), num_rounds=3)
    assert grid.most_pulled == 1
    assert grid.most_alive <= 2


@pytest.mark.usefixtures("no_collector")
def test_bad_replies_are_let_go_too():
    population: list[Any] = clients(30)
    for own in population[::2]:
        own.n = -1
    grid = LocalGrid(population)
    strategy = ours()
    strategy.start(grid, record(model()), num_rounds=2)
    assert len([c for c in strategy.records[0]["clients"] if "rejected" in c]) == 15
    assert grid.most_alive <= 2


def test_clients_are_asked_before_the_first_reply_is_waited_for():
    """All train at the same time: every message is pushed before anything is pulled."""
    grid = LocalGrid(clients(8), named=True)
    seen: list[tuple[str, int]] = []
    grid.fails = lambda call, kind: seen.append((call, len(grid.asked())))
    ours(sampler=Uniform(clients_per_round=5), nodes="auto").start(
        grid, record(model()), num_rounds=1
    )
    assert {asked for call, asked in seen if call == "pull"} == {5}
