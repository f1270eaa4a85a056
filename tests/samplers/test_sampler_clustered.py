"""Clustered sampling: the distributions by hand, what they promise, and what is refused."""

import builtins
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedglad.rng import stream
from fedglad.samplers.base import Cohort, Pool
from fedglad.samplers.clustered import Bins, Clustered, _tree, by_similarity, by_size

from .test_sampler_draws import ROUNDS, chi_square, cohorts, of_sizes


def distributions(line: Bins) -> list[dict[int, int]]:
    """n·W_j of each distribution: what of the line lies in its stretch."""
    found: list[Counter[int]] = [Counter() for _ in range(line.r)]
    start = 0
    for k, mass in zip(line.ids.tolist(), line.masses.tolist(), strict=True):
        for j in range(line.r):
            within = min(start + mass, (j + 1) * line.n) - max(start, j * line.n)
            if within > 0:
                found[j][k] += within
        start += mass
    assert start == line.r * line.n
    return [dict(part) for part in found]


def points(*x: float) -> Tensor:
    return torch.tensor(x)[:, None]


def similar(sizes: list[int], r: int, *x: float) -> list[dict[int, int]]:
    """The distributions for clients whose updates are the numbers x."""
    return distributions(by_similarity(np.array(sizes), _tree(points(*x)), r))


# ------------------------------------------------------------------------------------- by hand


def test_by_size_the_largest_are_poured_first():
    # n = 10, r = 3: masses 3·n_k = 12 (k=1), 9 (k=2), 6 (k=3), 3 (k=0), into bins of 10:
    #   1: 10 | 1: 2, 2: 8 | 2: 1, 3: 6, 0: 3
    line = by_size(np.array([1, 4, 3, 2]), 3)
    assert distributions(line) == [{1: 10}, {1: 2, 2: 8}, {2: 1, 3: 6, 0: 3}]


def test_by_size_equal_clients_fill_the_bins_evenly():
    # n = 6, r = 3: 3 each, two to a bin of 6
    assert distributions(by_size(np.ones(6, int), 3)) == [{0: 3, 1: 3}, {2: 3, 3: 3}, {4: 3, 5: 3}]


def test_by_similarity_two_clusters_are_two_distributions():
    # Equal sizes, updates 0, 10, .1, 10.2: {0, 2} (.1 apart) and {1, 3} (.2) have mass 2·2 = n each
    assert similar([1, 1, 1, 1], 2, 0, 10, 0.1, 10.2) == [{0: 2, 2: 2}, {1: 2, 3: 2}]


def test_by_similarity_a_cluster_that_exceeds_a_bin_is_cut_and_the_rest_poured_in():
    # n = 6, r = 2: mass 2 each, bins of 6. Ward joins {0, 1} (.1 apart), {4, 5} (.12), {2, 3}
    # (.15), then {0, 1} with {2, 3}: mass 8 > 6, so they stay apart. Of three clusters of mass 4
    # the first two seed the bins; of the third, 2 goes into each.
    found = similar([1] * 6, 2, 0.0, 0.1, 1.0, 1.15, 9.0, 9.12)
    assert found == [{0: 2, 1: 2, 4: 2}, {2: 2, 3: 2, 5: 2}]


def test_by_similarity_the_largest_clusters_seed_the_bins():
    # n = 10, r = 2: masses 6, 2, 2, 2, 4, 4, bins of 10. Ward joins {1, 2, 3} of 6, {4, 5} of 8;
    # {0} of 6 is nearest to {1, 2, 3}, together 12 > 10. 8 and, of two of 6, the first seed the
    # bins: {4, 5} and {0}. 2 of {1, 2, 3} goes into the first and 4 into the second.
    found = similar([3, 1, 1, 1, 2, 2], 2, 60.0, 50.0, 50.1, 50.25, 0.0, 0.1)
    assert found == [{4: 4, 5: 4, 1: 2}, {0: 6, 2: 2, 3: 2}]


