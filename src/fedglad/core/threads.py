"""How many threads torch computes with."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Generator[None]:
    """A block whose bits, and speed, do not depend on how many cores a machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
