"""Score, loss and GSI by round: several runs overlaid, seeds as a band."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from fedglad.analysis.curves import Curve, curve
from fedglad.report import RunFigures
from fedglad.report.plots.style import (
    MARKS,
    flagged,
    has,
    look,
    mean_line,
    new_figure,
    round_axis,
    short,
)

LABEL = 58  # characters of a line of the legend
MOST = 14  # configurations in the legend
MANY = 150  # rounds; the lines of more are thinner
FAINT: dict[str, Any] = {"linewidth": 0.7, "linestyle": "-", "dashes": (2, 1.5)}
FAINTER: tuple[dict[str, Any], ...] = (FAINT, {**FAINT, "dashes": (0.8, 1.2)})
"""The second line of a panel, and the third."""
PANELS = {
    "score": ["scores", "averaged", "validation"],
    "loss": ["test_loss", "train_loss"],
    "gsi": ["gsi", "usual"],
}
"""The lines of each panel, from above; all but the first are faint."""


def panels_of(payload: dict[str, Any]) -> list[str]:
    """The panels that have a value, from above."""
    return [
        panel
        for panel, keys in PANELS.items()
        if any(has(run.get(key)) for run in payload["runs"] for key in keys)
    ]


def draw(payload: dict[str, Any]) -> Any:
    """The figure; a configuration has its colour in all panels."""
    panels, groups = panels_of(payload), payload["groups"]
    lines = min(len(groups), MOST) + 2
    figure = new_figure(0.35 + 1.05 * len(panels) + 0.12 * lines)
    column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    by_name = dict(zip(panels, column, strict=True))
    flags: set[str] = set()
    for place, group in enumerate(groups):
        runs = [payload["runs"][k] for k in group["runs"]]
        style = look(place)
        for panel, axes in by_name.items():
            curves = [_curve(runs, key) for key in PANELS[panel]]
            for k, line in enumerate(curves):
                _line(axes, line, **style, faint=k)
            if panel == "gsi":
                flags |= _mark(axes, runs, curves[0], style["color"])
    if len(groups) == 1:  # the same rounds through all panels, so that their effect is seen
        for flag, rounds in flagged([payload["runs"][k] for k in groups[0]["runs"]]).items():
            for axes, t in product(column, rounds):
                axes.axvline(t, color=MARKS[flag][1], alpha=0.25, linewidth=0.6, zorder=0)
    score = payload["score"]
    tested = f"test {score['words']}{' (%)' if score['share'] else ''}"
    labels = {"score": tested, "loss": "loss", "gsi": "GSI"}
    for panel, axes in by_name.items():
        axes.set_ylabel(labels[panel])
        axes.grid(True)
        axes.margins(x=0.012)
    round_axis(column[-1])
    figure.align_ylabels(list(column))
    _legend(figure, payload, panels, flags)
    return figure


def _curve(runs: Sequence[RunFigures], key: str) -> Curve:
    columns = [zip(run["rounds"], run[key], strict=True) for run in runs if run.get(key)]
    return curve({t: value for t, value in column if value is not None} for column in columns)


def _line(axes: Any, curve: Curve, *, faint: int, **style: Any) -> None:
    if not curve.rounds:
        return
    if faint:
        faded: dict[str, Any] = {**FAINTER[faint - 1], "color": style["color"], "alpha": 0.8}
        axes.plot(curve.rounds, curve.mean, **faded)
        return
    lone: dict[str, Any] = {"marker": ".", "markersize": 3} if len(curve.rounds) == 1 else {}
    width = 1.1 if len(curve.rounds) <= MANY else 0.7
    mean_line(axes, curve, linewidth=width, **style, **lone)


def _mark(axes: Any, runs: Sequence[RunFigures], curve: Curve, colour: str) -> set[str]:
    """The distrusted rounds on the line; which flags there were."""
    height = dict(zip(curve.rounds, curve.mean, strict=True))
    marks = {f: [t for t in ts if t in height] for f, ts in flagged(runs).items()}
    for flag, rounds in marks.items():
        marker, fill = MARKS[flag]
        axes.scatter(
            rounds,
            [height[t] for t in rounds],
            s=11,
            marker=marker,
            color=fill,
            edgecolor=colour,
            linewidth=0.5,
            zorder=3,
        )
    return {flag for flag, rounds in marks.items() if rounds}


def _legend(figure: Any, payload: dict[str, Any], panels: Sequence[str], flags: set[str]) -> None:
    """Configurations above, what the lines and marks mean below."""
    from matplotlib.lines import Line2D

    groups = payload["groups"]
    handles: list[Any] = []
    labels: list[str] = []
    for place, group in enumerate(groups[:MOST]):
        handles.append(Line2D([], [], **look(place)))
        seeds = len(group["runs"])
        number = f" (mean ± std of {seeds} seeds)" if seeds > 1 else ""
        if not any(payload["runs"][k]["rounds"] for k in group["runs"]):
            number = " (no round yet)"
        labels.append(short(str(group["label"]), LABEL - len(number)) + number)
    if len(groups) > MOST:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"and {len(groups) - MOST} more")
    _place(figure, handles, labels, loc="outside upper center", ncols=1)
    meanings: dict[str, Any] = {}
    faint: dict[str, Any] = {**FAINT, "color": "0.3"}
    usual = "gsi" in panels and any(has(run.get("usual")) for run in payload["runs"])
    if "loss" in panels:
        meanings["test loss, GSI" if usual else "test loss"] = Line2D([], [], color="0.3")
    averaged = any(has(run.get("averaged")) for run in payload["runs"])
    words = payload["score"]["words"]
    second = [f"averaged {words}"] * averaged + ["training loss"] * ("loss" in panels)
    if second := second + ["usual GSI"] * usual:
        meanings[", ".join(second)] = Line2D([], [], **faint)
    if any(has(run.get("validation")) for run in payload["runs"]):
        meanings[f"validation {words}"] = Line2D([], [], **dict[str, Any](FAINTER[1], color="0.3"))
    for flag, (marker, colour) in MARKS.items():
        if flag in flags:
            meanings[f"{flag} round"] = Line2D(
                [], [], linestyle="none", marker=marker, markersize=3.3, color=colour
            )
    _place(figure, list(meanings.values()), list(meanings), loc="outside lower center", ncols=2)


def _place(figure: Any, handles: list[Any], labels: Sequence[str], **where: Any) -> None:
    """A legend; matplotlib would leave out a label that begins with an underscore."""
    if not handles:
        return
    numbers = [str(k) for k in range(len(handles))]
    legend = figure.legend(
        handles, numbers, borderaxespad=0.1, handlelength=1.8, labelspacing=0.3, **where
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)
