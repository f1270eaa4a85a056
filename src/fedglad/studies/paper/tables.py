"""An experiment's table: what was run beside what is published, every seed of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedglad.analysis.statistics import interval, spread, stability
from fedglad.studies.paper import measures
from fedglad.studies.paper.cells import Cell, Experiment, Reading
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


Read = tuple[list[Row], list[Column]]
"""What a reading makes of an experiment's cells."""


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

    @property
    def shortened(self) -> bool:
        return self.rounds < self.cell.rounds

    @property
    def remark(self) -> str:
        """A shortened run is never shown without it."""
        short = f" (shortened: {self.rounds} of {self.cell.rounds} rounds)"
        return short if self.shortened else ""

    @property
    def label(self) -> str:
        """The cell's, with the remark."""
        return self.cell.label + self.remark


def gather(experiment: Experiment, library: Library) -> list[CellRuns]:
    """The runs of every cell: of the whole length, then of shorter ones; empty if there is none."""
    gathered: list[CellRuns] = []
    for cell in experiment.cells:
        runs = {} if cell.absent else library.find(cell.config(1))
        lengths = sorted({rounds for rounds, _ in runs if rounds <= cell.rounds}, reverse=True)
        for length in dict.fromkeys([cell.rounds, *lengths]):
            seeds = sorted(seed for rounds, seed in runs if rounds == length)
            gathered.append(CellRuns(cell, length, {seed: runs[length, seed] for seed in seeds}))
    return gathered


def table(experiment: Experiment, library: Library) -> Table:
    """The experiment's table from what there is."""
    cells = gather(experiment, library)
    rows, columns = _READINGS[experiment.reading](cells)
    notes = list(experiment.notes)
    for ours in dict.fromkeys(one.cell.ours for one in cells if one.cell.ours):
        notes.append(f"marked (ours): {ours}")
    if any(one.shortened and one.runs for one in cells):
        notes.append(
            "shortened runs are not what the paper reports: they stand in rows of their own"
        )
    used = {str(run.path) for one in cells for run in one.runs.values()}
    notes += [note for note in library.notes if any(note.startswith(path) for path in used)]
    title = f"{experiment.name} ({experiment.where}): {experiment.about}"
    return Table(experiment.name, title, columns, rows, notes)


# ------------------------------------------------------------------------------------ readings


def _row(one: CellRuns, cells: Sequence[CellRuns], measure: Measure) -> Row:
    """What every reading has: the mean over the seeds, and the difference from the baseline.

    The baseline's runs are those of the same length.
    """
    baselines = (
        other
        for other in cells
        if (other.cell.label, other.rounds) == (one.cell.baseline, one.rounds)
        and not other.cell.absent
    )
    base = next(baselines, None)
    values, pairs = _values(one, measure), _values(base, measure) if base else {}
    differences = {seed: values[seed] - pairs[seed] for seed in values if seed in pairs}
    published = None if one.shortened else one.cell.published
    of_base = base.cell.published if base else None
    bounds = interval(list(differences.values()))
    return {
        "cell": one.cell.label,
        "label": one.label,
        "rounds": one.rounds,
        "shortened": one.shortened,
        "absent": one.cell.absent,
        "ours": one.cell.ours,
        "n": len(one.runs),
        "seeds": values,
        "mean": fmean(values.values()) if values else None,
        "std": spread([*values.values()]),
        "published": published.mean if published else None,
        "published_std": published.std if published else None,
        "differences": differences,
        "difference": fmean(differences.values()) if differences else None,
        "interval": list(bounds) if bounds else None,
        "published_difference": (
            round(published.mean - of_base.mean, 4) if published and of_base else None
        ),
    }


def _values(one: CellRuns, measure: Measure) -> dict[int, float]:
    values = {seed: measure(run) for seed, run in one.runs.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _accuracy(cells: Sequence[CellRuns]) -> Read:
    rows: list[Row] = []
    for one in cells:
        steady = stability([run.accuracy for run in one.runs.values()])
        numbers = {
            "spread": steady.std if steady else None,
            "worst": steady.worst if steady else None,
        }
        rows.append(_row(one, cells, measures.last10) | numbers)
    return rows, [*_HEAD, _MEAN, _PUBLISHED, *_DIFFERENCE, *_STABILITY]


def _seeds(cells: Sequence[CellRuns]) -> Read:
    rows, _ = _accuracy(cells)
    for one, row in zip(cells, rows, strict=True):
        by_seed = () if one.shortened else one.cell.by_seed
        row["published_seeds"] = dict(enumerate(by_seed, start=1))
    return rows, [
        *_HEAD,
        Column("accuracy % by seed", lambda row: _by_seed(row["seeds"], "{:.2f}")),
        Column("published", lambda row: _by_seed(row["published_seeds"], "{:.2f}")),
        Column("difference by seed", lambda row: _by_seed(row["differences"], "{:+.2f}")),
        *_DIFFERENCE,
    ]


def _gamma(cells: Sequence[CellRuns]) -> Read:
    rows, columns = _accuracy(cells)
    for one, row in zip(cells, rows, strict=True):
        row["gamma"] = None if one.cell.x is None else str(one.cell.x)
    std = Column("std over seeds", lambda row: _number(row["std"], "{:.2f}"))
    return rows, [*columns[:3], std, *columns[3:]]


def _norm_ratio(cells: Sequence[CellRuns]) -> Read:
    rows = [_row(one, cells, measures.norm_ratio) for one in cells]
    return rows, [
        *_HEAD,
        Column("std/mean", lambda row: _spread(row["mean"], row["std"], "{:.3f}")),
        Column("published", lambda row: _number(row["published"], "{:.2f}")),
    ]


def _similarity(cells: Sequence[CellRuns]) -> Read:
    rows: list[Row] = []
    for one in cells:
        fits = [measures.correlation(run) for run in one.runs.values()]
        row = _row(one, cells, lambda run: measures.correlation(run).r)
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


def _gsi_groups(cells: Sequence[CellRuns]) -> Read:
    rows: list[Row] = []
    nothing = {"group": "", "relative": None, "lowest": None, "highest": None}
    for one in cells:
        plain = _row(one, cells, measures.last10)
        groups = measures.fluctuations(next(iter(one.runs.values()))) if one.runs else []
        rows += [{**plain, **group} for group in groups or [nothing]]
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


def _bad_round(cells: Sequence[CellRuns]) -> Read:
    rows, columns = _accuracy(cells)
    for one, row in zip(cells, rows, strict=True):
        rounds = [measures.bad_round(run) for run in one.runs.values()]
        row["t"] = rounds[0]["t"] if rounds else None
        for name in ("before", "after", "gsi", "lowest_other"):
            row[name] = fmean(bad[name] for bad in rounds) if rounds else None
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


_READINGS: dict[Reading, Callable[[Sequence[CellRuns]], Read]] = {
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
    Column("", _name, left=True),
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
