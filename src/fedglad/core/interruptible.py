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

    with on_interrupt(note):
        yield lambda: asked


@contextmanager
def on_interrupt(handler: Callable[[int, Any], None] | signal.Handlers) -> Generator[None]:
    """Ctrl-C is handled so for a while, in the main thread; no other gets it."""
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
