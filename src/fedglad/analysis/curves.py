"""Curves over the rounds: mean and standard deviation over the seeds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedglad.analysis.statistics import spread

Series = Mapping[int, float]
"""One number of a run: {round, counted from 1: value}, where there is a value."""


@dataclass(frozen=True)
class Curve:
    """Mean and sample standard deviation over runs, for each round (from 1) that has a value."""

    rounds: list[int]
    mean: list[float]
    std: list[float | None]


def series(records: Iterable[Mapping[str, Any]], key: str) -> Series:
    """One number of records as they are in rounds.jsonl."""
    return {one["round"] + 1: one[key] for one in records if one.get(key) is not None}


def curve(runs: Iterable[Series]) -> Curve:
    """Of one number over runs.

    >>> curve([{1: 0.5, 2: 0.75}, {1: 0.75}])
    Curve(rounds=[1, 2], mean=[0.625, 0.75], std=[0.1767766952966369, None])
    """
    values: dict[int, list[float]] = {}
    for run in runs:
        for t, value in run.items():
            values.setdefault(t, []).append(value)
    ordered = dict(sorted(values.items()))
    return Curve(
        list(ordered), list(map(fmean, ordered.values())), list(map(spread, ordered.values()))
    )
