"""A stream is its name: nothing else decides what it draws."""

import hashlib
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch

from fedglad.rng import stream

NAMES: list[tuple[Any, ...]] = [
    (1, "cohort"),
    (2, "cohort"),
    (-1, "cohort"),
    (1, "batches"),
    (1, "cohort", 0),
    (1, "cohort", 1),
    (1, "cohort", "1"),
    (1, "cohort", 1, 2),
    (1, "cohort", 12),
    (1, "cohort", "1", "2"),
    (1, "cohort", "1, 2"),
    (1, 'cohort", 1'),
    (1, "kohört"),
    (2**70, "cohort"),
]


def draws(*name: Any) -> list[float]:
    return stream(*name).random(4).tolist()


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_the_same_name_gives_the_same_draws(name: tuple[Any, ...]):
    assert draws(*name) == draws(*name)


def test_different_names_give_different_draws():
    found = [number for name in NAMES for number in draws(*name)]
    assert len(set(found)) == len(found)


def test_a_stream_is_pcg64_with_the_sha256_of_its_name_as_state():
    """PCG64 by hand (O'Neill 2014): 128 bits of state, 64 bits out, XSL-RR."""
    words = struct.unpack("<4Q", hashlib.sha256(b"[1, 'cohort', 40]").digest())
    start, sequence = words[0] << 64 | words[1], words[2] << 64 | words[3]
    multiplier, mask = 0x2360ED051FC65DA44385DF649FCCF645, 2**128 - 1
    increment = (sequence << 1 | 1) & mask
    state = ((increment + start) * multiplier + increment) & mask
    by_hand: list[int] = []
    for _ in range(3):
        state = (state * multiplier + increment) & mask
        mixed, turn = (state >> 64) ^ (state & (2**64 - 1)), state >> 122
        by_hand.append((mixed >> turn | mixed << (64 - turn)) & (2**64 - 1))
    assert stream(1, "cohort", 40).bit_generator.random_raw(3).tolist() == by_hand


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers_name_the_same_stream_as_pythons(integer: Any):
    assert draws(integer(3), "cohort", integer(7)) == draws(3, "cohort", 7)


@pytest.mark.parametrize(
    "name", [(1.0, "cohort"), ("1", "cohort"), (1, "cohort", 1.5), (1, "x", None)]
)
def test_what_is_neither_an_integer_nor_a_string_names_nothing(name: tuple[Any, ...]):
    with pytest.raises(TypeError):
        stream(*name)


def test_no_global_generator_is_touched():
    before = random.getstate(), torch.get_rng_state().tolist()
    numpys = np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002
    stream(1, "cohort", 0).random(1000)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpys  # noqa: NPY002
