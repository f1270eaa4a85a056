"""GSI against the label similarity of the cohort, with the line of least squares and r."""

from typing import Any

import numpy as np

from fedglad.report import RunFigures
from fedglad.report.plots.style import MARKS, PALETTE, new_figure, short


def pairs_of(run: RunFigures) -> list[tuple[float, float, str | None]]:
    """Label similarity, GSI and flag of the rounds that have both numbers."""
    similarity = run.get("similarity") or []
    rows = zip(similarity, run["gsi"], run["alarm"], strict=False)
    return [(x, y, flag) for x, y, flag in rows if x is not None and y is not None]


def draw(run: RunFigures) -> Any:
    """The figure, with the fit that the payload has."""
    pairs, fit = pairs_of(run), run.get("fit")
    figure = new_figure(2.3)
    axes = figure.subplots()
    kinds = [(None, "o", PALETTE[0]), *((flag, *MARKS[flag]) for flag in MARKS)]
    for kind, marker, colour in kinds:
        points = [(x, y) for x, y, flag in pairs if flag == kind]
        if points:
            label = f"{kind} round" if kind else "round"
            x, y = zip(*points, strict=True)
            axes.scatter(
                x, y, s=9, marker=marker, color=colour, linewidth=0, alpha=0.8, label=label
            )
    if fit:
        ends = np.array([min(x for x, _, _ in pairs), max(x for x, _, _ in pairs)])
        line = fit["intercept"] + fit["slope"] * ends
        axes.plot(ends, line, color="0.2", linewidth=0.9, label="least squares")
        axes.set_title(f"r = {fit['r']:.3f}, n = {fit['n']}", loc="right")
    axes.set_title(short(str(run["name"]), 36), loc="left")
    axes.set(xlabel="label similarity of the cohort", ylabel="GSI")
    axes.grid(True)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, handlelength=1.2, columnspacing=1.0)
    return figure
