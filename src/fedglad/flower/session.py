"""A federation in progress: everything that changes from round to round, and one round of it."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedglad.core.layout import as_tensor
from fedglad.flower import log
from fedglad.flower.nodes import ANSWER_TIMEOUT, UNUSUAL, Directory, NoSize
from fedglad.flower.replies import (
    Reply,
    Unusable,
    accuracy_of,
    decoded,
    loss_of,
    plain,
    read,
    sent,
    update_of,
    weight_of,
    without_norms,
)
from fedglad.flower.settings import Share
from fedglad.flower.transport import exchange, wait_for
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import Failure, Record, Round, Update
from fedglad.rng import stream
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.server.server import Server
from fedglad.simulation.driver import Driver
from fedglad.weights import Samples


class Outweighed(Exception):
    """One of the first round's clients has a weight out of all proportion."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(reason)
        self.client = client


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Under which names things are in the messages."""

    weight: str = "num-examples"
    arrays: str = "arrays"
    config: str = "config"


@dataclass
class Trained:
    """One round of training: the record, what the clients said, and what failed before it."""

    record: Record
    said: dict[int, Reply] = field(default_factory=dict[int, Reply])
    reasons: list[str] = field(default_factory=list[str])
    failed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    alarm: str | None = None

    @property
    def contents(self) -> list[RecordDict]:
        """What the accepted clients said, in the cohort's order."""
        accepted = [c["id"] for c in self.record.clients if "rejected" not in c]
        return [without_norms(self.said[k].content) for k in accepted if k in self.said]


