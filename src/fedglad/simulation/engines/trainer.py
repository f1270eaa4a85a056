"""What runs in a worker of a cluster: it has the job, and is sent models and who is to train."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedglad.clients.method import Memory
from fedglad.core import malloc
from fedglad.core.layout import as_tensor
from fedglad.data.federation import fingerprint
from fedglad.records import POSITIONS, Bundle, Failure, Several
from fedglad.server.rule import Rule
from fedglad.server.totals import Block
from fedglad.simulation.engines.base import CPU, Call, Held, Job, Packed, Worker
from fedglad.tasks.base import Sums

Arrays = dict[str, Any]
Member = tuple[int, Arrays]
"""A client and what it remembers."""


@dataclass(frozen=True)
class Sent:
    """What goes to all workers once a round. Arrays, which several processes read in one place."""

    t: int
    theta: Any
    buffers: Arrays
    sent: Arrays = field(default_factory=dict[str, Any])
    rule: Rule | None = None

    @classmethod
    def of(cls, packed: Packed, t: int = 0, sent: Memory | None = None, rule: Any = None) -> "Sent":
        """By tensors that may change afterwards."""
        return cls(t, packed[0].cpu().numpy(), arrays(packed[1]), arrays(sent or {}), rule)

    @property
    def packed(self) -> Packed:
        """The model."""
        return as_tensor(self.theta), tensors(self.buffers)


@dataclass
class Carried:
    """In place of `Memories`: what clients remember comes and goes with the messages."""

    known: dict[int, Memory] = field(default_factory=dict[int, Memory])
    new: dict[int, Arrays] = field(default_factory=dict[int, Any])

    def version(self, client: int) -> int:
        return 1

    def read(self, client: int, version: int) -> Memory:
        """A copy: the message's own arrays cannot be written."""
        return {name: value.clone() for name, value in self.known.get(client, {}).items()}

    def propose(self, client: int, t: int, memory: Memory) -> None:
        self.new[client] = {name: value.cpu().numpy().copy() for name, value in memory.items()}

    def carry(self, members: Sequence[Member]) -> list[int]:
        """Takes what clients remember, and says who they are."""
        self.known, self.new = {client: tensors(memory) for client, memory in members}, {}
        return [client for client, _ in members]


@dataclass
class Trained:
    """What a message's clients have sent: as their sums, block by block, or one by one."""

    groups: list[Block | Several | Bundle]
    memories: dict[int, Arrays]

    def opened(self) -> list[Block | Several | Bundle]:
        """The groups with tensors again."""
        return [each if isinstance(each, Block) else _opened(each) for each in self.groups]


@dataclass(frozen=True)
class About:
    """What the driver wants to know of a worker, and of itself, to compare them."""

    node: str
    process: int
    cpu: str
    data: str

    @classmethod
    def here(cls, data: Any) -> "About":
        return cls(platform.node(), os.getpid(), cpu_type(), fingerprint(data))


class Trainer:
    """The same work as in every engine, and the sums of whole blocks where they are wanted."""

    def __init__(self, job: Job, *, gpu: bool = False) -> None:
        torch.set_num_threads(1)
        malloc.keep()
        self.carried = Carried()
        job = replace(job, memories=self.carried if job.memories is not None else None)
        self.worker = Worker(job, given_device(gpu))
        self.deltas = self.worker.rows()

    def about(self) -> About:
        """Where it runs, and on what data."""
        return About.here(self.worker.job.data)

    def train(self, sent: Sent, members: Sequence[Member], *, summed: bool) -> Trained:
        """The clients' updates; summed, if they are whole blocks of the cohort."""
        call = self.worker.call(sent.t, sent.packed, tensors(sent.sent))
        clients = self.carried.carry(members)
        if summed and sent.rule:
            blocks = (clients[k : k + POSITIONS] for k in range(0, len(clients), POSITIONS))
            return Trained([self._block(call, sent.rule, some) for some in blocks], self._new())
        groups = self.worker.groups(call, clients, self.deltas)
        return Trained([_closed(group) for group in groups], self._new())

    def evaluate(self, sent: Sent, held: Held, starts: Sequence[int]) -> list[Sums]:
        """The sums of the task's metrics on chunks of a held-out set."""
        return [self.worker.evaluate(sent.packed, start, held) for start in starts]

    def evaluate_clients(
        self, sent: Sent, members: Sequence[Member]
    ) -> list[dict[str, float] | None]:
        """The task's metrics on clients' held-out samples."""
        clients = self.carried.carry(members)
        return [self.worker.evaluate_client(sent.packed, client) for client in clients]

    def losses(self, sent: Sent, members: Sequence[Member]) -> list[float]:
        """The mean losses on clients' own samples."""
        clients = self.carried.carry(members)
        return [self.worker.loss(sent.packed, client) for client in clients]

    def _block(self, call: Call, rule: Rule, clients: Sequence[int]) -> Block:
        groups = self.worker.groups(call, clients, self.deltas)
        weighed = (weighted(group, rule.weights) for group in groups)
        return rule.block(weighed, self.worker.bench.layout, call.theta, call.buffers)

    def _new(self) -> dict[int, Arrays]:
        return self.carried.new


def weighted(group: Several | Bundle, weights: Mapping[int, float] | None) -> Several | Bundle:
    """The updates with the weights that a sampler gives their clients, if it gives them any."""
    if weights is None:
        return group
    if isinstance(group, Bundle):
        return replace(group, weights=[weights[client] for client in group.clients])
    return Several(
        item if isinstance(item, Failure) else replace(item, weight=weights[int(item.client or 0)])
        for item in group
    )


def _closed(group: Several | Bundle) -> Several | Bundle:
    """A group to be sent: arrays, and copies of what lies in memory that is used again."""
    return _mapped(group, lambda tensor: tensor.cpu().numpy().copy())


def _opened(group: Several | Bundle) -> Several | Bundle:
    return _mapped(group, as_tensor)


def _mapped(group: Several | Bundle, change: Callable[[Any], Any]) -> Several | Bundle:
    if isinstance(group, Bundle):
        return replace(group, deltas=change(group.deltas))
    return Several(
        item
        if isinstance(item, Failure)
        else replace(
            item,
            delta=change(item.delta),
            extra=None if item.extra is None else change(item.extra),
            buffers=item.buffers and {name: change(x) for name, x in item.buffers.items()},
        )
        for item in group
    )


def arrays(named: Mapping[str, Tensor]) -> Arrays:
    """As NumPy arrays, which can be read where they lie."""
    return {name: value.cpu().numpy() for name, value in named.items()}


def tensors(named: Mapping[str, Any]) -> Memory:
    """Views of arrays, which are not to be written."""
    return {name: as_tensor(value) for name, value in named.items()}


def given_device(gpu: bool) -> torch.device:
    """The GPU that Ray has given this worker, the only one that it sees; or the CPU."""
    if gpu and not torch.cuda.is_available():
        raise ValueError(
            f"Ray gave a GPU of {platform.node()} to a worker, but PyTorch sees none there: "
            "install a build of PyTorch for CUDA on it, or set engine.gpus = 0"
        )
    return torch.device("cuda") if gpu else CPU


def cpu_type() -> str:
    """What the processor calls itself: others may give other bits."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
