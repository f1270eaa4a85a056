"""Does the alarm find bad rounds? Runs on digits with some rounds forced; no timing.

    python benchmarks/alarm.py                     # precision, recall, false alarms of `Alarm()`
    python benchmarks/alarm.py --fit --seeds 1,2,3 # thresholds of the rule and of its rivals

A run has 60 rounds, of which 6, from the tenth on and at random, are forced. Either all clients of
the cohort hold the same class, in three rounds each

- pure: and nothing else,
- mostly: and 30 % others;

or 20 % of the cohort are outliers in one round, and 40 % in another, of each form

- permuted: they train on labels moved up by a number from 1 to 9,
- flipped: they send the opposite of their update,
- boosted: they send ten times their update.

All other cohorts are drawn at random from 50 ordinary clients. A seed fixes the partition, the
cohorts, the first weights and the batches. One run for every seed, partition, server optimizer
with a size of cohort, and kind of forced round. `--keep DIR` keeps them and finds them again.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _forced import FORCED, FORMS, PARTITIONS, ROUNDS, SERVERS, Array, Played, campaign
from _shared import machine, table

from fedglad.trust import Alarm

FALSE = 0.025  # false alarms a flag may give while its threshold is chosen: 5 % for both

# ------------------------------------------------------------------------------------------ rules


def running(x: Array, beta: float) -> Array:
    """For every round the bias-corrected running mean of those before it; NaN for the first."""
    mean, out = 0.0, [math.nan]
    for t, value in enumerate(x[:-1]):
        mean = beta * mean + (1 - beta) * value
        out.append(mean / (1 - beta ** (t + 1)))
    return np.array(out)


def ratio(run: Played, beta: float) -> Array:
    gsi = np.array(run.gsi)
    return gsi / running(gsi, beta)


def geometric(run: Played, beta: float) -> Array:
    log = np.log(run.gsi)
    return np.exp(log - running(log, beta))


def over_median(run: Played, beta: float) -> Array:
    """By the median of the last 2/(1 − β) rounds."""
    gsi, window = np.array(run.gsi), round(2 / (1 - beta))
    return np.array(
        [math.nan, *(gsi[t] / np.median(gsi[max(0, t - window) : t]) for t in range(1, len(gsi)))]
    )


def median_group(run: Played, beta: float) -> Array:
    gsi = np.array(run.median)
    return gsi / running(gsi, beta)


def disagreement(run: Played, beta: float) -> Array:
    spread = np.array(run.gsi) ** 2 - 1
    return spread / running(spread, beta)


def z_score(run: Played, beta: float) -> Array:
    log = np.log(run.gsi)
    mean, square = running(log, beta), running(log**2, beta)
    return (log - mean) / np.sqrt(np.maximum(square - mean**2, 1e-4))


def robust_z(run: Played, beta: float) -> Array:
    """By median and median absolute deviation of the last 2/(1 − β) rounds."""
    log, window = np.log(run.gsi), round(2 / (1 - beta))
    out = [math.nan]
    for t in range(1, len(log)):
        past = log[max(0, t - window) : t]
        centre = float(np.median(past))
        out.append((log[t] - centre) / max(1.4826 * float(np.median(abs(past - centre))), 0.02))
    return np.array(out)


def rank(run: Played, beta: float) -> Array:
    """The share of the last 2/(1 − β) rounds that were below this one."""
    window = round(2 / (1 - beta))
    gsi = np.array(run.gsi)
    below = [math.nan]
    for t in range(1, len(gsi)):
        below.append(float((gsi[max(0, t - window) : t] < gsi[t]).mean()))
    return np.array(below)


Rule = Callable[[Played, float], Array]
RULES: dict[str, Rule] = {
    "GSI / running mean": ratio,
    "GSI / running geometric mean": geometric,
    "GSI / median of the last rounds": over_median,
    "the first of the median tensor": median_group,
    "(GSI² − 1) / running mean": disagreement,
    "z-score of log GSI": z_score,
    "robust z-score of log GSI": robust_z,
    "rank among the last rounds": rank,
}


def judged(
    runs: Sequence[Played], score: Callable[[Played], Array], warmup: int, kind: str
) -> tuple[Array, Array]:
    """Scores of ordinary rounds, of all runs, and of those that were forced to be of this kind."""
    ordinary = [score(run)[warmup:][_places(run)[warmup:] == ORDINARILY] for run in runs]
    own = [run for run in runs if run.setting.kind == kind]
    forced = [score(run)[warmup:][_places(run)[warmup:] == BAD] for run in own]
    return np.concatenate(ordinary), np.concatenate(forced)


ORDINARILY, NEXT, BAD = range(3)


def _places(run: Played) -> Array:
    """Which rounds are ordinary, ordinary but right after a forced one, or forced."""
    bad = np.array(run.truth) != ""
    after = np.append(False, bad[:-1]) & ~bad
    return np.where(bad, BAD, np.where(after, NEXT, ORDINARILY))


def fit(runs: Sequence[Played]) -> None:
    """For every rule: the thresholds with at most so many false alarms, and what they find."""
    print(f"\nThresholds with at most {percent(FALSE)} false alarms of each flag:")
    head = ("low", "high", "one-sided found", "outliers found")
    usual = Alarm()
    print(f"\nβ = {usual.beta}, warm-up {usual.warmup}:")
    table(
        ("rule", *head),
        [(name, *_fitted(runs, rule, usual.beta, usual.warmup)) for name, rule in RULES.items()],
    )
    print("\nGSI / running mean:")
    table(
        ("β", "warm-up", *head),
        [
            (beta, warmup, *_fitted(runs, ratio, beta, warmup))
            for beta, warmup in itertools.product((0.8, 0.9, 0.95), (3, 5, 9))
        ],
    )


def _fitted(runs: Sequence[Played], rule: Rule, beta: float, warmup: int) -> Sequence[str]:
    edges: list[str] = []
    found: list[str] = []
    for kind, sign in (("one-sided", 1.0), ("outlier", -1.0)):
        score = _signed(rule, beta, sign)
        ordinary, forced = judged(runs, score, warmup, kind)
        edge = float(np.quantile(ordinary, FALSE, method="lower"))
        edges.append(f"{sign * edge:.3f}")
        found.append(share(int((forced < edge).sum()), len(forced)))
    return [*edges, *found]


def _signed(rule: Rule, beta: float, sign: float) -> Callable[[Played], Array]:
    return lambda run: sign * rule(run, beta)


# ----------------------------------------------------------------------------------------- tables


def flags(run: Played, alarm: Alarm) -> list[str]:
    """What the library's own rule says of the rounds."""
    state: dict[str, Any] = {}
    found: list[str] = []
    for gsi in run.gsi:
        flag, state = alarm.judge(gsi, state)
        found.append(flag or "")
    return found


