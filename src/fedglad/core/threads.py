"""How many threads torch computes with, and work that is shared among threads of Python."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

MOST = 8  # threads at most: beyond them memory is what limits

Item = TypeVar("Item")


@contextmanager
def threads(count: int) -> Generator[None]:
    """A block whose bits, and speed, do not depend on how many cores a machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share(
    items: Iterable[Item], worker: Callable[[], Callable[[Item], None]], *, alone: bool = False
) -> None:
    """Has each item worked on, by as many threads as torch may use; each calls `worker` once.

    `alone`: by one.

    Torch splits every operation among its threads and waits for all of them. Where a block fits
    the cache and the machine is busy, it mostly waits for one that does not run. Here a thread
    takes the next item when it is done with one, and computes alone.

    >>> squares = [0, 0, 0]
    >>> def worker():
    ...     def square(k):
    ...         squares[k] = k * k
    ...     return square
    >>> share(range(3), worker)
    >>> squares
    [0, 1, 4]
    """
    left = list(items)[::-1]

    def work() -> None:
        one = worker()
        while left:
            try:
                item = left.pop()
            except IndexError:  # another thread took the last
                return
            one(item)

    count = 1 if alone else min(torch.get_num_threads(), MOST, len(left))
    if count < 2:
        work()
        return
    with threads(1), ThreadPoolExecutor(count - 1, thread_name_prefix="fedglad-share") as pool:
        others = [pool.submit(work) for _ in range(count - 1)]
        try:
            work()
        finally:
            left.clear()  # where one raises, the others stop too
        for other in others:
            other.result()
