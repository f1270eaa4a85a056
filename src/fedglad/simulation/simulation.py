"""A federated run as a generator of rounds; reads like the paper's algorithm."""

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.adapters import Adapter
from fedglad.clients.method import Plain
from fedglad.core.memory import Memories
from fedglad.filters import Filter
from fedglad.optimizers import Optimizer
from fedglad.records import Bundle, Failure, Record, Round, Update
from fedglad.rng import stream
from fedglad.samplers.base import Pool, Sampler, State
from fedglad.server.server import Server
from fedglad.simulation.engines.base import Engine, Federation, Group, Job
from fedglad.trust import Alarm
from fedglad.weights import Samples

logger = logging.getLogger("fedglad")

COUNTED = 1_000  # up to so many clients the labels of the whole population are counted once


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run is made of."""

    rounds: int
    seed: int
    eval_every: int
    model: nn.Module
    data: Federation
    client: Plain
    sampler: Sampler
    optimizer: Optimizer
    adapter: Adapter
    filter: Filter
    weighting: Samples
    engine: Any  # settings with start(job)


class Simulation:
    """A run in progress: what changes are the server, the sampler's and the alarm's state, t."""

    def __init__(self, plan: Plan, memories: Path | None = None) -> None:
        """`memories` is the folder for what clients remember, by default a temporary one."""
        plan = replace(plan, client=plan.client.among(plan.data.clients))
        self.plan = plan
        labels = getattr(plan.data, "labels", _unknown)
        self.memories = Memories(memories) if plan.client.remembers else None
        self.updates = None
        if plan.sampler.keeps_updates:
            self.updates = Memories(memories and memories / "updates")
        self.stores = [store for store in (self.memories, self.updates) if store]
        self.pool = Pool(
            plan.data.clients,
            plan.data.size,
            labels,
            self._last,
            update_bytes=sum(p.numel() * p.element_size() for p in plan.model.parameters()),
        )
        plan.sampler.check(self.pool)
        self.counts = _counts(self.pool)
        self.everybody = None if self.counts is None else self.counts.sum(axis=0)
        self.server = Server(
            plan.model,
            optimizer=plan.optimizer,
            adapter=plan.adapter,
            filter=plan.filter,
            weighting=plan.sampler.weighting or plan.weighting,
            method=plan.client.server,
            distances=plan.sampler.distances,
        )
        self.sampler_state: State = {}
        self.alarm, self.alarm_state = Alarm(), dict[str, Any]()
        self.t = 0
        start = copy.deepcopy(plan.model)
        job = Job(
            lambda: copy.deepcopy(start),
            plan.data,
            plan.client,
            cross_entropy,
            plan.seed,
            self.memories,
        )
        try:
            self.engine: Engine = plan.engine.start(job)
        except BaseException:
            self._forget()
            raise

    def rounds(self) -> Iterator[Round]:
        """The rounds from here to the last."""
        plan, server = self.plan, self.server
        for t in range(self.t, plan.rounds):
            begin = time.perf_counter()
            rng = stream(self._sampler_seed(), "cohort", t)
            cohort = plan.sampler.sample(rng, t, self.sampler_state, self.pool, self._ask)
            groups = self.engine.train(t, cohort.ids, server.packed, server.sent)
            seen = self._kept(t, _seen(t, groups, cohort.weights))
            record = server.step(seen, population=self.pool.clients)
            self._settle(t, cohort.ids, record)
            self.sampler_state = plan.sampler.observe(self.sampler_state, record)
            gsi = record.gsi_all if record.stepped else None
            flag, self.alarm_state = self.alarm.judge(gsi, self.alarm_state)
            self.t = t + 1
            trained = time.perf_counter()
            tested = self.t % plan.eval_every == 0 or self.t == plan.rounds
            result = self.engine.evaluate(server.packed) if tested else None
            yield Round(
                t,
                cohort.ids,
                record,
                test_loss=result.loss if result else None,
                test_accuracy=result.accuracy if result else None,
                label_similarity=self._similarity(cohort.ids),
                alarm=flag,
                seconds={"train": trained - begin, "test": time.perf_counter() - trained},
            )

    def recall(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """The alarm's state after these records, for a run that goes on."""
        for found in rounds:
            gsi = found.get("gsi_all") if found.get("status") == "stepped" else None
            _, self.alarm_state = self.alarm.judge(gsi, self.alarm_state)

    def close(self) -> None:
        """Ends the engine's processes."""
        self.engine.close()
        self._forget()

    def _forget(self) -> None:
        for store in self.stores:
            store.close()

    def _ask(self, clients: list[int]) -> list[float]:
        return self.engine.losses(clients, self.server.packed)

    def _last(self, client: int) -> Tensor | None:
        """The client's last accepted update, for a sampler that keeps them."""
        assert self.updates
        return self.updates.read(client, self.updates.version(client)).get("update")

    def _kept(self, t: int, groups: Iterator[Group]) -> Iterator[Group]:
        """The updates, noted for a sampler that will ask for the last of each client."""
        for group in groups:
            if self.updates:
                for update in group.updates() if isinstance(group, Bundle) else group:
                    if isinstance(update, Update) and isinstance(update.delta, Tensor):
                        self.updates.propose(cast(int, update.client), t, {"update": update.delta})
            yield group

    def _settle(self, t: int, cohort: tuple[int, ...], record: Record) -> None:
        """What a client would remember counts only if its update was accepted."""
        stepped = record.clients if record.stepped else []
        accepted = [client["id"] for client in stepped if "rejected" not in client]
        if self.memories and self.plan.client.settles:
            for client in accepted:
                proposed = self.memories.proposed(client, t)
                whole = self.plan.client.settle(proposed, self.server.sent)
                self.memories.propose(client, t, whole)
        for store in self.stores:
            store.settle(t, cohort, accepted)

    def _sampler_seed(self) -> int:
        seed = self.plan.sampler.seed
        if isinstance(seed, int):
            return seed
        return self.plan.seed if seed == "run" else 0

    def _similarity(self, cohort: tuple[int, ...]) -> float | None:
        """The paper's sim_score: cosine of the cohort's merged class counts and everybody's."""
        if self.counts is None or self.everybody is None:
            return None
        merged = self.counts[list(cohort)].sum(axis=0)
        length = np.linalg.norm(merged) * np.linalg.norm(self.everybody)
        return float(merged @ self.everybody / length) if length else None


def _seen(t: int, groups: Iterator[Group], weights: tuple[float, ...] | None) -> Iterator[Group]:
    """The updates with the cohort's weights; what a failed client said goes to the log."""
    place = 0
    for group in groups:
        if isinstance(group, Bundle):
            end = place + len(group.clients)
            yield replace(group, weights=list(weights[place:end])) if weights else group
            place = end
            continue
        for k, update in enumerate(group):
            if isinstance(update, Failure):
                if update.detail:
                    logger.error("round %d: client %s failed:\n%s", t, update.client, update.detail)
            elif weights:
                group[k] = replace(update, weight=weights[place + k])
        place += len(group)
        yield group


def _unknown(k: int) -> None:
    return None


def _counts(pool: Pool) -> np.ndarray | None:
    """Every client's samples of every class, where that is known and the population is small."""
    if pool.clients > COUNTED or pool.labels(0) is None:
        return None
    return np.array([pool.labels(k) for k in range(pool.clients)], dtype=float)
