"""What do the records of a long run cost, on the disk and to read? `make bench BENCH=records`.

A made-up federation: 3,000 rounds of 161 tensors and 20 of 1,000 clients, written as a run writes
them, with its older rounds in compressed parts and without. MB on the disk, and of each way to read
them the seconds and the peak of memory above that of the imports, each in a process of its own.

    python benchmarks/records.py [--rounds 3000] [--tensors 161] [--clients 20] [--quick]
"""

import argparse
import inspect
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _shared import machine, table

from fedglad.config.schema import load
from fedglad.runs import parts
from fedglad.runs.folder import Records
from fedglad.runs.reader import Run
from fedglad.runs.summary import write_summary

POPULATION = 1000


def records(rounds: int, tensors: int, clients: int) -> Iterator[dict[str, Any]]:
    """Random walks with all digits, in the fields of a federation's rounds; a group a tensor."""
    rng = np.random.default_rng(0)
    names = [f"encoder.layer.{k // 16}.attention.part{k % 16}.weight" for k in range(tensors)]
    sums, factors = ("sum_sq", "sum_sq2", "mean_sq"), ("gsi", "baseline", "scale")
    for t in range(rounds):
        cohort = rng.choice(POPULATION, clients, replace=False).tolist()
        figures = zip(*rng.random((3, clients)).tolist(), strict=True)
        yield {
            "round": t,
            "status": "stepped",
            "clients": [
                {"id": f"partition-{k}", "weight": w, "loss": loss, "sq_norm": norm}
                for k, (w, loss, norm) in zip(cohort, figures, strict=True)
            ],
            "train_loss": float(rng.random()),
            "gsi_all": 2 + float(rng.random()),
            "gsi_unfiltered": 2 + float(rng.random()),
            "tensors": _rows(names, sums, rng.random((tensors, 3))),
            "groups": _rows(names, factors, 1 + rng.random((tensors, 3))),
            "test_loss": float(rng.random()),
            "test_accuracy": float(1 - 0.9 * np.exp(-t / 500)),
            "label_similarity": None,
            "alarm": None,
            "seconds": {"train": float(rng.random()), "test": float(rng.random())},
        }


def _rows(names: list[str], keys: tuple[str, ...], of: np.ndarray) -> dict[str, dict[str, float]]:
    rows = zip(names, of.tolist(), strict=True)
    return {name: dict(zip(keys, row, strict=True)) for name, row in rows}


def make(folder: Path, rounds: int, tensors: int, clients: int) -> None:
    """Writes a finished run."""
    folder.mkdir()
    config = load("digits", {"rounds": rounds, "data.clients": POPULATION})[1]
    (folder / "config.toml").write_text(config.to_toml())
    with Records(folder / "rounds.jsonl") as lines:
        for record in records(rounds, tensors, clients):
            lines.write(record)
    write_summary(Run(folder))


def strict(folder: Path) -> None:
    """Run.rounds()"""
    Run(folder).rounds()


def one_pass(folder: Path) -> None:
    """Run.iter_rounds(), one after the other"""
    for _ in Run(folder).iter_rounds():
        pass


def view(folder: Path) -> None:
    """Run.read()"""
    Run(folder).read()


def report(folder: Path) -> None:
    """fedglad report"""
    _command("report", str(folder), "--out", str(folder.parent / "report.html"))


def compare(folder: Path) -> None:
    """fedglad compare"""
    _command("compare", str(folder), "--json")


def check(folder: Path) -> None:
    """fedglad check"""
    _command("check", str(folder))


WAYS = (view, strict, one_pass, report, compare, check)


def _command(*words: str) -> None:
    from contextlib import redirect_stdout, suppress
    from io import StringIO

    from fedglad.cli.main import app

    with redirect_stdout(StringIO()), suppress(SystemExit):
        app(list(words))


def measured(way: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    """Seconds, and MB at the peak above what was there before it began."""
    code = [sys.executable, __file__, "--measure", way.__name__, str(folder)]
    done = subprocess.run(code, check=True, capture_output=True, text=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def measure(name: str, folder: Path) -> None:
    """In a process of its own; a first time with a small run, which imports what is needed."""
    way = next(way for way in WAYS if way.__name__ == name)
    with tempfile.TemporaryDirectory() as place:
        make(Path(place) / "small", 3, 2, 2)
        way(Path(place) / "small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    way(folder)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([seconds, (peak - before) / 1024]))


def main() -> None:
    parser = argparse.ArgumentParser(description="What the records of a long run cost.")
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--tensors", type=int, default=161)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="30 rounds: does it work?")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.measure[0], Path(chosen.measure[1]))
        return
    size = (30 if chosen.quick else chosen.rounds, chosen.tensors, chosen.clients)
    print(f"{machine()}; {size[0]:,} rounds of {size[1]} tensors and {size[2]} clients")
    with tempfile.TemporaryDirectory() as place:
        folders = {"one file": Path(place) / "whole", "parts": Path(place) / "parts"}
        limit, parts.LIMIT = parts.LIMIT, sys.maxsize
        make(folders["one file"], *size)
        parts.LIMIT = limit // 100 if chosen.quick else limit
        make(folders["parts"], *size)
        for name, folder in folders.items():
            files = [
                p for p in folder.rglob("*") if p.name.startswith("rounds") or "rounds" in p.parts
            ]
            disk = sum(path.stat().st_size for path in files if path.is_file()) / 1e6
            print(f"\n{name}: {disk:.1f} MB of records on the disk")
            rows: list[tuple[str, ...]] = []
            for way in WAYS:
                seconds, peak = measured(way, folder)
                rows.append((inspect.getdoc(way) or "", f"{seconds:.1f}", f"{peak:,.0f}"))
            table(("", "seconds", "MB at the peak"), rows)


if __name__ == "__main__":
    main()
