"""A pool of worker processes, one thread each: the default.

θ goes out, and updates come back, through shared memory; the pipes carry only who is to train. A
worker that dies is replaced and its clients are trained again: as their randomness is named by
round and client, to the same bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedglad.clients.method import Memory
from fedglad.clients.workbench import Workbench
from fedglad.core import batch
from fedglad.core.processes import TRIES, Lost, Pool, Serve
from fedglad.core.threads import threads
from fedglad.records import Bundle, Failure, Several
from fedglad.simulation.engines.base import (
    GROUP_BYTES,
    Held,
    Job,
    Packed,
    Report,
    Updates,
    Worker,
    as_group,
    held_sets,
    logger,
)
from fedglad.tasks.base import Sums, added, chunk_of, finished

SHARE = 4
"""Groups a worker gets in a round, if there are enough clients: none waits long at the end."""


class LocalEngine:
    """At most 2 × workers groups of updates are in flight, whatever the cohort."""

    def __init__(
        self,
        job: Job,
        workers: int,
        devices: Sequence[torch.device],
        client_timeout: float,
    ) -> None:
        self.job = job
        self.workers = workers
        self.client_timeout = client_timeout
        bench = Workbench(job.build(), job.task)  # refuses what cannot be trained
        layout, self.task = bench.layout, bench.task
        self.theta = layout.zeros().share_memory_()
        self.sent = {name: layout.zeros().share_memory_() for name in job.client.hears}
        size = layout.size * self.theta.element_size()
        # A client that hangs must be told from its neighbours.
        self.largest = 1 if client_timeout else max(1, GROUP_BYTES // size)
        shape = (2 * self.workers, self.largest, layout.size)
        self.slots = torch.zeros(shape, dtype=layout.dtype).share_memory_()
        sends = shape if job.client.server else (0,)
        self.extras = torch.zeros(sends, dtype=layout.dtype).share_memory_()
        deaths = torch.zeros(shape[:2], dtype=torch.int32).share_memory_()
        self.deaths = deaths.numpy()
        held = held_sets(job.data, layout.dtype)
        self.sizes = {name: batch.length(x) for name, (x, _) in held.items()}
        shared = Shared(job, devices, self.theta, self.sent, self.slots, self.extras, deaths)
        self.pool = Pool(self.workers, shared)

    def train(self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory) -> Updates:
        self.theta.copy_(packed[0])
        for name, vector in self.sent.items():
            vector.copy_(sent[name]) if name in sent else vector.zero_()
        self.deaths[:] = 0
        size = min(self.largest, max(1, -(-len(cohort) // (SHARE * self.workers))))
        groups = [cohort[k : k + size] for k in range(0, len(cohort), size)]
        buffers = _arrays(packed[1])
        messages = [("train", (t, buffers, self._versions(group))) for group in groups]
        answers = self.pool.run(messages, self.client_timeout, tries=TRIES * size + 1)
        with threads(1):  # also for the caller, between groups: the workers have the cores
            for k, (clients, results) in enumerate(zip(groups, answers, strict=True)):
                slot = k % len(self.slots)
                yield self._group(slot, clients, results)
                self.deaths[slot] = 0

    def _group(self, slot: int, clients: Sequence[int], results: Any) -> Several | Bundle:
        if isinstance(results, Lost):
            return Several(Failure(client, results.reason) for client in clients)
        reports: list[Report | Failure] = []
        for at, answer in enumerate(results):
            if isinstance(answer, OSError):
                raise answer
            if not isinstance(answer, Failure):
                *rest, has_extra = answer
                answer = Report(*rest, extra=self.extras[slot, at] if has_extra else None)
            reports.append(answer)
        return as_group(self.job, clients, self.slots[slot], reports)

    def evaluate(self, packed: Packed, held: Held = "test") -> dict[str, float]:
        n = self.sizes[held]
        sums = self._run(
            "evaluate", packed, [(held, start) for start in range(0, n, chunk_of(self.task))]
        )
        if lost := next((s for s in sums if isinstance(s, Lost)), None):
            raise RuntimeError(f"the {held} set could not be evaluated: {lost.reason}")
        return finished(self.task, added(sums))

    def evaluate_clients(
        self, packed: Packed, clients: Sequence[int]
    ) -> list[dict[str, float] | None]:
        found: list[dict[str, float] | None] = []
        # In a list of one: a pool takes None for a worker that has died.
        answers = self._run("client", packed, self._versions(clients))
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, Lost):
                logger.warning("client %s could not be tested: %s", client, answer.reason)
            found.append(None if isinstance(answer, Lost) else answer[0])
        return found

    def losses(self, clients: Sequence[int], packed: Packed) -> list[float]:
        losses = self._run("loss", packed, self._versions(clients))
        return [math.nan if isinstance(loss, Lost) else loss for loss in losses]

    def _versions(self, clients: Sequence[int]) -> list[tuple[int, int]]:
        """Each client with the version of its memory, which only this process knows."""
        memories = self.job.memories
        return [(client, memories.version(client) if memories else 0) for client in clients]

    def _run(self, work: str, packed: Packed, items: Sequence[Any]) -> list[Any]:
        self.theta.copy_(packed[0])
        buffers = _arrays(packed[1])
        return list(self.pool.run([(work, (buffers, item)) for item in items]))

    def close(self) -> None:
        self.pool.close()


@dataclass(frozen=True, eq=False)
class Shared:
    """What the workers have of the driver: the job, and the memory through which they talk.

    | field | meaning |
    |---|---|
    | `devices` | worker k computes on the k-th, and after the last on the first again |
    | `theta`, `sent` | what a round's clients are sent |
    | `slots`, `extras` | room for the updates of a group of clients, and what methods send along |
    | `deaths` | how often each one's worker has died: it must not take its group along |
    """

    job: Job
    devices: Sequence[torch.device]
    theta: Tensor
    sent: Memory
    slots: Tensor
    extras: Tensor
    deaths: Tensor

    def __call__(self, number: int) -> Serve:
        """Runs in each worker."""
        worker = Worker(self.job, self.devices[number % len(self.devices)])
        all_deaths = self.deaths.numpy()

        def train(slot: int, t: int, buffers: Any, clients: Sequence[tuple[int, int]]) -> list[Any]:
            call = worker.call(t, (self.theta, _tensors(buffers)), self.sent)
            deltas, deaths = self.slots[slot, : len(clients)].unbind(), all_deaths[slot]
            answers: list[Any] = []
            for at, (client, version) in enumerate(clients):
                if deaths[at] >= TRIES:
                    answers.append(Failure(client, f"its worker died {TRIES} times"))
                    continue
                deaths[at] += 1  # taken back if it lives
                extra = self.extras[slot, at] if len(self.extras) else None
                try:
                    done: Any = worker.train(call, client, deltas[at], extra, version)
                    if isinstance(done, Report):
                        sends = extra is not None and done.extra is not None
                        done = done.steps, done.loss, _arrays(done.buffers or {}), sends
                except OSError as error:
                    done = error
                answers.append(done)
                deaths[at] -= 1
            return answers

        def evaluate(slot: int, buffers: Any, part: tuple[Held, int]) -> Sums:
            held, start = part
            return worker.evaluate((self.theta, _tensors(buffers)), start, held)

        def loss(slot: int, buffers: Any, who: tuple[int, int]) -> float:
            return worker.loss((self.theta, _tensors(buffers)), *who)

        def client(slot: int, buffers: Any, who: tuple[int, int]) -> list[dict[str, float] | None]:
            return [worker.evaluate_client((self.theta, _tensors(buffers)), *who)]

        work = {"train": train, "evaluate": evaluate, "client": client, "loss": loss}
        return lambda slot, message: work[message[0]](slot, *message[1])


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As numpy: pickled as bytes, where torch would open a shared file for each."""
    return {name: value.numpy() for name, value in tensors.items()}


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
