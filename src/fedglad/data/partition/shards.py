"""Shards: every client has at most k classes."""

import heapq
from dataclasses import dataclass

import numpy as np

from fedglad.core import checks
from fedglad.data.partition.base import Partition, check, grouped


@dataclass(frozen=True, kw_only=True)
class Shards(Partition):
    """Every client gets k shards of one class each, so at most k classes; k = 2 is McMahan's.

    The set, sorted by class, is cut into N·k shards, and they are dealt at random (McMahan et al.
    2017, arXiv:1602.05629, section 3). Differs from the paper: no shard crosses the border of a
    class. Each class has one shard, and every further one goes to the class whose shards are the
    largest: so sizes are equal only nearly (MNIST, N = 100, k = 2: about 585 to 615).

    Two shards of a client may be of the same class, as in the paper; NIID-Bench's "#C = k" gives
    exactly k classes, and sizes that differ much. Where n < N·k, there are n shards of one sample.
    """

    classes_per_client: int = 2

    def __post_init__(self) -> None:
        checks.check(self, classes_per_client=1)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        n = check(labels, clients)
        by_class, sizes = grouped(labels, rng)
        shards, classes = min(clients * self.classes_per_client, n), len(sizes)
        if shards < classes:
            raise ValueError(
                f"{clients} clients with {self.classes_per_client} classes each cannot own all "
                f"{classes} classes: raise classes_per_client to at least "
                f"{-(-classes // clients)}, or clients"
            )
        starts = np.cumsum(sizes) - sizes
        numbers = shards_by_class(sizes, shards)
        cuts = [
            start + np.arange(number) * size // number
            for start, number, size in zip(starts, numbers, sizes, strict=True)
        ]
        pieces = np.split(by_class, np.concatenate(cuts)[1:])
        dealt = np.array_split(rng.permutation(shards), clients)
        return [np.concatenate([pieces[i] for i in hand]) for hand in dealt]


def shards_by_class(sizes: np.ndarray, shards: int) -> np.ndarray:
    """Into how many shards each class is cut, so that the largest shard is as small as can be."""
    numbers = np.ones(len(sizes), dtype=np.int64)
    largest = [(-size, c) for c, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for _ in range(shards - len(sizes)):
        c = largest[0][1]
        numbers[c] += 1
        heapq.heapreplace(largest, (-sizes[c] / numbers[c], c))
    return numbers
