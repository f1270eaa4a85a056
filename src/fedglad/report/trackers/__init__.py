"""Writers for TensorBoard, MLflow and W&B: the same names everywhere, from a run's folder.

`names` has the names, and there is one small file a tracker, which alone imports it. Nothing goes
over the network.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedglad.core import user_code
from fedglad.report.figures import alarms
from fedglad.report.groups import in_words
from fedglad.report.trackers.names import (
    NAMES,
    Names,
    Row,
    Start,
    hyperparameters,
    scalars,
    summary_scalars,
)
from fedglad.runs.reader import Run, RunError, RunView

__all__ = ["NAMES", "REGISTRY", "TrackError", "Tracking", "Writer", "follow", "track", "write"]

POLL = 2.0  # seconds between looks at a folder


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


class Writer(Protocol):
    """A run in a tracker. Written twice, it is there once."""

    shown: str
    """The tracker's name in words."""
    errors: tuple[type[Exception], ...]
    """What its library raises where it cannot write."""

    def __init__(self, start: Start) -> None: ...

    def write(self, rows: Sequence[Row]) -> None:
        """The next rounds, to the disk."""
        ...

    def close(self, summary: dict[str, float] | None, step: int) -> None:
        """The end: with a summary that of the run, without that of looking at it."""
        ...

    @property
    def command(self) -> str:
        """How to see it."""
        ...


# By the name of the package, which is also the extra of fedglad that brings it.
REGISTRY = {
    "tensorboard": "fedglad.report.trackers.tensorboard:TensorBoard",
    "mlflow": "fedglad.report.trackers.mlflow:MLflow",
    "wandb": "fedglad.report.trackers.wandb:Wandb",
}


class Tracking:
    """One run on its way into a tracker."""

    def __init__(self, run: str | Path, *, to: str, out: str | Path | None = None) -> None:
        self._writer_class = _find(to)
        self.source = NewRounds(Path(run))
        self.out = Path(out) if out is not None else Path("tracked") / to
        self.writer: Writer | None = None
        self.rounds, self.finished = 0, False

    def advance(self) -> int:
        """Writes the rounds that are new; how many."""
        rows = self.source.new()
        if rows:
            with self._named_errors():
                self.writer = self.writer or self._open()
                self.writer.write(rows)
            self.rounds = rows[-1].step
        view = self.source.view
        # The summary comes a moment after the last round; if it was lost, there is none.
        self.finished = view.summary is not None or (view.complete and not rows)
        return len(rows)

    def close(self) -> None:
        """Writes the summary if there is one; must be called."""
        if self.writer is not None:
            summary = self.source.view.summary
            numbers = None if summary is None else summary_scalars(summary)
            with self._named_errors():
                self.writer.close(numbers, self.rounds)

    @contextmanager
    def _named_errors(self) -> Generator[None]:
        try:
            yield
        except (OSError, *self._writer_class.errors) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TrackError(
                f"{self.out} cannot be written for {self._writer_class.shown}: {why}; "
                "choose another --out"
            ) from error

    def _open(self) -> Writer:
        self.out.mkdir(parents=True, exist_ok=True)
        # A tracker that cannot write there would go elsewhere, or try again for minutes.
        tempfile.TemporaryFile(dir=self.out).close()
        source, view = self.source, self.source.view
        config = hyperparameters(view.config)
        return self._writer_class(Start(self.out, view.name, source.id, source.started, config))


def track(run: str | Path, *, to: str, out: str | Path | None = None) -> Tracking:
    """Writes a run's configuration, rounds and summary into a tracker's files, as far as it is.

    `to` is one of REGISTRY; `out` the folder of the tracker's files, `tracked/NAME` by default.
    """
    tracking = Tracking(run, to=to, out=out)
    write([tracking])
    return tracking


def write(trackings: Sequence[Tracking]) -> None:
    """Writes runs as far as they are."""
    follow(trackings, wait=None)


def follow(
    trackings: Sequence[Tracking], *, wait: Callable[[], None] | None = lambda: time.sleep(POLL)
) -> None:
    """Writes runs while they go on, until all are finished; with None for `wait`, once."""
    left = list(trackings)
    try:
        while left:
            _apart(trackings)
            for tracking in list(left):
                tracking.advance()
                if tracking.finished or wait is None:
                    left.remove(tracking)
                    tracking.close()
            if left and wait:
                wait()
    finally:
        for tracking in left:
            tracking.close()


def _apart(trackings: Sequence[Tracking]) -> None:
    """Copies of one run would be mixed: they are one to the tracker."""
    seen: dict[str, Path] = {}
    for source in (tracking.source for tracking in trackings):
        if source.id in seen:
            raise TrackError(f"{seen[source.id]} and {source.folder} hold the same run: give one")
        if source.id:
            seen[source.id] = source.folder


def _find(to: str) -> Any:
    """The writer's class; that its package is there is seen at once."""
    if to not in REGISTRY:
        raise TrackError(f"unknown tracker {to!r}: choose from {', '.join(REGISTRY)}")
    writer = user_code.load(REGISTRY[to])
    try:
        writer.load()
    except ModuleNotFoundError as error:
        raise TrackError(
            f"tracking to {writer.shown} needs the package {to}: pip install 'fedglad[{to}]'"
        ) from error
    return writer


def _id(view: RunView) -> str:
    """From the settings and the first round without its times, which differ if it runs again."""
    if not view.rounds:
        return ""
    opening: dict[str, Any] = {k: v for k, v in view.rounds[0].items() if k != "seconds"}
    if "groups" in opening:  # as the file has them
        opening["groups"] = {name: dict(group) for name, group in opening["groups"].items()}
    try:
        text = json.dumps([view.config, opening], sort_keys=True, default=str)
    except (ValueError, RecursionError):  # a number too long, a table too deep
        text = json.dumps([in_words(view.config), opening], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
