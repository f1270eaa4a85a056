"""`fedglad check`: whether all of a run's folder is as it was written."""

import typer

from fedglad.cli.console import mistakes, print_json, say
from fedglad.cli.options import AsJson, Runs

app = typer.Typer()


@app.command()
def check(runs: Runs, as_json: AsJson = False) -> None:
    """Verify every file of runs by its checksum; exit code 1 if one is damaged or missing."""
    from fedglad.runs.checking import check
    from fedglad.runs.reader import run_folders

    with mistakes(stopped=""):
        checks = [check(folder) for folder in run_folders(runs)]
    if as_json:
        print_json([one.to_dict() for one in checks])
    for one in [] if as_json else checks:
        say(f"{one.folder}: {one.verdict}")
        for file in one.files:
            say(f"  {file.state:<12} {file.name}{f'  ({file.detail})' if file.detail else ''}")
    if not all(one.good for one in checks):
        raise typer.Exit(1)
