"""Engines: where clients train. serial is the reference, local a pool of processes.

May import records, rng, layout, clients and samplers; imported by the round loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedglad.clients.loop import Loss, Memory, Plain, Result, Workbench
from fedglad.records import Failure, Update
from fedglad.rng import stream

Packed = tuple[Tensor, Mapping[str, Tensor]]
"""A model as `Server.packed` gives it: the parameters in one vector, and the buffers."""

CHUNK = 1000  # test samples evaluated at a time: sums over fixed chunks, so the bits are the same


class Federation(Protocol):
    """What an engine needs of the data."""

    clients: int

    def size(self, k: int) -> int: ...
    def client(self, k: int) -> tuple[Tensor, Tensor]: ...
    def test(self) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Job:
    """What every worker needs to know: the same for all rounds."""

    build: Callable[[], nn.Module]
    data: Federation
    client: Plain
    loss: Loss
    seed: int


@dataclass(frozen=True)
class Call:
    """What is sent to the clients of one round."""

    t: int
    theta: Tensor
    buffers: Mapping[str, Tensor]
    sent: Memory


@dataclass(frozen=True)
class Evaluation:
    """The global model on the test set."""

    loss: float
    accuracy: float


class Engine(Protocol):
    def train(
        self,
        t: int,
        cohort: Sequence[int],
        packed: Packed,
        sent: Memory,
    ) -> Iterator[Update | Failure]:
        """The cohort's updates, in its order."""
        ...

    def evaluate(self, packed: Packed) -> Evaluation:
        """Loss and accuracy of a model on the test set."""
        ...

    def close(self) -> None:
        """Lets everything go."""
        ...


class Worker:
    """One bench and the work that can be done on it: the same code in every engine."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.bench = Workbench(job.build(), job.loss)
        self.test = job.data.test()

    def train(self, call: Call, client: int, out: Tensor | None = None) -> Result:
        x, y = self.job.data.client(client)
        rng = stream(self.job.seed, "client", call.t, client)
        return self.bench.train(
            self.job.client, call.theta, call.buffers, x, y, rng, sent=call.sent, out=out
        )

    @staticmethod
    def chunks(test_size: int) -> int:
        return -(-test_size // CHUNK)

    @torch.no_grad()
    def evaluate(
        self, theta: Tensor, buffers: Mapping[str, Tensor], chunk: int
    ) -> tuple[float, int]:
        """Sum of losses and number of hits on one chunk of the test set."""
        self.bench.load(theta, buffers)
        model = self.bench.model.eval()
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        x, y = self.test[0][part], self.test[1][part]
        scores = model(x)
        return float(self.job.loss(scores, y)) * len(y), int((scores.argmax(dim=1) == y).sum())

    @staticmethod
    def summary(sums: Sequence[tuple[float, int]], n: int) -> Evaluation:
        return Evaluation(sum(s for s, _ in sums) / n, sum(hits for _, hits in sums) / n)


def as_update(job: Job, client: int, result: Result) -> Update:
    """A client's result as the server takes it."""
    return Update(
        result.delta,
        weight=job.data.size(client),
        client=client,
        steps=result.steps,
        loss=result.loss,
        extra=result.extra,
        buffers=result.buffers or None,
    )


REGISTRY: dict[str, Any] = {
    "serial": "fedglad.engines.serial:Serial",
    "local": "fedglad.engines.local:Local",
}
