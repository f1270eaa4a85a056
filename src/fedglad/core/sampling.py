"""The same few coordinates of every update: what is left of it when it is gone."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedglad.core.layout import Layout
from fedglad.core.validate import Opened

TENSORS = 32  # the largest ones, of which coordinates are taken: a small tensor costs as much time


class Coordinates:
    """Some coordinates of a model's largest tensors.

    `choose` says which of so many elements, in rising order: those of all these tensors end to end.
    """

    def __init__(self, layout: Layout, choose: Callable[[int], np.ndarray]) -> None:
        order = sorted(range(len(layout.numels)), key=lambda i: -layout.numels[i])[:TENSORS]
        tensors = sorted(i for i in order if layout.numels[i])
        ends = np.cumsum([layout.numels[i] for i in tensors])
        chosen = choose(int(ends[-1]))
        starts = ends - [layout.numels[i] for i in tensors]
        places = np.searchsorted(ends, chosen, side="right")
        inside = chosen - starts[places]
        flat = np.array([layout.starts[i] for i in tensors])[places] + inside
        self.flat = torch.from_numpy(flat).to(layout.device)
        self.parts = [
            (i, torch.from_numpy(inside[places == k]).to(layout.device))
            for k, i in enumerate(tensors)
            if (places == k).any()
        ]

    def of(self, update: Opened, base: Tensor) -> Tensor:
        """The coordinates of an update, as a row of float32."""
        if isinstance(update.tensors, Tensor):
            return self.of_rows(update.tensors[None])
        parts = [update.tensors[i][inside].to(base.device, base.dtype) for i, inside in self.parts]
        values = torch.cat(parts)
        return (base[self.flat] - values if update.trained else values).float()[None]

    def of_rows(self, vectors: Tensor) -> Tensor:
        """The coordinates of packed updates, one in every row."""
        return vectors.index_select(1, self.flat).float()
