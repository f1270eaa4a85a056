"""A run's folder as a place to write: made if it is not there, and locked while it is written.

It holds config.toml, labels.json, rounds.jsonl, rounds/, checkpoints/, summary.json and log.txt,
which `reader` reads.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO, cast

from fedglad.runs import parts
from fedglad.runs.line import Chain, parse
from fedglad.runs.reader import ROUNDS_FILE, RunError
from fedglad.runs.reader import Run as Run

Busy = Callable[[], None]
"""Called while another process has the folder: waits a moment, or raises."""


class Interrupted(RunError):
    """Stopped by Ctrl-C with everything saved."""


class Records:
    """rounds.jsonl, or another such file, open at its end.

    What rounds.jsonl holds moves to a compressed part when it has grown beyond `parts.LIMIT`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._moves = path.name == ROUNDS_FILE
        if self._moves:
            parts.remove_stale(path)
        last = b""
        self._rounds: list[int] = []  # of the lines in the file
        self._begin = self._end = 0  # of the last line
        with open(path, "a+b") as file:
            file.seek(0)
            for line in parts.read_lines(file):
                last = line[:-1] if line.endswith(b"\n") else last
                self._add(len(line), parts.round_of(parse(last)) if self._moves else None)
        self._chain = Chain(before=last)
        self._file = open(path, "ab")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """One more line; a reader sees it at once."""
        line = f"{self._chain.write(record)}\n".encode()
        self._file.write(line)
        self._file.flush()
        self._add(len(line), record.get("round"))
        if self._moves and self._end > parts.LIMIT:
            self._move()

    def sync(self) -> None:
        """Makes sure that all lines are on the disk."""
        os.fsync(self._file.fileno())

    def _add(self, size: int, t: int | None) -> None:
        """One more line; a part is named by its rounds, so they must ascend."""
        self._begin, self._end = self._end, self._end + size
        if t is None or t <= (self._rounds[-1] if self._rounds else -1):
            self._moves = False
        else:
            self._rounds.append(t)

    def _move(self) -> None:
        """All lines but the last."""
        *moved, last = self._rounds
        if moved:
            parts.move(self.path, moved[0], moved[-1], self._begin)
            self._file.close()
            self._file = open(self.path, "ab")  # noqa: SIM115 - closed in __exit__
            self._rounds, self._begin, self._end = [last], 0, self._end - self._begin


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
    for name in ("log.txt", "checkpoints", "memories", "rounds"):
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
