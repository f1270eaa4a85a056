"""Weightings by hand: equal, by samples, FedAdp, inverse distance, optimal."""

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedglad import Record, Server, Update
from fedglad.core.gram import Gram
from fedglad.core.layout import split
from fedglad.filters import MultiKrum
from fedglad.weights import (
    Equal,
    FedAdp,
    InverseDistance,
    Optimal,
    Samples,
    optimal_probabilities,
)


def updates(**clients: tuple[list[float], float]) -> list[Update]:
    return [
        Update({"w": torch.tensor(g)}, client=name, weight=n) for name, (g, n) in clients.items()
    ]


def shares(record: Record) -> list[float]:
    return [c["weight"] for c in record.clients]


def one_dimension(weighting: Samples, points: list[float], n: list[float]) -> tuple[float, Record]:
    server = Server({"w": torch.zeros(1)}, weighting=weighting)
    pairs = enumerate(zip(points, n, strict=True))
    record = server.step(
        [Update({"w": torch.tensor([float(x)])}, client=k, weight=w) for k, (x, w) in pairs]
    )
    return -float(server.params["w"]), record


@pytest.mark.parametrize("weighting", [None, Samples()])
def test_by_samples_is_the_default(weighting: Any):
    # (1·1 + 3·5)/4 = 4
    mean, record = one_dimension(weighting, [1, 5], [1, 3])
    assert mean == 4
    assert shares(record) == [0.25, 0.75]


def test_equal_weights_know_no_samples():
    # (1 + 5)/2 = 3; Σw‖g‖² = 13, ‖ḡ‖² = 9
    mean, record = one_dimension(Equal(), [1, 5], [1, 3])
    assert mean == 3
    assert shares(record) == [0.5, 0.5]
    assert record.gsi["w"] == pytest.approx(math.sqrt(13 / 9))


def f(phi: float, a: float = 5.0) -> float:
    return a * (1 - math.exp(-math.exp(-a * (phi - 1))))


def test_fedadps_curve():
    # f(0) = 5(1 - e^-e^5) = 5, f(1) = 5(1 - 1/e) = 3.1606, f(π/2) = 5(1 - e^-e^-2.854) = .28
    assert f(0) == pytest.approx(5)
    assert f(1) == pytest.approx(3.1606, abs=1e-4)
    assert f(math.pi / 2) == pytest.approx(0.2800, abs=1e-3)


def test_fedadp_weighs_by_the_angle_to_the_mean():
    # n = 3, 1; g = (1, 0), (0, 1): ḡ = (.75, .25), φ = atan(1/3) = .32175, atan(3) = 1.24905
    # f = 5.0000, 1.2507; weights ∝ 3e^5 = 445.24 and e^1.2507 = 3.4928: .99222, .00778
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp())
    record = server.step(updates(a=([1.0, 0.0], 3), b=([0.0, 1.0], 1)))
    assert shares(record) == pytest.approx([0.99222, 0.00778], abs=1e-5)
    assert (-server.params["w"]).tolist() == pytest.approx([0.99222, 0.00778], abs=1e-5)
    # Σw‖g‖² = 1, ‖ḡ‖² = .99222² + .00778²: the indicator sees the new weights
    assert record.gsi["w"] == pytest.approx(1 / math.hypot(0.99222, 0.00778), abs=1e-5)


def test_fedadp_averages_a_clients_angles_over_its_participations():
    # round 0: a, b as above: φ_b = atan(3)
    # round 1: b = (1, 0), c = (0, 1), n = 1: both at π/4; φ̃_b = (1.24905 + .78540)/2 = 1.01722
    #   f_b = 3.0024, f_c = f(π/4) = 4.7315; share of b = 1/(1 + e^1.7291) = .1507
    # round 2: b, d likewise: φ̃_b = (1.24905 + 2·.78540)/3 = .93995, f_b = 3.7041
    #   share of b = 1/(1 + e^1.0274) = .2636
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp())
    server.step(updates(a=([1.0, 0.0], 3), b=([0.0, 1.0], 1)))
    second = server.step(updates(b=([1.0, 0.0], 1), c=([0.0, 1.0], 1)))
    third = server.step(updates(b=([1.0, 0.0], 1), d=([0.0, 1.0], 1)))

    quarter, known = math.pi / 4, math.atan(3)
    for record, phi, by_hand in [
        (second, (known + quarter) / 2, 0.1507),
        (third, (known + 2 * quarter) / 3, 0.2636),
    ]:
        share = 1 / (1 + math.exp(f(quarter) - f(phi)))
        assert share == pytest.approx(by_hand, abs=1e-4)
        assert shares(record) == pytest.approx([share, 1 - share], abs=1e-5)


