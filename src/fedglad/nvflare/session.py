"""A federation in progress over NVFlare: everything that changes from round to round, and a round.

Knows nothing of NVFlare: the controller sends and receives for it.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedglad.core.guard import Guard
from fedglad.core.layout import as_tensor
from fedglad.federation import session as federation
from fedglad.federation.log import Log
from fedglad.federation.metrics import loss_of
from fedglad.federation.session import TrainingResult
from fedglad.nvflare.replies import Unusable, in_form_of, metrics_of, update_of, weight_of
from fedglad.nvflare.settings import Engine, Everyone, Executor, Params, Sites
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import Failure, Record, Update
from fedglad.samplers.base import Cohort, Pool, Sampler
from fedglad.server.server import Server
from fedglad.simulation.driver import guard_of
from fedglad.weights import Samples

LOGGER = "nvflare.app_common.workflows.FedGLAD"  # a name whose lines NVFlare shows
_log = Log(LOGGER)
VALIDATE = "validate"


class Transport(Protocol):
    """What a session needs of the controller that it is part of."""

    def sites(self) -> list[str]:
        """The names of the sites that are connected."""
        ...

    def ask(
        self, sites: Sequence[str], params: Mapping[str, Any], t: int, task: str
    ) -> Iterator[Any]:
        """The sites' FLModels in this order; a text in place of one says why there is none."""
        ...


