"""VRL-SGD: local SGD with the deviation of each client's gradient taken out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedglad.clients.method import Local, Memory, Pair, Plain, require_plain_sgd

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VRLSGD(Plain):
    """VRL-SGD (Liang et al. 2019): each step takes ∇ − Δ_k, the client's deviation taken out.

    After a round of K steps u_k = g_k/(K lr) is the mean gradient that was taken, and Δ_k ← Δ_k +
    u_k − ū with ū the plain mean over the cohort: with equal K, Δ_k + (x̄ − x_k)/(K lr). So Σ Δ_k
    over all clients is always 0. Plain SGD without clipping alone. What is minimised is the plain
    mean of the F_k, however updates are weighted. arXiv:1912.12844.
    Differs from the paper: clients may be sampled and take different numbers of steps, each then
    divided by its own K; θ is moved by the server's optimizer.

    >>> import torch
    >>> grad, w, own = (torch.tensor([value]) for value in (5.0, 0.0, 2.0))
    >>> VRLSGD().correct(grad, w, w, {"deviation": own}, {})
    >>> grad
    tensor([3.])
    """

    optimizer: Local = "sgd"

    remembers: ClassVar[tuple[str, ...]] = ("deviation",)
    settles: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("optimizer", "clip_norm", "weight_decay", "schedule")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_plain_sgd(self, "Δ_k is read off θ − w_k; scaffold goes with all of them")

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.sub_(memory["deviation"])

    def finish(self, delta: Tensor, steps: int, memory: Memory, sent: Memory) -> Pair:
        taken = delta / (steps * self.lr)
        return {"deviation": memory["deviation"] + taken}, taken

    def server(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> Pair:
        """The plain mean of the gradients that the cohort took."""
        return {"mean": extra_sum / count}, None

    def settle(self, memory: Memory, state: Memory) -> Memory:
        return {"deviation": memory["deviation"] - state["mean"]}
