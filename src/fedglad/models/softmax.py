"""Softmax regression: the smallest model, convex in its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class SoftmaxRegression:
    """logits = W x + b, starting from zero; inputs of any shape are flattened.

    >>> list(SoftmaxRegression(features=64).build().state_dict())
    ['weight', 'bias']
    """

    features: Annotated[int, "inputs"] = 60
    classes: Annotated[int, "outputs"] = 10

    def __post_init__(self) -> None:
        check(self, features=1, classes=2)

    def build(self) -> nn.Module:
        """The model, all zeros."""
        from fedglad.models.networks.softmax import FlatLinear

        return FlatLinear(self.features, self.classes)
