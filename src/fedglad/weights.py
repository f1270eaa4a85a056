"""Weightings: how much each update counts in the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from fedglad.core import checkpoint
from fedglad.core.checks import check

if TYPE_CHECKING:
    from fedglad.core.gram import Gram

Client = int | str | None
WeightingState = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """w_k ∝ the update's own weight, usually its number of samples (McMahan et al. 2017).

    arXiv:1602.05629.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)}, weighting=Samples())
    >>> record = server.step([Update({"w": torch.ones(1)}, weight=n) for n in (100, 300)])
    >>> [client["weight"] for client in record.clients]
    [0.25, 0.75]
    """

    keeps_updates: ClassVar[bool] = False  # needs the whole cohort at once
    needs_client: ClassVar[bool] = False  # remembers clients by their id
    normalises: ClassVar[bool] = True  # the weights are made to sum to 1
    unbiased: ClassVar[bool] = True  # they prefer no updates for what they are

    def weigh(self, weight: float) -> float:
        """The weight known before the cohort is."""
        return weight

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: WeightingState
    ) -> tuple[np.ndarray, WeightingState]:
        """The weights once the cohort is known, and what to remember of it."""
        return weights, state

    def factor(self, client: Client, state: WeightingState, t: int) -> float:
        """What the weight of a client's update is multiplied by, if `needs_client`.

        Known before the cohort is, and the server's own: the guard, which bounds what clients
        claim, does not look at it. t counts the rounds that stepped.
        """
        return 1.0

    def divisor(self, population: int | None) -> float | None:
        """What all weights are divided by, of so many clients; None: by their sum."""
        return None if self.normalises else 1.0

    def remember(self, clients: list[Client], state: WeightingState, t: int) -> WeightingState:
        """What to remember of a round in which the updates of these clients counted."""
        return state

    def restored(self, state: WeightingState) -> WeightingState:
        """A state that a file had; raises ValueError or TypeError if it cannot be one."""
        return state


@dataclass(frozen=True, kw_only=True)
class Equal(Samples):
    """w_k = 1/r: every update counts the same.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)}, weighting=Equal())
    >>> record = server.step([Update({"w": torch.ones(1)}, weight=n) for n in (100, 300)])
    >>> [client["weight"] for client in record.clients]
    [0.5, 0.5]
    """

    def weigh(self, weight: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class FedAdp(Samples):
    """w_k ∝ n_k exp(f(φ̃_k)): clients whose updates point along the mean count more.

    φ_k is the angle between g_k and ḡ = Σ n_k g_k / n, φ̃_k its mean over k's participations, and
    f(φ) = a (1 − exp(−exp(−a (φ − 1)))). Wu & Wang 2021, arXiv:2012.00661.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(2)}, weighting=FedAdp())
    >>> rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # the mean is along the first two
    >>> record = server.step([Update({"w": row}, client=k) for k, row in enumerate(rows)])
    >>> [round(client["weight"], 3) for client in record.clients]
    [0.485, 0.485, 0.03]
    """

    keeps_updates: ClassVar[bool] = True
    needs_client: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    alpha: Annotated[float, "how strongly angles count"] = 5.0

    def __post_init__(self) -> None:
        check(self, alpha=(0 < self.alpha <= 100, "greater than 0, at most 100"))

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: WeightingState
    ) -> tuple[np.ndarray, WeightingState]:
        angles = gram.angles_to_mean(weights / weights.sum())
        state = dict(state)
        smoothed = np.empty_like(angles)
        for k, (client, angle) in enumerate(zip(clients, angles, strict=True)):
            key = _key(client)
            count, mean = state.get(key, [0.0, 0.0])
            state[key] = [count + 1, mean + (float(angle) - mean) / (count + 1)]
            smoothed[k] = state[key][1]
        f = self.alpha * (1 - np.exp(-np.exp(-self.alpha * (smoothed - 1))))
        return weights * np.exp(f), state

    def restored(self, state: WeightingState) -> WeightingState:
        for key, values in state.items():
            count, angle = map(checkpoint.finite, values)
            if count < 1 or not 0 <= angle <= 4:  # an angle is up to π
                raise ValueError(f"FedAdp's mean angle of {key} is {angle}, of {count} rounds")
        return state


@dataclass(frozen=True, kw_only=True)
class InverseDistance(Samples):
    """w_k ∝ 1/(‖θ_k − θ̄‖ + 1e-12) with θ̄ the plain mean (IDA, Yeganeh et al. 2020).

    arXiv:2008.07665.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, weighting=InverseDistance())
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 4.0, 4.0)])
    >>> [round(client["weight"], 3) for client in record.clients]  # their mean is 2, 1 and 1 away
    [0.2, 0.4, 0.4]
    """

    keeps_updates: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    eps: Annotated[float, "added to the distance"] = 1e-12

    def __post_init__(self) -> None:
        check(self, eps=(1e-30 <= self.eps <= 1e30, "greater than 0, 1e-30 to 1e30"))

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: WeightingState
    ) -> tuple[np.ndarray, WeightingState]:
        return 1 / (gram.distances_to_mean() + self.eps), state


@dataclass(frozen=True, kw_only=True)
class Optimal(Samples):
    """Keeps about m of the updates, the larger ones rather, and weighs them up: w_k/p_k.

    With u_k = ‖w_k g_k‖, w_k = n_k/n, in ascending order, update k of N is kept with probability
    p_k = min(1, (m + l − N) u_k / Σ_{j≤l} u_j), l the largest integer with
    0 < m + l − N ≤ Σ_{j≤l} u_j / u_l. Of all independent choices of m on average, these make
    Σ (w_k/p_k) g_k, which is Σ w_k g_k in expectation, vary least. Chen et al. 2022,
    arXiv:2010.13723.

    Differs from the paper: where all would be left out, with probability q = Π (1 − p_k), it is
    drawn again, for a round without updates teaches nothing; kept is then k with probability
    p_k/(1 − q), and its weight is (1 − q) w_k/p_k. From m = 5 on, q < 0.7 %.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, weighting=Optimal(kept=2))
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 1.0, 2.0, 8.0)])
    >>> [client["weight"] for client in record.clients]  # p is 0.25, 0.25, 0.5, 1; 0.25/p if kept
    [0.0, 0.0, 0.5, 0.25]
    """

    keeps_updates: ClassVar[bool] = True
    normalises: ClassVar[bool] = False
    kept: Annotated[int, "m, how many updates are kept on average"] = 5
    seed: Annotated[int, "of what is kept"] = 0

    def __post_init__(self) -> None:
        check(self, kept=(self.kept >= 1, "1 or more"))

    def reweigh(
        self, weights: np.ndarray, gram: Gram, clients: list[Client], state: WeightingState
    ) -> tuple[np.ndarray, WeightingState]:
        from fedglad.rng import stream  # loads numpy.random, which `import fedglad` does not need

        t = state.get("round", [0.0])[0]
        shares = weights / weights.sum()
        p = optimal_probabilities(shares * np.sqrt(np.diag(gram.total)), self.kept)
        rng = stream(self.seed, "optimal", int(t))
        chosen = rng.random(len(p)) < p
        while not chosen.any():
            chosen = rng.random(len(p)) < p
        some = 1 - np.prod(1 - p)
        weighed = np.divide(shares * some, p, out=np.zeros_like(p), where=chosen)
        return weighed, {"round": [t + 1]}

    def restored(self, state: WeightingState) -> WeightingState:
        if state:
            (t,) = state["round"]
            checkpoint.whole_number(int(checkpoint.finite(t)))
        return state


@dataclass(frozen=True, kw_only=True)
class FedAU(Equal):
    """w_k = ω_k/N, ω_k the mean interval between k's participations: rare clients count more.

    An interval ends with a round in which k takes part, that round counted, or after K rounds
    without; ω_k is the mean of those before this round, and 1 before the first. It estimates 1/p_k
    for a client that takes part with probability p_k, so Σ_S ω_k g_k/N estimates the mean of all N
    clients' updates, whoever is available how often. The weights do not sum to 1: at first, where
    every ω is 1, they sum to r/N. Wang & Ji 2024, Alg. 2, arXiv:2306.03401.

    Differs from the paper: rounds are those that stepped, and a client takes part if its update
    counted. Where N is not known, Σ_S ω_k, which is N in expectation, stands for it.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)}, weighting=FedAU())
    >>> for cohort in ("ab", "a", "ab"):  # b's intervals will be 1 and 2
    ...     updates = [Update({"w": torch.ones(1)}, client=name) for name in cohort]
    ...     record = server.step(updates, population=2)
    >>> record = server.step(updates, population=2)
    >>> [client["weight"] for client in record.clients]  # 1/2 and (1 + 2)/2/2
    [0.5, 0.75]
    """

    needs_client: ClassVar[bool] = True
    normalises: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    cutoff: Annotated[int, "K, the longest interval"] = 50

    def __post_init__(self) -> None:
        check(self, cutoff=(1 <= self.cutoff <= 10**9, "from 1 to 1e9"))

    def factor(self, client: Client, state: WeightingState, t: int) -> float:
        return self._before(client, state, t)[1]

    def divisor(self, population: int | None) -> float | None:
        return population or None

    def remember(self, clients: list[Client], state: WeightingState, t: int) -> WeightingState:
        state = dict(state)
        for client in clients:
            count, mean, waited = self._before(client, state, t)
            mean = (count * mean + waited + 1) / (count + 1)
            state[_key(client)] = [count + 1, mean, float(t + 1)]
        return state

    def _before(self, client: Client, state: WeightingState, t: int) -> tuple[float, float, float]:
        """Before round t: a client's number of intervals, their mean, and the one not over yet."""
        count, mean, since = state.get(_key(client), [0.0, 1.0, 0.0])
        cut, waited = divmod(t - since, self.cutoff)
        if cut > 0:
            count, mean = count + cut, (count * mean + cut * self.cutoff) / (count + cut)
        return count, mean, waited

    def restored(self, state: WeightingState) -> WeightingState:
        for key, values in state.items():
            count, mean, since = map(checkpoint.finite, values)
            if count < 1 or since < 1 or not 1 <= mean <= self.cutoff:
                raise ValueError(
                    f"FedAU's mean interval of {key} is {mean}, of {count} until round {since}"
                )
        return state


def _key(client: Client) -> str:
    """A client's name in a state: 1 and "1" are two clients."""
    return f"{type(client).__name__}:{client}"


def optimal_probabilities(u: np.ndarray, m: int) -> np.ndarray:
    """Optimal's p_k of the norms u_k; m/N each if all are zero.

    >>> optimal_probabilities(np.array([1.0, 1.0, 2.0, 8.0]), 2)
    array([0.25, 0.25, 0.5 , 1.  ])
    """
    count = len(u)
    if m >= count:
        return np.ones(count)
    if not u.any():
        return np.full(count, m / count)
    ascending = np.sort(u)
    sums = np.cumsum(ascending)
    room = m - count + np.arange(1, count + 1)  # m + l − N
    # The largest l that fits; l = N − m + 1, of room 1, always does.
    last = np.flatnonzero((room > 0) & (room * ascending <= sums))[-1]
    if not sums[last]:  # the few that are not zero are kept
        return (u > 0).astype(float)
    return np.minimum(1, room[last] * (u / sums[last]))


REGISTRY = {
    "equal": Equal,
    "samples": Samples,
    "fedadp": FedAdp,
    "inverse-distance": InverseDistance,
    "optimal": Optimal,
    "fedau": FedAU,
}
