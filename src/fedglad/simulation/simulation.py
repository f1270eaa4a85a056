"""A federated run as a generator of rounds; reads like the paper's algorithm."""

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from fedglad.adapters import Adapter
from fedglad.averages import Average
from fedglad.clients.method import Plain
from fedglad.clients.personal import Personal
from fedglad.core import batch
from fedglad.core.guard import Guard
from fedglad.core.layout import split, twin
from fedglad.core.memory import VERSIONS
from fedglad.data.validation import clients_with_test, validation_of
from fedglad.estimators import Estimator
from fedglad.filters import Filter
from fedglad.optimizers import Optimizer
from fedglad.privacy import Central
from fedglad.records import Bundle, ClientScores, Failure, Round
from fedglad.rng import stream
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.server.compatibility import needs_updates, refuse_privacy, refuse_transform
from fedglad.server.rule import Rule
from fedglad.server.server import Server
from fedglad.server.totals import Block
from fedglad.simulation.driver import Driver, guard_of
from fedglad.simulation.engines.base import Arrivals, Engine, Federation, Job, Packed
from fedglad.simulation.stopping import Stopping
from fedglad.tasks.base import Task, score_of
from fedglad.tasks.classification import Classification
from fedglad.transforms import Transform
from fedglad.trust import Trust
from fedglad.weights import Samples

logger = logging.getLogger("fedglad")

