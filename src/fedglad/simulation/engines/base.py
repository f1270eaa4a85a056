"""What every engine has in common: a job, a worker and its bench, groups of updates."""

import copy
import logging
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from fedglad.clients.method import Loss, Memory, Plain, Prepare
from fedglad.clients.workbench import Workbench, as_stored
from fedglad.core import batch
from fedglad.core.layout import twin
from fedglad.core.threads import threads
from fedglad.data.federation import Federation
from fedglad.data.validation import validation_of
from fedglad.records import Bundle, Failure, Several, Update
from fedglad.rng import stream
from fedglad.server.totals import Block
from fedglad.tasks.base import CHUNK as CHUNK
from fedglad.tasks.base import Sums, Task, added, chunk_of, finished, ratio

Packed = tuple[Tensor, Mapping[str, Tensor]]
"""A model as `Server.packed` gives it: the parameters in one vector, and the buffers."""

Held = Literal["test", "validation"]
"""Which samples a model is tested on: clients train on neither."""

logger = logging.getLogger("fedglad")

CPU = torch.device("cpu")
GROUP_BYTES = 1 << 20  # tiny updates are trained, and handed over, in groups of about this size


@dataclass(frozen=True)
class Job:
    """What every worker needs to know: the same for all rounds.

    It can be pickled. `source` opens the same data on another machine; without it they are sent.
    """

    model: nn.Module  # as the run begins; nobody changes it
    data: Federation
    client: Plain
    task: Task | Loss
    seed: int
    memories: Any = None  # `Memories`, or what stands for them, for a method that has them
    source: Callable[[], Federation] | None = None

    def build(self) -> nn.Module:
        """A model of its own."""
        return twin(self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return _job, (values | {"data": None} if self.source else values,)


def _job(values: dict[str, Any]) -> Job:
    if values["data"] is None:
        values["data"] = values["source"]()
    return Job(**values)


@dataclass(frozen=True)
class Call:
    """What is sent to the clients of one round, and what they do in it, at the round's rate."""

    t: int
    client: Plain
    theta: Tensor
    buffers: Mapping[str, Tensor]
    sent: Memory


Updates = Iterator[Several | Bundle]
"""Those of a cohort, in its order, by groups of clients; each valid until the next is asked for."""

Arrivals = Iterator[Several | Bundle | Block]
"""The same, where some may have been added up already."""


class EngineLost(RuntimeError):
    """There is nobody left to train: what was done is saved, and the run can go on later."""


class Engine(Protocol):
    """Trains cohorts, and measures models.

    One that has `sums = True` also takes a `Rule`, and may then yield whole blocks of a cohort as
    their sums: `train(t, cohort, packed, sent, rule)`.
    """

    def train(self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory) -> Updates:
        """The cohort's updates, in its order."""
        ...

    def evaluate(self, packed: Packed, held: Held = "test") -> dict[str, float]:
        """The task's metrics of a model on the test set, or on the validation set."""
        ...

    def evaluate_clients(
        self, packed: Packed, clients: Sequence[int]
    ) -> list[dict[str, float] | None]:
        """The task's metrics of a model on each client's held-out samples; None if it has none."""
        ...

    def losses(self, clients: Sequence[int], packed: Packed) -> list[float]:
        """The mean losses of a model on clients' own samples; NaN for one that fails."""
        ...

    def close(self) -> None:
        """Lets everything go."""
        ...


class Worker:
    """One bench and the work that can be done on it: the same code in every engine."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job = job
        self.device = device
        model = job.build()
        if device.type != "cpu":  # not on what it shares with others
            model = copy.deepcopy(model).to(device)
        self.bench = Workbench(model, job.task)
        self.dtype = self.bench.layout.dtype
        self.held = held_sets(job.data, self.dtype)
        self.test = self.held["test"]
        self.prepare: Prepare = getattr(job.data, "prepare", as_stored)

    def train(
        self,
        call: Call,
        client: int,
        out: Tensor,
        extra: Tensor | None = None,
        version: int | None = None,
    ) -> "Report | Failure":
        """One client's round; `call` is on the device, what the client sends in `out` and `extra`.

        It has the memory of a version, by default the last that this process knows of. If the disk
        fails, it is no client's fault: OSError.
        """
        job, device, memories = self.job, self.device, self.job.memories
        memory = self._memory(client, version)
        try:
            x, y = batch.samples(job.data.client(client), self.dtype)
            result = self.bench.train(
                call.client,
                call.theta,
                call.buffers,
                batch.to(x, device),
                batch.to(y, device),
                stream(job.seed, "client", call.t, client),
                t=call.t,
                order=call.client.order(job.seed, client),
                prepare=self.prepare,
                memory=_on(memory, device),
                sent=call.sent,
                out=out if device.type == "cpu" else None,
            )
            if device.type != "cpu":
                out.copy_(result.delta)
                result.buffers, result.memory = _on(result.buffers, CPU), _on(result.memory, CPU)
                result.extra = None if result.extra is None else result.extra.cpu()
            if extra is not None and result.extra is not None:
                result.extra = extra.copy_(result.extra)
        except Exception as error:
            return Failure(client, f"{type(error).__name__}: {error}", traceback.format_exc())
        if memories:
            memories.propose(client, call.t, result.memory)
        return Report(result.steps, result.loss, result.buffers, result.extra)

    def _memory(self, client: int, version: int | None) -> Memory:
        """What a client remembers; nothing before its first round."""
        if not (memories := self.job.memories):
            return {}
        return memories.read(client, memories.version(client) if version is None else version)

    def rows(self) -> Tensor:
        """Room for the updates of a group of clients."""
        layout = self.bench.layout
        rows = max(1, GROUP_BYTES // (layout.size * layout.dtype.itemsize))
        return torch.empty(rows, layout.size, dtype=layout.dtype)

    def groups(
        self, call: Call, clients: Sequence[int], deltas: Tensor
    ) -> Iterator[Several | Bundle]:
        """The clients' updates in their order, by groups that have room in `deltas`."""
        for k in range(0, len(clients), len(deltas)):
            group = clients[k : k + len(deltas)]
            with threads(1):
                pairs = zip(group, deltas[: len(group)], strict=True)
                reports = [self.train(call, client, out) for client, out in pairs]
            yield as_group(self.job, group, deltas, reports)

    def call(self, t: int, packed: Packed, sent: Memory) -> Call:
        """What the clients of a round are sent, on the device."""
        device, zeros = self.device, self.bench.zeros
        client = self.job.client.of_round(t)
        sent = {name: sent.get(name, zeros) for name in client.hears}
        return Call(t, client, packed[0].to(device), _on(packed[1], device), _on(sent, device))

    def evaluate(self, packed: Packed, start: int, held: Held = "test") -> Sums:
        """The sums of the task's metrics on the chunk of a held-out set that begins there."""
        self.bench.load(*packed)
        return self._measure(*self.held[held], start)

    def finish(self, chunks: Sequence[Sums]) -> dict[str, float]:
        """The task's metrics of a set that was measured by chunks."""
        return finished(self.bench.task, added(chunks))

    def evaluate_client(
        self, packed: Packed, client: int, version: int | None = None
    ) -> dict[str, float] | None:
        """The task's metrics on a client's held-out samples; None if they cannot be had.

        If the method has personal parameters or models, it is the client's own that is tested.
        """
        own = self._own(packed, client, version, tested=True)
        try:
            data: Any = self.job.data
            held = data.client_test(client)
            if held is None or not batch.length(held[0]):
                return None
            x, y = batch.samples(held, self.dtype)
            self.bench.load(*own)
            return self.finish(self._all(x, y))
        except Exception as error:
            logger.warning("client %s could not be tested: %s", client, error)
            return None

    def loss(self, packed: Packed, client: int, version: int | None = None) -> float:
        """The mean loss on a client's own samples; NaN if they cannot be had.

        With personal parameters it is that of the model which the client would train.
        """
        own = self._own(packed, client, version)
        try:
            x, y = batch.samples(self.job.data.client(client), self.dtype)
            self.bench.load(*own)
            return ratio(*added(self._all(x, y))["loss"])
        except Exception as error:
            logger.warning("client %s could not tell its loss: %s", client, error)
            return math.nan

    def _own(
        self, packed: Packed, client: int, version: int | None, *, tested: bool = False
    ) -> Packed:
        """A model with what the client has in its place, or the one that it is tested with."""
        method = self.job.client
        if not (method.tests_own if tested else method.has_personal):
            return packed
        theta, buffers = packed[0].to(self.device), _on(packed[1], self.device)
        memory = _on(self._memory(client, version), self.device)
        if personal := self.bench.personal_of(method):
            theta, buffers = personal.placed(theta, buffers, memory)
        if tested:
            memory = memory or method.start(theta, self.bench.zeros)
            theta, buffers = method.personalised(theta, buffers, memory)
        return theta, buffers

    def _all(self, x: Any, y: Any) -> list[Sums]:
        starts = range(0, batch.length(x), chunk_of(self.bench.task))
        return [self._measure(x, y, start) for start in starts]

    def _measure(self, x: Any, y: Any, start: int) -> Sums:
        part = slice(start, start + chunk_of(self.bench.task))
        x, y = (batch.to(batch.rows_of(tree, part), self.device) for tree in (x, y))
        return measure(self.bench.model, self.bench.task, self.prepare(x, False), y)


def held_sets(data: Federation, dtype: torch.dtype) -> dict[Held, tuple[Any, Any]]:
    """The test set, and the validation set of a federation that has one, for models of a dtype."""
    sets: dict[Held, tuple[Any, Any]] = {"test": batch.samples(data.test(), dtype)}
    if (validation := validation_of(data)) is not None:
        sets["validation"] = batch.samples(validation, dtype)
    return sets


@torch.no_grad()
def measure(model: nn.Module, task: Task, x: Any, y: Any) -> Sums:
    """The sums of a model's metrics on samples; the loss is always among them."""
    sums = dict(task.metrics(model.eval(), (x, y)))
    if "loss" not in sums:
        n = batch.length(x if y is None else y)
        sums["loss"] = float(task.loss(model, (x, y))) * n, n
    return sums


@dataclass(slots=True)
class Report:
    """What a client has after its round beside its row of the deltas."""

    steps: int
    loss: float
    buffers: Mapping[str, Any] | None = None
    extra: Tensor | None = None


def as_group(
    job: Job, clients: Sequence[int], deltas: Tensor, reports: Sequence[Report | Failure]
) -> Several | Bundle:
    """The clients' results as the server takes them."""
    plain = [r for r in reports if isinstance(r, Report) and not r.buffers and r.extra is None]
    if len(plain) == len(reports):
        return Bundle(
            deltas=deltas[: len(plain)],
            weights=[job.data.size(client) for client in clients],
            clients=list(clients),
            steps=[report.steps for report in plain],
            losses=[report.loss for report in plain],
        )
    rows = zip(clients, deltas[: len(clients)], reports, strict=True)
    return Several(
        report
        if isinstance(report, Failure)
        else Update(
            delta,
            weight=job.data.size(client),
            client=client,
            steps=report.steps,
            loss=report.loss,
            extra=report.extra,
            buffers=report.buffers or None,
        )
        for client, delta, report in rows
    )


def find_device(name: str) -> torch.device:
    """The device of a name; auto: a GPU where there is one."""
    # Asked through the driver's library: CUDA itself must not start before workers are forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device = {name!r}: choose auto, cpu, cuda, cuda:1, ...") from None
    count = getattr(getattr(torch, device.type, None), "device_count", lambda: 0)
    if device.type != "cpu" and (device.index or 0) >= count():
        raise ValueError(f"device = {name!r}: there is none here; choose auto or cpu")
    return device


def find_devices(name: str) -> list[torch.device]:
    """Those that workers are spread over: all GPUs for `auto` and a kind without a number.

    >>> find_devices("cpu")
    [device(type='cpu')]
    """
    device = find_device(name)
    if device.type == "cpu" or ":" in name:
        return [device]
    count = getattr(torch, device.type).device_count()
    return [torch.device(device.type, k) for k in range(count)] or [device]


def _on(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in tensors.items()}