class Session(federation.Session):
    """A federation whose clients are NVFlare's sites: it draws, asks and takes replies in."""

    def __init__(
        self,
        params: Mapping[str, Any],
        transport: Transport,
        *,
        sampler: Sampler = Everyone(),  # noqa: B008 - frozen
        optimizer: Optimizer = SGD(),  # noqa: B008 - frozen
        weighting: Samples | None = None,
        rounds: int | None = None,
        seed: int = 0,
        task: str = "train",
        weighted_by: str | None = "NUM_STEPS_CURRENT_ROUND",
        sizes: Mapping[str, int] | None = None,
        memories: Path | None = None,
        **server: Any,
    ) -> None:
        """`server` are further settings of the Server.

        A schedule ends with the last of `rounds`, where that is known. `memories` is the folder for
        what a sampler wants kept, by default a temporary one.
        """
        _check(params)
        self.optimizer, self.weighting = optimizer, weighting or Samples()
        server["guard"] = guard_of(server.get("guard", Guard()), sampler)
        made = Server(
            {name: as_tensor(value).cpu() for name, value in params.items()},
            optimizer=optimizer.within(rounds) if rounds else optimizer,
            weighting=sampler.weighting or self.weighting,
            distances=sampler.distances,
            **server,
        )
        super().__init__(made, sampler, seed, memories=memories)
        self.transport, self.task, self.weighted_by = transport, task, weighted_by
        self.arrays = {name: not hasattr(value, "detach") for name, value in params.items()}
        self.sizes = dict(sizes or {})
        self.names: list[str] = []  # a client is its place here
        self._memo: dict[Any, Any] = {}  # of the pools
        self._without: set[str] = set()  # sites that the log already says have no weight, or size

    def info(self, text: str, *values: Any) -> None:
        _log.info(text, *values)

    def warn(self, text: str, *values: Any) -> None:
        _log.warn(text, *values)

    def lost(self, text: str) -> None:
        _log.lost(text)

    def name(self, client: int) -> str:
        return self.names[client]

    def elsewhere(self) -> dict[str, Any]:
        layout, least = self.server.layout, self.server.min_clients
        weighted_by = self.weighted_by or ""
        return {
            "data": Sites(),
            "model": Params(tensors=len(layout.names), parameters=sum(layout.numels)),
            "client": Executor(),
            "engine": Engine(task=self.task, weighted_by=weighted_by, min_clients=least),
        }

    def transport_state(self) -> dict[str, Any]:
        return {"nodes": {"names": self.names, "count": len(self.names)}}

    def restore_transport(self, saved: Mapping[str, Any]) -> None:
        names = saved.get("nodes", {}).get("names", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("the names of its sites are not a list of texts")
        self.names = list(names)

    def params(self) -> dict[str, Any]:
        """The model as NVFlare sends it: names, order and kinds of the initial params; copies."""
        return in_form_of(self.server.state, self.arrays)

    def averaged(self) -> dict[str, Any]:
        """The average of the models so far, in the same form."""
        if not self.server.has_average:
            raise ValueError("this controller keeps no average: give it one, average=EMA()")
        return in_form_of(self.server.averaged, self.arrays)

    def train(self, retries: int) -> TrainingResult:
        """Round t: asks a cohort, and other ones if too few replies are good."""
        retried: list[str] = []
        failed: dict[int, dict[str, Any]] = {}
        while True:
            online = self._online()
            if len(online) < (least := max(self.server.min_clients, 1)):
                reason = f"{len(online)} sites are connected, at least {least} are needed"
                result = TrainingResult(Record("skipped", reason))
                break
            cohort = self._choose(online, len(retried), failed)
            self.info("Round %d: asked %d of %d sites", self.t + 1, len(cohort.ids), len(online))
            result = self._aggregate(cohort)
            if result.record.stepped or len(retried) == retries:
                break
            self.warn("Round %d is tried again: %s", self.t + 1, result.record.reason)
            retried.append(result.record.reason or "")
            failed |= {c["id"]: c for c in result.record.clients if "rejected" in c}
        result.retried, result.failed = retried, list(failed.values())
        return result

    def _online(self) -> list[int]:
        """The clients that are connected; sites that are new get the next places, by name."""
        there = self.transport.sites()
        self.names += sorted(set(there) - set(self.names), key=_natural)
        places = {name: k for k, name in enumerate(self.names)}
        online = sorted(places[name] for name in set(there))
        if not self.sampler.needs_sizes:
            return online
        for name in (self.names[k] for k in online if self.names[k] not in self.sizes):
            self._say_once(name, "site %s is left out: the sampler needs its size, give sizes")
        return [k for k in online if self.names[k] in self.sizes]

    def _choose(self, online: list[int], attempt: int, avoid: Collection[int]) -> Cohort:
        """The cohort of round t; another one for every attempt, of others if there are."""
        usable = [k for k in online if k not in avoid] or online
        self._memo.pop("sizes", None)  # of others, if sites came or went
        pool = Pool(
            len(self.names),
            lambda k: self.sizes.get(self.names[k], 1),
            lambda k: None,
            self.last,
            ids=None if len(usable) == len(self.names) else np.array(usable, dtype=np.int64),
            memo=self._memo,
        )
        return self.draw(pool, self._losses, attempt)

    def _aggregate(self, cohort: Cohort) -> TrainingResult:
        """One step by the cohort's replies, which are looked at in its order."""
        metrics: dict[int, tuple[float, dict[str, float]]] = {}
        updates = self._updates(cohort, metrics)
        record, alarm = self.step(cohort.ids, updates, population=len(self.names))
        contents: list[Any] = []
        for client in record.clients:
            if "rejected" in client:
                name = self.name(client["id"])
                self.warn("Round %d: site %s left out: %s", self.t + 1, name, client["rejected"])
            else:
                contents.append(metrics[client["id"]])
        return TrainingResult(record, contents, alarm)

    def _updates(
        self, cohort: Cohort, metrics: dict[int, tuple[float, dict[str, float]]]
    ) -> Iterator[Update | Failure]:
        """The cohort's updates, each let go before the next; `metrics` gets what they report."""
        sent, layout = self.server.state, self.server.layout
        sites = [self.names[k] for k in cohort.ids]
        replies = self.transport.ask(sites, self.params(), self.t, self.task)
        for k, client in enumerate(cohort.ids):
            reply = next(replies)
            try:
                if isinstance(reply, str):
                    raise Unusable(reply)
                weight = weight_of(reply, self.weighted_by)
                if self.weighted_by and self.weighted_by not in (reply.meta or {}):
                    self._say_once(sites[k], "site %s says no " + self.weighted_by + ": it has 1")
                metrics[client] = weight, metrics_of(reply)
                if cohort.weights is not None:
                    weight = cohort.weights[k]
                update = update_of(reply, client, sent, layout, weight)
            except Unusable as reason:
                update = Failure(client, str(reason))
            reply = None
            yield update
            del update

    def _losses(self, clients: Sequence[int]) -> list[float]:
        """The loss at θ of clients, NaN where it cannot be had."""
        sites = [self.names[k] for k in clients]
        replies = self.transport.ask(sites, self.params(), self.t, VALIDATE)
        read = (None if isinstance(one, str) else loss_of(metrics_of(one)) for one in replies)
        return [math.nan if loss is None else loss for loss in read]

    def _say_once(self, site: str, text: str) -> None:
        if site not in self._without:
            self._without.add(site)
            self.warn(text, site)


def _check(params: Mapping[str, Any]) -> None:
    """Refuses an initial model from which nothing can be learned."""
    if not params:
        raise ValueError(
            "there is no initial model: give the job a persistor that has one, or "
            "FedGLAD(model={name: array})"
        )
    for name, value in params.items():
        try:
            tensor = as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the initial model's {name!r} is no array: {error}") from None
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"the initial model: {name!r} holds NaN or inf, nothing can be learned"
            )


def _natural(name: str) -> list[Any]:
    """
    >>> sorted(["site-10", "site-9"], key=_natural)
    ['site-9', 'site-10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
