"""What happens in real federations beside bad updates: odd metrics, nodes that come and go."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from fedglad.flower import FedGLAD, Monitor, NothingTrained
from fedglad.optimizers import SGD
from fedglad.runs import RunError
from fedglad.samplers.md import MD
from fedglad.samplers.power_of_choice import PowerOfChoice
from fedglad.samplers.uniform import Uniform

from .grid import Clock, Linear, LocalGrid, clients, model, numpy, record, who


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


def go(strategy: Any, grid: LocalGrid, rounds: int, **more: Any) -> Any:
    return strategy.start(grid, record(model()), num_rounds=rounds, **more)


def quiet(**settings: Any) -> FedGLAD:
    shape: dict[str, Any] = {"fraction_evaluate": 0.0, "nodes": "partition-id", "resume": True}
    return FedGLAD(**shape | settings)


def test_metrics_that_are_not_finite_come_back_as_they_were(tmp_path: Path):
    def evaluate(server_round: int, arrays: Any) -> MetricRecord:
        return MetricRecord({"per-class": [0.5, math.nan], "f1": math.nan})

    for rounds in (2, 3):  # the second goes on
        found = go(
            quiet(checkpoint_dir=tmp_path / "run"),
            LocalGrid(clients(3)),
            rounds,
            evaluate_fn=evaluate,
        )
    told = found.evaluate_metrics_serverapp
    assert list(told) == [0, 1, 2, 3]
    assert all(math.isnan(m["f1"]) and math.isnan(m["per-class"][1]) for m in told.values())


def test_the_servers_own_test_counts_before_the_clients():
    class Tested(Linear):
        def metrics(self, arrays: Any) -> dict[str, Any]:
            return {**super().metrics(arrays), "accuracy": 0.9}

    strategy = FedGLAD()
    go(
        strategy,
        LocalGrid([Tested(k) for k in range(3)]),
        1,
        evaluate_fn=lambda t, a: MetricRecord({"loss": 1.0, "accuracy": 0.1}),
    )
    assert (strategy.records[0]["test_accuracy"], strategy.records[0]["test_loss"]) == (0.1, 1.0)


def test_a_sampler_with_availability_draws_only_who_is_connected():
    grid = LocalGrid(clients(6))
    strategy = quiet(sampler=Uniform(clients_per_round=3, availability="bernoulli"))

    def leave(server_round: int, arrays: Any) -> None:
        if server_round == 1:
            for k in (1, 3, 5):
                grid.leave(k)

    go(strategy, grid, 6, evaluate_fn=leave)
    assert {k for told in strategy.records[1:] for k in who(told)} <= {0, 2, 4}


def test_nodes_that_restart_twice_with_one_partition_id_do_not_end_the_run():
    grid = LocalGrid(clients(4))

    def restart(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            grid.join(Linear(7, partition=3))
            grid.join(Linear(8, partition=3))

    strategy = quiet()
    go(strategy, grid, 4, evaluate_fn=restart)
    assert [sorted(who(told)) for told in strategy.records] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_does_not_answer_the_query_costs_no_run(silent: int):
    strategy = quiet(round_timeout=30)
    go(strategy, LocalGrid(clients(2), never={silent}), 2)
    assert [who(told) for told in strategy.records] == [[1 - silent]] * 2


class Sized(Linear):
    """Tells another number of samples than it has."""

    def __init__(self, index: int, told: Any) -> None:
        super().__init__(index)
        self.told = told

    def __call__(self, message: Any, context: Any) -> Any:
        reply = super().__call__(message, context)
        if message.metadata.message_type == "query.fedglad":
            reply.content["query"]["num-examples"] = self.told
        return reply


@pytest.mark.parametrize("told", [1e300, 2**62, -5, math.nan, [3]])
@pytest.mark.parametrize("sampler", [MD, PowerOfChoice])
def test_a_size_that_cannot_be_meant_leaves_its_client_out(sampler: Any, told: Any):
    strategy = quiet(sampler=sampler(clients_per_round=2))
    go(strategy, LocalGrid([*clients(4), Sized(4, told)]), 6)
    assert {k for record in strategy.records for k in who(record)} <= {0, 1, 2, 3}


def test_who_joins_later_is_drawn_by_its_own_size():
    grid = LocalGrid([Linear(0, n=100), Linear(1, n=100), Linear(3, n=100)])

    def join(server_round: int, arrays: Any) -> None:
        if server_round == 1:
            grid.join(Linear(2, n=100))

    strategy = quiet(sampler=MD(clients_per_round=2))
    go(strategy, grid, 30, evaluate_fn=join)
    assert sum(2 in who(told) for told in strategy.records) >= 5  # of 29, about half expected


def test_damaged_checkpoints_are_not_overwritten_by_a_new_start(tmp_path: Path):
    go(quiet(checkpoint_dir=tmp_path / "run"), LocalGrid(clients(3)), 3)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text()
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"gone")
    with pytest.raises(RunError, match=r"none of its checkpoints can be used.*checkpoint_dir"):
        go(quiet(checkpoint_dir=tmp_path / "run"), LocalGrid(clients(3)), 5)
    assert (tmp_path / "run" / "rounds.jsonl").read_text() == lines


@pytest.mark.parametrize("changed", [{"min_clients": 2}, {"guard": None}, {"report": "norms"}])
def test_other_settings_are_refused(tmp_path: Path, changed: dict[str, Any]):
    go(quiet(checkpoint_dir=tmp_path / "run"), LocalGrid(clients(3)), 1)
    with pytest.raises(RunError, match="other settings"):
        go(quiet(checkpoint_dir=tmp_path / "run", **changed), LocalGrid(clients(3)), 2)


def test_no_rounds_and_fewer_than_there_were(tmp_path: Path):
    go(quiet(checkpoint_dir=tmp_path / "none"), LocalGrid(clients(3)), 0)
    go(quiet(checkpoint_dir=tmp_path / "run"), LocalGrid(clients(3)), 3)
    found = go(quiet(checkpoint_dir=tmp_path / "run"), LocalGrid(clients(3)), 2)
    assert list(found.train_metrics_clientapp) == [1, 2, 3]
    assert "rounds = 3" in (tmp_path / "run" / "config.toml").read_text()


def test_nothing_trained_says_how_to_try_again(tmp_path: Path):
    lost = LocalGrid(clients(3), lost={0, 1, 2})
    with pytest.raises(NothingTrained, match="raise num_rounds"):
        go(quiet(checkpoint_dir=tmp_path / "run", nodes="id", on_short="skip"), lost, 2)
    go(quiet(checkpoint_dir=tmp_path / "run", nodes="id"), LocalGrid(clients(3)), 3)


def test_in_flowers_loop_a_schedule_needs_its_end():
    def private(**settings: Any) -> Any:
        return DifferentialPrivacyServerSideFixedClipping(quiet(**settings), 0.0, 1e6, 3)

    with pytest.raises(ValueError, match="over"):
        go(private(optimizer=SGD(schedule="cosine")), LocalGrid(clients(3)), 3)
    seen: list[Any] = []
    go(
        private(optimizer=SGD(schedule="cosine", over=4)),
        LocalGrid(clients(3)),
        3,
        evaluate_fn=lambda t, arrays: seen.append(numpy(arrays)["bias"]),
    )
    assert not any(np.array_equal(a, b) for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize(
    "settings",
    [
        {"min_clients": 5, "sampler": Uniform(clients_per_round=3)},
        {"arrayrecord_key": "x", "configrecord_key": "x"},
    ],
)
def test_settings_by_which_nothing_could_be_trained_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"clients_per_round|both 'x'"):
        FedGLAD(**settings)


def test_the_seed_draws_other_cohorts():
    def drawn(seed: int) -> list[Any]:
        strategy = quiet(seed=seed, fraction_train=0.5, nodes="partition-id")
        go(strategy, LocalGrid(clients(8)), 4)
        return [who(told) for told in strategy.records]

    assert drawn(0) == drawn(0) != drawn(1)


def test_what_a_client_says_is_cut():
    class Loud(Linear):
        def train(self, arrays: Any) -> Any:
            raise RuntimeError("x" * 100_000)

    strategy = quiet()
    go(strategy, LocalGrid([*clients(3), Loud(3)]), 1)
    (reason,) = [c["rejected"] for c in strategy.records[0]["clients"] if "rejected" in c]
    assert len(reason) < 600


def test_monitor_leaves_alone_what_it_cannot_measure(tmp_path: Path):
    grid = LocalGrid(clients(3))
    integers = record({"weight": np.ones((2, 3), np.int64), "bias": np.ones(2, np.int64)})
    alone = FedAvg(fraction_evaluate=0.0).start(LocalGrid(clients(3)), integers, num_rounds=1)
    monitor = Monitor(FedAvg(fraction_evaluate=0.0))
    found = monitor.start(grid, integers, num_rounds=1)
    assert numpy(found.arrays).keys() == numpy(alone.arrays).keys()
    assert copy.copy(monitor).fraction_evaluate == 0.0


def test_monitor_calls_an_instances_own_method_and_keeps_it(tmp_path: Path):
    inner, called = FedAvg(fraction_evaluate=0.0), []

    def own(server_round: int, replies: Any) -> Any:
        called.append(server_round)
        return FedAvg.aggregate_train(inner, server_round, replies)

    vars(inner)["aggregate_train"] = own
    monitor = Monitor(inner, checkpoint_dir=tmp_path / "run")
    go(monitor, LocalGrid(clients(3)), 2)
    assert called == [1, 2]
    assert vars(inner)["aggregate_train"] is own
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 2
