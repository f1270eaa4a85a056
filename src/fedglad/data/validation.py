"""A validation set: a share of the clients' training samples that no client trains on.

Whatever is chosen by looking at scores, such as the best round's model, is chosen by it, so that
the test set has been looked at by nobody when it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from fedglad.core.checks import check
from fedglad.rng import stream

if TYPE_CHECKING:
    from torch import Tensor

VALIDATION = "share of the training samples that no client has: the best round is chosen by them"

ASKED = 1_000
"""Clients whose samples are looked through: of more, so many are drawn that give a share."""


def check_share(settings: Any, share: float) -> None:
    """Raises ValueError unless something is left to train on."""
    check(settings, validation=(0 <= share < 1, "in [0, 1)"))


def taken(seed: int, client: int, n: int, share: float) -> np.ndarray:
    """Which of a client's n samples are for validation, ascending; one at least stays.

    There are n · share of them, rounded up or down at random so that small clients give theirs.

    >>> taken(0, client=7, n=20, share=0.25).tolist()
    [10, 13, 15, 17, 19]
    """
    rng = stream(seed, "validation", client)
    count = _count(rng, n, share)
    return np.sort(rng.permutation(n)[:count])


def _count(rng: np.random.Generator, n: int, share: float) -> int:
    """The first draw of a client's stream, so that to ask for a size orders no samples."""
    return max(0, min(n - 1, int(n * share + rng.random())))


class HeldOut:
    """A federation without the share of each client's samples that is its validation set.

    Of more than a thousand clients a thousand, drawn by the seed, give a share; the others keep
    all their samples. Each of those is asked for its samples when the validation set is made.
    """

    def __init__(self, inner: Any, share: float, seed: int) -> None:
        self.inner, self.share, self.seed = inner, share, seed
        self.clients: int = inner.clients
        self.giving: Sequence[int] = range(inner.clients)
        if inner.clients > ASKED:
            drawn = stream(seed, "validation").choice(inner.clients, ASKED, replace=False)
            self.giving = sorted(drawn.tolist())
        self._gives = frozenset(self.giving)
        if hasattr(inner, "classes"):
            self.classes = inner.classes
        if hasattr(inner, "labels"):
            self.labels = self._labels
        if hasattr(inner, "prepare"):
            self.prepare = inner.prepare

    def size(self, k: int) -> int:
        """How many samples client k trains on."""
        n = self.inner.size(k)
        if k not in self._gives:
            return n
        return n - _count(stream(self.seed, "validation", k), n, self.share)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets that client k trains on."""
        x, y = self.inner.client(k)
        n = _length(x)
        rows = np.delete(np.arange(n), self._taken(k, n))
        return _rows(x, rows), _rows(y, rows)

    def test(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the test set, as they were."""
        return self.inner.test()

    def validation_set(self) -> tuple[Tensor, Tensor]:
        """What was taken out of the clients' samples, client after client."""
        return self._validation

    @cached_property
    def _validation(self) -> tuple[Tensor, Tensor]:
        from fedglad.core import batch

        xs: list[Any] = []
        ys: list[Any] = []
        for k in self.giving:
            if self.size(k) < self.inner.size(k):
                x, y = self.inner.client(k)
                rows = self._taken(k, _length(x))
                xs.append(_rows(x, rows))
                ys.append(_rows(y, rows))
        if not xs:
            raise ValueError(
                f"data.validation = {self.share} of each client's samples is not one: raise it, or "
                "give the data a validation_set() of its own"
            )
        return batch.concatenate(xs), batch.concatenate(ys)

    def _labels(self, k: int) -> np.ndarray | None:
        """How many samples of each class client k trains on; None where labels are not known."""
        counts = self.inner.labels(k)
        if counts is None or k not in self._gives:
            return counts
        y = np.asarray(self.inner.client(k)[1])
        held = y[self._taken(k, len(y))]
        return counts - np.bincount(held[held >= 0], minlength=len(counts))  # −100 is no label

    def _taken(self, k: int, n: int) -> np.ndarray:
        return taken(self.seed, k, n, self.share) if k in self._gives else np.arange(0)


def _length(tree: Any) -> int:
    from fedglad.core import batch

    return batch.length(tree)


def _rows(tree: Any, rows: np.ndarray) -> Any:
    """The samples of a tensor, an array, or a tuple or dict of them, as tensors."""
    import torch

    from fedglad.core import batch

    return batch.tree_map(lambda leaf: torch.as_tensor(leaf)[rows], tree)


def held_out(federation: Any, share: float, seed: int = 0) -> Any:
    """The federation with a validation set: a share of each client's samples, taken out by a seed.

    One that has a validation set already, or a share of 0, stays as it is.

    >>> from fedglad.data import Synthetic
    >>> data = held_out(Synthetic(clients=3, samples=20), 0.25)
    >>> [data.size(k) for k in range(3)], len(data.validation_set()[1])
    ([15, 15, 15], 15)
    """
    if not share or validation_of(federation) is not None:
        return federation
    made = HeldOut(federation, share, seed)
    made.validation_set()  # raises if there is none
    return made


def validation_of(federation: Any) -> tuple[Tensor, Tensor] | None:
    """The validation set of a federation; None where it has none."""
    return getattr(federation, "validation_set", lambda: None)()


def with_validation(settings: type, source: str) -> type:
    """The class of a user's data settings with a field `validation`, if it has none.

    `source` is the name it was asked for by, "package.module:Class".
    """
    if any(one.name == "validation" for one in fields(settings)):
        return settings
    own: Any = settings

    def check_all(self: Any) -> None:
        getattr(super(made, self), "__post_init__", lambda: None)()
        check_share(self, self.validation)

    added = {**getattr(own, "added", {}), "validation": 0.0}
    namespace = {
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "__post_init__": check_all,
        "own_function": getattr(own, "own_function", source),
        "added": added,
    }
    share = ("validation", Annotated[float, VALIDATION], field(default=0.0, kw_only=True))
    frozen = own.__dataclass_params__.frozen
    made = make_dataclass(own.__name__, [share], bases=(own,), namespace=namespace, frozen=frozen)
    return made
