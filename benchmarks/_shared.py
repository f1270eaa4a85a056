"""What the benchmarks share: the machine in one line, taking turns, and tables."""

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch


def load() -> str:
    return " ".join(f"{x:.2f}" for x in os.getloadavg())


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        models = (line.split(":")[1].strip() for line in file if line.startswith("model name"))
        cpu = next(models, platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu}, {os.cpu_count()} cores; {versions}"


def options(about: str, *, rounds: int, repeats: int = 5) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds in one timing")
    parser.add_argument("--repeats", type=int, default=repeats, help="timings; the best counts")
    parser.add_argument("--quick", action="store_true", help="one round, twice: does it work?")
    return parser


def best(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each, in seconds; they take turns, so that all meet the same machine."""
    shortest = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            shortest[name] = min(shortest[name], time.perf_counter() - begin)
    return shortest


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
