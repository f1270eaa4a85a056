"""Every picture of the project; matplotlib is loaded when one is drawn, and nowhere else.

One file a chart: `rounds`, `factors` and `similarity` of a report, as PNG, SVG or PDF for papers;
`comparison` of `fedglad compare`, `partition` of `fedglad data show`; `style` has what they share.
"""

import re
from collections.abc import Callable, Generator, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

from fedglad.report import RunFigures
from fedglad.report.plots import factors, rounds, similarity
from fedglad.report.plots.style import clean, paper_style, save

FORMATS = ("png", "svg", "pdf")


def write(payload: dict[str, Any], folder: Path, format: str) -> list[Path]:
    """Draws every chart that has data into the folder; the files written.

    The same payload gives the same bytes. `left_out` names what has no data.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    written: list[Path] = []
    with paper_style():
        for name, data, draw, _ in _charts(payload):
            if data:
                path = folder / f"{name}.{format}"
                path.parent.mkdir(parents=True, exist_ok=True)
                save(draw(), path, format)
                written.append(path)
    return written


def left_out(payload: dict[str, Any]) -> list[str]:
    """The charts without data, in words."""
    return [reason for _, data, _, reason in _charts(payload) if not data]


def _charts(payload: dict[str, Any]) -> Generator[tuple[str, Sized, Callable[[], Any], str]]:
    """Each chart's name, data and function, and what is missing if there are no data."""
    words = payload["score"]["words"]
    reason = f"{words}, loss and GSI by round: no round is recorded"
    yield "rounds", rounds.panels_of(payload), partial(rounds.draw, payload), reason
    runs: list[RunFigures] = payload["runs"]
    names = [clean(str(run["name"])) for run in runs]
    for run, name, file in zip(runs, names, _file_names(runs), strict=True):
        reason = f"factors of {name}: no group was scaled or compared"
        yield f"factors{file}", factors.maps_of(run), partial(factors.draw, run), reason
        reason = f"GSI against label similarity of {name}: it is not recorded"
        yield f"similarity{file}", similarity.pairs_of(run), partial(similarity.draw, run), reason


def _file_names(runs: Sequence[RunFigures]) -> list[str]:
    """`-NAME` for each of several runs, safe in any file system and all different."""
    if len(runs) == 1:
        return [""]
    names: list[str] = []
    for run in runs:
        safe = "-" + (re.sub(r"[^A-Za-z0-9_.-]+", "_", str(run["name"])).strip(".")[:80] or "run")
        more = (f"{safe}-{k}" for k in range(2, len(runs) + 1))
        names.append(next(one for one in (safe, *more) if one.lower() not in map(str.lower, names)))
    return names
