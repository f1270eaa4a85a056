"""A federation in progress: everything that changes from round to round, and one round of it."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from fedglad.core.checkpoint import whole_number
from fedglad.core.guard import Guard
from fedglad.federation import session as federation
from fedglad.federation.metrics import loss_of
from fedglad.federation.session import TrainingResult
from fedglad.flower import log
from fedglad.flower.masked import MaskedRound, refuse_masked
from fedglad.flower.mods import NORMS
from fedglad.flower.nodes import ANSWER_TIMEOUT, Directory, Kind, NoSize, largest_usual
from fedglad.flower.replies import (
    Reply,
    Unusable,
    decoded,
    is_gone,
    only,
    read,
    weight_of,
)
from fedglad.flower.settings import Arrays, ClientApp, Engine, Nodes, Share
from fedglad.flower.transport import HURRIED, Found, Replies, is_simulated, wait_for
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import ACCURACY, Failure, Score, Update
from fedglad.rng import stream
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.server.server import Server
from fedglad.simulation.driver import guard_of
from fedglad.weights import Samples

REST = 10  # rounds in which a node that fails again and again is not asked; then twice as many


class TooFewNodes(RuntimeError):
    """Fewer nodes are connected than the run needs; the message says how to bring more."""


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
        resumable: bool = False,
        patience: float = 3600.0,
        quarantine: int = 0,
        score: Score = ACCURACY,
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
        if report == "secure":
            refuse_masked(self)
        self.masked: MaskedRound | None = None  # the round in progress, if updates are masked
        self.order = tuple(arrays)
        keeps = bool(self.stores) or type(sampler).observe is not Sampler.observe
        self.directory = Directory(nodes, known=resumable or keeps or sampler.needs_sizes)
        self.weight_key, self.arrays_key, self.config_key = weight_key, arrays_key, config_key
        self.min_nodes, self.report = min_nodes, report
        self.score = score
        self.patience = patience
        self.quarantine = quarantine
        self.gone: set[int] = set()  # clients whose nodes were gone in the last attempt
        self.hurried: set[int] = set()  # who was slower than a quorum
        self.failed = Counter[int]()  # how many rounds in a row a client has not answered
        self.resting: dict[int, int] = {}  # client to the round in which it is asked again
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
        state: dict[str, Any] = {"nodes": self.directory.state()}
        if self.failed:
            state["failed"] = {str(client): count for client, count in self.failed.items()}
            state["resting"] = {str(client): t for client, t in self.resting.items()}
        return state

    def restore_transport(self, saved: Mapping[str, Any]) -> None:
        failed, resting = (
            {int(client): whole_number(value) for client, value in saved.get(part, {}).items()}
            for part in ("failed", "resting")
        )
        self.directory.restore(saved["nodes"])
        self.failed, self.resting = Counter(failed), resting

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
        self._changed |= self.server.put(decoded(arrays))

    def wait(self, grid: Grid, timeout: float) -> str | None:
        """Waits until there are enough nodes; returns the reason if there are not.

        A run begins once the least are there, for whom it has patience; one that goes on also waits
        a while for all those it had. Raises TooFewNodes if a run cannot begin.
        """
        least = max(self.min_nodes, 1)
        if self._started:
            count = wait_for(grid, least, timeout)
        else:
            count = wait_for(grid, least, self.patience, first=True)
            if count < least:
                raise TooFewNodes(self.few(grid, count))
            if self.directory.expected > count:
                timeout = min(timeout, ANSWER_TIMEOUT)
                count = wait_for(grid, self.directory.expected, timeout)
        if count < least:
            return f"{count} nodes are connected, at least {least} are needed"
        if not self._started and count < self.sampler.clients_per_round:
            log.info(
                "%d nodes are connected and %d were to take part in a round: it is all of them. %s",
                count,
                self.sampler.clients_per_round,
                self._more(grid, self.sampler.clients_per_round),
            )
        self._started = True
        self.directory.refresh(grid, timeout)
        return None if self.directory.online else "no node can be told apart"

    def few(self, grid: Grid, count: int) -> str:
        """What is said where a run lacks nodes."""
        least = max(self.min_nodes, 1)
        waited = "" if is_simulated(grid) else f" after {self.patience:g} s"
        return (
            f"{count} nodes are connected{waited}, at least {least} are needed "
            f"(min_available_nodes). {self._more(grid, least)}"
        )

    def _more(self, grid: Grid, wanted: int) -> str:
        """How to bring so many nodes."""
        if is_simulated(grid):
            federation = grid.run.federation_id or "@none/default"
            return (
                "More simulated ones: flwr federation simulation-config "
                f"{federation} --num-supernodes {wanted}, then flwr run again"
            )
        return "More take part as soon as they connect: start them with flower-supernode"

    def choose(
        self, grid: Grid, timeout: float, attempt: int = 0, avoid: Collection[int] = ()
    ) -> Cohort:
        """The cohort of round t; another one for every attempt, of others if there are."""
        online = set(self.directory.online)
        resting = {client for client, until in self.resting.items() if until > self.t}
        awake = online - resting
        awake = awake if len(awake) >= self.server.min_clients else online
        usable = awake - set(avoid) or awake
        sizeless: list[str] = []
        while True:
            try:
                pool = self._pool(grid, timeout, sorted(usable))
                cohort = self.draw(pool, lambda ids: self._losses(grid, ids, timeout), attempt)
                break
            except NoSize as error:
                sizeless.append(self.directory.label(error.client))
                usable = usable - {error.client}
                if not usable:
                    raise
        if sizeless:
            names = ", ".join(sizeless[:5]) + (" …" if sizeless[5:] else "")
            log.warn("%d clients do not tell a size and are left out: %s", len(sizeless), names)
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

    def cohort_of(self, grid: Grid, nodes: Sequence[int], drawn: Cohort | None) -> Cohort:
        """The clients behind nodes that a strategy has chosen itself, with the weights drawn."""
        clients = {node: client for client, node in self.directory.online.items()}
        if not clients.keys() >= set(nodes):
            self.directory.refresh(grid, ANSWER_TIMEOUT)
            clients = {node: client for client, node in self.directory.online.items()}
        ids = tuple(clients[node] for node in nodes if node in clients)
        if len(set(ids)) != len(nodes):
            raise ValueError("configure_train: two messages to one node, or to an unknown one")
        if drawn is None or drawn.weights is None or not set(ids) <= set(drawn.ids):
            return Cohort(ids)
        weights = dict(zip(drawn.ids, drawn.weights, strict=True))
        return Cohort(ids, tuple(weights[client] for client in ids))

    def aggregate(self, cohort: Cohort, found: Iterator[tuple[int, Found]]) -> TrainingResult:
        """One step by the replies, each with its place in the cohort."""
        if self.masked is not None:
            masked, self.masked = self.masked, None
            result = masked.close(cohort, found)
            if result.record.stepped:
                self._note_failures(masked.cohort, masked.accepted)
            return result
        replies: dict[int, Reply] = {}
        self.gone.clear()
        self.hurried.clear()
        updates = self._updates(cohort, found, replies)
        norms = partial(self._reported_norms, replies) if self.report == "norms" else None
        population = len(self.directory.names)
        record, alarm = self.step(cohort.ids, updates, population=population, norms=norms)
        contents: list[RecordDict] = []
        for client in record.clients:
            if "rejected" in client:
                name = self.directory.label(client["id"])
                log.warn("Round %d: client %s left out: %s", self.t + 1, name, client["rejected"])
            else:
                contents.append(replies[client["id"]][1])
        if record.stepped:
            self._note_failures(cohort, replies)
        return TrainingResult(record, contents, alarm)

    def _note_failures(self, cohort: Cohort, replies: Collection[int]) -> None:
        """Who has not answered, while others did; after `quarantine` such rounds it rests."""
        for client in cohort.ids:
            if client in replies:
                del self.failed[client]
                self.resting.pop(client, None)
                continue
            if client in self.hurried:
                continue  # it was not given its time
            self.failed[client] += 1
            times = self.failed[client] - self.quarantine
            if self.quarantine and times >= 0:
                rest = REST * 2 ** min(times, 10)
                self.resting[client] = self.t + 1 + rest
                log.warn(
                    "Client %s has not answered in %d rounds in a row: it rests for %d rounds",
                    self.directory.label(client),
                    self.failed[client],
                    rest,
                )

    def line(
        self,
        result: TrainingResult,
        metrics: Mapping[str, Mapping[str, Any] | None],
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        line = super().line(result, metrics, seconds)
        if resting := sorted(k for k, until in self.resting.items() if until > self.t):
            line["resting"] = [self.name(k) for k in resting]
        return line

    def evaluators(self, grid: Grid, fraction: float, least: int, timeout: float) -> list[int]:
        """Who tests the model: a share of the connected, at least so many, drawn by the round."""
        self.directory.refresh(grid, timeout)
        online = sorted(self.directory.online)
        r = min(max(int(len(online) * fraction), least), len(online))
        return stream(self.seed, "evaluators", self.t).choice(online, r, replace=False).tolist()

    def evaluations(
        self, clients: Sequence[int], found: Iterator[tuple[int, Found]]
    ) -> list[RecordDict]:
        """The usable replies of those who tested the model."""
        usable: list[tuple[float, RecordDict]] = []
        for place, message in found:
            try:
                metrics, content = read(message)
                usable.append((weight_of(metrics, self.weight_key), content))
            except Unusable as reason:
                name = self.directory.label(clients[place])
                log.warn("Round %d: client %s did not evaluate: %s", self.t + 1, name, reason)
        most = largest_usual([weight for weight, _ in usable])
        return [content for weight, content in usable if weight <= most]

    def _updates(
        self,
        cohort: Cohort,
        found: Iterator[tuple[int, Found]],
        replies: dict[int, Reply],
    ) -> Iterator[Update | Failure]:
        """The cohort's updates, each let go before the next is pulled; `replies` gets the rest."""
        for place, message in found:
            client = cohort.ids[place]
            if is_gone(message):
                self.gone.add(client)
            if isinstance(message, str) and message.endswith(HURRIED):
                self.hurried.add(client)
            try:
                metrics, _ = replies[client] = read(message)
                weight = weight_of(metrics, self.weight_key)
                if cohort.weights is not None:
                    weight = cohort.weights[place]
                assert not isinstance(message, str)
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
        for _, message in Replies(grid, messages, timeout).each():
            try:
                loss = loss_of(read(message)[0])
            except Unusable:
                loss = None
            losses.append(math.nan if loss is None else loss)
        return losses
