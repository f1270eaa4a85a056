"""Many train, and the updates that matter most are kept."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedglad import weights
from fedglad.samplers.base import Ask, Choosing, Cohort, Pool, State


@dataclass(frozen=True, kw_only=True)
class Optimal(Choosing):
    """Candidates drawn uniformly all train; of their updates about r are kept, by their norms.

    Which, and with what weights, is the weighting `optimal` (Chen et al. 2022,
    arXiv:2010.13723): the kept ones estimate the candidates' weighted mean without bias. If the
    candidates are all clients, E[w_k] = n_k/n. It saves uploads, and no training.

    The draws that thin the cohort follow its order, and so `seed`, as the cohorts do.

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=10, size=lambda k: 1, labels=lambda k: None)
    >>> chosen = Optimal(clients_per_round=3, candidates=5)
    >>> len(chosen.sample(stream(1, "cohort", 0), 0, {}, pool, list).ids), chosen.weighting
    (5, Optimal(kept=3, seed=0))
    """

    candidates: Annotated[int, "how many train, at least r; 0: all clients"] = 0

    @property
    def weighting(self) -> Any:
        seed = self.seed if isinstance(self.seed, int) else 0
        return weights.Optimal(kept=self.clients_per_round, seed=seed)

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        return Cohort(pool.draw(rng, self.candidates or pool.count))
