"""A client's model and its samples, as the hooks of a client method see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedglad.clients.method import Batch, Memory, Plain, Prepare, Trained
from fedglad.core import batch
from fedglad.tasks.base import scores_of

if TYPE_CHECKING:
    from fedglad.clients.workbench import Workbench


@dataclass(frozen=True)
class LocalData:
    """A client's samples as they are stored; `batches` gives them as the model takes them.

    >>> from fedglad.clients import Plain
    >>> x, y = torch.arange(6.0), torch.arange(6)
    >>> data = LocalData(x, y, lambda x, training: x / 2, torch.device("cpu"))
    >>> batches = data.batches(Plain(batch_size=4), np.random.default_rng(1))
    >>> len(data), [len(y) for x, y in batches]
    (6, [4, 2])
    """

    x: Any
    y: Any
    prepare: Prepare
    device: torch.device
    order: np.random.Generator | None = None  # what batches are drawn from, if not each round's

    def __len__(self) -> int:
        return batch.length(self.x if self.y is None else self.y)

    def batches(self, method: Plain, rng: np.random.Generator) -> Iterator[Batch]:
        """Inputs and targets of each step, as the method's settings say."""
        for rows in method.batches(len(self), self.order or rng):
            index = torch.from_numpy(rows).to(self.device)
            yield self.prepare(batch.rows_of(self.x, index), True), batch.rows_of(self.y, index)


class LocalModel:
    """A client's model in training: it is called like the module, and has its vectors.

    | attribute | meaning |
    |---|---|
    | `module` | the `nn.Module` itself, whose parameters are views into `w` |
    | `w`, `grad` | all its parameters, and their gradient, each as one flat vector |
    | `layout` | where each parameter lies in them: `layout.views(w)["head.weight"]` |
    | `received` | the buffers that the server sent |
    | `sent` | the vectors of a server half that the method `hears` |

    >>> from fedglad.clients import Workbench
    >>> module = torch.nn.Linear(1, 1, bias=False)
    >>> model = Workbench(module, torch.nn.functional.mse_loss).local
    >>> one, two = (model.layout.pack({"weight": torch.tensor([[v]])}) for v in (1.0, 2.0))
    >>> _ = model.w.copy_(one)
    >>> batch = torch.tensor([[3.0]]), torch.tensor([[0.0]])
    >>> model.loss(batch).item(), model.at(two).loss(batch).item()  # 3², and (2 · 3)²
    (9.0, 36.0)
    """

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.module, self.task, self.layout = bench.model, bench.task, bench.layout
        self.w, self.grad = bench.w, bench.grad
        self.received: Mapping[str, Tensor] = {}
        self.sent: Memory = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the module gives for inputs."""
        return self._with(nn.Module.__call__, *inputs, **named)

    def loss(self, batch: Batch) -> Tensor:
        """The task's loss of a batch."""
        return self._with(self.task.loss, batch)

    def scores(self, x: Any) -> Tensor:
        """The module's scores; of an output that has several parts, its `logits`."""
        return self._with(scores_of, x)

    def features(self, x: Any, layer: str = "") -> Tensor:
        """What the last linear layer, or the one that is named, is given for inputs."""
        return self._seen(layer, scores_of, x)[1]

    def loss_and_features(self, batch: Batch, layer: str = "") -> tuple[Tensor, Tensor]:
        """The task's loss and those features, in one pass."""
        return self._seen(layer, self.task.loss, batch)

    def at(self, vector: Tensor, buffers: Mapping[str, Tensor] | None = None) -> LocalModel:
        """The same module at other parameters, as for evaluation, without a copy of it.

        It has the buffers that the server sent, unless others are given, and leaves no trace in
        the module's own. Gradients go to the vector if it asks for them.
        """
        return _Elsewhere(self.bench, vector, self.received if buffers is None else buffers)

    def copied(self, name: str) -> Memory:
        """The model as it is now, to be put into a memory: its vector and, below that, buffers."""
        buffers = {f"{name}/{path}": value for path, value in self.bench.kept().items()}
        return {name: self.w.clone(), **buffers}

    def buffers_in(self, memory: Memory, name: str) -> Mapping[str, Tensor]:
        """The buffers that `copied` put there; those that the server sent, before it has."""
        return buffers_in(memory, name, self.received)

    def put(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Sets all parameters and buffers, as they lie in a memory or as the server sent them."""
        self.bench.put(vector, buffers)

    @contextmanager
    def aside(self) -> Generator[None]:
        """What happens to the model's parameters and buffers within is undone at its end."""
        w, buffers = self.w.clone(), self.bench.kept()
        try:
            yield
        finally:
            self.bench.put(w, buffers)

    def fit(
        self,
        method: Plain,
        data: LocalData,
        theta: Tensor,
        memory: Memory,
        rng: np.random.Generator,
        t: int,
        *,
        only: Collection[str] | None = None,
    ) -> Trained:
        """One pass of the training loop, by a method's settings, `loss`, `step` and `correct`.

        `only` names the parameters that move: the others stay where they are.
        """
        return self.bench.fit(self, method, data, theta, memory, rng, t, only=only)

    def _with(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a function of the module gives."""
        return function(self.module, *given, **named)

    def _seen(self, layer: str, function: Callable[..., Any], *given: Any) -> tuple[Any, Tensor]:
        """What a function of the module gives, and what a layer was given on the way."""
        name = layer or last_linear(self.module)
        try:
            watched = self.module.get_submodule(name)
        except AttributeError:
            raise ValueError(f"the model has no layer {name!r}") from None
        seen: list[Tensor] = []
        handle = watched.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            made = self._with(function, *given)
        finally:
            handle.remove()
        if not seen:
            raise ValueError(f"the model's layer {name!r} is not used: name another one")
        return made, seen[-1]


class _Elsewhere(LocalModel):
    """A model at other parameters than those that are trained."""

    def __init__(self, bench: Workbench, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        super().__init__(bench)
        self.w, self.received = vector, buffers
        self.tensors = {
            **self.layout.views(vector),
            **{path: value.clone() for path, value in buffers.items()},
        }

    def _with(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        tensors = {f"module.{name}": value for name, value in self.tensors.items()}
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            return functional_call(_Within(self.module), tensors, (function, *given), named)
        finally:
            for module in training:
                module.training = True


class _Within(nn.Module):
    """Hands its module to a function, while its parameters are others."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return function(self.module, *given, **named)


def buffers_in(memory: Memory, name: str, otherwise: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The buffers that lie below a model's name in a memory, and else others."""
    return {path: memory.get(f"{name}/{path}", value) for path, value in otherwise.items()}


def last_linear(module: nn.Module) -> str:
    """The name of a module's last linear layer.

    >>> last_linear(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    '2'
    """
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not names:
        raise ValueError("the model has no linear layer (nn.Linear): name a layer in the settings")
    return names[-1]
