"""How every plot is drawn: sizes, colours, marks, names."""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

WIDTH = 3.3  # inches: a column of a paper with two
DPI = 300
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's, which the colour-blind tell apart; without yellow, too faint on white."""
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
MARKS = {"one-sided": ("v", "#CC3311"), "outlier": ("^", "#332288")}

Run = dict[str, Any]
"""One of the payload's runs."""


@contextmanager
def paper_style() -> Generator[None]:
    """How everything is drawn; names are drawn as they are, `$` and all."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install 'fedglad[report]'", name=error.name
        ) from None
    settings = {
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": 7,
        "axes.labelsize": 7,
        "axes.linewidth": 0.6,
        "axes.titlesize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.linewidth": 0.4,
        "grid.alpha": 0.3,
        "legend.fontsize": 6,
        "legend.frameon": False,
        "xtick.labelsize": 6,
        "ytick.labelsize": 6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "text.parse_math": False,
        "text.usetex": False,
        "pdf.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "fedglad",
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's own style would give other bytes
        matplotlib.rcParams.update(cast(Any, settings))
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def new_figure(height: float, **more: Any) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained", **more)


def flagged(runs: Sequence[Run]) -> dict[str, list[int]]:
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
