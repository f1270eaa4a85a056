"""One client after the other in this process: the reference, and the one to debug with."""

import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedglad.clients.loop import Memory
from fedglad.engines import Call, Evaluation, Job, Packed, Worker, as_update
from fedglad.records import Failure, Update


@dataclass(frozen=True, kw_only=True)
class Serial:
    """One client after the other in this process."""

    def start(self, job: Job) -> "SerialEngine":
        return SerialEngine(job)


class SerialEngine:
    """Trains with one thread, as every engine does, so that the bits are the same in all."""

    def __init__(self, job: Job) -> None:
        self.worker = Worker(job)

    def train(
        self,
        t: int,
        cohort: Sequence[int],
        packed: Packed,
        sent: Memory,
    ) -> Iterator[Update | Failure]:
        theta, buffers = packed[0].clone(), {n: b.clone() for n, b in packed[1].items()}
        call = Call(t, theta, buffers, sent)
        for client in cohort:
            try:
                with one_thread():
                    result = self.worker.train(call, client)
            except Exception as error:
                yield Failure(client, f"{type(error).__name__}: {error}", traceback.format_exc())
            else:
                yield as_update(self.worker.job, client, result)

    def evaluate(self, packed: Packed) -> Evaluation:
        with one_thread():
            n = len(self.worker.test[1])
            sums = [self.worker.evaluate(*packed, chunk) for chunk in range(Worker.chunks(n))]
            return Worker.summary(sums, n)

    def close(self) -> None:
        pass


@contextmanager
def one_thread() -> Generator[None]:
    """Work that must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
