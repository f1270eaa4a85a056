"""A comparison as a table: its columns, and the table as Markdown, LaTeX, CSV.

With several blocks the text formats put methods in rows and blocks beside each other.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedglad.analysis.blocks import nearest, renaming
from fedglad.analysis.comparison import Comparison, Difference, Group
from fedglad.analysis.grouping import CompareError, varying_seeds
from fedglad.analysis.statistics import LAST
from fedglad.config.keys import shown
from fedglad.records import Score

NONE = "–"

USUAL = ("n", "score", "final", "rounds", "bytes", "difference", "interval")
"""The columns of a table that nobody chose, as far as there is something in them."""

COLUMNS = ("n", "score", "mean", "std", "final", "best", *USUAL[3:])
"""All that can be chosen: `score` is the number that is compared, mean ± std."""


@dataclass(frozen=True)
class Column:
    """A column: a text for each group of the comparison, and the number that decides the best."""

    name: str
    head: str
    texts: list[str]
    values: list[float | None]
    sign: int = 0  # 1 if more is better, −1 if less is, 0 if neither

    def best(self, places: Sequence[int]) -> set[int]:
        """Which of some groups are the best, as the numbers are shown; none if all are alike."""
        known = [(v, k) for k in places if (v := self.values[k]) is not None]
        if not self.sign or len(known) < 2:
            return set()
        _, place = max((self.sign * value, -k) for value, k in known)
        best = {k for _, k in known if _figure(self.texts[k]) == _figure(self.texts[-place])}
        return best if len(best) < len(known) else set()


def _figure(text: str) -> str:
    """What stands for the number itself in a cell: `84.91` of `84.91 ± 1.50`."""
    return text.split(" ")[0]


# ------------------------------------------------------------------------------------- columns


def columns(comparison: Comparison, names: Sequence[str] | None = None) -> list[Column]:
    """The columns by their names, by default the usual ones that are not empty.

    >>> from fedglad.analysis.comparison import Group
    >>> group = Group("all runs", {}, [], [], [0.5, 0.75], 0.625, 0.1768, 0.5)
    >>> [(c.head, c.texts) for c in columns(Comparison("last10_accuracy", "", [group], []))]
    [('n', ['2']), ('last10_accuracy %', ['62.50 ± 17.68']), ('final %', ['50.00'])]
    """
    found = [_column(comparison, name) for name in _checked(comparison, names)]
    made = [column for column in found if column and (names or any(column.texts))]
    rename = renaming(comparison.alias)
    return [Column(c.name, rename(c.head), c.texts, c.values, c.sign) for c in made]


def _checked(comparison: Comparison, names: Sequence[str] | None) -> list[str]:
    if names is None:
        return list(USUAL)
    which = comparison.metric.partition("_")[0]
    known = [name if name != which else "score" for name in names]
    for name in known:
        if name not in COLUMNS:
            raise CompareError(
                f"unknown column {name!r}{nearest(name, COLUMNS)}: choose from {', '.join(COLUMNS)}"
            )
        if name in ("rounds", "bytes") and comparison.target is None:
            raise CompareError(f"the column {name!r} is that to a target: give one, --target 0.8")
    return known


def _column(comparison: Comparison, name: str) -> Column | None:
    score, tested = comparison.score, comparison.tested
    unit, sign = _unit(score), score.sign if score == tested else 0
    heads: Mapping[str, tuple[str, Callable[[Group], float | None], int]] = {
        "n": ("n", lambda group: len(group.values), 0),
        "score": (f"{comparison.metric}{unit}", lambda group: group.mean, sign),
        "mean": (f"mean {comparison.metric}{unit}", lambda group: group.mean, sign),
        "std": (f"std{unit}", lambda group: group.std, 0),
    }
    groups = comparison.groups
    if name in heads:
        head, read, better = heads[name]
        values = [read(group) for group in groups]
        texts = [_mean(group, score) for group in groups]
        if name == "n":
            texts = [str(len(group.values)) for group in groups]
        elif name != "score":
            texts = [NONE if value is None else score.figure(value) for value in values]
        return Column(name, head, texts, values, better)
    match name:
        case "final":
            return _final(comparison)
        case "best":
            return _best(comparison)
        case "rounds" | "bytes":
            return _to_target(comparison, name)
        case _:
            place = ("difference", "interval").index(name)
            texts = [_against(group, comparison)[place] for group in groups]
            means = [group.difference.mean if group.difference else None for group in groups]
            return Column(name, ("difference", "95 % interval")[place], texts, means)


def _unit(score: Score) -> str:
    return " %" if score.share else ""


def _mean(group: Group, score: Score) -> str:
    return " ± ".join(score.figure(x) for x in (group.mean, group.std) if x is not None)


def _final(comparison: Comparison) -> Column | None:
    """None where the metric is that of the last test already."""
    if comparison.metric.startswith("final_"):
        return None
    of_final = Score(comparison.final)
    values = [group.final_mean for group in comparison.groups]
    texts = ["" if value is None else of_final.figure(value) for value in values]
    sign = comparison.tested.sign if comparison.tested else 0
    return Column("final", f"final{_unit(of_final)}", texts, values, sign)


def _best(comparison: Comparison) -> Column:
    """The head says on which data the round was chosen."""
    score = comparison.tested or comparison.score
    of = [group.best for group in comparison.groups]
    by = {one.by for one in of if one}
    held_out = bool(by) and all("validation" in one for one in by)
    how = "by validation" if held_out else "chosen on test"
    values = [one.mean if one else None for one in of]
    texts = [NONE if value is None else score.figure(value) for value in values]
    return Column("best", f"best {how}{_unit(score)}", texts, values, score.sign)


def _to_target(comparison: Comparison, name: str) -> Column | None:
    """The mean over the runs that reach it, and how many of them do; nothing without a target."""
    if comparison.target is None or not (score := comparison.tested):
        return None
    texts: list[str] = []
    values: list[float | None] = []
    for its in (group.to_target for group in comparison.groups):
        value = (its.rounds if name == "rounds" else its.bytes) if its else None
        # A mean over some of the runs is that of the quick ones, and not the best.
        values.append(value if its and its.reached == its.known else None)
        if its is None or value is None:
            texts.append(NONE)
        elif name == "rounds":
            texts.append(f"{value:.1f} ({its.reached} of {its.known})")
        else:
            texts.append(megabytes(value))
    head = f"rounds to {score.text(comparison.target)}" if name == "rounds" else "MB to it"
    return Column(name, head, texts, values, -1)


def megabytes(size: float) -> str:
    """
    >>> megabytes(1_234_567_890), megabytes(1_234_567), megabytes(800)
    ('1,235', '1.23', '0.0008')
    """
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.3g}"


def _against(group: Group, comparison: Comparison) -> tuple[str, str]:
    """A group's difference to the baseline, and its interval."""
    if group.difference:
        return of_difference(group.difference, comparison.score)
    if not any(other.difference for other in comparison.groups):
        return "", ""
    return ("baseline", "") if group.label == comparison.baseline else ("-", "-")


