"""One client after the other in this process: the reference, and the one to debug with."""

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fedglad.clients.loop import Memory
from fedglad.engines import (
    DEVICE,
    GROUP_BYTES,
    Call,
    Evaluation,
    Group,
    Job,
    Packed,
    Worker,
    as_update,
    find_device,
    threads,
)
from fedglad.records import Failure, Update


@dataclass(frozen=True, kw_only=True)
class Serial:
    """One client after the other in this process."""

    device: Annotated[str, DEVICE] = "auto"

    def start(self, job: Job) -> "SerialEngine":
        return SerialEngine(Worker(job, find_device(self.device)))


class SerialEngine:
    """Trains with one thread, as every engine does, so that the bits are the same in all."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        layout = worker.bench.layout
        self.group = max(1, GROUP_BYTES // (layout.size * layout.dtype.itemsize))

    def train(self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory) -> Iterator[Group]:
        own = packed[0].clone(), {name: value.clone() for name, value in packed[1].items()}
        call = self.worker.call(t, own, sent)
        for k in range(0, len(cohort), self.group):
            with threads(1):
                group = [self._client(call, client) for client in cohort[k : k + self.group]]
            yield group

    def _client(self, call: Call, client: int) -> Update | Failure:
        memories = self.worker.job.memories
        try:
            result = self.worker.train(call, client, memories.version(client) if memories else 0)
        except Exception as error:
            return Failure(client, f"{type(error).__name__}: {error}", traceback.format_exc())
        return as_update(self.worker.job, client, result)

    def evaluate(self, packed: Packed) -> Evaluation:
        with threads(1):
            n = len(self.worker.test[1])
            sums = [self.worker.evaluate(*packed, chunk) for chunk in range(Worker.chunks(n))]
            return Worker.summary(sums, n)

    def close(self) -> None:
        pass
