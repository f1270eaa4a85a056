"""What every task has in common: a loss to train by, and metrics that are added up over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is trained for. An own one has `loss`, `metrics` and the name of its score.

    | attribute | meaning |
    |---|---|
    | `score` | the metric that tables, tuning and stopping look at |
    | `higher` | whether more of it is better |

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

    Subclasses have `loss_of` and `metrics_of`.
    """

    by_sample: ClassVar[bool] = True  # the loss of a batch is the mean of its samples' losses

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

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.function(scores, y)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        sums: Sums = {"loss": (float(self.function(scores, y)) * len(y), len(y))}
        if scores.dim() == 2 and y.dim() == 1 and not y.is_floating_point():
            sums["accuracy"] = int((scores.argmax(dim=1) == y).sum()), len(y)
        return sums


def as_task(given: Any) -> Task:
    """A task as it is, and a loss function as the task of it."""
    return cast(Task, given) if hasattr(given, "loss") else ByLoss(given)


def outputs_of(model: nn.Module, x: Any) -> Any:
    """What a model gives for inputs: those of a dict by name, those of a tuple in their order."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple | list) else model(x)


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


def finished(task: Any, sums: Sums) -> dict[str, float]:
    """The task's metrics, made of sums over all samples."""
    finish: Callable[[Sums], Mapping[str, Any]] = getattr(task, "finish", Task().finish)
    return {name: float(value) for name, value in finish(sums).items()}


def ratio(total: Any, count: Any) -> float:
    """total / count; NaN for nothing at all."""
    return float(total / count) if count else float("nan")
