"""Partitions by label, by hand: label skew and its reassigning, the symmetric one, shards."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.data.partition import Dirichlet, FedNLP, LabelSkew, Shards
from fedglad.data.partition.dirichlet import dirichlet_counts
from fedglad.data.partition.label_skew import label_skew_counts
from fedglad.data.partition.shards import shards_by_class
from fedglad.rng import stream

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
NEWS = [  # 20 Newsgroups, "bydate", training texts
    *(480, 584, 591, 590, 578, 593, 585, 594, 598, 597),
    *(600, 595, 591, 594, 593, 599, 546, 564, 465, 377),
]

class_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


def labels_of(sizes) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def top_share(labels: np.ndarray, parts: list[np.ndarray]) -> float:
    return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))


def test_a_class_that_ran_out_is_reassigned_in_proportion():
    # 12 samples, 3 clients: L = 4 each.
    # client 0, q = (1, 0, 0): takes 4, 0, 0 and leaves 0, 4, 4.
    # client 1, q = (.6, .4, 0): wants round(2.4) = 2, round(1.6) = 2, 0. Class 0 lacks 2, and
    #   classes 1 and 2 each give ceil(4/8 * 2) = 1. Then 2 of class 1: takes 0, 3, 1.
    # client 2 gets the rest: 0, 1, 3.
    counts = label_skew_counts(np.array([[1, 0, 0], [0.6, 0.4, 0]]), np.array([4, 4, 4]))
    assert counts.tolist() == [[4, 0, 0], [0, 3, 1], [0, 1, 3]]


def test_the_smallest_rest_gives_first():
    # 12 samples, 3 clients: L = 4 each.
    # client 0, q = (.75, .25, 0): wants 3, 1, 0. Class 0 has 2 and lacks 1; left are 3 and 7, so
    #   class 1 gives ceil(3/10 * 1) = 1, which fills the gap, and class 2 nothing. Then 1 of
    #   class 1: takes 2, 2, 0 and leaves 0, 1, 7.
    # client 1, q = (0, 1, 0): wants 0, 4, 0. Class 1 has 1 and lacks 3: class 2 gives 3.
    # client 2 gets the rest: 0, 0, 4.
    counts = label_skew_counts(np.array([[0.75, 0.25, 0], [0, 1, 0]]), np.array([2, 3, 7]))
    assert counts.tolist() == [[2, 2, 0], [0, 1, 3], [0, 0, 4]]


def test_rounding_is_capped_by_the_room_and_filled_by_the_last_class():
    # 14 samples, 2 clients, L = 7. q = (.5, .5, 0): round(3.5) = 4 (to even), then 4 capped to 3.
    assert label_skew_counts(np.array([[0.5, 0.5, 0]]), np.array([5, 5, 4]))[0].tolist() == [
        4,
        3,
        0,
    ]
    # q = (.2, .2, .6): round(1.4) = 1 twice; the last class gets all room, 5, has 4, and lacks 1:
    # classes 0 and 1 both have 4 left, and the first of equals gives ceil(4/8 * 1) = 1.
    assert label_skew_counts(np.array([[0.2, 0.2, 0.6]]), np.array([5, 5, 4]))[0].tolist() == [
        2,
        1,
        4,
    ]


def in_words(shares: np.ndarray, sizes: list[int], digits: int = 9) -> list[list[int]]:
    """METHODS.md's description, sentence by sentence, with its second pass.

    Portions are rounded to so many digits: with 99, they are floats with all their error.
    """
    clients, room = len(shares) + 1, sum(sizes) // (len(shares) + 1)
    left, result = list(sizes), []
    for q in shares:
        took, space = [0] * len(sizes), room
        for c in range(len(sizes)):
            want = space if c == len(sizes) - 1 else min(round(q[c] * room), space)
            space -= want
            own = min(want, left[c])
            took[c] += own
            left[c] -= own
            gap = want - own
            others = sorted((i for i in range(len(sizes)) if i != c), key=lambda i: left[i])
            before, whole = list(left), gap
            for each in (1, 2):
                for i in others:
                    share = before[i] / max(sum(before), 1) * (whole if each == 1 else gap)
                    given = min(left[i], math.ceil(round(share, digits)), gap)
                    took[i] += given
                    left[i] -= given
                    gap -= given
        result.append(took)
    assert clients == len(result) + 1
    return [*result, left]


@given(
    sizes=class_sizes, clients=st.integers(1, 20), alpha=st.floats(0.01, 100), seed=st.integers(0)
)
def test_counts_are_those_of_the_description(sizes, clients, alpha, seed):
    sizes = [size for size in sizes if size]
    shares = stream(seed, "q").dirichlet(alpha * np.array(sizes) / sum(sizes), clients - 1)
    assert label_skew_counts(shares, np.array(sizes)).tolist() == in_words(shares, sizes)


@given(sizes=class_sizes, share=st.floats(0, 1), alpha=st.floats(1e-3, 1e3), seed=st.integers(0, 9))
def test_label_skew_has_equal_sizes_with_the_rest_at_the_last_client(sizes, share, alpha, seed):
    labels = labels_of(sizes)
    n, clients = len(labels), max(1, round(share * len(labels)))
    parts = LabelSkew(alpha=alpha).split(labels, clients, stream(seed, "partition"))
    rest = n - n // clients * clients
    assert [len(part) for part in parts] == [n // clients] * (clients - 1) + [n // clients + rest]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (MNIST, [600] * 100),
        ([5_000] * 10, [500] * 100),  # CIFAR-10
        ([30_000] * 4, [1_200] * 100),  # AG News
        (NEWS, [113] * 99 + [127]),  # 11,314 = 100 · 113 + 14
    ],
)
def test_the_sizes_seen_on_the_original(sizes, expected):
    labels = stream(0, "order").permutation(labels_of(sizes))
    parts = LabelSkew(alpha=0.1).split(labels, 100, stream(0, "partition"))
    assert [len(part) for part in parts] == expected
    assert (np.sort(np.concatenate(parts)) == np.arange(len(labels))).all()


def test_the_mean_largest_share_is_the_published_one():
    # METHODS.md: about 0.87 at α = 0.1 with 10 nearly balanced classes; one seed spreads by 0.02.
    labels = labels_of(MNIST)
    shares = [top_share(labels, LabelSkew().split(labels, 100, stream(s, "p"))) for s in range(20)]
    assert 0.83 < np.mean(shares) < 0.88
    assert top_share(labels, LabelSkew(alpha=1e6).split(labels, 100, stream(0, "p"))) < 0.13
    assert top_share(labels, LabelSkew(alpha=1e-6).split(labels, 100, stream(0, "p"))) > 0.88


def test_the_two_conventions_of_alpha():
    # A symmetric Dir_10(0.1) has a mean largest share of 0.66 (METHODS.md); label-skew needs a
    # total of 0.1 · 10 = 1 for the same, up to what reassigning takes away.
    labels = labels_of(MNIST)
    for kind, alpha in ((Dirichlet, 0.1), (LabelSkew, 1.0)):
        found = [kind(alpha=alpha).split(labels, 100, stream(s, "p")) for s in range(10)]
        assert 0.62 < np.mean([top_share(labels, parts) for parts in found]) < 0.70


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_fednlps_draws_one_after_the_other(alpha, seed):
    """The order of the original's draws: classes shuffled, a draw thrown away, client after client.

    Every client then takes the next ones of each class, so its counts say which. With α = 0.1 and
    seed 2 an error of rounding gives clients 96 to 98 one sample more or less of some classes.
    """
    labels = stream(seed, "order").permutation(labels_of(MNIST))
    legacy = np.random.RandomState(seed)
    piles = [np.flatnonzero(labels == c) for c in range(10)]
    for pile in piles:
        legacy.shuffle(pile)
    concentration = [alpha * (size / 60_000) for size in MNIST]
    legacy.dirichlet(concentration)
    shares = np.array([legacy.dirichlet(concentration) for _ in range(99)])
    ends = np.cumsum(in_words(shares, MNIST, digits=99), axis=0)
    parts = FedNLP(alpha=alpha, seed=seed).split(labels, 100, stream(0, "unused"))
    assert [len(part) for part in parts] == [600] * 100
    for k, part in enumerate(parts):
        begin = ends[k - 1] if k else np.zeros(10, int)
        own = [pile[a:b] for pile, a, b in zip(piles, begin, ends[k], strict=True)]
        assert set(part) == set(np.concatenate(own))


def test_fednlps_clients_of_mnist():
    # Class counts of all hundred, by the original's algorithm written out step by step.
    labels = labels_of(MNIST)
    parts = FedNLP(alpha=0.1).split(labels, 100, stream(0, "p"))
    found = [np.bincount(labels[part], minlength=10).tolist() for part in parts]
    assert found[0] == [0, 0, 600, 0, 0, 0, 0, 0, 0, 0]
    assert hashlib.sha256(str(found).encode()).hexdigest()[:16] == "19de5c7959d3aebd"


def test_fednlp_depends_on_its_own_seed_alone():
    labels = labels_of(MNIST)
    first, same = (FedNLP().split(labels, 100, stream(s, "p")) for s in (0, 1))
    other = FedNLP(seed=1).split(labels, 100, stream(0, "p"))
    assert all((a == b).all() for a, b in zip(first, same, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_fednlp_refuses_an_alpha_below_the_legacy_generators_range():
    # Gamma draws with a shape of 1e-4/2 are U^20000, 0 in doubles for almost every U.
    with pytest.raises(ValueError, match=r"FedNLP\(alpha=0.0001\): too small for NumPy's legacy"):
        FedNLP(alpha=1e-4).split(labels_of([10, 10]), 5, stream(0, "p"))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_fednlp_refuses_a_seed_that_the_legacy_generator_does_not_take(seed):
    with pytest.raises(ValueError, match=rf"FedNLP\(seed={seed}\): the legacy generator takes 0"):
        FedNLP(seed=seed)


def test_dirichlet_cuts_each_class_at_the_cumulated_shares():
    # class 0, 10 samples, shares .25 .5 .25: cut at ⌊2.5⌋ = 2 and ⌊7.5⌋ = 7, so 2, 5, 3.
    # class 1, 3 samples, shares 0 .5 .5: cut at 0 and ⌊1.5⌋ = 1, so 0, 1, 2.
    counts = dirichlet_counts(np.array([[0.25, 0.5, 0.25], [0, 0.5, 0.5]]), np.array([10, 3]))
    assert counts.tolist() == [[2, 0], [5, 1], [3, 2]]


def test_the_largest_client_gives_of_its_largest_class():
    # Shares 1 0 0 and 0 1 0 of 4 and 5 samples: clients have (4, 0), (0, 5), (0, 0). With least 3,
    # client 2 gets from the richest each time: client 1 (5 of class 1), then 0 and 1 have 4 each
    # and the first of equals gives (class 0), then client 1 with 4 (class 1).
    shares = np.array([[1.0, 0, 0], [0, 1.0, 0]])
    counts = dirichlet_counts(shares, np.array([4, 5]), least=3)
    assert counts.tolist() == [[3, 0], [0, 3], [1, 2]]
    # With least 1, only the first step.
    assert dirichlet_counts(shares, np.array([4, 5])).tolist() == [[4, 0], [0, 4], [0, 1]]


@given(
    sizes=class_sizes,
    share=st.floats(0, 1),
    alpha=st.floats(1e-100, 1e100),
    least=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_dirichlet_leaves_no_client_short(sizes, share, alpha, least, seed):
    labels = labels_of(sizes)
    clients = max(1, round(share * (len(labels) // least)))
    if clients * least > len(labels):
        return
    parts = Dirichlet(alpha=alpha, least=least).split(labels, clients, stream(seed, "p"))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(map(len, parts)) >= least


def test_dirichlet_ends_where_drawing_anew_would_not():
    # 300 clients share 3 classes with α near 0: each class goes to one client as a whole, so at
    # least 297 would have nothing in every draw.
    labels = labels_of([500, 500, 500])
    parts = Dirichlet(alpha=1e-100).split(labels, 300, stream(0, "p"))
    assert min(map(len, parts)) == 1
    assert sorted(map(len, parts))[:297] == [1] * 297


def test_a_large_alpha_is_near_to_iid():
    # α = 1e9: shares of 1/4 up to 1e-5, and 1,000/4 = 250 up to one sample by cutting.
    labels = labels_of([1000, 1000])
    parts = Dirichlet(alpha=1e9).split(labels, 4, stream(0, "p"))
    counts = np.array([np.bincount(labels[part]) for part in parts])
    assert np.abs(counts - 250).max() <= 1


def test_dirichlet_refuses_a_least_that_cannot_be():
    with pytest.raises(ValueError, match="4 clients cannot have 3 of 10 samples each: lower cl"):
        Dirichlet(least=3).split(np.zeros(10), 4, stream(0, "p"))
    with pytest.raises(ValueError, match=r"Dirichlet\(least=0\): must be 1 or more"):
        Dirichlet(least=0)


@pytest.mark.parametrize("kind", [LabelSkew, FedNLP, Dirichlet])
@pytest.mark.parametrize("alpha", [0, -1, math.inf, math.nan, 1e-101, 1e101])
def test_an_impossible_alpha_is_refused(kind, alpha):
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}\(alpha=.*\): must be above 0 and finite"
    ):
        kind(alpha=alpha)


def test_shards_go_to_the_class_whose_shards_are_the_largest():
    # 6 shards for classes of 10, 20, 3: one each. The 4th: of 10, 20, 3 the largest is 20, now
    # 20/2 = 10 each. The 5th: 10 and 10, the first: 10/2 = 5. The 6th: class 1, 20/3.
    assert shards_by_class(np.array([10, 20, 3]), 6).tolist() == [2, 3, 1]


def test_shards_are_cut_evenly_and_dealt_whole():
    # 2 classes of 6 and 3 samples, 3 clients with one shard each: class 0 has 6/2 = 3 + 3, class 1
    # has 3. So every client has 3 samples of one class, and class 0 is at two of them.
    labels = np.array([5, 5, 5, 5, 5, 5, 8, 8, 8])
    parts = Shards(classes_per_client=1).split(labels, 3, stream(0, "p"))
    assert sorted(labels[part].tolist() for part in parts) == [[5, 5, 5], [5, 5, 5], [8, 8, 8]]


@given(sizes=class_sizes, share=st.floats(0, 1), k=st.integers(1, 9), seed=st.integers(0, 9))
def test_a_client_has_at_most_k_classes(sizes, share, k, seed):
    labels = labels_of(sizes)
    clients, classes = max(1, round(share * len(labels))), np.count_nonzero(sizes)
    partition = Shards(classes_per_client=k)
    if clients * k < classes:
        with pytest.raises(ValueError, match=f"cannot own all {classes} classes: raise classes_p"):
            partition.split(labels, clients, stream(seed, "p"))
        return
    parts = partition.split(labels, clients, stream(seed, "p"))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(1 <= len(set(labels[part])) <= k for part in parts)


def test_the_way_out_of_too_few_shards_works():
    labels = labels_of([5] * 10)
    with pytest.raises(ValueError, match=r"to at least 4, or clients"):
        Shards(classes_per_client=2).split(labels, 3, stream(0, "p"))
    assert len(Shards(classes_per_client=4).split(labels, 3, stream(0, "p"))) == 3


def test_mcmahans_split_of_mnist():
    # 200 shards of about 300; of one class, they differ by one at most.
    labels = labels_of(MNIST)
    parts = Shards().split(labels, 100, stream(0, "p"))
    assert all(580 < len(part) < 620 for part in parts)
    assert np.mean([len(set(labels[part])) for part in parts]) > 1.8  # 1 − 1/10 of pairs differ
