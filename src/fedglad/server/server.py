"""Server: composition only. One round is validate ▸ filter ▸ aggregate ▸ method ▸ adapt ▸ step."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from fedglad.adapters import AdapterState, Factors
from fedglad.core import checkpoint
from fedglad.core.aggregate import norms_sq, products
from fedglad.core.layout import stretches
from fedglad.core.validate import Guard, as_number
from fedglad.records import Record, Statistics, Update
from fedglad.server.from_sums import Sums, SumsDoor, Totals, mean_loss, require_sums
from fedglad.server.intake import Intake, Skipped, Taken
from fedglad.server.state import REGISTRIES, ServerState
from fedglad.server.state import Method as Method


class Server(ServerState):
    """Holds the global model and moves it by the clients' updates, round by round.

    >>> import torch
    >>> server = Server(torch.nn.Linear(2, 1))
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

    def __repr__(self) -> str:
        parts = f"{self.optimizer}, {self.adapter}, {self.filter}, {self.weighting}"
        return f"Server({len(self.layout.names)} tensors, round {self.round}, {parts})"

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
        intake = self.door(Intake, self._total)
        try:
            taken = self._stretched(intake.take(updates), intake)
            totals = Totals.of(taken)
            stats = self._statistics(totals, population)
            method_state, shift = self._call_method(taken, intake)
            factors, adapter_state = self._adapt(stats)
        except Skipped as reason:
            return Record("skipped", str(reason), intake.entries)

        self._move(totals, factors, shift)
        self._buffers.update(intake.buffers.mean())
        self._gate = intake.gate.next()
        self._weighting_state = intake.weighting_state
        self._method_state = method_state
        self._adapter_state = adapter_state
        self.round += 1
        entries = [member.entry for member in intake.members]
        known = [(e["weight"], e["loss"]) for e in entries if e["loss"] is not None]
        record = self._record(intake.entries, stats, factors, mean_loss(known))
        if taken.gsi_unfiltered is not None:
            record = replace(record, gsi_unfiltered=taken.gsi_unfiltered)
        return replace(record, distances=taken.distances)

    def step_sums(
        self,
        sums: Sums,
        *,
        population: int | None = None,
        clients: list[dict[str, Any]] | None = None,
    ) -> Record:
        """One round from sums alone: the factors and the step of `step`, and no update seen.

        `clients` is what is known of them, for the record: `Collector.entries`. The round is
        skipped if the sums are not finite, hold too few updates, break the guard, or cannot be
        those of any updates, because somebody's report is a lie: W·Σw‖g‖² < ‖Σwg‖². The guard
        compares the root of the mean of ‖g‖² and the mean weight with those of past rounds.
        Raises if a part of the server needs the updates themselves.
        """
        require_sums(self)
        entries = [] if clients is None else clients
        door = SumsDoor.of(self, self._total)
        try:
            totals, buffers = door.take_sums(sums)
            stats = self._statistics(totals, population)
            factors, adapter_state = self._adapt(stats)
        except Skipped as reason:
            rejected = [entry["rejected"] for entry in entries if "rejected" in entry]
            why = f"; the first rejected: {rejected[0]}" if rejected else ""
            return Record("skipped", f"{reason}{why}", entries)

        self._move(totals, factors, None)
        self._buffers.update(buffers)
        self._gate = door.gate.next()
        self._adapter_state = adapter_state
        self.round += 1
        return self._record(entries, stats, factors, as_number(sums.loss))

    def _statistics(self, totals: Totals, population: int | None) -> Statistics:
        if not np.isfinite(totals.mean_sq).all():
            raise Skipped("the mean of the updates is not finite")

        def named(values: np.ndarray) -> dict[str, float]:
            return dict(zip(self.layout.names, values.tolist(), strict=True))

        direction = None
        if self._direction is not None:
            direction = named(products(self.layout, totals.mean, self._direction))
        return Statistics(
            sum_sq=named(totals.sum_sq),
            sum_sq2=named(totals.sum_sq2),
            mean_sq=named(totals.mean_sq),
            weights=totals.weights,
            N=population,
            direction=direction,
            model_sq=named(norms_sq(self.layout, self._theta))
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

    def _adapt(self, stats: Statistics) -> tuple[Factors, AdapterState]:
        factors, state = self.adapter.adapt(stats, self._groups, self._adapter_state, self.round)
        if not np.isfinite(factors.scale).all():
            raise Skipped(f"{self.adapter} gave a factor that is not finite")
        return factors, state

    def _move(self, totals: Totals, factors: Factors, shift: Tensor | None) -> None:
        """The optimizer's step, block by block in the cache."""
        if self._direction is not None and self.adapter.direction is not None:
            self._direction.lerp_(totals.mean, 1 - self.adapter.direction)
        scale = factors.scale[self._groups.index].tolist()
        for block in self.layout.blocks:
            for span, s in stretches(block, scale):
                slots = {name: slot[span] for name, slot in self._slots.items()}
                self.optimizer.step(self._theta[span], totals.mean[span], s, slots, self.round)
            if factors.shrink is not None:
                shrink = factors.shrink[self._groups.index]
                shrink = np.where(totals.moved, shrink, 1.0).tolist()  # a frozen tensor stays
                for span, s in stretches(block, shrink):
                    self._theta[span].mul_(s)
        if shift is not None:
            self._theta += shift

    def _record(
        self,
        entries: list[dict[str, Any]],
        stats: Statistics,
        factors: Factors,
        train_loss: float | None,
    ) -> Record:
        labels, gsi_all = self._groups.labels, stats.gsi_all
        return Record(
            "stepped",
            clients=entries,
            gsi=dict(zip(labels, factors.gsi.tolist(), strict=True)),
            baseline={n: b for n, b in zip(labels, factors.baseline.tolist(), strict=True) if b},
            scale=dict(zip(labels, factors.scale.tolist(), strict=True)),
            gsi_all=gsi_all,
            gsi_unfiltered=gsi_all,
            train_loss=train_loss,
            statistics=stats,
        )

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
