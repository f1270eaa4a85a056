"""`fedglad study`: suites of experiments by name."""

from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli import paper
from fedglad.cli.console import error, mistakes, print_json, say
from fedglad.cli.options import AsJson, Jobs, RunsOut
from fedglad.cli.paper import Results
from fedglad.cli.sweep import STOPPED

app = typer.Typer(
    help="Studies: list, run, table, export; `study paper` is `paper`.", no_args_is_help=True
)
app.add_typer(paper.app, name="paper")

RUNS, RESULTS = Path("runs") / "participation", Path("results") / "participation"
NAMES = ("participation",)

Name = Annotated[
    str, typer.Argument(help="A study: fedglad study list.", autocompletion=lambda: NAMES)
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="WORDS", help="Only cells with these parts: 'digits-cnn uniform-10'."),
]


@app.command("list")
def list_(kept: Results = RESULTS, as_json: AsJson = False) -> None:
    """Every study: its problems, kinds of participation and rules, and what is done."""
    from fedglad.studies.participation import results
    from fedglad.studies.participation.cells import cells, study

    with mistakes():
        kinds = study()
        every = cells()
        done = sum(len(results.kept(cell, kept)) for cell in every)
    planned = sum(cell.problem.draws for cell in every)
    named = {kind: {p.name: p.about for p in kinds[kind].values()} for kind in kinds}
    if as_json:
        parts = {kind: named[kind] for kind in named if kind != "study"}
        print_json({"participation": {**parts, "runs": planned, "done": done}})
        return
    say(f"participation: {kinds['study']['study'].about}")
    for kind in ("problems", "participation", "rules"):
        say(f"  {kind}: {', '.join(named[kind])}")
    say(f"  {len(every)} cells, {planned} runs, {done} of them in {kept}")


@app.command()
def run(
    name: Name,
    only: Only = None,
    draws: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="These draws; by default all that are planned."),
    ] = None,
    jobs: Jobs = None,
    out: RunsOut = RUNS,
    kept: Results = RESULTS,
) -> None:
    """Run what is missing of a study, and keep it; the same command goes on after a stop."""
    from fedglad.studies.participation import results
    from fedglad.studies.participation.cells import cells

    _known(name)
    with mistakes(stopped=STOPPED):
        chosen = cells(only or [])
        there = {cell.name: results.kept(cell, kept) for cell in chosen}
        every = results.tasks(chosen, paper.seeds_of(draws), out)
        todo = [t for t in every if t.settings["draw"] not in there[t.settings["cell"]]]
        say(f"{len(every) - len(todo)} of {len(every)} runs are there already.")
        try:
            paper.run_all(todo, out, jobs)
        finally:
            results.export(chosen, out, kept)
    say(f"The tables: fedglad study table {name}")


@app.command()
def table(
    name: Name,
    only: Only = None,
    form: paper.Format = "terminal",
    kept: Results = RESULTS,
    as_json: AsJson = False,
) -> None:
    """The rules beside each other, raw and averaged, from what is kept."""
    from fedglad.studies.participation.cells import cells
    from fedglad.studies.participation.tables import tables

    _known(name)
    with mistakes():
        made = tables(cells(only or []), kept)
    if as_json:
        print_json([one.to_dict() for one in made])
        return
    for one in made:
        paper.show_table(one, form)
    if not made:
        say(f"Nothing of it is in {kept}: fedglad study run {name}")


@app.command()
def export(name: Name, only: Only = None, out: RunsOut = RUNS, to: Results = RESULTS) -> None:
    """Add finished runs to the small files from which the tables are made."""
    from fedglad.studies.participation import results
    from fedglad.studies.participation.cells import cells

    _known(name)
    with mistakes():
        for path in results.export(cells(only or []), out, to):
            say(path)


def _known(name: str) -> None:
    if name not in NAMES:
        error(f"unknown study {name!r}: choose from {', '.join(NAMES)}")
        raise typer.Exit(2)