def of_difference(difference: Difference, score: Score) -> tuple[str, str]:
    """
    >>> of_difference(Difference([], [], 0.0025, (-0.005, 0.01)), Score())
    ('+0.25', '[-0.50, +1.00]')
    """
    mean, *ends = (
        score.figure(x, sign="+") for x in (difference.mean, *(difference.interval or ()))
    )
    return mean, f"[{', '.join(ends)}]" if ends else "-"


# --------------------------------------------------------------------------- what stands below


def caption(comparison: Comparison) -> str:
    """The baseline, and what has to be known of the metric; empty if there is nothing."""
    of_each = " in each block" if comparison.blocks else ""
    several = len(comparison.groups) > 1
    parts = [f"Baseline{of_each}: {comparison.baseline}"] if several else []
    if not comparison.score.higher:
        parts.append(f"of {comparison.metric} less is better")
    least, most = comparison.tests or (LAST, LAST)
    if least < LAST:
        tests = f"{least} test{'s' if least > 1 else ''}"
        many = tests if least == most else f"{least} to {min(most, LAST)} tests"
        parts.append(f"{comparison.metric} is over the last {many}, as runs have no more")
    return "; ".join(parts)


def differences(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The paired differences in words, seed by seed: titles, and a line for each."""
    unit = " in percentage points" if comparison.score.share else ""
    to_base = [
        f"{called(group)}   {_by_seed(group.difference, comparison)}"
        for group in comparison.groups
        if group.difference
    ]
    return [
        (title, lines)
        for title, lines in (
            (f"Differences to {comparison.baseline} by seed{unit}:", to_base),
            (f"Rule − control{unit}:", _over_controls(comparison)),
            (
                f"Average of the models − newest model, of the same runs{unit}:",
                [
                    _pair(_prefix(group) + (group.averaged_of or ""), group.over_newest, comparison)
                    for group in comparison.groups
                    if group.over_newest
                ],
            ),
        )
        if lines
    ]


def called(group: Group) -> str:
    """A group's label, after that of its block."""
    return f"{_prefix(group)}{group.label}"


def _prefix(group: Group) -> str:
    return f"{group.block}: " if group.block else ""


def _over_controls(comparison: Comparison) -> list[str]:
    """Newest models against newest models, averages against averages."""
    factors = {(group.block, group.label): group.factors or [] for group in comparison.groups}
    lines: list[str] = []
    for rule in comparison.groups:
        for label, difference in (rule.over_controls or {}).items():
            constants = factors.get((rule.block, label), [])
            text = _pair(f"{called(rule)} − {label}", difference, comparison)
            if len({*constants}) > 1:  # one that all have is in the label
                text += f"   (factors {', '.join(f'{factor:.4f}' for factor in constants)})"
            lines.append(text)
    return lines


def _pair(label: str, difference: Difference, comparison: Comparison) -> str:
    """A paired difference in one line: its mean, its interval, and that of every seed."""
    mean, interval = of_difference(difference, comparison.score)
    text = f"{label}   {mean} {interval}".removesuffix(" -")
    return f"{text}   by seed {_by_seed(difference, comparison)}"


def _by_seed(difference: Difference, comparison: Comparison) -> str:
    names = varying_seeds([seed for group in comparison.groups for seed in group.seeds])
    pairs = zip(difference.seeds, difference.values, strict=True)
    return ",  ".join(
        f"{'/'.join(str(seed.get(name)) for name in names)}: "
        f"{comparison.score.figure(value, sign='+')}"
        for seed, value in pairs
    )


# -------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Cell:
    """A text, and whether it is the best of its kind."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Layout:
    """Rows of a table as a text format writes it: blocks beside each other, if there are several.

    `spans` are the blocks' labels, each over all of its `heads`; of one block there are none.
    """

    spans: list[str]
    heads: list[str]
    rows: list[tuple[str, list[Cell]]]
    remarks: list[str]


def layout(comparison: Comparison, names: Sequence[str] | None = None) -> Layout:
    """By default one block has the usual columns, and each of several the score alone.

    Where a target was asked for, each of several also has the rounds and bytes to it.
    """
    groups, several = comparison.groups, list(comparison.blocks)
    if several and names is None:
        names = ["score", *(("rounds", "bytes") if comparison.target is not None else ())]
    made = columns(comparison, names)
    blocks = several or [""]
    members = {block: [k for k, g in enumerate(groups) if g.block == block] for block in blocks}
    places = {(group.block, group.label): k for k, group in enumerate(groups)}
    best = {(c.name, k) for c in made for block in blocks for k in c.best(members[block])}
    rows: list[tuple[str, list[Cell]]] = []
    for label in _methods(comparison):
        cells: list[Cell] = []
        for k in (places.get((block, label)) for block in blocks):
            cells += [
                Cell("") if k is None else Cell(c.texts[k], (c.name, k) in best) for c in made
            ]
        rows.append((label, cells))
    heads = [column.head for _ in blocks for column in made]
    remarks = [text for text in (caption(comparison), _numbers(comparison, made)) if text]
    return Layout(several, heads, rows, [*(f"{text}." for text in remarks), *_notes(comparison)])


def _methods(comparison: Comparison) -> list[str]:
    """The rows: the methods in the order in which blocks have them, averages below their models."""
    labels: list[str] = []
    for group in comparison.groups:
        if group.label not in labels:
            newest = group.averaged_of
            place = labels.index(newest) + 1 if newest in labels else len(labels)
            labels.insert(place, group.label)
    return labels


def _numbers(comparison: Comparison, made: Iterable[Column]) -> str:
    """What ± is and over how many runs, where no column says it."""
    names = {column.name for column in made}
    if "score" not in names or all(group.std is None for group in comparison.groups):
        return ""
    counts = sorted({len(group.values) for group in comparison.groups})
    many = f" of {' to '.join(dict.fromkeys(map(str, (counts[0], counts[-1]))))} runs"
    number = f"{comparison.metric}{_unit(comparison.score)}"
    return f"{number}: mean ± sample standard deviation{'' if 'n' in names else many}"


def _notes(comparison: Comparison) -> list[str]:
    return [f"Note: {note}." for note in comparison.notes]


def markdown(comparison: Comparison, names: Sequence[str] | None = None) -> str:
    """A pipe table, the best of each block in bold, and what is to be known as a list."""
    made = layout(comparison, names)
    heads = made.heads
    if made.spans:
        each = len(heads) // len(made.spans)
        spans = [span for span in made.spans for _ in range(each)]
        pairs = zip(spans, heads, strict=True)
        heads = spans if each == 1 else [f"{span}: {head}" for span, head in pairs]
    lines = [_pipes(["", *heads]), _pipes([":--", *("--:" for _ in heads)])]
    for label, cells in made.rows:
        texts = (f"**{cell.text}**" if cell.best else cell.text for cell in cells)
        lines.append(_pipes([label, *texts]))
    remarks = "".join(f"- {_one_line(text)}\n" for text in made.remarks)
    return "\n".join(lines) + "\n" + (f"\n{remarks}" if remarks else "")


def _pipes(texts: Iterable[str]) -> str:
    cells = (_one_line(text).replace("|", r"\|") for text in texts)
    return f"| {' | '.join(cells)} |"


def _one_line(text: str) -> str:
    """Without what breaks a line or steers a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def as_csv(comparison: Comparison, names: Sequence[str] | None = None) -> str:
    """A row for each group and every number as it is, as `Comparison.rows` has them."""
    rows = comparison.rows()
    heads = list(dict.fromkeys(name for row in rows for name in row))
    if names is not None:
        wanted = _checked(comparison, names)
        numbers = {one for few in IN_ROWS.values() for one in few}
        chosen = [one for name in wanted for one in IN_ROWS[name]]
        heads = [head for head in heads if head not in numbers] + list(dict.fromkeys(chosen))
    out = io.StringIO()
    writer = csv.DictWriter(out, heads, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: v if isinstance(v, str | None) else shown(v) for k, v in row.items()})
    return out.getvalue()


