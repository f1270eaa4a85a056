"""Availability: who can be reached when, by the formula, and what samplers make of it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from run_support import TINY

from fedglad.config.schema import ConfigError, load
from fedglad.rng import stream
from fedglad.samplers.adafl import AdaFL
from fedglad.samplers.availability import bernoulli, cyclic, markov
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.samplers.clustered import Clustered
from fedglad.samplers.md import MD
from fedglad.samplers.optimal import Optimal
from fedglad.samplers.power_of_choice import PowerOfChoice
from fedglad.samplers.scripted import Scripted
from fedglad.samplers.uniform import Uniform
from fedglad.simulation.simulation import Simulation

from .test_sampler_draws import ROUNDS, SIZES, chi_square, cohorts, of_sizes, successive

MANY = 40_000  # clients, each a draw of its own


def constant(ids: Sequence[int]) -> list[float]:
    return [1.0] * len(ids)


def cells(*states: np.ndarray) -> Counter[tuple[bool, ...]]:
    """How many clients were on and off in the given rounds."""
    return Counter(zip(*(state.tolist() for state in states), strict=True))


# ----------------------------------------------------------------------------------- Bernoulli


def test_bernoulli_is_a_new_draw_for_every_client_in_every_round():
    # 40,000 clients in rounds 5, 6, 9: 8 outcomes with .3^on · .7^off; χ²₇, 24.3
    found = cells(*(bernoulli(t, MANY, 0.3, seed=1) for t in (5, 6, 9)))
    chances = {s: 0.3 ** sum(s) * 0.7 ** (3 - sum(s)) for s in product((True, False), repeat=3)}
    assert chi_square(found, chances) < 24.3


def test_neighbours_are_independent():
    # Clients k and k + 1: 20,000 pairs, χ²₃, 16.3
    on = bernoulli(3, MANY, 0.3, seed=1)
    expected = {(True, True): 0.09, (True, False): 0.21, (False, True): 0.21, (False, False): 0.49}
    assert chi_square(cells(on[::2], on[1::2]), expected) < 16.3


# -------------------------------------------------------------------------------------- Markov


@pytest.mark.parametrize("t", [0, 1, 25])
def test_markovs_share_is_stationary_from_the_first_round_on(t: int):
    # A draw is on with .3; on → off: .2·.7 = .14, off → on: .2·.3 = .06: the share that stays is
    # .06/(.06 + .14) = .3. Two outcomes: χ²₁, 10.8
    on = markov(t, MANY, 0.3, 0.8, 1, {})
    assert chi_square(cells(on), {(True,): 0.3, (False,): 0.7}) < 10.8


@pytest.mark.parametrize("apart", [1, 3])
def test_markovs_correlation_falls_by_the_persistence(apart: int):
    # With c = .8^s: both on .3·(c + (1−c)·.3), both off .7·(c + (1−c)·.7), else .3·.7·(1−c) each.
    # s = 1: .258, .658, .042, .042. Four outcomes: χ²₃, 16.3
    c = 0.8**apart
    change = 0.21 * (1 - c)
    expected = {
        (True, True): 0.3 * (c + (1 - c) * 0.3),
        (False, False): 0.7 * (c + (1 - c) * 0.7),
        (True, False): change,
        (False, True): change,
    }
    if apart == 1:
        assert [round(p, 3) for p in expected.values()] == [0.258, 0.658, 0.042, 0.042]
    memo: dict[Any, Any] = {}
    first = markov(10, MANY, 0.3, 0.8, 1, memo)
    second = markov(10 + apart, MANY, 0.3, 0.8, 1, memo)
    assert chi_square(cells(first, second), expected) < 16.3
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(c, abs=0.02)


def test_markov_is_a_chain():
    # What comes next depends on the round before alone: P(on | on, on) = P(on | off, on) = .86
    memo: dict[Any, Any] = {}
    a, b, c = (markov(t, MANY, 0.3, 0.8, 1, memo) for t in (10, 11, 12))
    for past in (a & b, ~a & b):
        assert c[past].mean() == pytest.approx(0.86, abs=4 * (0.86 * 0.14 / past.sum()) ** 0.5)


def test_markov_step_by_step_is_the_definition():
    """Forward from round 0: where the number is below persistence, as before; else drawn anew."""
    on = stream(4, "reachable", 0).random(200) < 0.3
    memo: dict[Any, Any] = {}
    assert (markov(0, 200, 0.3, 0.8, 4, memo) == on).all()
    for t in range(1, 60):
        u = stream(4, "reachable", t).random(200)
        on = np.where(u < 0.8, on, (u - 0.8) / 0.2 < 0.3)
        assert (markov(t, 200, 0.3, 0.8, 4, memo) == on).all()
        assert (markov(t, 200, 0.3, 0.8, 4, {}) == on).all()  # as a resumed run finds it


def test_markov_without_persistence_is_bernoulli():
    memo: dict[Any, Any] = {}
    for t in (0, 1, 7):
        assert (markov(t, 100, 0.3, 0.0, 1, memo) == bernoulli(t, 100, 0.3, 1)).all()


def test_what_is_known_of_a_chain_changes_nothing():
    """In any order of the rounds, and of chains that share the memo."""
    memo: dict[Any, Any] = {}
    for t in (5, 3, 9, 9, 0):
        for chain in ((50, 0.5, 0.9, 1), (50, 0.3, 0.9, 1), (60, 0.5, 0.9, 1), (50, 0.5, 0.9, 2)):
            assert (markov(t, *chain, memo) == markov(t, *chain, {})).all()


# -------------------------------------------------------------------------------------- cyclic


def test_cyclic_by_hand():
    # .4 of 5 rounds: two of five, client k a round after client k − 1
    found = ["".join(".#"[int(on)] for on in cyclic(t, 6, 0.4, 5)) for t in range(6)]
    assert found == [
        "#...##",
        "##...#",
        ".##...",
        "..##..",
        "...##.",
        "#...##",
    ]


def test_cyclic_reaches_every_client_in_the_same_share_of_rounds():
    on = np.array([cyclic(t, 17, 0.25, 8) for t in range(16)])
    assert (on.sum(axis=0) == 4).all()
    assert (cyclic(3, 17, 1.0, 8)).all()


# ---------------------------------------------------------------------------------- in samplers

EVERY: list[Sampler] = [
    Uniform(clients_per_round=3),
    Scripted(clients_per_round=3, cohorts={"1": [0, 4, 2, 1]}, largest_class={"2": 1}),
    MD(clients_per_round=3),
    AdaFL(clients_per_round=3),
    PowerOfChoice(clients_per_round=3, candidates=4),
    Clustered(clients_per_round=3),
    Clustered(clients_per_round=3, by="similarity"),
    Optimal(clients_per_round=3, candidates=4),
]

every_sampler = pytest.mark.parametrize("sampler", EVERY, ids=lambda s: type(s).__name__)
every_model = pytest.mark.parametrize("model", ["bernoulli", "markov", "cyclic"])


def with_model(sampler: Sampler, model: Any, **more: Any) -> Sampler:
    own = {**vars(sampler), "availability": model, **more}
    return type(sampler)(**own)


def everybody(clients: int) -> Pool:
    return Pool(clients, lambda k: 1 + k % 4, lambda k: np.array([0, 5]))


@every_model
@every_sampler
def test_only_those_who_can_be_reached_take_part(sampler: Sampler, model: str):
    pool, some = everybody(9), with_model(sampler, model, reachable=0.3, persistence=0.5)
    some.check(pool)
    sizes: set[int] = set()
    for t in range(60):
        reached = np.flatnonzero(some._reached(t, pool)).tolist()
        cohort = some.sample(stream(0, "cohort", t), t, {}, pool, constant)
        assert set(cohort.ids) <= set(reached)
        assert len(set(cohort.ids)) == len(cohort.ids)
        assert all(type(k) is int for k in cohort.ids)
        assert bool(cohort.ids) == bool(reached) or isinstance(sampler, Scripted)
        if isinstance(sampler, Uniform | AdaFL | PowerOfChoice) and t > 2:
            assert len(cohort.ids) == min(3, len(reached))
        if cohort.weights:
            assert sum(cohort.weights) == pytest.approx(1)
        sizes.add(len(cohort.ids))
    assert 0 in sizes or model == "cyclic"
    assert len(sizes) > 1


@every_model
def test_every_method_meets_the_same_clients(model: str):
    pool = everybody(20)
    found = {tuple(tuple(with_model(s, model)._reached(t, pool)) for t in range(30)) for s in EVERY}
    assert len(found) == 1
    (pattern,) = found
    assert len(set(pattern)) > 5
    other = with_model(EVERY[0], model, seed=7)
    assert pattern == tuple(tuple(other._reached(t, pool)) for t in range(30))
    moved = with_model(EVERY[0], model, availability_seed=7)
    assert (pattern == tuple(tuple(moved._reached(t, pool)) for t in range(30))) == (
        model == "cyclic"
    )


@every_model
def test_who_is_reachable_does_not_depend_on_how_many_there_are(model: str):
    sampler = with_model(EVERY[0], model)
    for t in (0, 4, 30):
        few, many = (sampler._reached(t, everybody(n)) for n in (10, 1000))
        assert (few == many[:10]).all()


def first_drawn(weights: Sequence[float]) -> dict[Any, float]:
    """Each of four clients is there with .6: who is drawn first of those that are, by weight."""
    expected: dict[Any, float] = dict.fromkeys((0, 1, 2, 3, None), 0.0)
    for there in product((True, False), repeat=4):
        chance = 0.6 ** sum(there) * 0.4 ** (4 - sum(there))
        total = sum(w for w, on in zip(weights, there, strict=True) if on)
        for k in range(4):
            if there[k]:
                expected[k] += chance * weights[k] / total
        if not any(there):
            expected[None] += chance
    assert expected[None] == pytest.approx(0.0256)  # .4⁴
    return expected


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [(Uniform(clients_per_round=2), (1, 1, 1, 1)), (MD(clients_per_round=2), SIZES)],
    ids=["uniform", "md"],
)
def test_the_first_of_a_cohort_is_drawn_from_those_who_are_there(sampler: Any, weights: Any):
    # 20,000 rounds, four clients or nobody: χ²₄, 18.5
    some = with_model(sampler, "bernoulli", reachable=0.6)
    found = Counter(c.ids[0] if c.ids else None for c in cohorts(some, of_sizes(*SIZES)))
    assert found.total() == ROUNDS
    assert chi_square(found, first_drawn(weights)) < 18.5


def test_adafl_draws_by_its_probabilities_from_those_who_are_there():
    # Clients 0, 2, 3 are, p ∝ 1, 3, 4: six ordered pairs, χ²₅, 20.5
    state = {"relative": {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}}
    pool = replace(of_sizes(1, 1, 1, 1), ids=np.array([0, 2, 3]))
    sampler, rng = AdaFL(clients_per_round=2), stream(1, "test")
    found = Counter(sampler.draw(rng, 0, state, pool, constant).ids for _ in range(ROUNDS))
    there, pairs = (0, 2, 3), successive([1 / 8, 3 / 8, 4 / 8], 2)
    expected = {(there[a], there[b]): chance for (a, b), chance in pairs.items()}
    assert chi_square(found, expected) < 20.5


def test_a_script_names_who_may_come():
    script = Scripted(
        clients_per_round=2, cohorts={"0": [3, 1, 0]}, availability="cyclic", reachable=0.5, cycle=4
    )
    # round 0: k with −k mod 4 < 2, that is 0, 3, 4, 7
    assert script.sample(stream(0, "c", 0), 0, {}, everybody(8), constant) == Cohort((3, 0))


# --------------------------------------------------------------------------------------- in runs


def given(**more: Any) -> dict[str, Any]:
    return {**TINY, "engine.name": "serial", **{k.replace("__", "."): v for k, v in more.items()}}


@pytest.mark.parametrize(
    "engine", ["serial", "batched", pytest.param("local", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["uniform", "power-of-choice", "optimal"])
def test_a_round_in_which_nobody_can_be_reached_is_skipped(engine: str, name: str):
    # 4 clients, one of 8 rounds each: client t in round t, nobody in rounds 4 to 7
    config = given(
        engine__name=engine,
        data__clients=4,
        rounds=9,
        sampler__name=name,
        sampler__availability="cyclic",
        sampler__reachable=0.125,
        sampler__cycle=8,
    )
    with closing(Simulation(load("digits", config)[1].plan())) as simulation:
        found = list(simulation.rounds())
    assert [round.cohort for round in found] == [(0,), (1,), (2,), (3,), (), (), (), (), (0,)]
    assert [round.record.stepped for round in found] == [True] * 4 + [False] * 4 + [True]
    assert found[4].record.reason == (
        "0 of 0 updates were accepted, 1 are needed: nobody took part"
    )
    assert found[4].test_accuracy == found[7].test_accuracy
    assert found[8].test_loss != found[7].test_loss


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"reachable": 0.0}, "reachable=0.0: must be greater than 0, at most 1"),
        ({"reachable": 1.1}, "reachable=1.1: must be greater than 0, at most 1"),
        ({"persistence": 1.0}, r"persistence=1.0: must be in \[0, 1\)"),
        ({"persistence": -0.1}, r"persistence=-0.1: must be in \[0, 1\)"),
        ({"cycle": 0}, "cycle=0: must be 1 or more"),
        (
            {"availability": "cyclic", "reachable": 0.04},
            "reachable=0.04 of cycle=10 is less than a round: nobody would ever be; raise one",
        ),
        ({"availability": "sometimes"}, "sampler.availability = 'sometimes': must be one of"),
    ],
)
def test_an_availability_that_means_nothing_is_refused(bad: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        load("digits", {f"sampler.{key}": value for key, value in bad.items()})


def test_a_sampler_that_would_not_heed_it_is_refused():
    class Own(Uniform):
        def sample(self, rng: Any, t: int, state: Any, pool: Pool, ask: Any) -> Cohort:
            return Cohort((0,))

    Own()
    with pytest.raises(ValueError, match="Own has its own `sample`, which reaches everybody; let"):
        Own(availability="markov")


def test_a_sampler_without_a_rule_says_so():
    with pytest.raises(NotImplementedError, match="Sampler has no `draw`"):
        Sampler().sample(stream(0, "c", 0), 0, {}, everybody(3), constant)
