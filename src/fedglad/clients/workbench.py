"""The only local training loop: what a client does between receiving θ and sending θ − θ_k.

Parameters and gradients are views into flat vectors, so loading the global model, clipping, the
optimizer's step and the final difference are single operations on one vector.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.local_optimizers import move, slot_names
from fedglad.clients.method import Loss, Memory, Plain, Prepare
from fedglad.core import batch
from fedglad.core.layout import split
from fedglad.tasks.base import Task, as_task

PIECE = 2_000_000  # elements whose squares one float32 sum takes


def as_stored(x: Any, training: bool) -> Any:
    """For data that is ready for the model."""
    return x


@dataclass
class Result:
    """What a client has after its round."""

    delta: Tensor
    buffers: dict[str, Tensor]
    steps: int
    loss: float
    memory: Memory = field(default_factory=dict[str, Tensor])
    extra: Tensor | None = None


class Workbench:
    """A model bound to flat vectors, on which one client after the other trains.

    >>> bench = Workbench(torch.nn.Linear(1, 1, bias=False), loss=torch.nn.functional.mse_loss)
    >>> theta = bench.layout.pack({"weight": torch.ones(1, 1)})
    >>> x, y, rng = torch.ones(4, 1), torch.zeros(4, 1), np.random.default_rng(1)
    >>> result = bench.train(Plain(optimizer="sgd", lr=0.1), theta, {}, x, y, rng)
    >>> bench.layout.views(result.delta)["weight"]  # 0.1 · 2 (1 − 0)
    tensor([[0.2000]])
    """

    def __init__(self, model: nn.Module, loss: Loss | Task = cross_entropy) -> None:
        """`loss` is a function of scores and targets, or a task."""
        self.model = model
        self.task = as_task(loss)
        self.layout, parameters, _ = split(model)
        if not self.layout.exact:
            raise ValueError(
                "all parameters must have one dtype, float32 or float64, to be trained"
            )
        self.w = self.layout.pack(parameters)
        self.grad = self.layout.zeros()
        self.zeros = self.layout.zeros()  # a memory before the first
        values, grads = self.layout.views(self.w), self.layout.views(self.grad)
        layout = self.layout
        for name, parameter in model.named_parameters():
            if name not in layout.constants:
                parameter.data, parameter.grad = values[name], grads[name]
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        self.unsent: list[tuple[nn.Module, str, Tensor]] = []
        for prefix, module in model.named_modules():
            for path, value in module.named_buffers(prefix, recurse=False):
                name = path.rpartition(".")[2]
                if path in layout.buffers:
                    self.buffers[path] = module, name
                else:
                    self.unsent.append((module, name, value.clone()))

    def load(self, theta: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Takes over the global model."""
        self.w.copy_(theta)
        for path, (module, name) in self.buffers.items():
            # Not copied into the buffer that is there: a model may have put another in its place.
            setattr(module, name, buffers[path].to(self.w.device, copy=True))
        for module, name, start in self.unsent:  # nothing may pass from one client to the next
            setattr(module, name, start.clone())

    def train(
        self,
        client: Plain,
        theta: Tensor,
        buffers: Mapping[str, Tensor],
        x: Any,
        y: Any,
        rng: np.random.Generator,
        *,
        order: np.random.Generator | None = None,
        prepare: Prepare = as_stored,
        memory: Memory | None = None,
        sent: Memory | None = None,
        out: Tensor | None = None,
    ) -> Result:
        """One client's round; the difference θ − θ_k is written to `out`, if given.

        Inputs x and targets y are tensors, or tuples or dicts of them; y may be None.
        torch's generator is seeded from `rng`, and the batches are drawn from `order`, or from
        `rng` too.
        """
        if not (n := batch.length(x if y is None else y)):
            raise ValueError("the client has no samples")
        memory = memory or dict.fromkeys(client.remembers, self.zeros)
        memory |= {name: torch.zeros_like(self.w) for name in client.scratch}
        sent = sent or dict.fromkeys(client.hears, self.zeros)
        seed_torch(rng.bit_generator.random_raw(), theta.device)
        self.load(theta, buffers)
        self.model.train()
        slots = {name: torch.zeros_like(self.w) for name in slot_names(client)}
        total = client.count(n)
        losses = torch.zeros((), device=theta.device)
        for step, rows in enumerate(client.batches(n, order or rng)):
            index = torch.from_numpy(rows).to(theta.device)
            self.grad.zero_()
            inputs = prepare(batch.rows_of(x, index), True)
            loss = self.task.loss(self.model, (inputs, batch.rows_of(y, index)))
            loss.backward()
            losses += loss.detach()
            client.correct(self.grad, self.w, theta, memory, sent)
            if client.clip_norm:
                norm = length(self.grad)
                if norm > client.clip_norm:
                    self.grad.mul_(client.clip_norm / (norm + 1e-6))
            move(client, self.w, self.grad, slots, client.rate(step, total), step)
        delta = torch.sub(theta, self.w, out=out)
        new_memory, extra = client.finish(delta, total, memory, sent)
        kept = {
            path: getattr(module, name).detach().clone()
            for path, (module, name) in self.buffers.items()
        }
        return Result(delta, kept, total, float(losses) / max(total, 1), new_memory, extra)


def length(vector: Tensor) -> float:
    """‖v‖, by pieces: one float32 sum over ten million squares is off by parts in ten thousand."""
    return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in vector.split(PIECE)))


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds the generator that dropout draws from; torch.manual_seed is a hundred times slower."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
