"""Time and memory of a round as the population and the cohort grow (W4): `make bench BENCH=scale`.

Softmax regression 64 → 10 on synthetic clients of 16 samples, one step of SGD each, FedGLAD. Every
row is a process of its own: a peak never comes down again.

    python benchmarks/scale.py [--rounds 20] [--repeats 5] [--quick]
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

from _shared import load, machine, options, table

from fedglad.config.schema import Config
from fedglad.simulation.simulation import Simulation

POPULATIONS = [(10**k, 10) for k in range(2, 7)]
COHORTS = [(population, cohort) for population in (10**4, 10**6) for cohort in (100, 1000)]
ENGINES = {"serial": {}, "local": {"workers": 2}}


def measure(engine: str, population: int, cohort: int, rounds: int) -> dict[str, float]:
    begin = time.perf_counter()
    config = Config.of(
        {
            "rounds": 10**9,
            "eval_every": 10**9,
            "data": {"name": "synthetic", "clients": population, "features": 64, "samples": 16},
            "model": {"name": "softmax", "features": 64},
            "client": {"optimizer": "sgd", "lr": 0.1, "batch_size": 16},
            "sampler": {"clients_per_round": cohort},
            "adapter": {"name": "glad"},
            "engine": {"name": engine, **ENGINES[engine]},
        }
    )
    with closing(Simulation(config.plan())) as simulation:
        ready = time.perf_counter() - begin
        running = simulation.rounds()
        next(running)
        times: list[float] = []
        for _ in range(rounds):
            begin = time.perf_counter()
            next(running)
            times.append(1000 * (time.perf_counter() - begin))
        workers = [child.pid for child in multiprocessing.active_children()]
        pids = [os.getpid(), *(pid for pid in workers if pid)]
        return {
            "set-up": ready,
            "best": min(times),
            "median": statistics.median(times),
            "peak": sum(megabytes(pid, "status", "VmHWM") for pid in pids),
            "shared": sum(megabytes(pid, "smaps_rollup", "Pss") for pid in pids),
        }


def megabytes(pid: int, file: str, field: str) -> float:
    with open(f"/proc/{pid}/{file}") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith(f"{field}:")) / 1024


def in_a_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)


def main() -> None:
    parser = options("Population and cohort", rounds=20)
    parser.add_argument("--one", nargs=4, help="(internal) engine, population, cohort, rounds")
    chosen = parser.parse_args()
    if chosen.one:
        engine, *numbers = chosen.one
        print(json.dumps(measure(engine, *map(int, numbers))))
        return
    rounds, repeats = (2, 1) if chosen.quick else (chosen.rounds, chosen.repeats)
    print(f"{machine()}; load {load()}")
    cases = [(engine, *size) for engine in ENGINES for size in POPULATIONS + COHORTS]
    # All cases in turn, several times: none of them has the quiet minute for itself.
    found = [{case: in_a_process(*case, rounds) for case in cases} for _ in range(repeats)]

    def least(case: tuple[str, int, int], key: str, digits: int = 1) -> str:
        return f"{min(turn[case][key] for turn in found):.{digits}f}"

    head = ("engine", "population", "cohort", "ms a round, best", "median", "set-up s")
    table(
        (*head, "peak MB, each process", "MB, shared counted once"),
        [
            (
                *(case[0], f"{case[1]:,}", f"{case[2]:,}"),
                *(least(case, "best"), least(case, "median"), least(case, "set-up", 2)),
                *(least(case, "peak", 0), least(case, "shared", 0)),
            )
            for case in cases
        ],
    )
    print(f"\nbest of {repeats} processes of {rounds} rounds; load {load()} after")


if __name__ == "__main__":
    main()