def test_fedadp_with_another_alpha():
    # alpha 1: f = 1 - e^-e^(1-φ): φ = .32175 gives .8605, φ = 1.24905 gives .5414
    # weights ∝ 3e^.8605 = 7.093, e^.5414 = 1.718
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp(alpha=1))
    record = server.step(updates(a=([1.0, 0.0], 3), b=([0.0, 1.0], 1)))
    raw = [3 * math.exp(f(math.atan(1 / 3), 1)), math.exp(f(math.atan(3), 1))]
    assert raw == pytest.approx([7.093, 1.718], abs=2e-3)
    assert shares(record) == pytest.approx([w / sum(raw) for w in raw], abs=1e-5)


def test_fedadp_nearly_silences_a_client_that_points_backwards():
    # g = 1, 1, 1, -1: ḡ = 1/2, angles 0, 0, 0, π; f(0) = 5, f(π) = 5(1 - e^-e^-10.7) = 1.1e-4
    # share of the last = 1/(1 + 3e^5) = .00224; mean = 1 - 2·.00224
    mean, record = one_dimension(FedAdp(), [1, 1, 1, -1], [1] * 4)
    last = 1 / (1 + 3 * math.exp(5))
    assert shares(record)[3] == pytest.approx(last, rel=1e-3)
    assert mean == pytest.approx(1 - 2 * last, rel=1e-5)


def test_fedadp_needs_to_know_the_client():
    server = Server({"w": torch.zeros(1)}, weighting=FedAdp())
    known = Update({"w": torch.ones(1)}, client=1)
    record = server.step([{"w": torch.ones(1)}, known])
    assert [c.get("rejected") for c in record.clients] == ["FedAdp needs Update(client=...)", None]


def test_fedadp_forgets_a_skipped_round():
    # b's angle in the skipped round would have been 0 or π/4, not atan(3)
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp(), min_clients=2)
    before = server.state_dict()["weighting"]
    assert not server.step(updates(b=([1.0, 0.0], 1))).stepped
    assert server.state_dict()["weighting"] == before


def test_fedadp_forgets_what_the_filter_left_out():
    # MultiKrum on 0, 1, 3, 7, 40 leaves 40 out: its angle is not remembered
    server = Server({"w": torch.zeros(1)}, filter=MultiKrum(f=1), weighting=FedAdp(), guard=None)
    server.step(
        [Update({"w": torch.tensor([x])}, client=str(x)) for x in (0.5, 1.0, 3.0, 7.0, 40.0)]
    )
    assert len(server.state_dict()["weighting"]["state"]) == 4


@pytest.mark.parametrize("n", [[1, 1, 1], [1, 10, 100]])
def test_inverse_distance_to_the_mean_model(n: list[float]):
    # 0, 1, 5: mean 2, distances 2, 1, 3; weights ∝ 1/2, 1, 1/3, that is 3, 6, 2 of 11
    # mean = (6 + 10)/11; the numbers of samples do not enter
    mean, record = one_dimension(InverseDistance(), [0, 1, 5], n)
    assert shares(record) == pytest.approx([3 / 11, 6 / 11, 2 / 11], rel=1e-5)
    assert mean == pytest.approx(16 / 11, rel=1e-5)


def test_a_client_at_the_mean_itself_takes_nearly_all():
    # 1, 2, 3: distances 1, 0, 1; weights ∝ 1, 1e12, 1
    mean, record = one_dimension(InverseDistance(), [1, 2, 3], [1, 1, 1])
    assert shares(record) == pytest.approx([1e-12, 1, 1e-12])
    assert mean == pytest.approx(2, rel=1e-6)


def test_inverse_distance_over_several_tensors():
    # a = 0, 0, 6 and b = 0, 0, 8: mean (2, 8/3), distances 10/3, 10/3, 20/3; weights 2, 2, 1 of 5
    server = Server({"a": torch.zeros(1), "b": torch.zeros(1)}, weighting=InverseDistance())
    points = [(0.0, 0.0), (0.0, 0.0), (6.0, 8.0)]
    record = server.step([{"a": torch.tensor([a]), "b": torch.tensor([b])} for a, b in points])
    assert shares(record) == pytest.approx([0.4, 0.4, 0.2], rel=1e-5)