IN_ROWS: dict[str, tuple[str, ...]] = {
    "n": ("n",),
    "score": ("metric", "mean", "std"),
    "mean": ("metric", "mean"),
    "std": ("std",),
    "final": ("final",),
    "best": ("best", "best_by"),
    "rounds": ("rounds_to_target", "reached"),
    "bytes": ("bytes_to_target", "reached"),
    "difference": ("difference",),
    "interval": ("low", "high"),
}
"""What a column is called in the rows of a data frame."""


# --------------------------------------------------------------------------------------- LaTeX

SIGNS = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "{''}"},
    **{"[": "{[}", "]": "{]}", "*": "{*}"},  # after a line's end they would be its arguments
    **{"±": r"$\pm$", "·": r"$\cdot$", "−": "$-$", "–": "--", "∞": r"$\infty$", "→": r"$\to$"},
}
"""What stands for a character in LaTeX, beside the Greek letters."""

_NUMBERS = re.compile(r"[-+−\d.,e±\[\] ]*\d[-+−\d.,e±\[\] ]*")


def latex(comparison: Comparison, names: Sequence[str] | None = None) -> str:
    """A tabular of booktabs, the best of each block in bold; what is to be known as comments."""
    made = layout(comparison, names)
    each = len(made.heads) // max(1, len(made.spans))
    lines = [
        *(f"% {_one_line(text)}" for text in made.remarks),
        r"% In the preamble: \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * len(made.heads)}}}",
        r"\toprule",
    ]
    heads = made.heads
    if made.spans and each == 1:
        heads = made.spans
    elif made.spans:
        spans = [rf"\multicolumn{{{each}}}{{c}}{{{escaped(span)}}}" for span in made.spans]
        first = range(2, 2 + len(heads), each)
        lines += [
            _ampersands(["", *spans]),
            "".join(rf"\cmidrule(lr){{{k}-{k + each - 1}}}" for k in first),
        ]
    lines += [_ampersands(["", *map(escaped, heads)]), r"\midrule"]
    for label, cells in made.rows:
        lines.append(_ampersands([escaped(label), *map(_in_math, cells)]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _ampersands(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def escaped(text: str) -> str:
    r"""A text as LaTeX sets it.

    >>> escaped("last10_f1 %, α = 0.1"), escaped("[a]")
    ('last10\\_f1 \\%, $\\alpha$ = 0.1', '{[}a{]}')
    """
    return "".join(SIGNS.get(c) or _greek(c) for c in _one_line(text))


def _greek(char: str) -> str:
    r"""
    >>> _greek("γ"), _greek("Ω"), _greek("Α"), _greek("a")
    ('$\\gamma$', '$\\Omega$', 'A', 'a')
    """
    if not "Α" <= char <= "ω":
        return char
    _, size, _, name = [*unicodedata.name(char, "").split(" "), "", "", "", ""][:4]
    name = {"LAMDA": "LAMBDA"}.get(name, name).lower()
    if size == "CAPITAL" and name.title() not in _CAPITALS:
        return {"eta": "H", "rho": "P", "chi": "X"}.get(name, name[:1].upper())
    if not name or name in ("final", "omicron"):
        return {"omicron": "o", "final": r"$\varsigma$"}.get(name, char)
    return f"$\\{name.title() if size == 'CAPITAL' else name}$"


_CAPITALS = (
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Pi",
    "Sigma",
    "Upsilon",
    "Phi",
    "Psi",
    "Omega",
)


def _in_math(cell: Cell) -> str:
    r"""Numbers as formulas, so that a minus is one; the best in bold.

    >>> _in_math(Cell("84.91 ± 1.50", True)), _in_math(Cell("[-0.45, +1.17]")), _in_math(Cell("–"))
    ('$\\mathbf{84.91} \\pm 1.50$', '$[-0.45, +1.17]$', '--')
    >>> _in_math(Cell("1,235")), _in_math(Cell("2.5e-05")), _in_math(Cell("18.0 (3 of 3)", True))
    ('$1{,}235$', '$2.5\\cdot 10^{-5}$', '\\textbf{18.0 (3 of 3)}')
    """
    if not _NUMBERS.fullmatch(cell.text):
        text = escaped(cell.text)
        return rf"\textbf{{{text}}}" if cell.best else text
    figure = _figure(cell.text)
    first, rest = _formula(figure), _formula(cell.text.removeprefix(figure))
    return f"$\\mathbf{{{first}}}{rest}$" if cell.best else f"${first}{rest}$"


def _formula(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d{3})", "{,}", text)
    text = re.sub(r"e\+?(-?)0*(\d+)", r"\\cdot 10^{\1\2}", text)
    return text.replace("±", r"\pm").replace("−", "-")


FORMATS: dict[str, Callable[[Comparison, Sequence[str] | None], str]] = {
    "latex": latex,
    "markdown": markdown,
    "csv": as_csv,
}

ENDINGS = {".tex": "latex", ".md": "markdown", ".csv": "csv", ".json": "json", ".txt": "table"}
"""The format of a file, by its name."""

SHOWN: Mapping[str, Any] = dict.fromkeys(("table", *FORMATS, "json"))
"""All that `fedglad compare --format` takes."""
