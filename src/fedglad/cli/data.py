"""`fedglad data`: which data sets there are, getting, checking and looking at them."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedglad.cli.console import WIDE, complain, console, error
from fedglad.config.fit import agree
from fedglad.config.schema import Config, find, load, parse_value
from fedglad.data import REGISTRY, fetch, picture, sources, store
from fedglad.data import partition as partitions
from fedglad.data.sources import RECIPES, DataError
from fedglad.data.split import Split
from fedglad.data.texts import Texts

app = typer.Typer(
    help="Data sets, word vectors and encoders: list, get, check, show.", no_args_is_help=True
)

AGAIN = "fedglad data get {} --force"


def _complete_name(incomplete: str) -> list[str]:
    return [name for name in (*RECIPES, *_bundled()) if name.startswith(incomplete)]


def _complete_via(incomplete: str) -> list[str]:
    return [via for via in fetch.VIA if via.startswith(incomplete)]


Names = Annotated[
    list[str], typer.Argument(metavar="NAME…", help="Data sets.", autocompletion=_complete_name)
]


@app.command("list")
def show_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON only.")] = False,
) -> None:
    """Which data sets there are, and which of them are here."""
    rows = [_row(name) for name in (*RECIPES, *_bundled())]
    if as_json:
        told = {row.pop("name"): row for row in rows}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("name", "here", "size", "what it is"):
        table.add_column(head, no_wrap=head != "what it is")
    for row in rows:
        size = _megabytes(row["bytes"]) if row["bytes"] else ""
        table.add_row(row["name"], row["state"], size, escape(row["about"]))
    (console if console.is_terminal else Console(highlight=False, width=WIDE)).print(table)
    console.print(f"Cache: {escape(str(store.cache_folder()))}", soft_wrap=True)


@app.command()
def get(
    names: Names,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="A folder with the files; no other is asked."),
    ] = None,
    via: Annotated[
        str | None,
        typer.Option(help=f"One way alone: {', '.join(fetch.VIA)}.", autocompletion=_complete_via),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Get it even if it is here.")] = False,
) -> None:
    """Get data sets: once, verified, into the cache."""
    _known(names)
    if source and not source.is_dir():
        error(f"--from {source}: there is no such folder")
        raise typer.Exit(2)
    failed = 0
    try:
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
            text = f"{name}: {how}, {_megabytes(entry.size)} in {entry.folder}"
            console.print(escape(text), soft_wrap=True)
    except KeyboardInterrupt:
        complain.print("stopped; go on with the same command")
        raise typer.Exit(130) from None
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
    _known(names or [])
    wrong = False
    try:
        for name in dict.fromkeys(names or [n for n in RECIPES if _row(n)["state"] != "no"]):
            problems = [] if name in _bundled() else store.check(name)
            for problem in problems:
                error(problem)
            if problems:
                wrong = True
                complain.print(f"Get it again: {AGAIN.format(name)}", markup=False)
            else:
                console.print(f"{name}: good")
    except KeyboardInterrupt:
        complain.print("stopped")
        raise typer.Exit(130) from None
    if wrong:
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A data set, or module:function.", autocompletion=_complete_name)
    ],
    clients: Annotated[int | None, typer.Option(help="How many share it.")] = None,
    partition: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(partitions.REGISTRY)}.")
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
    """Draw which classes each client has."""
    named = {"clients": clients, "partition": partition, "alpha": alpha, "seed": seed}
    given = {f"data.{key}": value for key, value in named.items() if value is not None}
    try:
        others = [item.removeprefix("data.").partition("=") for item in set_ or []]
        given |= {f"data.{key}": parse_value(value) for key, _, value in others}
        _, config = load("digits", {"data.name": name, **given})
        bring(config)
        settings = config.sections["data"]
        counts = picture.class_counts(config.load_data())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, OSError, AttributeError) as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    split = settings if isinstance(settings, Split) else None
    title = f"{name}, {split.words(counts.shape[1])}" if split else name
    path = png or Path(f"{name.replace(':', '-')}-{split.partition if split else 'clients'}.png")
    drawn = bool(png) or not (no_png or as_json)
    try:
        if drawn:
            picture.png(counts, path, title=title)
    except (ModuleNotFoundError, OSError) as reason:
        error(f"no PNG: {reason}")
        drawn = False
    if as_json:
        told = {"name": name, "partition": title, **picture.summary(counts)}
        sys.stdout.write(json.dumps(told) + "\n")
        raise typer.Exit(2 if png and not drawn else 0)
    plain = not (console.encoding or "").lower().startswith("utf")
    width = max(console.width, 67) if console.is_terminal else 80
    console.print(picture.text(counts, title=title, width=width, plain=plain), soft_wrap=True)
    if drawn:
        console.print(f"Picture: {escape(str(path))}", soft_wrap=True)
    elif png:
        raise typer.Exit(2)


def bring(config: Config) -> None:
    """Gets the data set of a configuration, and what it needs, shown as it comes."""
    agree(config.sections["model"], config.sections["data"], quiet=True)
    settings, name = config.sections["data"], config.to_dict()["data"]["name"]
    model = getattr(config.sections["model"], "needs", ())
    for needed in dict.fromkeys((*getattr(settings, "needs", (name,)), *model)):
        if needed in RECIPES and _row(needed)["state"] != "yes":
            with Show(needed) as bar:
                store.get(needed, progress=bar)
    if isinstance(settings, Texts):
        with Show(name) as bar:
            settings.arrays(progress=bar)


class Show:
    """How a set comes: a bar in a terminal, plain lines elsewhere; on stderr."""

    def __init__(self, name: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self.bar = Progress(*columns, TimeRemainingColumn(), console=complain, transient=True)
        self.task = self.bar.add_task(name, total=None)
        self.name = name

    def __enter__(self) -> "Show":
        if complain.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if complain.is_terminal:
            self.bar.stop()

    def begin(self, what: str, total: int | None) -> None:
        """A new bar in place of the last."""
        self.bar.reset(self.task, total=total, description=f"{self.name}: {escape(what)}")
        if not complain.is_terminal:
            self.say(f"{what} ({_megabytes(total)})" if total else what)

    def advance(self, count: int) -> None:
        """The bar grows."""
        self.bar.advance(self.task, count)

    def say(self, text: str) -> None:
        """A line above the bar."""
        complain.print(f"{self.name}: {text}", markup=False)


def _row(name: str) -> dict[str, Any]:
    """What is told of a set."""
    if name in _bundled():
        about = (find("data", name).__doc__ or "").strip().splitlines()[0]
        return {"name": name, "about": about, "state": "always", "bytes": 0}
    row: dict[str, Any] = {"name": name, "about": sources.find(name).about, "bytes": 0}
    try:
        entry = store.entry_of(name)
    except DataError:
        return row | {"state": "damaged"}
    if entry is None:
        return row | {"state": "no"}
    where = {"folder": str(entry.folder), "source": entry.source}
    return row | {"state": "yes", "bytes": entry.size, **where}


def _bundled() -> list[str]:
    """Sets that come with the library or are made when asked."""
    return [name for name in REGISTRY if name not in RECIPES]


def _known(names: list[str]) -> None:
    try:
        for name in names:
            if name not in _bundled():
                sources.find(name)
    except DataError as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
