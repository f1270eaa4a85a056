"""Server optimizers: numbers by hand, then NumPy twins written from the methods' formulas."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedglad import Glad, Server, Update
from fedglad.adapters import Fixed
from fedglad.optimizers import (
    SGD,
    Adagrad,
    Adam,
    DoG,
    FedEve,
    Momentum,
    Optimizer,
    ScheduleFree,
    Yogi,
)

Array = np.ndarray


def theta_after(optimizer: Optimizer, means: list[float], **settings: Any) -> float:
    """θ after rounds of one client each, from θ = 0 in float64."""
    server = Server({"w": torch.zeros((), dtype=torch.float64)}, optimizer=optimizer, **settings)
    for mean in means:
        server.step([{"w": torch.tensor(mean, dtype=torch.float64)}])
    return float(server.params["w"])


def test_sgd_subtracts_the_weighted_mean():
    # ḡ = (1·1 + 3·3)/4 = 2.5; θ = 1 - .5·2.5 = -.25
    server = Server({"w": torch.ones(1)}, optimizer=SGD(lr=0.5))
    server.step([Update({"w": torch.ones(1)}), Update({"w": torch.full((1,), 3.0)}, weight=3)])
    assert server.params["w"] == -0.25


def test_the_default_is_fedavg():
    # SGD with lr 1: θ = mean of θ_k = (5 + 1)/2
    server = Server({"w": torch.tensor([2.0])})
    server.step([Update(model={"w": torch.tensor([x])}) for x in (5.0, 1.0)])
    assert server.params["w"] == 3


@pytest.mark.parametrize(
    ("settings", "theta"),
    [
        ({}, -5.61),  # m = 1, 1.9, 2.71
        ({"dampening": 0.9}, -0.561),  # m = .1, .19, .271
        ({"nesterov": True}, -8.049),  # 1 + .9m = 1.9, 2.71, 3.439
        ({"momentum": 0.5}, -4.25),  # m = 1, 1.5, 1.75
        ({"lr": 0.1}, -0.561),
    ],
)
def test_momentum_by_hand(settings: Any, theta: float):
    # ḡ = 1 in three rounds
    assert theta_after(Momentum(**settings), [1, 1, 1]) == pytest.approx(theta, rel=1e-12)


def test_adams_first_step_has_eps_beside_the_uncorrected_root():
    # ḡ = 1e-6: v = .001·1e-12, m = .1·1e-6, and the factor is √.001/.1
    # step = √.001·1e-6 / (√.001·1e-6 + 1e-8) = 3.16227766/(3.16227766 + 1) = .759747
    # torch.optim.Adam corrects v first: 1e-6/(1e-6 + 1e-8) = .990099
    root = math.sqrt(0.001)
    step = root * 1e-6 / (root * 1e-6 + 1e-8)
    assert step == pytest.approx(0.759747, abs=1e-6)
    assert theta_after(Adam(lr=1.0), [1e-6]) == pytest.approx(-step, rel=1e-12)

    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    w.grad = torch.tensor(1e-6, dtype=torch.float64)
    torch.optim.Adam([w], lr=1.0).step()
    assert w.item() == pytest.approx(-0.990099, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-8)], ids=str
)
@pytest.mark.parametrize("k", [2, 10, 20, 29, 30, 35, 40, 46, 50, 53])
def test_adams_steps_of_one_mean_are_its_rate_however_near_beta2_is_to_one(
    k: int, dtype: torch.dtype, tolerance: float
):
    # β₂ = 1 − 2^−k, ḡ = 3: v = 9 (1 − β₂^(t+1)) and m = 3 (1 − .9^(t+1)), which c divides out:
    # each of three steps is η = .5
    optimizer = Adam(lr=0.5, betas=(0.9, 1 - 2.0**-k), eps=1e-30)
    server = Server({"w": torch.zeros((), dtype=dtype)}, optimizer=optimizer)
    for t in range(3):
        server.step([{"w": torch.tensor(3.0, dtype=dtype)}])
        assert float(server.params["w"]) == pytest.approx(-0.5 * (t + 1), rel=tolerance)


@pytest.mark.parametrize("s", [1e6, 1e-6, 1e-8, 7e-11, 1.3e-11, 1e-12, 1e-16, 1e-30])
def test_adams_steps_are_linear_in_the_factor_however_small(s: float):
    # ḡ = 3, as above: each of three steps is s η
    found = theta_after(Adam(lr=0.5, eps=1e-30), [3, 3, 3], adapter=Fixed(value=s))
    assert found / s == pytest.approx(-1.5, rel=1e-7)


@pytest.mark.parametrize(("s", "beta1"), [(0.0, 0.0), (0.0, 0.9), (-9.0, 0.9), (-1.0, 0.5)])
def test_adam_with_a_factor_that_is_not_positive(s: float, beta1: float):
    # By one's own adapter. From m = 1, v = 4, ḡ = 2, β₂ = ¾: v = 3 + 1, m = β₁ + 2 (1 − β₁) s;
    # reddi: θ = −m/(2 + 1)
    theta, mean, m, v = (torch.tensor([x], dtype=torch.float64) for x in (0, 2, 1, 4))
    optimizer = Adam(lr=1.0, betas=(beta1, 0.75), eps=1.0, form="reddi")
    optimizer.step(theta, mean, s, {"m": m, "v": v}, 0)
    first = beta1 + 2 * (1 - beta1) * s
    assert [float(v), float(m)] == pytest.approx([4.0, first])
    assert float(theta) == pytest.approx(-first / 3)


def test_adam_in_reddis_form_by_hand():
    # τ = 1e-3, v = .99·1e-6 + .01·1 = .01000099, m = .1: θ = -.1/(√.01000099 + .001)
    expected = -0.1 / (math.sqrt(0.01000099) + 0.001)
    assert expected == pytest.approx(-0.99005, abs=1e-5)
    assert theta_after(Adam(form="reddi", lr=1.0), [1]) == pytest.approx(expected, rel=1e-12)


def test_yogi_by_hand():
    # ḡ = 1, .01; v₀ = 1e-6
    # round 0: v < ḡ²: v = 1e-6 + .01·1 = .010001,       m = .1
    # round 1: v > ḡ²: v = .010001 - .01·1e-4 = .01,     m = .09 + .001 = .091
    expected = -0.1 / (math.sqrt(0.010001) + 1e-3) - 0.091 / (0.1 + 1e-3)
    assert theta_after(Yogi(lr=1.0), [1, 0.01]) == pytest.approx(expected, rel=1e-12)


def test_adagrad_by_hand():
    # ḡ = 3, 4: v = 1e-6 + 9, then + 16; with β₁ = .9: m = .3, then .27 + .4 = .67
    roots = [math.sqrt(9.000001) + 1e-3, math.sqrt(25.000001) + 1e-3]
    plain, first = -3 / roots[0] - 4 / roots[1], -0.3 / roots[0] - 0.67 / roots[1]
    assert theta_after(Adagrad(lr=1.0), [3, 4]) == pytest.approx(plain, rel=1e-12)
    assert theta_after(Adagrad(lr=1.0, beta1=0.9), [3, 4]) == pytest.approx(first, rel=1e-12)


ALL = [
    SGD(lr=0.7),
    Momentum(lr=0.3),
    Momentum(lr=0.3, dampening=0.9),
    Momentum(lr=0.3, nesterov=True),
    Adam(),
    Adam(form="reddi"),
    Adagrad(),
    Adagrad(beta1=0.9),
    Yogi(),
]


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
def test_second_moments_see_the_raw_mean(optimizer: Optimizer):
    # The first moment is linear in s and v does not know s: with s = 2 every step doubles.
    # Had v seen 2ḡ, an adaptive step would have stayed nearly as it was.
    means = [1.0, -0.5, 0.25]
    plain = theta_after(optimizer, means)
    assert theta_after(optimizer, means, adapter=Fixed(value=2)) == pytest.approx(2 * plain)


@pytest.mark.parametrize("optimizer", [*ALL, ScheduleFree(), DoG(), FedEve()], ids=repr)
def test_a_tensor_that_never_moves_stays_exactly_where_it_is(optimizer: Optimizer):
    # m = 0 whatever v is: no 0/0
    assert theta_after(optimizer, [0, 0, 0]) == 0


# --- NumPy twins: each takes (θ, ḡ, s, state, t) and returns the next θ ---


def sgd(theta: Array, g: Array, s: float, _: dict[str, Any], t: int) -> Array:
    return theta - 0.7 * s * g


def momentum(d: float, nesterov: bool = False) -> Callable[..., Array]:
    def step(theta: Array, g: Array, s: float, state: dict[str, Any], t: int) -> Array:
        m = state["m"] = 0.9 * state.get("m", 0) + (1 - d) * s * g
        return theta - 0.3 * (s * g + 0.9 * m if nesterov else m)

    return step


def adam_authors(theta: Array, g: Array, s: float, state: dict[str, Any], t: int) -> Array:
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * s * g
    return theta - 0.01 * math.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1)) * m / (
        np.sqrt(v) + 1e-8
    )


def adam_reddi(theta: Array, g: Array, s: float, state: dict[str, Any], t: int) -> Array:
    v = state["v"] = 0.99 * state.get("v", 1e-6) + 0.01 * g**2
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * s * g
    return theta - 0.01 * m / (np.sqrt(v) + 1e-3)


def yogi(theta: Array, g: Array, s: float, state: dict[str, Any], t: int) -> Array:
    v = state.get("v", 1e-6)
    v = state["v"] = v - 0.01 * g**2 * np.sign(v - g**2)
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * s * g
    return theta - 0.01 * m / (np.sqrt(v) + 1e-3)


def adagrad(beta1: float) -> Callable[..., Array]:
    def step(theta: Array, g: Array, s: float, state: dict[str, Any], t: int) -> Array:
        v = state["v"] = state.get("v", 1e-6) + g**2
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * s * g
        return theta - 0.01 * m / (np.sqrt(v) + 1e-3)

    return step


TWINS = [
    sgd,
    momentum(0),
    momentum(0.9),
    momentum(0, nesterov=True),
    adam_authors,
    adam_reddi,
    adagrad(0),
    adagrad(0.9),
    yogi,
]


class Twin:
    """One tensor: GSI, B, s and the step in float64."""

    def __init__(self, step: Callable[..., Array], theta: Array, gamma: float) -> None:
        self.step, self.theta, self.gamma = step, theta, gamma
        self.state: dict[str, Any] = {}
        self.baseline = 0.0

    def round(self, g: Array, w: Array, t: int) -> float:
        w = w / w.sum()
        mean = w @ g
        gsi = math.sqrt(w @ (g**2).sum(1) / (mean**2).sum())
        baseline = self.baseline or gsi
        s = float(np.clip(gsi / baseline, 1 - self.gamma * t, 1 + self.gamma * t))
        self.baseline = 0.9 * baseline + 0.1 * gsi
        self.theta = self.step(self.theta, mean, s, self.state, t)
        return s


@pytest.mark.parametrize("gamma", [None, 0.05])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize(
    ("optimizer", "step"), list(zip(ALL, TWINS, strict=True)), ids=[repr(o) for o in ALL]
)
def test_six_rounds_agree_with_a_numpy_twin(
    optimizer: Optimizer,
    step: Callable[..., Array],
    dtype: torch.dtype,
    tolerance: float,
    gamma: float | None,
):
    # Lengths that differ between rounds open both of Yogi's branches; in each tensor half of
    # every update is common to all clients, more in one round than in another, so that GSI varies.
    rng = np.random.default_rng(7)
    sizes = {"a": 6, "b": 300}
    theta = {name: rng.normal(size=n) for name, n in sizes.items()}
    model = {name: torch.tensor(x, dtype=dtype) for name, x in theta.items()}
    twins = {name: Twin(step, model[name].double().numpy(), gamma or 0.0) for name in sizes}
    adapter = None if gamma is None else Glad(gamma=gamma)
    server = Server(model, optimizer=optimizer, adapter=adapter, guard=None)
    factors: set[float] = set()
    for t in range(6):
        w = rng.uniform(1, 5, size=4)
        g = {
            name: rng.choice([0.02, 0.3])
            * (rng.normal(size=n) + rng.uniform(0.3, 2) * rng.normal(size=(4, n)))
            for name, n in sizes.items()
        }
        g = {name: torch.tensor(x, dtype=dtype) for name, x in g.items()}
        updates = [Update({n: x[k] for n, x in g.items()}, weight=w[k]) for k in range(4)]
        record = server.step(updates)
        for name, twin in twins.items():
            s = twin.round(g[name].double().numpy(), w, t)
            factors.add(s)
            assert record.scale[name] == pytest.approx(s, abs=1e-6)
            found = server.params[name].double().numpy()
            np.testing.assert_allclose(found, twin.theta, rtol=0, atol=tolerance)
    assert (len(factors) > 8) == (gamma is not None)  # the factors did vary
