"""How a partition is shown: its clients' classes as numbers and in the terminal."""

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedglad.data.federation import Federation

if TYPE_CHECKING:
    from rich.text import Text

SHADES = "·░▒▓█"  # of a client's samples, a class has none, up to 25 %, 50 %, 75 %, 100 %
BARS = "▁▂▃▄▅▆▇"
SIGNS = dict(zip(f"{SHADES}{BARS}", ".-+x#1234567", strict=True))
ASCII = str.maketrans(SIGNS | {"×": "x", "α": "alpha", "σ": "sigma", "–": "-", "…": "..."})
LABEL = 9  # columns for a row's name and the space after it


def are_labelled(federation: Federation) -> bool:
    """Whether the clients' samples have classes to count."""
    labels = getattr(federation, "labels", None)
    return labels is not None and labels(0) is not None


def sizes(federation: Federation) -> dict[str, Any]:
    """How many samples the clients have, ready for JSON, where there are no classes.

    >>> from fedglad.data import Synthetic
    >>> sizes(Synthetic(clients=3, samples=16, test_clients=1))["median_size"]
    16
    """
    counts = [federation.size(k) for k in range(federation.clients)]
    named = getattr(federation, "names", None)
    return {
        "sizes": counts,
        "min_size": min(counts),
        "median_size": sorted(counts)[len(counts) // 2],
        "max_size": max(counts),
        "test_size": len(federation.test()[1]),
        **({"names": list(named)} if named else {}),
    }


def sizes_text(found: Mapping[str, Any], *, title: str = "", plain: bool = False) -> str:
    """What `sizes` gives for a terminal: a sentence, and how many clients are of about one size.

    >>> from fedglad.data import Synthetic
    >>> print(sizes_text(sizes(Synthetic(clients=3, samples=16, test_clients=1))))
    3 clients, 16 samples each, 48 in all; 2 in the test set; no classes
    """
    low, high, counts = found["min_size"], found["max_size"], np.array(found["sizes"])
    each = f"{low:,} to {high:,} samples, median {found['median_size']:,}"
    lines = [
        f"{title}: " * bool(title)
        + f"{len(counts):,} client{'s' * (len(counts) > 1)}, "
        + (f"{low:,} samples each" if low == high else each)
        + f", {counts.sum():,} in all; {found['test_size']:,} in the test set; no classes"
    ]
    names: list[str] = found.get("names", [])
    if low < high:  # in steps of doubling
        top = [2**k for k in range((low - 1).bit_length(), (high - 1).bit_length() + 1)]
        tally = np.bincount(np.searchsorted(top, counts), minlength=len(top))
        bars = np.ceil(40 * tally / tally.max()).astype(int)
        for most, count, bar in zip(top, tally.tolist(), bars.tolist(), strict=True):
            lines.append(f"{f'to {most:,}':>{LABEL}} {'█' * bar} {count:,}")
    if names:
        order = np.argsort(-counts, kind="stable")[:3]
        lines.append("largest: " + "; ".join(f"{names[k]} ({counts[k]:,})" for k in order))
    drawn = "\n".join(lines)
    return drawn.translate(ASCII) if plain else drawn


def class_counts(federation: Federation) -> np.ndarray:
    """How many samples of each class (columns) each client (rows) has."""
    labels = getattr(federation, "labels", None)
    if labels is None:
        raise ValueError("the data has no labels(k): there are no classes to draw")
    rows = [labels(k) for k in range(federation.clients)]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or not getattr(federation, "classes", len(known[0])):
        raise ValueError("the targets are not labels: there are no classes to count")
    return np.stack(known)


def summary(counts: np.ndarray) -> dict[str, Any]:
    """The skew as numbers, ready for JSON; means are over the clients, each counted once.

    | key | meaning |
    |---|---|
    | `sizes`, `counts` | samples of each client, and of each class of each client |
    | `min_size`, `max_size` | the smallest and the largest client |
    | `top_share` | mean share of a client's largest class: 1 if all have one class each |
    | `effective_classes` | mean of exp(entropy): k for a client with k classes in equal parts |

    >>> skew = summary(np.array([[4, 0], [2, 2]]))
    >>> skew["top_share"], round(skew["effective_classes"], 9)
    (0.75, 1.5)
    """
    shares = shares_of(counts)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    sizes = counts.sum(axis=1)
    return {
        "sizes": sizes.tolist(),
        "counts": counts.tolist(),
        "min_size": int(sizes.min()),
        "max_size": int(sizes.max()),
        "top_share": float(shares.max(axis=1).mean()),
        "effective_classes": float(np.exp(-(shares * logs).sum(axis=1)).mean()),
    }


def sentence(counts: np.ndarray) -> str:
    """The same in words, the sizes before and the skew after the semicolon.

    >>> sentence(np.array([[4, 0], [2, 2]])).split("; ")[1]
    'largest class 75 % of a client on average, 1.5 effective classes'
    """
    skew = summary(counts)
    clients, classes = counts.shape
    low, high = skew["min_size"], skew["max_size"]
    each = f"{low:,} samples each" if low == high else f"{low:,} to {high:,} samples"
    return (
        f"{clients:,} client{'s' * (clients > 1)} × {classes:,} class{'es' * (classes > 1)}, "
        f"{each}; largest class {100 * skew['top_share']:.0f} % of a client on average, "
        f"{skew['effective_classes']:.1f} effective classes"
    )


def text(
    counts: np.ndarray, *, title: str = "", width: int = 80, height: int = 50, plain: bool = False
) -> "Text":
    """The picture for a terminal: a row for each class, a column for each client.

    Shades show the share of a client's samples, so nothing is lost without colours. Clients that do
    not fit into `width` columns go on in a further band, as many as fit into about `height` lines;
    of more clients than that, every second, third … is shown, and of more classes than lines,
    neighbours are joined: the picture says so. `plain` keeps to ASCII; `.plain` of the result is
    its text without colours.
    """
    from rich.text import Text

    signs = ASCII if plain else {}
    head = "; ".join(part for part in (title, sentence(counts)) if part)
    head = head.translate(signs)  # before it is wrapped: words get longer
    lines = [line for part in head.split("; ") for line in textwrap.wrap(part, width)]
    marks = ("none", "to 25", "50", "75", "100 % of a client's samples")
    legend = "  ".join(map(" ".join, zip(SHADES, marks, strict=True)))
    rows, step = _bands(counts, max(width - LABEL, 1), max(height - len(lines) - 2, 4))
    rows += [("", legend)] + [("", left_out(step, len(counts)))] * (step > 1)
    lines += [f"{name:>{LABEL - 1}} {cells}" for name, cells in rows]
    drawn = Text("\n".join(lines).translate(signs), no_wrap=True)
    drawn.highlight_regex(f"[{SHADES[1:]}]+", "cyan")
    drawn.highlight_regex(f"{SHADES[0]}+", "bright_black")
    drawn.highlight_regex(f"[{BARS}]+", "green")
    return drawn


def _bands(counts: np.ndarray, width: int, height: int) -> tuple[list[tuple[str, str]], int]:
    """The rows' names and cells; and 1, or the step from one client shown to the next."""
    clients, classes = counts.shape
    sizes = counts.sum(axis=1)
    uneven = bool(sizes.min() < sizes.max())
    joined = math.ceil(classes / (height - 1 - uneven))
    names = _names(classes, joined)
    step = math.ceil(clients / (width * (height // (len(names) + 1 + uneven))))
    shown = np.arange(0, clients, step)
    wide = 2 if 2 * len(shown) <= width else 1

    shares = np.add.reduceat(shares_of(counts), range(0, classes, joined), axis=1)
    shades = np.array(list(SHADES))[np.ceil(4 * shares - 1e-9).astype(int)]
    bars = np.array(list(BARS))[np.ceil(len(BARS) * sizes / sizes.max()).astype(int) - 1]
    rows: list[tuple[str, str]] = []
    for band in np.array_split(shown, math.ceil(wide * len(shown) / width)):
        rows.append(("client", _axis(band, wide)))
        cells = [*shades[band].T, *([bars[band]] if uneven else [])]
        drawn = ["".join(np.repeat(signs, wide)) for signs in cells]
        rows += zip([*names, "size"], drawn, strict=False)  # no row of sizes if all are equal
    return rows, step


def shares_of(counts: np.ndarray) -> np.ndarray:
    """The shares of the classes in each client's samples; raises for what is no such table."""
    if counts.ndim != 2 or not counts.size or not counts.any(axis=1).all():
        raise ValueError(
            f"counts must be a table of clients × classes in which no client is empty, got the "
            f"shape {counts.shape} with {int((counts == 0).all(axis=-1).sum())} empty clients"
        )
    return counts / counts.sum(axis=1, keepdims=True)


def _names(classes: int, joined: int) -> list[str]:
    """The rows' names: a class, or the first and the last of those that share the row."""
    shared = [range(classes)[first : first + joined] for first in range(0, classes, joined)]
    return [f"{row[0]}–{row[-1]}" if len(row) > 1 else f"{row[0]}" for row in shared]


def _axis(ids: np.ndarray, wide: int) -> str:
    """The ids of every tenth column, each above its own; none is cut off at the end."""
    axis = "".join(f"{k:<10}" for k in ids[:: 10 // wide].tolist()).rstrip()
    room = max(wide * len(ids), len(str(ids[0])))
    return axis if len(axis) <= room else axis[:room].rpartition(" ")[0].rstrip()


def left_out(step: int, clients: int) -> str:
    """That not every client is shown, in words."""
    return f"1 in {step} of the {clients:,} clients is shown: 0, {step}, {2 * step}, …"
