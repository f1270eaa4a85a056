"""The samples of many clients, side by side for the batched engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad.simulation.engines.base import Federation

Samples = tuple[Tensor, Tensor, np.ndarray]  # inputs, targets, and which rows of them


@dataclass(slots=True)
class Member:
    """A client that trains: its place in the group, its samples and its batches of them."""

    place: int
    client: int
    x: Tensor
    y: Tensor
    rows: np.ndarray  # its rows of x and y
    batches: list[np.ndarray | slice]


def fetch(data: Any, clients: Sequence[int]) -> list[Samples | Exception]:
    """The clients' samples; where they lie if the data set knows, else what each gives."""
    if _locates(type(data)):
        x, y, located = data.locate(clients)
        return [(x, y, rows) for rows in located]
    return [_attempt(data, client) for client in clients]


class Batches:
    """The clients' samples in one tensor, and which of them a step takes."""

    def __init__(self, members: list[Member], device: torch.device) -> None:
        self.members, self.device = members, device
        self.rows = [member.rows for member in members]
        if all(member.x is members[0].x for member in members):
            self.x, self.y = members[0].x, members[0].y
        else:
            self.x = torch.cat([member.x for member in members])
            self.y = torch.cat([member.y for member in members])
            starts = accumulate((len(member.y) for member in members), initial=0)
            self.rows = [start + rows for start, rows in zip(starts, self.rows, strict=False)]

    def take(self, step: int, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
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
            weight = torch.from_numpy(there / sizes[:, None]).to(self.device, torch.float32)
        rows = torch.from_numpy(index.reshape(-1))
        x, y = (whole.index_select(0, rows).unflatten(0, index.shape) for whole in (self.x, self.y))
        return x.to(self.device), y.to(self.device), weight


def _attempt(data: Federation, client: int) -> Samples | Exception:
    try:
        x, y = data.client(client)
        for part in (x, y):
            if not isinstance(part, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"the client has a {type(part).__name__}, not a tensor")
        if not len(y):
            raise ValueError("the client has no samples")
        if len(x) < len(y):
            raise IndexError(f"the client has {len(x)} inputs for {len(y)} targets")
        return x[: len(y)], y, np.arange(len(y))
    except Exception as error:
        return error


def _locates(data: type) -> bool:
    """Whether there is a `locate`, and as new as `client`: a subclass may have only a new one."""
    order = [name for cls in data.__mro__ for name in ("locate", "client") if name in vars(cls)]
    return order[:1] == ["locate"]
