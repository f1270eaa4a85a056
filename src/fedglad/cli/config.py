"""`fedglad config`: the complete configuration, every field with its meaning."""

import sys
from typing import Annotated

import typer

from fedglad.cli.console import mistakes
from fedglad.cli.options import Settings, Source, given

app = typer.Typer()


@app.command()
def config(
    source: Source = "digits",
    set_: Settings = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Load the code that the file names, to check it.")
    ] = False,
) -> None:
    """Print the complete configuration, every field with its meaning."""
    from fedglad.config.schema import load

    with mistakes():
        _, checked = load(source, given(set_), trust_code=trust_code)
        sys.stdout.write(checked.to_toml())