def test_by_similarity_a_client_may_be_poured_into_two_bins():
    # n = 9, r = 2: masses 6, 6, 6, bins of 9, three clusters: 12 > 9. 3 of the last into each.
    assert similar([3, 3, 3], 2, 0.0, 5.0, 9.0) == [{0: 6, 2: 3}, {1: 6, 2: 3}]


def test_a_client_of_more_than_a_bin_has_bins_of_its_own():
    # n = 10, r = 4, bins of 10: client 0 of 6 samples has mass 24: two bins, and 4 more. The others
    # have 4 each: 4 groups for 2 bins, all alike or not.
    for x in ((0, 1, 2, 3, 4), (0, 0, 0, 0, 0)):
        found = similar([6, 1, 1, 1, 1], 4, *x)
        assert found[:2] == [{0: 10}, {0: 10}]
        assert sum(part.get(0, 0) for part in found) == 24
        assert [sum(part.values()) for part in found] == [10] * 4


@pytest.mark.parametrize("entry", [0, -1])
def test_by_similarity_sees_all_of_a_long_update(entry: int):
    # Two kinds that differ only in one entry, of an update longer than one product's columns
    updates = torch.zeros(4, (1 << 16) + 3)
    updates[:, 1] = 1
    updates[[1, 3], entry] = 5
    line = by_similarity(np.ones(4, int), _tree(updates), 2)
    assert sorted(sorted(part) for part in distributions(line)) == [[0, 2], [1, 3]]


# ------------------------------------------------------------------------------- of any clients

some_sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=25)


@given(some_sizes, st.data())
def test_the_distributions_sum_to_r_times_each_clients_share(sizes: list[int], data: Any):
    """Σ_j W_jk = r n_k/n, and each W_j sums to 1: to the last sample, for any tree."""
    r = data.draw(st.integers(1, len(sizes) + 3))
    x = data.draw(st.lists(st.floats(-10, 10), min_size=len(sizes), max_size=len(sizes)))
    n = sum(sizes)
    for line in (by_size(np.array(sizes), r), by_similarity(np.array(sizes), _tree(points(*x)), r)):
        found = distributions(line)
        assert [sum(part.values()) for part in found] == [n] * r
        for k, size in enumerate(sizes):
            assert sum(part.get(k, 0) for part in found) == r * size


def test_by_similarity_whole_clusters_stay_together():
    """Five kinds of clients, of equal mass: five distributions, whatever the order."""
    kinds = stream(1, "kinds").permutation(np.arange(40) % 5)
    line = by_similarity(np.ones(40, int), _tree(points(*(10.0 * kinds).tolist())), 5)
    assert all(len({int(kinds[k]) for k in part}) == 1 for part in distributions(line))


# -------------------------------------------------------------------------------------- drawing

SIZES = (1, 4, 3, 2)


def with_updates(*x: float | None) -> Pool:
    kept = {k: torch.tensor([value]) for k, value in enumerate(x) if value is not None}
    return Pool(len(SIZES), lambda k: SIZES[k], lambda k: None, kept.get)


KINDS = pytest.mark.parametrize(
    ("by", "pool"),
    [
        ("size", of_sizes(*SIZES)),
        ("similarity", with_updates(None, None, None, None)),
        ("similarity", with_updates(1.0, None, 9.0, 1.1)),
    ],
    ids=["size", "similarity, nothing known", "similarity"],
)


def line_of(by: str, pool: Pool) -> Bins:
    if by == "size":
        return by_size(np.array(SIZES), 3)
    rows = [pool.last(k) for k in range(4)]
    tree = _tree(torch.stack([torch.zeros(1) if row is None else row for row in rows]))
    return by_similarity(np.array(SIZES), tree, 3)


