"""What every task has in common: a loss to train by, and metrics that are added up over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import isclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fedglad.records import Score

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = tuple[Any, Any]
"""Inputs and targets of some samples. Each is a tensor, or a tuple or a dict of tensors, with one
first dimension; targets may be None, where the inputs have all there is."""

Sums = dict[str, tuple[Any, Any]]
"""Metrics of some samples: a sum and a count each, numbers or NumPy arrays, to be added up."""

IGNORED = -100
"""A target that does not count, as in PyTorch: padding, and pixels that nobody has named."""

CHUNK = 1000
"""Samples that are measured at a time: always the same, so the bits of the sums are."""

_SEVERAL = (tuple, list)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is trained for. An own one has `loss`, `metrics` and the name of its score.

    | attribute | meaning |
    |---|---|
    | `score` | the metric that tables, tuning and stopping look at |
    | `higher` | whether more of it is better |
    | `chunk` | samples that are measured at a time: fewer where a sample has many scores |

    A metric whose name ends in accuracy, f1, iou or dice is a share of one, shown as a percentage.

    >>> from torch.nn.functional import mse_loss
    >>> class Doubling(Task):
    ...     score = "error"
    ...
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return mse_loss(model(x), 2 * y)
    ...
    ...     def metrics(self, model, batch):
    ...         x, y = batch
    ...         return {"error": (float((model(x) - 2 * y).abs().sum()), len(y))}
    """

    score: ClassVar[str] = "loss"
    higher: ClassVar[bool] = False
    chunk: ClassVar[int] = CHUNK

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch: local steps follow its gradient."""
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Batch) -> Sums:
        """Each metric of a batch as a sum and a count. A `loss` that is not there is added."""
        raise NotImplementedError

    def finish(self, sums: Sums) -> dict[str, float]:
        """The metrics of all samples from what `metrics` gave, added up."""
        return {name: ratio(total, count) for name, (total, count) in sums.items()}


@dataclass(frozen=True, kw_only=True)
class ByScores(Task):
    """A task whose loss and metrics look at the model's scores and the targets alone.

    Subclasses have `loss_of` and `metrics_of`. `by_sample` says that the loss of a batch is the
    mean of its samples' losses: only then the batched engine fills up batches that are shorter.
    """

    by_sample: ClassVar[bool] = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return self.loss_of(scores_of(model, x), y)

    def metrics(self, model: nn.Module, batch: Batch) -> Sums:
        x, y = batch
        return self.metrics_of(scores_of(model, x), y)

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        """The mean loss of scores."""
        raise NotImplementedError

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        """Each metric of scores as a sum and a count."""
        raise NotImplementedError

    def misfit(self, scores: Tensor, y: Any) -> str:
        """Why these scores and targets are not of this task, and the way out; empty if they are."""
        return ""


@dataclass(frozen=True)
class ByLoss(ByScores):
    """A function of scores and targets as a task; of labels, accuracy is counted too."""

    function: Callable[[Any, Any], Any]

    @property
    def by_sample(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Known of torch's own functions; another may see samples of a batch together."""
        f = functional()
        return self.function in (f.cross_entropy, f.mse_loss, f.l1_loss, f.smooth_l1_loss)

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.function(scores, y)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        labels = scores.dim() == 2 and y.dim() == 1 and not y.is_floating_point()
        n = int((y != IGNORED).sum()) if labels else len(y)
        sums: Sums = {"loss": (float(self.function(scores, y)) * n if n else 0.0, n)}
        if labels:
            sums["accuracy"] = int((scores.argmax(dim=1) == y).sum()), n
        return sums

    def misfit(self, scores: Tensor, y: Any) -> str:
        return "there are no targets, which a loss function needs" if y is None else ""


def as_task(given: Any) -> Task:
    """A task as it is, and a loss function as the task of it.

    >>> as_task("regression")
    Traceback (most recent call last):
    ValueError: task = 'regression': choose a task by name with the key task.name
    """
    if isinstance(given, str):
        raise ValueError(f"task = {given!r}: choose a task by name with the key task.name")
    if isclass(given):
        raise ValueError(
            f"the task is the class {given.__name__}: give an object, such as {given.__name__}()"
        )
    if hasattr(given, "loss") or hasattr(given, "metrics") or not callable(given):
        return cast(Task, given)
    return ByLoss(given)


def sees_scores_alone(task: Any) -> bool:
    """Whether a task's loss is made by its `loss_of`, and by nothing else."""
    return isinstance(task, ByScores) and type(task).loss is ByScores.loss


@cache
def functional() -> Any:
    """torch.nn.functional: loaded only where it is used, and quicker than an import in a loop."""
    import torch.nn.functional

    return torch.nn.functional


def outputs_of(model: nn.Module, x: Any) -> Any:
    """What a model gives for inputs: those of a dict by name, those of a tuple in their order."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, _SEVERAL) else model(x)


def scores_of(model: nn.Module, x: Any) -> Tensor:
    """A model's scores; of an output that has several parts, its `logits`."""
    outputs = outputs_of(model, x)
    return getattr(outputs, "logits", outputs)


def score_of(task: Any) -> Score:
    """A task's score, as records have it."""
    return Score(getattr(task, "score", "loss"), higher=bool(getattr(task, "higher", False)))


def added(parts: Iterable[Sums]) -> Sums:
    """The sums and counts of several batches, in their order."""
    total: Sums = {}
    for sums in parts:
        for name, (s, n) in sums.items():
            if name in total:
                before, count = total[name]
                total[name] = before + s, count + n
            else:
                total[name] = s, n
    return total


def chunk_of(task: Any) -> int:
    """How many samples of a task are measured at a time."""
    return getattr(task, "chunk", CHUNK)


def finished(task: Any, sums: Sums) -> dict[str, float]:
    """The task's metrics, made of sums over all samples."""
    finish: Callable[[Sums], Mapping[str, Any]] = getattr(task, "finish", Task().finish)
    return {name: float(value) for name, value in finish(sums).items()}


def mean_of_counted(scores: Tensor, y: Tensor, ignored: int) -> Tensor:
    """The mean cross-entropy of the targets that count; 0 where none does, and not 0 / 0.

    >>> import torch
    >>> mean_of_counted(torch.zeros(1, 2), torch.tensor([7]), ignored=7)
    tensor(0.)
    """
    total = functional().cross_entropy(scores, y, ignore_index=ignored, reduction="sum")
    return total / (y != ignored).sum().clamp(min=1)


def no_labels(y: Any) -> str:
    """Why targets cannot be labels by their type; empty if they can be."""
    kind = str(y.dtype).removeprefix("torch.")
    if y.is_floating_point() or y.is_complex():
        return f"the targets are {kind}, no labels: for numbers set task.name=regression"
    return f"the targets are {kind}: give whole numbers, y.long()" if kind == "bool" else ""


def ratio(total: Any, count: Any) -> float:
    """total / count; NaN for nothing at all."""
    return float(total / count) if count else float("nan")
