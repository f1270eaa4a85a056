"""A run's folder, read as it grows: each round once."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from fedglad.report.figures import alarms
from fedglad.report.groups import in_words
from fedglad.report.trackers.names import Names, Row, scalars
from fedglad.runs.reader import Run, RunError, RunView


class TrackError(RunError):
    """What cannot be tracked; the message says what to do."""


class NewRounds:
    """The rounds of a run that have not been given to the tracker yet.

    A run that was resumed may write rounds again: they are the same, and not given twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run, self._names = Run(folder), Names()
        self._next = 0
        self.id = ""  # the same for the same run wherever its folder is; empty before its rounds
        self.view = self._read()

    @property
    def started(self) -> float:
        """Seconds since 1970."""
        files = [self.folder / name for name in ("config.toml", "rounds.jsonl")]
        return next(path.stat().st_mtime for path in files if path.is_file())

    def new(self) -> list[Row]:
        """The rounds since the last call."""
        self.view = self._read()
        rows: list[Row] = []
        clock = 0.0
        usual, flags, _ = alarms(self.view.rounds)
        for record, before, flag in zip(self.view.rounds, usual, flags, strict=True):
            clock += math.fsum(record["seconds"].values())
            if record["round"] >= self._next:
                self._next = record["round"] + 1
                values = scalars(record, self._names, usual=before, flag=flag)
                rows.append(Row(record["round"] + 1, clock, values))
        return rows

    def _read(self) -> RunView:
        try:
            view = self._run.read()
        except RunError as error:
            raise TrackError(str(error)) from None
        now = _id(view)
        if self.id and now and now != self.id:
            raise TrackError(f"{self.folder} now holds another run: track it with a new command")
        self.id = self.id or now
        return view


def _id(view: RunView) -> str:
    """From the settings and the first round without its times, which differ if it runs again."""
    if not view.rounds:
        return ""
    opening: dict[str, Any] = {k: v for k, v in view.rounds[0].items() if k != "seconds"}
    try:
        text = json.dumps([view.config, opening], sort_keys=True, default=str)
    except (ValueError, RecursionError):  # a number too long, a table too deep
        text = json.dumps([in_words(view.config), opening], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
