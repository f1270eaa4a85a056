"""Filters and robust means: what happens to updates before the indicator sees them.

An outlier raises GSI, so without a filter a hostile client could buy itself a larger step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedglad.core.checks import check
from fedglad.records import FLAGS


@dataclass(frozen=True, kw_only=True)
class Filter:
    """No filter: every valid update counts.

    >>> class Central(Filter):  # an own one: the two updates with the least distance to all others
    ...     keeps_updates = True
    ...     def select(self, distances_sq):
    ...         return sorted(distances_sq.sum(axis=1).argsort()[:2].tolist())
    >>> values = np.array([1.0, 2.0, 90.0])
    >>> Central().select((values[:, None] - values) ** 2)
    [0, 1]
    """

    keeps_updates: ClassVar[bool] = False  # needs the whole cohort at once
    robust: ClassVar[bool] = False  # replaces the mean and ignores the weights
    needs_trust: ClassVar[bool] = False  # judges by the flags that `Trust` gives the clients

    @property
    def leaves_one(self) -> bool:
        """Whether a single update is left, so that there is no disagreement to measure."""
        return False

    @property
    def scales(self) -> bool:
        """Whether `scale` may differ from 1, so that the norm must be known before adding."""
        return False

    def scale(self, norm: float) -> float:
        """What an update of this norm is multiplied with."""
        return 1.0

    def needs(self, n: int) -> str | None:
        """Why n updates are too few, or None."""
        return None

    def select(self, distances_sq: np.ndarray) -> list[int]:
        """Which updates are kept, in cohort order, from all pairs of squared distances."""
        return list(range(len(distances_sq)))

    def trim(self, n: int) -> int:
        """How many values a robust mean drops on each side of every coordinate."""
        return 0

    def leaves_out(self, flags: Sequence[str]) -> bool:
        """Whether a client that `Trust` gives these flags is left out."""
        return False


@dataclass(frozen=True, kw_only=True)
class NormClip(Filter):
    """g · min(1, c/‖g‖): no update is longer than c (Sun et al. 2019, arXiv:1911.07963).

    >>> [NormClip(max_norm=2.0).scale(norm) for norm in (1.0, 8.0)]
    [1.0, 0.25]
    """

    max_norm: Annotated[float, "no update is longer"] = 1.0

    def __post_init__(self) -> None:
        check(self, max_norm=(self.max_norm > 0, "greater than 0"))

    @property
    def scales(self) -> bool:
        return True

    def scale(self, norm: float) -> float:
        return min(1.0, self.max_norm / norm) if norm > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Filter):
    """The m updates with the lowest Krum scores (Blanchard et al. 2017, arXiv:1703.02757).

    Score: the sum of squared distances to the n − f − 2 nearest others. `m` defaults to n − f.

    >>> values = np.array([1.0, 2.0, 3.0, 4.0, 90.0])
    >>> MultiKrum(f=1).select((values[:, None] - values) ** 2)  # all but 90
    [0, 1, 2, 3]
    """

    keeps_updates: ClassVar[bool] = True
    f: Annotated[int, "how many bad clients are reckoned with"] = 1
    m: Annotated[int | None, "how many updates are kept; by default all but f"] = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.f < 0 or self.f != int(self.f):
            raise ValueError(f"{name}(f={self.f!r}): the number of bad clients is 0 or more")
        if self.m is not None and (self.m < 1 or self.m != int(self.m)):
            raise ValueError(f"{name}(m={self.m!r}): at least one update must be kept")

    @property
    def leaves_one(self) -> bool:
        return self.m == 1

    def needs(self, n: int) -> str | None:
        name, least = type(self).__name__, 2 * self.f + 3
        if n < least:
            return (
                f"{name} with f={self.f} needs at least {least} updates, got {n}: "
                "lower f or raise clients_per_round"
            )
        if self.m is not None and self.m > n - self.f:
            return (
                f"{name} with m={self.m} and f={self.f} needs at least {self.m + self.f} "
                f"updates, got {n}: lower m or f or raise clients_per_round"
            )
        return None

    def select(self, distances_sq: np.ndarray) -> list[int]:
        n = len(distances_sq)
        nearest = np.sort(distances_sq + np.diag(np.full(n, np.inf)), axis=1)
        scores = nearest[:, : n - self.f - 2].sum(axis=1)
        best = np.argsort(scores, kind="stable")[: self.m or n - self.f]
        return sorted(int(k) for k in best)


@dataclass(frozen=True, kw_only=True)
class Krum(MultiKrum):
    """The one update with the lowest Krum score (Blanchard et al. 2017, arXiv:1703.02757).

    It leaves one update, whose GSI is 1 by definition: refused with an adapter that compares
    updates; use multi-krum.

    >>> values = np.array([1.0, 2.0, 4.0, 7.0, 90.0])
    >>> Krum(f=1).select((values[:, None] - values) ** 2)  # 2, of score 1² + 2²
    [1]
    """

    m: Annotated[int | None, "how many updates are kept; by default all but f"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m != 1:
            raise ValueError(f"Krum(m={self.m!r}): Krum keeps one update, use MultiKrum")


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Filter):
    """Per coordinate, the mean without the ⌊βn⌋ smallest and largest (Yin et al. 2018).

    Ignores weights. GSI then takes both of its means over what is not dropped. arXiv:1803.01498.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, filter=TrimmedMean(beta=0.2))
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 2.0, 3.0, 4.0, 90.0)])
    >>> server.state["w"]  # −(2 + 3 + 4)/3
    tensor([-3.])
    """

    keeps_updates: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    beta: Annotated[float, "share dropped on each side"] = 0.1

    def __post_init__(self) -> None:
        check(self, beta=(0 <= self.beta < 0.5, "in [0, 0.5)"))

    def trim(self, n: int) -> int:
        return min(math.floor(self.beta * n + 1e-9), (n - 1) // 2)  # 0.3 * 10 is 3, not 2.9999


@dataclass(frozen=True, kw_only=True)
class Median(Filter):
    """Per coordinate, the median (Yin et al. 2018, arXiv:1803.01498).

    Ignores weights. GSI then takes both of its means over the middle. Of an even number of updates,
    the mean of the middle two: a trimmed mean that leaves one or two.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, filter=Median())
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 2.0, 90.0)])
    >>> server.state["w"]
    tensor([-2.])
    """

    keeps_updates: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    def trim(self, n: int) -> int:
        return (n - 1) // 2


@dataclass(frozen=True, kw_only=True)
class Distrust(Filter):
    """Leaves out the clients that `Trust` flags in this round; the mean of the others.

    `drifting` is not among the flags by default: it also finds those who only hold other data.
    It needs the whole cohort, since a client is judged by the others. See docs/trust.md.

    >>> Distrust().leaves_out(["opposed"]), Distrust().leaves_out(["drifting"])
    (True, False)
    """

    keeps_updates: ClassVar[bool] = True
    needs_trust: ClassVar[bool] = True
    flags: Annotated[tuple[str, ...], f"which count, of {', '.join(FLAGS)}"] = FLAGS[1:]

    def __post_init__(self) -> None:
        known = len(self.flags) > 0 and set(self.flags) <= set(FLAGS)
        check(self, flags=(known, f"some of {', '.join(FLAGS)}"))

    def leaves_out(self, flags: Sequence[str]) -> bool:
        """Whether a client with these flags is left out."""
        return not set(self.flags).isdisjoint(flags)


REGISTRY = {
    "none": Filter,
    "norm-clip": NormClip,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "distrust": Distrust,
}
