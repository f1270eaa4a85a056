"""Label skew with the very draws of the code behind the paper."""

import math
from dataclasses import dataclass

import numpy as np

from fedglad.data.partition.base import check, deal, ranks
from fedglad.data.partition.label_skew import LabelSkew, label_skew_counts


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


def _in_floats(left: int, total: int, gap: int) -> int:
    """The original's portion: where it is whole, rounding may make it one more."""
    return math.ceil(left / total * gap)
