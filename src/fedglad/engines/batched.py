"""Clients side by side as one batch of models (torch.func.vmap), for small models.

It pays where calling PyTorch costs more than the arithmetic.
Same mathematics, same batches, other bits: a batched product is summed in another order. Dropout
draws for all clients at once, so a model with dropout trains as with another seed.

Clients need not be of one size. A row of the matrices is a client, those with most steps first, so
that the ones still at work are always the first rows; a batch that is shorter than its neighbours'
is filled up with samples that count for nothing. Where samples of a batch see each other through a
buffer (batch normalisation) nothing is filled up: clients of equal size go together.
"""

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedglad.clients.loop import Memory, Result, move, seed_torch, start_slots
from fedglad.engines import (
    DEVICE,
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
from fedglad.engines.serial import SerialEngine
from fedglad.records import Failure, Update
from fedglad.rng import stream

GROUP_ELEMENTS = 1 << 22  # of one matrix: so many parameters of all clients trained together


@dataclass(frozen=True, kw_only=True)
class Batched:
    """All clients of a cohort together (vmap), for small models; other bits than the others."""

    device: Annotated[str, DEVICE] = "auto"
    threads: Annotated[int, "of torch; the bits may depend on it"] = 1

    exact = False  # a run's name tells it from the same run in another engine

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads = {self.threads!r}: must be 1 or more")

    def start(self, job: Job) -> "BatchedEngine":
        return BatchedEngine(Worker(job, find_device(self.device)), self.threads)


@dataclass
class Member:
    """A client that trains: its place in the group, its samples and its batches."""

    place: int
    client: int
    x: Tensor
    y: Tensor
    batches: list[np.ndarray]


class BatchedEngine:
    """Trains a group of clients as the rows of matrices."""

    def __init__(self, worker: Worker, count: int) -> None:
        self.worker = worker
        self.job = worker.job
        self.bench = worker.bench
        self.threads = count
        self.limit = max(1, GROUP_ELEMENTS // self.bench.layout.size)
        self.plain = vmap(grad_and_value(self._loss), randomness="different")
        self.weighted = vmap(grad_and_value(self._weighted_loss), randomness="different")

    def train(self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory) -> Iterator[Group]:
        call = self.worker.call(t, packed, sent)
        for k in range(0, len(cohort), self.limit):
            seed = int(stream(self.job.seed, "batched", t, k).integers(2**63))
            with threads(self.threads):
                seed_torch(seed, self.worker.device)
                group = self._group(call, cohort[k : k + self.limit])
            yield group

    def evaluate(self, packed: Packed) -> Evaluation:
        return SerialEngine(self.worker).evaluate(packed)

    def close(self) -> None:
        pass

    def _group(self, call: Call, clients: Sequence[int]) -> Group:
        found: dict[int, Update | Failure] = {}
        members: list[Member] = []
        for place, client in enumerate(clients):
            try:
                members.append(self._member(call.t, place, client))
            except Exception as error:
                found[place] = _failure(client, error)
        self.bench.load(call.theta, call.buffers)
        self.bench.model.train()
        for alike in self._alike(members):
            found |= self._try(call, alike)
        return [found[place] for place in range(len(clients))]

    def _member(self, t: int, place: int, client: int) -> Member:
        x, y = self.job.data.client(client)
        if not len(y):
            raise ValueError("the client has no samples")
        rng = stream(self.job.seed, "client", t, client)
        rng.integers(2**63)  # dropout's seed in the other engines: the batches are the same
        return Member(place, client, x, y, list(self.job.client.batches(len(y), rng)))

    def _alike(self, members: list[Member]) -> list[list[Member]]:
        """Those that can be trained together, most steps first."""

        def kind(member: Member) -> tuple[Any, ...]:
            whole = len(member.y) if self.bench.buffers else 0
            return (*member.x.shape[1:], str(member.x.dtype), whole)

        ordered = sorted(members, key=lambda m: (kind(m), -len(m.batches)))
        return [list(group) for _, group in groupby(ordered, kind)]

    def _try(self, call: Call, members: list[Member]) -> dict[int, Update | Failure]:
        """Trains them together; if that fails, one by one, so that each fails for itself."""
        try:
            return self._train(call, members)
        except Exception as error:
            if len(members) == 1:
                return {members[0].place: _failure(members[0].client, error)}
            found: dict[int, Update | Failure] = {}
            for member in members:
                found |= self._try(call, [member])
            return found

    def _train(self, call: Call, members: list[Member]) -> dict[int, Update | Failure]:
        client, bench, theta, k = self.job.client, self.bench, call.theta, len(members)
        totals = [len(member.batches) for member in members]
        batches = _Batches(members, self.worker.device)
        w = theta.repeat(k, 1)
        grad = torch.zeros_like(w)
        values, grads = self._views(w), self._views(grad)
        buffers = {n: torch.stack([call.buffers[n]] * k) for n in bench.buffers}
        slots = start_slots(client, w)
        memory = self._memory(members)
        sent = call.sent or dict.fromkeys(client.hears, bench.zeros)
        losses = torch.zeros(k, device=w.device)
        for step in range(totals[0]):
            now = slice(sum(total > step for total in totals))  # the rows still at work
            x, y, weight = batches.take(step, now.stop)
            inputs = _rows(values, now), _rows(buffers, now), x, y
            if weight is None:
                found, loss = self.plain(*inputs)
            else:
                found, loss = self.weighted(*inputs, weight)
            losses[now] += loss.detach()
            for name, target in grads.items():
                target[now] = found[name]
            client.correct(grad[now], w[now], theta, _rows(memory, now), sent)
            if client.clip_norm:
                _clip(grad[now], client.clip_norm)
            for total, rows in _runs(totals[now]):
                rate = client.rate(step, total)
                move(client, w[rows], grad[rows], _rows(slots, rows), rate, step)
            for span in bench.frozen:
                w[now, span] = theta[span]
        return self._updates(members, theta - w, losses, buffers, memory, sent, call.t)

    def _updates(
        self,
        members: list[Member],
        delta: Tensor,
        losses: Tensor,
        buffers: dict[str, Tensor],
        memory: Memory,
        sent: Memory,
        t: int,
    ) -> dict[int, Update | Failure]:
        found: dict[int, Update | Failure] = {}
        sums, deltas = losses.tolist(), delta.cpu()
        own = {name: value.cpu().unbind() for name, value in buffers.items()}
        for total, rows in _runs([len(member.batches) for member in members]):
            kept, extra = self.job.client.finish(delta[rows], total, _rows(memory, rows), sent)
            kept = {name: vectors.cpu() for name, vectors in kept.items()}
            extras = None if extra is None else extra.cpu()
            for at, row in enumerate(range(rows.start, rows.stop)):
                client = members[row].client
                if self.job.memories:
                    new = {name: vectors[at].clone() for name, vectors in kept.items()}
                    self.job.memories.propose(client, t, new)
                result = Result(
                    deltas[row],
                    {name: value[row] for name, value in own.items()},
                    total,
                    sums[row] / max(total, 1),
                    extra=None if extras is None else extras[at],
                )
                found[members[row].place] = as_update(self.job, client, result)
        return found

    def _memory(self, members: list[Member]) -> Memory:
        memories, names = self.job.memories, self.job.client.remembers
        if memories is None:
            return {}
        zeros = dict.fromkeys(names, self.bench.zeros.cpu())
        held = [memories.read(m.client, memories.version(m.client)) or zeros for m in members]
        return {n: torch.stack([own[n] for own in held]).to(self.worker.device) for n in names}

    def _views(self, matrix: Tensor) -> dict[str, Tensor]:
        """The named tensors of a matrix of packed vectors, stacked."""
        layout = self.bench.layout
        places = zip(layout.names, layout.starts, layout.numels, layout.shapes, strict=True)
        return {n: matrix[:, s : s + size].view(-1, *shape) for n, s, size, shape in places}

    def _loss(self, params: Memory, buffers: Memory, x: Tensor, y: Tensor) -> Tensor:
        return self.job.loss(functional_call(self.bench.model, {**params, **buffers}, (x,)), y)

    def _weighted_loss(
        self, params: Memory, buffers: Memory, x: Tensor, y: Tensor, weight: Tensor
    ) -> Tensor:
        scores = functional_call(self.bench.model, {**params, **buffers}, (x,))
        return (vmap(self._sample_loss)(scores, y) * weight).sum()

    def _sample_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.job.loss(scores.unsqueeze(0), y.unsqueeze(0))


class _Batches:
    """The clients' samples as one tensor, and which of them a step takes."""

    def __init__(self, members: list[Member], device: torch.device) -> None:
        self.members = members
        self.x = torch.cat([member.x for member in members]).to(device)
        self.y = torch.cat([member.y for member in members]).to(device)
        self.starts = np.cumsum([0, *(len(member.y) for member in members)])

    def take(self, step: int, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs and targets (client, sample) of the first clients, and what each counts for."""
        chosen = [member.batches[step] for member in self.members[:count]]
        sizes = np.array([len(batch) for batch in chosen])
        index = np.zeros((count, sizes.max()), np.int64)
        if sizes.min() == sizes.max():
            np.stack(chosen, out=index)
            weight = None
        else:
            for row, batch in zip(index, chosen, strict=True):
                row[: len(batch)] = batch
            there = np.arange(index.shape[1]) < sizes[:, None]
            weight = torch.from_numpy(there / sizes[:, None]).to(self.x.device, torch.float32)
        rows = torch.from_numpy(index + self.starts[:count, None])
        return self.x[rows], self.y[rows], weight


def _clip(grad: Tensor, most: float) -> None:
    norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    grad.mul_(torch.where(norm > most, most / (norm + 1e-6), 1.0))


def _runs(totals: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Stretches of rows with an equal number of steps."""
    start = 0
    for total, same in groupby(totals):
        end = start + len(list(same))
        yield total, slice(start, end)
        start = end


def _rows(matrices: Memory, rows: slice) -> Memory:
    return {name: matrix[rows] for name, matrix in matrices.items()}


def _failure(client: int, error: Exception) -> Failure:
    said = f"{type(error).__name__}: {error}"
    if "vmap" in said:
        said += " (what vmap cannot do, engine.name = local can)"
    return Failure(client, said, traceback.format_exc())
