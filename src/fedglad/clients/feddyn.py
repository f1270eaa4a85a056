"""FedDyn: a linear and a quadratic term that make the clients' optima agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedglad.clients.method import Counting, Memory, Pair
from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FedDyn(Counting):
    """FedDyn (Acar et al. 2021): each step takes ∇ − λ_k + α(w − θ).

    λ_k ← λ_k − α(w_k − θ), h ← h − (α/N) Σ_S (w_k − θ), θ ← mean(w_k) − h/α. So h is always
    (1/N) Σ λ_k over all clients, and with all of them round 0 gives θ + 2·mean(w_k − θ) for every
    α. An adapter's s scales mean(w_k) − θ alone. Needs SGD with lr = 1 at the server.
    What is minimised is the plain mean of the F_k, however updates are weighted. arXiv:2111.04263.
    Differs from the paper: it solves each client's problem exactly; here clients take the steps
    they are told to, with any local optimizer. mean(w_k) is by the weights of the run.

    >>> import torch
    >>> grad, w, theta, own = (torch.tensor([value]) for value in (5.0, 3.0, 1.0, 0.5))
    >>> FedDyn(alpha=0.1).correct(grad, w, theta, {"lambda_k": own}, {})
    >>> grad  # 5 − 0.5 + 0.1 · (3 − 1)
    tensor([4.7000])
    """

    alpha: Annotated[float, "α, of the quadratic term"] = 0.1

    needs_mean: ClassVar[bool] = True
    needs_plain_step: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("lambda_k",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, alpha=(0 < self.alpha < math.inf, "positive and finite"))

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.add_(w - theta, alpha=self.alpha).sub_(memory["lambda_k"])

    def finish(self, delta: Tensor, steps: int, memory: Memory, sent: Memory) -> Pair:
        return {"lambda_k": memory["lambda_k"] + self.alpha * delta}, delta

    def server(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> Pair:
        """h after the round, and the shift −h/α of θ."""
        before = state.get("h", mean.new_zeros(mean.shape))
        h = before + (self.alpha / self.population) * extra_sum
        return {"h": h}, -h / self.alpha
