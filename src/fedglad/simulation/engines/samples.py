"""The samples of many clients, side by side for the batched engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad.core import batch
from fedglad.simulation.engines.base import Federation

Samples = tuple[Any, Any, np.ndarray]  # inputs, targets, and which rows of them


@dataclass(slots=True)
class Member:
    """A client that trains: its place in the group, its samples and its batches of them."""

    place: int
    client: int
    x: Any
    y: Any
    rows: np.ndarray  # its rows of x and y
    batches: list[np.ndarray | slice]

    def kind(self) -> tuple[Any, ...]:
        """Structure, shapes and dtypes of its samples: those of one kind can be concatenated."""
        leaves = batch.tree_map(lambda leaf: (tuple(leaf.shape[1:]), leaf.dtype), (self.x, self.y))
        return (repr(leaves),)


def fetch(
    data: Any, clients: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[Samples | Exception]:
    """The clients' samples; where they lie if the data set knows, else what each gives."""
    if _locates(type(data)):
        x, y, located = data.locate(clients)
        if (
            batch.converted(x, dtype=dtype) is x
            and batch.converted(y, targets=True, dtype=dtype) is y
        ):
            return [(x, y, rows) for rows in located]
    return [_attempt(data, client, dtype) for client in clients]


class Batches:
    """The clients' samples in one tensor, and which of them a step takes."""

    def __init__(self, members: list[Member], device: torch.device) -> None:
        self.members, self.device = members, device
        self.rows = [member.rows for member in members]
        if all(member.x is members[0].x for member in members):
            self.x, self.y = members[0].x, members[0].y
        else:
            self.x = batch.concatenate([member.x for member in members])
            self.y = batch.concatenate([member.y for member in members])
            starts = accumulate((batch.length(member.x) for member in members), initial=0)
            self.rows = [start + rows for start, rows in zip(starts, self.rows, strict=False)]

    def take(self, step: int, count: int) -> tuple[Any, Any, Tensor | None]:
        """Inputs and targets (client, sample) of the first clients, and what each counts for."""
        pairs = zip(self.rows[:count], self.members, strict=False)
        chosen = [rows[member.batches[step]] for rows, member in pairs]
        sizes = np.array([len(rows) for rows in chosen])
        weight = None
        if sizes.min() == sizes.max():
            index = np.concatenate(chosen).reshape(count, -1)
        else:
            index = np.empty((count, sizes.max()), np.int64)
            for filled, rows in zip(index, chosen, strict=True):
                filled[: len(rows)] = rows
                filled[len(rows) :] = rows[0]  # its own: NaN times 0 is NaN
            there = np.arange(index.shape[1]) < sizes[:, None]
            weight = torch.from_numpy(there / sizes[:, None]).to(self.device)
        rows = torch.from_numpy(index.reshape(-1))

        def chosen_of(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, rows).unflatten(0, index.shape).to(self.device)

        x, y = (batch.tree_map(chosen_of, whole) for whole in (self.x, self.y))
        return x, y, weight


def _attempt(data: Federation, client: int, dtype: torch.dtype) -> Samples | Exception:
    try:
        x, y = batch.samples(data.client(client), dtype)
        if not (n := batch.length(x)):
            raise ValueError("the client has no samples")
        return x, y, np.arange(n)
    except Exception as error:
        return error


def _locates(data: type) -> bool:
    """Whether there is a `locate`, and as new as `client`: a subclass may have only a new one."""
    order = [name for cls in data.__mro__ for name in ("locate", "client") if name in vars(cls)]
    return order[:1] == ["locate"]