def measure(runs: Sequence[Played], alarm: Alarm) -> None:
    """Precision, recall and false alarms of the library's rule, by partition."""
    print(f"\n{alarm}")
    for kind in FORMS:
        head = ("clients", "rounds", "forced", "base rate", "flagged", "precision", "recall")
        rows = [
            (name, *_row(part, alarm, kind)) for name, part in _parts(runs, kind).items() if part
        ]
        print(f"\n`{kind}`, runs with such rounds forced:")
        table((*head, "false alarms"), rows)
        print(f"\n`{kind}`, found by form:")
        table(
            ("clients", *FORMS[kind]),
            [(name, *_forms(part, alarm, kind)) for name, part in _parts(runs, kind).items()],
        )
    print("\nFalse alarms in all runs, in ordinary rounds and in those right after a forced one:")
    after = tuple(f"{flag}, right after" for flag in FORMS)
    table(("clients", *FORMS, *after), _false(runs, alarm))
    print("\n`one-sided` against the labels: similarity below the 5 % quantile of ordinary rounds")
    table(
        ("clients", "rounds", "below", "base rate", "flagged", "precision", "recall"),
        [(name, *_natural(part, alarm)) for name, part in _parts(runs, "one-sided").items()],
    )


def _parts(runs: Sequence[Played], kind: str) -> dict[str, list[Played]]:
    own = [run for run in runs if run.setting.kind == kind]
    parts = {name: [run for run in own if run.setting.partition == name] for name in PARTITIONS}
    return {**parts, "all": own}


