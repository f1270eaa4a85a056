"""A round from sums alone: the same factors and the same step, every refusal, every lie."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedglad import Glad, Guard, Record, Server, Update
from fedglad.adapters import REGISTRY, Adapter, Fixed, Pooled
from fedglad.filters import Krum, Median, NormClip
from fedglad.optimizers import SGD, Adam, Momentum
from fedglad.records import Failure
from fedglad.server.from_sums import Collector, Sums
from fedglad.weights import Equal, FedAdp, Optimal

SHAPES = {"conv.weight": (7, 11), "conv.bias": (7,), "head.weight": (3, 90), "scalar": ()}


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sq_norms(delta: dict[str, torch.Tensor]) -> list[float]:
    return [float(np.square(value.numpy().astype(np.float64)).sum()) for value in delta.values()]


def collect(server: Server, updates: list[Update]) -> Collector:
    collector = Collector(server)
    for update in updates:
        assert isinstance(update.delta, dict)
        collector.take(update, sq_norms(update.delta))
    return collector


def step_sums(server: Server, updates: list[Update], **known: Any) -> Record:
    collector = collect(server, updates)
    return server.step_sums(collector.sums(), clients=collector.entries, **known)


def cohort(seed: int, weights: list[float], *, frozen: bool = False) -> list[Update]:
    """Updates with a common part; of a frozen tensor all are zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    shared = draw()
    found: list[Update] = []
    for k, weight in enumerate(weights):
        delta = {name: value + shared[name] for name, value in draw().items()}
        if frozen:
            delta["conv.bias"] = torch.zeros(7)
        found.append(Update(delta, weight=weight, client=k, loss=k + 0.5))
    return found


def two(**changed: Any) -> Sums:
    """w = 1, 3; g = (2, 0), (0, 2): Σwg = (2, 6), Σw‖g‖² = 4 + 12 = 16, W = 4."""
    sums = Sums(total={"w": torch.tensor([2.0, 6.0])}, sum_sq={"w": 16.0}, weight=4.0, count=2)
    return replace(sums, **changed)


def small(**parts: Any) -> Server:
    return Server({"w": torch.zeros(2)}, **parts)


def test_two_rounds_by_hand():
    # round 0: GSI² = W·Σw‖g‖²/‖Σwg‖² = 4·16/40 = 1.6; θ = -(2, 6)/4
    server = small(adapter=Glad(gamma=math.inf))
    record = server.step_sums(two())
    assert record.gsi == pytest.approx({"w": math.sqrt(1.6)})
    assert record.scale == {"w": 1}
    assert server.params["w"].tolist() == [-0.5, -1.5]
    # round 1: both send (2, 0): Σwg = (8, 0), Σw‖g‖² = 16, GSI = 1, s = 1/√1.6 = .790569
    record = server.step_sums(two(total={"w": torch.tensor([8.0, 0.0])}))
    assert record.gsi == pytest.approx({"w": 1})
    assert record.scale == pytest.approx({"w": 0.790569}, rel=1e-6)
    assert server.params["w"].tolist() == pytest.approx([-0.5 - 2 * 0.790569, -1.5], rel=1e-6)
    assert (server.round, record.status) == (2, "stepped")


def test_what_a_collector_adds_up():
    # the two updates of above; the first client's weight counts as 1
    updates = [
        Update({"w": torch.tensor(g)}, weight=w) for w, g in ((10, [2.0, 0]), (30, [0, 2.0]))
    ]
    collector = collect(small(), [replace(u, loss=k + 1.0) for k, u in enumerate(updates)])
    sums = collector.sums()
    assert isinstance(sums.total, torch.Tensor)
    assert sums.total[:2].tolist() == [2, 6]
    assert (sums.sum_sq, sums.weight, sums.count, sums.unit) == ({"w": 16}, 4, 2, 10)
    assert (sums.sum_sq2, sums.weight_sq) == ({"w": 1 * 4 + 9 * 4}, 1 + 9)
    assert sums.loss == 0.25 * 1 + 0.75 * 2
    assert [entry["weight"] for entry in collector.entries] == [0.25, 0.75]
    assert [entry["sq_norm"] for entry in collector.entries] == [4, 4]