def test_inverse_distance_of_equal_updates_is_equal():
    # all distances are 0: 1e12 each
    mean, record = one_dimension(InverseDistance(), [2, 2, 2, 2], [1, 2, 3, 4])
    assert shares(record) == pytest.approx([0.25] * 4)
    assert mean == 2


# ------------------------------------------------------------------------------------- optimal


@pytest.mark.parametrize(
    ("u", "m", "p"),
    [
        # N = 4. l = 4: m + l − N = 2, and 2·4 = 8 ≤ 1 + 2 + 3 + 4 = 10: p = 2u/10
        ([1, 2, 3, 4], 2, [0.2, 0.4, 0.6, 0.8]),
        # l = 4: 2·10 > 16. l = 3: 1·3 ≤ 6: p = u/6, and 10/6 is cut to 1
        ([1, 2, 3, 10], 2, [1 / 6, 1 / 3, 1 / 2, 1]),
        # the same in another order
        ([10, 2, 1, 3], 2, [1, 1 / 3, 1 / 6, 1 / 2]),
        # m = 3. l = 4: 3·4 > 10. l = 3: 2·3 ≤ 6: p = 2u/6
        ([1, 2, 3, 4], 3, [1 / 3, 2 / 3, 1, 1]),
        # m = 1: l = 4: 1·4 ≤ 10: p = u/10
        ([1, 2, 3, 4], 1, [0.1, 0.2, 0.3, 0.4]),
        ([5, 5, 5, 5], 2, [0.5] * 4),
        ([1, 2, 3, 4], 4, [1] * 4),
        ([1, 2, 3, 4], 9, [1] * 4),
        # who sends nothing need not be kept
        ([0, 0, 1, 3], 2, [0, 0, 1, 1]),
        ([0, 0, 0, 3], 2, [0, 0, 0, 1]),
        ([0, 0, 0, 0], 2, [0.5] * 4),
    ],
)
def test_optimals_probabilities(u: list[float], m: int, p: list[float]):
    assert optimal_probabilities(np.array(u, float), m).tolist() == pytest.approx(p)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(1, 25))
def test_optimals_probabilities_sum_to_m_and_vary_least(u: list[float], m: int):
    """Of all p ≤ 1 with Σp = m, Σ u²/p is least where p ∝ u but for those that are 1."""
    norms = np.array(u)
    p = optimal_probabilities(norms, m)
    assert (p > 0).all()
    assert (p <= 1).all()
    assert p.sum() == pytest.approx(min(m, len(u)))
    below = p < 1
    ratios = p[below] / norms[below]
    assert ratios == pytest.approx(np.full(len(ratios), ratios[0] if len(ratios) else 0))
    if below.any():  # who is always kept would deserve more
        assert (norms[~below] * ratios[0] >= 1 - 1e-9).all()


G, N = [3.0, -4.0, 2.0, 2.0], [1.0, 1.0, 3.0, 5.0]
"""w = .1, .1, .3, .5, so u = .3, .4, .6, 1 and Σ w g = .3 − .4 + .6 + 1 = 1.5."""


def gram() -> Gram:
    layout, _, _ = split({"w": torch.zeros(1)})
    return Gram(layout, [layout.pack({"w": torch.tensor([g])}) for g in G], 4.0)


def draws(weighting: Optimal, rounds: int) -> list[np.ndarray]:
    """The weights of many rounds with the same updates."""
    known, weights, state, found = gram(), np.array(N), {}, []
    for _ in range(rounds):
        given, state = weighting.reweigh(weights, known, [0, 1, 2, 3], state)
        found.append(given)
    return found


