"""What every federation does in a round, whoever carries the models to the clients and back."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fedglad.clients.method import Plain
from fedglad.core import checkpoint
from fedglad.core.guard import Guard
from fedglad.core.layout import as_tensor
from fedglad.core.memory import Memories
from fedglad.estimators import Estimator
from fedglad.records import Bundle, Failure, Record, Several, Update
from fedglad.rng import stream
from fedglad.samplers.base import Ask, Cohort, Pool, Sampler, State
from fedglad.server import Collector
from fedglad.server.compatibility import refuse_estimator
from fedglad.server.server import Server
from fedglad.server.totals import Block
from fedglad.transforms import Transform
from fedglad.trust import Alarm

Arrival = Update | Failure | Several | Bundle | Block
"""What comes back of one client, of several at once, or their sums; valid until the next is asked
for."""

Norms = Callable[[Update | Failure], list[float] | None]
"""The squared norms that a client reports with its update, one a tensor."""


def guard_of(guard: Guard | None, sampler: Sampler) -> Guard | None:
    """A run's guard: weights that are part of a sampler are no client's claims."""
    return replace(guard, weight=math.inf) if guard and sampler.own_weights else guard


class Driver:
    """A run in progress: the server, and the states of sampler, alarm and clients.

    A subclass adds the transport. It asks for a cohort with `draw`, gives the cohort's updates to
    `step`, and counts `t` up when the round is over. What it must save of itself it puts into
    `transport_state`.

    | attribute | meaning |
    |---|---|
    | `t` | rounds that are done |
    | `memories` | what clients remember, for a client method that has them |
    | `updates` | each client's last accepted update, for a sampler that keeps them |
    | `estimates` | what the server's estimator keeps, if it has one |
    | `unsent` | what clients have not sent yet, for a transform with error feedback |
    | `arithmetic` | which order of the model's sums gives the run's bits; 1: always the same |
    """

    arithmetic = 1

    def __init__(
        self,
        server: Server,
        sampler: Sampler,
        seed: int,
        *,
        client: Plain | None = None,
        transform: Transform | None = None,
        memories: Path | None = None,
    ) -> None:
        """`memories` is the folder for what is kept of clients, by default a temporary one."""
        self.server, self.sampler, self.seed = server, sampler, seed
        self.client = client or Plain()
        if isinstance(server.estimator, Estimator):
            rules = server.estimator, server.filter, server.weighting
            refuse_estimator(*rules, client=self.client, sampler=sampler)
        self.memories = Memories(memories) if self.client.keeps else None
        self.updates = None
        if sampler.keeps_updates:
            self.updates = Memories(memories and memories / "updates")
        self.estimates = None
        if isinstance(server.estimator, Estimator):
            self.estimates = Memories(memories and memories / "estimator")
            server.keep_updates_in(self.estimates, 0)
        self.transform, self.unsent = transform, None
        if transform and transform.keeps:
            self.unsent = Memories(memories and memories / "transform")
        stores = (self.memories, self.updates, self.estimates, self.unsent)
        self.stores = [store for store in stores if store]
        self.t = 0
        self._importance: dict[int, float] | None = None
        self.sampler_state: State = {}
        self.alarm_state: State = {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves beside the server's state and the stores, as JSON types."""
        return {
            **({"arithmetic": self.arithmetic} if self.arithmetic != 1 else {}),
            "round": self.t,
            "sampler": self.sampler_state,
            "alarm": self.alarm_state,
            "transport": self.transport_state(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes back to a state, unless it cannot be one: then nothing is changed.

        The server and the stores are restored by whoever read it.
        """
        sampler, alarm = self.sampler.restored(dict(saved["sampler"])), dict(saved["alarm"])
        if alarm:
            checkpoint.whole_number(alarm["seen"])
            if checkpoint.finite(alarm["mean"]) < 0:
                raise ValueError(f"the alarm's mean is {alarm['mean']}")
        self.restore_transport(saved["transport"])
        self.t, self.sampler_state, self.alarm_state = saved["round"], sampler, alarm

    def transport_state(self) -> dict[str, Any]:
        """What a transport must know again, as JSON types."""
        return {}

    def restore_transport(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `transport_state` gave."""

    def draw(self, pool: Pool, ask: Ask, attempt: int = 0) -> Cohort:
        """The cohort of round t; another one for every attempt."""
        seed = self.sampler.seed
        seed = seed if isinstance(seed, int) else self.seed if seed == "run" else 0
        rng = stream(seed, "cohort", self.t, *([attempt] if attempt else []))
        cohort = self.sampler.sample(rng, self.t, self.sampler_state, pool, ask)
        self._importance = self.sampler.importance(cohort, pool) if self.estimates else None
        return cohort

    def step(
        self,
        cohort: tuple[int, ...],
        updates: Iterable[Arrival],
        *,
        population: int,
        norms: Norms | None = None,
    ) -> tuple[Record, str | None]:
        """Round t by the cohort's updates: what the server has done, and the alarm's flag.

        With `norms` the server sees only sums, of updates and of the norms that clients report.
        If the updates' iterator raises, nothing has changed.
        """
        updates = self._transformed(updates) if self.transform else updates
        updates = self._kept(updates) if self.updates else updates
        if norms is None:
            if self.estimates:
                self.server.keep_updates_in(self.estimates, self.t)
            record = self.server.step(
                updates,
                population=population,
                importance=self._importance,
                cohort=len(cohort),
                noise=stream(self.seed, "privacy", self.t) if self.server.privacy else None,
            )
        else:
            collector = Collector(self.server)
            for update in cast(Iterable[Update | Failure], updates):
                collector.take(update, norms(update))
                del update  # before the next comes in
            record = self.server.step_sums(
                collector.sums(), population=population, clients=collector.entries
            )
        return self.observed(cohort, record)

    def observed(self, cohort: tuple[int, ...], record: Record) -> tuple[Record, str | None]:
        """The record and the alarm's flag, once all that has a memory has seen it."""
        self._settle(cohort, record)
        self.sampler_state = self.sampler.observe(self.sampler_state, record)
        gsi = record.gsi_all if record.stepped else None
        flag, self.alarm_state = Alarm().judge(gsi, self.alarm_state)
        return record, flag

    def last(self, client: int) -> Tensor | None:
        """The client's last accepted update, for a sampler that keeps them."""
        assert self.updates
        return self.updates.read(client, self.updates.version(client)).get("update")

    def close(self) -> None:
        """Removes what was kept for this run alone."""
        for store in self.stores:
            store.close()

    def _transformed(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The updates as the server receives them."""
        for arrival in arrivals:
            if isinstance(arrival, Bundle):
                pairs = zip(arrival.clients, arrival.deltas, strict=True)
                rows = [self._received(client, delta) for client, delta in pairs]
                yield replace(arrival, deltas=torch.stack(rows))
            elif isinstance(arrival, list):
                yield Several(map(self._through, arrival))
            elif isinstance(arrival, Block):
                raise TypeError("a transform needs single updates, not their sums")
            else:
                yield self._through(arrival)
            del arrival

    def _through(self, update: Update | Failure) -> Update | Failure:
        """One update as the server receives it; of a wrong form, as it is: it will be rejected."""
        delta = self._packed(update) if isinstance(update, Update) else None
        if delta is None or delta.shape != (self.server.layout.size,):
            return update
        assert isinstance(update, Update)
        named = update.model or {}
        buffers = {name: named[name] for name in self.server.layout.buffers if name in named}
        delta = self._received(update.client, delta)
        return replace(update, delta=delta, model=None, buffers=update.buffers or buffers or None)

    def _received(self, client: Any, delta: Tensor) -> Tensor:
        """What the server receives of a client's packed update."""
        assert self.transform
        kept = None
        if self.unsent:
            kept = self.unsent.read(client, self.unsent.version(client)).get("unsent")
        rng = stream(self.seed, "transform", self.t, client)
        sent, left = self.transform.apply(delta, self.server.layout, rng, kept)
        if self.unsent and left is not None:
            self.unsent.propose(client, self.t, {"unsent": left})
        return sent

    def _kept(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The updates, each noted for a sampler that will ask for the last of a client."""
        assert self.updates
        for arrival in arrivals:
            several = arrival.updates() if isinstance(arrival, Bundle) else arrival
            for update in several if isinstance(several, list) else [several]:
                if isinstance(update, Update) and (delta := self._packed(update)) is not None:
                    self.updates.propose(cast(int, update.client), self.t, {"update": delta})
            update = several = None  # memory is let go before the next comes in
            yield arrival
            del arrival

    def _packed(self, update: Update) -> Tensor | None:
        """θ − θ_k as one vector; None for an update of another form, which the server rejects."""
        if isinstance(update.delta, Tensor):
            return update.delta
        layout, arrays = self.server.layout, update.delta or update.model or {}
        try:
            vector = layout.pack({name: as_tensor(arrays[name]) for name in layout.names})
        except (KeyError, ValueError, TypeError, RuntimeError):
            return None
        return self.server.packed[0] - vector if update.delta is None else vector

    def _settle(self, cohort: tuple[int, ...], record: Record) -> None:
        """What a client would remember counts only if its update was accepted."""
        stepped = record.clients if record.stepped else []
        accepted = [client["id"] for client in stepped if "rejected" not in client]
        cut = {client["id"]: client["clipped"] for client in stepped if "clipped" in client}
        for store in filter(None, (self.memories, self.unsent)):
            for client in (client for client in accepted if client in cut):
                self._shorten(store, client, cut[client])
        if self.memories and self.client.settles:
            for client in accepted:
                proposed = self.memories.proposed(client, self.t)
                whole = self.client.settle(proposed, self.server.sent)
                self.memories.propose(client, self.t, whole)
        for store in (self.memories, self.updates, self.unsent):
            if store:
                store.settle(self.t, cohort, accepted)

    def _shorten(self, store: Memories, client: int, kept: float) -> None:
        """Of an update that was cut, a client remembers as much as the server took of it.

        What is its own business, such as personal parameters, it keeps whole.
        """
        new = store.proposed(client, self.t)
        if not (cut := [name for name in new if not self.client.keeps_whole(name)]):
            return
        old = store.read(client, store.version(client))
        parts = {name: old.get(name, torch.zeros_like(new[name])) for name in cut}
        between = {name: part.lerp(new[name], kept) for name, part in parts.items()}
        store.propose(client, self.t, {**new, **between})
