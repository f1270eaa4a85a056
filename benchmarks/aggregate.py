"""One round of aggregation against the machine's limit (W3): `make bench`.

10 updates of a 66-million-parameter model in 100 tensors. The floors do no checking, no norms and
no step: `added one by one` adds each update to a preallocated sum; `added in blocks` does so block
by block, so that the sum stays in the cache and each update is all that is read from memory. All
are run in turn, several times, and the best time of each counts. With `varp` each client's last
update lies in the temporary folder: a round writes the cohort's, and reads them and those before.

    python benchmarks/aggregate.py [--repeats 5] [--memory] [--quick]
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from _shared import best, load, machine, options, table
from torch import Tensor

from fedglad import Glad, Record, Server, Update
from fedglad.averages import EMA
from fedglad.estimators import VARP
from fedglad.filters import MultiKrum
from fedglad.optimizers import SGD, Adam

TENSORS, SIZE, COHORT = 100, 660_000, 10
BLOCK = 1 << 18
MODEL_MB = TENSORS * SIZE * 4 / 2**20


def draw(scale: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer{i}.weight": torch.randn(SIZE, generator=generator).mul_(scale)
        for i in range(TENSORS)
    }


def make_updates(n: int) -> list[dict[str, Tensor]]:
    return [draw(1e-3, seed) for seed in range(n)]


def server_of(kind: str, model: dict[str, Tensor]) -> Server:
    return Server(
        model,
        optimizer=Adam(lr=1e-3) if "Adam" in kind else SGD(),
        adapter=Glad() if "GLAD" in kind else None,
        filter=MultiKrum(f=1) if "Krum" in kind else None,
        estimator=VARP() if "varp" in kind else None,
        average=EMA() if "ema" in kind else None,
    )


def accepted(record: Record) -> None:
    assert record.stepped
    assert not record.rejected


def time_all(repeats: int) -> dict[str, float]:
    updates, model = make_updates(COHORT), draw(1e-2, seed=99)
    total = {name: torch.zeros(SIZE) for name in updates[0]}

    def one_by_one() -> None:
        first, *rest = updates
        for name, value in total.items():
            torch.mul(first[name], 1 / COHORT, out=value)
        for update in rest:
            for name, value in total.items():
                value.add_(update[name], alpha=1 / COHORT)

    def in_blocks() -> None:
        for name, value in total.items():
            parts = [update[name].split(BLOCK) for update in updates]
            for block, first, *rest in zip(value.split(BLOCK), *parts, strict=True):
                torch.mul(first, 1 / COHORT, out=block)
                for part in rest:
                    block.add_(part, alpha=1 / COHORT)

    runs: dict[str, Callable[[], object]] = {
        "floor: added one by one": one_by_one,
        "floor: added in blocks": in_blocks,
    }
    for kind in ("FedAvg", "FedAvg + GLAD", "FedAvg + GLAD + ema", "FedAdam + GLAD"):
        server = server_of(kind, model)
        runs[kind] = lambda server=server: accepted(server.step(updates))
        runs[f"{kind}, streamed"] = lambda server=server: accepted(server.step(iter(updates)))
    remembering = server_of("FedAvg + GLAD + varp", model)
    named = [Update(update, client=k) for k, update in enumerate(updates)]
    runs["FedAvg + GLAD + varp"] = lambda: accepted(remembering.step(named, population=100))
    runs["FedAvg + GLAD + varp, streamed"] = lambda: accepted(
        remembering.step(iter(named), population=100)
    )
    keeping = server_of("multi-Krum + GLAD", model)
    runs["multi-Krum + GLAD (keeps all)"] = lambda: keeping.step(updates)

    seconds = best(runs, repeats)
    print(f"varp has {_disk_mb(remembering):,.0f} MB of {COHORT} clients on disk")
    return seconds


def peak_memory(kind: str, count: int) -> float:
    """Peak memory beyond the caller's model and updates, in model sizes; `count` are streamed."""
    updates, model = make_updates(2), draw(1e-2, seed=99)

    def stream() -> Iterator[Update]:
        for k in range(count):
            yield Update(updates[k % 2], client=k if "varp" in kind else None)

    before = _memory_mb("VmRSS")
    server = server_of(kind, model)
    assert server.step(stream(), population=count).stepped
    return (_memory_mb("VmHWM") - before) / MODEL_MB


def _disk_mb(server: Server) -> float:
    """What the server's estimator keeps."""
    assert server._estimated
    files = (path for path in server._estimated.store.folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files) / 2**20


def _memory_mb(field: str) -> float:
    """VmRSS: now; VmHWM: at most, since this process began (getrusage counts its parent's, too)."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = options("One round of aggregation", rounds=1)
    parser.add_argument("--memory", action="store_true", help="also measure peak memory (minutes)")
    parser.add_argument("--peak", nargs=2, metavar=("KIND", "COUNT"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak:
        print(peak_memory(chosen.peak[0], int(chosen.peak[1])))
        return
    repeats = 2 if chosen.quick else chosen.repeats
    print(f"{machine()}; load {load()}")
    seconds = time_all(repeats)
    one, blocks = seconds["floor: added one by one"], seconds["floor: added in blocks"]
    table(
        ("round", "seconds", "× one by one", "× in blocks"),
        [
            (name, f"{taken:.3f}", f"{taken / one:.2f}", f"{taken / blocks:.2f}")
            for name, taken in seconds.items()
        ],
    )
    work = f"{COHORT} updates, {TENSORS} × {SIZE:,} float32"
    print(f"\n{work}; best of {repeats}; load {load()} after")
    if chosen.memory:
        table(("streamed round", "peak memory, model sizes"), peaks())


def peaks() -> Iterator[tuple[str, str]]:
    for kind in ("FedAvg + GLAD", "FedAvg + GLAD + ema", "FedAvg + GLAD + varp", "FedAdam + GLAD"):
        for count in (10,) if "varp" in kind else (10, 1000):  # 1000 would be 264 GB on disk
            # A process of its own each: a peak never comes down again.
            command = [sys.executable, __file__, "--peak", kind, str(count)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            yield f"{kind}, {count:,} updates", f"{float(out):.2f}"


if __name__ == "__main__":
    main()
