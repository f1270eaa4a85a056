"""FedGLAD's simple rivals by hand: FedExP, a constant factor, none."""

import math
from typing import Any

import pytest
import torch

from fedglad import Record, Server, Update
from fedglad.adapters import REGISTRY, Adapter, FedExP, Fixed


def orthogonal(r: int, length: float = 1.0) -> list[dict[str, torch.Tensor]]:
    """r orthogonal updates: Σ‖g‖²/r = length², ‖ḡ‖² = length²/r, GSI² = r."""
    return [{"w": row * length} for row in torch.eye(16)[:r]]


def step(updates: Any, adapter: Adapter) -> Record:
    return Server({"w": torch.zeros(16)}, adapter=adapter).step(updates)


@pytest.mark.parametrize(("r", "scale"), [(1, 1), (2, 1), (3, 1.5), (4, 2), (16, 8)])
def test_fedexp_is_half_the_squared_indicator_and_at_least_one(r: int, scale: float):
    # max(1, GSI²/2) = max(1, r/2)
    record = step(orthogonal(r), FedExP(eps=0))
    assert record.scale == pytest.approx({"all": scale})
    assert record.gsi_all == pytest.approx(math.sqrt(r))


def test_fedexp_with_eps():
    # r = 4 updates of length 2: Σ‖g‖² = 16, ‖ḡ‖² = 4/4 = 1, so 16/(2·4·(1 + .25)) = 1.6
    assert step(orthogonal(4, 2.0), FedExP(eps=0.25)).scale == pytest.approx({"all": 1.6})
    # the default is 1e-3: 4/(2·1.001)
    assert step(orthogonal(4, 2.0), FedExP()).scale == pytest.approx({"all": 2 / 1.001})


def test_fedexp_takes_weights():
    # w = .1, .9; g = 9, -1/3: Σw‖g‖² = 8.1 + .1 = 8.2; ḡ = .9 - .3 = .6, ‖ḡ‖² = .36; 8.2/.72
    updates = [
        Update({"w": torch.eye(16)[0] * 9}, weight=1),
        Update({"w": torch.eye(16)[0] / -3}, weight=9),
    ]
    assert step(updates, FedExP(eps=0)).scale == pytest.approx({"all": 8.2 / 0.72}, rel=1e-5)


def test_fedexp_is_one_factor_for_all_tensors_unless_told_otherwise():
    # w: Σ‖g‖²/r = 1, ‖ḡ‖² = 1/4; b: 1 and 1. Together 2/(2·1.25) = .8, so 1; apart 2 and 1
    updates = [{"w": row, "b": torch.ones(1)} for row in torch.eye(4)]
    model = {"w": torch.zeros(4), "b": torch.zeros(1)}
    assert Server(model, adapter=FedExP(eps=0)).step(updates).scale == {"all": 1}
    apart = Server(model, adapter=FedExP(eps=0, groups="tensor")).step(updates)
    assert apart.scale == pytest.approx({"w": 2, "b": 1})


def test_fedexp_scales_the_step_and_remembers_nothing():
    # s = 16/2 = 8 in every round; ḡ = 1/16 everywhere; θ = -8/16 a round
    server = Server({"w": torch.zeros(16)}, adapter=FedExP(eps=0))
    for k in (1, 2, 3):
        assert server.step(orthogonal(16)).scale == pytest.approx({"all": 8})
        torch.testing.assert_close(server.params["w"], torch.full((16,), -0.5 * k))


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_fedexp_survives_updates_that_are_zero_or_cancel(eps: float):
    # 0/0, and Σ‖g‖²/0 at eps = 0
    zero = [{"w": torch.zeros(16)}] * 2
    opposite = [{"w": torch.ones(16)}, {"w": -torch.ones(16)}]
    for updates in (zero, opposite):
        record = step(updates, FedExP(eps=eps))
        assert record.stepped
        assert math.isfinite(record.scale["all"])
    assert step(zero, FedExP(eps=eps)).scale == {"all": 1}


def test_a_fixed_factor_scales_every_round_alike():
    # θ = -.5·(1 + 1 + 1)
    server = Server({"w": torch.zeros(1), "b": torch.zeros(1)}, adapter=Fixed(value=0.5))
    for _ in range(3):
        record = server.step([{"w": torch.ones(1), "b": torch.ones(1)}])
        assert record.scale == {"w": 0.5, "b": 0.5}
    assert server.params["w"] == server.params["b"] == -1.5


@pytest.mark.parametrize("adapter", [None, Adapter()])
def test_no_adapter_measures_and_does_not_scale(adapter: Any):
    # 4 orthogonal updates: GSI = 2, θ = -ḡ = -1/4
    server = Server({"w": torch.zeros(4)}, adapter=adapter)
    for k in (1, 2, 3):
        record = server.step([{"w": row} for row in torch.eye(4)])
        assert (record.gsi, record.scale, record.baseline) == ({"w": 2}, {"w": 1}, {})
        assert torch.equal(server.params["w"], torch.full((4,), -0.25 * k))


def test_a_rule_says_itself_what_others_must_know_of_it():
    rules = {name: cls() for name, cls in REGISTRY.items()}
    adaptive = {"glad", "pooled", "aligned", "fedexp", "fedhyper", "fedlws"}
    assert {name for name, rule in rules.items() if rule.adaptive} == adaptive
    assert {name for name, rule in rules.items() if rule.needs_population} == {"pooled"}
    kept_from_replay = {name for name, rule in rules.items() if rule.beyond_records}
    assert kept_from_replay == {"aligned", "fedhyper", "fedlws"}


def test_somebodys_own_rule_counts_as_adaptive():
    class Own(Adapter):
        pass

    class OwnFixed(Fixed):
        pass

    assert Own().adaptive
    assert OwnFixed().adaptive
    assert Own().bounds(3) == (-math.inf, math.inf)