def test_weights_have_no_unit():
    tenfold = two(total={"w": torch.tensor([20.0, 60.0])}, sum_sq={"w": 160.0}, weight=40.0)
    first, second = small(), small()
    assert first.step_sums(two()).gsi == pytest.approx(second.step_sums(tenfold).gsi)
    assert torch.equal(first.params["w"], second.params["w"])


def test_pooled_without_squared_weights_takes_them_as_equal():
    # w = ½, ½; g = (2, 0), (1, 1): ḡ = (1.5, .5), ‖ḡ‖² = 2.5; Σw²‖g‖² = (4 + 2)/4 = 1.5
    updates = [Update({"w": torch.tensor(g)}) for g in ([2.0, 0.0], [1.0, 1.0])]
    sums = Sums(total={"w": torch.tensor([3.0, 1.0])}, sum_sq={"w": 6.0}, weight=2.0, count=2)
    server, other = (small(adapter=Pooled()) for _ in range(2))
    stats = server.step_sums(sums).statistics
    assert stats is not None
    assert stats.sum_sq2 == pytest.approx({"w": 1.5})
    assert stats.weights == (0.5, 0.5)
    other.step(updates)
    # P = (2.5 − 1.5)/(1 − ½) = 2
    for of in (server, other):
        assert of.state_dict()["adapter"]["state"]["pooled"] == pytest.approx([2.0])


