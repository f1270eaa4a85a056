"""The same few coordinates of every update: what is left of it when it is gone."""

import numpy as np
import torch
from torch import Tensor

from fedglad.core.layout import Layout
from fedglad.core.validate import Opened

TENSORS = 32  # the largest ones, of which coordinates are taken: a small tensor costs as much time


class Coordinates:
    """Some coordinates of a model's largest tensors.

    `chosen` are their places, in rising order, among the elements of `tensors` put end to end.
    """

    def __init__(self, layout: Layout, chosen: np.ndarray, tensors: list[int]) -> None:
        ends = np.cumsum([layout.numels[i] for i in tensors])
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
        """The coordinates of an update, in float32."""
        if isinstance(update.tensors, Tensor):
            return update.tensors[self.flat].float()
        parts = [update.tensors[i][inside].to(base.device, base.dtype) for i, inside in self.parts]
        values = torch.cat(parts)
        return (base[self.flat] - values if update.trained else values).float()


def largest(layout: Layout) -> list[int]:
    """The largest tensors, in their order."""
    order = sorted(range(len(layout.numels)), key=lambda i: -layout.numels[i])[:TENSORS]
    return sorted(i for i in order if layout.numels[i])
