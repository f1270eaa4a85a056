"""Several labels for each sample, each of which it has or has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedglad.tasks.base import ByScores, Sums, functional, ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MultiLabel(ByScores):
    """Each sample has or has not each of L labels; trained by binary cross-entropy.

    Targets are 0 or 1, of shape (samples, L), and the model gives L scores; a score above 0 says
    yes. With TP, FP and FN over all labels, micro-F1 = 2 TP / (2 TP + FP + FN) is the score;
    macro-F1 is the mean of each label's, and a label that is neither there nor said counts 0.

    >>> import torch
    >>> scores, y = torch.tensor([[2.0, -1.0], [3.0, 1.0]]), torch.tensor([[1, 0], [0, 1]])
    >>> task = MultiLabel()
    >>> metrics = task.finish(task.metrics_of(scores, y))  # TP 2, FP 1, FN 0: 4/5
    >>> metrics["micro_f1"], round(metrics["macro_f1"], 3)  # and (2/3 + 1) / 2
    (0.8, 0.833)
    """

    score: ClassVar[str] = "micro_f1"
    higher: ClassVar[bool] = True
    by_sample: ClassVar[bool] = True

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        return functional().binary_cross_entropy_with_logits(scores, y.to(scores.dtype))

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        said, there, n = scores > 0, y > 0, len(y)
        right, many = (said & there).sum(dim=0), said.sum(dim=0) + there.sum(dim=0)
        return {
            "loss": (float(self.loss_of(scores, y)) * n if n else 0.0, n),
            "accuracy": (int((said == there).sum()), y.numel()),
            "f1": (2 * right.numpy(force=True), many.numpy(force=True)),
        }

    def finish(self, sums: Sums) -> dict[str, float]:
        twice, many = sums["f1"]
        each = [t / n if n else 0.0 for t, n in zip(twice, many, strict=True)]
        return {
            **{name: ratio(*sums[name]) for name in ("loss", "accuracy")},
            "micro_f1": float(twice.sum() / many.sum()) if many.sum() else 0.0,
            "macro_f1": float(sum(each) / len(each)),
        }

    def misfit(self, scores: Tensor, y: Any) -> str:
        if y is None or y.dim() != 2:
            shape = None if y is None else tuple(y.shape[1:])
            return (
                f"the targets of a sample are of shape {shape}: 0 or 1 for each of L labels are "
                "needed; for one label of several set task.name=classification"
            )
        if scores.dim() != 2 or scores.shape[1] != y.shape[1]:
            return (
                f"the model gives scores of shape {tuple(scores.shape)}, but a sample has "
                f"{y.shape[1]} targets: (samples, {y.shape[1]}) are needed"
            )
        if not bool(((y == 0) | (y == 1)).all()):
            wrong = y[(y != 0) & (y != 1)][0].item()
            return f"a target is {wrong}: each is 0 or 1; for numbers set task.name=regression"
        return ""
