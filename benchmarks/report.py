"""How long does a report take, and how large is it? `make bench BENCH=report`.

A made-up run, written as a real folder: 500 rounds, 200 groups (and tensors), 10 of 1,000 clients a
round, 10 classes. Seconds from the folder to the payload, to the file, and after one more round of
a run that is watched; bytes of what is read and of the page.

    python benchmarks/report.py [--rounds 500] [--groups 200] [--repeats 3] [--quick]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _shared import best, machine, table

from fedglad.config.schema import load
from fedglad.report import page
from fedglad.report.figures import payload
from fedglad.runs.reader import Run
from fedglad.runs.summary import summarise

POPULATION, COHORT, CLASSES = 1000, 10, 10


def records(rounds: int, groups: int) -> Iterator[dict[str, Any]]:
    """Random walks with all digits, as a run writes them."""
    rng = np.random.default_rng(0)
    names = [f"layer{k // 2}.block.{('weight', 'bias')[k % 2]}" for k in range(groups)]
    for t in range(rounds):
        gsi = 2 + 0.3 * rng.standard_normal(groups).clip(-3, 3)
        shares = rng.random((groups, 3))
        clients = [
            {"id": int(k), "weight": 1 / COHORT, "loss": float(x), "sq_norm": float(y)}
            for k, x, y in zip(
                rng.choice(POPULATION, COHORT, replace=False),
                rng.random(COHORT),
                rng.random(COHORT),
                strict=True,
            )
        ]
        keys = ("sum_sq", "sum_sq2", "mean_sq")
        yield {
            "round": t,
            "status": "stepped",
            "clients": clients,
            "train_loss": float(rng.random()),
            "gsi_all": float(gsi.mean()),
            "gsi_unfiltered": float(gsi.mean()),
            "tensors": {
                n: dict(zip(keys, row.tolist(), strict=True))
                for n, row in zip(names, shares, strict=True)
            },
            "groups": {
                n: {
                    "gsi": float(g),
                    "baseline": 2.0 + float(rng.random()) / 10,
                    "scale": float(g) / 2,
                }
                for n, g in zip(names, gsi, strict=True)
            },
            "test_loss": float(rng.random()),
            "test_accuracy": float(1 - 0.9 * np.exp(-t / 50)),
            "label_similarity": float(rng.random()),
            "alarm": None,
            "seconds": {"train": float(rng.random()), "test": float(rng.random())},
        }


def make(folder: Path, rounds: int, groups: int) -> None:
    found = list(records(rounds, groups))
    config = load("digits", {"rounds": rounds, "data.clients": POPULATION})[1]
    (folder / "config.toml").write_text(config.to_toml())
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    (folder / "summary.json").write_text(json.dumps(summarise(found)))
    counts = np.random.default_rng(1).integers(0, 60, (POPULATION, CLASSES))
    (folder / "labels.json").write_text(json.dumps({"counts": counts.tolist()}))


def one_more_round(folder: Path, rounds: int, groups: int) -> float:
    """Seconds until a watched run's page has a new round."""
    run = Run(folder)
    payload([run.read()], live=True)
    *_, last = records(rounds + 1, groups)
    with open(folder / "rounds.jsonl", "a") as file:
        file.write(json.dumps(last) + "\n")
    begin = time.perf_counter()
    page.data(payload([run.read()], live=True))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a report takes, and how large it is.")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="timings; the best counts")
    parser.add_argument("--quick", action="store_true", help="20 rounds, once: does it work?")
    chosen = parser.parse_args()
    rounds, repeats = (20, 1) if chosen.quick else (chosen.rounds, chosen.repeats)
    print(f"{machine()}; {rounds} rounds, {chosen.groups} groups, {COHORT} clients a round")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(folder, rounds, chosen.groups)
        view = Run(folder).read()
        told = payload([view])
        seconds = best(
            {
                "read the folder": lambda: Run(folder).read(),
                "figures": lambda: payload([view]),
                "write the page": lambda: page.write(told, folder / "report.html"),
            },
            repeats,
        )
        size = {
            "rounds.jsonl": (folder / "rounds.jsonl").stat().st_size,
            "data in the page": len(page.data(told)),
            "page": (folder / "report.html").stat().st_size,
        }
        seconds["all"] = sum(seconds.values())
        seconds["one more round, watched"] = one_more_round(folder, rounds, chosen.groups)
    table(("step", "seconds"), [(name, f"{value:.2f}") for name, value in seconds.items()])
    table(("what", "MB"), [(name, f"{value / 1e6:.2f}") for name, value in size.items()])


if __name__ == "__main__":
    main()
