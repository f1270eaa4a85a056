"""Persistent worker processes that answer messages in order, and survive being killed."""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pickle import PicklingError
from typing import Any

import torch

from fedglad.core import malloc

PR_SET_PDEATHSIG = 1
TRIES = 3  # a message whose worker dies so often gets no answer

Serve = Callable[[int, Any], Any]
"""Answers a message; the number is that of its slot, which no other message uses meanwhile."""


@dataclass(frozen=True)
class Lost:
    """In place of an answer."""

    reason: str


@dataclass
class Process:
    handle: Any
    pipe: Connection
    message: int | None = None  # which one it is at work on
    since: float = 0.0


def start_method() -> str:
    """How workers are started: by fork, where a fork is safe and nobody has chosen spawn.

    A forked worker has the data set and the user's own objects without a copy; a spawned one is
    sent them.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return "spawn" if sys.platform in ("win32", "darwin") or chosen == "spawn" else "fork"


class Pool:
    """`workers` processes with one thread each. `begin`, which is given the worker's number, runs
    in each and returns its Serve; it must be possible to pickle it where there is no fork."""

    def __init__(self, workers: int, begin: Callable[[int], Serve]) -> None:
        self.begin = begin
        self.window = 2 * workers
        self.processes: list[Process] = []
        try:
            for number in range(workers):
                self.processes.append(self._start(number))
        except BaseException:
            self.close()
            raise

    def run(self, messages: Sequence[Any], timeout: float = 0, tries: int = TRIES) -> Iterator[Any]:
        """The answers in order; at most 2 × workers messages are out or waiting to be taken."""
        answers: dict[int, Any] = {}
        unsent, deaths = deque(range(len(messages))), Counter[int]()
        self._replace_busy()  # a round that was given up, and is still referred to
        try:
            for wanted in range(len(messages)):
                self._send(messages, unsent, wanted)
                while wanted not in answers:
                    for number, answer in self._receive(timeout):
                        deaths[number] += answer is None
                        if answer is not None:
                            answers[number] = answer
                        elif deaths[number] < tries:
                            unsent.appendleft(number)
                        else:
                            answers[number] = Lost(f"its worker died {deaths[number]} times")
                    self._send(messages, unsent, wanted)
                yield answers.pop(wanted)
        finally:
            self._replace_busy()

    def close(self) -> None:
        """Ends all workers."""
        for process in self.processes:
            _end(process)
        self.processes = []

    def _send(self, messages: Sequence[Any], unsent: deque[int], wanted: int) -> None:
        """Gives every idle worker something to do, as far as the window goes."""
        for process in (process for process in self.processes if process.message is None):
            if not unsent or unsent[0] >= wanted + self.window:
                return
            number = unsent.popleft()
            process.message, process.since = number, time.monotonic()
            with suppress(BrokenPipeError):  # it died idle: seen, and mended, when we listen
                process.pipe.send((number % self.window, messages[number]))

    def _receive(self, timeout: float) -> Iterator[tuple[int, Any]]:
        """Answers that have come; None for a message whose worker died."""
        busy = {p.pipe: k for k, p in enumerate(self.processes) if p.message is not None}
        ready = wait(list(busy), timeout=min(timeout, 0.2) if timeout else None)
        for pipe in ready:
            k = busy[pipe]  # pyright: ignore[reportArgumentType]
            process = self.processes[k]
            number = process.message
            assert number is not None
            answer = None
            with suppress(EOFError, ConnectionError):
                answer = process.pipe.recv()
                process.message = None
            if process.message is not None:
                self._replace(k)
            yield number, answer
        for k, process in enumerate(self.processes):
            late = time.monotonic() - process.since > timeout > 0
            if process.message is not None and late:
                number = process.message
                self._replace(k)
                yield number, Lost(f"no answer within {timeout:g} s")

    def _start(self, number: int) -> Process:
        context: Any = multiprocessing.get_context(start_method())
        ours, theirs = context.Pipe()
        begin = partial(self.begin, number)
        handle = context.Process(target=_work, args=(theirs, begin, os.getpid()), daemon=True)
        with warnings.catch_warnings(), _uninterrupted():
            # Python ≥ 3.12 warns of threads that a fork leaves behind. Ours are torch's, and a
            # worker computes on one thread only.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            try:
                handle.start()
            except (AttributeError, TypeError, PicklingError) as error:
                raise ValueError(
                    f"a worker process cannot be sent all that it needs: {error}. Here workers are "
                    "started anew, not forked: define your own classes and functions in a module, "
                    'not in a function or a notebook, or set engine.name = "serial"'
                ) from error
        theirs.close()
        return Process(handle, ours)

    def _replace(self, k: int) -> None:
        _end(self.processes[k])
        self.processes[k] = self._start(k)

    def _replace_busy(self) -> None:
        for k, process in enumerate(self.processes):
            if process.message is not None:
                self._replace(k)


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Ctrl-C waits: in the middle of a fork it would be raised where nobody can catch it."""
    if sys.platform == "win32":  # has no masks, and no fork
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: Process) -> None:
    process.handle.kill()
    process.handle.join()
    process.pipe.close()


def _work(pipe: Connection, begin: Callable[[], Serve], parent: int) -> None:
    """A worker's life: it ends with its parent, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was held back for the fork
    with suppress(OSError, AttributeError):  # Linux can end a child with its parent, even mid-write
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    malloc.keep()
    serve = begin()
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                return
        slot, message = pipe.recv()
        pipe.send(serve(slot, message))
