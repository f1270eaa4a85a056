"""A run's folder: config.toml, labels.json, rounds.jsonl, checkpoints/, summary.json, log.txt."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

Busy = Callable[[], None]
"""Called while another process has the folder: waits a moment, or raises."""


class RunError(RuntimeError):
    """A run that cannot start or go on; the message says what to do."""


class Interrupted(RunError):
    """Stopped by Ctrl-C with everything saved."""


@dataclass(frozen=True)
class Run:
    """A folder that holds a run, or will."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, once the run is finished."""
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
            if not isinstance(found, dict):
                raise ValueError(f"{found!r} is no summary")
        except ValueError as error:
            raise RunError(
                f"{path} is damaged: {error}. Remove that file and go on with --resume, which "
                "writes it anew"
            ) from None
        return found

    @property
    def skipped(self) -> str:
        """That at least half of the rounds were skipped, and why the last one; empty if not."""
        summary = self.summary or {}
        skipped, rounds = summary.get("skipped", 0), summary.get("rounds", 0)
        if not skipped or 2 * skipped < rounds:
            return ""
        reasons = [found.get("reason") for found in self.rounds() if found["status"] == "skipped"]
        return f"{skipped} of {rounds} rounds were skipped: {reasons[-1] if reasons else 'unknown'}"

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds recorded so far; a line cut off by a crash is left out."""
        path = self.folder / "rounds.jsonl"
        return parse(path.read_text("utf-8", errors="replace")) if path.is_file() else []

    def clear(self) -> None:
        """Removes what a run writes, and nothing else; the log, which may be locked, is emptied."""
        if (self.folder / "log.txt").is_file():
            os.truncate(self.folder / "log.txt", 0)
        for name in ("config.toml", "labels.json", "rounds.jsonl", "summary.json"):
            (self.folder / name).unlink(missing_ok=True)
        for name in ("checkpoints", "memories"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def parse(lines: str) -> list[dict[str, Any]]:
    """The rounds of rounds.jsonl up to the first line that is none."""
    found: list[dict[str, Any]] = []
    for line in lines.splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):  # also a number too long, or lists too deep
            break
    return found


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
    try:
        handler = logging.FileHandler(folder / "log.txt")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}; {way_out}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        while not _locked(handler):
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


def _locked(handler: logging.FileHandler) -> bool:
    try:
        fcntl.flock(cast(TextIO, handler.stream), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
