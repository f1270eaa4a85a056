"""What of an update is summed: by hand, and against plain sums."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad import Glad, Server, Update
from fedglad.adapters import Pooled
from fedglad.secure import FixedPoint, Refused, Round, SecureClient, SecureSum
from fedglad.secure.contents import Summed, pack, unpack
from fedglad.secure.fixed import as_bytes
from fedglad.server import Collector, Sums

MODEL = {"a": np.array([1.0, 2.0], np.float32), "b": np.array(0.5, np.float32)}


def test_two_clients_by_hand():
    # θ = (1, 2; 0.5). Client 1, w = 2, trains (0, 2; 1): g = (1, 0; −0.5), w·g = (2, 0; −1),
    #   w‖g‖² = 2·1 = 2 and 2·0.25 = 0.5; w²‖g‖² = 4·1 = 4 and 4·0.25 = 1.
    # Client 2, w = 1, trains (1, 5; 0.5): g = (0, −3; 0), w·g the same; w‖g‖² = w²‖g‖² = 9 and 0.
    # The sums: (2, −3; −1), 11 and 0.5, 13 and 1, Σw = 3, Σw² = 5, Σw·loss = 1.5.
    point = FixedPoint(clients=2)
    parts = [
        pack(MODEL, trained, ["a", "b"], [], weight=w, loss=loss, point=point)
        for trained, w, loss in (
            ({"a": np.array([0, 2], np.float32), "b": np.array(1, np.float32)}, 2.0, 0.25),
            ({"a": np.array([1, 5], np.float32), "b": np.array(0.5, np.float32)}, 1.0, 1.0),
        )
    ]
    summed = added(parts, point)
    assert {name: value.tolist() for name, value in summed.total.items()} == {"a": [2, -3], "b": -1}
    assert summed.sum_sq == {"a": 11, "b": 0.5}
    assert summed.sum_sq2 == {"a": 13, "b": 1}
    assert (summed.weight, summed.weight_sq, summed.loss) == (3, 5, 0.5)


def added(
    parts: list[tuple[np.ndarray, list[int]]], point: FixedPoint, model=MODEL, buffers=()
) -> Summed:
    body = sum((p[0] for p in parts[1:]), parts[0][0])
    numbers = [sum(column) % 2**256 for column in zip(*(p[1] for p in parts), strict=True)]
    names = [name for name in model if name not in buffers]
    return unpack(point.decode(body), point.decode_numbers(numbers), model, names, buffers)


def test_buffers_and_losses_that_only_some_have():
    # Means by weight: (2·4 + 1·1)/3 = 3 and, of whole numbers, (2·5 + 1·7)/3 = 5.67, that is 6.
    model = {**MODEL, "v": np.zeros(1, np.float32), "n": np.array(0)}
    point = FixedPoint(clients=2)
    parts = [
        pack(model, {**MODEL, "v": np.array([v], np.float32), "n": np.array(n)},
             ["a", "b"], ["v", "n"], weight=w, loss=loss, point=point)
        for v, n, w, loss in ((4, 5, 2.0, None), (1, 7, 1.0, 0.75))
    ]  # fmt: skip
    summed = added(parts, point, model, ("v", "n"))
    assert summed.buffers["v"].tolist() == [3]
    assert summed.buffers["n"] == 6
    assert summed.buffers["n"].dtype == np.int64
    assert summed.loss == 0.75
    parts = [
        pack(MODEL, MODEL, ["a", "b"], [], weight=1.0, loss=loss, point=FixedPoint(clients=1))
        for loss in (None, math.nan, math.inf)
    ]
    assert added(parts, point).loss is None


def test_norms_are_of_what_is_added():
    # At 2 bits after the point w·g = 0.3 is 0.25; with w = 2 that is g = 0.125, so w‖g‖² = 1/32.
    model = {"a": np.array([0.15], np.float32)}
    point = FixedPoint(clients=1, fraction=2)
    packed = pack(
        model, {"a": np.zeros(1, np.float32)}, ["a"], [], weight=2.0, loss=None, point=point
    )
    summed = added([packed], point, model)
    assert summed.total["a"].tolist() == [0.25]
    assert summed.sum_sq == {"a": 1 / 32}
    assert summed.sum_sq2 == {"a": 1 / 16}


@pytest.mark.parametrize("size", [0, 1, (1 << 18) + 1])
def test_sizes(size: int):
    model = {"a": np.zeros(size, np.float32), "b": np.zeros((3, 2), np.float32)}
    trained = {"a": np.full(size, -0.5, np.float32), "b": np.ones((3, 2), np.float32)}
    point = FixedPoint(clients=1)
    packed = pack(model, trained, ["b", "a"], [], weight=1.0, loss=None, point=point)
    summed = added([packed], point, {"b": model["b"], "a": model["a"]})
    assert summed.total["a"].tolist() == [0.5] * size
    assert summed.total["b"].shape == (3, 2)
    assert summed.sum_sq == {"b": 6.0, "a": size / 4}


BAD = {
    "a name": ({"a": MODEL["a"]}, {}, "differ in 'b'"),
    "a shape": (
        {**MODEL, "a": np.ones(1, np.float32)},
        {},
        r"'a' has the shape \(1,\), not \(2,\)",
    ),
    "a kind": ({**MODEL, "a": np.ones(2, np.int64)}, {}, "'a' is int64, not float32"),
    "nan": ({**MODEL, "a": np.array([1, np.nan])}, {}, "'a' has NaN or inf"),
    "weight": (MODEL, {"weight": 0.0}, "the weight is 0.0"),
    "nan weight": (MODEL, {"weight": math.nan}, "the weight is nan"),
    "large": (
        {**MODEL, "a": np.array([0, 2e9])},
        {},
        r"'a' has a value of 2e\+09, weight included",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_summed_is_refused(name: str):
    trained, changed, match = BAD[name]
    settings: dict[str, Any] = {
        "weight": 1.0,
        "loss": None,
        "point": FixedPoint(clients=2),
        **changed,
    }
    with pytest.raises(Refused, match=match):
        pack(MODEL, trained, ["a", "b"], [], **settings)


def test_the_server_s_names_must_be_those_of_the_arrays():
    with pytest.raises(Refused, match="are not the arrays that it sent"):
        pack(MODEL, MODEL, ["a"], [], weight=1.0, loss=None, point=FixedPoint(clients=2))
    with pytest.raises(ValueError, match="not those of the model"):
        unpack(np.zeros(2), [0.0] * 8, MODEL, ["a", "b"], [])


def secure_sums(
    model: dict[str, np.ndarray],
    trained: list[dict[str, np.ndarray]],
    weights: list[float],
    gone: set[int],
) -> Sums:
    """A whole round of the protocol; those of `gone` leave before they send a vector."""
    names = [*model]
    clients = {k: SecureClient() for k in range(1, len(trained) + 1)}
    round = Round(SecureSum(threshold=0.5), "one", len(clients))
    asked = round.ask_keys()
    asked = round.take_keys({k: c.keys(asked[k]) for k, c in clients.items()})
    asked = round.take_shares({k: c.shares(asked[k]) for k, c in clients.items()})
    for k, client in clients.items():
        if k not in gone:
            client.receive(asked[k])
            body, numbers = client.mask(
                *pack(
                    model,
                    trained[k - 1],
                    names,
                    [],
                    weight=weights[k - 1],
                    loss=None,
                    point=client.point,
                )
            )
            round.take_masked(k, {"numbers": as_bytes(numbers)}, body)
    asked = round.ask_unmask()
    total = round.unmask({k: clients[k].unmask(asked[k]) for k in asked})
    summed = unpack(total.body, total.numbers, model, names, [])
    return Sums(
        total={name: torch.from_numpy(value).float() for name, value in summed.total.items()},
        sum_sq=summed.sum_sq, sum_sq2=summed.sum_sq2, weight=summed.weight,
        weight_sq=summed.weight_sq, count=len(total.clients),
    )  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 10.0]),
    weights=st.lists(st.integers(1, 5000), min_size=3, max_size=6),
    adapter=st.sampled_from([Glad(), Pooled()]),
    leaves=st.booleans(),
)
def test_a_round_is_that_of_plain_sums(seed, scale, weights, adapter, leaves):
    rng = np.random.default_rng(seed)
    model = {
        "a": rng.normal(size=(5, 3)).astype(np.float32),
        "b": rng.normal(size=4).astype(np.float32),
    }
    trained = [
        {n: (v + scale * rng.normal(0.3, 1, v.shape)).astype(np.float32) for n, v in model.items()}
        for _ in weights
    ]
    gone = {int(rng.integers(1, len(weights) + 1))} if leaves and len(weights) > 2 else set()
    start = {n: torch.tensor(v) for n, v in model.items()}
    servers = [Server(start, adapter=adapter, guard=None) for _ in range(2)]
    collector = Collector(servers[0])
    kept = [k for k in range(1, len(weights) + 1) if k not in gone]
    for k in kept:
        g = {n: model[n] - trained[k - 1][n] for n in model}
        sq = [float(np.square(g[n].astype(np.float64)).sum()) for n in model]
        collector.take(
            Update({n: torch.from_numpy(v) for n, v in g.items()}, weight=weights[k - 1]), sq
        )
    plain = servers[0].step_sums(collector.sums())
    secure = servers[1].step_sums(secure_sums(model, trained, [float(w) for w in weights], gone))
    assert plain.stepped
    assert secure.stepped, secure.reason
    # Each w·g is off by 2^-33: the mean of n by n 2^-33/Σw, below 2^-33. GSI = √(Σ w‖g‖²/Σw)/‖ḡ‖ is
    # off by as much over ‖g‖, which is 1e-4 at least here, and by a few float32 steps, 6e-8 each.
    tolerance = 2.0**-33 / scale + 1e-5
    for name in model:
        a, b = (s.state[name].numpy() for s in servers)
        assert np.allclose(a, b, rtol=0, atol=2.0**-33 + 1e-6 * max(scale, 1.0))
        assert secure.gsi[name] == pytest.approx(plain.gsi[name], rel=tolerance)
    assert secure.gsi_all == pytest.approx(plain.gsi_all, rel=tolerance)


def test_a_rounded_sum_of_equal_tiny_updates_is_believed():
    # g = 1.3 steps of the resolution in each of 4 clients, rounded to 1: were the norms those of g
    # itself, GSI would be 1.3; at 0.6, rounded up, they would be too small to be true.
    for steps in (1.3, 0.6):
        model = {"a": np.zeros(8)}
        trained = [{"a": np.full(8, -steps * 2.0**-32)}] * 4
        server = Server({"a": torch.zeros(8)}, guard=None)
        record = server.step_sums(secure_sums(model, trained, [1.0] * 4, set()))
        assert record.stepped, record.reason
        assert record.gsi["a"] == pytest.approx(1.0, rel=1e-6)
