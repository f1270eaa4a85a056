"""The terminal: where lines, errors and tables go, and how a mistake becomes an exit code."""

import json
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich import markup
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

console = Console(highlight=False)
complain = Console(stderr=True, highlight=False, soft_wrap=True)

WIDE = 1000  # a file has room for any table


_CONTROLS = {k: f"\\x{k:02x}" for k in (*range(32), *range(127, 160)) if chr(k) not in "\n\t"}


def escape(text: str) -> str:
    """Text from a file as it is: it is no markup, and what steers a terminal is only shown."""
    return markup.escape(text.translate(_CONTROLS))


def shown(text: object) -> str:
    """A line as a terminal can show it: a path may have bytes that are no text."""
    return escape(str(text).encode("utf-8", "backslashreplace").decode())


def say(text: object) -> None:
    """A plain line, however long."""
    console.print(shown(text), soft_wrap=True)


def note(notes: Iterable[str]) -> None:
    """What a reader has to know beside the numbers."""
    for text in notes:
        say(f"Note: {text}.")


def error(text: str) -> None:
    """A mistake or a failure, on stderr."""
    complain.print(f"[red]error:[/] {shown(text)}")


def warn(text: str) -> None:
    """A result that is not what it seems, on stderr."""
    complain.print(f"[yellow]warning:[/] {shown(text)}")


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """JSON, and nothing else, on stdout."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")


@contextmanager
def mistakes(
    *more: type[Exception], stopped: str = "stopped at once; go on with the same command"
) -> Generator[None]:
    """A user's mistake is a message and exit code 2, Ctrl-C one and 130; no traceback for either.

    `stopped` is the message after a Ctrl-C that stops at once; empty: none.
    """
    try:
        yield
    except KeyboardInterrupt:
        if stopped:
            complain.print(stopped)
        raise typer.Exit(130) from None
    except Exception as mistake:
        from fedglad.runs.folder import Interrupted, RunError

        if isinstance(mistake, Interrupted):
            complain.print(escape(str(mistake)))
            raise typer.Exit(130) from None
        if isinstance(mistake, (ValueError, OSError, RunError, *more)):
            error(str(mistake))
            raise typer.Exit(2) from None
        raise


def table(first: str | None = None, *numbers: str) -> "Table":
    """A table without lines: a first column that may wrap, if any, and columns of numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if first is not None:
        made.add_column(first, overflow="fold")
    for head in numbers:
        made.add_column(head, justify="right", no_wrap=True)
    return made


def print_wide(made: "Table") -> None:
    """A table as wide as the terminal, and as wide as it wants to be in a file."""
    wide = console if console.is_terminal else Console(highlight=False, width=WIDE)
    wide.print(made)
