"""Which node to distrust: a Flower run's records have it by node, and the report shows it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from fedglad.analysis import clients as summaries
from fedglad.flower import FedGLAD, Monitor
from fedglad.report.figures import payload
from fedglad.runs import Run

from .grid import Arrays, Clock, Linear, LocalGrid, clients, model, record

ROUNDS, COUNT, HOSTILE = 3, 6, 2


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedglad.flower.transport.time", Clock())


class Flipped(Linear):
    """Sends the opposite of its update."""

    def train(self, arrays: Any) -> Arrays:
        trained = super().train(arrays)
        return {name: np.asarray(2 * arrays[name] - new) for name, new in trained.items()}


def federation(**settings: Any) -> LocalGrid:
    population = clients(COUNT)
    population[HOSTILE] = Flipped(HOSTILE)
    return LocalGrid(population, **settings)


@pytest.mark.parametrize("nodes", ["name", "key", "partition-id", "id"])
def test_the_table_of_clients_has_the_nodes(tmp_path: Path, nodes: Any):
    grid = federation(named=True, keyed=True)
    strategy = FedGLAD(fraction_evaluate=0.0, nodes=nodes, checkpoint_dir=tmp_path)
    strategy.start(grid, record(model()), num_rounds=ROUNDS)
    told = Run(tmp_path).rounds()
    assert len(told) == ROUNDS
    assert all(0 <= client["trust"] <= 1 for one in told for client in one["clients"])

    (node,) = [node for node in grid.nodes.values() if node.index == HOSTILE]
    names = {"name": node.info.name, "partition-id": HOSTILE, "id": str(node.info.node_id)}
    worst, *others = summaries(tmp_path)
    assert worst.id == names.get(nodes, worst.id)
    assert worst.doubt == f"opposed in {ROUNDS} of {ROUNDS} rounds"
    assert worst.to_look_at
    assert not any(client.to_look_at for client in others)

    (run,) = payload([Run(tmp_path).read()])["runs"]
    columns = run["client_columns"]
    assert run["clients"][columns["worst"][0]][0] == worst.id
    assert run["to_look_at"] == [worst.id]
    assert sorted(str(row[0]) for row in run["clients"]) == sorted(
        str(client.id) for client in (worst, *others)
    )
    assert all(len(scores) == ROUNDS for scores in columns["scores"])


def test_a_monitor_sees_it_too(tmp_path: Path):
    monitor = Monitor(FedAvg(fraction_evaluate=0.0), checkpoint_dir=tmp_path)
    monitor.start(federation(), record(model()), num_rounds=ROUNDS)
    worst = summaries(tmp_path)[0]
    assert (worst.to_look_at, worst.doubt) == (True, f"opposed in {ROUNDS} of {ROUNDS} rounds")


def test_the_end_of_a_run_names_them_and_who_does_not_want_it_has_none(tmp_path: Path):
    shape: dict[str, Any] = {"fraction_evaluate": 0.0, "nodes": "partition-id"}
    strategy = FedGLAD(checkpoint_dir=tmp_path / "run", **shape)
    strategy.start(federation(), record(model()), num_rounds=ROUNDS)
    log = (tmp_path / "run/log.txt").read_text("utf-8")
    assert f"Clients to look at: {HOSTILE} (opposed in {ROUNDS} of {ROUNDS} rounds)" in log
    strategy = FedGLAD(trust=None, **shape)
    strategy.start(federation(), record(model()), num_rounds=ROUNDS)
    assert not any("trust" in client for told in strategy.records for client in told["clients"])
