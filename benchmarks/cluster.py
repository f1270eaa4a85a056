"""The engine ray on two nodes of one core, against `local`: `make bench BENCH=cluster`.

A cluster of two nodes of one CPU each is made on this machine, on the loopback interface. Four
parts: W1's round (the CNN, as in compute.py) and W2's (tiny clients, as in overhead.py) in `local`
with two workers, on Ray, and on Flower's simulation engine, which runs on Ray too; what comes to
the driver in a round, by the size of the cohort, of a model of ten million parameters; and the
memory that driver, workers and object stores take meanwhile. Flower is timed by its own rounds
(it needs flwr[simulation]), with its FedAvg, in the same turns.

    python benchmarks/cluster.py [--rounds 1] [--repeats 3] [--only W1] [--quick]
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any

from _shared import best, load, machine, options, table

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}

import numpy as np
import torch

from fedglad.config.schema import Config
from fedglad.data.federation import Partitioned
from fedglad.simulation.engines.ray import RayEngine
from fedglad.simulation.simulation import Simulation

NODES, STORE = 2, 1 << 30
LOCAL, RAY, FLOWER = "fedglad, `local`, 2 workers", "fedglad, `ray`, 2 nodes", "Flower's simulation"
PARTS = ["W1", "W2", "bytes"]
W1: dict[str, Any] = {
    "model": {"name": "cnn"},
    "client": {"lr": 0.01, "batch_size": 64, "clip_norm": 1.0},
    "sampler": {"clients_per_round": 10},
}
W2: dict[str, Any] = {
    "model": {"name": "softmax", "features": 64},
    "client": {"optimizer": "sgd", "lr": 0.1, "batch_size": 16},
    "sampler": {"clients_per_round": 100},
}
WIDE: dict[str, Any] = {
    "data": {"name": "synthetic", "clients": 2000, "features": 64, "samples": 1},
    "model": {"name": "mlp", "features": 64, "hidden": [3100, 3100]},
    "client": {"optimizer": "sgd", "lr": 0.1, "batch_size": 1},
    "trust": {"name": "none"},
}
COHORTS = [16, 160, 1600]


@contextlib.contextmanager
def cluster(nodes: int = NODES) -> Generator[str | None]:
    """The address of a cluster of nodes of one CPU; it goes with its folder."""
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    settings: dict[str, Any] = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": 1,
        "object_store_memory": STORE,
        "include_dashboard": False,
        "temp_dir": str(folder),
    }
    made = Cluster(initialize_head=True, head_node_args=settings)
    try:
        for _ in range(nodes - 1):
            made.add_node(**settings)
        yield made.address
    finally:
        made.shutdown()
        rmtree(folder, ignore_errors=True)


def images() -> Partitioned:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60_000, 1, 28, 28, generator=generator)
    y = torch.randint(10, (60_000,), generator=generator)
    return Partitioned(x, y, x[:64], y[:64], list(np.arange(60_000).reshape(100, 600)))


def tiny() -> Partitioned:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16_000, 64, generator=generator)
    y = torch.randint(10, (16_000,), generator=generator)
    return Partitioned(x, y, x[:16], y[:16], list(np.arange(16_000).reshape(1000, 16)))


DATA = {"W1": images, "W2": tiny}
MODEL = {"W1": W1, "W2": W2}


def simulation(tree: dict[str, Any], engine: dict[str, Any], data: Any = None) -> Simulation:
    whole = {
        **tree,
        "rounds": 10**9,
        "eval_every": 10**9,
        "adapter": {"name": "glad"},
        "engine": engine,
    }
    return Simulation(Config.of(whole).plan(data=data))


def ray_engine(address: str | None) -> dict[str, Any]:
    return {"name": "ray", "address": address, "workers": "auto"}


# ------------------------------------------------------------------------------------- the rounds


def rounds_of(part: str, rounds: int, repeats: int, *, flower: bool) -> None:
    data = DATA[part]()
    cohort = MODEL[part]["sampler"]["clients_per_round"]
    with (
        cluster() as address,
        closing(simulation(MODEL[part], {"name": "local", "workers": 2}, data)) as local,
        closing(simulation(MODEL[part], ray_engine(address), data)) as remote,
    ):
        running = {LOCAL: local.rounds(), RAY: remote.rounds()}

        def play(one: Iterator[Any]) -> None:
            for _ in range(rounds):
                next(one)

        runs: dict[str, Any] = {name: lambda one=one: play(one) for name, one in running.items()}
        for run in runs.values():
            run()
        seconds = best(runs, repeats)
    if flower:
        seconds[FLOWER] = rounds * min(flower_rounds(part, rounds * repeats))
    table(
        (f"{part}, {cohort} clients", "s a round", "ms a client", "speed, × `local`"),
        [
            (
                name,
                f"{taken / rounds:.3f}",
                f"{1000 * taken / rounds / cohort:.2f}",
                f"{seconds[LOCAL] / taken:.2f}",
            )
            for name, taken in seconds.items()
        ],
    )
    print(f"\nbest of {repeats}, {rounds} rounds each; load {load()} after")


# ---------------------------------------------------------------------- what comes to the driver


def nbytes(answer: Any) -> int:
    """What an answer takes on its way, arrays as they lie."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(len(buffer.raw()) for buffer in buffers)


