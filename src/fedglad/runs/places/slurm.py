"""Runs as an array of Slurm's jobs, by submitit, in folders that all machines share.

A job that is preempted, or has used up its time, is queued again and goes on from the run's last
checkpoint. To try it, `cluster=local` has submitit start the jobs as processes of this machine.
"""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from fedglad.config.schema import ConfigError
from fedglad.runs.folder import make_folder
from fedglad.runs.own_code import code_of
from fedglad.runs.places.base import CUT, Event, Message, Task, as_asked, cpus_of
from fedglad.runs.places.processes import SAFE_PATH, attempt, safe_path, set_safe_path

NEEDED = 'install submitit with pip install "fedglad[slurm]"'
MINUTES = 240  # that a job may take, unless it is said; then it is queued again
TIMES = 100  # that this may happen to a job
TICK = 0.5
STOP = "stop"


def import_submitit() -> Any:
    """Submitit itself; ValueError where it is not installed."""
    try:
        import submitit
    except ImportError as error:
        raise ValueError(f"submitit is not installed ({error}): {NEEDED}") from None
    return submitit


@dataclass(frozen=True)
class Resumable:
    """What a job does: the run, from where it is. Called again, it goes on."""

    task: bytes  # pickled: it is opened in the folder in which the sweep works
    code: Mapping[str, str]
    folder: str
    stop: Path  # a file that tells running jobs to save and end
    safe: str | None  # what the sweep has for PYTHONSAFEPATH

    def __call__(self) -> Message:
        set_safe_path(self.safe)
        os.chdir(self.folder)
        return attempt(pickle.loads(self.task), self.code, lambda message: None, self._asked)

    def checkpoint(self) -> Any:
        """What submitit queues when this job must go: the same again."""
        return import_submitit().helpers.DelayedSubmission(self)

    def _asked(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.stop.exists()


class OnSlurm:
    """Jobs with Slurm's `options`: those of submitit by their names, any other as `sbatch` has it.

    At most `jobs` run at a time, by default as many as Slurm allows.
    """

    def __init__(
        self, out: Path, jobs: int | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        submitit = import_submitit()
        given = dict(options or {})
        self.cluster = str(given.pop("cluster", "slurm"))
        if self.cluster not in ("slurm", "local"):
            raise ConfigError(f"cluster = {self.cluster!r}: choose slurm, or local to try it here")
        if "time" in given:
            raise ConfigError(f"time = {given['time']!r}: say it as timeout_min, in minutes")
        make_folder(out)
        self.failed = False
        self.parent = out.resolve() / "slurm"
        self.parent.mkdir(exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="jobs-", dir=self.parent))
        times = {f"{self.cluster}_max_num_timeout": TIMES}
        try:
            self.executor = submitit.AutoExecutor(self.folder, self.cluster, **times)
            self.options = _parameters(submitit, {"timeout_min": MINUTES, **given}, jobs)
            self.executor.update_parameters(**self.options)
        except (RuntimeError, ValueError, NameError, AssertionError) as error:
            self.close()
            raise ConfigError(f"Slurm cannot be asked: {error}") from None
        self.room = (jobs or os.cpu_count() or 1) if self.cluster == "local" else sys.maxsize
        self.unsent: list[SlurmRun] = []

    def start(self, task: Task) -> "SlurmRun":
        """Notes it: what is started at once is sent at once, as one array."""
        self.unsent.append(SlurmRun(self, task))
        return self.unsent[-1]

    def ready(self, running: Sequence["SlurmRun"]) -> list["SlurmRun"]:
        self._send()
        ready = [run for run in running if run.done]
        if not ready:
            time.sleep(TICK)
        return ready

    def stop(self) -> None:
        """Tells all jobs that run to save and end."""
        (self.folder / STOP).touch()

    def close(self) -> None:
        """The jobs' own files stay if something failed, as their logs may say why."""
        if not self.failed:
            rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.parent.rmdir()

    def _send(self) -> None:
        unsent, self.unsent = self.unsent, []
        if not unsent:
            return
        if not any(name in self.options for name in ("cpus_per_task", "slurm_cpus_per_task")):
            cpus = max(cpus_of(run.task.config) for run in unsent)
            self.executor.update_parameters(cpus_per_task=cpus)
        with safe_path():
            jobs = self.executor.submit_array([run.call for run in unsent])
        for run, job in zip(unsent, jobs, strict=True):
            run.job = job


class SlurmRun:
    """A task of the sweep, as a job in the queue or at work."""

    def __init__(self, place: OnSlurm, task: Task) -> None:
        self.place, self.task = place, task
        self.job: Any = None
        self.stopping = self.cancelled = False
        folder = task.folder.resolve()
        sent = replace(task, folder=folder, config=as_asked(task.config), settings={}, rule=None)
        stop = place.folder / STOP
        self.call = Resumable(
            pickle.dumps(sent), code_of(task.config), os.getcwd(), stop, os.environ.get(SAFE_PATH)
        )

    @property
    def done(self) -> bool:
        return self.cancelled or (self.job is not None and self.job.done())

    def events(self) -> list[Event]:
        what, reason = self._outcome()
        self.place.failed |= what == "failed"
        return [Event(self.task, what, None, reason)]  # pyright: ignore[reportArgumentType]

    def stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        self.place.stop()
        if self.job is not None and self.job.state == "PENDING":
            self._cancel()

    def end(self, seconds: float = 5.0) -> None:
        if self.job is not None and not self.done:
            self._cancel()

    def _cancel(self) -> None:
        self.job.cancel()
        self.cancelled = True  # Slurm says so minutes later

    def _outcome(self) -> tuple[str, str]:
        if self.cancelled:
            return "stopped", CUT
        try:
            what, _, reason = self.job.result()
        except Exception as error:  # submitit's, of jobs that have left no result
            if self.stopping or self.job.state == "CANCELLED":
                return "stopped", CUT
            line = str(error).strip().splitlines()[0]
            return "failed", f"its job {self.job.job_id} {self.job.state.lower()}: {line}"
        return what, reason


def _parameters(submitit: Any, given: Mapping[str, Any], jobs: int | None) -> dict[str, Any]:
    """The options as submitit's AutoExecutor takes them."""
    auto = submitit.AutoExecutor
    slurm = submitit.SlurmExecutor._valid_parameters()
    made: dict[str, Any] = {"name": "fedglad"}
    more: dict[str, Any] = {}
    for name, value in given.items():
        if name in auto._valid_parameters():
            made[name] = value
        elif name in slurm:
            made[f"slurm_{name}"] = value
        else:
            more[name] = value
    if more:
        made["slurm_additional_parameters"] = more
    if jobs:
        made["slurm_array_parallelism"] = jobs
    return made
