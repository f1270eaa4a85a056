"""One client after the other in this process: the reference, and the one to debug with."""

from collections.abc import Sequence

from fedglad.clients.method import Memory
from fedglad.core import batch
from fedglad.core.threads import threads
from fedglad.simulation.engines.base import Held, Packed, Updates, Worker
from fedglad.tasks.base import chunk_of


class SerialEngine:
    """Trains with one thread, as every engine does, so that the bits are the same in all."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.deltas = worker.rows()

    def train(self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory) -> Updates:
        copied = packed[0].clone(), {name: value.clone() for name, value in packed[1].items()}
        call = self.worker.call(t, copied, sent)
        yield from self.worker.groups(call, cohort, self.deltas)

    def evaluate(self, packed: Packed, held: Held = "test") -> dict[str, float]:
        n, worker = batch.length(self.worker.held[held][0]), self.worker
        starts = range(0, n, chunk_of(worker.bench.task))
        with threads(1):
            return worker.finish([worker.evaluate(packed, start, held) for start in starts])

    def evaluate_clients(
        self, packed: Packed, clients: Sequence[int]
    ) -> list[dict[str, float] | None]:
        with threads(1):
            return [self.worker.evaluate_client(packed, client) for client in clients]

    def losses(self, clients: Sequence[int], packed: Packed) -> list[float]:
        with threads(1):
            return [self.worker.loss(packed, client) for client in clients]

    def close(self) -> None:
        pass
