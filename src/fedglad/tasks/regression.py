"""Numbers for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.core.checks import check
from fedglad.tasks.base import ByScores, Sums, ratio

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

    kind: Annotated[Literal["mse", "l1", "huber"], "the loss: mse, l1 or huber"] = "mse"
    delta: Annotated[float, "of huber: from where on the error counts linearly"] = 1.0

    def __post_init__(self) -> None:
        check(self, delta=(self.delta > 0, "above 0"))

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        from torch.nn.functional import huber_loss, l1_loss, mse_loss

        y = y.to(scores.dtype).view_as(scores)
        if self.kind == "huber":
            return huber_loss(scores, y, delta=self.delta)
        return mse_loss(scores, y) if self.kind == "mse" else l1_loss(scores, y)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        n = len(y)
        loss = float(self.loss_of(scores, y)) * n
        said, there = (t.double().view(n, -1).numpy(force=True) for t in (scores, y))
        errors = there - said
        parts = np.stack([there.sum(0), (there**2).sum(0), (errors**2).sum(0)])
        return {
            "loss": (loss, n),
            "mae": (float(np.abs(errors).sum()), errors.size),
            "parts": (parts, n),
        }

    def finish(self, sums: Sums) -> dict[str, float]:
        (total, squares, errors), n = sums["parts"]
        spread = squares - total**2 / n
        # Where all targets are equal, as scikit-learn does: 1 for no error, else 0.
        flat = spread <= 1e-12 * np.maximum(squares, 1e-300)
        r2 = np.where(flat, errors == 0, 1 - errors / np.where(flat, 1, spread))
        return {**{name: ratio(*sums[name]) for name in ("loss", "mae")}, "r2": float(r2.mean())}

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
