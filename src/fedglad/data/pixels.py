"""How stored bytes become a model's inputs: a whole batch of images at a time."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Bytes to numbers, (x/255 − mean)/std; in training also shifted, mirrored and cut out.

    What is random comes from torch's generator, which every client seeds by itself each round.
    Cutout (DeVries & Taylor 2017, arXiv:1708.04552) sets a square to 0, the mean; its centre is
    anywhere in the image, so part of it may fall outside.
    """

    mean: Annotated[tuple[float, ...], "of each channel; none: pixels in [0, 1]"] = ()
    std: Annotated[tuple[float, ...], "of each channel"] = ()
    shift: Annotated[int, "padded by so many black pixels on each side, cropped at random"] = 0
    mirror: Annotated[bool, "left and right exchanged, or not, with equal chances"] = False
    cutout: Annotated[int, "the side of the square"] = 0

    def __call__(self, x: Tensor, training: bool) -> Tensor:
        """The model's inputs of a batch of images (n, channels, height, width)."""
        if training and (self.shift or self.mirror):
            x = self._move(x)
        x = x.to(torch.float32).div_(255)
        if self.mean:
            mean, std = (x.new_tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
            x = x.sub_(mean).div_(std)
        return self._cut(x) if training and self.cutout else x

    def _move(self, x: Tensor) -> Tensor:
        """Every image's own shift and mirroring, as one gather of bytes."""
        n, channels, height, width = x.shape
        x = pad(x, (self.shift,) * 4)
        rows = self._starts(n, x) + torch.arange(height, device=x.device)
        columns = self._starts(n, x) + torch.arange(width, device=x.device)
        if self.mirror:
            mirrored = torch.randint(2, (n, 1), device=x.device) > 0
            columns = torch.where(mirrored, columns.flip(1), columns)
        source = (rows.unsqueeze(2) * x.shape[3] + columns.unsqueeze(1)).view(n, 1, -1)
        moved = x.flatten(2).gather(2, source.expand(n, channels, -1))
        return moved.view(n, channels, height, width)

    def _starts(self, n: int, x: Tensor) -> Tensor:
        return torch.randint(2 * self.shift + 1, (n, 1), device=x.device)

    def _cut(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        inside = [self._span(n, side, x.device) for side in (height, width)]
        square = inside[0].view(n, 1, height, 1) & inside[1].view(n, 1, 1, width)
        return x.masked_fill_(square, 0)

    def _span(self, n: int, side: int, device: torch.device) -> Tensor:
        """For each image, which of its rows (or columns) the square covers."""
        start = torch.randint(side, (n, 1), device=device) - self.cutout // 2
        at = torch.arange(side, device=device)
        return (start <= at) & (at < start + self.cutout)
