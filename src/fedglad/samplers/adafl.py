"""Clients whose updates lie far from the mean are drawn more often."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedglad.core import checkpoint
from fedglad.records import Record
from fedglad.samplers.base import Ask, Cohort, Pool, Sampler, State

LEAST = 1e-200  # of N p_k: a client that always agrees with the mean stays possible


@dataclass(frozen=True, kw_only=True)
class AdaFL(Sampler):
    """r of N without replacement by p, which follows each client's distance from the mean.

    p_k = 1/N at first. After a round, for the clients S whose updates were accepted:
    p_k ← α p_k + (1 − α) (Σ_S p) d_k / Σ_S d with d_k = ‖θ_k − θ̄‖; Σp stays 1. If all distances are
    0, so does p. Chen et al. 2021, arXiv:2108.05765.

    The state is N p_k of the clients that have taken part; for all others it is 1. A round costs
    O(N).

    Differs from the paper: r is fixed, as in the authors' code of FedGLAD, and does not grow.

    >>> from fedglad import Record
    >>> AdaFL(alpha=0.5).observe({}, Record("stepped", distances={0: 1.0, 1: 3.0}))
    {'relative': {'0': 0.75, '1': 1.25}}
    """

    alpha: Annotated[float, "how much of p stays from round to round"] = 0.9

    distances: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha={self.alpha!r}: AdaFL's must be between 0 and 1, not 0 or 1")

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        p = probabilities(state, pool.clients)
        p = p if pool.ids is None else p[pool.ids]
        return Cohort(pool.draw(rng, self.clients_per_round, p / p.sum()))

    def observe(self, state: State, record: Record) -> State:
        """The probabilities after the round; a skipped one has no distances."""
        apart = {str(client): d for client, d in (record.distances or {}).items()}
        total = math.fsum(apart.values())
        if not total > 0:
            return state
        known: dict[str, float] = state.get("relative", {})
        before = {client: known.get(client, 1.0) for client in apart}
        mass = math.fsum(before.values())
        after = {
            client: max(self.alpha * before[client] + (1 - self.alpha) * mass * d / total, LEAST)
            for client, d in apart.items()
        }
        return {**state, "relative": {**known, **after}}

    def restored(self, state: State) -> State:
        known = state.get("relative", {})
        for client, value in known.items():
            if not client.isdecimal() or not 0 < checkpoint.finite(value) < 2**53:
                raise ValueError(f"AdaFL's share of client {client} is {value}")
        return state


def probabilities(state: State, clients: int) -> np.ndarray:
    """p of all N clients; it sums to 1."""
    relative = np.ones(clients)
    saved: dict[str, float] = state.get("relative", {})
    known = {client: share for client, share in saved.items() if int(client) < clients}
    relative[[int(client) for client in known]] = list(known.values())
    return relative / relative.sum()
