"""Clients of equal size are drawn equally often by every sampler, also where they come and go."""

from typing import Any

import numpy as np
import pytest

from fedglad.config.schema import find
from fedglad.rng import stream
from fedglad.samplers import REGISTRY, Pool

N, R, DRAWS = 10, 3, 20_000
MODELS: list[dict[str, Any]] = [
    {},
    {"availability": "bernoulli", "reachable": 0.5},
    {"availability": "markov", "reachable": 0.5, "persistence": 0.2},
]
OWN: dict[str, dict[str, Any]] = {
    "optimal": {"candidates": 4},
    "power-of-choice": {"candidates": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.get("availability", "always"))
@pytest.mark.parametrize("name", REGISTRY)
def test_equal_clients_are_drawn_equally_often(name: str, model: dict[str, Any]):
    sampler = find("sampler", name)(clients_per_round=R, **OWN.get(name, {}), **model)
    pool = Pool(N, lambda k: 7, lambda k: None)
    losses = np.random.default_rng(5)
    counts = np.zeros(N)
    for t in range(DRAWS):
        cohort = sampler.sample(
            stream(0, "cohort", t), t, {}, pool, lambda ids: losses.random(len(ids)).tolist()
        )
        weights = np.array(cohort.weights or [1.0] * len(cohort.ids))
        drawn = R if cohort.weights else len(weights)  # md and clustered may draw one twice
        counts[list(cohort.ids)] += drawn * weights / max(weights.sum(), 1e-9)
    # Σ (count − mean)²/mean has at most the spread of χ² with N − 1 = 9 degrees of freedom, as a
    # cohort is drawn without replacement, or with (md); 27.9 is passed with probability 0.001.
    # Where few can be reached, draws of a round meet the same client more often: E[1/|reachable|]
    # is .22 and not .1, so the variance of r = 3 draws is 1 + 2 (.22 − .1)/.9 = 1.3 times as large;
    # the rounds of a Markov chain repeat themselves, (1 + .2)/(1 − .2) = 1.5 times: 2 at most.
    limit = 27.9 * (2 if model else 1)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < limit
