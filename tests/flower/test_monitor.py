"""Monitor: any Flower strategy as it is, and what FedGLAD would have seen of its rounds."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    Result,
    Strategy,
)

from fedglad import Glad
from fedglad.adapters import Fixed
from fedglad.flower import Monitor
from fedglad.runs import Run

from .grid import (
    Linear,
    LocalGrid,
    Normed,
    bits,
    clients,
    facts,
    model,
    numpy,
    record,
    rejected,
)
from .test_faults import ACCEPTED, BAD, DEADLY, with_one

INNER: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedAvg of some": lambda: FedAvg(fraction_train=0.6, fraction_evaluate=0.4),
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
    "FedAdagrad": FedAdagrad,
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, server_learning_rate=0.7),
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": lambda: FedTrimmedAvg(beta=0.2),
}


def run(
    strategy: Strategy,
    population: list[Linear],
    *,
    start: Any = None,
    rounds: int = 3,
    **settings: Any,
) -> Result:
    random.seed(4)  # Flower samples with it
    found = record(start or model())
    grid = LocalGrid(population, salt=1)
    return strategy.start(grid, found, num_rounds=rounds, **settings)


def same(first: Result, second: Result) -> bool:
    return bits(first.arrays) == bits(second.arrays) and str(first) == str(second)


@pytest.mark.parametrize("name", INNER)
def test_the_model_is_bit_for_bit_that_of_the_strategy_alone(name: str):
    alone = run(INNER[name](), clients(6))
    monitor = Monitor(INNER[name]())
    assert same(run(monitor, clients(6)), alone)
    assert [told["round"] for told in monitor.records] == [0, 1, 2]
    for told in monitor.records:
        assert told["status"] == "stepped"
        assert told["gsi_all"] >= 1 - 1e-12
        assert set(told["groups"]) == {"weight", "bias"}
        assert {"gsi", "baseline", "scale"} <= set(told["groups"]["weight"])
        assert set(told["tensors"]) == {"weight", "bias"}
        json.dumps(told, allow_nan=False)


def test_buffers_are_not_taken_for_parameters():
    start = model(normed=True)
    alone = run(FedAvg(), clients(4, Normed), start=start)
    monitor = Monitor(FedAvg())
    assert same(run(monitor, clients(4, Normed), start=start), alone)
    assert set(monitor.records[0]["tensors"]) == {"weight", "bias"}


def test_the_numbers_are_those_of_the_clients_updates():
    """GSI = sqrt(Σ w‖g‖² / ‖Σ w g‖²) with w by the samples, in NumPy, round by round."""
    monitor = Monitor(FedAvg(fraction_evaluate=0.0))
    population = clients(5)
    run(monitor, population)
    theta = {name: value.astype(float) for name, value in model().items()}
    shares = np.array([own.n for own in population]) / sum(own.n for own in population)
    for told in monitor.records:
        trained = [own.train(theta) for own in population]
        tops, bottoms = 0.0, 0.0
        for name in theta:
            g = [theta[name] - x[name] for x in trained]
            mean = sum(w * x for w, x in zip(shares, g, strict=True))
            top = sum(w * np.square(x).sum() for w, x in zip(shares, g, strict=True))
            bottom = np.square(mean).sum()
            gsi = told["groups"][name]["gsi"]
            assert gsi == pytest.approx(math.sqrt(top / bottom), rel=1e-3)
            tops, bottoms = tops + top, bottoms + bottom
            theta[name] = theta[name] - mean
        assert told["gsi_all"] == pytest.approx(math.sqrt(tops / bottoms), rel=1e-3)
        told_shares = {str(client["id"]): client["weight"] for client in told["clients"]}
        assert sorted(told_shares.values()) == pytest.approx(sorted(shares))


def test_what_the_adapter_would_have_done_is_recorded_and_not_done():
    alone = run(FedAvg(), clients(5))
    monitor = Monitor(FedAvg(), Fixed(value=0.25))
    assert same(run(monitor, clients(5)), alone)
    assert {g["scale"] for told in monitor.records for g in told["groups"].values()} == {0.25}
    monitor = Monitor(FedAvg(), adapter=Glad(gamma=0.5))
    assert same(run(monitor, clients(5)), alone)
    assert len({told["groups"]["weight"]["scale"] for told in monitor.records}) > 1


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning")
@pytest.mark.parametrize("fault", ACCEPTED)
def test_what_the_inner_strategy_accepts_is_passed_through_and_noted(fault: str):
    spoil, since, _, _ = ACCEPTED[fault]
    inner = FedAvg(fraction_evaluate=0.0)
    alone = run(FedAvg(fraction_evaluate=0.0), with_one(spoil, since=since))
    monitor = Monitor(inner)
    found = run(monitor, with_one(spoil, since=since))
    assert bits(found.arrays) == bits(alone.arrays)
    assert len(monitor.records) == 3
    first = monitor.records[since - 1]
    assert len(rejected(first)) == 1
    assert all(json.dumps(told, allow_nan=False) for told in monitor.records)


@pytest.mark.parametrize("fault", DEADLY)
def test_what_kills_the_inner_strategy_kills_it_with_the_same_error(fault: str):
    spoil, _ = DEADLY[fault]
    errors: list[BaseException] = []
    for strategy in (FedAvg(fraction_evaluate=0.0), Monitor(FedAvg(fraction_evaluate=0.0))):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run(strategy, with_one(spoil), rounds=1)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])


def test_a_client_that_fails_is_noted():
    class Raises(Linear):
        def train(self, arrays: Any) -> Any:
            raise OSError("no space left")

    population = clients(5)
    population[BAD] = Raises(BAD)
    alone = run(FedAvg(), population)
    monitor = Monitor(FedAvg())
    assert same(run(monitor, population), alone)
    for told in monitor.records:
        (reason,) = rejected(told).values()
        assert "no space left" in reason
        assert len(told["clients"]) == 5


def test_if_all_fail_it_is_the_inner_strategys_affair():
    class Raises(Linear):
        def train(self, arrays: Any) -> Any:
            raise OSError("no space left")

    population: list[Linear] = [Raises(k) for k in range(3)]
    alone = run(FedAvg(), population)
    monitor = Monitor(FedAvg())
    assert same(run(monitor, population), alone)
    assert [told["status"] for told in monitor.records] == ["skipped"] * 3


def test_replies_that_can_be_read_once_only():
    """`aggregate_train` may be given a generator: the inner strategy still gets every reply."""
    monitor = Monitor(FedAvg(fraction_evaluate=0.0))
    alone = FedAvg(fraction_evaluate=0.0)
    found: list[Any] = []
    from flwr.app import ConfigRecord

    for strategy in (alone, monitor):
        random.seed(4)
        grid = LocalGrid(clients(4), salt=2)
        sent = strategy.configure_train(1, record(model()), ConfigRecord(), grid)
        replies = list(grid.send_and_receive(sent))
        given = replies if strategy is alone else (reply for reply in replies)
        arrays, _ = strategy.aggregate_train(1, given)
        assert arrays is not None
        found.append(bits(arrays))
    assert found[0] == found[1]


def test_a_strategy_around_it_gets_every_round_too():
    """Flower's differential privacy calls the parts of a strategy, not its `start`."""

    def private(inner: Strategy) -> Strategy:
        return DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e6, 5)

    alone = run(private(FedAvg()), clients(5))
    monitor = Monitor(FedAvg())
    assert same(run(private(monitor), clients(5)), alone)
    assert [told["round"] for told in monitor.records] == [0, 1, 2]


