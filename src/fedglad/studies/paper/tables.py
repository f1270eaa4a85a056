"""An experiment's table: what was run beside what is published, every seed of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedglad.analysis.statistics import interval, spread, stability
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
        return {name: value for name, value in vars(self).items() if name != "columns"}

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
    present = {(two.cell.label, two.rounds): two for two in cells if not two.cell.absent}
    base = present.get((one.cell.baseline or "", one.rounds))
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
        numbers = {"spread": steady and steady.std, "worst": steady and steady.worst}
        rows.append(_row(one, cells, FinishedRun.last10) | numbers | _averaged(one))
    averaged = _AVERAGED if any(row["averaged"] is not None for row in rows) else []
    return rows, [*_HEAD, _MEAN, _PUBLISHED, *_DIFFERENCE, *_STABILITY, *averaged]


def _averaged(one: CellRuns) -> Row:
    """The average of the models of the runs that kept one, and its difference to the newest.

    Runs that kept different averages are not put together.
    """
    values = _values(one, FinishedRun.last10_averaged)
    kinds = [one.runs[seed].config.to_dict()["average"] for seed in values]
    values = values if all(kind == kinds[0] for kind in kinds) else {}
    gains = [value - one.runs[seed].last10() for seed, value in values.items()]
    bounds = interval(gains)
    return {
        "averaged_seeds": values,
        "averaged": fmean(values.values()) if values else None,
        "averaged_std": spread([*values.values()]),
        "averaged_difference": fmean(gains) if gains else None,
        "averaged_interval": list(bounds) if bounds else None,
    }


def _seeds(cells: Sequence[CellRuns]) -> Read:
    rows, _ = _accuracy(cells)
    for one, row in zip(cells, rows, strict=True):
        by_seed = () if one.shortened else one.cell.by_seed
        row["published_seeds"] = dict(enumerate(by_seed, start=1))
    return rows, [
        *_HEAD,
        column("accuracy % by seed", "seeds"),
        column("published", "published_seeds"),
        column("difference by seed", "differences", "{:+.2f}"),
        *_DIFFERENCE,
    ]


def _gamma(cells: Sequence[CellRuns]) -> Read:
    rows, columns = _accuracy(cells)
    for one, row in zip(cells, rows, strict=True):
        row["gamma"] = None if one.cell.x is None else str(one.cell.x)
    return rows, [*columns[:3], column("std over seeds", "std"), *columns[3:]]


def _norm_ratio(cells: Sequence[CellRuns]) -> Read:
    rows = [_row(one, cells, FinishedRun.norm_ratio) for one in cells]
    mean = column("std/mean", "mean", "{:.3f}", std="std")
    return rows, [*_HEAD, mean, column("published", "published")]


def _similarity(cells: Sequence[CellRuns]) -> Read:
    rows: list[Row] = []
    for one in cells:
        fits = [run.correlation() for run in one.runs.values()]
        row = _row(one, cells, lambda run: run.correlation().r)
        row["points"] = len(fits[0].gsi) if fits else None
        # The cohorts of all seeds are the same: one seed's interval is not made narrower by others.
        row["interval"] = list(fits[0].interval) if fits and fits[0].interval else None
        rows.append(row)
    return rows, [
        *_HEAD,
        column("rounds", "points", "{:d}"),
        column("Pearson's r", "mean", "{:.4f}", std="std"),
        column("95 % interval (first seed)", "interval", "{:+.2f}"),
        column("published", "published", "{:.4f}"),
    ]


def _gsi_groups(cells: Sequence[CellRuns]) -> Read:
    rows: list[Row] = []
    nothing = {"group": "", "relative": None, "lowest": None, "highest": None}
    for one in cells:
        plain = _row(one, cells, FinishedRun.last10)
        groups = next(iter(one.runs.values())).fluctuations() if one.runs else []
        rows += [{**plain, **group} for group in groups or [nothing]]
    shown = {
        "mean GSI": "mean",
        "std over rounds": "std",
        "std/mean": "relative",
        "lowest": "lowest",
        "highest": "highest",
    }
    group = Column("group", lambda row: row["group"] or "-", left=True)
    return rows, [_HEAD[0], group, *(column(*pair, "{:.3f}") for pair in shown.items())]


def _bad_round(cells: Sequence[CellRuns]) -> Read:
    rows, columns = _accuracy(cells)
    for one, row in zip(cells, rows, strict=True):
        rounds = [run.bad_round() for run in one.runs.values()]
        row["t"] = rounds[0]["t"] if rounds else None
        for name in ("before", "after", "gsi", "lowest_other"):
            row[name] = fmean(bad[name] for bad in rounds) if rounds else None
        row["drop"] = row["before"] - row["after"] if rounds else None
    return rows, [
        *columns[:2],
        column("before %", "before"),
        column("after the bad round %", "after"),
        column("drop", "drop"),
        column("its GSI", "gsi", "{:.3f}"),
        column("lowest other GSI", "lowest_other", "{:.3f}"),
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


def column(head: str, key: str, form: str = "{:.2f}", *, std: str | None = None) -> Column:
    """A number of the rows, ± another; both ends of an interval; or what each seed has."""

    def text(row: Row) -> str:
        value = row[key]
        if value is None or value == {}:
            return "-"
        if isinstance(value, Mapping):
            return ", ".join(f"{seed}: {form.format(one)}" for seed, one in value.items())
        if isinstance(value, list):
            return f"[{', '.join(map(form.format, value))}]"
        beside = row[std] if std else None
        return form.format(value) + ("" if beside is None else f" ± {form.format(beside)}")

    return Column(head, text)


def _name(row: Row) -> str:
    ours = " (ours)" if row["ours"] else ""
    state = row["absent"] or ("" if row["n"] else "not run")
    return row["label"] + ours + (f": {state}" if state else "")


_HEAD = [Column("", _name, left=True), column("n", "n", "{:d}")]
_MEAN = column("last 10 rounds %", "mean", std="std")
_PUBLISHED = column("published %", "published", std="published_std")
_DIFFERENCE = [
    column("difference", "difference", "{:+.2f}"),
    column("95 % interval", "interval", "{:+.2f}"),
    column("published difference", "published_difference", "{:+.2f}"),
]
_STABILITY = [column("std, 2nd half", "spread"), column("worst, 2nd half %", "worst")]
_AVERAGED = [
    column("averaged %", "averaged", std="averaged_std"),
    column("averaged − newest", "averaged_difference", "{:+.2f}"),
    column("its 95 % interval", "averaged_interval", "{:+.2f}"),
]
