"""Filters and robust means by hand, on updates with one or two coordinates."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedglad import Glad, Record, Server, Update
from fedglad.adapters import FedExP, Fixed
from fedglad.filters import Filter, Krum, Median, MultiKrum, NormClip, TrimmedMean
from fedglad.weights import Equal, FedAdp, InverseDistance


def step(
    filter: Filter, *updates: float | list[float], weights: list[float] | None = None, **more: Any
) -> tuple[list[float], Record]:
    """(the mean that was subtracted, the record) of one round from θ = 0."""
    rows = [u if isinstance(u, list) else [u] for u in updates]
    server = Server({"w": torch.zeros(len(rows[0]))}, filter=filter, guard=None, **more)
    each = zip(rows, weights or [1.0] * len(rows), strict=True)
    record = server.step(
        [Update({"w": torch.tensor(g)}, client=k, weight=w) for k, (g, w) in enumerate(each)]
    )
    return (-server.params["w"]).tolist(), record


def kept(record: Record) -> list[int]:
    return [c["id"] for c in record.clients if "rejected" not in c]


def test_norm_clipping_shortens_what_is_too_long():
    # ‖(3, 4)‖ = 5 > 1: (.6, .8); (0, .5) stays; mean (.3, .65)
    mean, _ = step(NormClip(max_norm=1), [3.0, 4.0], [0.0, 0.5])
    assert mean == pytest.approx([0.3, 0.65])


def test_norm_clipping_is_seen_by_the_indicator_and_reported_before_and_after():
    # before: Σw‖g‖² = (25 + .25)/2 = 12.625; ḡ = (1.5, 2.25), ‖ḡ‖² = 7.3125
    # after:  Σw‖g‖² = (1 + .25)/2 = .625;    ḡ = (.3, .65),   ‖ḡ‖² = .5125
    _, record = step(NormClip(max_norm=1), [3.0, 4.0], [0.0, 0.5])
    assert record.gsi_unfiltered == pytest.approx(math.sqrt(12.625 / 7.3125))
    assert record.gsi_all == record.gsi["w"] == pytest.approx(math.sqrt(0.625 / 0.5125))
    assert record.clients[0]["sq_norm"] == pytest.approx(25)


def test_norm_clipping_measures_all_tensors_together_and_keeps_the_weights():
    # ‖(3; 4)‖ = 5, c = 2.5: halved; w = 1/4, 3/4: a = .25·1.5 + .75·1, b = .25·2
    server = Server({"a": torch.zeros(1), "b": torch.zeros(1)}, filter=NormClip(max_norm=2.5))
    server.step(
        [
            Update({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, weight=1),
            Update({"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}, weight=3),
        ]
    )
    assert float(server.params["a"]) == pytest.approx(-1.125)
    assert float(server.params["b"]) == pytest.approx(-0.5)


def test_norm_clipping_leaves_zero_and_the_limit_itself_alone():
    # min(1, c/‖g‖): no 0/0, and exactly 1 at ‖g‖ = c
    assert step(NormClip(max_norm=5), [0.0, 0.0], [3.0, 4.0])[0] == [1.5, 2.0]


def test_norm_clipping_of_a_cohort_that_is_kept():
    # 2, 1, -4, clipped to 2, 1, -2: mean 1/3, distances 5/3, 2/3, 7/3, weights 14, 35, 10 of 59
    # ḡ = (28 + 35 - 20)/59 = 43/59; Σw‖g‖² = (14·4 + 35·1 + 10·4)/59 = 131/59
    # before the filter and the weighting: Σw‖g‖² = (4 + 1 + 16)/3 = 7, ḡ = -1/3
    mean, record = step(
        NormClip(max_norm=2), 2.0, 1.0, -4.0, weighting=InverseDistance(), distances=True
    )
    assert [c["weight"] for c in record.clients] == pytest.approx([14 / 59, 35 / 59, 10 / 59])
    assert mean == pytest.approx([43 / 59])
    assert record.gsi_all == pytest.approx(math.sqrt(131 * 59) / 43)
    assert record.gsi_unfiltered == pytest.approx(math.sqrt(7 * 9))
    assert record.distances == pytest.approx({0: 5 / 3, 1: 2 / 3, 2: 7 / 3})


class Clipped(MultiKrum):
    """A filter of one's own that shortens and chooses."""

    @property
    def scales(self) -> bool:
        return True

    def scale(self, norm: float) -> float:
        return min(1.0, 4 / norm) if norm else 1.0


