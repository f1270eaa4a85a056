"""Partitions that do not look at the labels: equal sizes, log-normal ones, and one client."""

from dataclasses import dataclass

import numpy as np

from fedglad.core import checks
from fedglad.data.partition.base import Partition, check


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Every client gets a random part of the whole; sizes differ by at most one."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(check(labels, clients)), clients)


@dataclass(frozen=True, kw_only=True)
class Quantity(Partition):
    """Labels as in the whole, sizes ∝ LogNormal(0, σ): the sizes differ and nothing else.

    One sample each; the n − N others in proportion to the draws, by largest remainders. σ = 0 is
    iid; of 100 clients, the largest has about 8 times the mean with σ = 1, and 24 times with σ = 2.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        sizes = "0 gives equal sizes, 1 a largest client of several times the mean"
        checks.check(self, sigma=(0 <= self.sigma <= 1e100, f"in 0 … 1e100; {sizes}"))

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        n = check(labels, clients)
        normal = rng.standard_normal(clients)
        # Relative to the largest, which is 1, so that no σ overflows.
        sizes = 1 + apportioned(np.exp(self.sigma * (normal - normal.max())), n - clients)
        return np.split(rng.permutation(n), np.cumsum(sizes)[:-1])


def apportioned(weights: np.ndarray, total: int) -> np.ndarray:
    """Integers that sum to `total`, in proportion to the weights: the largest remainders go up."""
    quotas = weights / weights.sum() * total
    whole = np.floor(quotas).astype(np.int64)
    up = np.argsort(whole - quotas, kind="stable")[: total - whole.sum()]
    whole[up] += 1
    return whole


@dataclass(frozen=True, kw_only=True)
class Centralised(Partition):
    """One client owns everything: ordinary training, the baseline of every federation."""

    counts_clients = True

    def split(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator | None
    ) -> list[np.ndarray]:
        """All indices; `clients` is 1, or 0."""
        n = check(labels, 1)
        if clients not in (0, 1):
            raise ValueError(f"clients={clients}, but centralised has one: set clients to 1, or 0")
        return [np.arange(n)]
