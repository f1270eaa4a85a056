"""Runs on the machines of a Ray cluster; their folders come back to where the sweep is.

A run is a worker of Ray that holds the run's CPUs, and trains by a process of its own in a
temporary folder. Whoever dies, what has come back so far goes to another machine, and the run goes
on from there.
"""

import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fedglad.config.schema import Config, ConfigError
from fedglad.core import user_code
from fedglad.core.cluster import Cluster
from fedglad.core.processes import TRIES
from fedglad.core.scratch import Scratch
from fedglad.data.federation import fingerprint
from fedglad.runs.folder import RunError, lock, make_folder, refuse_links
from fedglad.runs.own_code import code_of
from fedglad.runs.places.base import CUT, ENDS, Event, Message, Task, as_asked, cpus_of
from fedglad.runs.places.folders import Files, packed, packed_meanwhile, unpack
from fedglad.runs.places.processes import Job
from fedglad.runs.trusted_code import VARIABLE, remember
from fedglad.simulation.engines.settings import Ray
from fedglad.simulation.engines.trainer import About, cpu_type

TICK = 0.2  # seconds after which is looked again at who has come, and whether to stop
LISTEN = 1.0  # seconds that a worker waits for news of its run
PATIENCE = 60.0  # seconds that a run waits for a machine until that is said
COPY = 30.0  # seconds after which the state of a run that goes on is fetched again

logger = logging.getLogger("fedglad")


@dataclass(frozen=True)
class Order:
    """What a machine is sent. It has none of the sweep's files, and may have none of its code."""

    task: bytes  # pickled: it is opened when its own code is there
    modules: Files
    code: Mapping[str, str]
    folder: str  # in which the sweep works, if there is such a one
    shown: str  # the run's folder there
    files: Files  # of a run that goes on
    data: str  # their checksum


class Runner:
    """A run on one of the machines, in a folder that goes with this process."""

    def begin(self, order: Order) -> About:
        """Starts the run."""
        self.scratch = Scratch("fedglad-sweep-")
        modules, folder = self.scratch.folder / "modules", self.scratch.folder / "run"
        unpack_modules(order.modules, modules)
        sys.path.append(str(modules))
        with suppress(OSError):  # this machine has no such folder
            os.chdir(order.folder)
        os.environ |= {
            VARIABLE: str(self.scratch.folder / "state"),
            "TMPDIR": str(self.scratch.folder),
        }
        tempfile.tempdir = None  # so that Python looks at TMPDIR again
        task: Task = pickle.loads(order.task)
        about = About.here(task.config.federation())
        if about.data != order.data:
            raise RunError(
                f"the data on {about.node} are other ones than where the sweep is (checksum "
                f"{about.data}, not {order.data}): bring the same to it, with `fedglad data get "
                "NAME` there, or share a cache folder ($FEDGLAD_CACHE)"
            )
        if code_of(task.config) != order.code:
            raise RunError(f"on {about.node} its own code is another one than where the sweep is")
        folder.mkdir()
        unpack(order.files, folder)
        self.task, self.shown = replace(task, folder=folder), order.shown
        self.job, self.copied = Job(self.task), set[str]()
        return about

    def listen(self) -> list[Message]:
        """What has happened since, or within a moment."""
        news: list[Message] = []
        while self.job.pipe.poll(0 if news else LISTEN):
            what, done, reason = self.job.receive()
            news.append((what, done, reason.replace(str(self.task.folder), self.shown)))
            if news[-1][0] in ENDS:
                self.job.end()
                break
        return news

    def stop(self) -> None:
        """Lets it finish its round and save."""
        self.job.stop()

    def state(self) -> Files:
        """What is saved of the run that goes on, if that is more than the last time; else {}."""
        found = packed_meanwhile(self.task.folder)
        names = {name for name in found if name.startswith("checkpoints/")}
        if names == self.copied:
            return {}
        self.copied = names
        return found

    def result(self) -> tuple[Files, str]:
        """All that the run has left, and its log."""
        log = (self.task.folder / "log.txt").read_text("utf-8", errors="replace")
        return packed(self.task.folder), log.replace(str(self.task.folder), self.shown)

    def close(self) -> None:
        """Leaves nothing here."""
        self.scratch.close()


