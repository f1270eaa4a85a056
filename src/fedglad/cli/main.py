"""The command `fedglad`: its verbs, one module each.

What a verb needs is imported when it is called: `fedglad --version` and TAB load nothing heavy.
"""

import sys
from typing import Annotated

import typer

from fedglad.cli import (
    compare,
    config,
    data,
    flower,
    list,
    paper,
    replay,
    report,
    run,
    sweep,
    track,
    tune,
    watch,
)

app = typer.Typer(
    help="Federated learning that knows when to trust a round.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for verb in (run, config, list, sweep, tune, compare, report, watch, replay, track):
    app.add_typer(verb.app)  # without a name of their own
for name, verbs in {"data": data, "paper": paper, "flower": flower}.items():
    app.add_typer(verbs.app, name=name)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fedglad {version('fedglad')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    if "" not in sys.path:  # a user's class, model.name=mine:Own, is looked for here first
        sys.path.insert(0, "")
