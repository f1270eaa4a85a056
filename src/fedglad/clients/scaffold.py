"""SCAFFOLD: control variates against the drift of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from fedglad.clients.method import Counting, Memory, Pair, require_plain_sgd
from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor

OPTION = (
    "mean: c_k is the round's mean raw gradient; II: the paper's option II, for plain sgd alone"
)


@dataclass(frozen=True, kw_only=True)
class Scaffold(Counting):
    """SCAFFOLD (Karimireddy et al. 2020): each step takes ∇ − c_k + c, the drift taken out.

    | option | c_k⁺ after a round of K steps |
    |---|---|
    | mean | the mean of the round's K raw gradients ∇, before correction and clipping |
    | II | c_k − c + (θ − w_k)/(K lr): the same for plain SGD, and for nothing else |

    c ← c + (1/N) Σ_S (c_k⁺ − c_k), so that c is the mean of all c_k. With c = c_k = 0 in round 0 it
    is FedAvg. What is minimised is the plain mean of the F_k, however updates are weighted.
    arXiv:1910.06378.
    Differs from the paper: its option I takes the gradient at θ, in a pass of its own; `mean` takes
    it along the way, as FedGLAD's authors do, and so goes with any local optimizer.

    >>> import torch
    >>> grad, w, own, c = (torch.tensor([value]) for value in (5.0, 0.0, 2.0, 0.5))
    >>> Scaffold(option="II", optimizer="sgd").correct(grad, w, w, {"c_k": own}, {"c": c})
    >>> grad  # 5 − 2 + 0.5
    tensor([3.5000])
    """

    option: Annotated[Literal["mean", "II"], OPTION] = "mean"

    remembers: ClassVar[tuple[str, ...]] = ("c_k",)
    scratch: ClassVar[tuple[str, ...]] = ("sum",)
    hears: ClassVar[tuple[str, ...]] = ("c",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, option=(self.option in ("mean", "II"), "'mean' or 'II'"))
        if self.option == "II":
            require_plain_sgd(
                self, "option II reads gradients off θ − w_k; or take option = 'mean'"
            )

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        if self.option == "mean":
            memory["sum"].add_(grad)
        grad.add_(sent["c"] - memory["c_k"])

    def finish(self, delta: Tensor, steps: int, memory: Memory, sent: Memory) -> Pair:
        if self.option == "mean":
            new = memory["sum"] / steps
        else:
            new = memory["c_k"] - sent["c"] + delta / (steps * self.lr)
        return {"c_k": new}, new - memory["c_k"]

    def server(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> Pair:
        """c after the round: the mean of all c_k."""
        before = state.get("c", mean.new_zeros(mean.shape))
        return {"c": before + extra_sum / self.population}, None
