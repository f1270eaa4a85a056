"""What a subclass of FedGLAD overrides is called by `start`, as by Flower's own strategies."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedglad.flower import FedGLAD
from fedglad.optimizers import SGD

from .grid import Clock, Linear, LocalGrid, bits, clients, model, numpy, record, server_round

Pair = tuple[ArrayRecord | None, MetricRecord | None]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", made)
    return made


def go(strategy: Any, grid: LocalGrid | None = None, rounds: int = 3, **more: Any) -> Any:
    return strategy.start(grid or LocalGrid(clients(4)), record(model()), num_rounds=rounds, **more)


class Falling(FedGLAD):
    """A learning rate that clients are sent, and that falls by round."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = 0.1 / server_round
        return super().configure_train(server_round, arrays, config, grid)


def test_a_rate_that_falls_by_round_reaches_the_clients():
    grid = LocalGrid(clients(2))
    go(Falling(nodes="partition-id"), grid)
    sent = [(server_round(m), m.content["config"]["lr"]) for m in grid.sent]  # pyright: ignore
    assert sent == [(t, 0.1 / t) for t in (1, 1, 2, 2, 3, 3)]


class Saving(FedGLAD):
    """Keeps the model of every round, and looks at the replies as at a list before that."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[int] = []
        self.saved: dict[int, Any] = {}

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
        self.seen.append(len([m.content for m in replies]))
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            self.saved[server_round] = bits(arrays)
        return arrays, metrics


def test_models_are_saved_and_replies_looked_at():
    plain = FedGLAD(nodes="partition-id")
    models: dict[int, Any] = {}
    go(plain, evaluate_fn=lambda t, arrays: models.update({t: bits(arrays)}))
    strategy = Saving(nodes="partition-id")
    result = go(strategy)
    assert strategy.saved == {t: models[t] for t in (1, 2, 3)}
    assert bits(result.arrays) == models[3]
    assert strategy.seen == [4, 4, 4]
    assert [r["gsi_all"] for r in strategy.records] == [r["gsi_all"] for r in plain.records]


def test_replies_are_still_pulled_one_by_one_if_nobody_looks_at_them():
    class Passing(FedGLAD):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
            return super().aggregate_train(server_round, replies)

    grids = [LocalGrid(clients(6)), LocalGrid(clients(6))]
    go(Passing(fraction_evaluate=0.0), grids[0])
    go(Saving(fraction_evaluate=0.0), grids[1])
    assert grids[0].most_alive <= 2
    assert grids[1].most_alive >= 6


class Chosen(FedGLAD):
    """Sends messages of its own, to nodes that it chooses, with a configuration of its own."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        content: dict[str, Any] = {
            "arrays": arrays,
            "config": ConfigRecord({"server-round": server_round, "epochs": 7}),
        }
        nodes = sorted(grid.get_node_ids())[server_round - 1 : server_round + 1]
        return [Message(RecordDict(content), node, MessageType.TRAIN) for node in nodes]


def test_own_messages_to_own_nodes():
    grid = LocalGrid(clients(4))
    strategy = Chosen(fraction_evaluate=0.0)
    go(strategy, grid)
    nodes = sorted(grid.nodes)
    asked = [[c["id"] for c in told["clients"]] for told in strategy.records]
    assert asked == [nodes[t : t + 2] for t in range(3)]
    assert all(told["status"] == "stepped" for told in strategy.records)
    assert {m.content["config"]["epochs"] for m in grid.sent} == {7}  # pyright: ignore


def test_a_cohort_is_thinned_out_on_the_way_there_and_back():
    class Thin(FedGLAD):
        def configure_train(self, *args: Any) -> Iterable[Message]:
            return list(super().configure_train(*args))[1:]

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
            return super().aggregate_train(server_round, list(replies)[:-1])

    strategy = Thin(nodes="partition-id", fraction_evaluate=0.0)
    go(strategy, LocalGrid(clients(5)))
    for told in strategy.records:
        left_out = [c["rejected"] for c in told["clients"] if "rejected" in c]
        assert len(told["clients"]) == 4
        assert left_out == ["Thin left its reply out"]