def test_a_filter_that_clips_and_chooses_sees_what_it_has_clipped():
    # -8, 0, 1, 3, 40 become -4, 0, 1, 3, 4; with f = 1 the two nearest others:
    #   -4: 16 + 25    0: 1 + 9    1: 1 + 4    3: 1 + 4    4: 1 + 9, so -4 is left out, not 40
    # ḡ = 8/4 = 2; Σw‖g‖² = (0 + 1 + 9 + 16)/4 = 6.5
    mean, record = step(Clipped(f=1), -8.0, 0.0, 1.0, 3.0, 40.0)
    assert kept(record) == [1, 2, 3, 4]
    assert mean == pytest.approx([2.0])
    assert record.gsi_all == pytest.approx(math.sqrt(6.5) / 2)


# Krum, n = 5, f = 1: the n - f - 2 = 2 nearest others of 0, 1, 3, 7, 40:
#   0: 1 + 9 = 10    1: 1 + 4 = 5    3: 4 + 9 = 13    7: 16 + 36 = 52    40: 33² + 37² = 2458
# (with three nearest 3 would win: 4 + 9 + 16 = 29; with one, 0 and 1 would tie)
POINTS = (0.0, 1.0, 3.0, 7.0, 40.0)


@pytest.mark.parametrize(
    ("filter", "ids", "mean"),
    [
        (Krum(f=1), [1], 1),
        (MultiKrum(f=1, m=1), [1], 1),
        (MultiKrum(f=1, m=2), [0, 1], 0.5),
        (MultiKrum(f=1, m=3), [0, 1, 2], 4 / 3),
        (MultiKrum(f=1), [0, 1, 2, 3], 2.75),  # m = n - f
    ],
    ids=repr,
)
def test_krum_keeps_the_lowest_scores(filter: Filter, ids: list[int], mean: float):
    found, record = step(filter, *POINTS)
    assert kept(record) == ids
    assert found == pytest.approx([mean])
    assert record.rejected.keys() == set(range(5)) - set(ids)
    assert [c["id"] for c in record.clients] == [0, 1, 2, 3, 4]
    assert [c["weight"] for c in record.clients] == pytest.approx(
        [1 / len(ids) if k in ids else 0 for k in range(5)]
    )


def test_krum_measures_distances_over_all_tensors():
    # Alone, a = 0, 1, 3, 7, 40 gives client 1; with b = 0, 100, 0, 0, 0 client 1 is far away:
    # 0: 9 + 49 = 58   2: 9 + 16 = 25   3: 16 + 49 = 65; client 2 wins
    server = Server({"a": torch.zeros(1), "b": torch.zeros(1)}, filter=Krum(f=1), guard=None)
    b = (0.0, 100.0, 0.0, 0.0, 0.0)
    record = server.step(
        [
            Update({"a": torch.tensor([x]), "b": torch.tensor([y])}, client=k)
            for k, (x, y) in enumerate(zip(POINTS, b, strict=True))
        ]
    )
    assert kept(record) == [2]
    assert server.params["a"] == -3


@pytest.mark.parametrize(
    ("points", "ids"),
    [((-2.0, -1.0, 1.0, 2.0, 0.0), [1, 2]), ((2.0, 0.0, 1.0, -1.0, -2.0), [1, 2])],
)
def test_krum_breaks_ties_by_the_order_of_the_cohort(points: tuple[float, ...], ids: list[int]):
    # n = 5, f = 1: -1, 0 and 1 all score 1 + 1 = 2; -2 and 2 score 1 + 4
    assert kept(step(Krum(f=1), *points)[1]) == ids[:1]
    assert kept(step(MultiKrum(f=1, m=2), *points)[1]) == ids


