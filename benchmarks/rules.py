"""Which rule knows a round's optimal rate? `make bench BENCH=rules`.

N = 100 clients with fixed updates, 10 a round without replacement, equal weights, one group of 200
parameters. The optimal rate of a round is η_o = ⟨ḡ, g_c⟩/‖ḡ‖² with g_c the mean of all clients.
First table: the correlation of log η_o with the log of each rule's factor without bounds (γ = ∞),
over the rounds of a run from the third on, then the mean over seeds ± its standard error. Second:
the standard deviation of log η_o − log s over that of log η_o: below 1 the rule is better than a
constant rate. Rounds in which either rate is not positive are left out.

    python benchmarks/rules.py [--rounds 60] [--seeds 40] [--quick]
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
from _shared import machine, table

from fedglad.adapters import Adapter, Aligned, FedExP, FedHyper, Glad, Pooled
from fedglad.records import Statistics

N, COHORT, SIZE, CLASSES, COMMON = 100, 10, 200, 10, 0.3
Array = np.ndarray
RULES: dict[str, Adapter] = {
    "glad (GSI)": Glad(gamma=math.inf),
    "fedexp": FedExP(eps=0),
    "fedhyper": FedHyper(),
    "pooled": Pooled(gamma=math.inf),
    "aligned": Aligned(gamma=math.inf),
}


def directions(rng: np.random.Generator, count: int) -> Array:
    """Vectors of length about 1."""
    return rng.standard_normal((count, SIZE)) / math.sqrt(SIZE)


def label_skew(rng: np.random.Generator) -> Array:
    """Each class pulls its own way; a client's classes are Dirichlet(0.1)."""
    pulls = directions(rng, CLASSES)
    shares = rng.dirichlet(np.full(CLASSES, 0.1), N)
    return COMMON * directions(rng, 1) + shares @ (pulls - pulls.mean(axis=0))


def isotropic(rng: np.random.Generator) -> Array:
    """A common part, and as much noise in every direction."""
    return COMMON * directions(rng, 1) + directions(rng, N)


def heavy_tailed(rng: np.random.Generator) -> Array:
    """Isotropic clients whose lengths are log-normal, σ = 1."""
    return isotropic(rng) * np.exp(rng.standard_normal((N, 1)))


POPULATIONS = (label_skew, isotropic, heavy_tailed)


def factors(clients: Array, rounds: int, shrinking: float, rng: np.random.Generator) -> Array:
    """η_o and every rule's factor, round by round (round, 1 + rule)."""
    groups = {name: rule.group({"g": SIZE}) for name, rule in RULES.items()}
    states = {name: rule.start(groups[name]) for name, rule in RULES.items()}
    past = {name: np.zeros(SIZE) for name in RULES}
    found: list[list[float]] = []
    for t in range(rounds):
        g = clients[rng.choice(N, COHORT, replace=False)] * shrinking**t
        mean, everyone = g.mean(axis=0), clients.mean(axis=0) * shrinking**t
        sum_sq, mean_sq = float((g**2).sum()) / COHORT, float(mean @ mean)
        row = [float(mean @ everyone) / mean_sq]
        for name, rule in RULES.items():
            stats = Statistics(
                sum_sq={"g": sum_sq},
                sum_sq2={"g": sum_sq / COHORT},
                mean_sq={"g": mean_sq},
                weights=(1 / COHORT,) * COHORT,
                N=N,
                direction={"g": float(mean @ past[name])},
            )
            answer, states[name] = rule.adapt(stats, groups[name], states[name], t)
            row.append(float(answer.scale[0]))
            if rule.direction is not None:
                past[name] = rule.direction * past[name] + (1 - rule.direction) * mean
        found.append(row)
    return np.array(found)


def correlation(optimal: Array, s: Array) -> float:
    return float(np.corrcoef(optimal, s)[0, 1]) if s.std() > 1e-12 else math.nan


def error(optimal: Array, s: Array) -> float:
    return float((optimal - s).std() / optimal.std())


def judged(found: Array, judge: Callable[[Array, Array], float]) -> list[float]:
    """One number a rule."""
    numbers: list[float] = []
    for column in found[2:, 1:].T:
        both = (found[2:, 0] > 0) & (column > 0)
        numbers.append(judge(np.log(found[2:, 0][both]), np.log(column[both])))
    return numbers


def cell(values: Array) -> str:
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return "–"
    return f"{known.mean():.2f} ± {known.std(ddof=1) / math.sqrt(len(known)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Which rule knows a round's optimal rate?")
    parser.add_argument("--rounds", type=int, default=60, help="rounds in one run")
    parser.add_argument("--seeds", type=int, default=40, help="runs of each population")
    parser.add_argument("--quick", action="store_true", help="three runs: does it work?")
    chosen = parser.parse_args()
    seeds = 3 if chosen.quick else chosen.seeds
    print(f"{machine()}; seeds 0 to {seeds - 1}, {chosen.rounds} rounds")
    runs: dict[str, list[Array]] = {}
    for shrinking, how in ((1.0, "as long in every round"), (0.97, "3 % shorter every round")):
        for kind, population in enumerate(POPULATIONS):
            rows = runs[f"{population.__name__.replace('_', ' ')}, {how}"] = []
            for seed in range(seeds):
                rng = np.random.default_rng([seed, kind])
                rows.append(factors(population(rng), chosen.rounds, shrinking, rng))
    for title, judge in {"correlation": correlation, "error": error}.items():
        table(
            (f"{title}; the clients", *RULES),
            [
                (name, *map(cell, np.array([judged(found, judge) for found in rows]).T))
                for name, rows in runs.items()
            ],
        )
    missing = {n: np.mean([(f[2:] <= 0).any(axis=1).mean() for f in x]) for n, x in runs.items()}
    print("\nrounds with a rate that is not positive: ", end="")
    print(", ".join(f"{share:.0%} ({name})" for name, share in missing.items()))


if __name__ == "__main__":
    main()