def unpack_modules(modules: Files, folder: Path) -> None:
    """Own code as files, in a folder to be looked in."""
    for name, text in modules.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


class OnRay:
    """A cluster: `address` is "" for one of this machine alone, "auto", or "host:port".

    It takes `jobs` runs at a time, by default as many as it has CPUs. Every `copy` seconds the
    state of each run is fetched.
    """

    def __init__(self, address: str = "", jobs: int | None = None, copy: float = COPY) -> None:
        self.jobs, self.copy = jobs, copy
        self.cluster = Cluster(address)
        self.ray: Any = self.cluster.ray
        self.checksums: dict[str, str] = {}
        self.cpu_types = {cpu_type()}
        self.make = self.ray.remote(Runner)

    @property
    def room(self) -> int:
        return self.jobs or max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def start(self, task: Task) -> "RayRun":
        return RayRun(self, task)

    def ready(self, running: Sequence["RayRun"]) -> list["RayRun"]:
        refs = [run.answer for run in running if run.answer is not None]
        if refs:
            there, _ = self.ray.wait(refs, num_returns=1, timeout=TICK)
            more = [ref for ref in refs if ref not in there]
            there += self.ray.wait(more, num_returns=len(more), timeout=0)[0] if more else []
        else:
            there = []
            time.sleep(TICK)
        return [run for run in running if run.answer in there or run.has_news]

    def close(self) -> None:
        self.cluster.close()

    def checksum(self, config: Config) -> str:
        """That of a configuration's data, which are opened once."""
        section = str(config.to_dict()["data"])
        if section not in self.checksums:
            self.checksums[section] = fingerprint(config.federation())
        return self.checksums[section]

    def compare(self, about: About) -> None:
        """Warns, once a type, of a CPU that may give other bits."""
        if about.cpu not in self.cpu_types:
            logger.warning(
                "%s has another type of CPU (%s) than this machine: the last bits of its results "
                "may differ",
                about.node,
                about.cpu,
            )
        self.cpu_types.add(about.cpu)


