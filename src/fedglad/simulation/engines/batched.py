"""Clients side by side as one batch of models (torch.func.vmap), for small models.

It pays where calling PyTorch costs more than the arithmetic.
Same mathematics, same batches, other bits: a batched product is summed in another order. Dropout
draws for all clients at once, so a model with dropout trains as with another seed.

Clients need not be of one size. A row of the matrices is a client, those with most steps first, so
that the ones still at work are always the first rows; a batch that is shorter than its neighbours'
is filled up with samples that count for nothing. Where samples of a batch see each other, through a
buffer (batch normalisation) or in a loss that is no mean over samples, nothing is filled up:
clients of equal size go together.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fedglad.clients.local_optimizers import move, slot_names
from fedglad.clients.method import Memory
from fedglad.clients.workbench import seed_torch
from fedglad.core import batch
from fedglad.core.threads import threads
from fedglad.records import Bundle, Failure, Several
from fedglad.rng import stream
from fedglad.simulation.engines.base import Call, Packed, Report, Updates, Worker, as_group
from fedglad.simulation.engines.samples import Batches, Member, fetch
from fedglad.simulation.engines.serial import SerialEngine
from fedglad.tasks.base import ByLoss, ByScores, Task, scores_of, sees_scores_alone
from fedglad.tasks.classification import Classification

GROUP_ELEMENTS = 1 << 22  # parameters, or inputs, of all clients that are trained together
TRIED = 2  # clients and samples that a model is tried out on; few layers can do with one alone


class BatchedEngine(SerialEngine):
    """Trains a group of clients as the rows of matrices; all else is as in the serial engine."""

    def __init__(self, worker: Worker, count: int) -> None:
        super().__init__(worker)
        self.job = worker.job
        self.bench = worker.bench
        self.threads = count
        client, data = self.job.client, self.job.data
        most = max(map(data.size, range(data.clients))) if client.whole else client.batch_size
        inputs = most * sum(leaf[:1].numel() for leaf in batch.leaves(worker.test[0]))
        self.limit = max(1, GROUP_ELEMENTS // max(self.bench.layout.size, inputs))
        model = self.bench.model
        self.own_buffers = dict(model.named_buffers())
        mixing = any(isinstance(module, _BatchNorm) for module in model.modules())
        task = self.bench.task
        self.by_scores = cast(ByScores, task) if sees_scores_alone(task) else None
        by_sample = self.by_scores is not None and self.by_scores.by_sample
        # Whether a sample of a batch may change the others.
        self.mixes = mixing or bool(self.own_buffers) or not by_sample
        self.trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self.whole = _Whole(model, task)
        self.outputs = vmap(self._outputs, randomness="different")
        self.each_loss = vmap(vmap(self._sample_loss))
        self.mean_loss = vmap(self.by_scores.loss_of) if self.by_scores else None
        function = task.function if isinstance(task, ByLoss) else None
        plain = (
            self.by_scores and type(self.by_scores).loss_of is Classification.loss_of
        )  # a subclass may differ
        self.is_cross_entropy = plain or function is cross_entropy
        self.matrices: dict[str, Tensor] = {}

    def train(self, t: int, cohort: Sequence[int], packed: Packed, sent: Memory) -> Updates:
        call = self.worker.call(t, packed, sent)
        for k in range(0, len(cohort), self.limit):
            seed = int(stream(self.job.seed, "batched", t, k).integers(2**63))
            with threads(self.threads):  # also for the caller: small work is quickest on few
                seed_torch(seed, self.worker.device)
                yield self._group(call, cohort[k : k + self.limit])

    def try_out(self) -> None:
        """Raises if the model's gradient on two test samples can be had, but not under vmap."""
        part, device = slice(TRIED), self.worker.device
        x, y = (batch.to(batch.rows_of(tree, part), device) for tree in self.worker.test)
        if not batch.length(x):
            return
        self.bench.model.train()
        with threads(self.threads), torch.random.fork_rng(devices=[]):
            try:
                return self._try_side_by_side(min(TRIED, self.limit), x, y)
            except Exception as error:
                with suppress(Exception):  # clients that fail together are trained one by one
                    return self._try_side_by_side(1, x, y)
                try:
                    inputs = self.worker.prepare(x, True)
                    self.bench.task.loss(self.bench.model, (inputs, y)).backward()
                except Exception:
                    return None  # it is not vmap that fails: each client will, or not, for itself
                raise ValueError(
                    "engine.name = batched puts clients side by side with vmap, which cannot train "
                    "this model: use engine.name = local, which can "
                    f"({_reason(error).partition('. ')[0]})"
                ) from error

    def _try_side_by_side(self, k: int, x: Any, y: Any) -> None:
        values = self._views(torch.stack([self.bench.w] * k))
        buffers = {name: torch.stack([value] * k) for name, value in self.own_buffers.items()}
        x, y = (
            batch.tree_map(lambda leaf: torch.stack([leaf] * k), tree)
            for tree in (self.worker.prepare(x, True), y)
        )
        self._gradient(values, buffers, x, y, None)

    def _group(self, call: Call, clients: Sequence[int]) -> Several | Bundle:
        self.bench.load(call.theta, call.buffers)
        self.bench.model.train()
        deltas = self._matrix("deltas", len(clients))
        reports: dict[int, Report | Failure] = {}
        members: list[Member] = []
        samples = fetch(self.job.data, clients, self.worker.dtype)
        for place, (client, data) in enumerate(zip(clients, samples, strict=True)):
            if isinstance(data, Exception):
                reports[place] = _failure(client, data)
            else:
                members.append(
                    Member(place, client, *data, self._batches(call.t, client, len(data[2])))
                )
        for alike in self._alike(members):
            reports |= self._try(call, alike, deltas)
        return as_group(self.job, clients, deltas.cpu(), [reports[k] for k in range(len(clients))])

    def _batches(self, t: int, client: int, n: int) -> list[np.ndarray | slice]:
        settings = self.job.client.of_round(t)
        if n <= settings.batch_size:  # all of it every time: the order changes nothing
            return [slice(None)] * (settings.steps or settings.epochs)
        rng = stream(self.job.seed, "client", t, client)
        rng.bit_generator.random_raw()  # dropout's seed elsewhere: the batches are the same
        return list(settings.batches(n, settings.order(self.job.seed, client) or rng))

    def _alike(self, members: list[Member]) -> list[list[Member]]:
        """Those that can be trained together, most steps first."""
        groups: dict[Any, list[Member]] = {}
        if not self.mixes and members and all(m.x is members[0].x for m in members):
            groups[None] = members
        else:
            for member in members:
                n = len(member.rows) if self.mixes else 0
                groups.setdefault((n, *member.kind()), []).append(member)
        return [sorted(g, key=lambda m: -len(m.batches)) for g in groups.values() if g]

    def _try(
        self, call: Call, members: list[Member], deltas: Tensor
    ) -> dict[int, Report | Failure]:
        """Trains them together; if that fails, one by one, so that each fails for itself."""
        try:
            return self._train(call, members, deltas)
        except OSError:  # a memory could not be written: no client's fault
            raise
        except Exception as error:
            if len(members) == 1:
                return {members[0].place: _failure(members[0].client, error)}
            reports: dict[int, Report | Failure] = {}
            for member in members:
                reports |= self._try(call, [member], deltas)
            return reports

    def _train(
        self, call: Call, members: list[Member], deltas: Tensor
    ) -> dict[int, Report | Failure]:
        client, bench, theta, k = call.client, self.bench, call.theta, len(members)
        totals = [len(member.batches) for member in members]
        batches = Batches(members, self.worker.device)
        w, grad = self._matrix("w", k).copy_(theta), self._matrix("grad", k)
        values, grads = self._views(w), self._views(grad)
        buffers = {
            name: torch.stack([call.buffers.get(name, value)] * k)
            for name, value in self.own_buffers.items()
        }
        slots = {name: self._matrix(name, k).zero_() for name in slot_names(client)}
        memory = self._memory(members, theta)
        memory |= {name: self._matrix(f"scratch {name}", k).zero_() for name in client.scratch}
        losses = torch.zeros(k, device=w.device)
        for step in range(totals[0]):
            now = slice(sum(total > step for total in totals))  # the rows still at work
            x, y, weight = batches.take(step, now.stop)
            x = self._prepared(x)
            loss, new, left = self._gradient(_rows(values, now), _rows(buffers, now), x, y, weight)
            losses[now] += loss
            for name, value in left.items():
                buffers[name][now] = value.detach()
            grad[now] = 0
            for name, value in zip(self.trained, new, strict=True):
                grads[name][now] = value
            client.correct(grad[now], w[now], theta, _rows(memory, now), call.sent)
            if client.clip_norm:
                norm = torch.linalg.vector_norm(grad[now], dim=1, keepdim=True)
                most = client.clip_norm
                grad[now].mul_(torch.where(norm > most, most / (norm + 1e-6), 1.0))
            for total, rows in _runs(totals[now]):
                rate = client.rate(step, total)
                move(client, w[rows], grad[rows], _rows(slots, rows), rate, step)
        delta = torch.sub(theta, w, out=w)
        reports: dict[int, Report | Failure] = {}
        for total, rows in _runs(totals):
            kept, extra = client.finish(delta[rows], total, _rows(memory, rows), call.sent)
            self._remember(call.t, members[rows], kept)
            extra = None if extra is None else extra.expand_as(delta[rows]).clone()
            pairs = zip(members[rows], (losses[rows] / total).tolist(), strict=True)
            reports |= {member.place: Report(total, loss) for member, loss in pairs}
            for row, member in enumerate(
                members[rows] if bench.buffers or extra is not None else []
            ):
                report = cast(Report, reports[member.place])
                report.buffers = {n: buffers[n][rows][row].cpu() for n in bench.buffers}
                report.extra = None if extra is None else extra[row].cpu()
        places = [member.place for member in members]  # only now: `finish` may change a delta
        deltas[slice(None) if places == list(range(len(deltas))) else places] = delta
        return reports

    def _prepared(self, x: Any) -> Any:
        """The model's inputs (client, sample) of stored ones."""
        shape = batch.leaves(x)[0].shape[:2]
        flat = batch.tree_map(lambda leaf: leaf.flatten(0, 1), x)
        prepared = self.worker.prepare(flat, True)
        return batch.tree_map(lambda leaf: leaf.unflatten(0, shape), prepared)

    def _gradient(
        self, values: Memory, buffers: Memory, x: Any, y: Any, weight: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Memory]:
        """Every client's loss, the gradients of the trained tensors, and the buffers after it."""
        values = {name: value.detach() for name, value in values.items()}
        wanted = [values[name].requires_grad_() for name in self.trained]
        samples = (x,) if y is None else (x, y)
        outputs, left = self.outputs(values, buffers, samples)
        loss = self._loss(outputs, y, weight) if self.by_scores else outputs
        # A client's loss depends on its own row alone, so this is every client's gradient.
        new = torch.autograd.grad(loss.sum(), wanted, materialize_grads=True)
        return loss.detach(), new, left

    def _memory(self, members: list[Member], theta: Tensor) -> Memory:
        memories, names = self.job.memories, self.job.client.remembers
        if memories is None:
            return {}
        start = self.job.client.start(theta.cpu(), self.bench.zeros.cpu())
        held = [memories.read(m.client, memories.version(m.client)) or start for m in members]
        return {
            n: torch.stack([vectors[n] for vectors in held]).to(self.worker.device) for n in names
        }

    def _remember(self, t: int, members: list[Member], memory: Memory) -> None:
        if self.job.memories:
            for row, member in enumerate(members):
                vectors = {n: v[row if v.dim() > 1 else ...].cpu() for n, v in memory.items()}
                self.job.memories.propose(member.client, t, vectors)

    def _matrix(self, name: str, k: int) -> Tensor:
        """k rows of memory that is used again in the next group: new pages would cost more."""
        matrix = self.matrices.get(name)
        if matrix is None or len(matrix) < k:
            layout = self.bench.layout
            matrix = torch.empty(k, layout.size, dtype=layout.dtype, device=layout.device)
            self.matrices[name] = matrix
        return matrix[:k]

    def _views(self, matrix: Tensor) -> dict[str, Tensor]:
        """The named tensors of a matrix of packed vectors, stacked."""
        layout = self.bench.layout
        places = zip(layout.names, layout.starts, layout.numels, layout.shapes, strict=True)
        return {n: matrix[:, s : s + size].view(-1, *shape) for n, s, size, shape in places}

    def _outputs(self, params: Memory, buffers: Memory, samples: Any) -> tuple[Any, Memory]:
        """The model's scores, or the loss of a task that does not say how it is made of them."""
        if self.by_scores and not buffers and isinstance(samples[0], Tensor):
            outputs = functional_call(self.bench.model, params, samples[:1])
            return getattr(outputs, "logits", outputs), {}
        named = {f"model.{name}": value for name, value in {**params, **buffers}.items()}
        return functional_call(self.whole, named, samples)

    def _loss(self, scores: Tensor, y: Any, weight: Tensor | None) -> Tensor:
        """Every client's loss: the mean over its samples, or their sum by weight."""
        assert self.mean_loss
        if self.is_cross_entropy and y.dim() == 2 and int(y.min()) >= 0:
            # Without vmap, and along the first dimension: torch is ten times faster at that.
            columns = log_softmax(scores.flatten(0, 1).t(), dim=0)
            each = columns.gather(0, y.view(1, -1)).neg().view_as(y)
        elif self.is_cross_entropy and not y.is_floating_point():
            return _mean_of_targets(scores, y, weight)
        elif weight is None:
            return self.mean_loss(scores, y)
        else:
            each = self.each_loss(scores, y)
        return each.mean(dim=1) if weight is None else (each * weight.to(each.dtype)).sum(dim=1)

    def _sample_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        assert self.by_scores
        return self.by_scores.loss_of(scores.unsqueeze(0), y.unsqueeze(0))


class _Whole(nn.Module):
    """A model that also gives back its buffers as a call leaves them."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, x: Any, y: Any = None) -> tuple[Tensor, Memory]:
        made = (
            scores_of(self.model, x)
            if sees_scores_alone(self.task)
            else self.task.loss(self.model, (x, y))
        )
        return made, dict(self.model.named_buffers())


def _mean_of_targets(scores: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """cross_entropy of every client where some targets do not count (−100): their mean."""
    each = cross_entropy(scores.flatten(0, 1), y.flatten(0, 1), reduction="none").view_as(y)
    counted = y != -100
    if weight is not None:
        counted &= (weight > 0).view(*weight.shape, *[1] * (y.dim() - 2))
    return (each * counted).flatten(1).sum(dim=1) / counted.flatten(1).sum(dim=1)


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
    reason = _reason(error)
    if "vmap" in reason:
        reason += " (what vmap cannot do, engine.name = local can)"
    return Failure(client, reason, "".join(traceback.format_exception(error)))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
