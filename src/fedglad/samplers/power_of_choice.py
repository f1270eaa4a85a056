"""Of some candidates, those that the model fits worst."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedglad.samplers.base import Ask, Choosing, Cohort, Pool, State


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Choosing):
    """d candidates by n_k/n without replacement, of these the r with the highest loss at θ.

    Then the plain mean. A candidate whose loss cannot be had comes last. Cho et al. 2020,
    arXiv:2010.01243. All N sizes are asked for once in a run, and a round costs O(N) and d losses.

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=10, size=lambda k: 1, labels=lambda k: None)
    >>> losses = lambda asked: [float(k) for k in asked]  # client k's loss is k
    >>> chosen = PowerOfChoice(clients_per_round=3, candidates=10)
    >>> chosen.sample(stream(1, "cohort", 0), 0, {}, pool, losses).ids
    (9, 8, 7)
    """

    candidates: Annotated[int, "d, at least r; 0: twice r, or all there are"] = 0

    by_default: ClassVar[str] = "2 r"
    needs_sizes: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        drawn = pool.draw(rng, self.candidates or 2 * self.clients_per_round, pool.shares)
        # NaN is sorted last.
        worst = np.argsort(np.negative(ask(list(drawn))), kind="stable")[: self.clients_per_round]
        ids = tuple(drawn[k] for k in worst)
        return Cohort(ids, (1 / len(ids),) * len(ids))
