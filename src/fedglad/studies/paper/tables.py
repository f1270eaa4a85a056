"""An experiment's table: what was run beside what is published, every seed of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedglad.analysis.statistics import interval, spread, stability
from fedglad.studies.paper import measures
from fedglad.studies.paper.cells import Cell, Experiment, Reading
from fedglad.studies.paper.published import Value
from fedglad.studies.paper.results import FinishedRun, Library

Row = dict[str, Any]
"""Numbers by name; accuracies in percent, None where there is none."""

Measure = Callable[[FinishedRun], float | None]


@dataclass(frozen=True)
class Column:
    """A column as it is shown: its head, and the text of a row's entry."""

    head: str
    text: Callable[[Row], str]
    left: bool = False


@dataclass(frozen=True)
class Table:
    """Rows with all numbers, the columns that show them, and what a reader has to know."""

    experiment: str
    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str] = field(default_factory=list[str])

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {
            "experiment": self.experiment,
            "title": self.title,
            "rows": self.rows,
            "notes": self.notes,
        }

    def texts(self) -> list[list[str]]:
        """What is shown."""
        return [[column.text(row) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class CellRuns:
    """A cell and its runs of one length, by seed."""

    cell: Cell
    rounds: int
    runs: Mapping[int, FinishedRun]
    absent: str = ""

    @property
    def shortened(self) -> bool:
        return self.rounds < self.cell.rounds

    @property
    def label(self) -> str:
        """A shortened run is never shown without saying so."""
        short = f" (shortened: {self.rounds} of {self.cell.rounds} rounds)"
        return self.cell.label + (short if self.shortened else "")


def gather(experiment: Experiment, library: Library) -> list[CellRuns]:
    """The runs of every cell: of the whole length, then of shorter ones; empty if there is none."""
    found: list[CellRuns] = []
    for cell in experiment.cells:
        if cell.absent:
            found.append(CellRuns(cell, cell.rounds, {}, cell.absent))
            continue
        runs = library.find(cell.config(1))
        lengths = sorted({rounds for rounds, _ in runs if rounds <= cell.rounds}, reverse=True)
        for length in dict.fromkeys([cell.rounds, *lengths]):
            seeds = sorted(seed for rounds, seed in runs if rounds == length)
            found.append(CellRuns(cell, length, {seed: runs[length, seed] for seed in seeds}))
    return found


def table(experiment: Experiment, library: Library) -> Table:
    """The experiment's table from what there is."""
    found = gather(experiment, library)
    rows, columns = _READINGS[experiment.reading](found)
    notes = list(experiment.notes)
    for ours in dict.fromkeys(f.cell.ours for f in found if f.cell.ours):
        notes.append(f"marked (ours): {ours}")
    if any(f.shortened and f.runs for f in found):
        notes.append(
            "shortened runs are not what the paper reports: they stand in rows of their own"
        )
    used = {str(run.path) for f in found for run in f.runs.values()}
    notes += [note for note in library.notes if any(note.startswith(path) for path in used)]
    title = f"{experiment.name} ({experiment.where}): {experiment.about}"
    return Table(experiment.name, title, columns, rows, notes)


# ------------------------------------------------------------------------------------ readings


def _row(found: CellRuns, all_found: Sequence[CellRuns], measure: Measure) -> Row:
    """What every reading has: the mean over the seeds, and the difference from the baseline."""
    values = _values(found, measure)
    base = _baseline(found, all_found)
    pairs = _values(base, measure) if base else {}
    differences = {seed: values[seed] - pairs[seed] for seed in values if seed in pairs}
    whole = not found.shortened
    published = found.cell.published if whole else None
    of_base = base.cell.published if base and whole else None
    bounds = interval(list(differences.values()))
    return {
        "cell": found.cell.label,
        "label": found.label,
        "rounds": found.rounds,
        "shortened": found.shortened,
        "absent": found.absent,
        "ours": found.cell.ours,
        "n": len(found.runs),
        "seeds": values,
        "mean": fmean(values.values()) if values else None,
        "std": spread([*values.values()]),
        "published": published.mean if published else None,
        "published_std": published.std if published else None,
        "differences": differences,
        "difference": fmean(differences.values()) if differences else None,
        "interval": list(bounds) if bounds else None,
        "published_difference": _minus(published, of_base),
    }


def _values(found: CellRuns, measure: Measure) -> dict[int, float]:
    values = {seed: measure(run) for seed, run in found.runs.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _baseline(found: CellRuns, all_found: Sequence[CellRuns]) -> CellRuns | None:
    """The runs of the baseline that have the same length."""
    same = [f for f in all_found if f.cell.label == found.cell.baseline and not f.absent]
    return next((f for f in same if f.rounds == found.rounds), None)


def _minus(value: Value | None, base: Value | None) -> float | None:
    return round(value.mean - base.mean, 4) if value and base else None


def _accuracy(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows = [_row(f, found, measures.last10) | _stability(f) for f in found]
    return rows, [*_HEAD, _MEAN, _PUBLISHED, *_DIFFERENCE, *_STABILITY]


def _stability(found: CellRuns) -> Row:
    """The mean over the seeds of what a run's second half was like."""
    steady = stability([run.accuracy for run in found.runs.values()])
    return {
        "spread": steady.std if steady else None,
        "worst": steady.worst if steady else None,
    }


def _seeds(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows, _ = _accuracy(found)
    for f, row in zip(found, rows, strict=True):
        by_seed = () if f.shortened else f.cell.by_seed
        row["published_seeds"] = dict(enumerate(by_seed, start=1))
    return rows, [
        *_HEAD,
        Column("accuracy % by seed", lambda row: _by_seed(row["seeds"], "{:.2f}")),
        Column("published", lambda row: _by_seed(row["published_seeds"], "{:.2f}")),
        Column("difference by seed", lambda row: _by_seed(row["differences"], "{:+.2f}")),
        *_DIFFERENCE,
    ]


def _gamma(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows, columns = _accuracy(found)
    for f, row in zip(found, rows, strict=True):
        row["gamma"] = None if f.cell.x is None else str(f.cell.x)
    std = Column("std over seeds", lambda row: _number(row["std"], "{:.2f}"))
    return rows, [*columns[:3], std, *columns[3:]]


def _norm_ratio(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows = [_row(f, found, measures.norm_ratio) for f in found]
    return rows, [
        *_HEAD,
        Column("std/mean", lambda row: _spread(row["mean"], row["std"], "{:.3f}")),
        Column("published", lambda row: _number(row["published"], "{:.2f}")),
    ]


def _similarity(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows: list[Row] = []
    for f in found:
        fits = [measures.correlation(run) for run in f.runs.values()]
        row = _row(f, found, lambda run: measures.correlation(run).r)
        row["points"] = len(fits[0].gsi) if fits else None
        # The cohorts of all seeds are the same: one seed's interval is not made narrower by others.
        row["interval"] = list(fits[0].interval) if fits and fits[0].interval else None
        rows.append(row)
    return rows, [
        *_HEAD,
        Column("rounds", lambda row: _number(row["points"], "{:d}")),
        Column("Pearson's r", lambda row: _spread(row["mean"], row["std"], "{:.4f}")),
        Column("95 % interval (first seed)", lambda row: _bounds(row["interval"], "{:+.2f}")),
        Column("published", lambda row: _number(row["published"], "{:.4f}")),
    ]


def _gsi_groups(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows: list[Row] = []
    for f in found:
        plain = _row(f, found, measures.last10)
        groups = measures.fluctuations(next(iter(f.runs.values()))) if f.runs else []
        for group in groups:
            numbers = {"mean": group.mean, "std": group.std, "relative": group.std / group.mean}
            extremes = {"lowest": group.lowest, "highest": group.highest}
            rows.append({**plain, "group": group.group, **numbers, **extremes})
        if not groups:
            rows.append({**plain, "group": "", "relative": None, "lowest": None, "highest": None})
    number = "{:.3f}"
    return rows, [
        _HEAD[0],
        Column("group", lambda row: row["group"] or "-", left=True),
        Column("mean GSI", lambda row: _number(row["mean"], number)),
        Column("std over rounds", lambda row: _number(row["std"], number)),
        Column("std/mean", lambda row: _number(row["relative"], number)),
        Column("lowest", lambda row: _number(row["lowest"], number)),
        Column("highest", lambda row: _number(row["highest"], number)),
    ]


def _bad_round(found: Sequence[CellRuns]) -> tuple[list[Row], list[Column]]:
    rows, columns = _accuracy(found)
    names = ("before", "after", "gsi", "lowest_other")
    for f, row in zip(found, rows, strict=True):
        rounds = [measures.bad_round(run) for run in f.runs.values()]
        row["t"] = rounds[0].t if rounds else None
        for name in names:
            row[name] = fmean(getattr(bad, name) for bad in rounds) if rounds else None
        row["drop"] = row["before"] - row["after"] if rounds else None
    return rows, [
        *columns[:2],
        Column("before %", lambda row: _number(row["before"], "{:.2f}")),
        Column("after the bad round %", lambda row: _number(row["after"], "{:.2f}")),
        Column("drop", lambda row: _number(row["drop"], "{:.2f}")),
        Column("its GSI", lambda row: _number(row["gsi"], "{:.3f}")),
        Column("lowest other GSI", lambda row: _number(row["lowest_other"], "{:.3f}")),
        _MEAN,
        *_DIFFERENCE[:2],
        *_STABILITY,
    ]


_READINGS: dict[Reading, Callable[[Sequence[CellRuns]], tuple[list[Row], list[Column]]]] = {
    "accuracy": _accuracy,
    "seeds": _seeds,
    "gamma": _gamma,
    "bad-round": _bad_round,
    "gsi-groups": _gsi_groups,
    "norm-ratio": _norm_ratio,
    "similarity": _similarity,
}


# --------------------------------------------------------------------------------------- texts


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _spread(mean: float | None, std: float | None, form: str) -> str:
    return _number(mean, form) + (f" ± {form.format(std)}" if std is not None else "")


def _bounds(bounds: Sequence[float] | None, form: str) -> str:
    return "-" if bounds is None else f"[{form.format(bounds[0])}, {form.format(bounds[1])}]"


def _by_seed(values: Mapping[int, float], form: str) -> str:
    return ", ".join(f"{seed}: {form.format(value)}" for seed, value in values.items()) or "-"


def _name(row: Row) -> str:
    ours = " (ours)" if row["ours"] else ""
    state = row["absent"] or ("" if row["n"] else "not run")
    return row["label"] + ours + (f": {state}" if state else "")


_HEAD = [
    Column("", lambda row: _name(row), left=True),
    Column("n", lambda row: str(row["n"])),
]
_MEAN = Column("last 10 rounds %", lambda row: _spread(row["mean"], row["std"], "{:.2f}"))
_PUBLISHED = Column(
    "published %", lambda row: _spread(row["published"], row["published_std"], "{:.2f}")
)
_DIFFERENCE = [
    Column("difference", lambda row: _number(row["difference"], "{:+.2f}")),
    Column("95 % interval", lambda row: _bounds(row["interval"], "{:+.2f}")),
    Column("published difference", lambda row: _number(row["published_difference"], "{:+.2f}")),
]
_STABILITY = [
    Column("std, 2nd half", lambda row: _number(row["spread"], "{:.2f}")),
    Column("worst, 2nd half %", lambda row: _number(row["worst"], "{:.2f}")),
]
