"""TensorBoard: one event file in a subfolder for each run."""

import shlex
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from fedglad.report.trackers.names import Row, Start


class TensorBoard:
    """OUT/RUN/events.out.tfevents…, written anew each time.

    The settings are hyperparameters (HPARAMS), the time axis is the run's own.
    """

    shown = "TensorBoard"
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, start: Start) -> None:
        self._out = start.out
        self._started = self._last = start.started
        self._lib = self.load()
        mark = f".fedglad-{start.id}"
        folder = start.out / start.name
        events = [path.name for path in folder.glob("events.out.tfevents.*")]
        if any(not name.endswith(mark) for name in events):  # another run of that name
            folder = start.out / f"{start.name}-{start.id}"
        for old in folder.glob(f"events.out.tfevents.*{mark}"):
            old.unlink()
        self._writer = self._lib.writer(str(folder), filename_suffix=mark)
        parameters = self._lib.hparams(
            start.config, trial_id=start.id, start_time_secs=start.started
        )
        self._add(parameters, 0, start.started)

    @staticmethod
    def load() -> Any:
        """The library's own writer; it needs neither TensorFlow nor torch."""
        return SimpleNamespace(
            event=import_module("tensorboard.compat.proto.event_pb2").Event,
            summary=import_module("tensorboard.compat.proto.summary_pb2").Summary,
            hparams=import_module("tensorboard.plugins.hparams.summary_v2").hparams_pb,
            writer=import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter,
        )

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._last = self._started + row.seconds
            self._scalars(row.scalars, row.step)
        self._writer.flush()

    def close(self, summary: dict[str, float] | None, step: int) -> None:
        if summary:
            self._scalars(summary, step)
        self._writer.close()

    @property
    def command(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._out))}"

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        value = self._lib.summary.Value
        values = [value(tag=name, simple_value=number) for name, number in scalars.items()]
        self._add(self._lib.summary(value=values), step, self._last)

    def _add(self, summary: Any, step: int, when: float) -> None:
        self._writer.add_event(self._lib.event(wall_time=when, step=step, summary=summary))