def test_a_strategy_of_the_users_own_that_does_odd_things():
    """Its `start` is its own, its round may train nobody, its model may change between rounds."""

    class Odd(FedAvg):
        def configure_train(self, server_round: int, *args: Any) -> Any:
            return [] if server_round == 2 else super().configure_train(server_round, *args)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            if arrays is None:
                return None, None
            return record({n: x + np.float32(1) for n, x in numpy(arrays).items()}), metrics

        def start(self, *args: Any, **settings: Any) -> Result:
            found = super().start(*args, **settings)
            found.train_metrics_clientapp[99] = MetricRecord({"own": 1})
            return found

    alone = run(Odd(), clients(4))
    monitor = Monitor(Odd())
    found = run(monitor, clients(4))
    assert same(found, alone)
    assert 99 in found.train_metrics_clientapp
    stepped = [told["round"] for told in monitor.records if told["status"] == "stepped"]
    assert stepped == [0, 2]


def test_its_folder_is_that_of_a_run(tmp_path: Path):
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.5 + server_round / 100, "loss": 1.0})

    folder = tmp_path / "watched"
    monitor = Monitor(FedAvg(), checkpoint_dir=folder)
    run(monitor, clients(4), evaluate_fn=evaluate)
    lines = Run(folder).rounds()
    assert facts(lines) == facts(json.loads(json.dumps(monitor.records)))
    assert [told["test_accuracy"] for told in lines] == pytest.approx([0.51, 0.52, 0.53])
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3


def test_a_folder_that_is_used_or_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    alone = run(FedAvg(), clients(4))
    (tmp_path / "file").write_text("not a folder")
    first = Monitor(FedAvg(), checkpoint_dir=tmp_path / "run")
    assert same(run(first, clients(4)), alone)
    lines = (tmp_path / "run/rounds.jsonl").read_bytes()
    for folder in ("run", "file", "file/below", "{run}/x"):
        monitor = Monitor(FedAvg(), checkpoint_dir=tmp_path / folder)
        assert same(run(monitor, clients(4)), alone)
        assert len(monitor.records) == 3
    assert (tmp_path / "run/rounds.jsonl").read_bytes() == lines
    for number in ("1", "2"):
        run(Monitor(FedAvg(), checkpoint_dir=tmp_path / "out" / "{run}"), clients(4))
        assert (tmp_path / "out" / number / "summary.json").is_file()


def test_a_folder_that_goes_away_stops_nobody(tmp_path: Path):
    alone = run(FedAvg(), clients(4))

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 2:
            shutil.rmtree(tmp_path / "run")

    monitor = Monitor(FedAvg(), checkpoint_dir=tmp_path / "run")
    assert same(run(monitor, clients(4), evaluate_fn=evaluate), alone)
    assert len(monitor.records) == 3


PEAK = """
import resource, sys
import numpy as np
from flwr.serverapp.strategy import FedAvg
from fedglad.flower import Monitor
from tests.flower.grid import Linear, LocalGrid, record

class Large(Linear):
    def train(self, arrays):
        step = np.float32(0.01 * (1 + self.partition))
        return {name: value + step for name, value in arrays.items()}
    def metrics(self, arrays):
        return {"num-examples": 10}

count = 24_000_000
arrays = record({f"w{k}": np.ones(count // 4, np.float32) for k in range(4)})
inner = FedAvg(fraction_evaluate=0.0)
strategy = Monitor(inner) if sys.argv[1] == "monitored" else inner
strategy.start(LocalGrid([Large(k) for k in range(4)]), arrays, num_rounds=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / (4 * count))
"""


@pytest.mark.slow
def test_it_costs_two_models_of_memory():
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    peaks = [
        float(subprocess.check_output([sys.executable, "-c", PEAK, kind], env=env, timeout=120))
        for kind in ("alone", "monitored")
    ]
    assert peaks[1] - peaks[0] < 2.3  # θ, the sums, and a few pages
