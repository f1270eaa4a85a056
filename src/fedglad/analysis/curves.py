"""What the rounds of runs say over time: curves over the seeds, how steady the end is, a plot."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Rounds = Sequence[Mapping[str, Any]]
"""A run's records, as in its rounds.jsonl."""

METRICS = {"accuracy": "test_accuracy", "gsi": "gsi_all"}


@dataclass(frozen=True)
class Curve:
    """Mean and sample standard deviation over runs, for each round (from 1) that has a value."""

    rounds: list[int]
    mean: list[float]
    std: list[float | None]


@dataclass(frozen=True)
class Stability:
    """The test accuracy over the second half of the rounds: its std and its worst round.

    `std` and `worst` are means over the runs, `stds` and `worsts` have each run's own.
    """

    std: float
    worst: float
    stds: list[float]
    worsts: list[float]


@dataclass(frozen=True)
class Line:
    """A group in the plot."""

    label: str
    accuracy: Curve
    gsi: Curve


def slim(rounds: Rounds) -> Rounds:
    """Only what is needed here: whole records of many runs would fill the memory."""
    return [{key: found.get(key) for key in ("round", *METRICS.values())} for found in rounds]


def curve(runs: Iterable[Rounds], key: str) -> Curve:
    """Of one number of the records."""
    values: dict[int, list[float]] = {}
    for rounds in runs:
        for found in rounds:
            if found.get(key) is not None:
                values.setdefault(found["round"] + 1, []).append(found[key])
    ordered = dict(sorted(values.items()))
    return Curve(
        list(ordered),
        [fmean(all_) for all_ in ordered.values()],
        [stdev(all_) if len(all_) > 1 else None for all_ in ordered.values()],
    )


def tested(rounds: Rounds) -> list[float]:
    """The accuracies of the rounds that were tested."""
    return [found["test_accuracy"] for found in rounds if found.get("test_accuracy") is not None]


def stability(accuracies: Sequence[Sequence[float]]) -> Stability | None:
    """Of runs that were all tested twice or more in their second half; else there is none."""
    ends = [second_half(found) for found in accuracies]
    if not ends or any(len(end) < 2 for end in ends):
        return None
    stds, worsts = [stdev(end) for end in ends], [min(end) for end in ends]
    return Stability(fmean(stds), fmean(worsts), stds, worsts)


def second_half(values: Sequence[float]) -> Sequence[float]:
    """Of an odd number, without the middle one.

    >>> second_half([1, 2, 3, 4, 5])
    [4, 5]
    """
    return values[(len(values) + 1) // 2 :]


def plot(lines: Sequence[Line], path: Path) -> None:
    """Accuracy above GSI, a line for each group, with a band of ± std over its runs.

    Without GSI where it is 1 throughout: one client, as if centralised, agrees with itself.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install 'fedglad[report]'"
        ) from None
    panels = [("test accuracy, %", 100.0, [line.accuracy for line in lines])]
    if any(gsi != 1 for line in lines for gsi in line.gsi.mean):
        panels.append(("GSI over all parameters", 1.0, [line.gsi for line in lines]))
    figure = Figure(figsize=(8, 3.5 * len(panels)), layout="constrained")
    columns = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    every = [axes for (axes,) in columns]
    for axes, (named, percent, found) in zip(every, panels, strict=True):
        for k, (line, one) in enumerate(zip(lines, found, strict=True)):
            _draw(axes, one, percent, label=line.label, place=k)
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
        axes.set_ylabel(named)
    every[-1].set_xlabel("round")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    if len(lines) > 1:
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside upper center", ncols=1)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from None


def _draw(axes: Any, found: Curve, percent: float, *, label: str, place: int) -> None:
    colour, style = f"C{place % 10}", ("-", "--", ":")[place // 10 % 3]
    mean = [percent * value for value in found.mean]
    axes.plot(found.rounds, mean, color=colour, linestyle=style, linewidth=1.4, label=label)
    if any(found.std):
        spread = [percent * (std or 0.0) for std in found.std]
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(found.rounds, low, high, color=colour, alpha=0.15, linewidth=0)
