"""`fedglad flower`: FedGLAD in a real federation, with Flower."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedglad.cli.console import console, error, warn
from fedglad.flower import init as initialising
from fedglad.flower.init import InitError

app = typer.Typer(help="FedGLAD in a real federation, with Flower.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """FedGLAD in a real federation, with Flower."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a complete Flower app, and say how to run it."""
    try:
        written = initialising.init(folder)
    except InitError as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    for path in written:
        name = path.relative_to(folder.absolute())
        console.print(escape(str(folder / name)), soft_wrap=True)
    if find_spec("flwr") is None:
        warn("Flower is not installed here: pip install 'fedglad[flower]'")
    (task,) = (path.parent.name for path in written if path.name == "task.py")
    console.print(
        "Your model and data go into", escape(str(folder / task / "task.py")) + ".", soft_wrap=True
    )
    console.print(
        "Run it as it is; its records come to", escape(str(folder / "out")) + ":", soft_wrap=True
    )
    for command in initialising.commands(folder):
        console.print(f"    {escape(command)}", soft_wrap=True)
