"""Aggregation on a machine that has other things to do: `make bench BENCH=busy`.

Four clients' models of 60 million parameters in 161 tensors, as a Flower server has them: NumPy
arrays. Our server's round and the mean that Flower's FedAvg takes, in turn, idle and beside two
processes that loop. The median and the slowest of `--repeats` rounds each.

    python benchmarks/busy.py [--repeats 5] [--loops 2] [--quick]
"""

import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
from _shared import load, machine, options, table
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from fedglad import Glad, Server, Update
from fedglad.averages import EMA
from fedglad.core.threads import threads

CLIENTS, TENSORS, SIZE = 4, 161, 60_000_000


def models() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    size = SIZE // TENSORS
    return [
        {f"layer{i}": rng.standard_normal(size, dtype=np.float32) for i in range(TENSORS)}
        for _ in range(CLIENTS)
    ]


@contextmanager
def loops(count: int) -> Generator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def in_turn(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin)
    return taken


def main() -> None:
    assert __doc__
    parser = options(__doc__.splitlines()[0], rounds=1)
    parser.add_argument("--loops", type=int, default=2, help="processes that loop")
    given = parser.parse_args()
    repeats = 2 if given.quick else given.repeats
    print(f"{machine()}; {torch.get_num_threads()} threads; load before {load()}")
    sent = models()
    records = [
        RecordDict(
            {
                "arrays": ArrayRecord({name: Array(array) for name, array in model.items()}),
                "metrics": MetricRecord({"num-examples": 100.0}),
            }
        )
        for model in sent
    ]
    servers = {
        "fedglad": Server(sent[0]),
        "fedglad, GLAD": Server(sent[0], adapter=Glad()),
        "fedglad, GLAD and EMA": Server(sent[0], adapter=Glad(), average=EMA()),
    }

    def play(server: Server) -> None:
        updates = (Update(model=model, weight=100.0, client=k) for k, model in enumerate(sent))
        assert server.step(updates).stepped

    def alone(server: Server) -> None:
        with threads(1):
            play(server)

    runs: dict[str, Callable[[], object]] = {
        "Flower's FedAvg": lambda: aggregate_arrayrecords(records, "num-examples"),
        **{name: lambda server=server: play(server) for name, server in servers.items()},
        "fedglad, GLAD, one thread": lambda: alone(servers["fedglad, GLAD"]),
    }
    in_turn(runs, 1)
    idle = in_turn(runs, repeats)
    with loops(given.loops):
        busy = in_turn(runs, repeats)
    first = next(iter(runs))
    rows = [
        [
            *(name, f"{median(idle[name]):.2f}", f"{median(busy[name]):.2f}"),
            *(f"{max(busy[name]):.2f}", f"{median(busy[name]) / median(busy[first]):.2f}"),
        ]
        for name in runs
    ]
    head = ["a round", "s idle", f"s beside {given.loops} loops", "slowest", "× FedAvg beside them"]
    table(head, rows)
    print(f"\nmedians of {repeats}; load {load()} after")


if __name__ == "__main__":
    main()
