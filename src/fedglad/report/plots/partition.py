"""A partition as a PNG: a heat map of the clients' classes, and their sizes below."""

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.data.picture import left_out, sentence, shares_of
from fedglad.report.plots.style import SCREEN_DPI, SCREEN_POINTS, new_figure, paper_style, save

WIDTH = 10.0  # inches
MOST = 1000  # clients: more columns than that are narrower than a pixel


def png(counts: np.ndarray, path: str | Path, *, title: str = "") -> None:
    """Draws the counts of `fedglad.data.picture.class_counts`."""
    with paper_style(SCREEN_POINTS):
        save(draw(counts, title), Path(path), "png", SCREEN_DPI)


def draw(counts: np.ndarray, title: str) -> Any:
    """The figure."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    clients, classes = counts.shape
    step = math.ceil(clients / MOST)
    shares, sizes = shares_of(counts[::step]), counts[::step].sum(axis=1)
    edges = np.arange(len(sizes) + 1) * step - step / 2

    tall = min(max(0.26 * classes, 1.6), 9)  # inches of the heat map
    figure = new_figure(tall + 2.6, WIDTH)
    heat, below = figure.subplots(2, 1, sharex=True, height_ratios=[tall, 0.9])
    rows = np.arange(classes + 1) - 0.5
    mesh = heat.pcolormesh(edges, rows, shares.T, cmap="Blues", vmin=0, vmax=1)
    few = len(sizes) <= 120
    if few and classes <= 40:  # white lines between the cells, where there is room for them
        mesh.set(edgecolor="white", linewidth=0.6)
    heat.invert_yaxis()
    heat.set_ylabel("class")
    heat.yaxis.set_major_locator(MaxNLocator(min(classes, 20), integer=True))
    percent = PercentFormatter(1, 0, symbol=" %")
    bar = figure.colorbar(mesh, ax=heat, pad=0.01, aspect=9 * tall, format=percent)
    bar.set_label("share of the client's samples")
    bar.outline.set_visible(False)

    width = 0.85 * step if few else step
    below.bar(edges[:-1] + step / 2, sizes, width=width, color="#9ecae1" if few else "#4292c6")
    below.set(xlabel="client", ylabel="samples", xlim=(edges[0], edges[-1]))
    below.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    below.yaxis.set_major_locator(MaxNLocator(3, integer=True, min_n_ticks=1))
    for axis in (below.xaxis, below.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    for axes in (heat, below, bar.ax):
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    notes = [sentence(counts), *([left_out(step, clients)] if step > 1 else [])]
    figure.suptitle(textwrap.fill(title or "Classes of the clients", 90), fontsize=13)
    heat.set_title("\n".join(notes), color="dimgray")
    return figure
