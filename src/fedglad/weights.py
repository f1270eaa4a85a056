"""Weightings: how much each update counts in the mean."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedglad.gram import Gram

Client = int | str | None
State = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """w_k ∝ the update's own weight, usually its number of samples (McMahan et al. 2017)."""

    keeps_updates: ClassVar[bool] = False  # needs the whole cohort at once
    needs_client: ClassVar[bool] = False  # remembers clients by their id

    def weigh(self, weight: float) -> float:
        """The weight known before the cohort is."""
        return weight

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: State
    ) -> tuple[np.ndarray, State]:
        """The weights once the cohort is known, and what to remember of it."""
        return weights, state


@dataclass(frozen=True, kw_only=True)
class Equal(Samples):
    """w_k = 1/r: every update counts the same."""

    def weigh(self, weight: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class FedAdp(Samples):
    """w_k ∝ n_k exp(f(φ̃_k)): clients whose updates point along the mean count more.

    φ_k is the angle between g_k and ḡ = Σ n_k g_k / n, φ̃_k its mean over k's participations, and
    f(φ) = a (1 − exp(−exp(−a (φ − 1)))). Wu & Wang 2021, arXiv:2012.00661.
    """

    keeps_updates: ClassVar[bool] = True
    needs_client: ClassVar[bool] = True
    alpha: Annotated[float, "how strongly angles count"] = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 100:
            raise ValueError(f"FedAdp(alpha={self.alpha!r}): must be greater than 0, at most 100")

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: State
    ) -> tuple[np.ndarray, State]:
        angles = gram.angles_to_mean(weights / weights.sum())
        state = dict(state)
        smoothed = np.empty_like(angles)
        for k, (client, angle) in enumerate(zip(clients, angles, strict=True)):
            key = f"{type(client).__name__}:{client}"  # 1 and "1" are two clients
            count, mean = state.get(key, [0.0, 0.0])
            state[key] = [count + 1, mean + (float(angle) - mean) / (count + 1)]
            smoothed[k] = state[key][1]
        f = self.alpha * (1 - np.exp(-np.exp(-self.alpha * (smoothed - 1))))
        return weights * np.exp(f), state


@dataclass(frozen=True, kw_only=True)
class InverseDistance(Samples):
    """w_k ∝ 1/(‖θ_k − θ̄‖ + 1e-12) with θ̄ the plain mean (IDA, Yeganeh et al. 2020).

    arXiv:2008.07665.
    """

    keeps_updates: ClassVar[bool] = True
    eps: Annotated[float, "added to the distance"] = 1e-12

    def __post_init__(self) -> None:
        if not 1e-30 <= self.eps <= 1e30:
            raise ValueError(
                f"InverseDistance(eps={self.eps!r}): must be greater than 0, 1e-30 to 1e30"
            )

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: State
    ) -> tuple[np.ndarray, State]:
        return 1 / (gram.distances_to_mean() + self.eps), state


REGISTRY = {
    "equal": Equal,
    "samples": Samples,
    "fedadp": FedAdp,
    "inverse-distance": InverseDistance,
}
