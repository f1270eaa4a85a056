"""A state for a model that was changed: what fits goes on as if nothing had happened."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedglad import Glad, Guard, Server, Update
from fedglad.adapters import REGISTRY as ADAPTERS
from fedglad.averages import EMA
from fedglad.core.checkpoint import CheckpointError
from fedglad.optimizers import REGISTRY as OPTIMIZERS
from fedglad.privacy import Central
from fedglad.server.migrating import migrated
from fedglad.weights import Equal

OLD = {"body": (3, 2), "norm.running_mean": (2,), "head": (4,), "gone": (2,)}
NEW = {"body": (3, 2), "norm.running_mean": (2,), "head": (5,), "extra": (2, 2)}
ALIKE = [name for name in OPTIMIZERS if name not in ("dog", "fedeve")]  # these look at all tensors


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """The same numbers for a tensor of the same name and shape."""
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
        made[name] = torch.randn(shape, generator=generator)
    return made


def updates(shapes: dict[str, tuple[int, ...]], t: int) -> list[Update]:
    return [Update(model=drawn(shapes, 10 * t + k), weight=k + 1.0, client=k) for k in range(3)]


def server(shapes: dict[str, tuple[int, ...]], **parts: Any) -> Server:
    return Server(drawn(shapes, 99), guard=None, trust=None, **parts)


def moved(old: Server, new: Server) -> None:
    state, migration = migrated(old.state_dict(), new)
    new.load_state_dict(state)
    assert migration.kept == ["body", "norm.running_mean"]
    assert migration.new == ["head", "extra"]
    assert migration.dropped == ["gone"]
    assert new.round == old.round
    assert torch.equal(new.state["head"], drawn(NEW, 99)["head"])


@pytest.mark.parametrize("name", ALIKE)
def test_a_kept_tensor_goes_on_with_its_moments_its_average_and_its_baseline(name: str):
    parts: dict[str, Any] = {
        "optimizer": OPTIMIZERS[name](lr=0.1),
        "adapter": Glad(gamma=0.5),
    }
    if name != "schedule-free":
        parts["average"] = EMA(beta=0.5)
    old, new = server(OLD, **parts), server(NEW, **parts)
    for t in range(3):
        assert old.step(updates(OLD, t)).stepped
    moved(old, new)
    for t in (3, 4):
        first, second = old.step(updates(OLD, t)), new.step(updates(NEW, t))
        assert second.scale["body"] == first.scale["body"]
        assert second.baseline.get("body") == first.baseline.get("body")
        for tensor in ("body", "norm.running_mean"):
            assert torch.equal(new.state[tensor], old.state[tensor])
            assert torch.equal(new.averaged[tensor], old.averaged[tensor])


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_goes_on(name: str):
    old, new = (server(shapes, adapter=ADAPTERS[name]()) for shapes in (OLD, NEW))
    for t in range(3):
        assert old.step(updates(OLD, t), population=10).stepped
    moved(old, new)
    assert new.step(updates(NEW, 3), population=10).stepped
    assert all(bool(x.isfinite().all()) for x in new.state.values())


def test_the_vectors_of_a_client_method_go_on():
    def method(mean: Tensor, extra_sum: Tensor, count: int, state: dict[str, Tensor]) -> Any:
        return {"c": state.get("c", torch.zeros_like(mean)) + extra_sum / count}, None

    old, new = server(OLD, method=method), server(NEW, method=method)

    def with_extra(shapes: dict[str, tuple[int, ...]], t: int) -> list[Update]:
        extra = {n: x for n, x in drawn(shapes, t).items() if "norm" not in n}
        return [Update(model=drawn(shapes, t), client=0, extra=extra)]

    assert old.step(with_extra(OLD, 1)).stepped
    moved(old, new)
    kept = new.layout.views(new.sent["c"])
    assert torch.equal(kept["body"], drawn(OLD, 1)["body"])
    assert not kept["head"].any()
    assert not kept["extra"].any()


def test_what_clients_weigh_is_kept_and_how_long_updates_are_is_not():
    old = Server(drawn(OLD, 99), guard=Guard())
    for t in range(3):
        assert old.step(updates(OLD, t)).stepped
    new = Server(drawn(NEW, 99), guard=Guard())
    usual = old.state_dict()["gate"]
    assert {"norm", "weight"} <= usual.keys()
    moved(old, new)
    assert new.state_dict()["gate"] == {
        kind: usual[kind] for kind in usual if kind not in ("norm", "extra", "buffers")
    }


def test_the_epsilon_that_was_spent_is_spent():
    settings: dict[str, Any] = {"privacy": Central(clip=1.0, noise=1.0), "weighting": Equal()}
    shapes = {name: shape for name, shape in OLD.items() if "norm" not in name}
    old = Server(drawn(shapes, 99), guard=None, trust=None, **settings)
    for t in range(2):
        round_ = [Update(model=drawn(shapes, t), client=k) for k in range(3)]
        assert old.step(round_, population=100, cohort=3).stepped
    model = {**drawn(shapes, 99), "extra": torch.zeros(2)}
    new = Server(model, guard=None, trust=None, **settings)
    state, _ = migrated(old.state_dict(), new)
    new.load_state_dict(state)
    assert old.epsilon
    assert new.epsilon == old.epsilon


def test_a_state_that_has_nothing_in_common_is_refused():
    old, new = server(OLD), server({"other": (2,)})
    old.step(updates(OLD, 0))
    before = new.state_dict()
    with pytest.raises(CheckpointError, match="no tensor that this model has"):
        migrated(old.state_dict(), new)
    assert torch.equal(before["tensors"]["params/other"], new.params["other"])
