"""A pool of worker processes, one thread each: the default.

θ goes out, and updates come back, through shared memory; the pipes carry only who is to train. A
worker that dies is replaced and its clients are trained again: as their randomness is named by
round and client, to the same bits.
"""

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fedglad.clients.loop import Memory, Result, Workbench
from fedglad.engines import Call, Evaluation, Job, Packed, Worker, as_update
from fedglad.engines.pool import TRIES, Lost, Pool, Serve
from fedglad.records import Failure, Update

GROUP_BYTES = 1 << 20  # tiny updates are asked for in groups of about this size


@dataclass(frozen=True, kw_only=True)
class Local:
    """Worker processes on this machine, one thread each."""

    workers: Annotated[int | Literal["auto"], "processes; auto: one a core"] = "auto"
    client_timeout: Annotated[float, "seconds until a client is given up; 0: never"] = 0

    def __post_init__(self) -> None:
        if self.workers != "auto" and self.workers < 1:
            raise ValueError(f"workers = {self.workers!r}: must be 1 or more, or 'auto'")
        if self.client_timeout < 0:
            raise ValueError(f"client_timeout = {self.client_timeout!r}: must be 0 (never) or more")

    def start(self, job: Job) -> "LocalEngine":
        workers = os.cpu_count() or 1 if self.workers == "auto" else self.workers
        return LocalEngine(job, workers, self.client_timeout)


class LocalEngine:
    """At most 2 × workers groups of updates are in flight, whatever the cohort."""

    def __init__(self, job: Job, workers: int, client_timeout: float) -> None:
        self.job = job
        self.workers = workers
        self.client_timeout = client_timeout
        layout = Workbench(job.build(), job.loss).layout  # refuses what cannot be trained
        self.theta = layout.zeros().share_memory_()
        size = layout.size * self.theta.element_size()
        # A client that hangs must be told from its neighbours.
        self.largest = 1 if client_timeout else max(1, GROUP_BYTES // size)
        shape = (2 * self.workers, self.largest, layout.size)
        self.slots = torch.zeros(shape, dtype=layout.dtype).share_memory_()
        # How often each client's worker has died under it: it must not take its group along.
        self.deaths = torch.zeros(shape[:2], dtype=torch.int32).share_memory_()
        self.test_size = len(job.data.test()[1])
        self.pool = Pool(self.workers, self._begin)

    def train(
        self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory
    ) -> Iterator[Update | Failure]:
        self.theta.copy_(packed[0])
        self.deaths.zero_()
        # Two groups a worker at least, so that none waits long for the other at the end.
        group = min(self.largest, max(1, -(-len(cohort) // (2 * self.workers))))
        groups = [cohort[k : k + group] for k in range(0, len(cohort), group)]
        told = (t, _arrays(packed[1]), _arrays(sent))
        messages = [("train", (*told, clients)) for clients in groups]
        answers = self.pool.run(messages, self.client_timeout, tries=TRIES * group + 1)
        for k, (clients, results) in enumerate(zip(groups, answers, strict=True)):
            for at, client in enumerate(clients):
                result = results if isinstance(results, Lost) else results[at]
                if isinstance(result, Result):
                    result.delta = self.slots[k % len(self.slots), at]
                    yield as_update(self.job, client, result)
                elif isinstance(result, Lost):
                    yield Failure(client, result.reason)
                else:
                    yield Failure(client, *result)
            self.deaths[k % len(self.slots)] = 0

    def evaluate(self, packed: Packed) -> Evaluation:
        self.theta.copy_(packed[0])
        buffers = _arrays(packed[1])
        chunks = range(Worker.chunks(self.test_size))
        sums = list(self.pool.run([("evaluate", (buffers, chunk)) for chunk in chunks]))
        if lost := next((s for s in sums if isinstance(s, Lost)), None):
            raise RuntimeError(f"the test set could not be evaluated: {lost.reason}")
        return Worker.summary(sums, self.test_size)

    def close(self) -> None:
        self.pool.close()

    def _begin(self) -> Serve:
        """Runs in each worker."""
        worker = Worker(self.job)

        def train(slot: int, t: int, buffers: Any, sent: Any, clients: Sequence[int]) -> list[Any]:
            call = Call(t, self.theta, _tensors(buffers), _tensors(sent))
            answers: list[Any] = []
            for at, client in enumerate(clients):
                if self.deaths[slot, at] >= TRIES:
                    answers.append((f"its worker died {TRIES} times",))
                    continue
                self.deaths[slot, at] += 1  # taken back if it lives
                try:
                    result = worker.train(call, client, out=self.slots[slot, at])
                    result.delta = torch.empty(0)  # it is in the slot
                    result.buffers = _arrays(result.buffers)
                    answers.append(result)
                except Exception as error:
                    answers.append((f"{type(error).__name__}: {error}", traceback.format_exc()))
                self.deaths[slot, at] -= 1
            return answers

        def evaluate(slot: int, buffers: Any, chunk: int) -> tuple[float, int]:
            return worker.evaluate(self.theta, _tensors(buffers), chunk)

        work = {"train": train, "evaluate": evaluate}
        return lambda slot, message: work[message[0]](slot, *message[1])


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As numpy: pickled as bytes, where torch would open a shared file for each."""
    return {name: value.numpy() for name, value in tensors.items()}


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
