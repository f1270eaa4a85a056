"""Softmax regression: the smallest model, convex in its parameters."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class SoftmaxRegression:
    """logits = W x + b, starting from zero; inputs of any shape are flattened.

    | field | meaning |
    |---|---|
    | `features` | numbers in one input: 60 for synthetic, 64 for digits |
    | `classes` | number of classes |

    >>> list(SoftmaxRegression(features=64).build().state_dict())
    ['weight', 'bias']
    """

    features: Annotated[int, "inputs"] = 60
    classes: Annotated[int, "outputs"] = 10

    def __post_init__(self) -> None:
        for name, least in (("features", 1), ("classes", 2)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"SoftmaxRegression({name}={getattr(self, name)!r}): must be {least} or more"
                )

    def build(self) -> nn.Module:
        """The model, all zeros."""
        return FlatLinear(self.features, self.classes)


class FlatLinear(nn.Linear):
    """A linear layer that flattens its inputs: one module, as a call costs more than the maths."""

    def reset_parameters(self) -> None:
        """Zeros: a convex problem needs no symmetry broken."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """The logits."""
        return super().forward(input.flatten(1))
