"""What glibc's allocator does with memory that is freed; nothing happens where there is another."""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep() -> None:
    """From now on freed memory stays with the process, for the next training step.

    By itself glibc hands large blocks back, and the system clears new ones: a test of the MNIST CNN
    takes 1.7 times as long then, a step of ResNet-56 a sixth more (`benchmarks/steps.py --memory`).
    """
    _set(M_TRIM_THRESHOLD, 2**31 - 1)
    if not _set(M_MMAP_THRESHOLD, 1 << 30):
        _set(M_MMAP_THRESHOLD, 1 << 25)  # the most that an older glibc takes


def give_back() -> None:
    """From now on large blocks go back to the system when they are freed."""
    _set(M_MMAP_THRESHOLD, 1 << 20)


def _set(option: int, value: int) -> bool:
    with suppress(OSError, AttributeError):  # another libc
        return bool(ctypes.CDLL(None).mallopt(option, value))
    return True
