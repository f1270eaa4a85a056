"""Transforms of updates: numbers by hand, what is expected of chance, and the bytes of each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedglad.core.layout import Layout, split
from fedglad.rng import stream
from fedglad.transforms import REGISTRY, NoTransform, Quantise, TopK, Transform


def layout_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layout:
    return split({f"t{k}": torch.zeros(shape, dtype=dtype) for k, shape in enumerate(shapes)})[0]


def packed(layout: Layout, *values: Sequence[float]) -> Tensor:
    shapes = zip(layout.names, layout.shapes, values, strict=True)
    return layout.pack({name: torch.tensor(some).view(shape) for name, shape, some in shapes})


def values(layout: Layout, vector: Tensor) -> list[list[float]]:
    return [view.flatten().tolist() for view in layout.views(vector).values()]


def test_quantisation_by_hand():
    """8 bits are 127 levels a side. Of the first tensor s = 254, so a level is 2: 3 is 1 or 2 of
    them, each as likely; of the second s = 0.5, and −0.5 is just −127 levels."""
    layout = layout_of((3,), (2,), (2,))
    update = packed(layout, [254.0, 3.0, -4.0], [-0.5, 0.0], [0.0, 0.0])
    seen: set[float] = set()
    for k in range(20):
        sent, kept = Quantise().apply(update, layout, stream(1, "test", k))
        assert kept is None
        first, second, third = values(layout, sent)
        assert (first[0], first[2], second, third) == (254, -4, [-0.5, 0], [0, 0])
        seen.add(first[1])
    assert seen == {2.0, 4.0}
    assert values(layout, update)[0] == [254, 3, -4]  # it was not changed


def test_quantisation_is_right_in_expectation():
    """The mean of 4000 draws of one element has the variance p(1 − p) (s/L)²/4000 ≤ (s/2L)²/4000:
    within five standard deviations of x, for each of a thousand elements."""
    layout, rng = layout_of((1000,)), np.random.default_rng(1)
    x = rng.standard_normal(1000).astype(np.float32)
    update, n = packed(layout, x.tolist()), 4000
    made = Quantise(bits=4)
    mean = sum(made.apply(update, layout, stream(1, "test", k))[0].double() for k in range(n)) / n
    level = float(np.abs(x).max()) / 7
    off = np.array(values(layout, torch.as_tensor(mean))[0]) - x
    assert np.abs(off).max() < 5 * level / 2 / np.sqrt(n)
    assert abs(off.mean()) < 5 * level / 2 / np.sqrt(n * 1000)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.integers(2, 16),
    st.integers(0, 2**32),
)
def test_a_quantised_element_is_on_the_grid_and_a_level_away_at_most(
    x: list[float], bits: int, seed: int
):
    layout = layout_of((len(x),))
    sent, _ = Quantise(bits=bits).apply(packed(layout, x), layout, np.random.default_rng(seed))
    (got,), levels = values(layout, sent), 2 ** (bits - 1) - 1
    level = max(map(abs, x)) / levels
    for before, after in zip(x, got, strict=True):
        assert abs(before - after) <= level * (1 + 1e-5)
        assert abs(after) <= max(map(abs, x))
        if level:
            assert after / level == pytest.approx(round(after / level), abs=levels * 1e-6)


def test_top_k_with_error_feedback_by_hand():
    """Of (3, −4 | 1, 2, 0) two are sent: −4 and 3; 1 and 2 wait. In the next round v is
    (1, 0 | 3, 2, 0) + (0, 0 | 1, 2, 0) = (1, 0 | 4, 4, 0): 4 and 4, and 1 waits."""
    layout, rng = layout_of((2,), (3,)), np.random.default_rng(1)
    made = TopK(share=0.4)
    assert made.count(layout) == 2
    sent, kept = made.apply(packed(layout, [3.0, -4.0], [1.0, 2.0, 0.0]), layout, rng)
    assert kept is not None
    assert (values(layout, sent), values(layout, kept)) == (
        [[3, -4], [0, 0, 0]],
        [[0, 0], [1, 2, 0]],
    )
    sent, kept = made.apply(packed(layout, [1.0, 0.0], [3.0, 2.0, 0.0]), layout, rng, kept)
    assert kept is not None
    assert (values(layout, sent), values(layout, kept)) == (
        [[0, 0], [4, 4, 0]],
        [[1, 0], [0, 0, 0]],
    )
    # without it, what is not sent is lost; of equal ones the first are sent
    alone = TopK(share=0.4, feedback=False)
    sent, kept = alone.apply(packed(layout, [1.0, 1.0], [-1.0, 1.0, 1.0]), layout, rng)
    assert (values(layout, sent), kept) == ([[1, 1], [0, 0, 0]], None)


@given(st.integers(0, 2**32), st.integers(1, 100))
def test_top_k_loses_nothing_but_time(seed: int, percent: int):
    """What was sent and what waits is what was made: Σ sent + e = Σ g, as far as floats go."""
    layout, rng = layout_of((3, 5), (7,), dtype=torch.float64), np.random.default_rng(seed)
    made, total, kept = TopK(share=percent / 100), layout.zeros(), None
    sum_sent = layout.zeros()
    for _ in range(4):
        g = packed(layout, rng.standard_normal(15).tolist(), rng.standard_normal(7).tolist())
        sent, kept = made.apply(g, layout, rng, kept)
        assert int((sent != 0).sum()) == made.count(layout)
        total += g
        sum_sent += sent
    assert kept is not None
    assert torch.allclose(sum_sent + kept, total, rtol=1e-12, atol=1e-12)


def test_the_bytes_by_hand():
    layout = layout_of((10, 10), (7,), (0,))  # 107 elements, and a tensor without any
    assert NoTransform().size(layout) == 428
    assert Quantise().size(layout) == 100 + 4 + 7 + 4
    assert Quantise(bits=2).size(layout) == 25 + 4 + 2 + 4  # 14 bits are 2 bytes
    assert TopK(share=0.1).size(layout) == 10 * (4 + 4)
    assert TopK(share=1e-9).size(layout) == 8  # at least one
    double = layout_of((100,), dtype=torch.float64)
    assert [NoTransform().size(double), Quantise().size(double)] == [800, 108]
    assert TopK(share=0.1).size(double) == 10 * (8 + 4)


TRANSFORMS = [name for name in REGISTRY if name != "none"]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_row_gives_the_same_for_the_same_draw_and_changes_no_input(name: str):
    layout = layout_of((8, 9), (5,))
    made: Transform = REGISTRY[name]()
    update = packed(layout, torch.randn(72).tolist(), torch.randn(5).tolist())
    kept, before = update.flip(0) * 0, update.clone()
    first, left = made.apply(update, layout, stream(3, "test", 1), kept)
    again, left_again = made.apply(update, layout, stream(3, "test", 1), kept)
    assert torch.equal(first, again)
    assert torch.equal(update, before)
    assert (left is None) == (not made.keeps)
    assert left is None or (left_again is not None and torch.equal(left, left_again))
    assert (first.dtype, first.shape) == (update.dtype, update.shape)
    assert not bool(first[layout.padding].any())
    assert 0 < made.size(layout) < NoTransform().size(layout)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_the_server_as_it_is(name: str, bad: float):
    layout = layout_of((4,))
    made: Transform = REGISTRY[name]()
    update = packed(layout, [1.0, bad, 2.0, 3.0])
    sent, _ = made.apply(update, layout, np.random.default_rng(1))
    assert not bool(sent.isfinite().all())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_of_nothing_is_nothing(name: str):
    layout = layout_of((6,))
    sent, left = REGISTRY[name]().apply(layout.zeros(), layout, np.random.default_rng(1))
    assert not bool(sent.any())
    assert left is None or not bool(left.any())


@pytest.mark.parametrize(
    ("cls", "bad", "message"),
    [
        (Quantise, {"bits": 1}, "Quantise(bits=1): must be from 2 to 16"),
        (Quantise, {"bits": 17}, "Quantise(bits=17): must be from 2 to 16"),
        (TopK, {"share": 0.0}, "TopK(share=0.0): must be in (0, 1]"),
        (TopK, {"share": float("nan")}, "TopK(share=nan): must be in (0, 1]"),
    ],
)
def test_a_bad_setting_is_refused(cls: Any, bad: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(**bad)


def test_rows_are_settings():
    assert len(set(REGISTRY.values())) == len(REGISTRY)
    for cls in REGISTRY.values():
        assert all(field.kw_only for field in fields(cls))
        assert hash(cls()) == hash(cls())


@dataclass(frozen=True, kw_only=True)
class Half(Transform):
    """An own one: half precision."""

    def apply(
        self, update: Tensor, layout: Layout, rng: np.random.Generator, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return update.half().to(update.dtype), None

    def size(self, layout: Layout) -> int:
        return 2 * sum(layout.numels)
