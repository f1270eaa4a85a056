"""r of N clients, each as likely as the other."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from fedglad.records import Record
from fedglad.samplers import SEED, Ask, Cohort, Pool, State


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """r of N without replacement; costs O(r), however large N is."""

    clients_per_round: Annotated[int, "r"] = 10
    seed: Annotated[int | Literal["round", "run"], SEED] = "round"

    def __post_init__(self) -> None:
        if self.clients_per_round < 1:
            raise ValueError(f"clients_per_round={self.clients_per_round!r}: must be 1 or more")

    def sample(
        self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask
    ) -> Cohort:
        drawn = rng.choice(pool.clients, self.clients_per_round, replace=False)
        return Cohort(tuple(drawn.tolist()))

    def check(self, pool: Pool) -> None:
        """Raises for a cohort that these clients cannot fill."""
        if self.clients_per_round > pool.clients:
            raise ValueError(
                f"clients_per_round={self.clients_per_round} is more than the {pool.clients} "
                "clients there are: lower it or raise data.clients"
            )

    def observe(self, state: State, record: Record) -> State:
        return state
