"""MNIST and CIFAR-10, and how stored bytes become a model's inputs: a whole batch at a time."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedglad.data import store
from fedglad.data.federation import Partitioned
from fedglad.data.split import Split


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Bytes to numbers, (x/255 − mean)/std; in training also shifted, mirrored and cut out.

    What is random comes from torch's generator, which every client seeds by itself each round.

    | field | meaning |
    |---|---|
    | `mean`, `std` | of each channel; none: pixels in [0, 1] |
    | `shift` | padded by so many black pixels on each side, then cropped at random |
    | `mirror` | left and right exchanged, or not, with equal chances |
    | `cutout` | side of a square set to 0, the mean (DeVries & Taylor 2017, arXiv:1708.04552); |
    | | its centre is anywhere in the image, so part of it may fall outside |
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shift: int = 0
    mirror: bool = False
    cutout: int = 0

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


@dataclass(frozen=True, kw_only=True)
class MNIST(Split):
    """Handwritten digits (LeCun et al. 1998): 60,000 + 10,000 images of 1×28×28, in [0, 1]."""

    samples: ClassVar[int | None] = 60_000

    def load_federation(self) -> Partitioned:
        """The images with their owners; fetched and prepared when asked for the first time."""
        return _federation("mnist", self, Pixels())


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Split):
    """Photographs of ten kinds (Krizhevsky 2009): 50,000 + 10,000 images of 3×32×32, normalised."""

    samples: ClassVar[int | None] = 50_000

    augment: Annotated[bool, "crop, flip and Cutout in training, as in the paper's runs"] = True

    def load_federation(self) -> Partitioned:
        """The images with their owners; fetched and prepared when asked for the first time."""
        norm = Pixels(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
        if self.augment:
            norm = Pixels(mean=norm.mean, std=norm.std, shift=4, mirror=True, cutout=16)
        return _federation("cifar10", self, norm)


def _federation(name: str, settings: Split, transform: Pixels) -> Partitioned:
    arrays = store.load(name)
    owners = settings.owners(arrays["train_y"])
    train_x, train_y, test_x, test_y = (
        torch.from_numpy(arrays[part]) for part in ("train_x", "train_y", "test_x", "test_y")
    )
    return Partitioned(train_x, train_y.long(), test_x, test_y.long(), owners, transform)
