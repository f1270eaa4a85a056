"""What the updates of a cohort add up to, block of positions by block of positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedglad.core.aggregate import BufferMean, Sum
from fedglad.core.layout import Layout, as_tensor
from fedglad.core.validate import Opened
from fedglad.records import POSITIONS


@dataclass(frozen=True, kw_only=True)
class Added:
    """Sums that can be sent: of parameters, what a method adds, and buffers with their weight.

    Weights are over `unit`. Pickled as NumPy arrays, which are read where they lie.
    """

    unit: float
    vectors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    weight: float

    def __reduce__(self) -> tuple[Any, ...]:
        parts = ({n: x.cpu().numpy() for n, x in p.items()} for p in (self.vectors, self.buffers))
        return _added, (self.unit, *parts, self.weight)


def _added(
    unit: float, vectors: Mapping[str, np.ndarray], buffers: Mapping[str, Any], weight: float
) -> Added:
    tensors = ({name: as_tensor(x) for name, x in part.items()} for part in (vectors, buffers))
    first, second = tensors
    return Added(unit=unit, vectors=first, buffers=second, weight=weight)


class Totals:
    """What the updates of a round add up to: themselves, and what goes with them.

    `unit` is the weight that theirs are relative to: the first one's. Within a block they are
    relative to the block's own first one, so that whoever sums it need not know any other.
    """

    def __init__(self, layout: Layout, total: Sum, scales: bool, wants_extra: bool) -> None:
        self.layout = layout
        self.total = total
        self.unfiltered = Sum(layout) if scales else total
        self.extra = Sum(layout) if wants_extra else None
        self.buffers = BufferMean(layout)
        self.unit = 0.0
        self._block = -1
        self._open_buffers = BufferMean(layout)

    def begins(self, updates: Sequence[Opened]) -> dict[int, float]:
        """Those of the next updates that begin a block, and what it is to be multiplied with."""
        found: dict[int, float] = {}
        for k, update in enumerate(updates):
            if (block := update.position // POSITIONS) != self._block:
                self._block = block
                self.unit = self.unit or update.unit
                found[k] = update.unit / self.unit
        return found

    def add_buffers(self, buffers: Mapping[str, Tensor], weight: float, *, begins: bool) -> None:
        """Adds an update's buffers; its block may begin with it."""
        if begins:
            self._close_buffers()
        if buffers:
            self._open_buffers.add(buffers, weight)

    def close(self) -> None:
        """Adds the last block to those before it; what comes now begins another."""
        for total in filter(None, (self.total, self.unfiltered, self.extra)):
            total.close()
        self._close_buffers()
        self._block = -1

    def _close_buffers(self) -> None:
        self.buffers.absorb(self._open_buffers.sums, self._open_buffers.weight)
        self._open_buffers = BufferMean(self.layout)

    def added(self) -> Added | None:
        """All of it; None if there is nothing."""
        self.close()
        if self.unfiltered.empty:
            return None
        sums = {"total": self.total, "unfiltered": self.unfiltered, "extra": self.extra}
        vectors = {
            name: total.flat
            for name, total in sums.items()
            if total and not total.empty and (name != "unfiltered" or total is not self.total)
        }
        return Added(
            unit=self.unit,
            vectors=vectors,
            buffers=self.buffers.sums,
            weight=self.buffers.weight,
        )

    def absorb(self, other: Added | None) -> None:
        """Adds sums that were made elsewhere, in a unit of their own."""
        self.close()
        if other is None:
            return
        self.unit = self.unit or other.unit
        factors = {"total": other.unit / self.unit, "extra": 1.0}
        factors["unfiltered"] = factors["total"]
        for name, vector in other.vectors.items():
            getattr(self, name).absorb(vector.to(self.layout.device), factors[name])
        self.buffers.absorb(other.buffers, other.weight)


def placed(
    updates: Sequence[Opened], weights: Sequence[float]
) -> tuple[list[float], dict[int, float]]:
    """The weights of a whole cohort relative to their blocks' first ones, and what `begins` says.

    Equal ones become 1, so that their sum loses no bits.
    """
    units: dict[int, float] = {}
    relative: list[float] = []
    begins: dict[int, float] = {}
    for k, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        block = update.position // POSITIONS
        if block not in units:
            units[block] = weight
            begins[k] = weight / weights[0]
        relative.append(weight / units[block])
    return relative, begins


@dataclass(eq=False)
class Block:
    """A block of positions that was summed where its clients were trained.

    | field | meaning |
    |---|---|
    | `entries` | its clients' lines in the record, in their order |
    | `accepted` | the updates that are in the sums, those that are far from usual among them |
    | `near`, `far` | the sums of the usual ones, and of the others |
    | `samples` | of each accepted update the few coordinates that trust looks at |
    | `failures` | who failed, with the traceback for the log |
    """

    entries: list[dict[str, Any]]
    accepted: list[Opened]
    near: Added | None
    far: Added | None
    samples: np.ndarray | None = None
    failures: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.entries)
