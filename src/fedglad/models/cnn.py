"""Convolutional networks for small images: their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class FedOptCNN:
    """conv 3×3·32, conv 3×3·64, max-pool 2, dropout, dense 128, dropout, dense; ReLU between.

    Reddi et al. 2021, arXiv:2003.00295, for EMNIST; the CNN of FedGLAD's MNIST experiments. No
    padding.

    >>> parameters = [p.numel() for p in FedOptCNN().build().parameters()]
    >>> len(parameters), sum(parameters)  # for 1×28×28 images and 10 classes
    (8, 1199882)
    """

    channels: Annotated[int, "of the images"] = 1
    size: Annotated[int, "height and width of the images"] = 28
    classes: Annotated[int, "outputs"] = 10
    dropout: Annotated[tuple[float, float], "before the two dense layers"] = (0.25, 0.5)

    def __post_init__(self) -> None:
        dropout = (all(0 <= p < 1 for p in self.dropout), "two shares in [0, 1)")
        check(self, channels=1, size=6, classes=2, dropout=dropout)

    def build(self) -> nn.Module:
        """The model, initialised by torch's own rules."""
        from fedglad.models.networks.cnn import FedOpt

        return FedOpt(self)


@dataclass(frozen=True, kw_only=True)
class SmallCNN:
    """conv 3×3·16, conv 3×3·32 (both padded), max-pool 2, dense; ReLU between: quick on digits.

    >>> parameters = [p.numel() for p in SmallCNN().build().parameters()]
    >>> len(parameters), sum(parameters)  # for 1×8×8 images and 10 classes
    (6, 9930)
    """

    channels: Annotated[int, "of the images"] = 1
    size: Annotated[int, "height and width of the images"] = 8
    classes: Annotated[int, "outputs"] = 10

    def __post_init__(self) -> None:
        check(self, channels=1, size=2, classes=2)

    def build(self) -> nn.Module:
        """The model, initialised by torch's own rules."""
        from fedglad.models.networks.cnn import Small

        return Small(self)
