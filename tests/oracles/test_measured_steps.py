"""Optimizers that look at the numbers of a round, DoG and FedEve: by hand and in NumPy."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad import Record, Server, Statistics, Update
from fedglad.adapters import Fixed
from fedglad.averages import Poly
from fedglad.core.checkpoint import CheckpointError
from fedglad.optimizers import SGD, DoG, FedEve, Optimizer
from fedglad.server import Collector

Array = np.ndarray


def at(*place: float, optimizer: Optimizer, **settings: Any) -> Server:
    theta = {"w": torch.tensor(place, dtype=torch.float64)}
    return Server(theta, optimizer=optimizer, guard=None, **settings)


def send(server: Server, *cohort: Sequence[float], weights: Sequence[float] = ()) -> Record:
    pairs = zip(cohort, weights or [1.0] * len(cohort), strict=True)
    record = server.step(
        [Update({"w": torch.tensor(g, dtype=torch.float64)}, weight=w) for g, w in pairs]
    )
    assert record.stepped
    return record


def numbers(server: Server) -> dict[str, float]:
    return server.state_dict()["optimizer"]["numbers"]


# --- DoG ---


def test_dog_by_hand():
    # θ_0 = (3, 4), reach = ½: r_ε = ½ (1 + 5) = 3. Before each step, d and G with this round's ḡ:
    # ḡ = (0, 2)    d = 3                      G = 4     η = 3/2     θ = (3, 1)
    # ḡ = (1, 2)    ‖(0, −3)‖ = 3              G = 9     η = 1       θ = (2, −1)
    # ḡ = (0, −4)   ‖(−1, −5)‖ = √26           G = 25    η = √26/5   θ = (2, −1 + 4√26/5)
    # ḡ = (12, 0)   ‖(−1, −.92)‖ < √26: stays  G = 169   η = √26/13
    root = math.sqrt(26)
    server = at(3, 4, optimizer=DoG(reach=0.5))
    send(server, (0, 8), (0, 0), weights=(1, 3))
    assert server.params["w"].tolist() == pytest.approx([3, 1], rel=1e-12)
    send(server, (1, 2))
    assert server.params["w"].tolist() == pytest.approx([2, -1], rel=1e-12)
    assert numbers(server) == pytest.approx({"distance": 3, "sum_sq": 9})
    before = server.state_dict()
    assert not server.step([]).stepped
    assert server.state_dict()["optimizer"] == before["optimizer"]
    send(server, (0, -4))
    assert server.params["w"].tolist() == pytest.approx([2, -1 + 0.8 * root], rel=1e-12)
    send(server, (12, 0))
    expected = [2 - 12 * root / 13, -1 + 0.8 * root]
    assert server.params["w"].tolist() == pytest.approx(expected, rel=1e-12)
    assert numbers(server) == pytest.approx({"distance": root, "sum_sq": 169})


def test_dogs_first_step_is_as_long_as_its_reach_whatever_the_updates():
    # r_ε = 0.01 (1 + 0), of ḡ = 2000 and of 2e-9 alike
    for g in (2000.0, 2e-9):
        server = at(0, optimizer=DoG())
        send(server, (g,))
        assert float(server.params["w"]) == pytest.approx(-0.01, rel=1e-12)


def test_dogs_norms_are_of_the_whole_model_and_the_factor_multiplies():
    # ḡ = (3 | 4), G = 25, r_ε = 1: η = 1/5, and s = 2, lr = ½: θ = −½·2·(3 | 4)/5
    model = {"a": torch.zeros(1).double(), "b": torch.zeros(1).double()}
    g = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    server = Server(model, optimizer=DoG(lr=0.5, reach=1), adapter=Fixed(value=2))
    server.step([g])
    found = [float(server.params[name]) for name in "ab"]
    assert found == pytest.approx([-0.6, -0.8], rel=1e-12)


def test_dogs_sum_does_not_see_the_factor():
    # With s = 2 the first step doubles, and G is the same
    plain, doubled = (at(0, optimizer=DoG(), adapter=Fixed(value=s)) for s in (1, 2))
    for server in (plain, doubled):
        send(server, (3.0,))
    assert numbers(plain) == numbers(doubled)
    assert float(doubled.params["w"]) == pytest.approx(2 * float(plain.params["w"]))


def test_dog_agrees_with_a_numpy_twin_in_both_precisions():
    rng = np.random.default_rng(11)
    sizes = {"a": 7, "b": 300}
    start = {name: rng.normal(size=n) for name, n in sizes.items()}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        model = {name: torch.tensor(x, dtype=dtype) for name, x in start.items()}
        server = Server(model, optimizer=DoG(lr=0.8), guard=None, average=Poly(gamma=8))
        first = np.concatenate([model[name].double().numpy() for name in sizes])
        theta, total, distance = first.copy(), 0.0, 0.01 * (1 + float(np.linalg.norm(first)))
        for _ in range(8):
            g = np.random.default_rng(5).normal(size=(3, len(first)))
            w = np.array([0.5, 0.2, 0.3])
            mean = w @ g
            distance = max(distance, float(np.linalg.norm(theta - first)))
            total += float(mean @ mean)
            theta = theta - 0.8 * distance / math.sqrt(total) * mean
            parts = [dict(zip(sizes, np.split(row, [7]), strict=True)) for row in g]
            pairs = zip(parts, w, strict=True)
            server.step([Update(part, weight=weight) for part, weight in pairs])
        found = np.concatenate([server.params[name].double().numpy() for name in sizes])
        np.testing.assert_allclose(found, theta, rtol=0, atol=tolerance * 10)


def test_dog_waits_for_the_first_update_that_is_not_zero():
    server = at(1, 1, optimizer=DoG())
    for _ in range(3):
        send(server, (0, 0), (0, 0))
    send(server, (1, 0), (-1, 0))  # they cancel
    assert server.params["w"].tolist() == [1, 1]
    send(server, (0, 5))
    assert server.params["w"].tolist() == pytest.approx([1, 1 - 0.01 * (1 + math.sqrt(2))])


@pytest.mark.parametrize("size", [1e-40, 1e-44, 1e11])
def test_dog_stays_finite_however_short_or_long_the_updates(size: float):
    server = Server({"w": torch.ones(2)}, optimizer=DoG(), guard=None)
    for k in range(6):
        assert server.step([{"w": torch.tensor([size, -size * k])}]).stepped
        assert server.params["w"].isfinite().all()
    assert all(map(math.isfinite, numbers(server).values()))


def test_dog_needs_what_the_server_measures():
    stats = Statistics({"w": 1.0}, {"w": 1.0}, {"w": 1.0}, (1.0,))
    with pytest.raises(ValueError, match="a statistic the optimizer needs was not measured"):
        DoG().prepare(stats, DoG().numbers(), 0)


# --- FedEve ---


def test_fedeve_by_hand():
    # 1, 3:  ḡ = 2, Q = 4/2 = 2, R = (1 + 1)/4 = ½, σ = 2,   K = 4/5,     m = 1.6, σ = .4
    # 5, 1:  ḡ = 3, Q = 9/2,     R = (4 + 4)/4 = 2, σ = 4.9, K = 4.9/6.9, m = 1.6 + 1.4 K,
    #        σ = 2/6.9 · 4.9
    # 2, −2 with weights 3 : 1, Σw² = 5/8: ḡ = 1, Q = 5/8, R = 5/8 · (4 − 1), σ += 5/8
    server = at(0, optimizer=FedEve(lr=0.5))
    send(server, (1,), (3,))
    assert float(server.params["w"]) == pytest.approx(-0.8, rel=1e-12)
    assert numbers(server)["sigma"] == pytest.approx(0.4, rel=1e-12)
    assert not server.step([]).stepped
    assert numbers(server)["sigma"] == pytest.approx(0.4, rel=1e-12)

    m = 1.6 + 1.4 * 4.9 / 6.9
    send(server, (5,), (1,))
    theta = -0.8 - 0.5 * m
    assert float(server.params["w"]) == pytest.approx(theta, rel=1e-12)

    sigma = 2 / 6.9 * 4.9 + 5 / 8
    gain = sigma / (sigma + 15 / 8)
    send(server, (2,), (-2,), weights=(3, 1))
    m += gain * (1 - m)
    assert float(server.params["w"]) == pytest.approx(theta - 0.5 * m, rel=1e-12)
    assert numbers(server)["sigma"] == pytest.approx((1 - gain) * sigma, rel=1e-12)


def test_fedeve_agrees_with_the_papers_formulas_for_equal_weights():
    rng = np.random.default_rng(2)
    theta, m, sigma, d = np.zeros(12), np.zeros(12), 0.0, 12
    server = at(*theta, optimizer=FedEve())
    for r in (5, 3, 8, 1, 4, 4):
        g = 0.5 + rng.normal(size=(r, d))
        mean = g.mean(axis=0)
        noise = ((g - mean) ** 2).sum() / (r**2 * d)
        sigma += (mean @ mean) / (r * d)
        gain = sigma / (sigma + noise)
        sigma *= 1 - gain
        m = m + gain * (mean - m)
        theta = theta - m
        send(server, *g.tolist())
        np.testing.assert_allclose(server.params["w"].numpy(), theta, rtol=0, atol=1e-11)


def test_fedeve_follows_one_client_and_those_that_agree():
    # R = 0: K = 1, and m is ḡ as under FedAvg
    alone, plain = at(0, 0, optimizer=FedEve()), at(0, 0, optimizer=SGD())
    for server in (alone, plain):
        send(server, (3, 1))
        send(server, (-1, 2), (-1, 2))
    assert alone.params["w"].tolist() == pytest.approx(plain.params["w"].tolist(), rel=1e-12)


def test_fedeve_takes_a_round_that_cancels_or_is_zero():
    # (1): m = 1, σ = 0. (1, −1): Q = 0, R = ½, K = 0: m stays, and so does θ's way.
    # (1, 3): as by hand, K = 4/5: m = 1 + .8. (0, 0): R = 0, K = 1: m = 0
    server = at(0, optimizer=FedEve())
    places = [-1, -2, -3.8, -3.8, -3.8]
    cohorts = [[(1,)], [(1,), (-1,)], [(1,), (3,)], [(0,), (0,)], [(0,)]]
    for cohort, place in zip(cohorts, places, strict=True):
        send(server, *cohort)
        assert float(server.params["w"]) == pytest.approx(place, rel=1e-12)
    first = at(0, optimizer=FedEve())
    send(first, (0,), (0,))
    assert float(first.params["w"]) == 0


def test_fedeves_factor_enters_the_momentum():
    # K = 4/5 by the cohort alone; m = .8 · s · 2
    server = at(0, optimizer=FedEve(), adapter=Fixed(value=3))
    send(server, (1,), (3,))
    assert float(server.params["w"]) == pytest.approx(-4.8, rel=1e-12)


def test_weights_that_do_not_sum_to_one_count_by_their_shares():
    # 1.5, .5 instead of .75, .25: sums of w double, of the mean's square quadruple
    once = Statistics({"g": 7.0}, {"g": 2.125}, {"g": 4.0}, (0.75, 0.25))
    twice = Statistics({"g": 14.0}, {"g": 8.5}, {"g": 16.0}, (1.5, 0.5))
    (_, a), (_, b) = (FedEve().prepare(stats, {"sigma": 0.5}, 3) for stats in (once, twice))
    assert a["sigma"] == pytest.approx(b["sigma"], rel=1e-12)


# --- both ---


@pytest.mark.parametrize("optimizer", [DoG(), FedEve()], ids=repr)
def test_they_go_through_a_file_exactly(optimizer: Optimizer, tmp_path: Path):
    cohorts = np.random.default_rng(4).normal(size=(6, 3, 2)).tolist()
    whole, half = at(1, 2, optimizer=optimizer), at(1, 2, optimizer=optimizer)
    for k, cohort in enumerate(cohorts):
        send(whole, *cohort, weights=(1, 2, 3))
        if k < 3:
            send(half, *cohort, weights=(1, 2, 3))
    half.save(tmp_path / "state")
    loaded = Server.load(tmp_path / "state", {"w": torch.zeros(2, dtype=torch.float64)})
    for cohort in cohorts[3:]:
        send(loaded, *cohort, weights=(1, 2, 3))
    assert torch.equal(loaded.params["w"], whole.params["w"])
    assert numbers(loaded) == numbers(whole)


@pytest.mark.parametrize("bad", [{}, {"sigma": math.nan}, {"sigma": "1"}, {"sigma": 0, "x": 1}])
def test_numbers_that_cannot_be_are_refused_and_nothing_changes(bad: dict[str, Any]):
    server = at(0, optimizer=FedEve())
    send(server, (1,), (3,))
    saved = at(0, optimizer=FedEve()).state_dict()
    saved["optimizer"] |= {"numbers": bad}
    with pytest.raises(CheckpointError):
        server.load_state_dict(saved)
    assert numbers(server)["sigma"] == pytest.approx(0.4)
    assert float(server.params["w"]) == pytest.approx(-1.6)


@pytest.mark.parametrize("optimizer", [DoG(), FedEve()], ids=repr)
def test_a_round_from_sums_is_the_same(optimizer: Optimizer):
    seen, summed = at(1, optimizer=optimizer), at(1, optimizer=optimizer)
    for cohort in ([(1.0,), (3.0,)], [(5.0,), (1.0,)], [(-2.0,), (0.5,)]):
        send(seen, *cohort)
        collector = Collector(summed)
        for (g,) in cohort:
            collector.take(Update({"w": torch.tensor([g]).double()}), [g * g])
        assert summed.step_sums(collector.sums()).stepped
    assert float(summed.params["w"]) == pytest.approx(float(seen.params["w"]), rel=1e-12)


SQUARES = st.one_of(st.just(0.0), st.floats(0, 1e60), st.floats(0, 1), st.floats(0, 1e-290))
EACH = st.fixed_dictionaries({"w": SQUARES})
ANY_STATISTICS = st.builds(
    Statistics,
    sum_sq=EACH,
    sum_sq2=EACH,
    mean_sq=EACH,
    weights=st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=4).map(tuple),
    model_sq=EACH,
    moved_sq=EACH,
)
"""Whether or not updates could have them."""


@settings(max_examples=100)
@given(rounds=st.lists(ANY_STATISTICS, min_size=1, max_size=5))
def test_no_statistics_give_nan_or_infinity(rounds: list[Statistics]):
    for optimizer in (DoG(), FedEve()):
        kept = optimizer.numbers()
        for t, stats in enumerate(rounds):
            step, kept = optimizer.prepare(stats, kept, t)
            assert all(math.isfinite(x) and x >= 0 for x in kept.values())
            theta, m = torch.ones(2), torch.ones(2)
            step(theta, torch.tensor([0.0, 1e-3]), 1.0, {"m": m, "start": torch.ones(2)}, t)
            assert theta.isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DoG(reach=0), r"DoG\(reach=0\): must be from 1e-15 to 1e6"),
        (lambda: DoG(reach=math.nan), r"DoG\(reach=nan\): must be from 1e-15 to 1e6"),
    ],
)
def test_a_bad_setting_is_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()
