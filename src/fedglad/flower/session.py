"""A federation in progress: everything that changes from round to round, and one round of it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    RecordDict,
)
from flwr.serverapp import Grid
from torch import Tensor

from fedglad.averages import NoAverage
from fedglad.core.guard import Guard
from fedglad.core.layout import as_tensor
from fedglad.federation import session as federation
from fedglad.federation.metrics import loss_of
from fedglad.federation.session import TrainingResult
from fedglad.flower import log
from fedglad.flower.mods import NORMS
from fedglad.flower.nodes import ANSWER_TIMEOUT, Directory, Kind, NoSize, largest_usual
from fedglad.flower.replies import (
    Reply,
    Unusable,
    decoded,
    only,
    read,
    weight_of,
)
from fedglad.flower.settings import Arrays, ClientApp, Engine, Nodes, Share
from fedglad.flower.transport import exchange, wait_for
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import Failure, Record, Update
from fedglad.rng import stream
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.server.server import Server
from fedglad.simulation.driver import guard_of
from fedglad.weights import Samples


class Session(federation.Session):
    """A federation whose clients are Flower's nodes: it waits, draws, asks and takes replies in."""

    hidden = (NORMS,)

    def __init__(
        self,
        arrays: ArrayRecord,
        *,
        sampler: Sampler = Share(),  # noqa: B008 - frozen
        optimizer: Optimizer = SGD(),  # noqa: B008 - frozen
        weighting: Samples | None = None,
        rounds: int | None = None,
        seed: int = 0,
        nodes: Kind = "auto",
        weight_key: str = "num-examples",
        arrays_key: str = "arrays",
        config_key: str = "config",
        min_nodes: int = 1,
        report: str = "updates",
        memories: Path | None = None,
        **server: Any,
    ) -> None:
        """`server` are further settings of the Server.

        A schedule ends with the last of `rounds`, where that is known. `memories` is the folder for
        what a sampler wants kept, by default a temporary one.
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
        self.optimizer, self.weighting = optimizer, weighting or Samples()
        server["guard"] = guard_of(server.get("guard", Guard()), sampler)
        made = Server(
            values,
            optimizer=optimizer.within(rounds) if rounds else optimizer,
            weighting=sampler.weighting or self.weighting,
            distances=sampler.distances,
            **server,
        )
        super().__init__(made, sampler, seed, memories=memories)
        self.order = tuple(arrays)
        self.directory = Directory(nodes)
        self.weight_key, self.arrays_key, self.config_key = weight_key, arrays_key, config_key
        self.min_nodes, self.report = min_nodes, report
        self._memo: dict[Any, Any] = {}  # of the pools
        self._changed = False  # whether another strategy has changed a model that was stepped
        self._started = False  # whether the nodes of a first round were there

    def info(self, text: str, *values: Any) -> None:
        log.info(text, *values)

    def warn(self, text: str, *values: Any) -> None:
        log.warn(text, *values)

    def lost(self, text: str) -> None:
        log.only_in_flower(text)

    def name(self, client: int) -> int | str:
        return self.directory.name(client)

    def elsewhere(self) -> dict[str, Any]:
        layout = self.server.layout
        return {
            "data": Nodes(told_apart_by=self.directory.setting),
            "model": Arrays(tensors=len(layout.names), parameters=sum(layout.numels)),
            "client": ClientApp(),
            "engine": Engine(
                report=self.report,
                weighted_by=self.weight_key,
                min_clients=self.server.min_clients,
            ),
        }

    def transport_state(self) -> dict[str, Any]:
        return {"nodes": self.directory.state()}

    def restore_transport(self, saved: Mapping[str, Any]) -> None:
        self.directory.restore(saved["nodes"])

    def arrays(self) -> ArrayRecord:
        """The model as Flower sends it: names, order and dtypes of the initial arrays."""
        return self._in_order(self.server.state)

    def averaged(self) -> ArrayRecord:
        """The average of the models so far, in the same form."""
        if isinstance(self.server.average, NoAverage):
            raise ValueError("this strategy keeps no average: give it one, FedGLAD(average=EMA())")
        if self._changed:
            raise ValueError(
                "there is no average of the models that clients were sent: another strategy has "
                "changed them, as one that adds noise does"
            )
        return self._in_order(self.server.averaged)

    def _in_order(self, state: Mapping[str, Tensor]) -> ArrayRecord:
        values = {name: state[name].numpy() for name in self.order}
        return ArrayRecord({n: Array(np.asarray(v, order="C")) for n, v in values.items()})

    def take_over(self, arrays: ArrayRecord) -> None:
        """Goes on from a model that somebody else may have changed."""
        state, sent = self.server.state_dict(), self.server.state
        for name, value in decoded(arrays).items():
            for part in ("params", "buffers"):
                if (old := state["tensors"].get(f"{part}/{name}")) is None:
                    continue
                if value.shape != old.shape:
                    raise ValueError(
                        f"arrays have shape {value.shape} where {tuple(old.shape)} was"
                    )
                new = as_tensor(value)
                self._changed |= not torch.equal(sent[name], new.to(sent[name].dtype))
                old.copy_(new)
        self.server.load_state_dict(state)

    def wait(self, grid: Grid, timeout: float) -> str | None:
        """Waits until there are enough nodes; returns the reason if there are not.

        A run begins when there is a whole cohort, whenever that is; one that goes on waits a while
        for all those it had. Later it goes on with whoever is left, if they are enough.
        """
        least = wanted = max(self.min_nodes, 1)
        longest = timeout
        if not self._started:
            wanted = max(least, self.sampler.clients_per_round, self.directory.expected)
            timeout = min(timeout, ANSWER_TIMEOUT)
            longest = timeout if self.directory.expected else math.inf
        count = wait_for(grid, wanted, longest)
        if count < least:
            return f"{count} nodes are connected, at least {least} are needed"
        self._started = True
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
        content = RecordDict({self.arrays_key: arrays, self.config_key: config})
        return [Message(content, self.directory.online[k], kind) for k in clients]

    def train(
        self, grid: Grid, config: ConfigRecord, timeout: float, retries: int
    ) -> TrainingResult:
        """Round t: asks a cohort, and other ones if too few replies are good."""
        retried: list[str] = []
        failed: dict[int, dict[str, Any]] = {}
        while True:
            if reason := self.wait(grid, timeout):
                result = TrainingResult(Record("skipped", reason))
                break
            cohort = self.choose(grid, timeout, len(retried), failed)
            log.info(
                "Round %d: asked %d of %d nodes",
                self.t + 1,
                len(cohort.ids),
                len(self.directory.online),
            )
            messages = self.messages(cohort.ids, self.arrays(), config, MessageType.TRAIN)
            replies = exchange(grid, messages, timeout)
            del messages  # and with them the arrays, while replies come in
            result = self.aggregate(cohort, replies, timeout)
            if result.record.stepped or len(retried) == retries:
                break
            log.warn("Round %d is tried again: %s", self.t + 1, result.record.reason)
            retried.append(result.record.reason or "")
            failed |= {c["id"]: c for c in result.record.clients if "rejected" in c}
        result.retried, result.failed = retried, list(failed.values())
        return result

    def aggregate(
        self, cohort: Cohort, messages: Iterator[Message | None], waited: float
    ) -> TrainingResult:
        """One step by the replies, which come in the cohort's order."""
        replies: dict[int, Reply] = {}
        updates = self._updates(cohort, messages, waited, replies)
        norms = partial(self._reported_norms, replies) if self.report == "norms" else None
        population = len(self.directory.names)
        record, alarm = self.step(cohort.ids, updates, population=population, norms=norms)
        contents: list[RecordDict] = []
        for client in record.clients:
            if "rejected" in client:
                name = self.directory.name(client["id"])
                log.warn("Round %d: client %s left out: %s", self.t + 1, name, client["rejected"])
            else:
                contents.append(replies[client["id"]][1])
        return TrainingResult(record, contents, alarm)

    def evaluators(self, grid: Grid, fraction: float, least: int, timeout: float) -> list[int]:
        """Who tests the model: a share of the connected, at least so many, drawn by the round."""
        self.directory.refresh(grid, timeout)
        online = sorted(self.directory.online)
        r = min(max(int(len(online) * fraction), least), len(online))
        return stream(self.seed, "evaluators", self.t).choice(online, r, replace=False).tolist()

    def evaluations(
        self, clients: Sequence[int], messages: Iterator[Message | None], waited: float
    ) -> list[RecordDict]:
        """The usable replies of those who tested the model."""
        usable: list[tuple[float, RecordDict]] = []
        for client, message in zip(clients, messages, strict=True):
            try:
                metrics, content = read(message, waited)
                usable.append((weight_of(metrics, self.weight_key), content))
            except Unusable as reason:
                name = self.directory.name(client)
                log.warn("Round %d: client %s did not evaluate: %s", self.t + 1, name, reason)
        most = largest_usual([weight for weight, _ in usable])
        return [content for weight, content in usable if weight <= most]

    def _updates(
        self,
        cohort: Cohort,
        messages: Iterator[Message | None],
        waited: float,
        replies: dict[int, Reply],
    ) -> Iterator[Update | Failure]:
        """The cohort's updates, each let go before the next is pulled; `replies` gets the rest."""
        for k, client in enumerate(cohort.ids):
            message = next(messages)
            try:
                metrics, _ = replies[client] = read(message, waited)
                weight = weight_of(metrics, self.weight_key)
                if cohort.weights is not None:
                    weight = cohort.weights[k]
                assert message is not None
                model = decoded(only(message.content, ArrayRecord))  # views of the reply's bytes
                update = Update(model=model, weight=weight, client=client, loss=loss_of(metrics))
            except Unusable as reason:
                update = Failure(client, str(reason))
            model = message = None
            yield update
            del update

    def _reported_norms(
        self, replies: Mapping[int, Reply], update: Update | Failure
    ) -> list[float] | None:
        """The squared norms of the parameters, of those of all arrays that a client reports."""
        if isinstance(update, Failure) or not isinstance(update.client, int):
            return None
        reported = replies[update.client][0].get(NORMS)
        if not isinstance(reported, list):
            return None
        norms = [float(value) for value in reported]
        if len(norms) != len(self.order):
            return norms  # the server rejects them
        by_name = dict(zip(self.order, norms, strict=True))
        return [by_name[name] for name in self.server.layout.names]

    def _losses(self, grid: Grid, clients: Sequence[int], timeout: float) -> list[float]:
        """The loss at θ of clients, NaN where it cannot be had."""
        messages = self.messages(clients, self.arrays(), ConfigRecord(), MessageType.EVALUATE)
        losses: list[float] = []
        for message in exchange(grid, messages, timeout):
            try:
                loss = loss_of(read(message, timeout)[0])
            except Unusable:
                loss = None
            losses.append(math.nan if loss is None else loss)
        return losses
