"""`fedglad flower`: FedGLAD in a real federation, with Flower."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import mistakes, say, warn

app = typer.Typer(help="FedGLAD in a real federation, with Flower.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """FedGLAD in a real federation, with Flower."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a complete Flower app, and say how to run it."""
    from fedglad.flower.init import commands, init

    with mistakes():
        written = init(folder)
    for path in written:
        say(folder / path.relative_to(folder.absolute()))
    if find_spec("flwr") is None:
        warn("Flower is not installed here: pip install 'fedglad[flower]'")
    (task,) = (path.parent.name for path in written if path.name == "task.py")
    say(f"Your model and data go into {folder / task / 'task.py'}.")
    say(f"Run it as it is; its records come to {folder / 'out'}:")
    for command in commands(folder):
        say(f"    {command}")
