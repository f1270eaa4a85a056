"""`fedglad paper`: the paper's tables and figures by name."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedglad.cli import console
from fedglad.cli.console import error, escape, mistakes, note, print_json, print_wide, say, warn
from fedglad.cli.options import AsJson, Jobs, RunsOut, among, cores, one_of
from fedglad.cli.sweep import STOPPED

if TYPE_CHECKING:
    from fedglad.runs.sweeping import Task
    from fedglad.studies.paper.results import Library
    from fedglad.studies.paper.tables import Table

app = typer.Typer(
    help="The paper's tables and figures: list, run, table, plot, export.", no_args_is_help=True
)

RUNS, RESULTS = Path("runs") / "paper", Path("results")
HEAD = 12  # characters of a line in a column's head

Name = Annotated[
    str,
    typer.Argument(
        help="An experiment: fedglad paper list.",
        autocompletion=among("fedglad.studies.paper.experiments:EXPERIMENTS"),
    ),
]
Results = Annotated[Path, typer.Option("--results", help="The folder of exported results.")]
Format = Annotated[
    str,
    one_of("fedglad.studies.paper.formats:SHOWN", "terminal, markdown, csv, latex.", "--format"),
]


@app.command("list")
def list_(out: RunsOut = RUNS, kept: Results = RESULTS, as_json: AsJson = False) -> None:
    """Every experiment: what it shows, what it costs here, and what is done."""
    from fedglad.studies.paper import work
    from fedglad.studies.paper.experiments import EXPERIMENTS

    library = _library(out, kept)
    speeds = work.Speeds(library)
    rows = {name: work.status(one, library, speeds) for name, one in EXPERIMENTS.items()}
    if as_json:
        experiments = EXPERIMENTS.items()
        print_json(
            {n: {"about": e.about, "where": e.where, **asdict(rows[n])} for n, e in experiments}
        )
        return
    grid = console.table()
    for head in ("name", "where", "cells", "runs", "done", "hours", "left", "what it shows"):
        number = head not in ("name", "where", "what it shows")
        grid.add_column(
            head, justify="right" if number else "left", no_wrap=head != "what it shows"
        )
    for name, one in EXPERIMENTS.items():
        row = rows[name]
        absent = f" ({row.absent} runs: not in this version)" if row.absent else ""
        done = f"{row.done}" + (f" + {row.shortened} shortened" if row.shortened else "")
        hours = [_hours(value, more=row.unmeasured > 0) for value in (row.hours, row.hours_left)]
        grid.add_row(
            name, one.where, str(row.cells), str(row.runs), done, *hours, escape(one.about + absent)
        )
    print_wide(grid)
    say(
        "Hours are those of one core of this machine; experiments share runs, and what one has run "
        "the others need not."
    )
    for basis in sorted({line for row in rows.values() for line in row.basis}):
        say(f"  {basis}")
    note(library.notes)


@app.command()
def run(
    name: Name,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Only cells with these words: 'mnist fedavg'."),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="Other seeds than 1, 2, 3; may be repeated."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many: labelled as shortened.")
    ] = None,
    jobs: Jobs = None,
    out: RunsOut = RUNS,
    kept: Results = RESULTS,
) -> None:
    """Run what is missing of an experiment; the same command goes on after any interruption."""
    from fedglad.studies.paper import work
    from fedglad.studies.paper.experiments import find

    with mistakes(stopped=STOPPED):
        library = _library(out, kept)
        todo = work.plan(
            find(name), library, out, only=only or [], seeds=seeds_of(seeds), rounds=rounds
        )
        if todo.there:
            say(f"{todo.there} runs are there already.")
        for reason, count in Counter(todo.absent.values()).items():
            say(f"{count} cells are left out: {reason}.")
        run_all(todo.tasks, out, jobs)
    say(f"The table: fedglad paper table {name}")


@app.command()
def table(
    name: Name,
    form: Format = "terminal",
    out: RunsOut = RUNS,
    kept: Results = RESULTS,
    as_json: AsJson = False,
) -> None:
    """An experiment's table from what was run, with the published values beside it."""
    from fedglad.studies.paper.experiments import find
    from fedglad.studies.paper.tables import table

    with mistakes():
        made = table(find(name), _library(out, kept))
    if as_json:
        print_json(made.to_dict())
    else:
        show_table(made, form)


