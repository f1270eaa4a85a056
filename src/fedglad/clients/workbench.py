"""The only local training loop: what a client does between receiving θ and sending θ − θ_k.

Parameters and gradients are views into flat vectors, so loading the global model, clipping, the
optimizer's step and the final difference are single operations on one vector.
"""

import math
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.local_model import LocalData, LocalModel
from fedglad.clients.local_optimizers import move, slot_names
from fedglad.clients.method import Batch, Loss, Memory, Plain, Prepare, Trained
from fedglad.clients.personal import Personal
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
        self._bind()
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        self.unsent: list[tuple[nn.Module, str, Tensor]] = []
        for prefix, module in model.named_modules():
            for path, value in module.named_buffers(prefix, recurse=False):
                name = path.rpartition(".")[2]
                if path in self.layout.buffers:
                    self.buffers[path] = module, name
                else:
                    self.unsent.append((module, name, value.clone()))
        self.local = LocalModel(self)
        self._personal: Personal | None = None

    def load(self, theta: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Takes over the global model."""
        self.put(theta, buffers)
        for module, name, start in self.unsent:  # nothing may pass from one client to the next
            setattr(module, name, start.clone())

    def put(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Sets all parameters and buffers."""
        self.w.copy_(vector)
        for path, (module, name) in self.buffers.items():
            # Not copied into the buffer that is there: a model may have put another in its place.
            setattr(module, name, buffers[path].to(self.w.device, copy=True))

    def kept(self) -> dict[str, Tensor]:
        """Copies of the buffers as they are."""
        return {
            path: getattr(module, name).detach().clone()
            for path, (module, name) in self.buffers.items()
        }

    def train(
        self,
        client: Plain,
        theta: Tensor,
        buffers: Mapping[str, Tensor],
        x: Any,
        y: Any,
        rng: np.random.Generator,
        *,
        t: int = 0,
        order: np.random.Generator | None = None,
        prepare: Prepare = as_stored,
        memory: Memory | None = None,
        sent: Memory | None = None,
        out: Tensor | None = None,
    ) -> Result:
        """One client's round t; the difference θ − θ_k is written to `out`, if given.

        Inputs x and targets y are tensors, or tuples or dicts of them; y may be None.
        torch's generator is seeded from `rng`, and the batches are drawn from `order`, or from
        `rng` too.
        """
        data = LocalData(x, y, prepare, theta.device, order)
        if not len(data):
            raise ValueError("the client has no samples")
        local, personal = self.local, self.personal_of(client)
        received = buffers
        if personal:
            theta, buffers = personal.placed(theta, buffers, memory or {})
        memory = dict(memory or client.start(theta, self.zeros))
        memory |= {name: torch.zeros_like(self.w) for name in client.scratch}
        local.received, local.sent = buffers, sent or dict.fromkeys(client.hears, self.zeros)
        seed_torch(rng.bit_generator.random_raw(), theta.device)
        self.load(theta, buffers)
        self.model.train()
        if type(client).train is Plain.train:
            steps, loss = self.fit(local, client, data, theta, memory, rng, t)
        else:
            asks = {name: p.requires_grad for name, p in self.model.named_parameters()}
            try:
                steps, loss = client.train(local, data, theta, memory, rng, t)
            finally:
                self._bind(asks)
        delta = torch.sub(theta, self.w, out=out)
        if personal:
            personal.cleared(delta)
        new_memory, extra = client.finish(delta, steps, memory, local.sent)
        kept = self.kept()
        if personal:
            new_memory = {**new_memory, **personal.taken(self.w, kept)}
            kept |= {name: received[name] for name in personal.buffers}
            extra = None if extra is None else personal.cleared(extra.clone())
        return Result(delta, kept, steps, loss, new_memory, extra)

    def fit(
        self,
        local: LocalModel,
        client: Plain,
        data: LocalData,
        theta: Tensor,
        memory: Memory,
        rng: np.random.Generator,
        t: int,
        *,
        only: Collection[str] | None = None,
    ) -> Trained:
        """The loop: so many steps as a method's settings say, from where the model is."""
        slots = {name: torch.zeros_like(self.w) for name in slot_names(client)}
        total = client.count(len(data))
        losses = torch.zeros((), device=theta.device)
        personal = self.personal_of(client)
        places = personal.places if personal else None
        batch: Batch = None, None

        def gradient() -> Tensor:
            self.grad.zero_()
            loss = client.loss(local, batch, theta, memory, t)
            loss.backward()
            return loss

        with self._fixed(only) as fixed:
            start = None if fixed is None else self.w[fixed]
            for step, batch in enumerate(data.batches(client, rng)):  # noqa: B007
                losses += client.step(gradient, local, theta, memory, t).detach()
                raw = None if places is None else self.grad[places]
                client.correct(self.grad, self.w, theta, memory, local.sent)
                if raw is not None:  # what is not shared is not corrected
                    self.grad[places] = raw
                if fixed is not None:
                    self.grad[fixed] = 0
                if client.clip_norm:
                    norm = length(self.grad)
                    if norm > client.clip_norm:
                        self.grad.mul_(client.clip_norm / (norm + 1e-6))
                move(client, self.w, self.grad, slots, client.rate(step, total), step)
                if start is not None:  # also weight decay is of no concern to it
                    self.w[fixed] = start
        return Trained(total, float(losses) / max(total, 1))

    def personal_of(self, client: Plain) -> Personal | None:
        """What of the model stays with each client; None if nothing does."""
        if not client.has_personal:
            return None
        if self._personal is None or self._personal.client != client:
            self._personal = Personal(client, self.model, self.layout)
        return self._personal

    @contextmanager
    def _fixed(self, only: Collection[str] | None) -> Generator[Tensor | None]:
        """The places of the parameters that are not to move, for which no gradient is computed."""
        if only is None:
            yield None
            return
        others = [name for name in self.layout.names if name not in only]
        parameters = [p for name, p in self.model.named_parameters() if name in others]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield self.layout.places(others)
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)

    def _bind(self, asks: Mapping[str, bool] | None = None) -> None:
        """Makes the parameters and their gradients views into the flat vectors.

        A loop of one's own may have let go of gradients, put other tensors in a parameter's place,
        or not given back what it froze: `asks` says which parameters ask for a gradient.
        """
        values, grads = self.layout.views(self.w), self.layout.views(self.grad)
        for name, parameter in self.model.named_parameters():
            if name in values:
                if parameter.data_ptr() != values[name].data_ptr():
                    values[name].copy_(parameter.detach())
                parameter.data, parameter.grad = values[name], grads[name]
                if asks is not None:
                    parameter.requires_grad_(asks.get(name, True))


def length(vector: Tensor) -> float:
    """‖v‖, by pieces: one float32 sum over ten million squares is off by parts in ten thousand."""
    return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in vector.split(PIECE)))


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds the generator that dropout draws from; torch.manual_seed is a hundred times slower."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
