"""Data sets, vectors and encoders that a configuration needs, fetched with a progress bar."""

from typing import TYPE_CHECKING

import rich.progress as rich
from rich.markup import escape

from fedglad.cli.console import complain
from fedglad.config.fit import agree
from fedglad.data import store
from fedglad.data.sources import RECIPES, Progress
from fedglad.data.texts import Texts

if TYPE_CHECKING:
    from fedglad.config.schema import Config


def fetch_for(config: "Config") -> None:
    """Gets the data set of a configuration, and what it needs, with a progress bar."""
    agree(config.sections["model"], config.sections["data"], quiet=True)
    settings, name = config.sections["data"], config.to_dict()["data"]["name"]
    model = getattr(config.sections["model"], "needs", ())
    for needed in dict.fromkeys((*getattr(settings, "needs", (name,)), *model)):
        if needed in RECIPES:
            with Show(needed) as bar:
                store.get(needed, progress=bar)
    if isinstance(settings, Texts):
        with Show(name) as bar:
            settings.arrays(progress=bar)


class Show(Progress):
    """The progress of a fetch on stderr: a bar in a terminal, plain lines elsewhere."""

    def __init__(self, name: str) -> None:
        self.bar = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.DownloadColumn(),
            rich.TimeRemainingColumn(),
            console=complain,
            transient=True,
        )
        self.task = self.bar.add_task(name, total=None)
        self.name = name

    def __enter__(self) -> "Show":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def begin(self, what: str, total: int | None) -> None:
        self.bar.reset(self.task, total=total, description=f"{self.name}: {escape(what)}")
        if complain.is_terminal:
            self.bar.start()
        else:
            self.report(f"{what} ({megabytes(total)})" if total else what)

    def advance(self, count: int) -> None:
        self.bar.advance(self.task, count)

    def report(self, text: str) -> None:
        complain.print(f"{self.name}: {text}", markup=False)


def megabytes(count: int) -> str:
    """A size as people read it."""
    return f"{count / 1e6:,.1f} MB"
