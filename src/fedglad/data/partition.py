"""Partitions: which samples of a data set each client owns.

Every partition is a function of the labels, the number of clients and a generator, and gives
each index to exactly one client.
"""

import difflib
import math
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np


class Partition(Protocol):
    """The settings of a partition, and the partition itself."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The indices of each client's samples."""
        ...


@dataclass(frozen=True, kw_only=True)
class LabelSkew:
    """Clients of equal size whose label shares are q ~ Dir(α·p), p the shares of the whole set.

    Client after client takes round(q_c·L) samples of each class c, L = ⌊n/N⌋; what a class lacks
    is *reassigned* to the others in proportion to what they have left; the last client gets all
    that is left. FedNLP's label skew (Lin et al. 2022, arXiv:2104.08815), used by FedGLAD's paper.

    `alpha` is the *total* concentration: with 10 balanced classes, 0.1 here is the symmetric
    Dirichlet of 0.01 per class of most other tools (mean share of a client's largest class about
    0.87; a symmetric 0.1 has 0.66).

    >>> labels = np.repeat(np.arange(10), 60)
    >>> parts = LabelSkew(alpha=0.1).split(labels, 10, np.random.default_rng(0))
    >>> [len(part) for part in parts] == [60] * 10
    True
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not 1e-100 <= self.alpha < math.inf:  # below, α·p could underflow to 0
            raise ValueError(
                f"LabelSkew(alpha={self.alpha!r}): must be above 0 and finite; small values are "
                "skewed, large ones near to iid"
            )

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The indices of each client's samples, class by class."""
        n = _check(labels, clients)
        _, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        shuffled = rng.permutation(n)
        small = codes.astype(np.uint16) if len(sizes) < 1 << 16 else codes  # sorts 10× faster
        by_class = shuffled[np.argsort(small[shuffled], kind="stable")]
        shares = rng.dirichlet(self.alpha * sizes / n, size=clients - 1)
        counts = label_skew_counts(shares, sizes)

        # Client k's samples of class c lie together, after those of the clients before it: so the
        # blocks are moved from class order to client order with one shift each.
        source = np.cumsum(counts.T).reshape(counts.T.shape).T - counts
        target = np.cumsum(counts).reshape(counts.shape) - counts
        shift = np.repeat((target - source).T.ravel(), counts.T.ravel())
        by_client = np.empty_like(by_class)
        by_client[np.arange(n) + shift] = by_class
        return np.split(by_client, np.cumsum(counts.sum(axis=1))[:-1])


def label_skew_counts(shares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How many samples of each class each client gets: one row more than there are `shares`.

    `shares` are the drawn q of all clients but the last, `sizes` the classes' sample counts.
    """
    clients = len(shares) + 1
    room = int(sizes.sum()) // clients
    # round(q_c·L), capped by the room that the classes before have left; the last fills it all.
    filled = np.minimum(np.cumsum(np.rint(shares * room).astype(np.int64), axis=1), room)
    filled[:, -1] = room
    wanted = np.diff(filled, axis=1, prepend=0)

    counts = np.empty((clients, len(sizes)), dtype=np.int64)
    left = sizes.astype(np.int64)
    for k, want in enumerate(wanted):
        take = want if (want <= left).all() else _reassigned(want.tolist(), left.tolist())
        counts[k] = take
        left -= counts[k]
    counts[-1] = left
    return counts


def _reassigned(want: list[int], left: list[int]) -> list[int]:
    """What a client takes of each class when one has run short; `left` is used up."""
    take = [0] * len(want)
    for c, wanted in enumerate(want):
        own = min(wanted, left[c])
        take[c] += own
        left[c] -= own
        if not (gap := wanted - own):
            continue
        # Ascending in what is left, each gives ⌈left/total · gap⌉ until the gap is filled. The
        # shares add up to the gap and none exceeds what is left, as there is always enough for
        # the client: so the original's second pass over a residue finds none.
        total, rest = sum(left), gap
        for other in sorted(range(len(left)), key=left.__getitem__):
            given = min(rest, -(-left[other] * gap // total))
            take[other] += given
            left[other] -= given
            rest -= given
    return take


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Every client gets a random part of the whole; sizes differ by at most one."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The indices of each client's samples."""
        return np.array_split(rng.permutation(_check(labels, clients)), clients)


def _check(labels: np.ndarray, clients: int) -> int:
    """The number of samples, if it is enough for so many clients."""
    if labels.ndim != 1:
        raise ValueError(f"labels must be one vector, got the shape {labels.shape}")
    if clients < 1:
        raise ValueError(f"clients={clients}: a partition needs at least one client")
    if clients > len(labels):
        raise ValueError(
            f"{clients} clients cannot share {len(labels)} samples: lower clients to at most "
            f"{len(labels)}"
        )
    return len(labels)


REGISTRY: dict[str, type[Partition]] = {"label-skew": LabelSkew, "iid": Iid}


def named(name: str, **settings: float) -> Partition:
    """The partition of that name; settings that it does not have are left out."""
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(REGISTRY)}"
        raise ValueError(f"unknown partition {name!r}: {hint}")
    kind = REGISTRY[name]
    own = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    return kind(**{key: value for key, value in settings.items() if key in own})