def traffic(nodes: int, cohorts: list[int]) -> list[list[str]]:
    rows: list[list[str]] = []
    for cohort in cohorts:
        tree = {**WIDE, "sampler": {"clients_per_round": cohort}}
        with cluster(nodes) as address, closing(simulation(tree, ray_engine(address))) as played:
            came: list[int] = []
            engine = played.engine
            assert isinstance(engine, RayEngine)
            groups_of = engine._groups

            def counted(t: int, message: Any, came: Any = came, groups_of: Any = groups_of) -> Any:
                came.append(nbytes(message.answer))
                return groups_of(t, message)

            engine._groups = counted  # type: ignore[method-assign]
            model = 4 * engine.layout.size / 1e6
            before = memory("status", "VmRSS")
            begin = time.perf_counter()
            next(played.rounds())
            taken = time.perf_counter() - begin
            rows.append(
                [
                    *(f"{nodes}", f"{cohort:,}", f"{-(-cohort // 16)}", f"{taken:.1f}"),
                    *(f"{sum(came) / 1e6:,.0f}", f"{sum(came) / 1e6 / model:.1f}"),
                    f"{memory('status', 'VmHWM') - before:,.0f}",
                    f"{max(trainers() or [0]):,.0f}",
                ]
            )
    return rows


def memory(file: str, field: str, pid: int | str = "self") -> float:
    with open(f"/proc/{pid}/{file}") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith(f"{field}:")) / 1024


def trainers() -> list[float]:
    """The peak memory of each worker's own, in MB: what it shares is the object store's."""
    found: list[float] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"ray::Trainer" in (entry / "cmdline").read_bytes():
                found.append(memory("status", "VmHWM", entry.name))
    return found


# ------------------------------------------------------------------------------ Flower's simulation


def flower_rounds(part: str, rounds: int) -> list[float]:
    """Seconds of each round of the same work, but the first, in a process of its own."""
    command = [sys.executable, __file__, "--flower", part, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"Flower's simulation failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def flower(part: str, rounds: int) -> None:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    tree = MODEL[part]
    data = DATA[part]()
    cohort = tree["sampler"]["clients_per_round"]
    whole = Config.of({**tree, "engine": {"name": "serial"}})
    client: Any = whole.sections["client"]
    times: list[float] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        arrays = message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        model = whole.build_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        x, y = data.client(int(context.node_config["partition-id"]))
        momentum = 0.0 if part == "W2" else 0.9
        optimizer = torch.optim.SGD(model.parameters(), lr=client.lr, momentum=momentum)
        size = client.batch_size
        for batch in torch.randperm(len(y)).split(size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            if client.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), client.clip_norm)
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        class Timed(FedAvg):
            def configure_train(self, *given: Any) -> Any:
                times.append(time.perf_counter())
                return super().configure_train(*given)

        strategy = Timed(
            fraction_train=cohort / data.clients,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=data.clients,
        )
        model = ArrayRecord(whole.build_model().state_dict())
        strategy.start(grid, model, num_rounds=rounds + 2, train_config=ConfigRecord())

    resources: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2},
    }
    run_simulation(server, app, num_supernodes=data.clients, backend_config=resources)
    seconds = [after - before for before, after in pairwise(times)]
    print(json.dumps(seconds[1:]))


def main() -> None:
    assert __doc__
    parser = options(__doc__.splitlines()[0], rounds=1, repeats=3)
    parser.add_argument("--only", action="append", choices=PARTS, help="of the parts")
    parser.add_argument("--no-flower", action="store_true", help="without Flower's simulation")
    parser.add_argument("--flower", nargs=2, help="(internal) part, rounds")
    given = parser.parse_args()
    if given.flower:
        return flower(given.flower[0], int(given.flower[1]))
    rounds, repeats = (1, 1) if given.quick else (given.rounds, given.repeats)
    print(f"{machine()}; load {load()}")
    for part in given.only or PARTS:
        if part == "bytes":
            rows = [
                row
                for nodes in (1, NODES)
                for row in traffic(nodes, COHORTS[:2] if given.quick else COHORTS)
            ]
            head = ("nodes", "cohort", "blocks", "s", "MB to the driver", "models")
            table((*head, "driver grew by MB", "worker's peak, MB"), rows)
        else:
            rounds_of(
                part, rounds * (20 if part == "W2" else 1), repeats, flower=not given.no_flower
            )
    return None


if __name__ == "__main__":
    main()