@pytest.mark.parametrize("name", REGISTRY)
@settings(max_examples=20)
@given(
    optimizer=st.sampled_from([SGD(lr=0.7), Momentum(lr=0.5), Adam(lr=0.01)]),
    seed=st.integers(0, 10**6),
    weights=st.lists(st.floats(1, 30), min_size=1, max_size=6),
    frozen=st.booleans(),
)
def test_sums_give_what_updates_give(
    name: str, optimizer: SGD, seed: int, weights: list[float], frozen: bool
):
    whole, summed = (
        Server(model(), optimizer=optimizer, adapter=REGISTRY[name](), guard=None) for _ in range(2)
    )
    for t in range(3):
        updates = cohort(seed + t, weights, frozen=frozen)
        a, b = whole.step(updates, population=20), step_sums(summed, updates, population=20)
        assert a.stepped
        assert b.stepped, b.reason
        assert b.gsi == pytest.approx(a.gsi, rel=1e-6)
        assert b.scale == pytest.approx(a.scale, rel=2e-5)
        assert b.baseline == pytest.approx(a.baseline, rel=2e-5)
        assert (b.gsi_all, b.train_loss) == pytest.approx((a.gsi_all, a.train_loss), rel=1e-6)
        assert [c["weight"] for c in b.clients] == [c["weight"] for c in a.clients]
    for key, value in whole.params.items():
        torch.testing.assert_close(summed.params[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", [None, Equal()])
@pytest.mark.parametrize("adapter", [Adapter(), Fixed(value=0.3)])
def test_the_mean_is_the_same_to_the_bit(adapter: Adapter, weighting: Any):
    whole, summed = (Server(model(), adapter=adapter, weighting=weighting) for _ in range(2))
    for t in range(3):
        updates = cohort(t, [600, 500, 113, 127])
        whole.step(updates)
        assert step_sums(summed, updates).stepped
    assert all(torch.equal(summed.params[key], value) for key, value in whole.params.items())


def test_the_factors_are_the_same_to_the_bit_of_float32_with_the_servers_own_norms():
    whole, summed = (Server(model(), adapter=Glad()) for _ in range(2))
    updates = cohort(0, [1.0, 1.0, 1.0])
    measured: list[list[float]] = []
    for update in updates:
        stats = Server(model()).step([update]).statistics
        assert stats is not None
        measured.append(list(stats.sum_sq.values()))
    collector = Collector(summed)
    for update, norms in zip(updates, measured, strict=True):
        collector.take(update, norms)
    a, b = whole.step(updates), summed.step_sums(collector.sums())
    assert b.gsi == pytest.approx(a.gsi, rel=1e-14)


def test_a_collector_keeps_nothing():
    updates, memory = cohort(1, [3, 4, 5]), {name: torch.empty(s) for name, s in SHAPES.items()}
    server, other = Server(model()), Server(model())
    collector = Collector(server)
    for update in updates:
        assert isinstance(update.delta, dict)
        for name, value in update.delta.items():
            memory[name].copy_(value)
        collector.take(replace(update, delta=memory), sq_norms(memory))
    assert server.step_sums(collector.sums()).stepped
    other.step(updates)
    assert all(torch.equal(server.params[key], value) for key, value in other.params.items())


def test_buffers_are_averaged_and_counters_take_the_maximum():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    servers = [Server(net), Server(net)]
    trained: list[Update] = []
    for k in (1, 3):
        state = {
            n: v + k if v.is_floating_point() else v + 10 * k for n, v in servers[0].state.items()
        }
        trained.append(Update(model=state, weight=k))
    servers[0].step(trained)
    collector = Collector(servers[1])
    for k, update in zip((1, 3), trained, strict=True):
        # every element of every parameter has moved by k
        collector.take(update, [k**2 * v.numel() for v in servers[1].params.values()])
    assert servers[1].step_sums(collector.sums()).stepped
    # w = ¼, ¾: the mean moved by (1 + 9)/4 = 2.5; the counter is 30
    assert servers[1].state["1.running_mean"].tolist() == [2.5, 2.5]
    assert servers[1].state["1.num_batches_tracked"] == 30
    assert all(torch.equal(servers[1].state[n], v) for n, v in servers[0].state.items())


# What a client may send, and is rejected for

FORMS: dict[str, tuple[Callable[[], Update | Failure], Any, str]] = {
    "failure": (lambda: Failure("a", "no reply"), None, "no reply"),
    "missing": (lambda: Update({}), [1.0], "delta has no tensor 'w'"),
    "extra": (lambda: Update({"w": torch.ones(2), "x": torch.ones(1)}), [2.0], "extra tensor 'x'"),
    "shape": (lambda: Update({"w": torch.ones(1)}), [1.0], "has shape"),
    "integers": (lambda: Update({"w": torch.ones(2).int()}), [2.0], "not floating point"),
    "weight": (lambda: Update({"w": torch.ones(2)}, weight=-1), [2.0], "weight -1"),
    "nan weight": (lambda: Update({"w": torch.ones(2)}, weight=math.nan), [2.0], "weight nan"),
    "no norms": (lambda: Update({"w": torch.ones(2)}), None, "no squared norms are reported"),
    "too few": (lambda: Update({"w": torch.ones(2)}), [], "0 squared norms .* 1 tensors"),
    "too many": (lambda: Update({"w": torch.ones(2)}), [1.0, 1.0], "2 squared norms .* 1 tensors"),
    "negative": (lambda: Update({"w": torch.ones(2)}), [-1.0], "squared norm of 'w' is -1"),
    "nan": (lambda: Update({"w": torch.ones(2)}), [math.nan], "squared norm of 'w' is nan"),
    "inf": (lambda: Update({"w": torch.ones(2)}), [math.inf], "squared norm of 'w' is inf"),
    "huge": (lambda: Update({"w": torch.ones(2)}), [1e300], "squared norm of 'w' is 1e\\+300"),
    "words": (lambda: Update({"w": torch.ones(2)}), ["much"], "squared norm of 'w' is much"),
    "a word": (lambda: Update({"w": torch.ones(2)}), "2", "are a str, not a list"),
    "a number": (lambda: Update({"w": torch.ones(2)}), 2.0, "are a float, not a list"),
    "guarded": (lambda: Update({"w": torch.ones(2)}), [1e8], "norm 1e\\+04 is more than 100 times"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_form_is_rejected_and_the_round_goes_on(form: str):
    make, norms, reason = FORMS[form]
    server = small()
    collector = Collector(server)
    collector.take(make(), norms)
    collector.take(Update({"w": torch.tensor([3.0, 4.0])}, client="good"), [25.0])
    record = server.step_sums(collector.sums(), clients=collector.entries)
    assert record.stepped
    assert server.params["w"].tolist() == [-3, -4]
    bad, good = record.clients
    assert re.search(reason, bad["rejected"])
    assert (bad["weight"], good["weight"], good["sq_norm"]) == (0, 1, 25)
    assert "rejected" not in good


def test_the_guard_looks_at_what_is_reported():
    server = small()
    # usual: norm √2, weight 10 of three clients, so no weight over 2·10, and no norm over 3·√2
    step_sums(server, [Update({"w": torch.ones(2)}, weight=10)] * 3)
    collector = Collector(server)
    collector.take(Update({"w": torch.ones(2)}, weight=100_001), [2.0])
    collector.take(Update({"w": torch.ones(2)}, weight=10), [2.0 * 100.1**2])
    collector.take(Update({"w": torch.full((2,), 6.0)}, weight=10), [72.0])
    record = server.step_sums(collector.sums(), clients=collector.entries)
    heavy, long, cut = record.clients
    assert (heavy["weight"], heavy["claimed"]) == (pytest.approx(2 / 3), 100_001)
    assert long["rejected"] == "norm 141.6 is more than 100 times the usual 1.414"
    assert (cut["weight"], cut["clipped"]) == pytest.approx((1 / 3, 0.5))
    # θ = −1, then − (2·1 + 1·3)/3
    assert server.params["w"].tolist() == pytest.approx([-8 / 3] * 2)


# What sums may be, and the round is skipped for

NAN, INF = math.nan, math.inf
SKIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "nan in the sum": ({"total": {"w": torch.tensor([NAN, 6.0])}}, "not finite in 'w'"),
    "inf in the sum": ({"total": {"w": torch.tensor([INF, 6.0])}}, "not finite in 'w'"),
    "no tensor": ({"total": {}}, "no tensor 'w'"),
    "shape": ({"total": {"w": torch.ones(3)}}, "has shape"),
    "nan weight": ({"weight": NAN}, "weight nan"),
    "no weight": ({"weight": 0.0}, "weight 0"),
    "nobody": ({"count": 0}, "0 updates are in the sums, 2 are needed"),
    "too few": ({"count": 1}, "1 updates are in the sums, 2 are needed"),
    "nan norm": ({"sum_sq": {"w": NAN}}, "sum_sq of 'w' is nan"),
    "negative norm": ({"sum_sq": {"w": -1.0}}, "sum_sq of 'w' is -1"),
    "no norm": ({"sum_sq": {}}, "same tensors: 'w'"),
    "another's norm": ({"sum_sq": {"w": 16.0, "x": 1.0}}, "same tensors: 'x'"),
    "nan in sum_sq2": ({"sum_sq2": {"w": NAN}}, "sum_sq2 of 'w' is nan"),
    "nan in weight_sq": ({"weight_sq": NAN}, "weight_sq is nan"),
    "nan unit": ({"unit": NAN}, "unit of the weights"),
    # W·Σw‖g‖² = 4·9.99 = 39.96 < 2² + 6² = 40
    "a lie": ({"sum_sq": {"w": 9.99}}, "W·Σw‖g‖² of 'w' is 39.96, less than ‖Σwg‖², 40"),
    "zero": ({"sum_sq": {"w": 0.0}}, "W·Σw‖g‖² of 'w' is 0, less than ‖Σwg‖², 40"),
    # r·Σw²‖g‖² = 2·19 < 40; Σw²‖g‖² = 65 > 4·16
    "a lie in sum_sq2": ({"sum_sq2": {"w": 19.0}}, "r·Σw²‖g‖² of 'w' is 38, less than ‖Σwg‖², 40"),
    "a large sum_sq2": ({"sum_sq2": {"w": 65.0}}, "W·Σw‖g‖² of 'w' is 64, less than Σw²‖g‖², 65"),
    # r·Σw² = 2·7 < 4²; Σw² = 17 > 4²
    "a lie in weight_sq": ({"weight_sq": 7.0}, "r·Σw² is 14, less than W², 16"),
    "a large weight_sq": ({"weight_sq": 17.0}, "W² is 16, less than Σw², 17"),
    "absurd": ({"sum_sq": {"w": 5e24}}, "mean client's norm 1.12e\\+12 is above 1e\\+12"),
    "buffers": ({"buffers": {}}, "no buffer 'n'"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_a_skipped_round_changes_nothing(case: str):
    changed, reason = SKIPPED[case]
    parts: dict[str, Any] = {"w": torch.zeros(2), "n": torch.tensor(3)}
    server = Server(parts, optimizer=Momentum(), adapter=Glad(), min_clients=2)
    before = server.state_dict()
    record = server.step_sums(two(**changed), clients=[{"id": 1}])
    assert (record.status, record.clients, server.round) == ("skipped", [{"id": 1}], 0)
    assert record.reason
    assert re.search(reason, record.reason)
    after = server.state_dict()
    for name, value in before.pop("tensors").items():
        assert torch.equal(after["tensors"][name], value)
    del after["tensors"]
    assert after == before
    assert server.step_sums(two()).stepped, "the same server goes on"


def test_without_a_guard_only_the_absurd_is_refused():
    assert small(guard=None).step_sums(two(sum_sq={"w": 1e6})).stepped
    assert not small(guard=None).step_sums(two(sum_sq={"w": 5e24})).stepped


def test_the_guard_remembers_rounds():
    # R = √(16/4) = 2 a round, weight 4/2 = 2; then R = 60, so the round's mean is cut to 3·2/60
    server = small()
    assert server.step_sums(two()).stepped
    assert server.state_dict()["gate"] == {"norm": 2.0, "weight": 2.0, "count": 1.0}
    before = server.params["w"].clone()
    long = server.step_sums(two(sum_sq={"w": 4 * 60.0**2}))
    assert long.stepped
    assert (server.params["w"] - before).tolist() == pytest.approx([-0.05, -0.15])
    assert server.state_dict()["gate"]["norm"] == pytest.approx(math.sqrt(2 * 60))


def test_a_liar_is_exposed_only_where_the_sum_gives_it_away():
    # all send (3, 4), ‖g‖² = 25; a third of them says 24: 74/3 < 25
    server = small(guard=Guard())
    collector = Collector(server)
    for norm in (25.0, 25.0, 24.0):
        collector.take(Update({"w": torch.tensor([3.0, 4.0])}), [norm])
    record = server.step_sums(collector.sums(), clients=collector.entries)
    assert record.reason is not None
    assert "W·Σw‖g‖² of 'w' is 222, less than ‖Σwg‖², 225" in record.reason
    # updates that disagree leave room: (3, 4) and (-4, 3), ‖Σg‖² = 50; 2·(25 + 1) = 52
    collector = Collector(server)
    for g, norm in (([3.0, 4.0], 25.0), ([-4.0, 3.0], 1.0)):
        collector.take(Update({"w": torch.tensor(g)}), [norm])
    assert server.step_sums(collector.sums()).gsi["w"] == pytest.approx(math.sqrt(52 / 50))


@pytest.mark.parametrize("count", [2, 10, 1000])
def test_honest_clients_that_agree_are_no_liars(count: int):
    # GSI is 1. The float32 sum of 1,000 of these is 1.5e-5 too large, its square 3e-5: no lie
    delta = {"w": torch.tensor([0.13203048706054688, 0.0])}
    server = small()
    record = step_sums(server, [Update(delta)] * count)
    assert record.stepped, record.reason
    assert record.gsi["w"] == pytest.approx(1, abs=1e-4)


# What a server may not have

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "krum": ({"filter": Krum()}, "Krum compares the updates .*filter=None"),
    "median": ({"filter": Median()}, "Median compares the updates .*filter=None"),
    "clip": ({"filter": NormClip()}, "NormClip scales each update .*fixedclipping_mod"),
    "fedadp": ({"weighting": FedAdp()}, "FedAdp compares the updates .*Samples or Equal"),
    "optimal": ({"weighting": Optimal()}, "Optimal compares the updates .*Samples or Equal"),
    "method": ({"method": lambda mean, extra, count, state: (state, None)}, "method=None"),
    "distances": ({"distances": True}, "distances=True measures every update"),
}


@pytest.mark.parametrize("part", REFUSED)
def test_what_needs_the_updates_is_refused(part: str):
    own, reason = REFUSED[part]
    server = small(**own)
    with pytest.raises(ValueError, match=reason):
        server.step_sums(two())
    with pytest.raises(ValueError, match=reason):
        Collector(server)


# Secure aggregation

SCALE = 2.0**24
"""Fixed point, so that masks cancel exactly in the integers modulo 2⁶⁴."""


def masked(values: list[np.ndarray]) -> Iterator[np.ndarray]:
    """What each client sends: its numbers and a mask shared with each other one, modulo 2⁶⁴."""
    r, size = len(values), values[0].size
    rng = np.random.default_rng(7)
    shared = rng.integers(0, 2**64, (r, r, size), dtype=np.uint64)
    for i, value in enumerate(values):
        hidden = np.round(value * SCALE).astype(np.int64).view(np.uint64)
        for j in range(r):
            if i < j:
                hidden = hidden + shared[i, j]
            elif j < i:
                hidden = hidden - shared[j, i]
        yield hidden


def test_masks_that_cancel_hide_every_update_and_change_no_factor():
    whole, summed = (Server(model(), optimizer=Adam(lr=0.01), adapter=Glad()) for _ in range(2))
    names = summed.layout.names
    for t in range(4):
        updates = cohort(t, [600, 500, 113, 127, 300])
        flat: list[np.ndarray] = []
        for update in updates:
            assert isinstance(update.delta, dict)
            parts = [v.numpy().astype(np.float64).reshape(-1) for v in update.delta.values()]
            w, sq = update.weight, np.array([part @ part for part in parts])
            flat.append(np.concatenate([[w, 0.001 * w * w], w * sq, *(w * part for part in parts)]))
        messages = list(masked(flat))
        for message, value in zip(messages, flat, strict=True):
            alone = message.view(np.int64) / SCALE
            assert abs(np.corrcoef(alone, value)[0, 1]) < 0.2  # what the server sees of a client
        total = sum(messages[1:], messages[0]).view(np.int64) / SCALE
        ends = np.cumsum([math.prod(SHAPES[name]) for name in names])
        pieces = np.split(total[2 + len(names) :], ends[:-1])
        sums = Sums(
            total={n: p.reshape(SHAPES[n]) for n, p in zip(names, pieces, strict=True)},
            sum_sq=dict(zip(names, total[2:].tolist(), strict=False)),
            weight=float(total[0]),
            weight_sq=float(total[1]) / 0.001,
            count=len(messages),
        )
        a, b = whole.step(updates), summed.step_sums(sums)
        assert b.stepped, b.reason
        assert b.gsi == pytest.approx(a.gsi, rel=1e-5)
        assert b.scale == pytest.approx(a.scale, rel=1e-5)
        assert b.clients == []
    for key, value in whole.params.items():
        torch.testing.assert_close(summed.params[key], value, rtol=1e-4, atol=1e-5)


def test_a_packed_sum_may_have_crumbs_in_its_padding():
    server, other = Server(model()), Server(model())
    packed = server.layout.pack(model())
    packed[server.layout.padding] = 1e-3
    norms = dict(zip(SHAPES, sq_norms(model()), strict=True))
    for of, total in ((server, packed), (other, model())):
        assert of.step_sums(Sums(total=total, sum_sq=norms, weight=1.0, count=1)).stepped
    assert all(torch.equal(server.params[key], value) for key, value in other.params.items())
    assert packed[server.layout.padding].eq(1e-3).all(), "the caller's memory is not written"


def test_a_run_on_sums_resumes_exactly(tmp_path: Any):
    server = Server(model(), optimizer=Momentum(), adapter=Glad())
    for t in range(2):
        step_sums(server, cohort(t, [1, 2, 3]))
    server.save(tmp_path / "state.safetensors")
    again = Server.load(tmp_path / "state.safetensors", model())
    records = [step_sums(s, cohort(9, [1, 2, 3])) for s in (server, again)]
    assert records[0].to_dict() == records[1].to_dict()
    assert all(torch.equal(again.params[key], value) for key, value in server.params.items())


def test_the_own_loop_in_the_docs_runs():
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[-1], names)
    # orthogonal weights, equal biases: √2 and 1
    assert names["record"].gsi == pytest.approx({"weight": math.sqrt(2), "bias": 1})
