"""Samplers: who takes part, how often, at what cost, and what is refused."""

import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from run_support import TINY

from fedglad.config.schema import ConfigError, load
from fedglad.rng import stream
from fedglad.samplers.base import Cohort, Pool
from fedglad.samplers.fedml import FedML
from fedglad.samplers.scripted import Scripted
from fedglad.samplers.uniform import Uniform
from fedglad.simulation.simulation import Simulation


def unasked(ids: Sequence[int]) -> list[float]:
    raise AssertionError("a sampler that needs no losses must not ask for them")


def pool(clients: int, labels: Any = None) -> Pool:
    return Pool(clients, lambda k: 1, labels or (lambda k: None))


def by_class(*largest: int) -> Pool:
    """Client k holds most of class largest[k]."""
    return pool(len(largest), lambda k: np.eye(5, dtype=int)[largest[k]] * 3 + 1)


def draw(sampler: Uniform, t: int, whole: Pool, seed: int = 0) -> tuple[int, ...]:
    return sampler.sample(stream(seed, "cohort", t), t, {}, whole, unasked).ids


# --------------------------------------------------------------------------------------- uniform


def test_every_client_is_as_likely_as_any_other():
    # 21,000 cohorts of 3 of 10: each client 6,300 times, with the variance 6300 · 0.7. As a cohort
    # has three clients always, 9/10 Σ (seen − 6300)² / (6300 · 0.7) is χ² with 9 degrees of
    # freedom, of which 99.9 % are below 27.9. The same for each place in the cohort, by itself.
    sampler, whole = Uniform(clients_per_round=3), pool(10)
    seen = np.zeros(10)
    places = np.zeros((3, 10))
    for t in range(21_000):
        ids = draw(sampler, t, whole)
        seen[list(ids)] += 1
        places[range(3), list(ids)] += 1
    assert 0.9 * ((seen - 6300) ** 2).sum() / (6300 * 0.7) < 27.9
    assert (((places - 2100) ** 2).sum(axis=1) / 2100 < 27.9).all()


def test_every_pair_is_as_likely_as_any_other():
    # 21,000 cohorts of 2 of 5: 10 pairs, 2,100 times each; χ²₉.
    sampler, whole = Uniform(clients_per_round=2), pool(5)
    pairs: dict[tuple[int, ...], int] = {}
    for t in range(21_000):
        pair = tuple(sorted(draw(sampler, t, whole)))
        pairs[pair] = pairs.get(pair, 0) + 1
    assert len(pairs) == 10
    assert sum((n - 2100) ** 2 / 2100 for n in pairs.values()) < 27.9


@pytest.mark.parametrize(("r", "clients"), [(1, 1), (5, 5), (7, 10), (100, 101), (1000, 10**6)])
def test_nobody_takes_part_twice(r: int, clients: int):
    sampler = Uniform(clients_per_round=r)
    for t in range(20):
        ids = draw(sampler, t, pool(clients))
        assert len(set(ids)) == len(ids) == r
        assert all(type(k) is int and 0 <= k < clients for k in ids)


def test_a_million_clients_cost_what_the_cohort_costs():
    sampler, whole = Uniform(clients_per_round=10), pool(10**6)
    draw(sampler, 0, whole)
    tracemalloc.start()
    try:
        draw(sampler, 1, whole)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000


def test_more_than_there_are_is_refused():
    Uniform(clients_per_round=10).check(pool(10))
    with pytest.raises(
        ValueError,
        match=r"clients_per_round=11 is more than the 10 clients there are: lower it or raise "
        r"data.clients",
    ):
        Uniform(clients_per_round=11).check(pool(10))


def test_an_empty_cohort_is_refused():
    with pytest.raises(ValueError, match="clients_per_round=0: must be 1 or more"):
        Uniform(clients_per_round=0)


# ----------------------------------------------------------------------------------------- fedml


def test_fedml_draws_the_cohorts_of_fedmls_logs():
    # Round 0 of 1,000 clients, 10 a round, as logged in github.com/FedML-AI/FedML/issues/359.
    logged = (993, 859, 298, 553, 672, 971, 27, 231, 306, 706)
    assert draw(FedML(clients_per_round=10), 0, pool(1000), seed=5) == logged


def test_fedml_takes_all_clients_in_order():
    assert draw(FedML(clients_per_round=5), 3, pool(5)) == (0, 1, 2, 3, 4)
    assert sorted(draw(FedML(clients_per_round=5), 3, pool(6))) != [0, 1, 2, 3, 4]


def test_fedmls_cohorts_depend_on_the_round_alone():
    first = cohorts(sampler__name="fedml", seed=1)
    assert len(set(first)) == 5
    assert first == cohorts(sampler__name="fedml", seed=2)
    assert first != cohorts(seed=1)
    with pytest.raises(
        ConfigError, match=r"seed='run': FedML's cohorts .* take the sampler uniform"
    ):
        load("digits", {"sampler.name": "fedml", "sampler.seed": "run"})


# ------------------------------------------------------------------------------------- the seeds


def cohorts(**overrides: Any) -> list[tuple[int, ...]]:
    given = {**TINY, "engine.name": "serial", "rounds": 5, "sampler.clients_per_round": 4}
    given |= {key.replace("__", "."): value for key, value in overrides.items()}
    given = dict(sorted(given.items(), key=lambda item: not item[0].endswith("name")))
    with closing(Simulation(load("digits", given)[1].plan())) as simulation:
        return [found.cohort for found in simulation.rounds()]


