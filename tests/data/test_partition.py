"""What holds for every partition of the registry."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.data.partition import (
    REGISTRY,
    Centralised,
    Dirichlet,
    FedNLP,
    Iid,
    LabelSkew,
    Natural,
    Partition,
    Quantity,
    Shards,
    named,
)
from fedglad.rng import stream

class_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
every_partition = pytest.mark.parametrize("name", REGISTRY)
every_drawn = pytest.mark.parametrize("name", sorted(REGISTRY.keys() - {"natural", "centralised"}))


def make(name: str, n: int, clients: int, **settings: Any) -> tuple[Partition, int]:
    """A partition that n samples and so many clients fit, and its number of clients."""
    given = {"classes_per_client": 8, "key": np.arange(n) % clients, **settings}
    return named(name, **given), 1 if name == "centralised" else clients


def split(name: str, labels: np.ndarray, clients: int, seed: int = 0, **settings: Any):
    partition, clients = make(name, len(labels), clients, seed=seed, **settings)
    return partition.split(labels, clients, stream(seed, "partition"))


@every_partition
@given(
    sizes=class_sizes,
    share=st.floats(0, 1),
    alpha=st.floats(1e-3, 1e3),
    stretch=st.integers(1, 10**9),
    seed=st.integers(0, 9),
)
def test_every_index_once_and_every_client_at_least_one(name, sizes, share, alpha, stretch, seed):
    """Also if classes are empty, and labels neither begin at 0 nor follow each other."""
    labels = np.repeat(np.arange(len(sizes)), sizes) * stretch - 7
    labels = stream(seed, "order").permutation(labels)
    n, clients = len(labels), max(1, round(share * len(labels)))
    if name == "fednlp":
        alpha = max(alpha, 0.1)  # what it refuses is below
    parts = split(name, labels, clients, seed, alpha=alpha)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert len(parts) == (1 if name == "centralised" else clients)
    assert min(map(len, parts)) >= 1
    assert all(part.dtype == np.int64 for part in parts)


@every_partition
def test_equal_generators_give_equal_partitions(name):
    labels = stream(0, "labels").integers(0, 7, 500)
    first, again = (split(name, labels, 13, seed=1) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


@every_drawn
def test_other_generators_give_other_partitions(name):
    labels = stream(0, "labels").integers(0, 7, 500)
    first, other = (split(name, labels, 13, seed=seed) for seed in (1, 2))
    assert any(set(a) != set(b) for a, b in zip(first, other, strict=True))


@every_partition
def test_one_client_gets_all(name):
    (part,) = split(name, stream(0, "labels").integers(0, 7, 50), 1)
    assert sorted(part.tolist()) == list(range(50))


@every_partition
def test_as_many_clients_as_samples_get_one_each(name):
    parts = split(name, stream(0, "labels").integers(0, 7, 50), 50)
    assert [len(part) for part in parts] == ([50] if name == "centralised" else [1] * 50)


@every_partition
def test_names_of_classes_do_not_matter(name):
    labels = stream(0, "labels").integers(0, 5, 300)
    words = np.array(["ant", "bee", "cow", "dog", "elk"])[labels]
    small = (labels * 60 - 128).astype(np.int8)
    found = [split(name, y, 9) for y in (labels, labels * 10**6 - 7, words, small, labels / 3)]
    for same in zip(*found, strict=True):
        assert all((part == same[0]).all() for part in same)


@every_partition
def test_the_input_is_left_as_it_was(name):
    labels = stream(0, "labels").integers(0, 5, 300)
    before = labels.copy()
    labels.flags.writeable = False
    split(name, labels, 9)
    assert (labels == before).all()


@every_partition
def test_more_clients_than_samples_are_refused(name):
    partition, _ = make(name, 10, 10)
    with pytest.raises(
        ValueError, match=r"11 clients cannot share 10 samples: lower c|clients=11,"
    ):
        partition.split(np.zeros(10), 11, stream(0, "p"))
    with pytest.raises(ValueError, match=r"clients=-1(: a partition needs at least one|, but)"):
        partition.split(np.zeros(10), -1, stream(0, "p"))
    with pytest.raises(ValueError, match=r"one vector, got the shape \(5, 2\)"):
        partition.split(np.zeros((5, 2)), 1, stream(0, "p"))
    with pytest.raises(ValueError, match="1 clients cannot share 0 samples"):
        partition.split(np.zeros(0), 1, stream(0, "p"))


@every_drawn
def test_no_clients_are_refused_where_the_partition_has_no_number_of_its_own(name):
    with pytest.raises(ValueError, match="clients=0: a partition needs at least one client"):
        make(name, 10, 10)[0].split(np.zeros(10), 0, stream(0, "p"))


@pytest.mark.parametrize(
    ("name", "digest"), [("label-skew", "65e2610d965cddeb"), ("iid", "2958d00ab455bf06")]
)
def test_existing_runs_keep_their_partitions(name, digest):
    """Found with the first version. If NumPy's generators change their draws, so may these."""
    labels = stream(0, "labels").integers(0, 10, 1000)
    parts = named(name, alpha=0.1).split(labels, 20, stream(3, "partition"))
    assert [len(part) for part in parts] == [50] * 20
    found = hashlib.sha256(np.concatenate(parts).astype("<i8").tobytes()).hexdigest()
    assert found[:16] == digest


def test_an_unknown_name_is_met_with_the_closest():
    with pytest.raises(
        ValueError, match="unknown partition 'label_skew': did you mean 'label-skew'"
    ):
        named("label_skew")
    with pytest.raises(ValueError, match="'xyz': choose from label-skew, fednlp, dirichlet, iid"):
        named("xyz")


def test_a_named_partition_takes_the_settings_it_has():
    given = {"alpha": 0.5, "classes_per_client": 3, "sigma": 2.0, "key": "keys.txt"}
    assert named("label-skew", **given) == LabelSkew(alpha=0.5)
    assert named("fednlp", **given, seed=3) == FedNLP(alpha=0.5, seed=3)
    assert named("dirichlet", **given) == Dirichlet(alpha=0.5)
    assert named("iid", **given) == Iid()
    assert named("shards", **given) == Shards(classes_per_client=3)
    assert named("quantity", **given) == Quantity(sigma=2.0)
    assert named("centralised", **given) == Centralised()
    natural = named("natural", **given)
    assert isinstance(natural, Natural)
    assert natural.key == "keys.txt"
