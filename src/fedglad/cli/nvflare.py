"""`fedglad nvflare`: FedGLAD in a real federation, with NVFlare."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import mistakes, say, warn

app = typer.Typer(help="FedGLAD in a real federation, with NVFlare.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """FedGLAD in a real federation, with NVFlare."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a complete NVFlare job, and say how to run it."""
    from fedglad.nvflare.init import command, init

    with mistakes():
        written = init(folder)
    for path in written:
        say(folder / path.relative_to(folder.absolute()))
    if find_spec("nvflare") is None:
        warn("NVFlare is not installed here: pip install 'fedglad[nvflare]'")
    (task,) = (path for path in written if path.name == "digits_task.py")
    say(f"Your model and data go into {folder / task.relative_to(folder.absolute())}.")
    say(f"Run it as it is; its records come to {folder / 'out'}:")
    say(f"    {command(folder)}")
