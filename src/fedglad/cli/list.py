"""`fedglad list`: what there is to choose from."""

from typing import Annotated

import typer
from rich.markup import escape

from fedglad.cli.console import console, error, print_json
from fedglad.cli.options import among
from fedglad.core import user_code

app = typer.Typer()

SECTIONS = {
    "presets": "fedglad.config.presets:PRESETS",
    "datasets": "data",
    "partitions": "fedglad.data.partition:REGISTRY",
    "models": "model",
    "tasks": "task",
    "clients": "client",
    "samplers": "sampler",
    "transforms": "transform",
    "optimizers": "server",
    "schedules": "fedglad.schedules:REGISTRY",
    "adapters": "adapter",
    "filters": "filter",
    "weights": "weighting",
    "estimators": "estimator",
    "averages": "average",
    "privacy": "privacy",
    "engines": "engine",
    "experiments": "fedglad.studies.paper.experiments:EXPERIMENTS",
}
"""The lists, and the configuration's section that each is for, or where what it lists is."""


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help=", ".join(SECTIONS), autocompletion=among(f"{__name__}:SECTIONS"))
    ],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what there is to choose from."""
    if kind not in SECTIONS:
        error(f"unknown list {kind!r}: choose from {', '.join(SECTIONS)}")
        raise typer.Exit(2)
    lines = _lines(kind)
    sizes = {name: _parameters(name) for name in lines} if kind == "models" else {}
    if as_json and kind == "engines":
        from fedglad.config.catalogue import engines

        print_json(engines())
        return
    if as_json:
        full = {name: {"about": lines[name], "parameters": size} for name, size in sizes.items()}
        print_json(full or lines)
        return
    for name, text in lines.items():
        size = f" ({sizes[name]:,} parameters)" if sizes else ""
        console.print(f"[bold]{name:<18}[/]{escape(text + size)}", soft_wrap=True)


def _lines(kind: str) -> dict[str, str]:
    """Everything of a kind in a line, with its reference."""
    if ":" in SECTIONS[kind]:
        listed = user_code.load(SECTIONS[kind]).items()
        return {name: getattr(one, "about", one.__doc__).splitlines()[0] for name, one in listed}
    from fedglad.config.catalogue import lines

    return lines(SECTIONS[kind])


def _parameters(name: str) -> int:
    from fedglad.config.schema import find

    settings = find("model", name)
    if known := getattr(settings, "parameters", 0):  # nothing is fetched for a list
        return known
    return sum(p.numel() for p in settings().build().parameters())
