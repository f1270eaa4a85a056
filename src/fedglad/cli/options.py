"""Options that several verbs share, and what is typed into them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedglad.core import user_code

BASELINE = (
    "The label to compare with, or a part; by default the first without an adapter, else the first."
)


def among(place: str) -> Callable[[str], list[str]]:
    """Completes one of the names at a place, "package.module:NAMES", which is loaded for it."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in user_code.load(place) if name.startswith(incomplete)]

    return complete


def one_of(place: str, help: str, *names: str) -> Any:
    """An option that takes one of the names at a place, and completes it."""
    return typer.Option(*names, help=help, autocompletion=among(place))


def _complete_source(incomplete: str) -> list[str]:
    """Presets, and what leads to a TOML file."""
    from fedglad.config.presets import PRESETS

    head = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(head or ".")
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [f"{head}{path.name}{'/' if path.is_dir() else ''}" for path in paths]
    names = [*PRESETS, *(f for f in files if f.endswith(("/", ".toml")))]
    return [name for name in names if name.startswith(incomplete)]


Source = Annotated[
    str, typer.Argument(help="A preset or a TOML file.", autocompletion=_complete_source)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key: server.lr=0.5"),
]
Grids = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="KEY=V1,V2", help="Values to go through: server.lr=0.5,1"),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the code that a run's config.toml names."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN…", help="Runs' folders, or folders of them.")
]
RunsOut = Annotated[Path, typer.Option("--out", help="The folder of the runs' folders.")]


def given(texts: list[str] | None, example: str = "server.lr=0.5") -> dict[str, Any]:
    """The keys and values of `--set`."""
    from fedglad.config.schema import ConfigError, parse_value

    pairs = [text.partition("=") for text in texts or []]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--set {key!r}: write it as KEY=VALUE, for example {example}")
    return {key.strip(): parse_value(value.strip()) for key, _, value in pairs}


def cores(jobs: int | None) -> int:
    """How many runs at a time."""
    return jobs or os.cpu_count() or 1
