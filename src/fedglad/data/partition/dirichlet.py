"""The symmetric Dirichlet of most other tools: every class is shared out among the clients."""

import heapq
from dataclasses import dataclass

import numpy as np

from fedglad.core import checks
from fedglad.data.partition.base import Partition, check, check_alpha, deal, grouped


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Of every class, the clients own shares ~ Dir_N(α), symmetric: both labels and sizes differ.

    Yurochkin et al. 2019 (arXiv:1905.12022), and α as in NIID-Bench, FedML and Flower: a client's
    labels are nearly Dir_C(α), so α = 0.1 is about as skewed as `label-skew` with α = 0.1·C.

    Differs from these tools: a client with fewer than `least` samples gets what it lacks one by
    one from whoever has most; they draw anew until none is short, which for many clients never
    ends. And they give no further class to a client that has n/N samples already, so their sizes
    differ less.
    """

    alpha: float = 0.1
    least: int = 1

    def __post_init__(self) -> None:
        check_alpha(self, self.alpha)
        checks.check(self, least=1)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        n = check(labels, clients)
        if clients * self.least > n:
            raise ValueError(
                f"{clients} clients cannot have {self.least} of {n} samples each: lower clients "
                f"to at most {n // self.least}, or least"
            )
        by_class, sizes = grouped(labels, rng)
        shares = rng.dirichlet(np.full(clients, self.alpha), size=len(sizes))
        return deal(by_class, dirichlet_counts(shares, sizes, self.least))


def dirichlet_counts(shares: np.ndarray, sizes: np.ndarray, least: int = 1) -> np.ndarray:
    """How many samples of each class (columns) each client (rows) gets, none fewer than `least`.

    `shares` has a row for each class, with the clients' shares of it.
    """
    # Cut at ⌊size · cumulated share⌋: what rounding takes from a client, its neighbour gets.
    ends = np.floor(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    ends = np.minimum(ends, sizes[:, None])
    ends[:, -1] = sizes
    counts = np.diff(ends, axis=1, prepend=0).T.copy()

    owned = counts.sum(axis=1)
    richest = [(-size, k) for k, size in enumerate(owned.tolist())]
    heapq.heapify(richest)
    for k in np.flatnonzero(owned < least):
        for _ in range(least - owned[k]):
            size, giver = richest[0]
            heapq.heapreplace(richest, (size + 1, giver))
            most = counts[giver].argmax()
            counts[giver, most] -= 1
            counts[k, most] += 1
    return counts
