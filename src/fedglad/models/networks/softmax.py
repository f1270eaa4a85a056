"""A linear layer for inputs of any shape."""

from torch import Tensor, nn


class FlatLinear(nn.Linear):
    """A linear layer that flattens its inputs: one module, as a call costs more than the maths."""

    def reset_parameters(self) -> None:
        """Zeros: a convex problem needs no symmetry broken."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))
