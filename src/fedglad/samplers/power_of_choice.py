"""Of some candidates, those that the model fits worst."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedglad.samplers import Ask, Cohort, Pool, Sampler, State


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sampler):
    """d candidates by n_k/n without replacement, of these the r with the highest loss at θ.

    Then the plain mean. A candidate whose loss cannot be had comes last. Cho et al. 2020,
    arXiv:2010.01243. All N sizes are asked for once in a run, and a round costs O(N) and d losses.
    """

    candidates: Annotated[int, "d, at least r; 0: twice r, or all there are"] = 0

    own_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates and self.candidates < self.clients_per_round:
            raise ValueError(
                f"candidates={self.candidates} is less than clients_per_round="
                f"{self.clients_per_round}: r are chosen of d candidates; raise it, or 0 for 2 r"
            )

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        d = min(self.candidates or 2 * self.clients_per_round, pool.count)
        drawn: list[int] = rng.choice(pool.who, d, replace=False, p=pool.shares).tolist()
        # NaN is sorted last.
        worst = np.argsort(np.negative(ask(drawn)), kind="stable")[: self.clients_per_round]
        ids = tuple(drawn[k] for k in worst)
        return Cohort(ids, (1 / len(ids),) * len(ids))

    def check(self, pool: Pool) -> None:
        """Raises if there are fewer clients than candidates, or one has no samples."""
        super().check(pool)
        if self.candidates > pool.clients:
            raise ValueError(
                f"candidates={self.candidates} is more than the {pool.clients} clients there are: "
                "lower it or raise data.clients"
            )
        _ = pool.sizes
