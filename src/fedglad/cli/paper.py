"""`fedglad paper`: the paper's tables and figures by name."""

import json
import os
import sys
import textwrap
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from fedglad.cli.console import WIDE, ShowSweep, complain, console, error, warn
from fedglad.cli.data import bring
from fedglad.config.keys import label
from fedglad.data.sources import DataError
from fedglad.runs.folder import Interrupted, RunError, make_folder
from fedglad.runs.sweeping import DONE, ENDS, Event, Task, sweep
from fedglad.studies.paper import formats, plots, results, work
from fedglad.studies.paper.cells import PaperError
from fedglad.studies.paper.experiments import EXPERIMENTS, find
from fedglad.studies.paper.results import RESULTS, RUNS, Library
from fedglad.studies.paper.tables import Table, table

app = typer.Typer(
    help="The paper's tables and figures: list, run, table, plot, export.", no_args_is_help=True
)

HEAD = 12  # characters of a line in a column's head
MISTAKES = (PaperError, RunError, ValueError, OSError)


def _complete_name(incomplete: str) -> list[str]:
    return [name for name in EXPERIMENTS if name.startswith(incomplete)]


def _complete_format(incomplete: str) -> list[str]:
    return [name for name in ("terminal", *formats.FORMATS) if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(help="An experiment: fedglad paper list.", autocompletion=_complete_name)
]
Out = Annotated[Path, typer.Option(help="The folder of the runs' folders.")]
Results = Annotated[Path, typer.Option("--results", help="The folder of exported results.")]


@app.command("list")
def show_list(
    out: Out = RUNS,
    kept: Results = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON only.")] = False,
) -> None:
    """Every experiment: what it shows, what it costs here, and what is done."""
    library = _library(out, kept)
    speeds = work.Speeds(library, tell=complain.print)
    found = {name: work.status(one, library, speeds) for name, one in EXPERIMENTS.items()}
    if as_json:
        told = {
            name: {"about": one.about, "where": one.where, **asdict(found[name])}
            for name, one in EXPERIMENTS.items()
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    grid = _grid(("name", "where", "cells", "runs", "done", "hours", "left", "what it shows"))
    for name, one in EXPERIMENTS.items():
        row = found[name]
        about = one.about + _remarks(row)
        done = f"{row.done}" + (f" + {row.shortened} shortened" if row.shortened else "")
        hours = [_hours(value, more=row.unmeasured > 0) for value in (row.hours, row.hours_left)]
        grid.add_row(name, one.where, str(row.cells), str(row.runs), done, *hours, escape(about))
    _wide().print(grid)
    console.print(
        "Hours are those of one core of this machine; experiments share runs, and what one has run "
        "the others need not.",
        soft_wrap=True,
    )
    for basis in sorted({line for row in found.values() for line in row.basis}):
        console.print(f"  {escape(basis)}", soft_wrap=True)
    _note(library.notes)


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
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")
    ] = None,
    out: Out = RUNS,
    kept: Results = RESULTS,
) -> None:
    """Run what is missing of an experiment; the same command goes on after any interruption."""
    ends: dict[Path, Event] = {}
    todo, ready = work.Work([], 0, {}), list[Task]()
    try:
        library = _library(out, kept)
        experiment = find(name)
        todo = work.plan(
            experiment, library, out, only=only or [], seeds=_seeds(seeds), rounds=rounds
        )
        _tell(todo)
        ready = _brought(todo.tasks)
        make_folder(out)
        with (
            ShowSweep(ready, quiet=False) as show,
            closing(sweep(ready, jobs=jobs or os.cpu_count() or 1)) as events,
        ):
            for event in events:
                show.event(event)
                ends |= {event.task.folder: event} if event.what in ENDS else {}
    except Interrupted as stopped:
        done = sum(event.what in DONE for event in ends.values())
        complain.print(f"{done} of {len(todo.tasks)} runs are finished; {escape(str(stopped))}")
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        complain.print("stopped at once; go on from the last checkpoints with the same command")
        raise typer.Exit(130) from None
    except MISTAKES as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    failed = [event for event in ends.values() if event.what not in DONE]
    for event in failed:
        error(f"{label(event.task.settings)}: {event.reason}  (log: {event.task.folder}/log.txt)")
    if failed or len(ready) < len(todo.tasks):
        raise typer.Exit(1)
    console.print(f"The table: fedglad paper table {name}", soft_wrap=True)


