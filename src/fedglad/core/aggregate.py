"""Streams updates into Σw·g and, per tensor, ‖g_k‖²: O(1) models of memory for any cohort.

Memory bandwidth is what limits a server, so the flat vector is worked through in blocks that fit
the cache: a block of an update is read from memory once, added, and measured while it is there.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedglad.core.layout import BLOCK, Block, Layout
from fedglad.core.threads import share
from fedglad.core.validate import Opened

Updates = Sequence[Opened | Tensor] | Tensor
"""A bare tensor in the sequence is a packed vector; the rows of a matrix are many."""

TINY = 1e-30  # squared norms below it may have lost float32 squares to underflow: sum them again


class Sum:
    """A running Σ w·x in a flat vector that is allocated once and used again every round.

    The first block of positions is summed in `flat` itself, each further one beside it, in `_part`,
    until the next one begins. `factor` turns the sum into a mean. Set before the last pass, that
    happens while the sum is in the cache; set later, `mean_sq` does it.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flat = layout.zeros()
        self._part: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        self.empty = True
        self.factor: float | None = None
        self._open: float | None = None  # what the block beside `flat` will be multiplied with
        self._norms: Tensor | None = None  # of the mean's rows

    def close(self) -> None:
        """Adds the last block, if it is one beside `flat`."""
        if self._open is not None and self._part is not None:
            self.flat.add_(self._part, alpha=self._open)
            self._open = None

    def absorb(self, other: Tensor, factor: float) -> None:
        """Adds another sum, times a factor."""
        self.close()
        if self.empty:
            torch.mul(other, factor, out=self.flat)
        else:
            self.flat.add_(other, alpha=factor)
        self.empty = False

    def passing(self, weights: Sequence[float], begins: Mapping[int, float]) -> "Pass":
        """What the next updates do to the sum; those in `begins` open a block, which counts so many
        times as its weights say."""
        steps: list[Step] = []
        empty, opened = self.empty, self._open
        for k, weight in enumerate(weights):
            closes, sets = None, empty
            if k in begins and not empty:
                closes, opened, sets = opened, begins[k], True
            steps.append((weight, opened is not None, sets, closes))
            empty = False
        parts: Sequence[Tensor] = ()
        if any(aside for _, aside, *_ in steps):
            self._part = self.layout.zeros() if self._part is None else self._part
            parts = self._part.split(self.layout.sizes)
        flats = self.flat.split(self.layout.sizes)
        return Pass(self, steps, flats, parts, opened)

    def passed(self, opened: float | None) -> None:
        """Notes that the updates of a pass are in it."""
        self.empty, self._open = False, opened

    def finish(self, block: Block, factor: float) -> None:
        assert self._norms is not None
        x = self.flat[block.span].mul_(factor).view(-1, self.layout.row)
        first = block.span.start // self.layout.row
        vector_norm(x, dim=1, out=self._norms[first : first + len(x)])

    def finishing(self, factor: float) -> None:
        """The sum becomes a mean by this, block by block."""
        self.factor = factor
        self._norms = self.flat.new_empty(self.layout.size // self.layout.row)

    def mean_sq(self, factor: float) -> np.ndarray:
        """‖ḡ‖² of each tensor of the mean, factor · Σ w·x, which `flat` then is."""
        if self.factor is None:
            self.close()
            self.finishing(factor)
            share(self.layout.blocks, lambda: lambda block: self.finish(block, factor))
        assert self.factor == factor
        assert self._norms is not None
        rows = self._norms.cpu().numpy()
        return _squares(self.layout, rows[None], [self.flat], self.flat)[0]


Step = tuple[float, bool, bool, float | None]
"""An update's weight, whether it goes beside `flat`, whether it is the first there, and what the
block that it closes is multiplied with."""


@dataclass(slots=True)
class Pass:
    """A sum while updates are added to it, stretch of the layout by stretch."""

    total: Sum
    steps: list[Step]
    flats: Sequence[Tensor]
    parts: Sequence[Tensor]
    opened: float | None

    def add(self, at: int, k: int, x: Tensor) -> None:
        """Update k's part in a stretch."""
        weight, aside, sets, closes = self.steps[k]
        if closes is not None:
            self.flats[at].add_(self.parts[at], alpha=closes)
        target = self.parts[at] if aside else self.flats[at]
        if sets:
            torch.mul(x, weight, out=target)
        else:
            target.add_(x, alpha=weight)

    def finish(self, at: int, block: Block) -> None:
        """The stretch as a part of the mean, if this is the last pass."""
        if self.total.factor is None:
            return
        if self.opened is not None:
            self.flats[at].add_(self.parts[at], alpha=self.opened)
        self.total.finish(block, self.total.factor)

    def done(self) -> None:
        """After the last stretch."""
        self.total.passed(self.opened if self.total.factor is None else None)


class BufferMean:
    """Buffers of trained models: floats are averaged by weight, counters take the maximum."""

    def __init__(self, layout: Layout) -> None:
        self.kinds = layout.buffers
        self.sums: dict[str, Tensor] = {}
        self.weight = 0.0

    def add(self, buffers: Mapping[str, Tensor], weight: float) -> None:
        for name, value in buffers.items():
            part = value.double() * weight if value.is_floating_point() else value.clone()
            self._merge(name, part)
        self.weight += weight if buffers else 0.0

    def absorb(self, sums: Mapping[str, Tensor], weight: float) -> None:
        """Adds what another has."""
        for name, value in sums.items():
            self._merge(name, value)
        self.weight += weight

    def _merge(self, name: str, value: Tensor) -> None:
        if (old := self.sums.get(name)) is None:
            self.sums[name] = value
        else:
            self.sums[name] = old + value if value.is_floating_point() else larger(old, value)

    def trimmed(self, clients: Sequence[Mapping[str, Tensor]], trim: int) -> None:
        """Takes the trimmed mean, and of counters the largest that is not trimmed."""
        there = [buffers for buffers in clients if buffers]
        trim = min(trim, (len(there) - 1) // 2)
        for name in there[0] if there else ():
            values = torch.stack([buffers[name].double() for buffers in there]).sort(dim=0).values
            used = values[trim : len(there) - trim]
            whole = not self.kinds[name][1].is_floating_point
            self.sums[name] = used[-1].to(self.kinds[name][1]) if whole else used.mean(dim=0)
        self.weight = 1.0

    def mean(self) -> dict[str, Tensor]:
        """The new buffers, in their own dtypes; empty if no update has any."""
        means = {n: s / self.weight if s.is_floating_point() else s for n, s in self.sums.items()}
        return {name: mean.to(self.kinds[name][1]) for name, mean in means.items()}


def larger(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two whole numbers, element by element."""
    if a.dtype in (torch.uint16, torch.uint32, torch.uint64):  # of which torch takes no maximum
        larger = np.maximum(a.cpu().numpy(), b.cpu().numpy())
        return torch.from_numpy(np.asarray(larger)).to(a.device)
    return torch.maximum(a, b)


def accumulate(
    layout: Layout,
    updates: Updates,
    base: Tensor,
    into: Sequence[tuple[Sum, Sequence[float]]] = (),
    *,
    begins: Mapping[int, float] | None = None,
    measure: bool = True,
) -> np.ndarray:
    """One pass over the updates: adds w_k·g_k to each sum of `into` and returns ‖g_k‖² (k, tensor).

    An update that holds a trained model counts as `base` − θ_k. `begins` are the updates with which
    a new block of positions begins, see `Sum.passing`.
    """
    if measure and not into and len(layout.blocks) == 1:
        stacked = _matrix(updates)
        if stacked is not None:
            norms = vector_norm(stacked.reshape(len(stacked), -1, layout.row), dim=2)
            return _squares(layout, norms.cpu().numpy(), updates, base)
    norms = base.new_empty(len(updates), layout.size // layout.row if measure else 0)
    rows = [row.split(layout.block_rows) for row in norms] if measure else []
    there = [_parts(layout, update) for update in updates]
    lists = _lists(layout, updates)
    passes = [total.passing(weights, begins or {}) for total, weights in into]

    def worker() -> Callable[[tuple[int, Block]], None]:
        scratch = torch.empty(min(BLOCK, layout.size), dtype=layout.dtype, device=layout.device)
        return lambda place: one(*place, scratch)

    def one(at: int, block: Block, scratch: Tensor) -> None:
        for gap in block.gaps:
            scratch[gap] = 0
        together = _gather(layout, block, lists)
        for k, update in enumerate(updates):
            x = there[k][at]
            if x is None:
                x = _read(layout, block, update, base, scratch) if together is None else together[k]
            for each in passes:
                each.add(at, k, x)
            if measure and together is None:
                vector_norm(x.view(-1, layout.row), dim=1, out=rows[k][at])
        if measure and together is not None:
            first = block.span.start // layout.row
            measured = vector_norm(together.view(len(updates), -1, layout.row), dim=2)
            norms[:, first : first + measured.shape[1]] = measured
        for each in passes:
            each.finish(at, block)

    share(enumerate(layout.blocks), worker)
    for each in passes:
        each.done()
    if not measure:
        return np.empty((0, len(layout.names)))
    return _squares(layout, norms.cpu().numpy(), updates, base)


def _parts(layout: Layout, update: Opened | Tensor) -> Sequence[Tensor | None]:
    """The blocks of a packed vector; None for those of any other update."""
    tensors = update if isinstance(update, Tensor) else update.tensors
    if isinstance(tensors, Tensor):
        return (tensors,) if len(layout.sizes) == 1 else tensors.split(layout.sizes)
    return [None] * len(layout.blocks)


def _matrix(updates: Updates) -> Tensor | None:
    """The packed vectors of the updates as rows; None unless they all are such."""
    if isinstance(updates, Tensor):
        return updates
    tensors = [x if isinstance(x, Tensor) else x.tensors for x in updates]
    vectors = [x for x in tensors if isinstance(x, Tensor)]
    return torch.stack(vectors) if vectors and len(vectors) == len(tensors) else None


def _squares(layout: Layout, norms: np.ndarray, updates: Updates, base: Tensor) -> np.ndarray:
    """‖g_k‖² (k, tensor) from the norms of the rows, (k, row)."""
    squares = layout.per_tensor(np.square(norms, dtype=np.float64))
    for k, i in zip(*np.nonzero(squares < TINY), strict=True):
        squares[k, i] = _small(layout, int(i), updates[k], base)
    return squares


def norms_sq(layout: Layout, flat: Tensor) -> np.ndarray:
    """‖x‖² of each tensor of a packed vector."""
    return accumulate(layout, [flat], flat)[0]


def products(layout: Layout, a: Tensor, b: Tensor) -> np.ndarray:
    """⟨a, b⟩ of each tensor of two packed vectors."""
    rows = a.new_empty(layout.size // layout.row)

    def one(block: Block) -> None:
        product = (a[block.span] * b[block.span]).view(-1, layout.row)
        first = block.span.start // layout.row
        torch.sum(product, 1, out=rows[first : first + len(product)])

    share(layout.blocks, lambda: one)
    return layout.per_tensor(rows.double().cpu().numpy())


def pack(layout: Layout, update: Opened, base: Tensor) -> Tensor:
    """The update's difference as a new packed vector."""
    flat = layout.zeros()
    for block, x in zip(layout.blocks, packed_blocks(layout, update, base), strict=True):
        flat[block.span] = x
    return flat


def packed_blocks(layout: Layout, update: Opened, base: Tensor) -> Iterator[Tensor]:
    """The blocks of what `pack` gives, one after the other; the next may overwrite the last."""
    scratch = torch.empty(min(BLOCK, layout.size), dtype=layout.dtype, device=layout.device)
    for block in layout.blocks:
        for gap in block.gaps:
            scratch[gap] = 0
        yield _read(layout, block, update, base, scratch)


def _read(
    layout: Layout, block: Block, update: Opened | Tensor, base: Tensor, scratch: Tensor
) -> Tensor:
    """The block of an update: the caller's own memory if its form allows, else scratch.

    The caller has zeroed the block's padding in scratch; base's is zero, so it stays so.
    """
    tensors = update if isinstance(update, Tensor) else update.tensors
    if isinstance(tensors, Tensor):
        return tensors if block.size == layout.size else tensors[block.span]
    assert isinstance(update, Opened)
    whole = block.whole
    if whole and (x := tensors[whole.index]).dtype == layout.dtype and x.device == layout.device:
        x = x[whole.span]
    else:
        x = scratch[: block.size]
        for piece in block.pieces:
            x[piece.place] = tensors[piece.index][piece.span]
    return torch.sub(base[block.span], x, out=scratch[: block.size]) if update.trained else x


def _gather(layout: Layout, block: Block, lists: list[list[Tensor]]) -> Tensor | None:
    """A block of small tensors from all updates at once, (k, element): fewer, larger copies.

    None where each is better read for itself.
    """
    if block.whole or not lists or len(lists) * block.size > BLOCK:
        return None
    gathered = torch.zeros(len(lists), block.size, dtype=layout.dtype, device=layout.device)
    for piece in block.pieces:
        gathered[:, piece.place] = torch.stack(
            [tensors[piece.index][piece.span] for tensors in lists]
        )
    return gathered


def _lists(layout: Layout, updates: Updates) -> list[list[Tensor]]:
    """The tensors of the updates; none unless all are differences, tensor by tensor, as we work."""
    lists: list[list[Tensor]] = []
    for update in updates:
        if isinstance(update, Tensor) or isinstance(update.tensors, Tensor) or update.trained:
            return []
        if any((x.dtype, x.device) != (layout.dtype, layout.device) for x in update.tensors):
            return []
        lists.append(update.tensors)
    return lists


def _small(layout: Layout, index: int, update: Opened | Tensor, base: Tensor) -> float:
    """‖g‖² of one tensor in float64, for squares that float32 cannot hold."""
    span = slice(layout.starts[index], layout.starts[index] + layout.numels[index])
    if isinstance(update, Tensor):
        x = update[span]
    elif isinstance(update.tensors, Tensor):
        x = update.tensors[span]
    else:
        x = update.tensors[index].to(layout.device, layout.dtype)
        if update.trained:
            x = base[span] - x
    if not bool(x.any()):
        return 0.0
    parts = (part.double().cpu().numpy() for part in x.split(BLOCK))
    return float(sum(np.square(part).sum() for part in parts))


def totals_sq(squares: np.ndarray) -> list[float]:
    """‖g_k‖² over all tensors; NaN where it is not finite."""
    finite = np.isfinite(squares.sum(axis=1))
    pairs = zip(squares.tolist(), finite, strict=True)
    return [math.fsum(row) if good else math.nan for row, good in pairs]
