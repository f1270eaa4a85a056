"""The average of a server's past models, as it is kept, saved and read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedglad.averages import Average
from fedglad.core.layout import Layout


class Averaged:
    """x, and what its rule keeps beside it; `count` is how many models are in it.

    Float buffers (BatchNorm's statistics) are averaged as parameters are; others are the newest.
    """

    def __init__(
        self, average: Average, layout: Layout, theta: Tensor, buffers: Mapping[str, Tensor]
    ) -> None:
        self.average, self.layout, self.count = average, layout, 0
        self.x = theta.clone()
        self.past = [torch.zeros_like(theta) for _ in range(average.keeps())]
        self.buffers = {name: value.clone() for name, value in buffers.items()}
        self.past_buffers = [
            {n: torch.zeros_like(b) for n, b in buffers.items() if b.is_floating_point()}
            for _ in self.past
        ]

    def follow(self, theta: Tensor, span: slice) -> None:
        """Takes in a stretch of θ, which has just been stepped."""
        past = [vector[span] for vector in self.past]
        self.average.follow(self.x[span], theta[span], past, self.count)

    def finish(self, buffers: Mapping[str, Tensor]) -> None:
        """Takes in the buffers: the round is over."""
        for name, value in buffers.items():
            if value.is_floating_point():
                past = [kept[name] for kept in self.past_buffers]
                self.average.follow(self.buffers[name], value, past, self.count)
            else:
                self.buffers[name].copy_(value)
        self.count += 1

    def tensors(self) -> dict[str, Tensor]:
        """All that is saved of it, as named live views."""
        flats = {"average/params": self.x}
        flats |= {f"average/{k}/params": past for k, past in enumerate(self.past)}
        parts = {"average": self.buffers}
        parts |= {f"average/{k}": kept for k, kept in enumerate(self.past_buffers)}
        kept = {f"{part}/buffers/{n}": b for part, own in parts.items() for n, b in own.items()}
        return self.layout.views_of(flats) | kept
