"""A model's tensors over one flat vector: names, shapes, parameters apart from buffers.

Every tensor starts at a multiple of `row` elements and is followed by zeros up to the next one. So
a sum of squares per tensor is a sum over whole rows, whatever the tensor's size, and a row is
always summed by one thread in one order: the bits depend neither on the number of threads nor
on where an array happens to lie in memory.
"""

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROWS = ((1 << 16, 64), (1 << 22, 512))  # up to so many parameters, rows of so many elements:
LARGEST_ROW = 2048  # short ones waste little on padding, long ones are quicker to measure
BLOCK = 1 << 18  # elements: a block of an update and of the sum stay in the second-level cache
LARGE = 1 << 14  # elements from which a tensor is worth blocks of its own

BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Piece:
    """The elements `span` of the tensor `index`, at `place` within a block."""

    index: int
    span: slice
    place: slice


@dataclass(frozen=True)
class Block:
    """A cache-sized stretch of the flat vector: several small tensors, or a part of a large one."""

    span: slice
    size: int
    pieces: tuple[Piece, ...]
    gaps: tuple[slice, ...]  # the padding within the block
    whole: Piece | None  # the one piece that fills the block without padding, if there is one


class Layout:
    """Where each parameter lies in a flat vector of `size` elements.

    `dtype` is the working precision: float32, or float64 if any parameter is. `aliases` maps a
    tied parameter's further names to its first one: it exists, and is averaged, once. `constants`
    are the names of a module's parameters that ask for no gradient: they are nobody's to send.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        constants: Collection[str] = (),
    ) -> None:
        if not any(t.numel() for t in parameters.values()):
            raise ValueError(
                "the model has no parameters, so there is nothing to average: pass a module with "
                f"parameters, or name its buffers with buffers= (seen: {list(buffers)[:5]})"
            )
        for name, tensor in parameters.items():
            if not tensor.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {tensor.dtype}: parameters are real floating-point "
                    "tensors; name others with buffers="
                )
        self.names = tuple(parameters)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.aliases = dict(aliases or {})
        self.constants = frozenset(constants)
        self.shapes = tuple(tuple(t.shape) for t in parameters.values())
        self.dtypes = tuple(t.dtype for t in parameters.values())
        self.numels = tuple(t.numel() for t in parameters.values())
        self.buffers = {name: (tuple(t.shape), t.dtype) for name, t in buffers.items()}
        self.device = next(iter(parameters.values())).device
        double = torch.float64 in self.dtypes
        self.dtype = torch.float64 if double else torch.float32
        self.exact = all(dtype == self.dtype for dtype in self.dtypes)

        total = sum(self.numels)
        self.row = next((row for most, row in ROWS if total < most), LARGEST_ROW)
        rows = np.array([-(-n // self.row) for n in self.numels])
        ends = np.cumsum(rows)
        self.starts = tuple(int(s) * self.row for s in ends - rows)
        self.size = int(ends[-1]) * self.row
        self._filled = np.flatnonzero(rows)  # tensors that have elements
        self._first_rows = (ends - rows)[self._filled]
        self.blocks = tuple(_blocks(self.starts, self.numels, self.row))
        self.sizes = [block.size for block in self.blocks]
        self.block_rows = [block.size // self.row for block in self.blocks]
        filled = zip(self.starts, self.numels, (*self.starts[1:], self.size), strict=True)
        gaps = (slice(start + numel, end) for start, numel, end in filled)
        self.gaps = tuple(gap for gap in gaps if gap.stop > gap.start)  # where no tensor lies
        empty = [np.arange(0), *(np.arange(gap.start, gap.stop) for gap in self.gaps)]
        self.padding = torch.from_numpy(np.concatenate(empty)).to(self.device)

    def zeros(self) -> Tensor:
        """A flat vector of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The named tensors of a flat vector, as views into it."""
        places = zip(self.names, self.starts, self.numels, self.shapes, strict=True)
        return {name: flat[s : s + n].view(shape) for name, s, n, shape in places}

    def views_of(self, flats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of several flat vectors, each by its vector's name and its own: "m/conv1"."""
        return {
            f"{part}/{name}": view
            for part, flat in flats.items()
            for name, view in self.views(flat).items()
        }

    def places(self, names: Collection[str]) -> Tensor:
        """Where the elements of some tensors lie in a flat vector."""
        spans = zip(self.names, self.starts, self.numels, strict=True)
        parts = [torch.arange(start, start + n) for name, start, n in spans if name in names]
        return torch.cat([torch.arange(0), *parts]).to(self.device)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat vector of named tensors."""
        flat = self.zeros()
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat

    def per_tensor(self, rows: np.ndarray) -> np.ndarray:
        """Sums over the rows of each tensor (the last axis), each tensor by itself in one order."""
        sums = np.zeros((*rows.shape[:-1], len(self.names)))
        if rows.size:
            sums[..., self._filled] = np.add.reduceat(rows, self._first_rows, axis=-1)
        return sums

    def named(self, values: np.ndarray) -> dict[str, float]:
        """One value a tensor, by the tensors' names."""
        return dict(zip(self.names, values.tolist(), strict=True))

    def describe(self) -> list[list[Any]]:
        """[name, shape, dtype, kind] of every tensor, as JSON types."""
        parameters = dict(zip(self.names, zip(self.shapes, self.dtypes, strict=True), strict=True))
        return [
            [name, list(shape), str(dtype).removeprefix("torch."), kind]
            for kind, tensors in (("parameter", parameters), ("buffer", self.buffers))
            for name, (shape, dtype) in tensors.items()
        ]


