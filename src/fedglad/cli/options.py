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


def complete_source(incomplete: str) -> list[str]:
    """Presets, and what leads to a TOML file."""
    from fedglad.config.presets import PRESETS

    head = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(head or ".")
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [f"{head}{path.name}{'/' if path.is_dir() else ''}" for path in paths]
    names = [*PRESETS, *(f for f in files if f.endswith(("/", ".toml")))]
    return [name for name in names if name.startswith(incomplete)]


Source = Annotated[
    str, typer.Argument(help="A preset or a TOML file.", autocompletion=complete_source)
]


def complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of the configuration that is named before, and names of methods after name=."""
    from fedglad.config.keys import flat
    from fedglad.config.schema import REGISTRIES, ConfigError, Unloaded, load, meanings

    key, equals, value = incomplete.partition("=")
    section, _, rest = key.partition(".")
    if equals:
        known = REGISTRIES.get(section, ()) if rest == "name" else ()
        return [f"{key}={name}" for name in known if name.startswith(value)]
    source = str(ctx.params.get("source") or "digits")
    try:
        config = load(source, trust_code=False)[1]
    except (ConfigError, OSError):
        config = load("digits")[1]
    keys = [*flat(config.to_dict()), "data.validation", "model.weights"]
    for name, settings in config.sections.items():  # also those that have no value
        fields = () if isinstance(settings, Unloaded) else meanings(type(settings))
        keys += [f"{name}.{field}" for field in fields]
    return sorted({f"{key}=" for key in keys if key.startswith(incomplete)})


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key: server.lr=0.5",
        autocompletion=complete_key,
    ),
]
Grids = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V1,V2",
        help="Values to go through: server.lr=0.5,1",
        autocompletion=complete_key,
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the code that a run's config.toml names."),
]
AcceptOld = Annotated[
    bool,
    typer.Option("--accept-old", help="Take runs that were made with other own code as they are."),
]
KeepState = Annotated[
    bool | None,
    typer.Option(
        "--keep-state/--no-keep-state",
        help="Keep what a finished run needs to go on, or not; by default if it is small.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN…", help="Runs' folders, or folders of them.")
]
RunsOut = Annotated[Path, typer.Option("--out", help="The folder of the runs' folders.")]


def given(
    texts: list[str] | None, example: str = "server.lr=0.5", option: str = "--set"
) -> dict[str, Any]:
    """The keys and values of `--set`, or of another such option."""
    from fedglad.config.schema import ConfigError, parse_value

    pairs = [text.partition("=") for text in texts or []]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{option} {key!r}: write it as KEY=VALUE, for example {example}")
    return {key.strip(): parse_value(value.strip()) for key, _, value in pairs}


def cores(jobs: int | None) -> int:
    """How many runs at a time."""
    return jobs or os.cpu_count() or 1