class RayRun:
    """A task of the sweep, at a machine or waiting for one; its folder is locked meanwhile."""

    def __init__(self, place: OnRay, task: Task) -> None:
        self.place, self.ray, self.task = place, place.ray, task
        self.log: TextIO | None = None
        self.runner: Any = None
        self.answer: Any = None  # what is waited for: of `asked`
        self.asked = ""
        self.pending: list[Event] = []
        self.began = False  # whether a machine is at it
        self.stopping = self.locked = False
        self.deaths, self.since, self.copied = 0, time.monotonic(), 0.0
        try:
            self.config = _as_sent(task.config)
            make_folder(task.folder)
            refuse_links(task.folder)
            self.log = open(task.folder / "log.txt", "a")  # noqa: SIM115 - closed in `end`
        except OSError as error:
            self._end("failed", f"its folder cannot be written: {error}")
        except (ValueError, RunError) as error:
            self._end("failed", str(error))

    @property
    def has_news(self) -> bool:
        """Whether there is something to say, or to do, without an answer."""
        return bool(self.pending) or not self.began

    def events(self) -> Iterator[Event]:
        if not self.pending:
            try:
                self._go_on()
            except self.place.cluster.deaths as error:
                self._again(error)
            except Exception as error:  # of the run's settings, its data, or the user's own code
                traceback.print_exc(file=self.log)
                self._end("failed", _said(getattr(error, "cause", None) or error))
        while self.pending:
            yield self.pending.pop(0)

    def stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        if self.began:
            self.runner.stop.remote()
        else:
            self._end("stopped", CUT)

    def end(self, seconds: float = 5.0) -> None:
        self._dismiss()
        if self.log:
            self.log.close()

    def _go_on(self) -> None:
        if not self.locked:
            self._lock()
        elif self.ray.wait([self.answer], timeout=0)[0]:
            answer, asked = self.ray.get(self.answer), self.asked
            self.answer = None
            getattr(self, f"_on_{asked}")(answer)
        elif self.since and time.monotonic() - self.since > PATIENCE:
            self.since = 0.0
            self._say("waiting", f"waits for a machine with {cpus_of(self.config)} free CPU")

    def _lock(self) -> None:
        """Begins, unless another process is at this folder."""
        assert self.log
        if not lock(self.log):
            if self.since:
                self.since = 0.0
                self._say("waiting")
            return
        self.locked = True
        if self.task.finished:  # by the other process
            self._end("finished")
            return
        self._begin()

    def _begin(self) -> None:
        """Sends the run to whichever machine has room for it."""
        task = replace(self.task, config=self.config)
        order = Order(
            task=pickle.dumps(replace(task, settings={}, rule=None)),
            modules=user_code.own_files(task.config.own_names().values()),
            code=code_of(task.config),
            folder=os.getcwd(),
            shown=str(task.folder),
            files=packed(task.folder),
            data=self.place.checksum(task.config),
        )
        options = {"num_cpus": cpus_of(task.config), "max_restarts": 0, "max_task_retries": 0}
        self.runner, self.since = self.place.make.options(**options).remote(), time.monotonic()
        self._ask("begin", order)

    def _ask(self, what: str, *args: Any) -> None:
        self.asked, self.answer = what, getattr(self.runner, what).remote(*args)

    def _on_begin(self, about: About) -> None:
        self.began, self.copied = True, time.monotonic()
        self.place.compare(about)
        self._ask("listen")

    def _on_listen(self, news: list[Message]) -> None:
        for what, done, reason in news:
            if what in ENDS:
                self.last = what, reason
                self._ask("result")
                return
            self.pending.append(Event(self.task, what, done, reason))  # pyright: ignore[reportArgumentType]
        if time.monotonic() - self.copied > self.place.copy:
            self._ask("state")
        else:
            self._ask("listen")

    def _on_state(self, files: Files) -> None:
        if files:
            unpack(files, self.task.folder)
        self.copied = time.monotonic()
        self._ask("listen")

    def _on_result(self, result: tuple[Files, str]) -> None:
        files, log = result
        assert self.log
        self.log.write(log)
        unpack(files, self.task.folder)
        remember(self.task.config, self.task.folder)
        self.ray.get(self.runner.close.remote())
        self._end(*self.last)

    def _again(self, error: Exception) -> None:
        """A machine, or the worker there, is gone: another one goes on with what has come back."""
        self._dismiss()
        self.deaths += 1
        if self.stopping:
            self._end("stopped", CUT)
        elif self.deaths >= TRIES:
            self._end(
                "failed", f"its machine died {self.deaths} times, the last time: {_said(error)}"
            )
        else:
            self._say("again", "its machine died: another one goes on with it")
            self._begin()

    def _dismiss(self) -> None:
        if self.runner is not None:
            with suppress(Exception):  # it has gone, and perhaps the cluster with it
                self.ray.kill(self.runner)
        self.runner = self.answer = None
        self.began = False

    def _say(self, what: Any, reason: str = "") -> None:
        self.pending.append(Event(self.task, what, None, reason))

    def _end(self, what: str, reason: str = "") -> None:
        self.answer = None
        self._say(what, reason)


def _as_sent(config: Config) -> Config:
    """The configuration as a machine gets it; ConfigError if it is not for a place like this."""
    if isinstance(config.sections["engine"], Ray):
        raise ConfigError(
            "engine.name = 'ray' with --on ray: the runs would take each other's machines. Leave "
            "the engine out, a run on one machine has the same bits; or leave --on ray out, then "
            "each run in turn has the whole cluster"
        )
    return as_asked(config)


def _said(error: BaseException) -> str:
    """A mistake by its sentence, anything else by its type too, in a line."""
    text = str(error).strip().splitlines()
    line = text[0] if text else ""
    plain = type(error) in (ValueError, ConfigError, RunError)
    return line if plain else f"{type(error).__name__}: {line}"
