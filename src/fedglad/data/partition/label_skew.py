"""Label skew: clients of equal size, each with its own mix of classes.

Drawn as the rest of the library draws, and as the code behind FedGLAD's paper did.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedglad.data.partition.base import Partition, check, check_alpha, deal, grouped, ranks


@dataclass(frozen=True, kw_only=True)
class LabelSkew(Partition):
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
        check_alpha(self, self.alpha)

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        n = check(labels, clients)
        by_class, sizes = grouped(labels, rng)
        shares = rng.dirichlet(self.alpha * sizes / n, size=clients - 1)
        return deal(by_class, label_skew_counts(shares, sizes))


@dataclass(frozen=True, kw_only=True)
class FedNLP(LabelSkew):
    """`label-skew` as drawn by the code that the authors of FedGLAD's paper published.

    NumPy's legacy generator, seeded once, shuffles the classes one after the other and then draws
    the clients' shares, the first of which is thrown away. With `seed` 0 and the images of MNIST or
    CIFAR-10 in their official order, these are that code's clients. The generator given to `split`
    is not used.

    >>> labels = np.repeat(np.arange(10), 60)
    >>> parts = FedNLP(alpha=0.1).split(labels, 10, np.random.default_rng(0))
    >>> [len(part) for part in parts] == [60] * 10
    True
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"FedNLP(seed={self.seed!r}): the legacy generator takes 0 … 2³² − 1")

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        n = check(labels, clients)
        legacy = np.random.RandomState(self.seed)
        codes, sizes = ranks(labels)
        by_class = np.split(np.argsort(codes, kind="stable"), np.cumsum(sizes)[:-1])
        for indices in by_class:
            legacy.shuffle(indices)
        shares = legacy.dirichlet(self.alpha * (sizes / n), size=clients + 1)[1:-1]
        if not np.isfinite(shares).all():  # all gamma draws of a client were below 1e-308
            raise ValueError(
                f"FedNLP(alpha={self.alpha!r}): too small for NumPy's legacy generator, which this "
                "partition draws with; raise it, or take label-skew"
            )
        return deal(np.concatenate(by_class), label_skew_counts(shares, sizes, _in_floats))


def portion(left: int, total: int, gap: int) -> int:
    """⌈left/total · gap⌉, what a class with `left` of `total` samples gives to fill a gap."""
    return -(-left * gap // total)


def _in_floats(left: int, total: int, gap: int) -> int:
    """The original's portion: where it is whole, rounding may make it one more."""
    return math.ceil(left / total * gap)


def label_skew_counts(
    shares: np.ndarray, sizes: np.ndarray, gives: Callable[[int, int, int], int] = portion
) -> np.ndarray:
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
        take = want if (want <= left).all() else _reassigned(want.tolist(), left.tolist(), gives)
        counts[k] = take
        left -= counts[k]
    counts[-1] = left
    return counts


def _reassigned(
    want: list[int], left: list[int], gives: Callable[[int, int, int], int]
) -> list[int]:
    """What a client takes of each class when one has run short; `left` is used up."""
    take = [0] * len(want)
    for c, wanted in enumerate(want):
        given = min(wanted, left[c])
        take[c] += given
        left[c] -= given
        if not (gap := wanted - given):
            continue
        # Ascending in what is left, each gives ⌈left/total · gap⌉ until the gap is filled. The
        # shares add up to the gap and none exceeds what is left, as there is always enough for
        # the client: so the original's second pass over a residue finds none.
        total, rest = sum(left), gap
        for other in sorted(filter(left.__getitem__, range(len(left))), key=left.__getitem__):
            given = min(rest, left[other], gives(left[other], total, gap))
            take[other] += given
            left[other] -= given
            rest -= given
            if not rest:
                break
    return take
