"""The cohorts of FedML's code, so of the paper's and of many others' runs."""

from dataclasses import dataclass

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, State
from fedglad.samplers.uniform import Uniform


@dataclass(frozen=True, kw_only=True)
class FedML(Uniform):
    """r of N without replacement, drawn by NumPy's legacy generator, whose seed is the round.

    FedML (He et al. 2020, arXiv:2007.13518) seeds it anew in every round: runs with as many clients
    meet the same cohorts, those of the code behind the FedGLAD paper among them. So `seed` stays
    "round", and a round that is tried again (Flower) asks the same clients, if they are there.

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=10, size=lambda k: 1, labels=lambda k: None)
    >>> FedML(clients_per_round=3).sample(stream(1, "cohort", 0), 0, {}, pool, list).ids
    (2, 8, 4)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed != "round":
            raise ValueError(
                f"seed={self.seed!r}: FedML's cohorts depend on the round alone; leave it at "
                "'round', or take the sampler uniform"
            )

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        if self.clients_per_round == pool.count == pool.clients:
            return Cohort(tuple(range(pool.clients)))  # without a draw, in order
        return Cohort(pool.draw(np.random.RandomState(t), self.clients_per_round))
