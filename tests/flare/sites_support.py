"""Sites in this process, for sessions without NVFlare: what they reply, by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad import Server, Update

from .custom.arithmetic import number, trained, weight

WEIGHT = "NUM_STEPS_CURRENT_ROUND"
Spoil = Callable[[SimpleNamespace], Any]


def reply(params: Any, *, diff: bool = False, metrics: Any = None, **meta: Any) -> SimpleNamespace:
    """What NVFlare's FLModel is to us."""
    kind = SimpleNamespace(value="DIFF" if diff else "FULL")
    return SimpleNamespace(params=params, params_type=kind, metrics=metrics, meta=meta)


class Sites:
    """A transport: sites that train by `arithmetic`, some spoilt, some away."""

    def __init__(self, *names: str, diff: bool = False, spoil: dict[str, Spoil] | None = None):
        self.names, self.diff, self.spoil = [*names], diff, spoil or {}
        self.asked: list[tuple[int, str, list[str]]] = []

    def sites(self) -> list[str]:
        return self.names

    def ask(
        self, sites: Sequence[str], params: Mapping[str, Any], t: int, task: str
    ) -> Iterator[Any]:
        self.asked.append((t, task, [*sites]))
        for site in sites:
            sent = {name: np.asarray(value) for name, value in params.items()}
            new: dict[str, Any] = {**trained(sent, number(site), t)}
            if self.diff:
                new = {name: value - sent[name] for name, value in new.items()}
            k = number(site)
            made = reply(new, diff=self.diff, metrics={"loss": float(k)}, **{WEIGHT: weight(k)})
            spoilt = self.spoil[site](made) if site in self.spoil else None
            yield made if spoilt is None else spoilt


def model() -> dict[str, np.ndarray]:
    """Parameters, BatchNorm's statistics and its counter."""
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 8,
        "bn.running_mean": np.zeros(3, dtype=np.float32),
        "bn.running_var": np.ones(3, dtype=np.float32),
        "bn.num_batches_tracked": np.array(0),
        "b": np.ones(3, dtype=np.float32),
    }


def by_hand(
    params: Mapping[str, Any], records: Sequence[Mapping[str, Any]], **server: Any
) -> dict[str, Tensor]:
    """A plain Server's model after the updates that the records say were accepted."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in params.items()}
    plain = Server(tensors, **server)
    for record in (one for one in records if one["status"] == "stepped"):
        sent = {name: value.numpy() for name, value in plain.state.items()}
        sites = [c["id"] for c in record["clients"] if "rejected" not in c]
        updates = [
            Update(
                model=trained({name: sent[name] for name in params}, number(site), record["round"]),
                weight=weight(number(site)),
                client=site,
            )
            for site in sites
        ]
        plain.step(updates, population=record["population"], cohort=len(record["clients"]))
    return plain.state


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """The same names, dtypes, shapes and bits."""
    mine = {name: np.asarray(value) for name, value in ours.items()}
    other = {name: np.asarray(value) for name, value in theirs.items()}
    return mine.keys() == other.keys() and all(
        mine[n].dtype == other[n].dtype
        and mine[n].shape == other[n].shape
        and mine[n].tobytes() == other[n].tobytes()
        for n in mine
    )
