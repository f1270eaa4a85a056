"""Samplers: who takes part in a round. One file a sampler.

May import records and rng; imported by the engines' callers. A sampler is frozen settings; what it
remembers is a dict of JSON types that the checkpoint saves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from fedglad.records import Record

SEED = (
    "round: cohorts depend on the round alone, for every run; run: on the run's seed; or a number"
)

State = dict[str, Any]
Ask = Callable[[list[int]], list[float]]
"""Losses of the given clients at the current model (power-of-choice)."""


@dataclass(frozen=True)
class Pool:
    """Who there is: how many clients, and their sizes and class counts where they are known."""

    clients: int
    size: Callable[[int], int]
    labels: Callable[[int], np.ndarray | None]


@dataclass(frozen=True)
class Cohort:
    """Who takes part; `weights` override the clients' numbers of samples."""

    ids: tuple[int, ...]
    weights: tuple[float, ...] | None = None


class Sampler(Protocol):
    @property
    def seed(self) -> int | Literal["round", "run"]: ...

    def sample(
        self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask
    ) -> Cohort:
        """The cohort of round t."""
        ...

    def check(self, pool: Pool) -> None:
        """Raises ValueError, before the run starts, if these clients will not do."""
        ...

    def observe(self, state: State, record: Record) -> State:
        """What to remember of a round."""
        ...


REGISTRY = {
    "uniform": "fedglad.samplers.uniform:Uniform",
    "scripted": "fedglad.samplers.scripted:Scripted",
}
