"""FedGLAD in the place of Flower's FedAvg: the same parameters, the same calls, other wrappers."""

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)

from fedglad.adapters import Glad
from fedglad.flower import FedGLAD, Monitor
from fedglad.optimizers import SGD

from .grid import LocalGrid, bits, clients, close, model, numpy, received, record, server_round


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {
        name: found.replace(annotation=inspect.Parameter.empty)
        for name, found in inspect.signature(function).parameters.items()
    }


def test_every_parameter_of_fedavg_with_its_name_place_and_default():
    theirs, ours = parameters(FedAvg.__init__), parameters(FedGLAD.__init__)
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name] for name in theirs} == theirs
    own = {name: found for name, found in ours.items() if name not in theirs}
    assert {found.kind for found in own.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_our_own_parameters_and_their_defaults():
    ours = parameters(FedGLAD.__init__)
    own = {name: found.default for name, found in list(ours.items())[11:]}
    expected = {
        "optimizer": None,
        "adapter": Glad(),
        "filter": None,
        "weighting": None,
        "estimator": None,
        "average": None,
        "evaluate": "model",
        "buffers": None,
        "min_clients": 1,
        "sampler": None,
        "seed": 0,
        "nodes": "auto",
        "round_timeout": None,
        "retries": 2,
        "checkpoint_dir": None,
        "report": "updates",
    }
    assert {name: own.get(name, "absent") for name in expected} == expected


@pytest.mark.parametrize("strategy", [FedGLAD, Monitor])
def test_start_is_called_as_flowers(strategy: Any):
    assert parameters(strategy.start) == parameters(Strategy.start)


@pytest.mark.parametrize(
    "method",
    ["configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"],
)
@pytest.mark.parametrize("strategy", [FedGLAD, Monitor])
def test_flowers_interface_is_there(strategy: Any, method: str):
    assert parameters(getattr(strategy, method)) == parameters(getattr(FedAvg, method))
    assert issubclass(strategy, Strategy)


def test_what_cannot_be_meant_is_refused_at_once():
    with pytest.raises(ValueError, match=r"(?s)nodes.*'colour'"):
        FedGLAD(nodes="colour")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"retries.*-1"):
        FedGLAD(retries=-1)
    with pytest.raises(ValueError, match=r"round_timeout"):
        FedGLAD(round_timeout=0)
    with pytest.raises(ValueError, match=r"(?s)report.*'everything'"):
        FedGLAD(report="everything")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"min_clients"):
        FedGLAD(min_clients=0)


def test_the_keys_of_the_records_are_the_users():
    """As with FedAvg: what is sent lies under these keys, with the round and the user's config."""
    grid = LocalGrid(clients(3))
    strategy = FedGLAD(arrayrecord_key="net", configrecord_key="how", fraction_evaluate=0.0)
    strategy.start(grid, record(model()), num_rounds=2, train_config=ConfigRecord({"lr": 0.1}))
    assert [sorted(message.content) for message in grid.sent] == [["how", "net"]] * 6
    assert [server_round(message) for message in grid.sent] == [1, 1, 1, 2, 2, 2]
    assert {message.content["how"]["lr"] for message in grid.sent} == {0.1}  # pyright: ignore
    assert bits(received(grid.sent[0])) == bits(model())


def test_the_result_is_flowers():
    grid = LocalGrid(clients(4))

    def evaluate(server_round: int, arrays: ArrayRecord) -> Any:
        from flwr.app import MetricRecord

        return MetricRecord({"accuracy": server_round / 10, "loss": 1.0})

    strategy = FedGLAD()
    result = strategy.start(grid, record(model()), num_rounds=2, evaluate_fn=evaluate)
    assert isinstance(result, Result)
    assert list(result.train_metrics_clientapp) == [1, 2]
    assert list(result.evaluate_metrics_clientapp) == [1, 2]
    assert {t: m["accuracy"] for t, m in result.evaluate_metrics_serverapp.items()} == {
        0: 0.0,
        1: 0.1,
        2: 0.2,
    }
    assert [found["round"] for found in strategy.records] == [0, 1]
    assert [found["test_accuracy"] for found in strategy.records] == [0.1, 0.2]
    assert [found["test_loss"] for found in strategy.records] == [1.0, 1.0]


def test_metrics_are_averaged_as_fedavg_does():
    theirs = FedAvg().start(LocalGrid(clients(4)), record(model()), num_rounds=1)
    ours = FedGLAD(adapter=None).start(LocalGrid(clients(4)), record(model()), num_rounds=1)
    for told in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        first, second = getattr(theirs, told)[1], getattr(ours, told)[1]
        assert dict(first) == pytest.approx(dict(second), rel=1e-6)


def test_flowers_own_loop_runs_it_too():
    """`Strategy.start`, without our streaming and retries, gives the same model."""
    ours = FedGLAD(nodes="partition-id", optimizer=SGD(lr=0.7))
    theirs = FedGLAD(nodes="partition-id", optimizer=SGD(lr=0.7))
    first = ours.start(LocalGrid(clients(5)), record(model()), num_rounds=4)
    second = Strategy.start(theirs, LocalGrid(clients(5)), record(model()), num_rounds=4)
    assert bits(first.arrays) == bits(second.arrays)
    assert [r["gsi_all"] for r in ours.records] == [r["gsi_all"] for r in theirs.records]


def private(inner: FedGLAD, noise: float) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(inner, noise, 1e6, 5)


def test_differential_privacy_without_noise_changes_nothing():
    plain = FedGLAD(optimizer=SGD(lr=0.5)).start(LocalGrid(clients(5)), record(model()))
    strategy = private(FedGLAD(optimizer=SGD(lr=0.5)), 0.0)
    found = strategy.start(LocalGrid(clients(5)), record(model()))
    assert close(numpy(plain.arrays), numpy(found.arrays), 1e-5)


class Noisy(Strategy):
    """A wrapper that changes the model between two rounds, as one with noise does."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.configure_train = inner.configure_train  # type: ignore[method-assign]
        self.configure_evaluate = inner.configure_evaluate  # type: ignore[method-assign]

    def configure_train(self, *args: Any) -> Any: ...
    def configure_evaluate(self, *args: Any) -> Any: ...

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        arrays, metrics = self.inner.aggregate_train(server_round, replies)
        assert arrays is not None
        return record(
            {name: value + np.float32(1) for name, value in numpy(arrays).items()}
        ), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.inner.summary()


def test_the_step_starts_from_the_model_that_was_sent():
    """θ ← θ + 1 between the rounds: what counts is the difference to what clients were sent."""
    population = clients(5)
    found = Noisy(FedGLAD(optimizer=SGD(lr=0.5), adapter=None, fraction_evaluate=0.0)).start(
        LocalGrid(population), record(model()), num_rounds=3
    )
    theta = {name: value.astype(float) for name, value in model().items()}
    shares = np.array([own.n for own in population]) / sum(own.n for own in population)
    for _ in range(3):
        trained = [own.train(theta) for own in population]
        for name in theta:
            mean = sum(w * (theta[name] - x[name]) for w, x in zip(shares, trained, strict=True))
            theta[name] = theta[name] - 0.5 * mean + 1
    assert close(numpy(found.arrays), theta, 1e-4)
