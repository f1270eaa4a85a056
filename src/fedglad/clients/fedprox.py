"""FedProx: a pull back to the global model in every local step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedglad.clients.method import Memory, Plain
from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FedProx(Plain):
    """FedProx (Li et al. 2020): each step takes ∇ + μ(w − θ), so that no client strays far.

    The gradient of F_k(w) + (μ/2)‖w − θ‖². μ = 0 is plain, bit for bit. arXiv:1812.06127.

    >>> import torch
    >>> grad, w, theta = torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([1.0])
    >>> FedProx(mu=0.1).correct(grad, w, theta, {}, {})
    >>> grad  # 1 + 0.1 · (3 − 1)
    tensor([1.2000])
    """

    mu: Annotated[float, "μ, the pull back to θ"] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, mu=(0 <= self.mu < math.inf, "0 or more, and finite"))

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        if self.mu:
            grad.add_(w - theta, alpha=self.mu)
