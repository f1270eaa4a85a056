"""`fedglad config`: the complete configuration, every field with its meaning."""

import sys

import typer

from fedglad.cli.console import mistakes
from fedglad.cli.options import Settings, Source, given

app = typer.Typer()


@app.command()
def config(source: Source = "digits", set_: Settings = None) -> None:
    """Print the complete configuration, every field with its meaning."""
    from fedglad.config.schema import load

    with mistakes():
        sys.stdout.write(load(source, given(set_))[1].to_toml())
