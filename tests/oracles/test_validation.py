"""Nothing poisons the model: what is rejected, why, and that it leaves no trace."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedglad import Glad, Server, Update
from fedglad.filters import Filter, Median, MultiKrum, NormClip
from fedglad.optimizers import Adam

MODEL = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([0.5])}


def tensors(**other: Any) -> dict[str, Any]:
    return {"w": torch.tensor([0.1, -0.2, 0.3]), "b": torch.tensor([0.4]), **other}


def good(k: int) -> Update:
    """Client k's update, different for each."""
    g = {name: x * (1 + k) + 0.01 * k for name, x in tensors().items()}
    return Update(g, client=k, weight=1.0 + k, loss=1.0)


def bad(delta: Any = None, **settings: Any) -> Update:
    return Update(tensors() if delta is None else delta, client="bad", **settings)


def same(a: Any, b: Any) -> bool:
    """Equality of nested states, tensors bit for bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return a == b


def server(**settings: Any) -> Server:
    return Server(MODEL, optimizer=Adam(), adapter=Glad(), **settings)


POISON: dict[str, tuple[Any, str]] = {
    "missing": (bad({"w": torch.ones(3)}), "no tensor 'b'"),
    "extra": (bad(tensors(c=torch.ones(1))), "extra tensor 'c'"),
    "broadcastable": (bad(tensors(w=torch.ones(1))), r"'w' has shape \(1,\), not \(3,\)"),
    "same size": (bad(tensors(w=torch.ones(3, 1))), r"'w' has shape \(3, 1\), not \(3,\)"),
    "scalar": (bad(tensors(b=torch.tensor(1.0))), r"'b' has shape \(\), not \(1,\)"),
    "integers": (bad(tensors(w=torch.ones(3, dtype=torch.int64))), "'w' is torch.int64"),
    "booleans": (bad(tensors(w=torch.ones(3, dtype=torch.bool))), "'w' is torch.bool"),
    "complex": (bad(tensors(w=torch.ones(3, dtype=torch.complex64))), "'w' is torch.complex64"),
    "NaN": (bad(tensors(w=torch.tensor([1.0, math.nan, 1.0]))), "'w' holds NaN or inf"),
    "inf": (bad(tensors(b=torch.tensor([-math.inf]))), "'b' holds NaN or inf"),
    "NaN in float16": (bad(tensors(b=torch.tensor([math.nan]).half())), "'b' holds NaN or inf"),
    "NaN in float8": (
        bad(tensors(b=torch.tensor([math.nan]).to(torch.float8_e4m3fn))),
        "'b' holds NaN or inf",
    ),
    "norm 2e12": (bad(tensors(w=torch.tensor([2e12, 0.0, 0.0]))), "1e.?12"),
    "squares beyond float32": (bad(tensors(w=torch.full((3,), 1e20))), "1e.?12"),
    "values beyond float32": (bad(tensors(w=np.full(3, 1e300))), "1e.?12"),
    "no numbers": (bad(tensors(w=["a", "b", "c"])), "'w' cannot be read"),
    "None for a tensor": (bad(tensors(w=None)), "'w' cannot be read"),
    "a sparse tensor": (bad(tensors(w=torch.ones(3).to_sparse())), "'w' is not a plain dense"),
    "a list for a dict": (bad([torch.ones(3), torch.ones(1)]), "not a dict of tensors"),
    "a short vector": (bad(torch.ones(4)), r"shape \(4,\)"),
    "weight 0": (bad(weight=0), "weight 0 "),
    "weight -1": (bad(weight=-1), "weight -1 "),
    "weight NaN": (bad(weight=math.nan), "weight nan "),
    "weight inf": (bad(weight=math.inf), "weight inf "),
    "weight str": (bad(weight="many"), "weight 'many' "),
    "weight None": (bad(weight=None), "weight None "),
    "weight 10^400": (bad(weight=10**400), "weight"),
    "NaN in the model": (
        Update(model=tensors(w=torch.full((3,), math.nan)), client="bad"),
        "'w' holds NaN or inf",
    ),
    "model without a tensor": (Update(model={"w": torch.ones(3)}, client="bad"), "no tensor 'b'"),
    "guarded norm": (
        bad(tensors(w=torch.full((3,), 1e9))),
        r"norm .* is more than 1\S+ times",
    ),
    "an object": (object(), "a object is neither an Update nor a dict"),
    "None": (None, "a NoneType is neither"),
}


@pytest.mark.parametrize("name", POISON)
@pytest.mark.parametrize("form", [list, iter])
@pytest.mark.parametrize("filter", [Filter(), NormClip(max_norm=1.0), Median()], ids=repr)
def test_poison_is_rejected_with_its_reason_and_leaves_no_trace(
    name: str, form: Callable[..., Iterable[Any]], filter: Filter
):
    # Each round equals, bit for bit, the one without it: at the start, in the middle, at the end
    poison, reason = POISON[name]
    if filter.keeps_updates and name == "guarded norm":
        return  # such a filter gets it, cut: tests/oracles/test_guard.py
    clean, tried = server(filter=filter), server(filter=filter)
    for place in (0, 2, 4):
        cohort: list[Any] = [good(k) for k in range(4)]
        expected = clean.step(form(cohort))
        cohort.insert(place, poison)
        record = tried.step(form(cohort))
        assert record.stepped
        assert same(tried.state_dict(), clean.state_dict())
        assert (record.gsi, record.scale) == (expected.gsi, expected.scale)
        assert record.statistics == expected.statistics
        assert record.train_loss == expected.train_loss

        entry = record.clients.pop(place)
        assert record.clients == expected.clients
        assert_rejected(entry, reason)
        assert entry["id"] == ("bad" if isinstance(poison, Update) else None)


def assert_rejected(entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise ValueError(entry["rejected"])
    assert entry["weight"] == 0


@pytest.mark.parametrize("filter", [Filter(), NormClip(max_norm=1.0), Median()], ids=repr)
def test_a_round_of_poison_is_skipped_and_changes_nothing(filter: Filter):
    tried = server(filter=filter)
    tried.step([good(0), good(1)])
    before = tried.state_dict()
    poison = [update for name, (update, _) in POISON.items() if name != "guarded norm"]
    for form in (list, iter):
        record = tried.step(form(poison))
        assert record.status == "skipped"
        assert f"0 of {len(poison)} updates were accepted" in (record.reason or "")
        assert len(record.clients) == len(poison)
        assert all("rejected" in c for c in record.clients)
        assert same(tried.state_dict(), before)


def test_an_empty_round_is_skipped():
    record = Server(MODEL).step([])
    assert (record.status, record.clients) == ("skipped", [])


def test_the_record_names_the_rejected():
    record = server().step([good(0), bad(weight=0), good(1)])
    assert list(record.rejected) == ["bad"]
    assert [c["id"] for c in record.clients] == [0, "bad", 1]


def test_a_lost_loss_is_left_out_of_the_mean_loss():
    # weights 1, 2, 3 with losses 1, NaN, 3: (1·1 + 3·3)/4
    record = server().step(
        [
            Update(tensors(), weight=1, loss=1.0),
            Update(tensors(), weight=2, loss=math.nan),
            Update(tensors(), weight=3, loss=3.0),
        ]
    )
    assert record.rejected == {}
    assert record.train_loss == pytest.approx(2.5)


# --- without a guard (tests/oracles/test_guard.py has those with one) ---


def one(value: float, **settings: Any) -> Update:
    return Update({"w": torch.tensor([value, 0.0])}, client=str(value), **settings)


def test_without_a_guard_only_what_no_sum_can_hold_is_rejected():
    # norms up to 1e12
    tried = Server({"w": torch.zeros(2)}, guard=None)
    assert tried.step([one(1e6), one(1.0), one(2.0)]).rejected == {}
    record = tried.step([one(9e11), one(1.0, weight=1e9), one(1.1e12)])
    assert record.rejected.keys() == {str(1.1e12)}


# --- whole rounds ---


def test_fewer_than_min_clients_skip_the_round():
    # 2 of 3 are good, 3 are needed
    tried = server(min_clients=3)
    before = tried.state_dict()
    record = tried.step([good(0), bad(weight=0), good(1)])
    assert record.status == "skipped"
    assert "2 of 3 updates were accepted, 3 are needed" in (record.reason or "")
    assert same(tried.state_dict(), before)
    assert tried.step([good(0), good(1), good(2)]).stepped


@pytest.mark.parametrize("filter", [Filter(), NormClip(), Median(), MultiKrum(f=0)], ids=repr)
def test_an_iterator_that_raises_changes_nothing(filter: Filter):
    def broken():
        yield good(0)
        yield good(1)
        raise ConnectionError("client 2 is gone")

    tried, clean = server(filter=filter), server(filter=filter)
    for each in (tried, clean):
        each.step([good(0), good(1), good(2)])
    with pytest.raises(ConnectionError, match="client 2 is gone"):
        tried.step(broken())
    assert same(tried.state_dict(), clean.state_dict())
    for each in (tried, clean):
        each.step([good(3), good(1), good(2)])
    assert same(tried.state_dict(), clean.state_dict())


@pytest.mark.parametrize(
    "updates", [tensors(), good(0), torch.ones(4)], ids=["dict", "Update", "Tensor"]
)
def test_one_update_is_no_cohort(updates: Any):
    tried = server()
    with pytest.raises(TypeError, match="put it in a list"):
        tried.step(updates)
    assert tried.round == 0


def test_an_update_is_a_difference_or_a_model():
    with pytest.raises(ValueError, match="got neither"):
        Update()
    with pytest.raises(ValueError, match="got both"):
        Update(tensors(), tensors())
