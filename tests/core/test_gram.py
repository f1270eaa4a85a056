"""Inner products of a cohort by hand, also of updates whose squares float32 cannot hold."""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from fedglad import Server, Update
from fedglad.core.gram import NETWORK, Gram, trimmed_mean
from fedglad.weights import FedAdp, InverseDistance


def gram(rows: list[list[float]], factor: float = 1.0) -> Gram:
    """Of rows of two tensors, `a` with the first two elements and `b` with the others."""
    layout = Server({"a": torch.zeros(2), "b": torch.zeros(len(rows[0]) - 2)}).layout
    kept = [torch.tensor(row, dtype=torch.float64) * factor for row in rows]
    packed = [layout.pack({"a": x[:2].float(), "b": x[2:].float()}) for x in kept]
    return Gram(layout, packed, max(float(x.norm()) for x in kept))


@pytest.mark.parametrize("k", [0, 20, 30, 40, 60, 65, 70, 76, 80, 100, 120, 130, 140, 149])
def test_products_of_tiny_updates_are_exact(k: int):
    # Whole numbers of ten bits times 2^-k, and the subnormal ones of float32 from k = 126 on:
    # a: 1001² = 1002001, 1001·1003 = 1004003, 1003² = 1006009; b: 0, 0 and 7² = 49
    found = gram([[1001.0, 0.0, 0.0], [1003.0, 0.0, 7.0]], 2.0**-k)
    a, b = found.per_tensor * 4.0**k
    assert a.tolist() == [[1002001.0, 1004003.0], [1004003.0, 1006009.0]]
    assert b.tolist() == [[0.0, 0.0], [0.0, 49.0]]
    assert (found.total * 4.0**k).tolist() == (a + b).tolist()


def test_the_largest_of_a_tiny_cohort_sets_its_scale():
    # Times 2^90, as the smallest needs, the square of the largest is 2^140: float32 has 2^128
    found = gram([[2.0**-90, 0.0, 0.0], [1001.0 * 2.0**-30, 0.0, 0.0]])
    assert found.total[1, 1] == 1002001 * 4.0**-30
    assert found.total[0, 1] == 1001 * 2.0**-120


def test_updates_that_are_all_zero_have_no_products():
    assert gram([[0.0] * 3, [0.0] * 3]).total.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("weighting", [InverseDistance(eps=1e-30), FedAdp()], ids=repr)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1e-30, torch.float32),
        (2.0**-130, torch.float32),
        (1e-30, torch.float64),
        (1e-150, torch.float64),
    ],
)
def test_the_indicator_of_tiny_updates_that_are_kept(weighting: Any, size: float, dtype: Any):
    # 1, 2, 4 times the size, of one direction: √(21/3 / (7/3)²), whatever the size
    server = Server({"w": torch.zeros(2, dtype=dtype)}, weighting=weighting)
    updates = [{"w": torch.tensor([size * k, 0.0], dtype=dtype)} for k in (1, 2, 4)]
    record = server.step([Update(g, client=k) for k, g in enumerate(updates)])
    assert record.gsi_unfiltered == pytest.approx(math.sqrt(7) / (7 / 3), rel=1e-6)


@pytest.mark.parametrize("size", [1e-160, 1e-200, 1e-300, 5e-324])
def test_updates_whose_squares_even_float64_cannot_hold_do_no_harm(size: float):
    server = Server({"w": torch.ones(1, dtype=torch.float64)}, weighting=InverseDistance())
    record = server.step([{"w": torch.tensor([size], dtype=torch.float64)}] * 3)
    assert record.stepped
    assert record.gsi_all == pytest.approx(1.0, abs=1e-3)  # of a few bits
    assert float(server.params["w"]) == 1.0


def test_some_of_the_updates_each_times_its_scale():
    # a of 1 and 3, times 2 and ½: ⟨2g₁, ½g₃⟩ = g₁g₃; client 2 is not among them
    rows = [[1.0, 0.0, 2.0], [9.0, 9.0, 9.0], [3.0, 4.0, 5.0]]
    part = gram(rows).of([0, 2], np.array([2.0, 9.0, 0.5]))
    # per tensor: a: 4·1, 3, ¼·25; b: 4·4, 10, ¼·25
    assert part.per_tensor.tolist() == [[[4.0, 3.0], [3.0, 6.25]], [[16.0, 10.0], [10.0, 6.25]]]
    assert part.total.tolist() == [[20.0, 13.0], [13.0, 12.5]]
    # ‖2g₁ + ½g₃‖²/4: a (3.5, 2): 16.25; b 6.5: 42.25
    assert (part.mean_sq(np.array([0.5, 0.5])) * 4).tolist() == [16.25, 42.25]
    assert part.distances_sq().tolist() == [[0.0, 6.5], [6.5, 0.0]]


# --- robust means ---


def trimmed(rows: list[list[float]], trim: int) -> tuple[list[float], float]:
    """The trimmed mean of these rows, and the sum of the trimmed means of squares."""
    layout = Server({"w": torch.zeros(len(rows[0]))}).layout
    out = layout.zeros()
    squares = trimmed_mean(layout, [layout.pack({"w": torch.tensor(x)}) for x in rows], trim, out)
    return layout.views(out)["w"].tolist(), float(squares[0])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_a_median_is_the_same_in_every_order(n: int):
    # One coordinate for each order of 1, 4, 9, ...: the middle one, or the mean of the middle two
    orders = list(permutations(float(k * k) for k in range(1, n + 1)))
    low, high = ((n + 1) // 2) ** 2, (n // 2 + 1) ** 2
    found, squares = trimmed([list(row) for row in zip(*orders, strict=True)], (n - 1) // 2)
    assert found == [(low + high) / 2] * len(orders)
    assert squares == len(orders) * (low**2 + high**2) / 2


@pytest.mark.parametrize("n", [NETWORK - 1, NETWORK, NETWORK + 1, NETWORK + 2])
def test_a_median_of_many_in_no_order(n: int):
    # 0, 1, ... n − 1 in three orders, two of them by steps that have no divisor in common with n
    steps = [k for k in range(2, n) if math.gcd(k, n) == 1][:2]
    rows = [[float(k), *(float(step * k % n) for step in steps)] for k in range(n)]
    assert trimmed(rows, (n - 1) // 2)[0] == [(n - 1) / 2] * 3