def _blocks(starts: tuple[int, ...], numels: tuple[int, ...], row: int) -> Iterator[Block]:
    """Whole rows of large tensors by themselves, so that they can be read where they lie; small
    tensors, and the last broken row of large ones, together."""
    pieces: list[Piece] = []
    begin = 0
    for index, (start, numel) in enumerate(zip(starts, numels, strict=True)):
        full = numel // row * row if numel >= LARGE else 0
        if pieces and (full or start + numel - begin > BLOCK):
            yield _block(begin, start, pieces)
            pieces, begin = [], start
        count = max(1, -(-full // BLOCK))  # equal parts, of at most BLOCK elements
        size = max(1, -(-full // (count * row))) * row
        for at in range(0, full, size):
            begin, end = start + at, start + min(at + size, full)
            part = slice(at, end - start)
            yield _block(begin, end, [Piece(index, part, slice(0, end - begin))])
            begin = end
        if numel > full:
            at = start + full - begin
            pieces.append(Piece(index, slice(full, numel), slice(at, at + numel - full)))
    if pieces:
        yield _block(begin, begin + -(-pieces[-1].place.stop // row) * row, pieces)


def _block(start: int, stop: int, pieces: list[Piece]) -> Block:
    starts = [*(p.place.start for p in pieces[1:]), stop - start]
    gaps = (slice(p.place.stop, at) for p, at in zip(pieces, starts, strict=True))
    gaps = tuple(gap for gap in gaps if gap.stop > gap.start)
    return Block(
        span=slice(start, stop),
        size=stop - start,
        pieces=tuple(pieces),
        gaps=gaps,
        whole=pieces[0] if len(pieces) == 1 and not gaps else None,
    )


def as_tensor(value: Any) -> Tensor:
    """A torch view of a tensor, a numpy array or anything with `__array__`."""
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":  # ml_dtypes, as JAX uses it
        return as_tensor(array.view(np.uint16)).view(torch.bfloat16)
    if any(step < 0 for step in array.strides):
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")  # we only read
        return torch.from_numpy(array)


def split(
    model: nn.Module | Mapping[str, Any], buffers: Any = None
) -> tuple[Layout, dict[str, Tensor], dict[str, Tensor]]:
    """The layout, the parameters and the buffers of a module or of a plain state_dict.

    A module knows its buffers, and which of its parameters are trained: those that ask for no
    gradient, if others do, are constants of the layout and not among the parameters. In a plain
    dict, buffers are the integer tensors and the names that end like BatchNorm's statistics;
    `buffers`, a collection of names, overrides both.
    """
    aliases: dict[str, str] = {}
    constants: set[str] = set()
    if isinstance(model, nn.Module):
        state = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        first = {id(p): name for name, p in model.named_parameters()}
        all_names = model.named_parameters(remove_duplicate=False)
        aliases = {name: first[id(p)] for name, p in all_names if first[id(p)] != name}
        buffer_names = state.keys() - first.values() - aliases.keys()
        constants = set(frozen(model)) & state.keys()
        state = {name: t for name, t in state.items() if name not in constants}
        aliases = {name: one for name, one in aliases.items() if name not in constants}
    else:
        state = {name: _named(name, value) for name, value in model.items()}
        real = {n for n, t in state.items() if t.is_floating_point() or t.is_complex()}
        buffer_names = {n for n in state if n not in real or n.endswith(BUFFER_SUFFIXES)}
    if buffers is not None:
        buffer_names = set(buffers)
        if unknown := buffer_names - state.keys():
            raise ValueError(
                f"buffers= names {sorted(unknown)[0]!r}, which the model does not have"
            )
    named_buffers = {name: t for name, t in state.items() if name in buffer_names}
    parameters = {n: t for n, t in state.items() if n not in buffer_names and n not in aliases}
    layout = Layout(parameters, named_buffers, aliases, constants)
    return layout, parameters, named_buffers


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ask for no gradient, under all their names; none, if all are such.

    >>> model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> list(frozen(model))
    ['0.weight', '0.bias']
    """
    named = list(model.named_parameters(remove_duplicate=False))
    if not any(p.requires_grad for _, p in named):
        return {}
    return {name: p for name, p in named if not p.requires_grad}


def twin(model: nn.Module) -> nn.Module:
    """A copy of a module that shares the parameters that are not trained, and nothing else."""
    return copy.deepcopy(model, {id(p): p for p in frozen(model).values()})


def _named(name: str, value: Any) -> Tensor:
    try:
        return as_tensor(value)
    except (TypeError, ValueError) as error:
        nested = isinstance(value, Mapping)
        hint = ": flatten nested parameters, see docs/numpy.md" if nested else ""
        kind = type(value).__name__
        raise ValueError(f"{name!r} is a {kind}, not a tensor or an array{hint}") from error


def stretches(block: Block, scale: list[float]) -> Iterator[tuple[slice, float]]:
    """The parts of a block that share a factor: mostly the block, else runs of small tensors."""
    runs = [
        (s, next(pieces).place.start)
        for s, pieces in groupby(block.pieces, lambda p: scale[p.index])
    ]
    ends = [*(start for _, start in runs[1:]), block.size]
    for (s, start), end in zip(runs, ends, strict=True):
        yield slice(block.span.start + start, block.span.start + end), s


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in its own dtype; what that cannot hold becomes its largest number, not inf."""
    if dtype == x.dtype:
        return x
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)