@app.command()
def plot(
    name: Name,
    png: Annotated[
        Path | None, typer.Option(help="The picture's file; by default paper-NAME.png.")
    ] = None,
    out: RunsOut = RUNS,
    kept: Results = RESULTS,
) -> None:
    """An experiment's figure as a PNG, from what was run."""
    from fedglad.studies.paper import plots
    from fedglad.studies.paper.experiments import find

    path = png or Path(f"paper-{name}.png")
    with mistakes(ModuleNotFoundError):
        notes = plots.plot(find(name), _library(out, kept), path)
    say(f"Picture: {path}")
    note(notes)


@app.command()
def export(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN…]", help=f"Runs' folders, or folders of them; {RUNS}."),
    ] = None,
    to: Annotated[Path, typer.Option(help="Where the small files go.")] = RESULTS,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many, also of unfinished runs: shortened."),
    ] = None,
) -> None:
    """Keep finished runs as small JSON files, from which tables and figures can be rebuilt."""
    from fedglad.studies.paper import results

    with mistakes():
        written, notes = results.export(runs or [RUNS], to, rounds=rounds)
    for path in written:
        say(path)
    note(notes)


def _library(out: Path, kept: Path) -> Library:
    """The runs in both folders; what cannot be read is reported, and does not count."""
    from fedglad.studies.paper.results import Library

    library = Library([out, kept])
    for reason in library.broken:
        warn(reason)
    return library


def seeds_of(texts: list[str] | None) -> list[int]:
    from fedglad.studies.paper.cells import PaperError

    text = ",".join(texts or [])
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise PaperError(f"--seeds {text!r}: write whole numbers, 1,2,3") from None


def run_all(tasks: list[Task], out: Path, jobs: int | None) -> None:
    """A sweep of the tasks; exit code 1 if one did not come to its end, and why is reported."""
    from fedglad.cli.progress import ShowSweep, follow
    from fedglad.runs.folder import make_folder
    from fedglad.runs.sweeping import DONE, sweep

    ready = fetched(tasks)
    make_folder(out)
    ends = follow(sweep(ready, jobs=cores(jobs)), ShowSweep(ready, quiet=False))
    failed = [event for event in ends if event.what not in DONE]
    for event in failed:
        error(f"{event.task.label}: {event.reason}  (log: {event.task.folder}/log.txt)")
    if failed or len(ready) < len(tasks):
        raise typer.Exit(1)


def fetched(tasks: list[Task]) -> list[Task]:
    """The tasks whose data and weights are here now; why others cannot be run is reported once."""
    from fedglad.cli.fetching import fetch_for
    from fedglad.data.sources import DataError

    reasons: dict[str, str] = {}  # by data and model; empty if they are here
    lacking: dict[str, list[Task]] = {}  # by the reason
    for task in tasks:
        tree = task.config.to_dict()
        key = json.dumps([tree["data"], tree["model"]], sort_keys=True)
        if key not in reasons:
            try:
                fetch_for(task.config)
                reasons[key] = ""
            except DataError as reason:
                reasons[key] = str(reason)
        lacking.setdefault(reasons[key], []).append(task)
    ready = lacking.pop("", [])
    for reason, (first, *others) in lacking.items():
        more = f" and {len(others)} more run{'s' * (len(others) > 1)}" if others else ""
        error(f"{first.label}{more} cannot be run: {reason}")
    return ready


def show_table(made: Table, form: str) -> None:
    """A table in one of the formats."""
    from fedglad.studies.paper.cells import PaperError
    from fedglad.studies.paper.formats import FORMATS, SHOWN

    with mistakes():
        if form not in SHOWN:
            raise PaperError(f"unknown format {form!r}: choose from {', '.join(SHOWN)}")
    if form in FORMATS:
        sys.stdout.write(FORMATS[form](made))
        return
    say(made.title)
    grid = console.table()
    for column in made.columns:
        head = textwrap.fill(column.head, HEAD, break_long_words=False)
        side = "left" if column.left else "right"
        grid.add_column(head, justify=side, no_wrap=not column.left, overflow="fold")
    for texts in made.texts():
        grid.add_row(*map(escape, texts))
    print_wide(grid)
    note(made.notes)


def _hours(value: float | None, *, more: bool) -> str:
    """`> 12` where some of its runs have a model of which no run is finished here."""
    if value is None:
        return "-"
    return ("> " if more else "") + (f"{value:,.1f}" if value < 10 else f"{value:,.0f}")
