"""Rules of other authors, and the constant factor that any adaptive rule has to beat."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from fedglad.adapters.base import GROUPS, Adapter, AdapterState, Factors, Grouping, Groups, gsi_of
from fedglad.core.checks import check
from fedglad.records import CANCELLED, Statistics, indicator


@dataclass(frozen=True, kw_only=True)
class FedExP(Adapter):
    """One factor from this round alone: s = max(1, Σw‖g‖² / (2(‖ḡ‖² + ε))).

    At ε = 0 it is max(1, GSI²/2). Jhunjhunwala et al. 2023, arXiv:2301.09604.
    Differs from the paper: updates that cancel (GSI ≥ 1000) give 1, not an unbounded step.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(2)}, adapter=FedExP(eps=0))
    >>> record = server.step([{"w": torch.tensor([1.0, g])} for g in (3.0, -3.0)])
    >>> round(record.scale["all"], 3)  # 10/(2 · 1)
    5.0
    """

    compares: ClassVar[bool] = True
    groups: Annotated[Grouping, GROUPS] = "all"
    eps: Annotated[float, "ε, added to the squared norm of the mean"] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, eps=(self.eps >= 0, "0 or more"))

    def bounds(self, t: int) -> tuple[float, float]:
        return 1.0, math.inf

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        top, mean_sq = groups.sum(stats.sum_sq), groups.sum(stats.mean_sq)
        usable = indicator(top, mean_sq, stats.weights) < CANCELLED
        total = math.fsum(stats.weights)
        half = np.divide(
            total * top, 2 * (mean_sq + self.eps), out=np.ones_like(top), where=usable & (top > 0)
        )
        return np.maximum(1.0, half)


@dataclass(frozen=True, kw_only=True)
class FedHyper(Adapter):
    """FedHyper-G: the factor grows while successive rounds agree, and falls when they do not.

        a_t = clip(a_{t−1} + ⟨ḡ_t, ḡ_{t−1}⟩, 1/b, b),  a_0 = 1

    It depends on the updates' scale, and keeps one model, ḡ_{t−1}. Wang et al. 2024,
    arXiv:2310.03156.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, adapter=FedHyper())
    >>> [server.step([{"w": torch.tensor([0.5])}]).scale["all"] for _ in range(3)]  # 0.5² a round
    [1.0, 1.25, 1.5]
    """

    groups: Annotated[Grouping, GROUPS] = "all"
    bound: Annotated[float, "b: the factor stays between 1/b and b"] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, bound=(1 <= self.bound <= 1e15, "from 1 to 1e15"))

    def bounds(self, t: int) -> tuple[float, float]:
        return 1 / self.bound, self.bound

    @property
    def direction(self) -> float:
        return 0.0  # m is the last ḡ itself, and 0 before the first

    def start(self, groups: Groups) -> AdapterState:
        return {"factor": np.ones(len(groups.labels))}

    def adapt(
        self, stats: Statistics, groups: Groups, state: AdapterState, t: int
    ) -> tuple[Factors, AdapterState]:
        gsi, along = gsi_of(stats, groups), groups.sum(stats.direction)
        factor = np.clip(state["factor"] + along, 1 / self.bound, self.bound)
        return Factors(gsi, np.zeros_like(gsi), factor), {"factor": factor}


@dataclass(frozen=True, kw_only=True)
class FedLWS(Adapter):
    """Shrinks each layer after the step, the more the updates differ: θ ← γ(θ − ḡ).

        γ = ‖θ‖ / (‖θ‖ + τ‖ḡ‖),  τ = clip(b √(Σw‖g‖² − ‖ḡ‖²), τ_min, τ_max)

    ‖θ‖ is from before the step, ḡ what enters the server optimizer: with another than SGD at rate
    1 the shrinking follows its own step. It depends on the updates' scale. A layer is a group:
    alone, a bias that starts as 0 would be held there. Shi et al. 2025, arXiv:2503.15111.
    Differs from the paper: it averages ‖g_k − ḡ‖ in the place of the root; this form streams. A
    layer that is all zero is not shrunk: γ would be 0, and it would never move.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.tensor([3.0])}, adapter=FedLWS(min_tau=1, max_tau=1))
    >>> record = server.step([{"w": torch.tensor([1.0])}])
    >>> server.state["w"]  # 3/(3 + 1 · 1) of 3 − 1
    tensor([1.5000])
    """

    needs_model: ClassVar[bool] = True
    shrinks: ClassVar[bool] = True
    groups: Annotated[Grouping, GROUPS] = "layer"
    slope: Annotated[float, "b: how much τ grows with the updates' spread"] = 0.03
    min_tau: Annotated[float, "the least τ"] = 0.01
    max_tau: Annotated[float, "the largest τ"] = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.min_tau
        check(
            self,
            slope=(0 <= self.slope <= 1e15, "0 or more, up to 1e15"),
            min_tau=(0 <= least <= 1e15, "0 or more, up to 1e15"),
            max_tau=(least <= self.max_tau <= 1e15, f"min_tau={least} or more, up to 1e15"),
        )

    def adapt(
        self, stats: Statistics, groups: Groups, state: AdapterState, t: int
    ) -> tuple[Factors, AdapterState]:
        factors, state = super().adapt(stats, groups, state, t)
        total, mean_sq = math.fsum(stats.weights), groups.sum(stats.mean_sq)
        variance = np.maximum(groups.sum(stats.sum_sq) / total - mean_sq / total**2, 0)
        tau = np.clip(self.slope * np.sqrt(variance), self.min_tau, self.max_tau)
        norm = np.sqrt(groups.sum(stats.model_sq))
        shrink = np.divide(
            norm, norm + tau * np.sqrt(mean_sq), out=np.ones_like(norm), where=norm > 0
        )
        return replace(factors, shrink=shrink), state


@dataclass(frozen=True, kw_only=True)
class Fixed(Adapter):
    """The same factor in every round: what any adaptive rule has to beat.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, adapter=Fixed(value=0.5))
    >>> record = server.step([{"w": torch.tensor([3.0])}])
    >>> server.state["w"]
    tensor([-1.5000])
    """

    value: Annotated[float, "the factor"] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, value=(0 < self.value <= 1e15, "positive and finite, up to 1e15"))

    @property
    def adaptive(self) -> bool:
        return type(self) is not Fixed

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        return np.full(len(groups.labels), self.value)
