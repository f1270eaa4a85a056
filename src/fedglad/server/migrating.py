"""A saved state for a model whose layout was changed on purpose: what fits is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedglad.core import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.server.server import Server

PARTS = ("params", "slots", "direction", "buffers", "average")
"""Of a state: "params/w", "slots/m/w"; what else it has is of whole updates."""

LENGTHS = ("norm", "extra", "buffers")
"""What is usual of an update's length says little of one of another model's."""


@dataclass(frozen=True)
class Migration:
    """What became of a state's tensors, by the model's names: kept, begun anew, or left out.

    >>> Migration(kept=["body"], new=["head"], dropped=["old_head"]).words
    '1 tensor is kept (body), 1 is new (head), 1 is dropped (old_head)'
    """

    kept: list[str]
    new: list[str]
    dropped: list[str]

    @property
    def words(self) -> str:
        """For a person."""
        parts: list[str] = []
        for what in ("kept", "new", "dropped"):
            if names := getattr(self, what):
                noun = "" if parts else " tensor" if len(names) == 1 else " tensors"
                verb = "is" if len(names) == 1 else "are"
                shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
                parts.append(f"{len(names)}{noun} {verb} {what} ({shown})")
        return ", ".join(parts)


def migrated(saved: Mapping[str, Any], server: Server) -> tuple[dict[str, Any], Migration]:
    """A state of another layout as one that `server.load_state_dict` takes, and what it keeps.

    A tensor of the same name and shape is kept, with its moments, its average and its baseline;
    any other is as the server has it, whose model is the new one. The round, what clients usually
    weigh, and the ε that was spent go on; clients' trust and an estimator's memory begin anew, as
    they are of whole updates. CheckpointError says why nothing can be kept.

    >>> import torch
    >>> from fedglad import Server
    >>> old = Server({"body": torch.zeros(2), "head": torch.zeros(2)})
    >>> record = old.step([{"body": torch.ones(2), "head": torch.ones(2)}])
    >>> new = Server({"body": torch.zeros(2), "head": torch.zeros(3)})
    >>> state, migration = migrated(old.state_dict(), new)
    >>> new.load_state_dict(state)
    >>> new.round, new.state["body"], migration.words
    (1, tensor([-1., -1.]), '1 tensor is kept (body), 1 is new (head)')
    """
    fresh = server.state_dict()
    with checkpoint.reading("the state"):
        if saved["version"] != checkpoint.VERSION:
            raise ValueError(f"it has version {saved['version']!r}")
        theirs = {name: tuple(shape) for name, shape, *_ in saved["layout"]}
        ours = {name: tuple(shape) for name, shape, *_ in fresh["layout"]}
        kept = [name for name, shape in ours.items() if theirs.get(name) == shape]
        if not kept:
            raise ValueError("it has no tensor that this model has, in the same shape")
        tensors = dict(fresh["tensors"])
        for key, value in saved["tensors"].items():
            part, _, rest = key.partition("/")
            if part == "method" and rest.split("/", 1)[1] in kept:
                tensors[key] = value
            elif part in PARTS and key in tensors and tensors[key].shape == value.shape:
                tensors[key] = value.to(tensors[key].dtype)
        if any(key.startswith("method/") for key in tensors):
            tensors |= _zeros(server, tensors)
        state = {**fresh, "tensors": tensors, "round": saved["round"]}
        state["gate"] = {k: v for k, v in saved["gate"].items() if k not in LENGTHS}
        if "privacy" in saved:
            state["privacy"] = saved["privacy"]
        for role in ("optimizer", "weighting"):
            if saved[role]["class"] == fresh[role]["class"]:
                part = "numbers" if role == "optimizer" else "state"
                state[role] = {**fresh[role], **{k: v for k, v in saved[role].items() if k == part}}
        state["adapter"] = _adapter(saved["adapter"], fresh["adapter"])
        if fresh.get("average", {}).get("class") == saved.get("average", {}).get("class"):
            state["average"] = saved.get("average", fresh.get("average"))
    new, dropped = [n for n in ours if n not in kept], [n for n in theirs if n not in ours]
    return state, Migration(kept, new, dropped)


def _zeros(server: Server, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The method's vectors of new tensors, as all of them begin."""
    keys = {key.split("/", 2)[1] for key in tensors if key.startswith("method/")}
    whole = server.layout.views(server.layout.zeros())
    every = {f"method/{key}/{name}": value for key in keys for name, value in whole.items()}
    return {name: value for name, value in every.items() if name not in tensors}


def _adapter(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the groups that both have; others begin anew."""
    state = {name: list(values) for name, values in fresh["state"].items()}
    places = {label: at for at, label in enumerate(saved["groups"])}
    if saved["class"] == fresh["class"]:
        for name, values in state.items():
            for at, label in enumerate(fresh["groups"]):
                if label in places and name in saved["state"]:
                    values[at] = saved["state"][name][places[label]]
    return {**fresh, "state": state}
