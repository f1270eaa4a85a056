"""The statistics of runs: a mean over seeds and its interval, the last tests, the second half."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LAST = 10  # tests that a result is the mean of


@dataclass(frozen=True)
class Stability:
    """The score on the test set over the second half of the rounds: its std and its worst round.

    `std` and `worst` are means over the runs, `stds` and `worsts` have each run's own.
    """

    std: float
    worst: float
    stds: list[float]
    worsts: list[float]


def known(values: Iterable[float | None]) -> list[float]:
    """Those that there are."""
    return [value for value in values if value is not None]


def spread(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None below two values."""
    return stdev(values) if len(values) > 1 else None


def last_mean(values: Sequence[float]) -> float:
    """The mean of the last 10 of them: a run's result."""
    return fmean(values[-LAST:])


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """mean ± t·s/√n, where two values or fewer are too few to speak of one."""
    if len(values) < 3:
        return None
    half = students_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def students_t(df: int, level: float = 0.95) -> float:
    """The t with P(|T| ≤ t) = level for `df` degrees of freedom, by bisection.

    >>> round(students_t(2), 3)
    4.303
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < level else (low, middle)
    return math.sqrt(df) * math.tan(low)


def paired_p(differences: Sequence[float]) -> float | None:
    """The two-sided p of Student's test that their mean is 0; None below three, or if all equal.

    >>> round(paired_p([0.0, 1.0, 2.0]), 4)  # t = 1/(1/√3) = 1.732 with 2 degrees of freedom
    0.2254
    """
    if len(differences) < 3 or not (deviation := stdev(differences)):
        return None
    t = fmean(differences) / (deviation / math.sqrt(len(differences)))
    df = len(differences) - 1
    return 1 - _within(math.atan(abs(t) / math.sqrt(df)), df)


def _within(theta: float, df: int) -> float:
    """P(|T| ≤ √df · tan θ), a finite sum of powers of cos θ (Abramowitz and Stegun 26.7.3-4)."""
    odd = df % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= math.cos(theta) ** 2 * k / (k + 1)
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total


def stability(scores: Sequence[Sequence[float]], *, higher: bool = True) -> Stability | None:
    """Of runs that were all tested twice or more in their second half; else there is none.

    `higher` says that more is better: then the least is the worst.
    """
    worst = min if higher else max
    ends = [second_half(values) for values in scores]
    if not ends or any(len(end) < 2 for end in ends):
        return None
    stds, worsts = [stdev(end) for end in ends], [worst(end) for end in ends]
    return Stability(fmean(stds), fmean(worsts), stds, worsts)


def second_half(values: Sequence[float]) -> Sequence[float]:
    """Of an odd number, without the middle one.

    >>> second_half([1, 2, 3, 4, 5])
    [4, 5]
    """
    return values[(len(values) + 1) // 2 :]
