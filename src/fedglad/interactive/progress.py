"""How a run's progress is shown: in a notebook a bar in its cell, else as the command shows it."""

import html
import sys
from importlib import import_module
from typing import Any, Literal, Self

from rich.text import Text

from fedglad.cli.console import console
from fedglad.cli.progress import ShowRun, round_line
from fedglad.records import Round

Progress = bool | Literal["auto"]
"""Whether it is shown; auto: in a terminal and in a notebook."""


def shows(progress: Progress) -> bool:
    """Whether something will be shown."""
    if progress not in (True, False, "auto"):
        raise ValueError(f"progress = {progress!r}: must be True, False or 'auto'")
    return bool(progress) if progress != "auto" else in_notebook() or console.is_terminal


def display_of(rounds: int, progress: Progress) -> "ShowRun | Bar":
    """What shows a run of so many rounds: a context manager with `round`."""
    if shows(progress) and in_notebook():
        return Bar(rounds)
    return ShowRun(rounds, quiet=not shows(progress))


def in_notebook() -> bool:
    """Whether this is a notebook's kernel, whose cells can show HTML."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Bar:
    """A bar and the newest round's line, in the output of a notebook's cell."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.cell: Any = None

    def __enter__(self) -> Self:
        shown = import_module("IPython.display")
        self.page = shown.HTML
        self.cell = shown.display(self.page(self.markup(0, "starting")), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def round(self, done: Round) -> None:
        """Shows a round."""
        line = round_line(done, self.rounds)
        if done.warning:
            line += f"  {done.warning}"
        self.cell.update(self.page(self.markup(done.t + 1, Text.from_markup(line).plain)))

    def markup(self, done: int, line: str) -> str:
        """The bar as HTML.

        >>> Bar(4).markup(1, "1 < 2")
        '<progress value="1" max="4"></progress> <code>1 &lt; 2</code>'
        """
        bar = f'<progress value="{done}" max="{self.rounds}"></progress>'
        return f"{bar} <code>{html.escape(line)}</code>"
