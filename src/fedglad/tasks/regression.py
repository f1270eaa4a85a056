"""Numbers for each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.core.checks import check
from fedglad.tasks.base import ByScores, Sums, functional, ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Regression(ByScores):
    """Each sample has one number or several; trained by squared, absolute or Huber's error.

    Targets of shape (samples,) and a model's outputs of shape (samples, 1) go together. The score
    is the mean absolute error; R² = 1 − Σ(y − ŷ)² / Σ(y − ȳ)², the mean of each output's.

    >>> import torch
    >>> task = Regression()
    >>> sums = task.metrics_of(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]))
    >>> metrics = task.finish(sums)  # errors 0 and 2; R² = 1 − 4 / (1.5² + 1.5²)
    >>> metrics["loss"], metrics["mae"], round(metrics["r2"], 3)
    (2.0, 1.0, 0.111)
    """

    score: ClassVar[str] = "mae"
    higher: ClassVar[bool] = False
    by_sample: ClassVar[bool] = True

    kind: Annotated[Literal["mse", "l1", "huber"], "the loss: mse, l1 or huber"] = "mse"
    delta: Annotated[float, "of huber: from where on the error counts linearly"] = 1.0

    def __post_init__(self) -> None:
        check(self, delta=(self.delta > 0, "above 0"))

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        y = y.to(scores.dtype).reshape(scores.shape)
        if self.kind == "huber":
            return functional().huber_loss(scores, y, delta=self.delta)
        loss = functional().mse_loss if self.kind == "mse" else functional().l1_loss
        return loss(scores, y)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        n = len(y)
        loss = float(self.loss_of(scores, y)) * n if n else 0.0
        shape = n, math.prod(y.shape[1:])
        said, there = (t.double().reshape(shape).numpy(force=True) for t in (scores, y))
        errors = there - said
        return {
            "loss": (loss, n),
            "mae": (float(np.abs(errors).sum()), errors.size),
            "squared_error": ((errors**2).sum(axis=0), n),
            "targets": (Spread.of(there), n),
        }

    def finish(self, sums: Sums) -> dict[str, float]:
        errors, n = sums["squared_error"]
        targets, _ = sums["targets"]
        metrics = {name: ratio(*sums[name]) for name in ("loss", "mae")}
        if not n:
            return {**metrics, "r2": math.nan}
        # Where all targets are equal, as scikit-learn does: 1 for no error, else 0.
        flat = targets.squares <= n * (1e-12 * np.abs(targets.mean)) ** 2
        r2 = np.where(flat, errors == 0, 1 - errors / np.where(flat, 1, targets.squares))
        return {**metrics, "r2": float(r2.mean())}

    def misfit(self, scores: Tensor, y: Any) -> str:
        if y is None:
            return "there are no targets"
        wanted = tuple(y.shape[1:])
        if (
            tuple(scores.shape[1:]) not in (wanted, (*wanted, 1))
            and (*scores.shape[1:], 1) != wanted
        ):
            return (
                f"the model gives {tuple(scores.shape[1:])} numbers a sample, but a sample has "
                f"targets of shape {wanted or '()'}: let both be the same"
            )
        if y.is_floating_point() and not bool(y.isfinite().all()):
            return "there are NaN or infinite numbers among the targets: leave out such samples"
        return ""


@dataclass(frozen=True)
class Spread:
    """Numbers by their mean and Σ(y − ȳ)², column by column, which can be added up.

    Σy² − n ȳ² would lose all digits where the mean is large, as that of years is.

    >>> made = Spread.of(np.array([[1.0], [3.0]])) + Spread.of(np.array([[8.0]]))
    >>> made.n, made.mean, made.squares  # 4 and 3² + 1² + 4²
    (3, array([4.]), array([26.]))
    """

    n: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        mean = values.mean(axis=0) if len(values) else np.zeros(values.shape[1])
        return cls(len(values), mean, ((values - mean) ** 2).sum(axis=0))

    def __add__(self, other: Spread) -> Spread:
        n = self.n + other.n
        if not n:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.n / n)
        squares = self.squares + other.squares + apart**2 * (self.n * other.n / n)
        return Spread(n, mean, squares)