RUN_AWAY = 100.0  # times the loss before the first step, or 1 if that is less
COUNTED = 1_000  # up to so many clients the labels of the whole population are counted once


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a run is made of."""

    rounds: int
    seed: int
    eval_every: int
    model: nn.Module
    data: Federation
    source: Callable[[], Federation] | None = None  # opens the data on another machine
    task: Task = field(default_factory=Classification)
    start_loss: float = math.inf  # on some test samples, before the first step
    client: Plain
    sampler: Sampler
    optimizer: Optimizer
    adapter: Adapter
    filter: Filter
    weighting: Samples
    guard: Guard | None = None
    trust: Trust | None = None
    estimator: Estimator | None = None
    average: Average | None = None
    transform: Transform | None = None
    privacy: Central | None = None
    engine: Any  # settings with start(job)
    arithmetic: int = 1  # see Driver
    eval_clients: int | Literal["all"] = 0  # whose held-out samples the model is tested on
    eval_clients_every: int = 10
    stop_after: int = 0  # see Stopping
    max_seconds: float = 0.0


class Simulation(Driver):
    """A run whose clients are trained by an engine on this machine."""

    def __init__(self, parts: Parts, memories: Path | None = None) -> None:
        """`memories` is the folder for what clients remember, by default a temporary one."""
        parts = replace(parts, client=parts.client.among(parts.data.clients))
        self.parts, self.arithmetic = parts, parts.arithmetic
        layout, client = split(parts.model)[0], parts.client
        self.personal = Personal(client, parts.model, layout) if client.has_personal else None
        self.pool = Pool(
            parts.data.clients,
            parts.data.size,
            getattr(parts.data, "labels", lambda k: None),
            self.last,
            update_bytes=sum(p.nbytes for p in split(parts.model)[1].values()),
        )
        parts.sampler.check(self.pool)
        self.validates = validation_of(parts.data) is not None
        self.score, self.warned = score_of(parts.task), False
        self.stopping = Stopping(parts.stop_after, parts.max_seconds)
        self.tested_clients = drawn(parts.data, parts.eval_clients, parts.seed)
        if self.personal and not self.tested_clients:
            logger.warning(
                "some parameters stay with each client, and the test set is tested with those that "
                "the server began with: set eval_clients=all to test each client with its own"
            )
        self.counts = _counts(self.pool)
        self.everybody = None if self.counts is None else self.counts.sum(axis=0)
        if parts.privacy:
            if parts.privacy.delta >= 1 / parts.data.clients:
                raise ValueError(
                    f"privacy.delta = {parts.privacy.delta:g}: with δ of 1/N or more, here "
                    f"{1 / parts.data.clients:g}, a server that gives away one client's data whole "
                    "would count as private: set it well below"
                )
            refuse_privacy(
                adapter=parts.adapter,
                filter=parts.filter,
                weighting=parts.weighting,
                server=parts.optimizer,
                client=parts.client,
                sampler=parts.sampler,
                transform=parts.transform,
                validates=self.validates,
            )
        server = Server(
            parts.model,
            optimizer=parts.optimizer,
            adapter=parts.adapter,
            filter=parts.filter,
            weighting=parts.sampler.weighting or parts.weighting,
            estimator=parts.estimator,
            average=parts.average,
            method=parts.client.server,
            guard=guard_of(parts.guard, parts.sampler),
            trust=parts.trust or (Trust() if parts.filter.needs_trust else None),
            distances=parts.sampler.distances,
            privacy=parts.privacy,
        )
        if parts.estimator:
            _require_room(parts.estimator, parts, server, memories)
        refuse_transform(parts.transform, parts.filter, parts.client)
        super().__init__(
            server,
            parts.sampler,
            parts.seed,
            client=parts.client,
            transform=parts.transform,
            memories=memories,
        )
        job = Job(
            twin(parts.model),
            parts.data,
            parts.client,
            parts.task,
            parts.seed,
            self.memories,
            parts.source,
        )
        try:
            self.engine: Engine = parts.engine.start(job)
        except BaseException:
            super().close()
            raise

    def rounds(self) -> Iterator[Round]:
        """The rounds from here to the last, or to the one after which the run is to stop."""
        parts, server, stopping = self.parts, self.server, self.stopping
        for t in range(self.t, parts.rounds):
            if stopping.reason:
                return
            begin = time.perf_counter()
            cohort = self.draw(self.pool, lambda ids: self.engine.losses(ids, server.packed))
            rule = self._rule(cohort)
            extra = (rule,) if rule and getattr(self.engine, "sums", False) else ()
            groups = self.engine.train(t, cohort.ids, server.packed, server.sent, *extra)
            updates = _weighted(t, self._counted(groups), cohort.weights)
            record, alarm = self.step(cohort.ids, updates, population=self.pool.clients)
            self.t = t + 1
            trained = time.perf_counter()
            last = self.t == parts.rounds or stopping.late(trained - begin)
            metrics: dict[str, float] = {}
            averages = parts.average.test if parts.average else server.has_average
            if last or self.t % parts.eval_every == 0:
                metrics = self._metrics("", server.packed)
                if averages:
                    metrics |= self._metrics("averaged_", server.packed_average)
            played = Round.measured(
                t,
                cohort.ids,
                record,
                metrics=metrics,
                score=self.score,
                bytes={
                    "down": self.update_bytes["down"] * len(cohort.ids),
                    "up": self.update_bytes["up"] * self.arrived,
                },
            )
            if self.tested_clients:
                last = last or stopping.late(time.perf_counter() - begin) or stopping.ends(played)
                if last or self.t % parts.eval_clients_every == 0:
                    scores = self._client_scores(server.packed)
                    played = replace(played, client_scores=scores)
                    if averages:
                        scores = self._client_scores(server.packed_average)
                        played = replace(played, averaged_client_scores=scores)
            played = replace(
                played,
                label_similarity=self._similarity(cohort.ids),
                alarm=alarm,
                seconds={"train": trained - begin, "test": time.perf_counter() - trained},
            )
            if not self.warned and (lost := self._lost(played)):
                self.warned = True
                logger.warning("round %d: %s", t, lost)
                played = replace(played, warning=lost)
            stopping.look_at(played)
            yield played.with_server(server)

    def _rule(self, cohort: Cohort) -> Rule | None:
        """What an engine needs to add up blocks of the cohort; None if it has to send updates."""
        single = needs_updates(self.parts.sampler, self.parts.transform)
        if single or len({*cohort.ids}) < len(cohort.ids):
            return None
        weights = cohort.weights
        return self.server.rule(dict(zip(cohort.ids, weights, strict=True)) if weights else None)

    def _lost(self, played: Round) -> str:
        """That training has run away, by the test loss; empty if it has not."""
        loss, start = played.test_loss, self.parts.start_loss
        if self.personal:  # its head, say, is the one it began with
            return ""
        if loss is None or (math.isfinite(loss) and loss <= RUN_AWAY * max(start, 1.0)):
            return ""
        return (
            f"the test loss is {loss:.3g}, and was {start:.3g} before the first step: training "
            "runs away. Lower client.lr or server.lr, or set client.clip_norm"
        )

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes the records of the rounds that are done: when to stop, and what was said."""
        self.stopping = Stopping(self.parts.stop_after, self.parts.max_seconds)
        self.warned = False
        for record in records:
            self.stopping.look(record)
            self.warned = self.warned or "warning" in record

    @property
    def update_bytes(self) -> dict[str, int]:
        """What a client of a round receives and sends, in bytes: vectors and buffers.

        What stays with the clients is left out: it need not travel.
        """
        layout, client, personal = self.server.layout, self.parts.client, self.personal
        numel = sum(layout.numels) - (personal.numel if personal else 0)
        vector = numel * layout.dtype.itemsize
        update = self.transform.size(layout) if self.transform else vector
        stay = personal.buffers if personal else []
        buffers = sum(b.nbytes for name, b in self.server.packed[1].items() if name not in stay)
        sends = client.server is not None and getattr(client.server, "wants_extra", True)
        return {
            "down": vector * (1 + len(client.hears)) + buffers,
            "up": update + vector * bool(sends) + buffers,
        }

    def _counted(self, groups: Arrivals) -> Arrivals:
        """The updates, and in `arrived` how many there were: who failed has sent nothing."""
        self.arrived = 0
        for group in groups:
            if isinstance(group, Block):
                self.arrived += group.clients - len(group.failures)
            else:
                members = group.clients if isinstance(group, Bundle) else group
                self.arrived += sum(not isinstance(member, Failure) for member in members)
            yield group
            del group

    def _client_scores(self, packed: Packed) -> ClientScores:
        """A model's scores on the held-out samples of the clients that were drawn for it."""
        found = self.engine.evaluate_clients(packed, self.tested_clients)
        scores = [None if metrics is None else metrics.get(self.score.name) for metrics in found]
        model = "personal" if self.client.tests_own else "server"
        return ClientScores(self.score, self.tested_clients, tuple(scores), model)

    def _metrics(self, which: str, packed: Packed) -> dict[str, float]:
        """A model's metrics on the test set, and on the validation set if there is one, by the
        names that a record has for them."""
        parts = {which or "test_": self.engine.evaluate(packed)}
        if self.validates:
            parts[f"{which}validation_"] = self.engine.evaluate(packed, "validation")
        return {
            f"{part}{name}": v for part, metrics in parts.items() for name, v in metrics.items()
        }

    def close(self) -> None:
        """Ends the engine's processes."""
        self.engine.close()
        super().close()

    def _similarity(self, cohort: tuple[int, ...]) -> float | None:
        """The paper's sim_score: cosine of the cohort's merged class counts and everybody's."""
        if self.counts is None or self.everybody is None:
            return None
        merged = self.counts[list(cohort)].sum(axis=0)
        length = np.linalg.norm(merged) * np.linalg.norm(self.everybody)
        return float(merged @ self.everybody / length) if length else None


