"""A run's folder as a place to write: made if it is not there, and locked while it is written.

It holds config.toml, labels.json, rounds.jsonl, checkpoints/, summary.json and log.txt, which
`reader` reads.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO, cast

from fedglad.runs.line import Chain
from fedglad.runs.reader import Run as Run
from fedglad.runs.reader import RunError

Busy = Callable[[], None]
"""Called while another process has the folder: waits a moment, or raises."""


class Interrupted(RunError):
    """Stopped by Ctrl-C with everything saved."""


class Records:
    """rounds.jsonl, open at its end."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115 - closed in __exit__
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        self._chain = Chain(before=lines[-2] if len(lines) > 1 else b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """One more line; a reader sees it at once."""
        self._file.write(f"{self._chain.write(record)}\n".encode())
        self._file.flush()

    def sync(self) -> None:
        """Makes sure that all lines are on the disk."""
        os.fsync(self._file.fileno())


def make_folder(folder: Path, way_out: str = "choose another --out") -> None:
    """Makes sure that it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the folder {folder} cannot be made: {error.strerror}; {way_out}") from None


@contextmanager
def locked(
    folder: Path, busy: Busy | None = None, way_out: str = "choose another --out"
) -> Generator[None]:
    """The run's log; the lock on it lets one process at a time write the folder."""
    logger = logging.getLogger("fedglad")
    refuse_links(folder, way_out)
    try:
        handler = logging.FileHandler(folder / "log.txt")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}; {way_out}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        while not lock(cast(TextIO, handler.stream)):
            if busy is None:
                raise RunError(
                    f"{folder} is being written by another process: wait for it, or {way_out}"
                )
            busy()
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        handler.close()


def refuse_links(folder: Path, way_out: str = "choose another --out") -> None:
    """RunError if a run in this folder would write somewhere else."""
    for name in ("log.txt", "checkpoints", "memories"):
        if (folder / name).is_symlink():
            raise RunError(
                f"{folder / name} is a link: a run writes and removes files in its folder alone; "
                f"put there what it points to, or {way_out}"
            )


def lock(log: TextIO) -> bool:
    """Takes the lock on a run's log, if no other process has it, until the log is closed."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
