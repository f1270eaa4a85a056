"""FedGLAD's factor by hand: s = clip(GSI/B, 1 - γt, 1 + γt), then B ← βB + (1 - β)GSI."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedglad import Glad, Record, Server
from fedglad.optimizers import REGISTRY, SGD, Adagrad, Adam, Momentum

Cohort = list[dict[str, Tensor]]


def cohort(**gsi: int) -> Cohort:
    """16 updates; for a tensor with indicator i, update k is the unit vector e_{k mod i²}.

    Σw‖g‖² = 1, and ḡ is 1/i² in i² places, so ‖ḡ‖² = 1/i² and GSI = i, for i = 1, 2, 4 without
    any rounding. Indicator 0 is a frozen tensor.
    """
    eye = torch.eye(16)
    return [{n: eye[k % i**2] if i else torch.zeros(16) for n, i in gsi.items()} for k in range(16)]


def cancelling() -> Cohort:
    """16 updates ±e_0 whose mean is zero."""
    return [{"w": torch.eye(16)[0] * (-1) ** k} for k in range(16)]


def run(rounds: list[Cohort], **settings: Any) -> tuple[Server, list[Record]]:
    server = Server({n: torch.zeros(16) for n in rounds[0][0]}, **settings)
    return server, [server.step(updates) for updates in rounds]


def scales(indicators: list[int], **glad: Any) -> list[float]:
    _, records = run([cohort(w=i) for i in indicators], adapter=Glad(**glad))
    assert [r.gsi["w"] for r in records] == [float(i or 1) for i in indicators]
    return [r.scale["w"] for r in records]


def test_the_first_round_is_not_scaled():
    # B starts as GSI = 4, so the ratio is 1
    _, [record] = run([cohort(w=4)], adapter=Glad(gamma=math.inf))
    assert (record.gsi, record.baseline, record.scale) == ({"w": 4}, {"w": 4}, {"w": 1})


def test_the_factor_uses_the_baseline_from_before_this_round():
    # beta .5, no bounds, indicators 2, 4, 4
    # round 0: B = 2, s = 1, B ← .5·2 + .5·2 = 2
    # round 1: s = 4/2 = 2,   B ← .5·2 + .5·4 = 3    (had B moved first: 4/3)
    # round 2: s = 4/3
    _, records = run([cohort(w=i) for i in (2, 4, 4)], adapter=Glad(gamma=math.inf, beta=0.5))
    assert [r.baseline["w"] for r in records] == [2, 2, 3]
    assert [r.scale["w"] for r in records] == pytest.approx([1, 2, 4 / 3])


def test_the_defaults_are_the_papers():
    # gamma .02, beta .9, indicators 2, 4, 2
    # round 1: 4/2 = 2 is cut to 1.02, B ← .9·2 + .1·4 = 2.2
    # round 2: 2/2.2 = .909 is lifted to 1 - .02·2 = .96
    _, records = run([cohort(w=i) for i in (2, 4, 2)], adapter=Glad())
    assert [r.scale["w"] for r in records] == pytest.approx([1, 1.02, 0.96])
    assert records[2].baseline["w"] == pytest.approx(2.2)


def test_bounds_open_with_the_rounds():
    # gamma .1, indicators 2, 2, 4: in round 2 the ratio 4/2 = 2 is cut to 1 + .1·2 = 1.2
    assert scales([2, 2, 4], gamma=0.1) == pytest.approx([1, 1, 1.2])
    # in round 5 to 1.5
    assert scales([2, 2, 2, 2, 2, 4], gamma=0.1)[-1] == pytest.approx(1.5)


def test_the_lower_bound_opens_too():
    # gamma .1, indicators 4, 4, 2: the ratio 2/4 = .5 is lifted to 1 - .1·2 = .8
    assert scales([4, 4, 2], gamma=0.1) == pytest.approx([1, 1, 0.8])


def test_a_ratio_within_the_bounds_is_taken_as_it_is():
    # gamma .3 in round 2: bounds .4 and 1.6; 2/4 = .5
    assert scales([4, 4, 2], gamma=0.3) == pytest.approx([1, 1, 0.5])


def test_a_negative_lower_bound_never_binds():
    # gamma .6 in round 2: bounds -.2 and 2.2; 1/4 = .25
    assert scales([4, 4, 1], gamma=0.6) == pytest.approx([1, 1, 0.25])
    # 4/1 = 4 is still cut to 2.2
    assert scales([1, 1, 4], gamma=0.6) == pytest.approx([1, 1, 2.2])


def test_an_infinite_gamma_has_no_bounds():
    # ∞·0 in round 0 is no NaN; B = 1 throughout round 1, .9·1 + .1·4 = 1.3 in round 2
    assert scales([1, 4, 4], gamma=math.inf) == pytest.approx([1, 4, 4 / 1.3])


def test_each_group_moves_by_its_own_factor():
    # gamma .1; a: 2, 4 gives s = 1.1; b: 2, 1 gives s = .9
    # a: ḡ = 1/4 in 4 places, then 1/16 in 16; b: 1/4 in 4 places, then e_0
    server, records = run([cohort(a=2, b=2), cohort(a=4, b=1)], adapter=Glad(gamma=0.1))
    assert records[1].scale == pytest.approx({"a": 1.1, "b": 0.9})
    a = -torch.tensor([0.25 + 1.1 / 16] * 4 + [1.1 / 16] * 12)
    b = -torch.tensor([0.25 + 0.9] + [0.25] * 3 + [0.0] * 12)
    torch.testing.assert_close(server.params, {"a": a, "b": b}, atol=1e-6, rtol=0)


OPTIMIZERS = [
    *(cls() for cls in REGISTRY.values()),
    Momentum(nesterov=True),
    Momentum(dampening=0.5),
    Adam(form="reddi"),
    Adagrad(beta1=0.9),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_gamma_zero_is_no_adaptation_bit_for_bit(optimizer: Any):
    # clip(x, 1, 1) = 1, and 1·ḡ is ḡ
    generator = torch.Generator().manual_seed(1)
    model = {"a": torch.ones(5, 3), "b": torch.ones(300)}
    plain = Server(model, optimizer=optimizer)
    glad = Server(model, optimizer=optimizer, adapter=Glad(gamma=0))
    for _ in range(4):
        updates = [
            {name: torch.randn(p.shape, generator=generator) for name, p in model.items()}
            for _ in range(5)
        ]
        assert set(glad.step(updates).scale.values()) == {1.0}
        plain.step(updates)
        for name, value in plain.params.items():
            assert torch.equal(glad.params[name], value)


def test_a_skipped_round_advances_nothing():
    # gamma .1, indicators 2, (skipped), 4: the bound of the second step is 1 + .1·1, B is still 2
    # Adam's second step corrects with exponent 2, as if nothing had been between
    settings: dict[str, Any] = {"optimizer": Adam(), "adapter": Glad(gamma=0.1), "min_clients": 9}
    straight, _ = run([cohort(w=2), cohort(w=4)], **settings)
    server, records = run([cohort(w=2), cohort(w=1)[:8], cohort(w=4)], **settings)
    assert [r.status for r in records] == ["stepped", "skipped", "stepped"]
    assert records[1].scale == {}
    assert records[2].scale["w"] == pytest.approx(1.1)
    assert records[2].baseline["w"] == 2
    assert server.round == straight.round == 2
    assert torch.equal(server.params["w"], straight.params["w"])


def test_a_frozen_tensor_has_gsi_one_and_no_baseline_until_it_moves():
    # beta .5, no bounds; frozen in rounds 0 and 1, then 2, 4:
    # round 2: B = 2, s = 1, B ← 2; round 3: s = 4/2
    rounds = [cohort(w=2, f=i) for i in (0, 0, 2, 4)]
    _, records = run(rounds, adapter=Glad(gamma=math.inf, beta=0.5))
    assert [r.gsi["f"] for r in records] == [1, 1, 2, 4]
    assert [r.scale["f"] for r in records] == [1, 1, 1, 2]
    assert [r.baseline.get("f") for r in records] == [None, None, 2, 2]
    assert [r.scale["w"] for r in records] == [1, 1, 1, 1]


@pytest.mark.parametrize("gamma", [0.4, math.inf])
def test_a_tensor_frozen_for_a_round_keeps_its_baseline(gamma: float):
    # beta .5, indicators 2, frozen, 4: had the round moved B to (2 + 1)/2, s would not be 4/2 = 2,
    # or 1 + .4·2 = 1.8 with bounds; and round 3 sees B = (2 + 4)/2 = 3: 2/3
    _, records = run([cohort(w=i) for i in (2, 0, 4, 2)], adapter=Glad(gamma=gamma, beta=0.5))
    assert [r.baseline["w"] for r in records] == [2, 2, 2, 3]
    assert [r.scale["w"] for r in records] == pytest.approx([1, 1, min(2, 1 + 2 * gamma), 2 / 3])


@pytest.mark.parametrize(
    ("gamma", "scale"),
    [(0.0, 1.0), (0.1, 1.2), (0.6, 2.2), (math.inf, 1.0)],  # 1 + γ·2; 1 without bounds
)
def test_cancelling_updates_take_the_upper_bound_and_leave_the_baseline(gamma: float, scale: float):
    # beta .5, indicators 2, 2, cancelled, 4: B stays 2, so round 3 has 4/2 or its bound 1 + 3γ
    rounds = [cohort(w=2), cohort(w=2), cancelling(), cohort(w=4)]
    _, records = run(rounds, adapter=Glad(gamma=gamma, beta=0.5))
    assert records[2].scale["w"] == pytest.approx(scale)
    assert records[2].gsi["w"] >= 1000
    assert [r.baseline["w"] for r in records] == [2, 2, 2, 2]
    assert records[3].scale["w"] == pytest.approx(min(2, 1 + 3 * gamma))


def test_cancelling_updates_in_round_0_are_not_scaled_and_are_no_baseline():
    # 1 + γ·0 = 1; B starts with the next round's 2, so round 2 has 4/2
    rounds = [cancelling(), cohort(w=2), cohort(w=4)]
    _, records = run(rounds, adapter=Glad(gamma=5))
    assert [r.scale["w"] for r in records] == [1, 1, 2]
    assert [r.baseline.get("w") for r in records] == [None, 2, 2]


@pytest.mark.parametrize(("power", "usable"), [(8, True), (10, False)])
def test_updates_cancel_from_an_indicator_of_1000_on(power: int, usable: bool):
    # 1 and -(1 - 2^-p): ḡ = 2^-(p+1), Σw‖g‖² ≈ 1, GSI ≈ 2^(p+1): 512 is usable, 2048 is not
    pair = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0**-power - 1])}]
    server = Server({"w": torch.zeros(1)}, adapter=Glad())
    record = server.step(pair)
    assert ("w" in record.baseline) == usable
    assert record.gsi["w"] == pytest.approx(2 ** (power + 1) if usable else 1000, rel=1e-2)


def test_one_client_counts_as_a_round_with_gsi_one():
    # beta .5, no bounds: 4, one client: s = 1/4, B ← (4 + 1)/2; then 2/2.5
    rounds = [cohort(w=4), cohort(w=4)[:1], cohort(w=2)]
    _, records = run(rounds, adapter=Glad(gamma=math.inf, beta=0.5))
    assert [r.scale["w"] for r in records] == pytest.approx([1, 0.25, 0.8])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("gamma", [0.0, 0.02, math.inf])
def test_degenerate_rounds_leave_no_nan_and_no_inf(optimizer: Any, gamma: float):
    # frozen, cancelling, one client, updates whose squares underflow float32, and again
    tiny = [{"w": g["w"] * 1e-30} for g in cohort(w=2)]
    odd = [cohort(w=0), cancelling(), cohort(w=1)[:1], tiny]
    server, records = run(odd * 2, optimizer=optimizer, adapter=Glad(gamma=gamma))
    for record in records:
        json.dumps(record.to_dict(), allow_nan=False)
    saved = server.state_dict()
    assert all(bool(t.isfinite().all()) for t in saved.pop("tensors").values())
    json.dumps({**saved, "adapter": saved["adapter"]["state"]}, allow_nan=False)


def test_a_constant_indicator_never_scales():
    # B = GSI for ever
    assert scales([2] * 6, gamma=math.inf) == [1] * 6
    server, _ = run([cohort(w=1)] * 3, optimizer=SGD(lr=0.5), adapter=Glad())
    assert server.params["w"][0] == -1.5  # 3 rounds of .5·e_0