def test_cohorts_depend_on_the_round_alone():
    first = cohorts(seed=1)
    assert len(set(first)) == 5
    assert cohorts(seed=2) == first
    assert cohorts(adapter__name="none", server__lr=0.1, client__lr=0.001) == first
    assert cohorts(rounds=3) == first[:3]
    assert cohorts(sampler__seed="round", data__seed=4) == first
    assert cohorts(sampler__name="scripted", sampler__clients_per_round=4) == first


def test_cohorts_of_the_run():
    first = cohorts(sampler__seed="run", seed=1)
    assert first != cohorts(seed=1)
    assert first == cohorts(sampler__seed="run", seed=1, adapter__name="none")
    assert first != cohorts(sampler__seed="run", seed=2)
    assert first == cohorts(sampler__seed=1, seed=7)


def test_cohorts_of_a_number():
    first = cohorts(sampler__seed=9, seed=1)
    assert first == cohorts(sampler__seed=9, seed=2)
    assert first != cohorts(sampler__seed=10, seed=1)


def test_a_seed_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"sampler.seed.* = 'rund'"):
        load("digits", {"sampler.seed": "rund"})


# -------------------------------------------------------------------------------------- scripted


def test_a_script_is_played_and_the_other_rounds_are_uniform():
    script = Scripted(clients_per_round=4, cohorts={"1": [7, 3], "3": [0]})
    plain = Uniform(clients_per_round=4)
    whole = pool(10)
    found = [draw(script, t, whole) for t in range(5)]
    assert found[1] == (7, 3)
    assert found[3] == (0,)
    assert [found[t] for t in (0, 2, 4)] == [draw(plain, t, whole) for t in (0, 2, 4)]


def test_clients_of_one_class():
    whole = by_class(0, 1, 1, 2, 1, 1, 3, 1)
    script = Scripted(clients_per_round=3, largest_class={"2": 1})
    script.check(whole)
    assert {*draw(script, 2, whole)} <= {1, 2, 4, 5, 7}
    assert len(set(draw(script, 2, whole))) == 3
    assert draw(script, 2, whole) == draw(script, 2, whole)
    assert draw(script, 2, whole, seed=1) != draw(script, 2, whole, seed=2)
    assert draw(script, 0, whole) == draw(Uniform(clients_per_round=3), 0, whole)


def test_a_script_in_a_run():
    found = cohorts(
        sampler__name="scripted",
        sampler__clients_per_round=3,
        sampler__cohorts={"2": [5, 9]},
        sampler__largest_class={"3": 7},
    )
    assert found[2] == (5, 9)
    assert len(found[3]) == 3
    data: Any = load("digits")[1].sections["data"].load_federation()
    assert {int(data.labels(k).argmax()) for k in found[3]} == {7}


@pytest.mark.parametrize("name", ["-1", "1.5", "first", "", " 1", "03"])
@pytest.mark.parametrize("what", ["cohorts", "largest_class"])
def test_a_round_that_never_comes_is_refused(what: str, name: str):
    """ "03" too: no round is called so, and the script would silently not be played."""
    script: Any = {what: {name: [1] if what == "cohorts" else 1}}
    with pytest.raises(ValueError, match="rounds are whole numbers from 0 on"):
        Scripted(**script)


@pytest.mark.parametrize("client", [-1, 10])
def test_a_client_that_is_not_there_is_refused(client: int):
    script = Scripted(cohorts={"4": [2, client]})
    with pytest.raises(
        ValueError, match=f"scripted round 4 names client {client}: there are 0 to 9"
    ):
        script.check(pool(10))


@pytest.mark.parametrize("cohort", [[], [3, 3]])
def test_a_cohort_with_nobody_or_somebody_twice_is_refused(cohort: list[int]):
    script = Scripted(clients_per_round=2, cohorts={"4": cohort})
    with pytest.raises(ValueError, match=r"scripted round 4 has \[.*\]: name each client once"):
        script.check(pool(10))


@pytest.mark.parametrize(("wanted", "there"), [(1, 2), (4, 0), (99, 0)])
def test_too_few_clients_of_a_class_are_refused(wanted: int, there: int):
    script = Scripted(clients_per_round=3, largest_class={"4": wanted})
    with pytest.raises(
        ValueError,
        match=f"scripted round 4 asks for 3 clients whose largest class is {wanted}: "
        f"there are {there}",
    ):
        script.check(by_class(0, 1, 1, 2))


def test_a_class_is_refused_where_labels_are_unknown():
    script = Scripted(clients_per_round=3, largest_class={"4": 0})
    with pytest.raises(ValueError, match="there are 0"):
        script.check(pool(10))


def test_a_script_that_cannot_be_played_is_refused_before_the_run_starts():
    given = {**TINY, "sampler.name": "scripted", "sampler.cohorts": {"2": [50]}}
    with pytest.raises(ValueError, match="names client 50"):
        Simulation(load("digits", given)[1].plan())


def test_a_cohort_smaller_than_usual_needs_no_larger_population():
    script = Scripted(clients_per_round=2, cohorts={"0": [0, 1, 2]})
    script.check(pool(3))
    assert draw(script, 0, pool(3)) == (0, 1, 2)


# --------------------------------------------------------------------------- a sampler of one's own


class Weighted(Uniform):
    """Weights of its own, which take the place of the numbers of samples."""

    def sample(self, rng: Any, t: int, state: Any, pool: Pool, ask: Any) -> Cohort:
        return Cohort((3, 1), (1.0, 3.0))


def test_a_cohorts_weights_override_the_numbers_of_samples():
    plan = load("digits", {**TINY, "engine.name": "serial", "rounds": 1})[1].plan()
    object.__setattr__(plan, "sampler", Weighted())
    with closing(Simulation(plan)) as simulation:
        (found,) = simulation.rounds()
    assert [client["weight"] for client in found.record.clients] == [0.25, 0.75]