def test_multi_krum_averages_the_chosen_by_their_weights():
    # 0 with weight 1, 1 with weight 3: .75; the scores know no weights
    mean, record = step(MultiKrum(f=1, m=2), *POINTS, weights=[1, 3, 500, 500, 500])
    assert mean == pytest.approx([0.75])
    assert [c["weight"] for c in record.clients] == [0.25, 0.75, 0, 0, 0]
    assert step(MultiKrum(f=1, m=2), *POINTS, weights=[1, 3, 5, 5, 5], weighting=Equal())[0] == [
        0.5
    ]


def test_multi_krum_takes_an_outlier_out_of_the_indicator():
    # 1, 1, 1, 1, -3: before, Σw‖g‖² = 13/5 = 2.6, ḡ = 1/5, GSI = sqrt(65); after, all are equal
    _, record = step(MultiKrum(f=1), 1.0, 1.0, 1.0, 1.0, -3.0, adapter=Glad())
    assert record.gsi_unfiltered == pytest.approx(math.sqrt(65))
    assert record.gsi_all == pytest.approx(1)
    assert record.baseline == pytest.approx({"w": 1})


def test_the_median_of_an_odd_number_is_the_middle_of_each_coordinate():
    # 1, 2, 9 and 10, -5, 0
    assert step(Median(), [1.0, 10.0], [2.0, -5.0], [9.0, 0.0])[0] == [2, 0]


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    # 1, 2, 9, 100: (2 + 9)/2; of two: their mean; of one: itself
    assert step(Median(), 100.0, 2.0, 9.0, 1.0)[0] == [5.5]
    assert step(Median(), 1.0, 2.0)[0] == [1.5]
    assert step(Median(), 3.0)[0] == [3]


@pytest.mark.parametrize(
    ("beta", "mean"),
    [
        (0.2, 5.0),  # ⌊.2·5⌋ = 1 a side: (2 + 3 + 10)/3
        (0.4, 3.0),  # ⌊.4·5⌋ = 2 a side: 3
        (0.39, 5.0),  # ⌊1.95⌋ = 1
        (0.19, 23.2),  # ⌊.95⌋ = 0: 116/5
        (0.0, 23.2),
    ],
)
def test_the_trimmed_mean_drops_both_ends(beta: float, mean: float):
    assert step(TrimmedMean(beta=beta), 100.0, 2.0, 1.0, 3.0, 10.0)[0] == pytest.approx([mean])


def test_the_trimmed_mean_drops_29_of_100_although_floats_say_28_point_9():
    # .29·100 is 28.999999999999996 in floats. Of 1², 2², ... 100² those of 30 ... 71 are left:
    # (71·72·143/6 - 29·30·59/6)/42 = (121,836 - 8,555)/42
    squares = [float(k * k) for k in range(1, 101)]
    assert step(TrimmedMean(beta=0.29), *squares)[0] == pytest.approx([113_281 / 42])


@pytest.mark.parametrize(
    ("filter", "updates", "gsi"),
    [
        (Median(), (2.0, 2.0, 0.0), 1.0),  # the median of 4, 4, 0 is 4, over 2²
        (Median(), (-3.0, 1.0, 2.0), 2.0),  # of 9, 1, 4 it is 4, over 1²
        (Median(), (-3.0, 1.0, 2000.0), 3.0),  # of 9, 1, 4e6 it is 9: a long one adds no more
        (Median(), (1.0, 2.0, 4.0, 100.0), math.sqrt(10) / 3),  # (4 + 16)/2, over ((2 + 4)/2)²
        (TrimmedMean(beta=0.25), (-2.0, 1.0, 3.0, 9.0), math.sqrt(6.5) / 2),  # (4 + 9)/2, over 2²
        (TrimmedMean(beta=0.25), (-2.0, 1.0, 3.0, 900.0), math.sqrt(6.5) / 2),
    ],
)
def test_the_indicator_of_a_robust_mean_is_by_the_robust_mean_of_squares(
    filter: Filter, updates: tuple[float, ...], gsi: float
):
    _, record = step(filter, *updates, adapter=Glad())
    assert record.gsi_all == record.gsi["w"] == pytest.approx(gsi)


