"""MD, AdaFL, power-of-choice: how often each client is drawn, by the formula, and what is refused.

Samplers draw 20,000 cohorts and more from one generator. A cohort's whole outcome is counted, so
that Σ (seen − expected)² / expected is χ² exactly; the bounds are its 99.9 % points.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_support import TINY

from fedglad.config.schema import ConfigError, load
from fedglad.records import Record
from fedglad.rng import stream
from fedglad.samplers.adafl import AdaFL, probabilities
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.samplers.md import MD
from fedglad.samplers.optimal import Optimal
from fedglad.samplers.power_of_choice import PowerOfChoice
from fedglad.samplers.scripted import Scripted
from fedglad.samplers.uniform import Uniform
from fedglad.simulation.simulation import Simulation

ROUNDS = 20_000
SIZES = (1, 2, 3, 4)
SHARES = np.array(SIZES) / 10


def of_sizes(*sizes: int) -> Pool:
    return Pool(len(sizes), lambda k: sizes[k], lambda k: None)


def unasked(ids: Sequence[int]) -> list[float]:
    raise AssertionError("a sampler that needs no losses must not ask for them")


def cohorts(
    sampler: Sampler, pool: Pool, state: Any = None, ask: Any = unasked, rounds: int = ROUNDS
) -> Iterable[Cohort]:
    rng = stream(1, "test")
    return (sampler.sample(rng, t, state or {}, pool, ask) for t in range(rounds))


def chi_square(seen: Counter[Any], expected: dict[Any, float]) -> float:
    """Against probabilities; what is not possible must not be seen."""
    assert math.fsum(expected.values()) == pytest.approx(1)
    assert seen.keys() <= {key for key, p in expected.items() if p}
    n = seen.total()
    return sum((seen[key] - n * p) ** 2 / (n * p) for key, p in expected.items() if p)


def successive(p: Sequence[float], r: int) -> dict[tuple[int, ...], float]:
    """The probability of each ordered draw of r without replacement: p_a · p_b/(1 − p_a) · …"""
    found: dict[tuple[int, ...], float] = {}
    for ids in permutations(range(len(p)), r):
        chance, left = 1.0, 1.0
        for k in ids:
            chance, left = chance * p[k] / left, left - p[k]
        found[ids] = chance
    return found


# ------------------------------------------------------------------------ as it was, to the bit


def test_with_everybody_reachable_uniform_draws_what_it_always_drew():
    for t in range(50):
        drawn = Uniform(clients_per_round=5).sample(
            stream(0, "cohort", t), t, {}, of_sizes(*[1] * 50), unasked
        )
        before = stream(0, "cohort", t).choice(50, 5, replace=False)
        assert drawn == Cohort(tuple(before.tolist()))


def test_with_everybody_reachable_scripted_draws_what_it_always_drew():
    labels = [np.eye(3, dtype=int)[k % 3] for k in range(30)]
    pool = Pool(30, lambda k: 1, lambda k: labels[k])
    script = Scripted(clients_per_round=4, largest_class={"7": 2}, cohorts={"8": [5, 1]})
    found = [script.sample(stream(0, "cohort", t), t, {}, pool, unasked) for t in range(10)]
    holders = [k for k in range(30) if k % 3 == 2]
    assert found[7].ids == tuple(stream(0, "cohort", 7).choice(holders, 4, replace=False).tolist())
    assert found[8].ids == (5, 1)
    assert found[9].ids == tuple(stream(0, "cohort", 9).choice(30, 4, replace=False).tolist())
    assert all(type(k) is int for cohort in found for k in cohort.ids)


# ----------------------------------------------------------------------------------------- MD


def test_md_draws_by_the_numbers_of_samples():
    # r = 3 draws a round: 60,000 draws, p = .1, .2, .3, .4: χ²₃, 16.3. In a cohort, m of 3 draws
    # of a client are its weight m/3, and the weights sum to 1. The first client is the first draw.
    first, drawn = Counter[int](), Counter[int]()
    for cohort in cohorts(MD(clients_per_round=3), of_sizes(*SIZES)):
        assert cohort.weights
        assert len(set(cohort.ids)) == len(cohort.ids) == len(cohort.weights)
        times = [round(3 * w) for w in cohort.weights]
        assert [m / 3 for m in times] == list(cohort.weights)
        assert sum(times) == 3
        first[cohort.ids[0]] += 1
        drawn.update(dict(zip(cohort.ids, times, strict=True)))
    expected = dict(enumerate(SHARES))
    assert chi_square(drawn, expected) < 16.3
    assert chi_square(first, expected) < 16.3
    # E[w_k] = n_k/n
    assert [drawn[k] / (3 * ROUNDS) for k in range(4)] == pytest.approx(SHARES, abs=0.01)


def test_mds_draws_are_independent_of_each_other():
    # r = 2: both draws are client k with p_k²: 30 % of the rounds have one client, of weight 1.
    # 1·1 + 2·2 + 3·3 + 4·4 = 30 of 100; one of two outcomes: χ²₁, 10.8.
    found = Counter(len(c.ids) for c in cohorts(MD(clients_per_round=2), of_sizes(*SIZES)))
    assert chi_square(found, {1: 0.3, 2: 0.7}) < 10.8


def test_sizes_are_asked_for_once_in_a_run():
    asked: list[int] = []

    def size(k: int) -> int:
        asked.append(k)
        return k + 1

    pool = Pool(5, size, lambda k: None)
    for sampler in (MD(clients_per_round=2), MD(clients_per_round=3, availability="bernoulli")):
        sampler.check(pool)
        for cohort in cohorts(sampler, pool, rounds=20):
            assert set(cohort.ids) <= set(range(5))
    assert asked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sampler", [MD(clients_per_round=2), PowerOfChoice(clients_per_round=2)])
def test_a_client_without_samples_is_refused(sampler: Sampler):
    with pytest.raises(ValueError, match="client 2 has 0 samples: leave it out"):
        sampler.check(of_sizes(3, 2, 0, 4))


# --------------------------------------------------------------------------------------- AdaFL


def with_distances(**apart: float) -> Record:
    return Record("stepped", distances={int(k[1:]): d for k, d in apart.items()})


def test_adafls_probabilities_follow_the_distances():
    # N = 4, p = 1/4 each; clients 0, 1, 2 at distances 1, 1, 2, alpha .5, Σ_S p = 3/4:
    #   p_0 = p_1 = .5·.25 + .5·.75·1/4 = .125 + .09375 = .21875
    #   p_2 = .5·.25 + .5·.75·2/4 = .3125;  p_3 = .25;  Σ = 1
    # then 2 and 3 at distances 0 and 5, Σ_S p = .5625:
    #   p_2 = .5·.3125 = .15625;  p_3 = .5·.25 + .5·.5625 = .40625
    sampler = AdaFL(clients_per_round=3, alpha=0.5)
    state = sampler.observe({}, with_distances(k0=1.0, k1=1.0, k2=2.0))
    assert probabilities(state, 4).tolist() == pytest.approx([0.21875, 0.21875, 0.3125, 0.25])
    state = sampler.observe(json.loads(json.dumps(state)), with_distances(k2=0.0, k3=5.0))
    assert probabilities(state, 4).tolist() == pytest.approx([0.21875, 0.21875, 0.15625, 0.40625])


def test_adafl_as_in_the_paper_by_default():
    # alpha .9, N = 2, distances 3 and 1: p_0 = .9·.5 + .1·1·3/4 = .525
    state = AdaFL(clients_per_round=2).observe({}, with_distances(k0=3.0, k1=1.0))
    assert probabilities(state, 2).tolist() == pytest.approx([0.525, 0.475])


@pytest.mark.parametrize(
    "record",
    [
        Record("skipped", "nobody came"),
        Record("stepped", distances={}),
        Record("stepped", distances={0: 0.0, 2: 0.0}),
        Record("stepped", distances={1: 0.0}),
    ],
    ids=["skipped", "nobody", "all at the mean", "alone"],
)
def test_a_round_without_distances_leaves_adafl_as_it_is(record: Record):
    sampler = AdaFL(clients_per_round=2)
    state = sampler.observe({}, with_distances(k0=3.0, k1=1.0))
    kept = json.dumps(state)
    assert sampler.observe(state, record) == state
    assert sampler.observe({}, record) == {}
    assert json.dumps(state) == kept


rounds_of_distances = st.lists(
    st.dictionaries(st.integers(0, 7), st.floats(0, 1e12), max_size=8), max_size=30
)


@given(rounds_of_distances, st.floats(0.001, 0.999))
def test_adafls_probabilities_always_sum_to_one(rounds: list[dict[int, float]], alpha: float):
    sampler, state = AdaFL(alpha=alpha), dict[str, Any]()
    for apart in rounds:
        before = probabilities(state, 8)
        state = sampler.observe(state, Record("stepped", distances={**apart}))
        after = probabilities(json.loads(json.dumps(state)), 8)
        assert math.fsum(after) == pytest.approx(1, abs=1e-12)
        assert (after > 0).all()
        others = [k for k in range(8) if k not in apart]
        assert after[others] == pytest.approx(before[others], rel=1e-9)


def test_adafl_draws_without_replacement_by_its_probabilities():
    # N p = .4, .8, 1.2, 1.6 of 4: p = .1, .2, .3, .4; 12 ordered pairs, χ²₁₁, 31.3
    state = {"relative": {"0": 0.4, "1": 0.8, "2": 1.2, "3": 1.6}}
    assert probabilities(state, 4).tolist() == pytest.approx(SHARES)
    found = Counter(c.ids for c in cohorts(AdaFL(clients_per_round=2), of_sizes(*[1] * 4), state))
    assert chi_square(found, successive(SHARES.tolist(), 2)) < 31.3


def test_adafl_starts_uniform():
    found = Counter(c.ids for c in cohorts(AdaFL(clients_per_round=2), of_sizes(9, 1, 1, 1)))
    assert chi_square(found, dict.fromkeys(permutations(range(4), 2), 1 / 12)) < 31.3


def test_who_never_differs_can_still_be_drawn():
    # 2,000 rounds at the mean: .5^2000 = 1e-602 would be zero; all four must fit into a cohort
    sampler, state = AdaFL(clients_per_round=4, alpha=0.5), dict[str, Any]()
    for _ in range(2000):
        state = sampler.observe(state, with_distances(k0=0.0, k1=1.0))
    (cohort,) = cohorts(sampler, of_sizes(1, 1, 1, 1), state, rounds=1)
    assert sorted(cohort.ids) == [0, 1, 2, 3]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
def test_an_alpha_that_forgets_or_keeps_all_is_refused(alpha: float):
    with pytest.raises(ValueError, match="AdaFL's must be between 0 and 1, not 0 or 1"):
        AdaFL(alpha=alpha)
    given = {"sampler.name": "adafl", "sampler.alpha": alpha}
    with pytest.raises(ConfigError, match=r"\[sampler\] alpha="):
        load("digits", given)


# ----------------------------------------------------------------------------- power of choice


def fixed(*losses: float) -> Callable[[list[int]], list[float]]:
    return lambda ids: [losses[k] for k in ids]


def test_of_the_candidates_the_worst_takes_part():
    # d = 2 candidates by .1, .2, .3, .4 without replacement, losses 4, 3, 2, 1: the lower id wins,
    # so client 3 never does. Three outcomes: χ²₂, 13.8.
    expected = dict.fromkeys(range(4), 0.0)
    for pair, chance in successive(SHARES.tolist(), 2).items():
        expected[min(pair)] += chance
    # by hand for client 2: pairs (2, 3) and (3, 2): .3·.4/.7 + .4·.3/.6 = .17143 + .2
    assert expected[2] == pytest.approx(0.12 / 0.7 + 0.12 / 0.6)
    assert expected[3] == 0
    sampler = PowerOfChoice(clients_per_round=1, candidates=2)
    drawn = cohorts(sampler, of_sizes(*SIZES), ask=fixed(4, 3, 2, 1))
    assert chi_square(Counter(c.ids[0] for c in drawn), expected) < 13.8


def test_the_candidates_are_drawn_by_size_without_replacement():
    asked: list[tuple[int, ...]] = []

    def ask(ids: list[int]) -> list[float]:
        asked.append(tuple(ids))
        return [0.0] * len(ids)

    for _ in cohorts(PowerOfChoice(clients_per_round=1), of_sizes(*SIZES), ask=ask):
        pass
    assert chi_square(Counter(asked), successive(SHARES.tolist(), 2)) < 31.3  # d = 2 r, χ²₁₁


def chosen(r: int, *losses: float) -> Cohort:
    sampler = PowerOfChoice(clients_per_round=r, candidates=len(losses))
    pool = of_sizes(*[1] * len(losses))
    (cohort,) = cohorts(sampler, pool, ask=fixed(*losses), rounds=1)
    return cohort


def test_the_highest_losses_first_and_the_plain_mean():
    assert chosen(2, 0.1, 3.0, 2.0, 0.5) == Cohort((1, 2), (0.5, 0.5))
    assert chosen(3, 1.0, 9.0, 4.0) == Cohort((1, 2, 0), (1 / 3, 1 / 3, 1 / 3))


def test_a_loss_that_cannot_be_had_comes_last():
    nan = math.nan
    assert chosen(2, nan, 0.0, nan, 0.5).ids == (3, 1)
    assert chosen(1, nan, -math.inf).ids == (1,)
    assert set(chosen(3, nan, 0.0, nan, 0.5).ids) > {1, 3}
    assert len(chosen(2, nan, nan, nan).ids) == 2
    assert chosen(1, 5.0, math.inf, nan).ids == (1,)  # a model that has diverged there


def test_there_are_no_more_candidates_than_clients():
    sampler = PowerOfChoice(clients_per_round=3)  # d = 6 by default
    (cohort,) = cohorts(sampler, of_sizes(1, 1, 1, 1), ask=fixed(1, 2, 3, 4), rounds=1)
    assert cohort.ids == (3, 2, 1)


@pytest.mark.parametrize("cls", [PowerOfChoice, Optimal])
def test_fewer_candidates_than_the_cohort_are_refused(cls: Any):
    with pytest.raises(ValueError, match="candidates=4 is less than clients_per_round=5"):
        cls(clients_per_round=5, candidates=4)
    cls(clients_per_round=5, candidates=5).check(of_sizes(*[1] * 5))
    with pytest.raises(ValueError, match="candidates=6 is more than the 5 clients there are"):
        cls(clients_per_round=5, candidates=6).check(of_sizes(*[1] * 5))
    name = "optimal" if cls is Optimal else "power-of-choice"
    with pytest.raises(ConfigError, match="candidates=4 is less than clients_per_round=5"):
        load("digits", {"sampler.name": name, "sampler.candidates": 4})


# --------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "name", ["uniform", "scripted", "md", "adafl", "power-of-choice", "clustered", "optimal"]
)
def test_a_cohort_larger_than_the_population_is_refused_before_the_run_starts(name: str):
    given = {**TINY, "sampler.name": name, "sampler.clients_per_round": 51}
    with pytest.raises(ValueError, match="clients_per_round=51 is more than the 50 clients"):
        Simulation(load("digits", given)[1].plan())
