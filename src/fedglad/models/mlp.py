"""Multi-layer perceptrons."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Dense layers with ReLU between.

    The default is the 2NN of McMahan et al. 2017, arXiv:1602.05629, for MNIST. An input has 784
    numbers there, 64 in digits and 60 in synthetic.

    >>> sum(p.numel() for p in MLP().build().parameters())  # 785 · 200 + 201 · 200 + 201 · 10
    199210
    """

    features: Annotated[int, "inputs"] = 784
    hidden: Annotated[tuple[int, ...], "widths of the hidden layers"] = (200, 200)
    classes: Annotated[int, "outputs"] = 10

    def __post_init__(self) -> None:
        hidden = (all(width >= 1 for width in self.hidden), "widths of 1 or more")
        check(self, features=1, hidden=hidden, classes=2)

    def build(self) -> nn.Module:
        """The model, initialised by torch's own rule for linear layers."""
        from torch import nn

        model = nn.Sequential(nn.Flatten())
        for fan_in, fan_out in pairwise([self.features, *self.hidden]):
            model.extend([nn.Linear(fan_in, fan_out), nn.ReLU(inplace=True)])
        return model.append(nn.Linear([self.features, *self.hidden][-1], self.classes))
