"""Every picture of the project; matplotlib is loaded when one is drawn, and nowhere else.

One file a chart: `rounds`, `factors` and `similarity` of a report, as PNG, SVG or PDF for papers;
`comparison` of `fedglad compare`, `partition` of `fedglad data show`; `style` has what they share.
"""

import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Literal

from fedglad.report import RunFigures
from fedglad.report.plots import factors, rounds, similarity
from fedglad.report.plots.style import clean, paper_style, save

Format = Literal["png", "svg", "pdf"]
FORMATS: tuple[Format, ...] = ("png", "svg", "pdf")


def write(payload: dict[str, Any], folder: Path, format: str) -> list[Path]:
    """Draws every chart that has data into the folder; the files written.

    | file | what |
    |---|---|
    | `rounds` | accuracy, loss and GSI by round; several runs overlaid, seeds as a band |
    | `factors` | groups × rounds: the factor s and GSI/B; one file a run |
    | `similarity` | GSI against the label similarity of the cohort; one file a run |

    The same payload gives the same bytes. `left_out` tells what has no data.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    written: list[Path] = []
    with paper_style():
        for name, draw in _charts(payload):
            path = folder / f"{name}.{format}"
            path.parent.mkdir(parents=True, exist_ok=True)
            save(draw(), path, format)
            written.append(path)
    return written


def left_out(payload: dict[str, Any]) -> list[str]:
    """The charts without data, in words."""
    missing: list[str] = []
    if not rounds.panels_of(payload):
        missing.append("accuracy, loss and GSI by round: no round is recorded")
    for run in payload["runs"]:
        name = clean(str(run["name"]))
        if not factors.maps_of(run):
            missing.append(f"factors of {name}: no group was scaled or compared")
        if not similarity.pairs_of(run):
            missing.append(f"GSI against label similarity of {name}: it is not recorded")
    return missing


def _charts(payload: dict[str, Any]) -> Generator[tuple[str, Callable[[], Any]]]:
    if rounds.panels_of(payload):
        yield "rounds", lambda: rounds.draw(payload)
    runs: list[RunFigures] = payload["runs"]
    names = _file_names([str(run["name"]) for run in runs])
    for run, name in zip(runs, names, strict=True):
        if factors.maps_of(run):
            yield f"factors{name}", lambda run=run: factors.draw(run)
        if similarity.pairs_of(run):
            yield f"similarity{name}", lambda run=run: similarity.draw(run)


def _file_names(names: Sequence[str]) -> list[str]:
    """`-NAME` for each of several runs, safe in any file system and all different."""
    if len(names) == 1:
        return [""]
    found: list[str] = []
    for name in names:
        safe = "-" + (re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip(".")[:80] or "run")
        more = (f"{safe}-{k}" for k in range(2, len(names) + 1))
        found.append(next(one for one in (safe, *more) if one.lower() not in map(str.lower, found)))
    return found