def test_the_unfiltered_indicator_is_that_of_the_plain_mean():
    # Σw‖g‖² = 8/3, ḡ = 4/3: sqrt((8/3) / (16/9)) = sqrt(1.5)
    _, record = step(Median(), 2.0, 2.0, 0.0, adapter=Glad())
    assert record.gsi_unfiltered == pytest.approx(math.sqrt(1.5))


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12), st.floats(0, 0.49))
def test_the_indicator_of_a_robust_mean_is_never_below_one(updates: list[float], beta: float):
    for filter in (Median(), TrimmedMean(beta=beta)):
        record = step(filter, *updates)[1]
        assert record.gsi["w"] >= 1 - 1e-6


@pytest.mark.parametrize("filter", [Median(), TrimmedMean(beta=0.2)], ids=repr)
def test_a_long_update_cannot_buy_a_larger_step(filter: Filter):
    # γ = ∞: no bounds but the rule's own. Nine honest updates and one that grows
    rng = np.random.default_rng(3)
    honest = [torch.tensor(rng.normal(size=50), dtype=torch.float32) for _ in range(9)]
    scales: list[float] = []
    for boost in (1.0, 1e3, 1e9):
        server = Server({"w": torch.zeros(50)}, adapter=Glad(gamma=10), filter=filter, guard=None)
        for t in range(2):
            long = honest[0] * (boost if t else 1.0)
            scales.append(server.step([{"w": g} for g in [*honest, long]]).scale["w"])
    assert max(scales) < 1.5


@pytest.mark.parametrize(("filter", "mean"), [(Median(), 2.0), (TrimmedMean(beta=0.1), 4.0)])
def test_robust_means_ignore_weights(filter: Filter, mean: float):
    # 1, 2, 9: the median is 2, the untrimmed mean 4; of the squares they are 4 and 86/3
    found, record = step(filter, 1.0, 2.0, 9.0, weights=[1, 1, 100])
    assert found == pytest.approx([mean])
    squares = 4 if filter == Median() else 86 / 3
    assert record.gsi["w"] == pytest.approx(math.sqrt(squares) / mean)
    assert [c["weight"] for c in record.clients] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("filter", "reason"),
    [
        (
            Krum(f=3),
            "Krum with f=3 needs at least 9 updates, got 6: lower f or raise clients_per_round",
        ),
        (MultiKrum(f=2), "MultiKrum with f=2 needs at least 7 updates, got 6"),
        (MultiKrum(f=1, m=6), "needs at least 7 updates, got 6"),  # m ≤ n - f
    ],
)
def test_too_few_updates_skip_the_round(filter: Filter, reason: str):
    mean, record = step(filter, *[1.0] * 6)
    assert record.status == "skipped"
    assert reason in (record.reason or "")
    assert mean == [0]


def test_a_rejected_update_does_not_count_towards_krums_number():
    # n = 5 = 2f + 3 would do, but one is NaN
    _, record = step(Krum(f=1), 1.0, 1.0, 1.0, 1.0, math.nan)
    assert record.status == "skipped"
    assert "got 4" in (record.reason or "")
    assert step(Krum(f=1), 1.0, 1.0, 1.0, 1.0, 2.0, math.nan)[0] == [1]


@pytest.mark.parametrize("filter", [Krum(), Krum(f=2), MultiKrum(m=1)], ids=repr)
@pytest.mark.parametrize("adapter", [Glad(), FedExP()], ids=repr)
def test_a_filter_that_leaves_one_update_is_refused_with_an_adapter_that_compares(
    filter: Filter, adapter: Any
):
    with pytest.raises(ValueError, match=r"leaves one update.*use MultiKrum with m > 1"):
        Server({"w": torch.zeros(1)}, filter=filter, adapter=adapter)
    Server({"w": torch.zeros(1)}, filter=filter, adapter=Fixed(value=0.5))
    Server({"w": torch.zeros(1)}, filter=MultiKrum(), adapter=adapter)


@pytest.mark.parametrize("filter", [Median(), TrimmedMean()], ids=repr)
@pytest.mark.parametrize("weighting", [FedAdp(), InverseDistance()], ids=repr)
def test_a_robust_mean_is_refused_with_a_weighting_it_would_ignore(filter: Filter, weighting: Any):
    with pytest.raises(ValueError, match="ignores weights"):
        Server({"w": torch.zeros(1)}, filter=filter, weighting=weighting)
