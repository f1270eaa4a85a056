"""Ctrl-C that waits for the end of a round."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C is noted, for the end of the round; the second stops at once."""
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, the only one that gets Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
