"""Persistent worker processes that answer messages in order, and survive being killed."""

import ctypes
import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
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


class Pool:
    """`workers` forked processes with one thread each. `begin` runs in each and returns its Serve.

    Forked, not spawned: the data set and the user's own objects are there without being copied.
    """

    def __init__(self, workers: int, begin: Callable[[], Serve]) -> None:
        self.begin = begin
        self.window = 2 * workers
        self.processes = [self._start() for _ in range(workers)]

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

    def _start(self) -> Process:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        handle = context.Process(target=_work, args=(theirs, self.begin, os.getpid()), daemon=True)
        with warnings.catch_warnings(), _uninterrupted():
            # Python ≥ 3.12 warns of threads that a fork leaves behind. Ours are torch's, and a
            # worker computes on one thread only.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            handle.start()
        theirs.close()
        return Process(handle, ours)

    def _replace(self, k: int) -> None:
        _end(self.processes[k])
        self.processes[k] = self._start()

    def _replace_busy(self) -> None:
        for k, process in enumerate(self.processes):
            if process.message is not None:
                self._replace(k)


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Ctrl-C waits: in the middle of a fork it would be raised where nobody can catch it."""
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