def _row(runs: Sequence[Played], alarm: Alarm, kind: str) -> Sequence[object]:
    told = np.concatenate([flags(run, alarm)[alarm.warmup :] for run in runs]) == kind
    forced = np.concatenate([run.truth[alarm.warmup :] for run in runs]) != ""
    return (*_rates(told, forced), share(int((told & ~forced).sum()), int((~forced).sum())))


def _rates(told: Array, true: Array) -> Sequence[object]:
    hits = int((told & true).sum())
    counts = len(told), int(true.sum()), int(told.sum())
    base, precision = percent(counts[1] / counts[0]), share(hits, counts[2])
    return f"{counts[0]:,}", counts[1], base, counts[2], precision, share(hits, counts[1])


def _forms(runs: Sequence[Played], alarm: Alarm, kind: str) -> Sequence[str]:
    told = np.concatenate([flags(run, alarm) for run in runs]) == kind
    truth = np.concatenate([run.truth for run in runs])
    return [share(int(told[truth == f].sum()), int((truth == f).sum())) for f in FORMS[kind]]


def _false(runs: Sequence[Played], alarm: Alarm) -> Iterator[Sequence[object]]:
    for name in (*PARTITIONS, "all"):
        own = [run for run in runs if name in (run.setting.partition, "all")]
        told = np.concatenate([flags(run, alarm)[alarm.warmup :] for run in own])
        place = np.concatenate([_places(run)[alarm.warmup :] for run in own])
        cells: list[str] = []
        for which in (ORDINARILY, NEXT):
            here = told[place == which]
            cells += [share(int((here == flag).sum()), len(here)) for flag in FORMS]
        yield (name, *cells)


def _natural(runs: Sequence[Played], alarm: Alarm) -> Sequence[object]:
    told: list[Array] = []
    below: list[Array] = []
    for partition, server in itertools.product(PARTITIONS, SERVERS):
        own = [
            run
            for run in runs
            if run.setting.partition == partition
            and (run.setting.server, run.setting.cohort) == server
        ]
        if own:
            similarity = np.array([run.similarity for run in own])
            ordinary = similarity[np.array([run.truth for run in own]) == ""]
            below.append((similarity < np.quantile(ordinary, 0.05))[:, alarm.warmup :].ravel())
            flagged = np.array([flags(run, alarm)[alarm.warmup :] for run in own]) == "one-sided"
            told.append(flagged.ravel())
    return _rates(np.concatenate(told), np.concatenate(below))


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def share(part: int, whole: int) -> str:
    return f"{percent(part / whole)} ({part}/{whole})" if whole else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the alarm find bad rounds?")
    parser.add_argument("--seeds", default="4,5,6,7,8", help="by default 4,5,6,7,8")
    parser.add_argument("--fit", action="store_true", help="choose thresholds, and compare rules")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept, and found")
    chosen = parser.parse_args()
    try:
        seeds = [int(seed) for seed in chosen.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds {chosen.seeds}: write whole numbers, as in 4,5,6")
    runs = campaign(seeds, chosen.keep)
    accuracy = np.mean([run.accuracy for run in runs])
    print(
        f"{machine()}; seeds {chosen.seeds}, {len(runs)} runs of {ROUNDS} rounds, {FORCED} forced"
    )
    print(f"mean final accuracy {percent(float(accuracy))}")
    if chosen.fit:
        fit(runs)
    measure(runs, Alarm())


if __name__ == "__main__":
    main()
