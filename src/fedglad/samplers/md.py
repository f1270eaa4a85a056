"""Clients by their numbers of samples, with replacement."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, Sampler, State


@dataclass(frozen=True, kw_only=True)
class MD(Sampler):
    """r draws with replacement by p_k = n_k/n, then the plain mean: E[w_k] = n_k/n.

    Multinomial sampling, Li et al. 2020, arXiv:1812.06127. All N sizes are asked for once in a run,
    and a round costs O(N).

    Differs from the authors' code of FedGLAD: a client that is drawn twice trains once, with the
    weight 2/r, where theirs trains it twice.

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=3, size=[10, 30, 20].__getitem__, labels=lambda k: None)
    >>> MD(clients_per_round=4).sample(stream(1, "cohort", 0), 0, {}, pool, list)  # 4 draws by size
    Cohort(ids=(1, 2), weights=(0.5, 0.5))
    """

    own_weights: ClassVar[bool] = True
    needs_sizes: ClassVar[bool] = True

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        return Cohort.of_draws(rng.choice(pool.who, self.clients_per_round, p=pool.shares))
