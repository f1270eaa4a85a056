"""Residual networks for small images (He et al. 2016, arXiv:1512.03385): their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ResNet56:
    """Bottleneck blocks with BatchNorm: the ResNet-56 of FedGLAD's CIFAR-10 experiments.

    3×3 stem of 16, three stages of 6 blocks with 16, 32, 64 planes, each block 1×1, 3×3, 1×1 with
    four times as many outputs, mean over the image, dense. Images may have any size, and each stage
    but the first halves them. Not the ResNet-56 of He et al., which is `ResNet56Basic`.

    >>> parameters = [p.numel() for p in ResNet56().build().parameters()]
    >>> len(parameters), sum(parameters)  # for 3 channels and 10 classes
    (176, 591322)
    """

    channels: Annotated[int, "of the images"] = 3
    classes: Annotated[int, "outputs"] = 10
    blocks: Annotated[tuple[int, ...], "residual blocks of each stage"] = (6, 6, 6)
    width: Annotated[int, "planes of the first stage, doubled by each further one"] = 16

    basic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        stages = bool(self.blocks) and all(n >= 1 for n in self.blocks)
        blocks = (stages, "one stage or more, with 1 block or more each")
        check(self, channels=1, classes=2, blocks=blocks, width=1)

    def norm(self, planes: int) -> nn.Module:
        """The normalisation after a convolution."""
        from torch import nn

        return nn.BatchNorm2d(planes)

    def build(self) -> nn.Module:
        """The model; convolutions start as He et al. 2015 by their outputs, norms as identity."""
        from fedglad.models.networks.resnet import ResNet

        return ResNet(self)


@dataclass(frozen=True, kw_only=True)
class ResNet56Basic(ResNet56):
    """The ResNet-56 of He et al.: 9 blocks a stage of two 3×3 convolutions, with BatchNorm.

    Shortcuts between stages are their option A, every second pixel and zeros for the new planes,
    without parameters (with option B, a 1×1 convolution with BatchNorm, there would be 855,770).
    Fields as `ResNet56`.

    >>> parameters = [p.numel() for p in ResNet56Basic().build().parameters()]
    >>> len(parameters), sum(parameters)  # for 3 channels and 10 classes
    (167, 853018)
    """

    blocks: Annotated[tuple[int, ...], "residual blocks of each stage"] = (9, 9, 9)

    basic: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ResNet56GroupNorm(ResNet56):
    """`ResNet56` with GroupNorm (Wu and He 2018): no sample sees another, and there are no buffers.

    Two groups, as Reddi et al. 2021 (arXiv:2003.00295) have in their federated ResNet; `groups`
    must divide `width`. Other fields as `ResNet56`.

    >>> model = ResNet56GroupNorm().build()
    >>> sum(p.numel() for p in model.parameters()), len(list(model.buffers()))
    (591322, 0)
    """

    groups: Annotated[int, "of planes that are normalised together"] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1 or self.width % self.groups:
            raise ValueError(
                f"ResNet56GroupNorm(groups={self.groups!r}): must divide width = {self.width}"
            )

    def norm(self, planes: int) -> nn.Module:
        from torch import nn

        return nn.GroupNorm(self.groups, planes)
