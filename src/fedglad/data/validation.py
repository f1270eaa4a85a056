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
        for name in ("prepare", "names"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def size(self, k: int) -> int:
        """How many samples client k trains on."""
        n = self.inner.size(k)
        if k not in self._gives:
            return n
        return n - _count(stream(self.seed, "validation", k), n, self.share)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets that client k trains on."""
        samples, n = self._samples(k)
        return _rows(samples, np.delete(np.arange(n), self._taken(k, n)))

    def test(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the test set, as they were."""
        return self.inner.test()

    def validation_set(self) -> tuple[Tensor, Tensor]:
        """What was taken out of the clients' samples, client after client."""
        return self._validation

    def client_test(self, k: int) -> tuple[Tensor, Tensor] | None:
        """The test samples of client k, if the federation has some; else what was taken out."""
        knows = callable(getattr(self.inner, "client_test", None))
        if knows and (own := self.inner.client_test(k)) is not None:
            return own
        if self.size(k) == self.inner.size(k):
            return None
        return self._held(k)

    @cached_property
    def with_test(self) -> Sequence[int]:
        """The clients that may have test samples: of many, those that gave a share.

        All, if the first of them has its own test samples, which then are not a share.
        """
        asked = clients_with_test(self.inner)
        return self.giving if not asked or self.inner.client_test(asked[0]) is None else asked

    @cached_property
    def _validation(self) -> tuple[Tensor, Tensor]:
        giving = [k for k in self.giving if self.size(k) < self.inner.size(k)]
        if not giving:
            raise ValueError(
                f"data.validation = {self.share} of each client's samples is not one: raise it, or "
                "give the data a validation_set() of its own"
            )
        from fedglad.core.batch import concatenate

        return concatenate([self._held(k) for k in giving])

    def _samples(self, k: int) -> tuple[tuple[Any, Any], int]:
        """All inputs and targets of client k, and how many there are."""
        from fedglad.core.batch import converted, length

        x, y = self.inner.client(k)
        samples = converted(x, dtype=None), converted(y, "y", targets=True, dtype=None)
        return samples, length(samples)

    def _held(self, k: int) -> tuple[Any, Any]:
        """What was taken out of client k's samples."""
        samples, n = self._samples(k)
        return _rows(samples, self._taken(k, n))

    def _labels(self, k: int) -> np.ndarray | None:
        """How many samples of each class client k trains on; None where labels are not known."""
        counts = self.inner.labels(k)
        if counts is None or k not in self._gives:
            return counts
        held = np.asarray(self._held(k)[1])
        return counts - np.bincount(held[held >= 0], minlength=len(counts))  # −100 is no label

    def _taken(self, k: int, n: int) -> np.ndarray:
        return taken(self.seed, k, n, self.share) if k in self._gives else np.arange(0)


def _rows(samples: tuple[Any, Any], rows: np.ndarray) -> tuple[Any, Any]:
    from fedglad.core.batch import take

    return take(samples, rows)


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


def clients_with_test(federation: Any) -> Sequence[int]:
    """The clients that may have test samples of their own; none if the federation knows of none.

    >>> from fedglad.data import Digits
    >>> len(clients_with_test(Digits(clients=4, validation=0.1).load_federation()))
    4
    """
    if not callable(getattr(federation, "client_test", None)):
        return ()
    return getattr(federation, "with_test", range(federation.clients))


def dealt(
    labels: np.ndarray, owners: Sequence[np.ndarray], rows: np.ndarray, seed: int
) -> np.ndarray:
    """A client for each of these rows, which nobody owns: the owner of some row of its class.

    So a client gets as much of every class as its share of that class says, by chance. −1 where no
    client has the class. Where targets are not labels, the owner of any row.

    >>> dealt(np.array([0, 1, 1, 0, 2]), [np.array([0]), np.array([1])], np.array([2, 3, 4]), 0)
    array([ 1,  0, -1])
    """
    owned = np.concatenate(owners)
    owner = np.repeat(np.arange(len(owners)), [len(one) for one in owners])
    draws = stream(seed, "client-test").random(len(rows))
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        return owner[(draws * len(owner)).astype(np.int64)]
    order = np.argsort(labels[owned], kind="stable")
    ascending = labels[owned][order]
    first, end = (np.searchsorted(ascending, labels[rows], side) for side in ("left", "right"))
    place = np.minimum(first + (draws * (end - first)).astype(np.int64), len(owned) - 1)
    return np.where(first < end, owner[order[place]], -1)


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
