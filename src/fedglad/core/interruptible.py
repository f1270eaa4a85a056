"""Ctrl-C that waits for the end of a round."""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C is noted, for the end of the round; the second stops at once."""
    asked: list[float] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(time.monotonic())

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, which alone hears of Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