def _weighted(t: int, groups: Arrivals, weights: tuple[float, ...] | None) -> Arrivals:
    """The updates with the cohort's weights; a failed client's traceback goes to the log."""
    place = 0
    for group in groups:
        if isinstance(group, Block):
            for client, detail in group.failures:
                _log_failure(t, client, detail)
            place += group.clients
            yield group
            continue
        if isinstance(group, Bundle):
            end = place + len(group.clients)
            yield replace(group, weights=list(weights[place:end])) if weights else group
            place = end
            continue
        for k, update in enumerate(group):
            if isinstance(update, Failure):
                _log_failure(t, update.client, update.detail)
            elif weights:
                group[k] = replace(update, weight=weights[place + k])
        place += len(group)
        yield group


def _log_failure(t: int, client: Any, detail: str) -> None:
    if detail:
        logger.error("round %d: client %s failed:\n%s", t, client, detail)


def drawn(data: Any, count: int | Literal["all"], seed: int) -> tuple[int, ...]:
    """The clients whose own scores are measured, ascending: all, or so many, drawn by the seed.

    Raises ValueError if none of them has held-out samples.
    """
    if not count:
        return ()
    asked = clients_with_test(data)
    if asked and count != "all" and count > len(asked):
        raise ValueError(
            f"eval_clients = {count}: {len(asked)} clients may have held-out samples; set so many, "
            "or all"
        )
    if count == "all" or not asked:
        chosen = tuple(asked)
    else:
        places = stream(seed, "eval-clients").choice(len(asked), count, replace=False)
        chosen = tuple(asked[place] for place in sorted(places.tolist()))
    if not any(_has_test(data, client) for client in chosen):
        raise ValueError(
            f"eval_clients = {count}: none of these clients has held-out samples: set "
            "data.validation=0.1 or more, or give the data a client_test(k)"
        )
    return chosen


def _has_test(data: Any, client: int) -> bool:
    try:
        held = data.client_test(client)
        return held is not None and batch.length(held[0]) > 0
    except Exception:  # it will be left out alone
        return False


def _require_room(
    estimator: Estimator, parts: Parts, server: Server, memories: Path | None
) -> None:
    """Raises if the updates of all who may take part do not fit on the disk."""
    folder = memories or Path(tempfile.gettempdir())
    while not folder.exists():
        folder = folder.parent
    clients = parts.data.clients
    seen = min(clients, parts.rounds * min(parts.sampler.largest_cohort, clients))
    size = server.layout.size * server.layout.dtype.itemsize
    versions = VERSIONS if memories else 1
    estimator.require_room(seen, size, shutil.disk_usage(folder).free, versions)


def _counts(pool: Pool) -> np.ndarray | None:
    """Every client's samples of every class, where that is known and the population is small."""
    if pool.clients > COUNTED or pool.labels(0) is None:
        return None
    return np.array([pool.labels(k) for k in range(pool.clients)], dtype=float)
