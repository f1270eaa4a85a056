"""The paper's figures from the records of runs; matplotlib is loaded when one is drawn."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedglad.analysis.curves import curve
from fedglad.analysis.statistics import spread
from fedglad.report.plots import style
from fedglad.studies.paper.cells import Experiment, PaperError, Reading
from fedglad.studies.paper.results import FinishedRun, Library
from fedglad.studies.paper.tables import CellRuns, gather

WIDTH, HEIGHT = 6.4, 3.8  # inches of a panel, one or two side by side
FEW = 4  # panels; of more, four are side by side and smaller
MOST = 8  # groups with a colour of their own; the others are grey


def plot(experiment: Experiment, library: Library, path: Path) -> list[str]:
    """Draws the experiment's figure into a PNG from what there is; notes for below it."""
    every = gather(experiment, library)
    cells = [one for one in every if one.runs]
    if not cells:
        raise PaperError(
            f"no run of {experiment.name} is finished: fedglad paper run {experiment.name}"
        )
    with style.paper_style(style.SCREEN_POINTS):
        figure = _DRAWN.get(experiment.reading, _curves)(cells)
        for ax in figure.axes:
            if ax.get_xlabel().startswith("round"):
                ax.xaxis.get_major_locator().set_params(integer=True)
            ax.grid(True)
        figure.suptitle(f"{experiment.name} ({experiment.where})", fontsize=style.SCREEN_POINTS)
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path, dpi=style.SCREEN_DPI)
    missing = len({one.cell.label for one in every} - {one.cell.label for one in cells})
    some = "a cell without a run is" if missing == 1 else f"{missing} cells without a run are"
    return [f"{some} left out"] if missing else []


