"""The metrics of a task: in the records, of the averaged model too, in the log and the summary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

from fedglad.analysis.comparison import compare
from fedglad.averages import EMA
from fedglad.flower import FedGLAD
from fedglad.runs import Run
from fedglad.tasks import Regression

from .grid import Clock, Linear, LocalGrid, clients, model, numpy, record


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedglad.flower.transport.time", Clock())


def size_of(arrays: ArrayRecord) -> float:
    return float(np.abs(numpy(arrays)["weight"]).sum())


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Numbers that tell models apart, and what is no number of a record."""
    mae = size_of(arrays)
    more = {"per-class": [1.0, 2.0], "R 2": float("nan"), "num-examples": 9}
    return MetricRecord({"loss": mae**2, "mae": mae, "eval_Top-5": mae / 10, **more})


def go(folder: Path, **settings: Any) -> FedGLAD:
    strategy = FedGLAD(fraction_evaluate=0.0, checkpoint_dir=folder, **settings)
    strategy.start(LocalGrid(clients(3)), record(model()), num_rounds=3, evaluate_fn=evaluate)
    return strategy


def test_all_numbers_are_recorded_and_the_tasks_score_is_the_runs(tmp_path: Path):
    folder = tmp_path / "run"
    strategy = go(folder, task=Regression(), average=EMA())
    assert strategy.session
    for told in Run(folder).rounds():
        assert told["score"] == {"name": "mae", "higher": False}
        assert told["test_loss"] == pytest.approx(told["test_mae"] ** 2)
        assert told["test_top_5"] == pytest.approx(told["test_mae"] / 10)
        assert not {"test_r_2", "test_per_class", "test_num_examples"} & told.keys()
    last = Run(folder).rounds()[-1]
    assert last["test_mae"] == pytest.approx(size_of(strategy.session.arrays()))
    assert last["averaged_mae"] == pytest.approx(size_of(strategy.averaged))
    assert last["averaged_mae"] != last["test_mae"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_mae"] == pytest.approx(last["test_mae"])
    assert f"mae {last['test_mae']:.4g}"[:7] in (folder / "log.txt").read_text("utf-8")
    newest, averaged = compare([folder]).groups
    tested = [told["test_mae"] for told in Run(folder).rounds()]
    assert newest.mean == pytest.approx(np.mean(tested))
    assert averaged.mean != newest.mean


def test_without_a_task_they_are_recorded_beside_the_accuracy(tmp_path: Path):
    go(tmp_path / "run")
    last = Run(tmp_path / "run").rounds()[-1]
    assert (last["test_accuracy"], "score" in last) == (None, False)
    assert last["test_mae"] > 0


def test_those_of_the_clients_count_where_the_server_does_not_test():
    class Measured(Linear):
        def __call__(self, message: Message, context: Any) -> Message:
            reply = super().__call__(message, context)
            if message.metadata.message_type == "evaluate":
                metrics = reply.content["metrics"]
                assert isinstance(metrics, MetricRecord)
                metrics["mae"] = float(self.partition)
            return reply

    population = [Measured(k) for k in range(3)]  # of 8, 13 and 18 samples
    strategy = FedGLAD(task=Regression())
    strategy.start(LocalGrid(population), record(model()), num_rounds=1)
    assert strategy.records[0]["test_mae"] == pytest.approx((13 * 1 + 18 * 2) / 39)
    strategy = FedGLAD(task=Regression())
    strategy.start(LocalGrid(population), record(model()), num_rounds=1, evaluate_fn=evaluate)
    assert strategy.records[0]["test_mae"] > 2
