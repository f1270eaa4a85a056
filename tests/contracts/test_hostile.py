"""Nothing poisons the model: whatever clients send, no NaN, no exception, no trace of the rejected.

Warnings are errors here, so a sum that overflows on its way fails too.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from fedglad import Guard, Record, Server, Update
from fedglad.server.server import REGISTRIES

from .support import (
    Awkward,
    Correction,
    Parts,
    bits,
    difference,
    make,
    refusal,
    trained,
    with_extra,
)

MODEL = Awkward()
SIZE = Server(MODEL).layout.size
FIRST = "linear.weight"
POPULATION = 10_000
Arrays = dict[str, Any]


def honest(k: int) -> Update:
    if k % 3 == 2:
        return Update(model=trained(MODEL, 7, k), weight=3, client=k, loss=0.5)
    return Update(difference(MODEL, 7, k), weight=1 + k % 4, client=k, loss=0.5)


HONEST = [honest(k) for k in range(12)]


def put(value: float, dtype: torch.dtype = torch.float32) -> Arrays:
    """A difference with one such number."""
    g = {name: x.to(dtype) for name, x in difference(MODEL, 8).items()}
    g[FIRST] = g[FIRST].clone()
    g[FIRST][1, 2] = value
    return g


def fill(value: float, dtype: torch.dtype = torch.float32) -> Arrays:
    """A difference of nothing but such numbers."""
    return {n: torch.full_like(x, value, dtype=dtype) for n, x in difference(MODEL, 8).items()}


def swap(value: Any, name: str = FIRST) -> Arrays:
    """A difference with something else in the place of one tensor."""
    return {**difference(MODEL, 8), name: value}


def state(**named: Any) -> Update:
    """A trained model with something else in the place of a BatchNorm buffer."""
    own = {f"norm.{name}": value for name, value in named.items()}
    return Update(model={**trained(MODEL, 8, 1), **own}, client="state")


def read_only() -> Arrays:
    arrays = {n: x.numpy().copy() for n, x in difference(MODEL, 8).items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def packed(padding: float) -> Tensor:
    """A packed vector whose padding is not the zeros it should be."""
    layout = Server(MODEL).layout
    flat = torch.full((SIZE,), padding)
    for name, view in layout.views(flat).items():
        view.copy_(difference(MODEL, 8)[name])
    return flat


VALUES = [math.nan, math.inf, -math.inf, 1e38, -1e38, 1e20, 1e11, 1e-45, -0.0, 0.0]
HUGE = [1e300, -1e300, 1e39, 1e-300, 1e-60]

CONTENT: dict[str, Any] = {
    **{f"one {value}": put(value) for value in VALUES},
    **{f"all {value}": fill(value) for value in VALUES},
    **{f"one float64 {value}": put(value, torch.float64) for value in HUGE},
    **{f"all float64 {value}": fill(value, torch.float64) for value in HUGE},
    "all float16 6e4": fill(6e4, torch.float16),
    "all bfloat16 1e38": fill(1e38, torch.bfloat16),
    "float8": swap(torch.ones(3, 5).to(torch.float8_e4m3fn)),
    "float8 nan": swap(torch.full((3, 5), math.nan).to(torch.float8_e4m3fn)),
    "float8 zero": swap(torch.zeros(3, 5).to(torch.float8_e4m3fn)),
    "wrong shape": swap(torch.ones(5, 3)),
    "one dimension more": swap(torch.ones(1, 3, 5)),
    "a number for a matrix": swap(torch.tensor(1.0)),
    "a vector for a number": swap(torch.ones(1), "temperature"),
    "no element": swap(torch.ones(0)),
    "missing": {FIRST: torch.ones(3, 5)},
    "extra": {**difference(MODEL, 8), "linear.bias2": torch.ones(3)},
    "key that is no name": {**difference(MODEL, 8), 7: torch.ones(3)},
    "ints": swap(torch.ones(3, 5, dtype=torch.int64)),
    "bools": swap(torch.ones(3, 5, dtype=torch.bool)),
    "complex": swap(torch.ones(3, 5, dtype=torch.complex64)),
    "python ints": swap([[1] * 5] * 3),
    "python floats": swap([[1.0] * 5] * 3),
    "ragged": swap([[1.0], [1.0, 2.0]]),
    "strings": swap(np.full((3, 5), "1.0")),
    "objects": swap(np.full((3, 5), None)),
    "None inside": swap(None),
    "other byte order": swap(np.ones((3, 5), ">f4")),
    "long double": swap(np.ones((3, 5), np.longdouble)),
    "sparse": swap(torch.ones(3, 5).to_sparse()),
    "meta": swap(torch.ones(3, 5, device="meta")),
    "expanded": swap(torch.tensor(0.3).expand(3, 5)),
    "strided numpy": swap(np.ones((3, 10))[:, ::-2]),
    "read-only numpy": read_only(),
    "with gradient": swap(torch.ones(3, 5, requires_grad=True) * 1),
    "empty": {},
    "packed": packed(0.0),
    "packed, padding 1": packed(1.0),
    "packed, padding nan": packed(math.nan),
    "packed, padding 1e38": packed(1e38),
    "packed, sparse": packed(0.0).to_sparse(),
    "packed, meta": packed(0.0).to("meta"),
    "packed, too long": torch.ones(SIZE + 1),
    "packed, float64": packed(0.0).double(),
}

ITEMS: dict[str, Any] = {
    "None": None,
    "a string": FIRST,
    "a number": 1.5,
    "a list": [difference(MODEL, 8)],
    "the model": MODEL,
    "delta is a string": Update("delta"),  # type: ignore[arg-type]
    "model is a list": Update(model=[1]),  # type: ignore[arg-type]
    "model without buffers": Update(model=difference(MODEL, 8), client="bare"),
    "model with nan": Update(model={**trained(MODEL, 8), **put(math.nan)}, client="state"),
    "model with 1e38": Update(model={**trained(MODEL, 8), **fill(1e38)}, client="state"),
    "buffer nan": state(running_mean=torch.full((3,), math.nan)),
    "buffer 1e38": state(running_mean=torch.full((3,), 1e38)),
    "buffer float64 1e300": state(running_mean=torch.full((3,), 1e300, dtype=torch.float64)),
    "buffer float8": state(running_mean=torch.ones(3).to(torch.float8_e4m3fn)),
    "buffer ints": state(running_mean=torch.ones(3, dtype=torch.int64)),
    "buffer of wrong shape": state(running_var=torch.ones(4)),
    "counter uint64": state(num_batches_tracked=torch.tensor(3, dtype=torch.uint64)),
    "counter bool": state(num_batches_tracked=torch.tensor(True)),
    "counter float": state(num_batches_tracked=torch.tensor(3.0)),
    "counter huge": state(num_batches_tracked=torch.tensor(2**63 - 1)),
    "buffer 1e30, weight 1e300": replace(state(running_mean=torch.full((3,), 1e30)), weight=1e300),
}

NUMBERS = [0, -1, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e-30, 1e13, 1e308, True, 1j]
THINGS = [None, "3", "many", "nan", b"1", [], [1.0], {}, Decimal("1e999"), np.float16(2)]
ARRAYS = [np.ones(1), np.ones(2), torch.tensor(2.0), torch.ones(2), torch.tensor(1 + 1j)]
WEIGHTS: dict[str, Any] = {repr(weight): weight for weight in (*NUMBERS, *THINGS, *ARRAYS)}
WEIGHTS |= {"10**400": 10**400, "10**5000": 10**5000}  # the second cannot even be printed

HOSTILE: dict[str, list[Any]] = {
    **{f"content {name}": [Update(g, client="mallory")] for name, g in CONTENT.items()},
    **{f"plain {name}": [g] for name, g in CONTENT.items() if isinstance(g, dict)},
    **{f"item {name}": [item] for name, item in ITEMS.items()},
    **{f"weight {n}": [Update(put(1), weight=w, client="m")] for n, w in WEIGHTS.items()},
    **{f"loss {n}": [Update(put(1), loss=w, client="m")] for n, w in WEIGHTS.items()},
    "two of weight 1e308": [Update(put(k), weight=1e308, client=k) for k in range(2)],
    "the same object twice": [HONEST[0], HONEST[0]],
    "an update and its opposite": [Update(fill(s * 0.7), client=int(s)) for s in (1, -1)],
    "a large one and its opposite": [Update(fill(s * 1e11), client=int(s)) for s in (1, -1)],
}
"""Each a few items of a cohort that somebody means ill with, or got wrong."""


def without_rejected(updates: list[Any], record: Record) -> list[Any]:
    """The updates that the door let in; a filter may still have left some of them out."""
    assert len(record.clients) == len(updates)
    reasons = [entry.get("rejected", "left out by") for entry in record.clients]
    return [u for u, why in zip(updates, reasons, strict=True) if why.startswith("left out by")]


def require_healthy(server: Server, record: Record) -> None:
    json.dumps(record.to_dict(), allow_nan=False)
    saved = server.state_dict()
    for name, tensor in [*saved.pop("tensors").items(), *server.state.items()]:
        assert tensor.isfinite().all(), name
    json.dumps(saved, allow_nan=False)


def feed(
    make_server: Callable[[], Server],
    rounds: list[list[Any]],
    as_stream: bool,
    known: dict[Any, Any] | None = None,
) -> Counter:
    """Steps through the rounds, beside a server that never saw what was rejected.

    What that one came to is kept in `known` by the updates that it saw, for other calls with the
    same kind of server: where all that is hostile is rejected, it saw the same.
    """
    server, twin = make_server(), make_server()
    expected = {} if known is None else known
    seen = Counter[str]()
    history: list[list[Any]] = []
    behind = 0
    for updates in rounds:
        record = server.step(iter(updates) if as_stream else updates, population=POPULATION)
        require_healthy(server, record)
        clean = without_rejected(updates, record)
        history.append(clean)
        key = tuple(tuple(map(id, seen_before)) for seen_before in history)
        if key not in expected:
            for missed in history[behind:]:
                twin.step(iter(missed) if as_stream else missed, population=POPULATION)
            behind = len(history)
            expected[key] = bits(twin)
        assert bits(server) == expected[key]
        seen.update({"rejected": len(updates) - len(clean), "accepted": len(clean)})
        seen[record.status] += 1
    return seen


DOORS = [
    ("none", Guard()),
    ("none", None),
    ("norm-clip", None),
    ("multi-krum", Guard()),
    ("median", None),
]
UNDISTURBED: dict[Any, dict[Any, Any]] = {}
"""What servers come to that never saw a rejected update, by door and by what they saw."""

ESTIMATORS = [name for name in REGISTRIES["estimator"] if name != "none"]


@pytest.mark.parametrize("as_stream", [False, True], ids=["list", "stream"])
@pytest.mark.parametrize("name", HOSTILE)
def test_one_kind_of_hostile_update_does_no_harm(name: str, as_stream: bool):
    bad = HOSTILE[name]
    for filter, guard in DOORS:
        own: Parts = {"adapter": make("adapter", "glad"), "filter": make("filter", filter)}
        rounds = [[*bad, *HONEST[:5]], [*HONEST[5:8], *bad, *HONEST[8:]]]
        known = UNDISTURBED.setdefault((filter, guard, as_stream), {})
        feed(lambda own=own, g=guard: Server(MODEL, guard=g, **own), rounds, as_stream, known)


@pytest.mark.parametrize("guard", [Guard(), None], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_hostile_updates_leave_no_trace_in_what_an_estimator_remembers(estimator: str, guard: Any):
    kinds = [HOSTILE[name] for name in sorted(HOSTILE)]
    rounds = [
        [*HONEST[k % 6 : k % 6 + 3], *(item for kind in kinds[k::30] for item in kind), HONEST[11]]
        for k in range(30)
    ]
    own: Parts = {"estimator": make("estimator", estimator), "guard": guard}
    seen = feed(lambda: Server(MODEL, **own), rounds, as_stream=guard is None)
    assert seen["stepped"] > 15


PICKS = st.lists(
    st.one_of(st.sampled_from(range(len(HONEST))), st.sampled_from(sorted(HOSTILE))),
    min_size=4,
    max_size=14,
)


PARTS = st.fixed_dictionaries(
    {
        role: st.sampled_from(list(rows)).map(lambda name, role=role: make(role, name))
        for role, rows in REGISTRIES.items()
    }
).filter(lambda parts: refusal(parts) is None)


def test_a_far_update_that_comes_first_has_no_part_in_the_rounding_of_others():
    # In weights relative to the far one's, 1/1 and 3/1, sums round otherwise than in 1/3 and 3/3.
    far = HOSTILE["a large one and its opposite"]
    rounds: list[list[Any]] = [[HONEST[0], HONEST[2]], [*far, HONEST[2], HONEST[0], HONEST[5]]]
    for as_stream in (False, True):
        feed(lambda: Server(MODEL), rounds, as_stream)


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_a_thousand_hostile_updates_leave_model_and_state_finite_and_no_trace(part: int):
    seen = Counter[str]()

    @seed(part)
    @settings(max_examples=140, database=None)
    @given(
        rounds=st.lists(PICKS, min_size=2, max_size=5),
        parts=PARTS,
        guard=st.sampled_from([Guard(), None]),
        as_stream=st.booleans(),
    )
    def play(rounds: list[list[Any]], parts: Parts, guard: Any, as_stream: bool) -> None:
        cohorts: list[list[Any]] = []
        for picks in rounds:
            kinds = [[HONEST[pick]] if isinstance(pick, int) else HOSTILE[pick] for pick in picks]
            pairs = zip(picks, kinds, strict=True)
            seen["hostile"] += sum(len(kind) for pick, kind in pairs if pick in HOSTILE)
            cohorts.append([item for kind in kinds for item in kind])
        seen.update(feed(lambda: Server(MODEL, guard=guard, **parts), cohorts, as_stream))

    play()
    assert seen["hostile"] >= 1000
    assert seen["rejected"] >= 500
    assert seen["accepted"] >= 500
    assert seen["stepped"] >= 50, "too few rounds came about to show anything"


def test_a_thousand_hostile_updates_in_one_servers_life_leave_it_as_without_them():
    kinds = [HOSTILE[name] for name in sorted(HOSTILE)]
    rounds = [
        [*HONEST[:3], *(item for kind in kinds[k % 40 :: 40] for item in kind), *HONEST[7:]]
        for k in range(240)
    ]
    assert sum(len(updates) - 8 for updates in rounds) >= 1000
    feed(lambda: Server(MODEL, adapter=make("adapter", "glad")), rounds, as_stream=False)


@pytest.mark.parametrize("name", [n for n in HOSTILE if n.startswith("content ")])
def test_a_hostile_extra_is_rejected_or_harmless(name: str):
    """The second set of tensors of a client method is held to the same rules."""
    content = HOSTILE[name][0].delta
    updates: list[Any] = with_extra(HONEST, MODEL)
    for k in range(5):  # together they may overflow what each alone does not
        updates.insert(2 * k + 1, replace(updates[0], extra=content, client=f"mallory {k}"))
    for filter in ("none", "median"):
        feed(
            lambda f=filter: Server(MODEL, method=Correction(), filter=make("filter", f)),
            [updates, updates[:6]],
            as_stream=True,
        )


@pytest.mark.parametrize("extra", [None, {}, "extra", 3])
def test_an_update_without_the_extra_a_method_needs_is_rejected(extra: Any):
    server = Server(MODEL, method=Correction())
    record = server.step([replace(HONEST[0], extra=extra), *with_extra(HONEST[1:3], MODEL)])
    assert list(record.rejected) == [0]
    require_healthy(server, record)


@pytest.mark.parametrize(
    "client",
    [np.int64(3), math.nan, b"mallory", (1, 2), [3], {}, object(), torch.tensor(3)],
    ids=lambda client: type(client).__name__,
)
@pytest.mark.parametrize("weighting", REGISTRIES["weighting"])
def test_a_client_that_is_neither_int_nor_string_does_no_harm(client: Any, weighting: str):
    server = Server(MODEL, weighting=make("weighting", weighting))
    for bad in ({}, put(1)):
        record = server.step([Update(bad, client=client), *HONEST[:5]])
        require_healthy(server, record)
        assert isinstance(record.rejected, dict)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_model_of_any_precision_stays_finite_in_it(dtype: torch.dtype):
    """Accepted updates may carry θ beyond what float16 holds (65,504) though each is in order."""
    theta = {"x": torch.full((4,), 300.0, dtype=dtype)}
    server = Server(theta, optimizer=make("optimizer", "momentum"))
    for _ in range(8):
        record = server.step([{"x": torch.full((4,), -3e4)}, {"x": torch.full((4,), -2e4)}])
        require_healthy(server, record)


@pytest.mark.parametrize(
    "content",
    [torch.full((2,), 1e-60, dtype=torch.float64), torch.zeros(2)],
    ids=["1e-60", "0"],
)
def test_updates_that_the_models_precision_holds_as_zero_count_as_zero(content: Tensor):
    server = Server({"x": torch.ones(2)}, adapter=make("adapter", "glad"))
    server.step([{"x": torch.ones(2)}] * 2)
    record = server.step([{"x": content}] * 2)
    assert record.gsi == {"x": 1.0}
    assert record.scale == {"x": 1.0}