@pytest.mark.parametrize(
    ("m", "p"),
    [
        # l = 4: 2·1 ≤ 2.3: p = 2u/2.3
        (2, [0.6 / 2.3, 0.8 / 2.3, 1.2 / 2.3, 2 / 2.3]),
        # p = u/2.3
        (1, [0.3 / 2.3, 0.4 / 2.3, 0.6 / 2.3, 1 / 2.3]),
        # l = 4: 3·1 > 2.3; l = 3: 2·.6 ≤ 1.3: p = 2u/1.3, the last always
        (3, [0.6 / 1.3, 0.8 / 1.3, 1.2 / 1.3, 1]),
    ],
)
def test_optimal_keeps_by_its_probabilities_and_estimates_without_bias(m: int, p: list[float]):
    # Each set of those kept has its chance Π p Π (1 − p), over 1 − q of not being empty: at most
    # 15 sets over 20,000 rounds, χ²₁₄, 36.1. E[w_k] = n_k/n within 4 standard errors.
    q = math.prod(1 - x for x in p)
    found = np.array(draws(Optimal(kept=m), 20_000))
    weights = (1 - q) * np.array(N) / 10 / p
    assert np.allclose(found, np.where(found > 0, weights, 0), rtol=1e-12)
    sets = Counter(map(tuple, (found > 0).tolist()))
    statistic = 0.0
    for kept in product((True, False), repeat=4):
        pairs = zip(p, kept, strict=True)
        chance = math.prod(x if k else 1 - x for x, k in pairs) / (1 - q) * any(kept)
        if chance:
            statistic += (sets[kept] - 20_000 * chance) ** 2 / (20_000 * chance)
        else:
            assert not sets[kept]
    assert statistic < 36.1
    errors = found.std(axis=0) / math.sqrt(20_000)
    assert (np.abs(found.mean(axis=0) - np.array(N) / 10) <= 4 * errors + 1e-12).all()


def test_optimal_in_a_server():
    # kept = 2: p = .6/2.3, .8/2.3, 1.2/2.3, 2/2.3, q = .73913·.65217·.47826·.13043 = .03007
    p = [0.6 / 2.3, 0.8 / 2.3, 1.2 / 2.3, 2 / 2.3]
    q = math.prod(1 - x for x in p)
    assert q == pytest.approx(0.03007, abs=1e-5)
    server = Server({"w": torch.zeros(1)}, weighting=Optimal(kept=2, seed=3))
    cohorts: set[tuple[int, ...]] = set()
    for _ in range(10):
        before = float(server.params["w"])
        pairs = enumerate(zip(G, N, strict=True))
        record = server.step(
            [Update({"w": torch.tensor([g])}, client=k, weight=n) for k, (g, n) in pairs]
        )
        assert record.stepped
        kept = [k for k in range(4) if k not in record.rejected]
        expected = [(1 - q) * N[k] / 10 / p[k] if k in kept else 0 for k in range(4)]
        assert shares(record) == pytest.approx(expected)
        step = sum(share * g for share, g in zip(expected, G, strict=True))
        assert before - float(server.params["w"]) == pytest.approx(step, rel=1e-5)
        assert set(record.rejected.values()) <= {"left out by Optimal(kept=2, seed=3)"}
        # W Σ w‖g‖² / ‖Σ w g‖²: weights that do not sum to 1 leave GSI as it is
        some = [expected[k] for k in kept]
        top = sum(some) * sum(expected[k] * G[k] ** 2 for k in kept)
        if len(kept) > 1 and abs(step) > 1e-3:
            assert record.gsi["w"] == pytest.approx(math.sqrt(top / step**2), rel=1e-5)
        cohorts.add(tuple(kept))
    assert len(cohorts) > 2
    assert server.state_dict()["weighting"]["state"] == {"round": [10]}


def test_optimal_of_updates_that_are_all_zero_keeps_some():
    for seed in range(20):
        server = Server({"w": torch.ones(1)}, weighting=Optimal(kept=1, seed=seed))
        record = server.step([{"w": torch.zeros(1)}] * 4)
        assert record.stepped
        assert float(server.params["w"]) == 1


def test_optimal_weighs_what_the_filter_left():
    # MultiKrum leaves 40 out; 4 are left, and kept = 4: all, with their own shares
    server = Server({"w": torch.zeros(1)}, filter=MultiKrum(f=1), weighting=Optimal(kept=4))
    record = server.step(
        [
            Update({"w": torch.tensor([x])}, client=k)
            for k, x in enumerate((1.0, 2.0, 3.0, 4.0, 40.0))
        ]
    )
    assert shares(record) == pytest.approx([0.25, 0.25, 0.25, 0.25, 0])


@pytest.mark.parametrize("kept", [0, -3])
def test_optimal_that_keeps_nothing_is_refused(kept: int):
    with pytest.raises(ValueError, match=rf"Optimal\(kept={kept}\): must be 1 or more"):
        Optimal(kept=kept)
