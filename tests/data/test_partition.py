"""Partitions: the arithmetic of label skew by hand, and what holds for every partition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.data.partition import REGISTRY, Iid, LabelSkew, label_skew_counts, named
from fedglad.rng import stream

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


def in_words(shares: np.ndarray, sizes: list[int]) -> list[list[int]]:
    """METHODS.md's description, sentence by sentence, with its second pass."""
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
                    given = min(left[i], math.ceil(round(share, 9)), gap)
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
def test_label_skew_uses_every_index_once_in_equal_sizes(sizes, share, alpha, seed):
    labels = labels_of(sizes)
    n, clients = len(labels), max(1, round(share * len(labels)))
    parts = LabelSkew(alpha=alpha).split(labels, clients, stream(seed, "partition"))
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    rest = n - n // clients * clients
    assert [len(part) for part in parts] == [n // clients] * (clients - 1) + [n // clients + rest]


@given(sizes=class_sizes, share=st.floats(0, 1), seed=st.integers(0, 9))
def test_iid_uses_every_index_once_in_sizes_that_differ_by_one(sizes, share, seed):
    labels = labels_of(sizes)
    clients = max(1, round(share * len(labels)))
    parts = Iid().split(labels, clients, stream(seed, "partition"))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    lengths = [len(part) for part in parts]
    assert len(lengths) == clients
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("name", REGISTRY)
def test_a_partition_depends_on_its_generator_alone(name):
    labels = stream(0, "labels").integers(0, 7, 500)
    first, again, other = (named(name).split(labels, 13, stream(s, "partition")) for s in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any(set(a) != set(b) for a, b in zip(first, other, strict=True))


def test_names_of_classes_do_not_matter():
    labels = stream(0, "labels").integers(0, 5, 300)
    words = np.array(["ant", "bee", "cow", "dog", "elk"])[labels]
    parts = [LabelSkew().split(y, 9, stream(1, "p")) for y in (labels, labels * 100 - 7, words)]
    assert all((a == b).all() and (a == c).all() for a, b, c in zip(*parts, strict=True))


def test_the_mean_largest_share_is_the_published_one():
    # METHODS.md: about 0.87 at α = 0.1 with 10 balanced classes; one seed spreads by 0.02.
    labels = np.repeat(np.arange(10), 6000)
    shares = [top_share(labels, LabelSkew().split(labels, 100, stream(s, "p"))) for s in range(20)]
    assert 0.83 < np.mean(shares) < 0.88
    assert top_share(labels, LabelSkew(alpha=1e6).split(labels, 100, stream(0, "p"))) < 0.11
    assert top_share(labels, LabelSkew(alpha=1e-6).split(labels, 100, stream(0, "p"))) > 0.89


def test_equal_sizes_with_the_rest_at_the_last_client():
    # The sizes seen on the original: 20 Newsgroups, 11,314 texts over 100 clients.
    parts = LabelSkew().split(stream(0, "labels").integers(0, 20, 11_314), 100, stream(0, "p"))
    assert [len(part) for part in parts] == [113] * 99 + [127]


@pytest.mark.parametrize("alpha", [0, -1, math.inf, math.nan])
def test_an_impossible_alpha_is_refused(alpha):
    with pytest.raises(ValueError, match=r"LabelSkew\(alpha=.*\): must be above 0 and finite"):
        LabelSkew(alpha=alpha)


@pytest.mark.parametrize("name", REGISTRY)
def test_more_clients_than_samples_are_refused(name):
    with pytest.raises(ValueError, match="11 clients cannot share 10 samples: lower clients to at"):
        named(name).split(np.zeros(10), 11, stream(0, "p"))
    with pytest.raises(ValueError, match="clients=0: a partition needs at least one client"):
        named(name).split(np.zeros(10), 0, stream(0, "p"))
    with pytest.raises(ValueError, match=r"one vector, got the shape \(5, 2\)"):
        named(name).split(np.zeros((5, 2)), 2, stream(0, "p"))


def test_an_unknown_name_is_met_with_the_closest():
    with pytest.raises(
        ValueError, match="unknown partition 'label_skew': did you mean 'label-skew'"
    ):
        named("label_skew")
    with pytest.raises(ValueError, match="unknown partition 'xyz': choose from label-skew, iid"):
        named("xyz")


def test_a_named_partition_takes_the_settings_it_has():
    assert named("label-skew", alpha=0.5) == LabelSkew(alpha=0.5)
    assert named("iid", alpha=0.5) == Iid()
