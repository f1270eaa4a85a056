"""Synthetic(α, β): made when asked, the same each time, and distributed as the recipe says."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from fedglad.data.federation import Federation
from fedglad.data.synthetic import Synthetic


def test_a_million_clients_keep_nothing():
    large, small = Synthetic(clients=10**6), Synthetic(clients=100)
    tracemalloc.start()
    try:
        data = Synthetic(clients=10**6, samples=16).load_federation()
        for k in range(0, 10**6, 50_000):
            data.client(k)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20_000  # bytes; 20 clients of 16 × 60 float32 would be 77,000
    assert len(pickle.dumps(large)) <= len(pickle.dumps(small)) + 8


def test_a_client_is_the_same_in_any_population_and_order():
    few, many = Synthetic(clients=10), Synthetic(clients=10**6)
    expected = [few.client(k) for k in range(10)]
    for k in reversed(range(10)):
        x, y = many.client(k)
        assert x.equal(expected[k][0])
        assert y.equal(expected[k][1])
    assert not Synthetic(seed=1).client(0)[0][:5].equal(expected[0][0][:5])


def test_the_test_set_is_held_out_from_the_first_clients():
    data: Federation = Synthetic(clients=10**6, samples=18, test_clients=7)
    x, y = data.test()
    assert x.shape == (14, 60)  # 18/9 = 2 of each of 7 clients
    assert y.shape == (14,)
    seen = {tuple(row) for k in range(7) for row in data.client(k)[0].tolist()}
    assert not seen & {tuple(row) for row in x.tolist()}
    assert Synthetic(clients=7, samples=18).test()[0].equal(x)


def test_held_out_samples_follow_their_clients_rule():
    # In one dimension with two classes, x ↦ argmax(w x + b) has one threshold.
    data = Synthetic(clients=1, features=1, classes=2, samples=9000)
    (x, y), (held_x, held_y) = data.client(0), data.test()
    ends = [(float(x[y == c].min()), float(x[y == c].max())) for c in (0, 1)]
    assert len(held_y) == 1000
    for c in (0, 1):
        inside = (held_x[:, 0] > ends[c][0]) & (held_x[:, 0] < ends[c][1])
        assert (held_y[inside] == c).all()


def test_sizes_are_those_of_leaf():
    data = Synthetic(clients=3000)
    sizes = np.array([data.size(k) for k in range(3000)])
    assert (sizes.min(), sizes.max()) == (5, 1000)
    assert 22 < np.median(sizes) < 28  # e³ + 5 = 25.1, rounded down
    # P(LogNormal(3, 2) ≥ 995) = P(Z ≥ (ln 995 − 3)/2 = 1.95) = 0.026
    assert 0.015 < np.mean(sizes == 1000) < 0.037
    assert all(len(data.client(k)[1]) == sizes[k] for k in range(50))


def test_inputs_have_the_recipes_moments():
    x = Synthetic(samples=40_000, features=8).client(3)[0].double()
    spread = torch.arange(1, 9, dtype=torch.float64) ** -1.2
    assert torch.allclose(x.var(0), spread, rtol=0.05)
    correlation = torch.corrcoef(x.T) - torch.eye(8)
    assert correlation.abs().max() < 0.03


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_beta_spreads_the_clients_inputs(beta):
    # The mean of client k's v over 60 features is B + N(0, 1/60); samples add Σj^−1.2/60²/500.
    data = Synthetic(clients=400, beta=beta, samples=500)
    centres = np.array([float(data.client(k)[0].mean()) for k in range(400)])
    assert centres.var() == pytest.approx(beta**2 + 1 / 60, rel=0.25)


def test_alpha_changes_no_label():
    # u adds u·(Σx_j + 1) to every logit alike.
    plain, spread = Synthetic(alpha=0.0), Synthetic(alpha=5.0)
    for k in range(20):
        assert plain.client(k)[0].equal(spread.client(k)[0])
        assert plain.client(k)[1].equal(spread.client(k)[1])


def test_labels_are_counted_over_all_classes():
    data = Synthetic(samples=100, classes=12)
    y = data.client(4)[1]
    assert data.labels(4).tolist() == [int((y == c).sum()) for c in range(12)]


@pytest.mark.parametrize("k", [-1, 100])
def test_an_unknown_client_is_refused(k):
    with pytest.raises(IndexError, match=rf"client {k}: there are clients 0 … 99"):
        Synthetic().client(k)
    with pytest.raises(IndexError, match=rf"client {k}: there are clients 0 … 99"):
        Synthetic(samples=3).size(k)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clients", 0),
        ("alpha", -1.0),
        ("beta", float("nan")),
        ("features", 0),
        ("classes", 1),
        ("samples", 0),
        ("test_clients", 0),
    ],
)
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"Synthetic\({name}={value}\): must be"):
        Synthetic(**{name: value})
