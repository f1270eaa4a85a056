"""Runs in processes of this machine, one thread each."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from shutil import rmtree

from fedglad.config.schema import ConfigError
from fedglad.core.interruptible import on_interrupt
from fedglad.records import Round
from fedglad.runs.folder import Interrupted, RunError
from fedglad.runs.own_code import code_of
from fedglad.runs.places.base import CUT, Event, Message, Task, alone

STDOUT, STDERR = 1, 2
SAFE_PATH = "PYTHONSAFEPATH"


class Processes:
    """At most so many processes at a time, started from one that has all modules loaded."""

    def __init__(self, jobs: int = 1) -> None:
        self.room = jobs

    def start(self, task: Task) -> "Job":
        return Job(replace(task, config=alone(task.config)), shown=task)

    def ready(self, running: Sequence["Job"]) -> list["Job"]:
        there = wait([job.pipe for job in running], timeout=0.2)
        return [job for job in running if job.pipe in there]

    def close(self) -> None:
        pass


class Job:
    """A task in a process of its own.

    It may have a `scratch` folder, which goes with the process that has made the job: if that is
    killed, the job removes the folder and ends. Such a job stays until it is ended.
    """

    def __init__(self, task: Task, *, shown: Task | None = None, scratch: Path | None = None):
        """`shown` is the task that its events name."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "fedglad.runs.running", "pydantic"])
        with on_interrupt(signal.SIG_IGN), safe_path():  # it inherits both while it imports
            forkserver.ensure_running()
        self.task, self.stopping = shown or task, False
        code = code_of(task.config)
        self.pipe, theirs = context.Pipe()
        safe = os.environ.get(SAFE_PATH)
        self.process = context.Process(target=_work, args=(task, theirs, safe, code, scratch))
        self.process.start()
        theirs.close()

    def receive(self) -> Message:
        """What it has sent; of a process that is gone, how it ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
            how = killed or f"ended with exit code {code}"
            return "failed", None, f"its process {how}"

    def events(self) -> Iterator[Event]:
        yield Event(self.task, *self.receive())  # pyright: ignore[reportArgumentType]

    def stop(self) -> None:
        with suppress(OSError):  # it is gone already
            if not self.stopping:
                self.pipe.send("stop")
        self.stopping = True

    def end(self, seconds: float = 5.0) -> None:
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def safe_path() -> Generator[None]:
    """Python processes that are started meanwhile do not look for modules in the working folder."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        set_safe_path(before)


def set_safe_path(value: str | None) -> None:
    """As it was before; None: it was not set."""
    if value is None:
        os.environ.pop(SAFE_PATH, None)
    else:
        os.environ[SAFE_PATH] = value


# ---------------------------------------------------------------------------- in the job's process


def _work(
    task: Task,
    pipe: Connection,
    safe_path: str | None,
    code: Mapping[str, str],
    scratch: Path | None,
) -> None:
    """Runs the task; leaves Ctrl-C to the parent process, and ends with it."""
    set_safe_path(safe_path)  # of the user's own code, which may start Python too
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True)
    watch.start()
    end = attempt(task, code, pipe.send, pipe.poll)
    with suppress(OSError):
        pipe.send(end)
    if scratch:
        watch.join()


def attempt(
    task: Task,
    code: Mapping[str, str],
    send: Callable[[Message], None],
    asked: Callable[[float], bool],
) -> Message:
    """Runs the task in this process, whose output goes to the run's log; how it ended.

    `asked` says whether it is to stop, after so many seconds at most.
    """
    import torch

    torch.set_num_threads(1)
    try:
        # Whatever is printed goes to the run's log, not between the lines of the terminal.
        task.folder.mkdir(parents=True, exist_ok=True)
        with open(task.folder / "log.txt", "a") as log:
            for stream in (STDOUT, STDERR):
                os.dup2(log.fileno(), stream)
    except OSError as error:
        return "failed", None, f"its folder cannot be written: {error}"
    return _run(task, code, send, asked)


def _run(
    task: Task,
    code: Mapping[str, str],
    send: Callable[[Message], None],
    asked: Callable[[float], bool],
) -> Message:
    waiting: list[Message] = [("waiting", None, "")]

    def on_round(done: Round) -> None:
        send(("round", done, ""))
        if asked(0.0):
            signal.raise_signal(signal.SIGINT)  # which runs.py takes for: after this round

    def busy() -> None:
        """Waits while another process is at this run."""
        if waiting:
            send(waiting.pop())
        if asked(0.5):
            raise Interrupted("stopped while waiting")

    from fedglad.runs.running import execute

    try:
        if code_of(task.config) != code:
            raise RunError("its own code was changed since the sweep began: start it again")
        execute(
            task.name,
            task.config,
            out=task.folder,
            resume=True,
            accept_old=task.accept_old,
            keep_state=task.keep_state,
            on_round=on_round,
            busy=busy,
        )
    except (Interrupted, KeyboardInterrupt):
        return "stopped", None, CUT
    except Exception as error:
        traceback.print_exc()
        plain = type(error) in (ValueError, ConfigError, RunError)
        return "failed", None, str(error) if plain else f"{type(error).__name__}: {error}"
    return "finished", None, ""


def _end_with_parent(scratch: Path | None) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    while scratch and scratch.exists():  # the run may be writing into it
        rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
