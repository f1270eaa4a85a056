"""Server: composition only. One round is validate ▸ filter ▸ aggregate ▸ method ▸ adapt ▸ step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from os import PathLike
from typing import Any, Protocol, Self

import numpy as np
from torch import Tensor, nn

from fedglad import adapters, checkpoint, filters, optimizers, weights
from fedglad.adapters import Adapter, Factors
from fedglad.aggregate import Sum, norms_sq, products
from fedglad.cohort import Intake, Plan, Skipped, Taken
from fedglad.combine import refuse
from fedglad.filters import Filter
from fedglad.layout import rounded, split, stretches
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import Record, Statistics, Update
from fedglad.validate import Gate, Guard
from fedglad.weights import Samples, State

REGISTRIES: dict[str, dict[str, type]] = {
    "optimizer": optimizers.REGISTRY,
    "adapter": adapters.REGISTRY,
    "filter": filters.REGISTRY,
    "weighting": weights.REGISTRY,
}


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


class Server:
    """Holds the global model and moves it by the clients' updates, round by round.

    >>> import torch
    >>> server = Server(torch.nn.Linear(2, 1), optimizer=SGD(lr=1.0), adapter=Adapter())
    >>> g = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    >>> server.step([g, g]).gsi
    {'weight': 1.0, 'bias': 1.0}

    | argument | meaning |
    |---|---|
    | `model` | a module, or a state_dict (torch or numpy); it is copied, never changed |
    | `optimizer` | `SGD(lr=1.0)`, that is FedAvg, unless given |
    | `adapter`, `filter`, `weighting` | none, none, and by the updates' own weights |
    | `method` | the server's half of a client method |
    | `buffers` | names that are buffers, where they cannot be known from a plain dict |
    | `min_clients` | with fewer accepted updates the round is skipped |
    | `guard` | rejects what is out of all proportion; None to switch it off |
    | `distances` | measures each update's distance from their mean; keeps all of them for it |

    `params` and `state` are views of the server's memory where the dtype allows: a step changes
    them, and writing into them changes the model. Clone what must not change.
    """

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

    def __repr__(self) -> str:
        parts = f"{self.optimizer}, {self.adapter}, {self.filter}, {self.weighting}"
        return f"Server({len(self.layout.names)} tensors, round {self.round}, {parts})"

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

    def step(self, updates: Iterable[Any], *, population: int | None = None) -> Record:
        """One round: consumes the updates in their order and moves the model.

        Each is an `Update` or a plain {name: θ − θ_k}. `population` is the number of clients there
        are, for adapters that use it. Whatever is wrong with an update is in the record; if the
        updates' iterator raises, nothing has changed.
        """
        if isinstance(updates, Update | Mapping | Tensor):
            raise TypeError(
                f"step takes an iterable of updates, got one {type(updates).__name__}: "
                "put it in a list"
            )
        intake = Intake(
            self._plan,
            self._received(),
            self._gate,
            0.0 if self._gate.usual_norm else self._norm(),
            self._total,
            self._weighting_state,
        )
        try:
            taken = self._stretched(intake.take(updates), intake)
            stats = self._statistics(taken, population)
            method_state, shift = self._call_method(taken, intake)
            factors, adapter_state = self.adapter.adapt(
                stats, self._groups, self._adapter_state, self.round
            )
            if not np.isfinite(factors.scale).all():
                raise Skipped(f"{self.adapter} gave a factor that is not finite")
        except Skipped as reason:
            return Record("skipped", str(reason), intake.entries)

        self._move(taken, factors, shift)
        self._buffers.update(intake.buffers.mean())
        self._gate = intake.gate.next()
        self._weighting_state = intake.weighting_state
        self._method_state = method_state
        self._adapter_state = adapter_state
        self.round += 1
        return self._record(intake, taken, stats, factors)

    def _received(self) -> Tensor:
        """θ as clients have it: rounded to each parameter's own dtype."""
        if self.layout.exact:
            return self._theta
        return self.layout.pack(self.params)

    def _norm(self) -> float:
        return math.sqrt(float(norms_sq(self.layout, self._theta).sum()))

    def _statistics(self, taken: Taken, population: int | None) -> Statistics:
        names, shares = self.layout.names, taken.shares[:, None]
        if not np.isfinite(taken.mean_sq).all():
            raise Skipped("the mean of the updates is not finite")
        direction = None
        if self._direction is not None:
            found = products(self.layout, taken.mean, self._direction)
            direction = dict(zip(names, found.tolist(), strict=True))
        return Statistics(
            sum_sq=dict(zip(names, (shares * taken.sq).sum(axis=0).tolist(), strict=True)),
            sum_sq2=dict(zip(names, (shares**2 * taken.sq).sum(axis=0).tolist(), strict=True)),
            mean_sq=dict(zip(names, taken.mean_sq.tolist(), strict=True)),
            weights=tuple(taken.shares.tolist()),
            N=population,
            direction=direction,
            model_sq=dict(zip(names, norms_sq(self.layout, self._theta).tolist(), strict=True))
            if self.adapter.needs_model
            else None,
        )

    def _stretched(self, taken: Taken, intake: Intake) -> Taken:
        """Normalised updates, back at the length of the mean client's: times τ = Σ w a."""
        if (lengths := getattr(self.method, "lengths", None)) is None:
            return taken
        if None in (steps := [member.steps for member in intake.members]):
            raise Skipped("the method needs Update(steps=...), and there is one without")
        tau = float((taken.shares * lengths(steps)).sum())
        return replace(
            taken, mean=taken.mean.mul_(tau), sq=taken.sq * tau**2, mean_sq=taken.mean_sq * tau**2
        )

    def _call_method(self, taken: Taken, intake: Intake) -> tuple[dict[str, Tensor], Tensor | None]:
        if self.method is None or intake.extra is None:
            return self._method_state, None
        return self.method(taken.mean, intake.extra.flat, len(intake.members), self._method_state)

    def _move(self, taken: Taken, factors: Factors, shift: Tensor | None) -> None:
        """The optimizer's step, block by block in the cache."""
        if self._direction is not None and self.adapter.direction is not None:
            self._direction.lerp_(taken.mean, 1 - self.adapter.direction)
        scale = factors.scale[self._groups.index].tolist()
        for block in self.layout.blocks:
            for span, s in stretches(block, scale):
                slots = {name: slot[span] for name, slot in self._slots.items()}
                self.optimizer.step(self._theta[span], taken.mean[span], s, slots, self.round)
            if factors.shrink is not None:
                moved = taken.sq.any(axis=0)  # a frozen tensor stays as it is
                shrink = np.where(moved, factors.shrink[self._groups.index], 1.0).tolist()
                for span, s in stretches(block, shrink):
                    self._theta[span].mul_(s)
        if shift is not None:
            self._theta += shift

    def _record(self, intake: Intake, taken: Taken, stats: Statistics, factors: Factors) -> Record:
        labels, gsi_all = self._groups.labels, stats.gsi_all
        known = [(m.entry["weight"], m.entry["loss"]) for m in intake.members]
        known = [(weight, loss) for weight, loss in known if loss is not None]
        total = math.fsum(weight for weight, _ in known)
        return Record(
            "stepped",
            clients=intake.entries,
            gsi=dict(zip(labels, factors.gsi.tolist(), strict=True)),
            baseline={n: b for n, b in zip(labels, factors.baseline.tolist(), strict=True) if b},
            scale=dict(zip(labels, factors.scale.tolist(), strict=True)),
            gsi_all=gsi_all,
            gsi_unfiltered=gsi_all if taken.gsi_unfiltered is None else taken.gsi_unfiltered,
            train_loss=math.fsum(w * loss for w, loss in known) / total if known else None,
            statistics=stats,
            distances=taken.distances,
        )

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

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the state and the settings to one file, atomically."""
        checkpoint.write(path, *self._snapshot())

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: nn.Module | Mapping[str, Any], **own: Any
    ) -> Self:
        """The saved server, for a model of the same layout.

        Settings come from the file. What a file cannot hold (your own classes, a function for
        `groups`, a `method`) is given again: `Server.load(path, model, adapter=MyRule())`.
        """
        tensors, meta = checkpoint.read(path)
        for role, registry in REGISTRIES.items():
            if role not in own:
                found = meta[role]["settings"]
                if found is None:
                    raise checkpoint.CheckpointError(
                        f"{path} was saved with an own {role} ({meta[role]['class']}): "
                        f"pass it again, Server.load(path, model, {role}=...)"
                    )
                own[role] = checkpoint.build(found, registry)
        own.setdefault("min_clients", meta["min_clients"])
        own.setdefault("guard", meta["guard"] and Guard(**meta["guard"]))
        names = [name for name, *_, kind in meta["layout"] if kind == "buffer"]
        known: dict[str, Any] = {"buffers": names, **own}
        try:
            server = cls(model, **known)
        except ValueError:  # of another model: it will be told apart tensor by tensor
            server = cls(model, **own)
        server.load_state_dict({**meta, "tensors": tensors})
        return server

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
