"""`fedglad prune`: what runs keep to go on from, shown and removed."""

from typing import Annotated

import typer

from fedglad.cli.console import complain, error, mistakes, print_json, say
from fedglad.cli.options import AsJson, Runs

app = typer.Typer()


@app.command()
def prune(
    runs: Runs,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it without asking.")] = False,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Of unfinished runs too: they must be started anew."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Free the disk of client memories and checkpoints of finished runs, never of models."""
    from fedglad.runs.pruning import prunable
    from fedglad.runs.pruning import prune as pruned
    from fedglad.runs.reader import RunError, run_folders

    with mistakes(stopped=""):
        there = [prunable(folder, unfinished=unfinished) for folder in run_folders(runs)]
    freed, some = [one for one in there if one.parts], sum(one.bytes for one in there)
    if not as_json:
        for one in there:
            say(f"{one.folder}: {one.words}")
        say(f"{some / 1e6:,.1f} MB in {len(freed)} of {len(there)} runs")
    go = bool(freed) and (yes or (not as_json and _asked()))
    failed = False
    done = list[str]()
    for one in freed if go else []:
        try:
            pruned(one.folder, unfinished=unfinished)
            done.append(str(one.folder))
        except RunError as wrong:  # another process is at it
            error(str(wrong))
            failed = True
    if as_json:
        rows = [{**one.to_dict(), "removed": str(one.folder) in done} for one in there]
        print_json({"runs": rows, "bytes": some})
    elif done:
        say(f"Removed of {len(done)} run{'s' * (len(done) > 1)}. Models and records are there.")
    if failed:
        raise typer.Exit(1)


def _asked() -> bool:
    """Whether to go on, by whoever sits at the terminal; elsewhere only --yes says so."""
    import sys

    if not sys.stdin.isatty():
        complain.print("Nothing was removed: --yes does it.")
        return False
    return typer.confirm("Remove it?")
