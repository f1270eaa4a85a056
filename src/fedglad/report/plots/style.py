"""How every picture of the project is drawn and saved: sizes, colours, lines, marks, names.

No other module has settings of matplotlib, and none loads it but when something is drawn.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.analysis.curves import Curve
from fedglad.report import RunFigures

STYLE = Path(__file__).with_name("paper.mplstyle")
WIDTH = 3.3  # inches: a column of a paper with two
DPI = 300
POINTS = 7  # the size of letters in such a column
SCREEN_DPI, SCREEN_POINTS = 150, 10  # of a picture that is looked at by itself
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's, which the colour-blind tell apart; without yellow, too faint on white."""
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
AVERAGED = (0, (2.5, 1, 0.8, 1))  # of a line that is the average of another one's models
MARKS = {"one-sided": ("v", "#CC3311"), "outlier": ("^", "#332288")}
BAND = 0.18  # opacity of mean ± std


@contextmanager
def paper_style(points: float = POINTS) -> Generator[None]:
    """How everything is drawn, with letters of this size; names are drawn as they are, `$` and all.

    `paper_style(SCREEN_POINTS)` is the same for a picture of another size.
    """
    try:
        import matplotlib
        from cycler import cycler
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install 'fedglad[report]'", name=error.name
        ) from None
    settings = matplotlib.rc_params_from_file(STYLE, use_default_template=False)
    for key in settings:
        if key.endswith(("size", "width")):
            settings[key] *= points / POINTS
    settings["axes.prop_cycle"] = cycler("linestyle", STYLES) * cycler("color", PALETTE)
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's own style would give other bytes
        matplotlib.rcParams.update(settings)
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def new_figure(height: float, width: float = WIDTH) -> Any:
    """An empty figure of this size, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, format: str | None = None, dpi: int = DPI) -> None:
    """Writes a figure in a format, by default that of the file's name; the same bytes each time."""
    without_time: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    format = format or path.suffix[1:] or "png"
    figure.savefig(path, format=format, dpi=dpi, metadata=without_time.get(format))


def look(place: int) -> dict[str, Any]:
    """The colour and the dashes of the line at this place in a legend."""
    return {
        "color": PALETTE[place % len(PALETTE)],
        "linestyle": STYLES[place // len(PALETTE) % len(STYLES)],
    }


def mean_line(axes: Any, curve: Curve, *, unit: float = 1.0, **line: Any) -> None:
    """A curve's mean by round, with a band of ± std where there are several runs."""
    mean = unit * np.array(curve.mean)
    (drawn,) = axes.plot(curve.rounds, mean, **line)
    if any(curve.std):
        std = unit * np.array([std or 0.0 for std in curve.std])
        axes.fill_between(
            curve.rounds, mean - std, mean + std, color=drawn.get_color(), alpha=BAND, linewidth=0
        )


def legend_inside(axes: Any, **how: Any) -> None:
    """A legend where lines may run behind it."""
    axes.legend(fontsize=POINTS, frameon=True, framealpha=0.85, edgecolor="none", **how)


def flagged(runs: Sequence[RunFigures]) -> dict[str, list[int]]:
    """{flag: rounds} that at least half of the runs with that round have."""
    counts: dict[int, list[str | None]] = {}
    for run in runs:
        for t, flag in zip(run["rounds"], run["alarm"], strict=True):
            counts.setdefault(t, []).append(flag)
    return {
        flag: [t for t, seen in sorted(counts.items()) if 2 * seen.count(flag) >= len(seen)]
        for flag in MARKS
    }


def round_axis(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )


def has(values: Sequence[float | None] | None) -> bool:
    return any(value is not None for value in values or [])


def clean(text: str) -> str:
    """What would break a line or the file is shown as a replacement mark."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def short(text: str, most: int) -> str:
    """The beginning and the end of a long name, which tell it from its neighbours."""
    text = clean(text)
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"
