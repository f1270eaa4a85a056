"""Partitions that do not look at the labels, by hand: iid, log-normal sizes, keys, one client."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.data.partition import Centralised, Iid, Natural, Quantity
from fedglad.data.partition.sizes import apportioned
from fedglad.rng import stream


@given(n=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_iid_sizes_differ_by_one(n, share, seed):
    clients = max(1, round(share * n))
    lengths = [len(part) for part in Iid().split(np.zeros(n), clients, stream(seed, "partition"))]
    assert len(lengths) == clients
    assert max(lengths) - min(lengths) <= 1


def test_the_largest_remainders_go_up():
    # 10 in proportion to 1 : 2 : 4: quotas 1.43, 2.86, 5.71; floors 1, 2, 5 leave 2, for the
    # remainders .86 and .71.
    assert apportioned(np.array([1.0, 2, 4]), 10).tolist() == [1, 3, 6]
    # Of equal remainders the first go up: 2 in proportion to 1 : 1 : 1.
    assert apportioned(np.ones(3), 2).tolist() == [1, 1, 0]
    assert apportioned(np.ones(3), 0).tolist() == [0, 0, 0]


def test_quantity_gives_one_each_and_the_others_in_proportion():
    # The draws are the first of the stream: z. 3 clients, 103 samples: 1 + shares of 100.
    z = stream(0, "p").standard_normal(3)
    parts = Quantity(sigma=0.5).split(np.zeros(103), 3, stream(0, "p"))
    exact = 100 * np.exp(0.5 * z) / np.exp(0.5 * z).sum()
    assert np.abs(np.array([len(part) - 1 for part in parts]) - exact).max() < 1
    assert sum(map(len, parts)) == 103


@given(
    n=st.integers(1, 300), share=st.floats(0, 1), sigma=st.floats(0, 1e100), seed=st.integers(0, 9)
)
def test_quantity_sizes_sum_to_the_whole_for_every_sigma(n, share, sigma, seed):
    clients = max(1, round(share * n))
    parts = Quantity(sigma=sigma).split(np.zeros(n), clients, stream(seed, "p"))
    assert min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))


def test_sigma_is_the_spread_of_the_logarithms():
    # 400 clients with 2,500 samples on average: the standard deviation of log(size) is σ up to
    # σ/√800 = 3.5 %, four of which are allowed.
    for sigma in (0.25, 0.5, 1.0):
        parts = Quantity(sigma=sigma).split(np.zeros(1_000_000), 400, stream(1, "p"))
        assert np.std([math.log(len(part)) for part in parts]) == pytest.approx(sigma, rel=0.14)
    equal = Quantity(sigma=0).split(np.zeros(10), 4, stream(1, "p"))
    assert sorted(map(len, equal)) == [2, 2, 3, 3]


@pytest.mark.parametrize("sigma", [-0.1, math.inf, math.nan])
def test_an_impossible_sigma_is_refused(sigma):
    with pytest.raises(ValueError, match=r"Quantity\(sigma=.*\): must be in 0 … 1e100"):
        Quantity(sigma=sigma)


LABELS = np.array([0, 1, 1, 0, 2])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (np.array(["b", "a", "b", "c", "a"]), [[1, 4], [0, 2], [3]]),
        (np.array([10, 2, 10, -7, 2]), [[3], [1, 4], [0, 2]]),
        (np.array([2**64 - 1, 2**64 - 3, 0, 0, 0], dtype=np.uint64), [[2, 3, 4], [1], [0]]),
        (np.array([0.5, 0.5, 0.25, 0.5, 0.25]), [[2, 4], [0, 1, 3]]),
    ],
)
def test_every_key_is_a_client_in_the_order_of_keys(keys, expected):
    for clients in (0, len(expected)):
        parts = Natural(key=keys).split(LABELS, clients, stream(0, "p"))
        assert [part.tolist() for part in parts] == expected


def test_keys_are_ranked_alike_by_counting_hashing_and_sorting():
    keys = stream(0, "keys").integers(-128, 128, 4000).astype(np.int8)
    parts = Natural(key=keys).split(keys, 0, stream(0, "p"))
    words = np.array([f"{int(key) + 128:03}" for key in keys])
    for other in (keys.astype(np.int64) * 10**9, words, keys.astype(np.float64)):
        again = Natural(key=other).split(keys, 0, stream(0, "p"))
        assert [a.tolist() for a in again] == [p.tolist() for p in parts]


def test_keys_come_from_a_file(tmp_path: Path):
    np.save(tmp_path / "keys.npy", np.array([3, 1, 3, 3, 1]))
    (tmp_path / "keys.txt").write_bytes("\ufeffzoë\r\nann\r\nzoë\r\nzoë\r\nann\r\n".encode())
    for name in ("keys.npy", "keys.txt"):
        parts = Natural(key=str(tmp_path / name)).split(LABELS, 2, stream(0, "p"))
        assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 3]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("keys.txt", b"a\nb\na\n", r"5 samples need as many keys, got the shape \(3,\)"),
        ("keys.txt", b"a\nb\n\nc\nd\n", "line 3 of .*keys.txt is empty: every sample needs a key"),
        ("keys.txt", b"\xff\xfe", "the keys in .*keys.txt cannot be read: "),
        ("keys.npy", b"a\nb\n", "the keys in .*keys.npy cannot be read: "),
        ("keys.npy", b"", "the keys in .*keys.npy cannot be read: "),
        ("else.npy", b"", "the keys in .*keys.txt cannot be read: .*No such file"),
    ],
)
def test_a_file_without_a_key_for_each_sample_is_refused(tmp_path: Path, name, content, message):
    (tmp_path / name).write_bytes(content)
    path = tmp_path / (name if name != "else.npy" else "keys.txt")
    with pytest.raises(ValueError, match=message):
        Natural(key=path).split(LABELS, 0, stream(0, "p"))


def test_a_number_of_clients_that_is_not_that_of_the_keys_is_refused():
    keys = np.array([1, 1, 2, 2, 2])
    with pytest.raises(
        ValueError, match=r"clients=3, but there are 2 distinct keys.*set clients to"
    ):
        Natural(key=keys).split(LABELS, 3, stream(0, "p"))
    with pytest.raises(ValueError, match="natural needs a key for each sample: set key to a file"):
        Natural()


def test_centralised_is_one_client():
    for clients in (0, 1):
        (part,) = Centralised().split(LABELS, clients, stream(0, "p"))
        assert part.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="clients=2, but centralised has one: set clients to 1"):
        Centralised().split(LABELS, 2, stream(0, "p"))
