"""`fedglad export`: a run's model as a file to take along."""

from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import mistakes, say

app = typer.Typer()


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    to: Annotated[Path, typer.Option("--to", help="A file: .safetensors, .pt or .pth.")],
    averaged: Annotated[
        bool, typer.Option("--averaged", help="The average of past models.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="After the best round by the validation set.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Copy the model out of a run, for plain PyTorch."""
    from fedglad.runs.exporting import export

    with mistakes(stopped=""):
        done = export(run, to, averaged=averaged, best=best, force=force)
    say(f"{done.path}: {done.words}, from {done.source}")