@KINDS
def test_one_client_of_each_distribution(by: Any, pool: Pool):
    # Each distribution gives one client, independently: the chance of a cohort is the sum of
    # W_1a · W_2b · W_3c over the ways to draw it. At most 20 cohorts of 3 of 4: χ²₁₉, 43.8.
    line = line_of(by, pool)
    expected: dict[Any, float] = {}
    first, second, third = distributions(line)
    for a, b, c in product(first, second, third):
        cohort = frozenset(Counter([a, b, c]).items())
        expected[cohort] = expected.get(cohort, 0) + first[a] * second[b] * third[c] / 1000
    assert len(expected) <= 20
    found, weights, rng = Counter[Any](), np.zeros(4), stream(1, "test")
    for _ in range(ROUNDS):
        cohort = Cohort.of_draws(line.draw(rng))
        assert cohort.weights
        times = [round(3 * w) for w in cohort.weights]
        assert [m / 3 for m in times] == list(cohort.weights)
        found[frozenset(zip(cohort.ids, times, strict=True))] += 1
        weights[list(cohort.ids)] += cohort.weights
    assert chi_square(found, expected) < 43.8
    # E[w_k] = n_k/n; a mean of 20,000 weights in [0, 1] has a standard error of at most .0036
    assert weights / ROUNDS == pytest.approx(np.array(SIZES) / 10, abs=0.011)


@KINDS
def test_the_sampler_draws_from_them(by: Any, pool: Pool):
    line, rng = line_of(by, pool), stream(1, "test")
    for cohort in cohorts(Clustered(clients_per_round=3, by=by), pool, rounds=50):
        assert cohort == Cohort.of_draws(line.draw(rng))


def test_those_without_an_update_count_as_zero():
    # 0 and 3 sent about 5; 1 and 2 nothing yet: with equal sizes these two are one distribution
    kept = {0: torch.tensor([5.0, 0]), 3: torch.tensor([5.1, 0])}
    pool = Pool(4, lambda k: 1, lambda k: None, kept.get)
    sampler = Clustered(clients_per_round=2, by="similarity")
    pairs = {frozenset(c.ids) for c in cohorts(sampler, pool, rounds=200)}
    assert pairs == {frozenset(p) for p in ((0, 1), (0, 2), (3, 1), (3, 2))}


# -------------------------------------------------------------------------------------- refused


def test_updates_that_do_not_fit_are_refused_before_the_run_starts():
    # 1,000 updates of 4 MiB are 3.9 GiB, and a million distances of 8 bytes, four times, 0.03
    whole = Pool(1000, lambda k: 1, lambda k: None, update_bytes=4 << 20)
    with pytest.raises(
        ValueError,
        match=r"clustering 1000 clients by similarity takes 3.9 GiB, more than memory_limit=2: "
        r'raise it, or cluster by = "size"',
    ):
        Clustered(by="similarity").check(whole)
    Clustered(by="similarity", memory_limit=4).check(whole)
    Clustered(by="size").check(whole)


def test_the_distances_of_a_million_clients_do_not_fit_whatever_the_model():
    whole = Pool(10**6, lambda k: 1, lambda k: None)
    with pytest.raises(ValueError, match="clustering 1000000 clients by similarity takes"):
        Clustered(by="similarity").check(whole)


def test_updates_whose_size_was_not_known_are_refused_once_it_is():
    sampler = Clustered(clients_per_round=2, by="similarity", memory_limit=1e-6)  # 1,074 bytes
    big = torch.zeros(100)  # 4 · 400 bytes
    pool = Pool(4, lambda k: 1, lambda k: None, lambda k: big if k == 3 else None)
    sampler.check(pool)
    with pytest.raises(ValueError, match="more than memory_limit=1e-06"):
        next(iter(cohorts(sampler, pool)))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_holds_nothing_is_refused(limit: float):
    with pytest.raises(ValueError, match=r"memory_limit=.*: must be more than 0 GiB"):
        Clustered(memory_limit=limit)


def test_without_scipy_the_way_out_is_told_before_the_run_starts(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"needs scipy: pip install 'fedglad\[clustered\]'"):
        Clustered(clients_per_round=2, by="similarity").check(of_sizes(1, 1, 1))
    Clustered(clients_per_round=2).check(of_sizes(1, 1, 1))


def test_the_bits_do_not_depend_on_torchs_threads():
    updates = torch.from_numpy(stream(1, "updates").standard_normal((30, 70_000)).astype("f4"))
    before = torch.get_num_threads()
    trees: list[bytes] = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            trees.append(_tree(updates).tobytes())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert trees[0] == trees[1]