@app.command("table")
def show_table(
    name: Name,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"terminal, {', '.join(formats.FORMATS)}.",
            autocompletion=_complete_format,
        ),
    ] = "terminal",
    out: Out = RUNS,
    kept: Results = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON only.")] = False,
) -> None:
    """An experiment's table from what was run, with the published values beside it."""
    try:
        if form != "terminal" and form not in formats.FORMATS:
            known = ", ".join(("terminal", *formats.FORMATS))
            raise PaperError(f"unknown format {form!r}: choose from {known}")
        made = table(find(name), _library(out, kept))
    except MISTAKES as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    if as_json:
        sys.stdout.write(json.dumps(made.to_dict(), indent=2) + "\n")
    elif form in formats.FORMATS:
        sys.stdout.write(formats.FORMATS[form](made))
    else:
        _show(made)


@app.command("plot")
def draw(
    name: Name,
    png: Annotated[
        Path | None, typer.Option(help="The picture's file; by default paper-NAME.png.")
    ] = None,
    out: Out = RUNS,
    kept: Results = RESULTS,
) -> None:
    """An experiment's figure as a PNG, from what was run."""
    path = png or Path(f"paper-{name}.png")
    try:
        notes = plots.plot(find(name), _library(out, kept), path)
    except ModuleNotFoundError as reason:
        error(str(reason))
        raise typer.Exit(2) from None
    except MISTAKES as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    console.print(f"Picture: {escape(str(path))}", soft_wrap=True)
    _note(notes)


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
    try:
        written, notes = results.export(runs or [RUNS], to, rounds=rounds)
    except MISTAKES as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    for path in written:
        console.print(escape(str(path)), soft_wrap=True)
    _note(notes)


def _library(out: Path, kept: Path) -> Library:
    """The runs in both folders; what cannot be read is told, and does not count."""
    library = Library([out, kept])
    for reason in library.broken:
        warn(reason)
    return library


def _seeds(texts: list[str] | None) -> list[int]:
    text = ",".join(texts or [])
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise PaperError(f"--seeds {text!r}: write whole numbers, 1,2,3") from None


def _tell(todo: work.Work) -> None:
    """What is there, and what cannot be run."""
    if todo.there:
        console.print(f"{todo.there} runs are there already.")
    by_reason: dict[str, int] = {}
    for reason in todo.absent.values():
        by_reason[reason] = by_reason.get(reason, 0) + 1
    for reason, count in by_reason.items():
        console.print(escape(f"{count} cells are left out: {reason}."), soft_wrap=True)


def _brought(tasks: list[Task]) -> list[Task]:
    """The tasks whose data and weights are here now; what cannot be had is told once."""
    lacking: dict[str, list[Task]] = {}
    reasons: dict[str, str] = {}
    for task in tasks:
        tree = task.config.to_dict()
        key = json.dumps([tree["data"], tree["model"]], sort_keys=True)
        if key not in reasons:
            try:
                bring(task.config)
                reasons[key] = ""
            except DataError as reason:
                reasons[key] = str(reason)
        if reasons[key]:
            lacking.setdefault(reasons[key], []).append(task)
    for reason, found in lacking.items():
        others = len(found) - 1
        more = f" and {others} more run{'s' * (others > 1)}" if others else ""
        error(f"{label(found[0].settings)}{more} cannot be run: {reason}")
    missing = {task.folder for found in lacking.values() for task in found}
    return [task for task in tasks if task.folder not in missing]


def _show(made: Table) -> None:
    console.print(escape(made.title), soft_wrap=True)
    grid = _grid(())
    for column in made.columns:
        head = textwrap.fill(column.head, HEAD, break_long_words=False)
        side = "left" if column.left else "right"
        grid.add_column(head, justify=side, no_wrap=not column.left, overflow="fold")
    for texts in made.texts():
        grid.add_row(*map(escape, texts))
    _wide().print(grid)
    _note(made.notes)


def _grid(heads: tuple[str, ...]) -> Grid:
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        number = head in ("cells", "runs", "done", "hours", "left")
        grid.add_column(head, justify="right" if number else "left", no_wrap=head != heads[-1])
    return grid


def _wide() -> Console:
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def _note(notes: list[str]) -> None:
    for note in notes:
        console.print(escape(f"Note: {note}."), soft_wrap=True)


def _remarks(row: work.Status) -> str:
    return f" ({row.absent} runs: not in this version)" if row.absent else ""


def _hours(value: float | None, *, more: bool) -> str:
    """`> 12` where some of its runs have a model that was not measured."""
    if value is None:
        return "-"
    return ("> " if more else "") + (f"{value:,.1f}" if value < 10 else f"{value:,.0f}")