def test_a_model_that_the_subclass_changes_is_the_one_that_clients_get():
    class Shifted(FedGLAD):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            assert metrics is not None
            moved = {name: value + np.float32(1) for name, value in numpy(arrays).items()}
            return record(moved), MetricRecord({"shifted": 1})

    ours = Shifted(nodes="partition-id", optimizer=SGD(lr=0.5), adapter=None)
    found = go(ours)
    population = clients(4)
    theta = {name: value.astype(float) for name, value in model().items()}
    shares = np.array([own.n for own in population]) / sum(own.n for own in population)
    for _ in range(3):
        trained = [own.train(theta) for own in population]
        for name in theta:
            mean = sum(w * (theta[name] - x[name]) for w, x in zip(shares, trained, strict=True))
            theta[name] = theta[name] - 0.5 * mean + 1
    for name, value in numpy(found.arrays).items():
        np.testing.assert_allclose(value, theta[name], rtol=1e-4, atol=1e-5)
    assert found.train_metrics_clientapp[3] == {"shifted": 1}


class Own(FedGLAD):
    """Adds up the replies itself."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
        parts = [numpy(m.content["arrays"]) for m in replies]  # pyright: ignore
        if not parts or server_round == 2:
            return None, None
        mean = {n: np.mean([part[n] for part in parts], axis=0) for n in parts[0]}
        return record({n: x.astype(np.float32) for n, x in mean.items()}), None


def test_a_mean_of_its_own(tmp_path: Path):
    strategy = Own(fraction_evaluate=0.0, checkpoint_dir=tmp_path / "run")
    found = go(strategy)
    theta = model()
    for _ in range(2):  # in round 2 it gave none
        parts = [own.train(theta) for own in clients(4)]
        mean = {n: np.mean([part[n] for part in parts], axis=0) for n in theta}
        theta = {n: x.astype(np.float32) for n, x in mean.items()}
    for name, value in numpy(found.arrays).items():
        np.testing.assert_allclose(value, theta[name], rtol=1e-5)
    assert [told["status"] for told in strategy.records] == ["stepped", "skipped", "stepped"]
    assert [told["attempts"] for told in strategy.records] == [1, 1, 1]


def test_evaluation_too_and_both_of_flowers_ways_to_put_one_in_its_place():
    class Tests(FedGLAD):
        def configure_evaluate(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            if server_round % 2 == 0:
                return []
            config["batches"] = 3
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_evaluate(
            self, server_round: int, replies: Iterable[Message]
        ) -> MetricRecord | None:
            count = len([m for m in replies if not m.has_error()])
            metrics = super().aggregate_evaluate(server_round, replies)
            return metrics and MetricRecord({**metrics, "count": count})

    grid = LocalGrid(clients(4))
    found = go(Tests(), grid)
    assert list(found.evaluate_metrics_clientapp) == [1, 3]
    assert found.evaluate_metrics_clientapp[3]["count"] == 4
    assert len(grid.asked("evaluate")) == 8

    asked: list[int] = []
    strategy = FedGLAD()
    inner = strategy.configure_evaluate
    vars(strategy)["configure_evaluate"] = lambda t, *args: asked.append(t) or inner(t, *args)
    go(strategy)
    assert asked == [1, 2, 3]


def test_a_lost_reply_is_none_of_those_that_a_subclass_sees():
    counts: list[int] = []

    class Careful(FedGLAD):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
            good = [m for m in replies if not m.has_error()]
            counts.append(len(good))
            return super().aggregate_train(server_round, good)

    class Breaks(Linear):
        def train(self, arrays: Any) -> Any:
            raise OSError("no space left")

    grid = LocalGrid([*clients(4), Breaks(4)])
    grid.never = {1}
    strategy = Careful(round_timeout=20.0, fraction_evaluate=0.0)
    go(strategy, grid, rounds=1)
    assert counts == [3]
    reasons = {c["rejected"] for c in strategy.records[0]["clients"] if "rejected" in c}
    assert reasons == {"no reply within 20 s", "the client failed: OSError: no space left"}
