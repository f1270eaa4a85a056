"""What an estimator remembers: in memory its state and who was seen, on disk the last updates.

A round's updates are written to the disk as they come in, as proposals; the estimator reads them
one by one when it is known which are accepted, and they replace the memory only if the round steps.
"""

import json
import math
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedglad.core import checkpoint
from fedglad.core.aggregate import packed_blocks
from fedglad.core.guard import Rejected
from fedglad.core.layout import Layout
from fedglad.core.memory import SHELF, Memories
from fedglad.core.validate import Opened
from fedglad.core.vectors import STRETCH, Reader, together
from fedglad.estimators import Client, Estimator, Part, State, Taken
from fedglad.filters import Filter

FIRST = SHELF
"""The store's number of client 0; those below are the estimator's."""

KEPT = "estimator/kept/"

NAME = "update"
"""Of the vector in a file."""

TOGETHER = 8
"""Updates that are read at a time, each with its client's last one."""


_OTHER = "the update kept for {} is not one of this model"


class Estimated:
    """An estimator's memory.

    | attribute | meaning |
    |---|---|
    | `state` | its state |
    | `seen` | of each client seen, where its last update is in the store, and a_k of then |
    | `t` | the number of the next round in the store |
    | `apart` | whether the store is saved by somebody else: the run that drives the server |
    """

    def __init__(
        self, estimator: Estimator, layout: Layout, store: Memories | None = None, t: int = 0
    ) -> None:
        self.estimator, self.layout, self.t = estimator, layout, t
        self.state: State = {}
        self.seen: dict[Client, tuple[int, float]] = {}
        self.apart = store is not None
        self._store = store

    @property
    def store(self) -> Memories:
        """Where the updates lie: a temporary folder, unless a run has given its own."""
        if self._store is None:
            self._store = Memories()
            weakref.finalize(self, self._store.close)
        return self._store

    def keep_in(self, store: Memories, t: int) -> None:
        """Keeps updates there from round t on; whoever gives it saves it."""
        self._store, self.apart, self.t = store, True, t

    def __deepcopy__(self, memo: Any) -> "Estimated":
        return self.restored(self.tensors(), self.described())  # two cannot share a folder

    def last(self, place: int, whose: str) -> Tensor:
        """What was kept at a place of the store."""
        self._require_kept(place, whose)
        kept = self.store.read(place, self.store.version(place))
        vector = kept.get(NAME, torch.empty(0)).to(self.layout.device)
        if vector.shape != (self.layout.size,) or vector.dtype != self.layout.dtype:
            raise OSError(_OTHER.format(whose))
        return vector

    def open_last(self, place: int, whose: str) -> Reader:
        """The same, to be read stretch by stretch."""
        self._require_kept(place, whose)
        return self._opened(self.store.opened(place, self.store.version(place)), whose)

    def open_proposed(self, place: int, whose: str) -> Reader:
        """This round's update at a place of the store, to be read stretch by stretch."""
        return self._opened(self.store.opened_proposal(place, self.t), whose)

    def _require_kept(self, place: int, whose: str) -> None:
        if not self.store.version(place):
            raise OSError(
                f"the update kept for {whose} is not here: a run keeps them in its own folder, "
                "beside its checkpoints, and only the run can go on with them"
            )

    def _opened(self, reader: Reader, whose: str) -> Reader:
        there = reader.name, reader.shape, reader.dtype
        if there != (NAME, (self.layout.size,), self.layout.dtype):
            reader.close()
            raise OSError(_OTHER.format(whose))
        return reader

    def tensors(self) -> dict[str, Tensor]:
        """All that is saved with the server; the kept updates, unless that is done apart."""
        places, weights = zip(*self.seen.values(), strict=True) if self.seen else ((), ())
        names = json.dumps([*self.seen]).encode()
        made = {f"estimator/state/{name}": value for name, value in self.state.items()}
        made["estimator/clients"] = torch.from_numpy(np.frombuffer(names, np.uint8).copy())
        made["estimator/places"] = torch.tensor(places, dtype=torch.int64)
        made["estimator/weights"] = torch.tensor(weights, dtype=torch.float64)
        if not self.apart and self._store:
            for client in (client for some in self.store.needed().values() for client in some):
                made[f"{KEPT}{client}"] = self.last(client, "the estimator")
        return made

    def described(self) -> dict[str, Any]:
        """What is to be known of the saved tensors, as JSON types."""
        return {"apart": self.apart, "state": sorted(self.state)}

    def restored(self, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> "Estimated":
        """One with the state that `tensors` and `described` gave; raises for what cannot be such.

        If the updates were saved apart, they are not among the tensors.
        """
        made = Estimated(self.estimator, self.layout, self._store if self.apart else None, self.t)
        part = "estimator/state/"
        found = {n.removeprefix(part): x for n, x in tensors.items() if n.startswith(part)}
        if sorted(found) != described["state"]:
            raise ValueError(f"it remembers {sorted(found)}, not {described['state']}")
        made.state = self.estimator.restored({n: x.clone() for n, x in found.items()}, self.layout)
        made.seen = _seen(tensors)
        kept = {n.removeprefix(KEPT): x for n, x in tensors.items() if n.startswith(KEPT)}
        if self.apart:
            return made
        places = {place for place, _ in made.seen.values()}
        if not described["apart"] and (lost := places - {int(place) for place in kept}):
            raise ValueError(f"the update kept at {min(lost)} is missing")
        for place, vector in kept.items():
            if vector.shape != (self.layout.size,) or vector.dtype != self.layout.dtype:
                raise ValueError(f"the update kept at {place} is not one of this model")
            if not bool(vector.isfinite().all()):
                raise ValueError(f"the update kept at {place} is not finite")
            made.store.propose(checkpoint.whole_number(int(place)), 0, {NAME: vector})
        if kept:
            made.store.settle(0, [*map(int, kept)], [*map(int, kept)])
        made.t = 1
        return made


def _seen(tensors: Mapping[str, Tensor]) -> dict[Client, tuple[int, float]]:
    """Who was seen, as a file has it."""
    names: Any = json.loads(tensors["estimator/clients"].numpy().tobytes())
    places, weights = tensors["estimator/places"].tolist(), tensors["estimator/weights"].tolist()
    if not isinstance(names, list):
        raise TypeError("the clients that were seen are not a list")
    clients = cast(list[Any], names)
    if any(not isinstance(name, int | str) or isinstance(name, bool) for name in clients):
        raise TypeError("the clients that were seen are not all numbers or names")
    if not len({*clients}) == len({*places}) == len(clients) == len(weights):
        raise ValueError("the clients that were seen, and where their updates are, do not agree")
    for place, weight in zip(places, weights, strict=True):
        if checkpoint.whole_number(place) < FIRST or checkpoint.finite(weight) <= 0:
            raise ValueError(f"a client's update at {place}, of weight {weight}, cannot be")
    return dict(zip(clients, zip(places, weights, strict=True), strict=True))


class Taking:
    """One round: what takes in its updates, and what the estimator sees of them.

    It is the `estimators.Updates` of the round once `estimate` is called. Nothing is changed before
    `commit`; `drop` forgets what was not committed.
    """

    def __init__(
        self,
        memory: Estimated,
        population: int | None,
        importance: Mapping[Any, float] | None = None,
    ) -> None:
        estimator, name = memory.estimator, type(memory.estimator).__name__
        if estimator.needs_population and population is None:
            raise ValueError(
                f"{name} estimates the mean of all clients, and must know how many there are: "
                "server.step(updates, population=N)"
            )
        if population is not None and population < len(memory.seen):
            raise ValueError(
                f"population={population}: {len(memory.seen)} clients have taken part already"
            )
        self.layout, self.population = memory.layout, population
        self._memory, self._importance = memory, importance
        self._new = 0  # clients that were not seen before
        self._proposed: list[int] = []
        self._own: set[int] = set()
        self._taken: list[tuple[Opened, float]] = []
        self._state: State = {}
        self._workers = torch.get_num_threads()

    def require(self, client: Client) -> None:
        """Raises Rejected for a client whose update could not be remembered."""
        name = type(self._memory.estimator).__name__
        if self._memory.estimator.needs_client and client is None:
            raise Rejected(f"{name} needs Update(client=...)")
        if isinstance(client, int) and abs(client) >= 2**63:
            raise Rejected("the client's id is a number of more than 64 bits")
        if self._importance is not None and not self._weight(client):
            raise Rejected(f"{name} needs the client's importance, and it has none")

    def see(self, updates: Sequence[Opened], base: Tensor) -> None:
        """Writes updates to the model `base` down, each at the place it has if all are accepted."""
        for update in updates:
            update.place = self._place(update.entry["id"])
            self._proposed.append(update.place)
            shape, dtype = (self.layout.size,), self.layout.dtype
            blocks = packed_blocks(self.layout, update, base)
            store, t = self._memory.store, self._memory.t
            store.propose_blocks(update.place, t, NAME, shape, dtype, blocks)

    def _place(self, client: Client) -> int:
        memory = self._memory
        if not memory.estimator.remembers_clients:
            return FIRST + len(self._proposed)
        if client in memory.seen:
            return memory.seen[client][0]
        self._new += 1
        update_bytes = self.layout.size * self.layout.dtype.itemsize
        versions = memory.store.versions
        memory.estimator.require_room(len(memory.seen) + self._new, update_bytes, versions=versions)
        return FIRST + len(memory.seen) + self._new - 1

    def estimate(self, mean: Tensor, accepted: Sequence[Opened], filter: Filter) -> Tensor:
        """ĝ; raises ArithmeticError if it is not finite."""
        self._taken = [(update, update.clip * filter.scale(update.norm)) for update in accepted]
        estimator, state = self._memory.estimator, self._memory.state
        made, self._state = estimator.estimate(mean, self, state)
        if made.shape != mean.shape or made.dtype != mean.dtype:
            raise ValueError(
                f"{estimator} gave a vector of {tuple(made.shape)} {made.dtype}, where the mean "
                f"has {tuple(mean.shape)} {mean.dtype}"
            )
        if not all(bool(part.isfinite().all()) for part in made.split(STRETCH)):
            raise ArithmeticError(f"{estimator} gave an estimate that is not finite")
        return made

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[Taken]:
        for update, kept in self._taken:
            client = update.entry["id"]
            yield Taken(
                client=int(client) if isinstance(client, int) else client,  # True is 1 in a file
                share=update.entry["weight"],
                weight=self._weight(client) or update.raw,
                vector=partial(self._vector, update.place, kept),
                before=partial(self._before, client),
            )

    def stretches(self) -> Iterator[tuple[slice, list[Part]]]:
        whole = [*self]
        for first in range(0, len(whole), TOGETHER):
            some = slice(first, first + TOGETHER)
            yield from self._stretches(whole[some], self._taken[some])

    def _stretches(
        self, some: list[Taken], taken: list[tuple[Opened, float]]
    ) -> Iterator[tuple[slice, list[Part]]]:
        memory, device = self._memory, self.layout.device
        with ExitStack() as stack, _as_os_error():

            def opened(reader: Reader) -> Reader:
                stack.callback(reader.close)
                return reader

            now: list[Reader] = []
            before: dict[int, Reader] = {}
            for k, (update, _) in enumerate(taken):
                client = update.entry["id"]
                now.append(opened(memory.open_proposed(update.place, f"client {client!r}")))
                if memory.estimator.remembers_clients and client in memory.seen:
                    place = memory.seen[client][0]
                    before[k] = opened(memory.open_last(place, f"client {client!r}"))
            places = {k: len(now) + i for i, k in enumerate(before)}
            with closing(
                together([*now, *before.values()], self.layout.size, self._workers)
            ) as read:
                for span, vectors in read:
                    parts: list[Part] = []
                    for k, (update, kept) in enumerate(taken):
                        g = vectors[k].to(device)
                        if kept != 1:
                            g.mul_(kept)
                        y = None
                        if k in places:
                            client = update.entry["id"]
                            y = vectors[places[k]].to(device), memory.seen[client][1]
                        parts.append(Part(some[k].share, some[k].weight, g, y))
                    yield span, parts

    @property
    def mean_weight(self) -> float:
        weights = [weight for _, weight in self._memory.seen.values()]
        return 1.0 if self._importance is not None else math.fsum(weights) / len(weights)

    @property
    def weight(self) -> float:
        before = {client: weight for client, (_, weight) in self._memory.seen.items()}
        return math.fsum({**before, **{update.client: update.weight for update in self}}.values())

    def last(self, place: int) -> Tensor:
        return self._memory.last(_own(place), f"place {place} of the estimator")

    def keep(self, place: int, vector: Tensor) -> None:
        self._own.add(_own(place))
        self._memory.store.propose(place, self._memory.t, {NAME: vector})

    def commit(self) -> None:
        """Makes this round's updates the ones that are remembered."""
        memory, kept = self._memory, self._own.copy()
        for (update, cut), taken in zip(self._taken, self, strict=True):
            if memory.estimator.remembers_clients:
                place = memory.seen.get(taken.client, (FIRST + len(memory.seen), 0.0))[0]
                if cut != 1 or place != update.place:  # one before it was not accepted
                    memory.store.propose(place, memory.t, {NAME: taken.vector()})
                kept.add(place)
                memory.seen[taken.client] = place, taken.weight
        memory.store.settle(memory.t, [*self._proposed, *self._own], kept)
        memory.state = self._state
        memory.t += 1
        self._proposed, self._own = [], set()

    def drop(self) -> None:
        """Takes away from the disk what was not committed."""
        if proposed := [*self._proposed, *self._own]:
            self._memory.store.settle(self._memory.t, proposed, ())

    def _weight(self, client: Client) -> float:
        given = 0.0 if self._importance is None else self._importance.get(client, 0.0)
        return given if 0 < given < math.inf else 0.0

    def _vector(self, place: int, kept: float) -> Tensor:
        vector = self._memory.store.proposed(place, self._memory.t)[NAME]
        vector = vector.to(self.layout.device)
        return vector if kept == 1 else vector.mul_(kept)

    def _before(self, client: Client) -> tuple[Tensor, float] | None:
        known = self._memory.seen.get(client)
        return known and (self._memory.last(known[0], f"client {client!r}"), known[1])


@contextmanager
def _as_os_error() -> Generator[None]:
    """A damaged file is an OSError, wherever in a round it is noticed."""
    try:
        yield
    except checkpoint.CheckpointError as error:
        raise OSError(str(error)) from error


def _own(place: int) -> int:
    if not 0 <= place < FIRST:
        raise ValueError(f"place {place}: an estimator has places 0 to {FIRST - 1}")
    return place