class Session(Driver):
    """A federation whose clients are Flower's nodes: it waits, draws, asks and takes replies in."""

    def __init__(
        self,
        arrays: ArrayRecord,
        server: Mapping[str, Any],
        *,
        directory: Directory,
        keys: Keys,
        sampler: Sampler = Share(),  # noqa: B008 - frozen
        seed: int = 0,
        least: int = 1,
        report: str = "updates",
        rounds: int | None = None,
        memories: Path | None = None,
    ) -> None:
        """`server` are its settings; a schedule ends with the last of `rounds`, where known.

        `memories` is the folder for what a sampler wants kept, by default a temporary one.
        """
        try:
            values = decoded(arrays)
        except Unusable as error:
            raise ValueError(f"initial_arrays: {error}") from None
        for name, value in values.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise ValueError(
                    f"initial_arrays: {name!r} holds NaN or inf, nothing can be learned"
                )
        self.weighting = server.get("weighting") or Samples()
        self.optimizer: Optimizer = server.get("optimizer") or SGD()
        settings: dict[str, Any] = {
            **server,
            "optimizer": self.optimizer.within(rounds) if rounds else self.optimizer,
            "weighting": sampler.weighting or self.weighting,
            "distances": sampler.distances,
        }
        super().__init__(Server(values, **settings), sampler, seed, memories=memories)
        self.order = tuple(arrays)
        self.directory, self.keys, self.least, self.report = directory, keys, least, report
        self._memo: dict[Any, Any] = {}  # of the pools
        self._met = False  # whether the nodes of a first round were there
        self._usual: float | None = None  # weight, if the first round was lost to an unusual one

    def transport_state(self) -> dict[str, Any]:
        return {"nodes": self.directory.state(), "usual": self._usual}

    def restore_transport(self, saved: Mapping[str, Any]) -> None:
        self._usual = saved["usual"]
        self.directory.restore(saved["nodes"])

    def arrays(self) -> ArrayRecord:
        """The model as Flower sends it: names, order and dtypes of the initial arrays."""
        return sent({name: value.numpy() for name, value in self.server.state.items()}, self.order)

    def take_over(self, arrays: ArrayRecord) -> None:
        """Goes on from a model that somebody else has changed."""
        state = self.server.state_dict()
        for name, value in decoded(arrays).items():
            for part in ("params", "buffers"):
                if (own := state["tensors"].get(f"{part}/{name}")) is not None:
                    own.copy_(_tensor_like(value, own))
        self.server.load_state_dict(state)

    def wait(self, grid: Grid, timeout: float) -> str | None:
        """Waits until there are nodes enough; says why if there are not.

        A run begins when there is a whole cohort, whenever that is; one that goes on waits a while
        for all those it had. Later it goes on with whoever is left, if they are enough.
        """
        least = wanted = max(self.least, 1)
        if not self._met:
            wanted = max(least, self.sampler.clients_per_round, self.directory.expected)
        endless = not self._met and not self.directory.expected
        if not self._met:
            timeout = min(timeout, ANSWER_TIMEOUT)
        count = 0
        for count in wait_for(grid, wanted, None if endless else timeout):
            if count < wanted:
                log.info("Waiting for nodes to connect: %d of %d", count, wanted)
        if count < least:
            return f"{count} nodes are connected, at least {least} are needed"
        self._met = True
        self.directory.refresh(grid, timeout)
        return None if self.directory.online else "no node can be told apart"

    def choose(
        self, grid: Grid, timeout: float, attempt: int = 0, avoid: Collection[int] = ()
    ) -> Cohort:
        """The cohort of round t; another one for every attempt, of others if there are."""
        online = set(self.directory.online)
        usable = online - set(avoid) or online
        while True:
            try:
                pool = self._pool(grid, timeout, sorted(usable))
                cohort = self.draw(pool, lambda ids: self._losses(grid, ids, timeout), attempt)
                break
            except NoSize as error:
                log.warn("%s", error)
                usable = usable - {error.client}
                if not usable:
                    raise
        here = [k for k, client in enumerate(cohort.ids) if client in online]
        weights = cohort.weights and tuple(cohort.weights[k] for k in here)
        return Cohort(tuple(cohort.ids[k] for k in here), weights)

    def _pool(self, grid: Grid, timeout: float, usable: list[int]) -> Pool:
        directory, within = self.directory, set(usable)
        self._memo.pop("sizes", None)  # of others, if nodes came or went
        return Pool(
            directory.count,
            lambda k: directory.size(grid, k, timeout) if k in within else 1,
            lambda k: None,
            self.last,
            ids=None if len(usable) == directory.count else np.array(usable, dtype=np.int64),
            memo=self._memo,
        )

    def messages(
        self, clients: Sequence[int], arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        """One message to each client, all with the same content."""
        config = ConfigRecord({**config, "server-round": self.t + 1})
        content = RecordDict({self.keys.arrays: arrays, self.keys.config: config})
        return [Message(content, self.directory.online[k], kind) for k in clients]

    def train(self, grid: Grid, config: ConfigRecord, timeout: float, retries: int) -> Trained:
        """Round t: asks a cohort, and other ones if too few answer well."""
        reasons: list[str] = []
        failed: dict[int, dict[str, Any]] = {}
        for attempt in range(retries + 1):
            if reason := self.wait(grid, timeout):
                trained = Trained(Record("skipped", reason))
                break
            cohort = self.choose(grid, timeout, attempt, failed)
            log.info(
                "Round %d: asked %d of %d nodes",
                self.t + 1,
                len(cohort.ids),
                len(self.directory.online),
            )
            messages = self.messages(cohort.ids, self.arrays(), config, MessageType.TRAIN)
            replies = exchange(grid, messages, timeout)
            del messages  # and with them the arrays, while replies come in
            trained = self.aggregate(cohort, replies, timeout)
            if trained.record.stepped or attempt == retries:
                break
            log.warn("Round %d is tried again: %s", self.t + 1, trained.record.reason)
            reasons.append(trained.record.reason or "")
            failed |= {c["id"]: c for c in trained.record.clients if "rejected" in c}
        else:
            raise AssertionError("there is always a last attempt")
        trained.reasons, trained.failed = reasons, list(failed.values())
        return trained

    def aggregate(
        self, cohort: Cohort, replies: Iterator[Message | None], waited: float
    ) -> Trained:
        """One step by the replies, which come in the cohort's order."""
        said: dict[int, Reply] = {}
        updates = self._updates(cohort, replies, waited, said)
        norms = partial(self._reported, said) if self.report == "norms" else None
        population = self.directory.population
        try:
            record, alarm = self.step(cohort.ids, updates, population=population, norms=norms)
        except Outweighed as error:  # nothing was changed
            entry = {"id": error.client, "weight": 0.0, "loss": None, "sq_norm": None}
            return Trained(Record("skipped", str(error), [{**entry, "rejected": str(error)}]))
        for client in record.clients:
            if "rejected" in client:
                name = self.directory.name(client["id"])
                log.warn("Round %d: client %s left out: %s", self.t + 1, name, client["rejected"])
        return Trained(record, said, alarm=alarm)

    def line(
        self,
        trained: Trained,
        metrics: Mapping[str, MetricRecord | None],
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        """A line of rounds.jsonl: the simulator's fields, and what only Flower has."""
        tested = [plain(metrics.get(part)) for part in ("server", "evaluate")]  # ours counts first
        line = Round(
            self.t,
            (),
            trained.record,
            test_loss=next((x for x in map(loss_of, tested) if x is not None), None),
            test_accuracy=next((x for x in map(accuracy_of, tested) if x is not None), None),
            alarm=trained.alarm,
            seconds=seconds,
        ).to_dict()
        again = {entry["id"] for entry in trained.record.clients}
        failed = [c for c in trained.failed if c["id"] not in again]
        entries = [*failed, *trained.record.clients]
        line["clients"] = [{**e, "id": self.directory.name(e["id"])} for e in entries]
        line["attempts"] = 1 + len(trained.reasons)
        if trained.reasons:
            line["retried"] = trained.reasons
        known = {part: found for part, found in metrics.items() if found is not None}
        line["metrics"] = {part: plain(found) for part, found in known.items()}
        return line

    def evaluators(self, grid: Grid, timeout: float, fraction: float, least: int) -> list[int]:
        """Who tests the model: a share of the connected, at least so many, drawn by the round."""
        self.directory.refresh(grid, timeout)
        online = sorted(self.directory.online)
        r = min(max(int(len(online) * fraction), least), len(online))
        return stream(self.seed, "evaluators", self.t).choice(online, r, replace=False).tolist()

    def evaluations(
        self, clients: Sequence[int], replies: Iterator[Message | None], waited: float
    ) -> list[RecordDict]:
        """What those said who tested the model and can be understood."""
        found: dict[int, tuple[float, RecordDict]] = {}
        for client, message in zip(clients, replies, strict=True):
            try:
                reply = read(message, waited)
                found[client] = weight_of(reply, self.keys.weight), reply.content
            except Unusable as reason:
                name = self.directory.name(client)
                log.warn("Round %d: client %s did not evaluate: %s", self.t + 1, name, reason)
        weights = [weight for weight, _ in found.values()]
        most = UNUSUAL * statistics.median_high(weights) if len(found) > 2 else math.inf
        return [content for weight, content in found.values() if weight <= most]

    def _updates(
        self,
        cohort: Cohort,
        replies: Iterator[Message | None],
        waited: float,
        said: dict[int, Reply],
    ) -> Iterator[Update | Failure]:
        """The cohort's updates; each is let go before the next is pulled."""
        weights: dict[int, float] = {}
        for k, client in enumerate(cohort.ids):
            message = next(replies)
            try:
                reply = said[client] = read(message, waited)
                weight = weights[client] = weight_of(reply, self.keys.weight)
                if reason := self._unusual(weight, self._usual):
                    raise Unusable(reason)
                if cohort.weights is not None:
                    weight = cohort.weights[k]
                assert message is not None
                update = update_of(message, reply, client, weight)
            except Unusable as reason:
                update = Failure(client, str(reason))
            del message
            yield update
            del update
        self._compare(weights)

    def _unusual(self, weight: float, usual: float | None) -> str | None:
        """Why a weight cannot be meant. Once a round has stepped, the server's guard knows."""
        guard = self.server.guard
        if self.server.round or not guard or not usual or weight <= guard.weight * usual:
            return None
        return f"weight {weight:.4g} is more than {guard.weight:g} times the median {usual:.4g}"

    def _compare(self, weights: Mapping[int, float]) -> None:
        """In the first round the cohort is all there is to compare with."""
        median = statistics.median_high(weights.values()) if len(weights) > 2 else None
        for client, weight in weights.items():
            if self._usual is None and (reason := self._unusual(weight, median)):
                self._usual = median
                raise Outweighed(client, reason)

    def _reported(self, said: Mapping[int, Reply], update: Update | Failure) -> list[float] | None:
        """The squared norms of the parameters, of those of all arrays that a client reports."""
        if isinstance(update, Failure) or not isinstance(update.client, int):
            return None
        norms = said[update.client].sq_norms
        if norms is None or len(norms) != len(self.order):
            return norms  # of which it will be said that they are too few or too many
        by_name = dict(zip(self.order, norms, strict=True))
        return [by_name[name] for name in self.server.layout.names]

    def _losses(self, grid: Grid, clients: Sequence[int], timeout: float) -> list[float]:
        """The loss at θ of clients, NaN where it cannot be had."""
        messages = self.messages(clients, self.arrays(), ConfigRecord(), MessageType.EVALUATE)
        found: list[float] = []
        for message in exchange(grid, messages, timeout):
            try:
                loss = loss_of(read(message, timeout).metrics)
            except Unusable:
                loss = None
            found.append(float("nan") if loss is None else loss)
        return found


def _tensor_like(value: np.ndarray, own: Tensor) -> Tensor:
    found = as_tensor(value)
    if found.shape != own.shape:
        raise ValueError(f"arrays have shape {tuple(found.shape)} where {tuple(own.shape)} was")
    return found
