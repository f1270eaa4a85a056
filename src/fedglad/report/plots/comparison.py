"""The score above GSI by round: a line for each group of a comparison."""

from pathlib import Path
from typing import Any

from fedglad.analysis.comparison import Comparison
from fedglad.analysis.tables import called
from fedglad.report import ReportError
from fedglad.report.plots import style

WIDTH, HEIGHT = 8.0, 3.5  # inches of a panel


def write(comparison: Comparison, path: Path) -> None:
    """Draws the groups that have rounds, each with a band of ± std over its runs."""
    with style.paper_style(style.SCREEN_POINTS):
        figure = draw(comparison)
        try:
            style.save(figure, path, dpi=style.SCREEN_DPI)
        except (OSError, ValueError) as error:
            raise ReportError(f"{path} cannot be written: {error}") from None


def draw(comparison: Comparison) -> Any:
    """The figure; without GSI where it is 1 throughout: one client, as if centralised, agrees."""
    groups = [(one, one.curves) for one in comparison.groups if one.curves]
    if not groups:
        raise ReportError("there are no rounds to plot: the runs have only a summary")
    same = all(gsi == 1 for _, curves in groups if "gsi" in curves for gsi in curves["gsi"].mean)
    score = comparison.tested or comparison.score
    panels = {score.name: (f"test {score.words}{', %' if score.share else ''}", score.unit)}
    if not same:
        panels["gsi"] = "GSI over all parameters", 1.0
    figure = style.new_figure(HEIGHT * len(panels), WIDTH)
    column = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
    for axes, (panel, (title, unit)) in zip(column, panels.items(), strict=True):
        place = -1
        for group, curves in groups:
            place += group.averaged_of is None
            look = style.look(place)
            if group.averaged_of is not None:  # in the colour of the row above it
                look["linestyle"] = style.AVERAGED
            if panel in curves:
                style.mean_line(axes, curves[panel], unit=unit, label=called(group), **look)
        axes.grid(True)
        axes.margins(x=0.01)
        axes.set_ylabel(title)
    style.round_axis(column[-1])
    if len(groups) > 1:
        handles, labels = column[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=1)
    return figure
