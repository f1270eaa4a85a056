"""The command `fedglad`: its verbs, one module each.

What a verb needs is imported when it is called: `fedglad --version` and TAB load nothing heavy.
"""

from importlib import import_module
from typing import Annotated

import typer

VERBS = (
    *("run", "config", "list", "sweep", "tune", "compare", "report", "watch", "replay", "track"),
    *("check", "export", "evaluate", "prune"),
)
GROUPS = ("data", "paper", "study", "flower", "nvflare")

app = typer.Typer(
    help="Federated learning that knows when to trust a round.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for module in (*VERBS, *GROUPS):
    verbs = import_module(f"fedglad.cli.{module}").app
    app.add_typer(verbs, name=module if module in GROUPS else None)


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
    pass
