"""r of N clients, each as likely as the other."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, Sampler, State


@dataclass(frozen=True, kw_only=True)
class Uniform(Sampler):
    """r of N without replacement; costs O(r), however large N is (McMahan et al. 2017).

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=10, size=lambda k: 1, labels=lambda k: None)
    >>> Uniform(clients_per_round=3).sample(stream(1, "cohort", 0), 0, {}, pool, list).ids
    (2, 9, 6)
    """

    uniform: ClassVar[bool] = True

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        return Cohort(pool.draw(rng, self.clients_per_round))