def _figure(panels: int, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure with its axes; `rows` of them belong to each panel, one above the other."""
    across, scale = (min(panels, 2), 1.0) if panels <= FEW else (4, 0.65)
    down = math.ceil(panels / across)
    figure = style.new_figure(
        scale * HEIGHT * down * (1 + 0.6 * (rows - 1)), scale * WIDTH * across
    )
    return figure, [figure.add_subplot(down * rows, across, k + 1) for k in range(panels * rows)]


def _panels(cells: Sequence[CellRuns]) -> dict[str, list[CellRuns]]:
    """What belongs together: a baseline, and what is compared with it at the same length."""
    panels: dict[str, list[CellRuns]] = {}
    for one in cells:
        title = (one.cell.baseline or one.cell.label) + one.remark
        panels.setdefault(title, []).append(one)
    return panels


def _curves(cells: Sequence[CellRuns]) -> Any:
    """Accuracy by round, mean ± std over the seeds: a panel for each baseline."""
    panels = _panels(cells)
    figure, axes = _figure(len(panels))
    for ax, (title, members) in zip(axes, panels.items(), strict=True):
        for one in members:
            runs = [run.series("test_accuracy") for run in one.runs.values()]
            style.mean_line(ax, curve(runs), unit=100.0, label=f"{_short(one)} (n = {len(runs)})")
        ax.set(title=title, xlabel="round", ylabel="test accuracy (%)")
        style.legend_inside(ax)
    return figure


def _short(one: CellRuns) -> str:
    """What is not in its baseline's label already, which is the panel's title."""
    base = (one.cell.baseline or "").replace(",", "").split(" ")
    words = [word for word in one.cell.label.split(" ") if word.strip(",") not in base]
    return " ".join(words).strip(",")


def _gamma(cells: Sequence[CellRuns]) -> Any:
    """Accuracy against γ with its deviation, for each method; ∞ stands at the right end."""
    panels = _panels(cells)
    figure, axes = _figure(len(panels))
    for ax, (title, members) in zip(axes, panels.items(), strict=True):
        order = sorted(members, key=lambda one: one.cell.x or 0.0)
        values = [[run.last10() for run in one.runs.values()] for one in order]
        errors = [spread(v) or 0.0 for v in values]
        ax.errorbar(range(len(order)), list(map(fmean, values)), errors, fmt="o-", capsize=3)
        names = ["∞" if math.isinf(one.cell.x or 0) else f"{one.cell.x or 0:g}" for one in order]
        ax.set_xticks(range(len(order)), names)
        ax.set(title=title.partition(", γ")[0], xlabel="γ", ylabel="last 10 rounds (%)")
    return figure


def _bad_round(cells: Sequence[CellRuns]) -> Any:
    """Accuracy and GSI by round of the first seed, the bad round marked."""
    figure, axes = _figure(1, rows=2)
    accuracy, gsi = axes
    for one in cells:
        label, run = _first(one)
        accuracy.plot([*run.series("test_accuracy")], run.accuracy, marker=".", label=label)
        gsi.plot(*_line(run.columns["gsi_all"]), marker=".", label=label)
    t = _first(cells[0])[1].bad_round()["t"]
    for ax in axes:
        ax.axvline(t + 1, color="grey", linestyle=":", zorder=0)
    accuracy.set(xlabel="round", ylabel="test accuracy (%)")
    style.legend_inside(accuracy)
    gsi.set(xlabel=f"round (dotted: the bad one, {t + 1})", ylabel="GSI of all parameters")
    return figure


def _gsi_groups(cells: Sequence[CellRuns]) -> Any:
    """GSI of each group by round of the first seed: the steadiest and the wildest in colour."""
    figure, axes = _figure(len(cells))
    for ax, one in zip(axes, cells, strict=True):
        label, run = _first(one)
        groups = run.columns["groups"]
        by_size = sorted(run.fluctuations(), key=lambda group: group["relative"])
        names = [group["group"] for group in by_size]
        shown = names if len(names) <= MOST else [*names[: MOST // 2], *names[-MOST // 2 :]]
        for name in (name for name in names if name not in shown):
            ax.plot(*_line(groups[name]["gsi"]), color="0.85", linestyle="-", linewidth=0.6)
        for name in (name for name in groups if name in shown):
            ax.plot(*_line(groups[name]["gsi"]), label=name)
        ax.set(title=label, xlabel="round", ylabel="GSI")
        style.legend_inside(ax, ncols=2)
    return figure


def _similarity(cells: Sequence[CellRuns]) -> Any:
    """GSI of the first seed's rounds against label similarity, with the line of least squares."""
    figure, axes = _figure(len(cells))
    for ax, one in zip(axes, cells, strict=True):
        label, run = _first(one)
        fit = run.correlation()
        ax.scatter(fit.similarity, fit.gsi, s=12)
        if fit.r is not None:
            slope, start = np.polyfit(fit.similarity, fit.gsi, 1)
            x = np.array([min(fit.similarity), max(fit.similarity)])
            ax.plot(x, start + slope * x, color="tab:red", label=f"r = {fit.r:.4f}")
            style.legend_inside(ax)
        published = one.cell.published
        beside = f"; published r = {published.mean}" if published and not one.shortened else ""
        ax.set(title=f"{label}{beside}", xlabel="label similarity", ylabel="GSI")
    return figure


def _norm_ratio(cells: Sequence[CellRuns]) -> Any:
    """std/mean of the squared norms by round of the first seed."""
    figure, (ax,) = _figure(1)
    for one in cells:
        label, run = _first(one)
        mean = run.norm_ratio()
        ax.plot(*_line(run.columns["norm_ratio"]), label=f"{label}: {mean:.3f}")
    ax.set(xlabel="round", ylabel="std/mean of squared norms")
    style.legend_inside(ax)
    return figure


def _first(one: CellRuns) -> tuple[str, FinishedRun]:
    """The run of the first seed, and its label."""
    seed, run = next(iter(one.runs.items()))
    return f"{one.label}, seed {seed}", run


def _line(values: Sequence[float | None]) -> tuple[np.ndarray, list[float]]:
    """Rounds from 1 on, and gaps where there is no value."""
    return np.arange(1, len(values) + 1), [math.nan if v is None else v for v in values]


_DRAWN: dict[Reading, Callable[[Sequence[CellRuns]], Any]] = {
    "gamma": _gamma,
    "bad-round": _bad_round,
    "gsi-groups": _gsi_groups,
    "norm-ratio": _norm_ratio,
    "similarity": _similarity,
}
