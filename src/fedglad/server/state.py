"""What a server holds: the model, the state that its rounds change, and both as a state_dict."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor, nn

from fedglad import adapters, filters, optimizers, weights
from fedglad.adapters import Adapter
from fedglad.core import checkpoint
from fedglad.core.aggregate import Sum, norms_sq
from fedglad.core.layout import rounded, split
from fedglad.core.validate import Gate, Guard
from fedglad.filters import Filter
from fedglad.optimizers import SGD, Optimizer
from fedglad.server.compatibility import refuse
from fedglad.server.intake import Intake, Plan
from fedglad.weights import Samples, State

REGISTRIES: dict[str, dict[str, type]] = {
    "optimizer": optimizers.REGISTRY,
    "adapter": adapters.REGISTRY,
    "filter": filters.REGISTRY,
    "weighting": weights.REGISTRY,
}

Door = TypeVar("Door", bound=Intake)


class Method(Protocol):
    """The server's half of a client method (SCAFFOLD's c, FedDyn's h).

    Called between aggregate and adapt with packed vectors: the mean ḡ, the sum of the clients'
    `extra`, how many there were, and its own state (named packed vectors, {} at first). Returns the
    new state and a shift that is added to θ after the step, or None.

    One with `wants_extra = False` gets no extra. One with `lengths(steps) -> a` is for clients that
    send their updates divided by a (FedNova): the mean is then multiplied by Σ w a.
    """

    def __call__(
        self, mean: Tensor, extra_sum: Tensor, count: int, state: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]: ...


class ServerState:
    """The global model and all that a round changes; `Server` makes the rounds."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        *,
        optimizer: Optimizer | None = None,
        adapter: Adapter | None = None,
        filter: Filter | None = None,
        weighting: Samples | None = None,
        method: Method | None = None,
        buffers: Iterable[str] | None = None,
        min_clients: int = 1,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        distances: bool = False,
    ) -> None:
        if min_clients < 1:
            raise ValueError(f"min_clients={min_clients!r}: a round needs at least one client")
        self.optimizer = optimizer or SGD()
        self.adapter = adapter or Adapter()
        self.filter = filter or Filter()
        self.weighting = weighting or Samples()
        self.method = method
        self.min_clients = min_clients
        self.guard = guard
        self.distances = distances
        refuse(self.adapter, self.filter, self.weighting)
        self.optimizer.rate(0)  # raises for a schedule without an end

        self.layout, parameters, found = split(model, buffers)
        self.round = 0
        self._theta = self.layout.pack(parameters)
        self._buffers = {name: value.clone() for name, value in found.items()}
        self._total = Sum(self.layout)
        self._slots = {
            name: self.layout.zeros().fill_(value) for name, value in self.optimizer.slots().items()
        }
        self._groups = self.adapter.group(
            dict(zip(self.layout.names, self.layout.numels, strict=True))
        )
        self._adapter_state = self.adapter.start(self._groups)
        self._direction = self.layout.zeros() if self.adapter.direction is not None else None
        self._gate = Gate(guard)
        self._weighting_state: State = {}
        self._method_state: dict[str, Tensor] = {}
        wants_extra = method is not None and getattr(method, "wants_extra", True)
        self._plan = Plan(
            self.layout, self.filter, self.weighting, wants_extra, min_clients, distances
        )

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters, in their own dtypes."""
        views = self.layout.views(self._theta)
        dtypes = zip(views.items(), self.layout.dtypes, strict=True)
        return {name: rounded(view, dtype) for (name, view), dtype in dtypes}

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers, as `model.load_state_dict` takes them."""
        params = self.params
        tied = {alias: params[name] for alias, name in self.layout.aliases.items()}
        return {**params, **tied, **self._buffers}

    @property
    def packed(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The parameters as clients have them, one flat vector, and the buffers."""
        return self._received(), self._buffers

    @property
    def sent(self) -> dict[str, Tensor]:
        """What clients are sent beside the parameters: the state of the method's server half."""
        return self._method_state

    def state_dict(self) -> dict[str, Any]:
        """Everything that a round changes, copied: JSON types, and `tensors` by name."""
        tensors, meta = self._snapshot()
        return {**meta, "tensors": {name: value.clone() for name, value in tensors.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state_dict of a server of the same make; anything else changes nothing."""
        self._require_same_make(saved)
        tensors = saved["tensors"]
        for name, view in self._tensors().items():
            view.copy_(tensors[name])
        method: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("method/"):
                _, key, tensor = name.split("/", 2)
                method.setdefault(key, {})[tensor] = value
        self._method_state = {key: self.layout.pack(parts) for key, parts in method.items()}
        self.round = saved["round"]
        self._adapter_state = {k: np.array(v) for k, v in saved["adapter"]["state"].items()}
        self._gate = Gate(self.guard, **saved["gate"])
        self._weighting_state = {k: list(v) for k, v in saved["weighting"]["state"].items()}

    def door(self, kind: type[Door], total: Sum) -> Door:
        """What a round's updates come in through; they are added to `total`."""
        return kind(
            self._plan,
            self._received(),
            self._gate,
            0.0 if self._gate.usual_norm else self._norm(),
            total,
            self._weighting_state,
        )

    def _received(self) -> Tensor:
        """θ as clients have it: rounded to each parameter's own dtype."""
        if self.layout.exact:
            return self._theta
        return self.layout.pack(self.params)

    def _norm(self) -> float:
        return math.sqrt(float(norms_sq(self.layout, self._theta).sum()))

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state as a named live view, the method's apart."""
        flats = {"params": self._theta, **{f"slots/{n}": slot for n, slot in self._slots.items()}}
        if self._direction is not None:
            flats["direction"] = self._direction
        views = {
            f"{part}/{name}": view
            for part, flat in flats.items()
            for name, view in self.layout.views(flat).items()
        }
        return {**views, **{f"buffers/{name}": value for name, value in self._buffers.items()}}

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        method = {
            f"method/{key}/{name}": view
            for key, flat in self._method_state.items()
            for name, view in self.layout.views(flat).items()
        }
        adapter = {name: values.tolist() for name, values in self._adapter_state.items()}
        meta: dict[str, Any] = {
            "version": checkpoint.VERSION,
            "layout": self.layout.describe(),
            "round": self.round,
            "min_clients": self.min_clients,
            "guard": self.guard and asdict(self.guard),
            "gate": {"norms": [*self._gate.norms], "weights": [*self._gate.weights]},
            **{
                role: {
                    "class": type(getattr(self, role)).__name__,
                    "settings": checkpoint.settings(getattr(self, role), registry),
                }
                for role, registry in REGISTRIES.items()
            },
        }
        meta["adapter"] |= {"groups": list(self._groups.labels), "state": adapter}
        meta["weighting"] |= {"state": self._weighting_state}
        return {**self._tensors(), **method}, meta

    def _require_same_make(self, saved: Mapping[str, Any]) -> None:
        if saved.get("version") != checkpoint.VERSION:
            raise checkpoint.CheckpointError(
                f"the state has version {saved.get('version')!r}, this fedglad reads "
                f"{checkpoint.VERSION}"
            )
        for key in ("layout", "tensors", "round", "gate", "optimizer", "adapter", "weighting"):
            if key not in saved:
                raise checkpoint.CheckpointError(f"the state has no {key!r}")
        checkpoint.require_same_layout(saved["layout"], self.layout.describe())
        for role in ("optimizer", "adapter", "weighting"):
            theirs, ours = saved[role]["class"], type(getattr(self, role)).__name__
            if theirs != ours:
                raise checkpoint.CheckpointError(
                    f"the state was saved with {role} {theirs}, this server has {ours}"
                )
        if tuple(saved["adapter"]["groups"]) != self._groups.labels:
            raise checkpoint.CheckpointError(
                f"the state was saved with other groups: {saved['adapter']['groups'][:3]} ... "
                f"where this server has {list(self._groups.labels[:3])} ..."
            )
        own = self._tensors()
        for key in {n.split("/", 2)[1] for n in saved["tensors"] if n.startswith("method/")}:
            views = self.layout.views(self._theta)
            own |= {f"method/{key}/{name}": view for name, view in views.items()}
        checkpoint.require_same_tensors(saved["tensors"], own)
        theirs = {name: len(values) for name, values in saved["adapter"]["state"].items()}
        ours = {name: len(values) for name, values in self._adapter_state.items()}
        if theirs != ours:
            raise checkpoint.CheckpointError(f"the adapter's state is {theirs}, not {ours}")
        if self.method is None and any(name.startswith("method/") for name in saved["tensors"]):
            raise checkpoint.CheckpointError(
                "the state has a client method's vectors: give this server its method="
            )
