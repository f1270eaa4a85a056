"""A run's folder, read as it grows: each round once."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from fedglad.report.figures import alarms
from fedglad.report.folder import Reader, ReportError, Story
from fedglad.report.groups import in_words
from fedglad.report.trackers.names import Names, Row, scalars


class TrackError(RuntimeError):
    """What cannot be tracked; the message says what to do."""


class Source:
    """The rounds of a run that have not been told yet.

    A run that was resumed may write rounds again: they are the same, and not told twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader, self._names = Reader(folder), Names()
        self._next, self._id = 0, ""
        self.story = self._read()

    @property
    def id(self) -> str:
        """The same for the same run wherever its folder is; empty before its first round."""
        return self._id

    @property
    def started(self) -> float:
        """Seconds since 1970."""
        files = [self.folder / name for name in ("config.toml", "rounds.jsonl")]
        return next(path.stat().st_mtime for path in files if path.is_file())

    def new(self) -> list[Row]:
        """The rounds since the last call."""
        self.story = self._read()
        rows: list[Row] = []
        clock = 0.0
        usual, flags, _ = alarms(self.story.rounds)
        for record, before, flag in zip(self.story.rounds, usual, flags, strict=True):
            clock += math.fsum(record["seconds"].values())
            if record["round"] >= self._next:
                self._next = record["round"] + 1
                told = scalars(record, self._names, usual=before, flag=flag)
                rows.append(Row(record["round"] + 1, clock, told))
        return rows

    def _read(self) -> Story:
        try:
            story = self._reader.read()
        except ReportError as error:
            raise TrackError(str(error)) from None
        found = _id(story)
        if self._id and found and found != self._id:
            raise TrackError(f"{self.folder} now holds another run: track it with a new command")
        self._id = self._id or found
        return story


def _id(story: Story) -> str:
    """From the settings and the first round without its times, which differ if it runs again."""
    if not story.rounds:
        return ""
    opening: dict[str, Any] = {k: v for k, v in story.rounds[0].items() if k != "seconds"}
    try:
        text = json.dumps([story.config, opening], sort_keys=True, default=str)
    except (ValueError, RecursionError):  # a number too long, a table too deep
        text = json.dumps([in_words(story.config), opening], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
