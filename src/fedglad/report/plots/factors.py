"""Groups × rounds: the factor s and GSI/B, on one diverging scale around 1."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from fedglad.report import RunFigures
from fedglad.report.plots.style import MARKS, flagged, has, new_figure, round_axis, short

DIVERGING = "RdBu_r"
TICK = 22  # characters of a group's name beside the heat map
PITCH = 0.092  # inches between tick labels, at least
ROW, LOWEST, HIGHEST = 0.1, 0.55, 2.4  # inches: a group's row; a heat map as a whole
BAR = 0.09  # inches, the width of the colour scale
WIDEST = 1.0  # the scale ends at 1 ± this, so at 0 below


def maps_of(run: RunFigures) -> list[str]:
    """Which of the two maps have a number."""
    heat = run.get("heat") or {}
    return [key for key in ("scale", "ratio") if any(has(row) for row in heat.get(key) or [])]


def draw(run: RunFigures) -> Any:
    """The figure; both maps have one scale, so that they can be compared."""
    from matplotlib import colormaps

    heat, maps = run["heat"], maps_of(run)
    names = _group_names([str(name) for name in heat["groups"]])
    height = min(max(LOWEST, ROW * len(names)), HIGHEST)
    step = max(1, math.ceil(len(names) * PITCH / height))  # so that no labels touch
    figure = new_figure(0.7 + (height + 0.25) * len(maps))
    column = list(figure.subplots(len(maps), 1, sharex=True, squeeze=False)[:, 0])
    tables = {key: _table(run["rounds"], heat[key]) for key in maps}
    reach = _reach(np.concatenate([table.ravel() for table in tables.values()]))
    titles = {"scale": "factor s of the step", "ratio": "GSI/B, before the bounds"}
    edges = _edges(run["rounds"])
    image: Any = None
    for axes, (key, table) in zip(column, tables.items(), strict=True):
        image = axes.pcolormesh(
            edges,
            np.arange(len(names) + 1) - 0.5,
            table,
            cmap=colormaps[DIVERGING].with_extremes(bad="0.75"),
            vmin=1 - reach,
            vmax=1 + reach,
            rasterized=True,  # as paths, the cells of a large model make huge files
        )
        axes.invert_yaxis()
        axes.set_title(titles[key], loc="left", pad=6)
        axes.set_yticks(range(0, len(names), step), names[::step])
        axes.spines[:].set_visible(False)
    _ticks_above(column[0], run)
    round_axis(column[-1])
    below = [bool(np.nanmin(t) < 1 - reach) for t in tables.values()]
    above = [bool(np.nanmax(t) > 1 + reach) for t in tables.values()]
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}
    bar = figure.colorbar(
        image,
        ax=column,
        extend=extend[any(below), any(above)],
        extendfrac=0.03,
        aspect=(height + 0.25) * len(maps) / BAR,
        pad=0.02,
    )
    bar.outline.set_visible(False)
    bar.set_label("s and GSI/B; 1 is as usual")
    if any(axes.get_legend_handles_labels()[1] for axes in column):
        figure.legend(loc="outside lower center", ncols=2, handlelength=1.0)
    return figure


def _group_names(names: Sequence[str]) -> list[str]:
    """Beside the map; where they are long, without the modules that all are in."""
    parts = [name.split(".") for name in names]
    same = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    shared = min(len(list(same)), min(map(len, parts)) - 1)
    if shared and max(map(len, names)) > TICK:
        names = [f"…{'.'.join(rest[shared:])}" for rest in parts]
    return [short(name, TICK) for name in names]


def _edges(rounds: Sequence[int]) -> np.ndarray:
    """Where the columns begin and end: one a round, and one a gap, however many rounds it has."""
    middle = np.array(rounds)
    return np.unique([middle - 0.5, middle + 0.5])


def _table(rounds: Sequence[int], rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Groups × the spans between `_edges`, NaN where there is no number."""
    edges = _edges(rounds)
    table = np.full((len(rows), len(edges) - 1), np.nan)
    values = np.array([[np.nan if v is None else v for v in row] for row in rows])
    table[:, np.searchsorted(edges, np.array(rounds) - 0.5)] = values
    return table


def _reach(values: np.ndarray) -> float:
    """The scale is 1 ± this: all but the most extreme 2 % of the numbers are inside it."""
    distance = np.abs(values[np.isfinite(values)] - 1)
    return min(WIDEST, max(0.05, float(np.quantile(distance, 0.98))))


def _ticks_above(axes: Any, run: RunFigures) -> None:
    """Marks over the rounds that were distrusted."""
    for flag, rounds in flagged([run]).items():
        if not rounds:  # an empty line counts in the layout, at 0
            continue
        marker, colour = MARKS[flag]
        axes.plot(
            rounds,
            [1.012] * len(rounds),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker=marker,
            markersize=2.2,
            color=colour,
            clip_on=False,
            label=f"{flag} round",
        )
