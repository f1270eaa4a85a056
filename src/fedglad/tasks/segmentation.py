"""A label for each pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from fedglad.tasks.base import IGNORED, ByScores, Sums, mean_of_counted, no_labels, ratio
from fedglad.tasks.classification import confusion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segmentation(ByScores):
    """Each pixel, or voxel, has one label, 0 … C − 1; trained by the mean cross-entropy of pixels.

    Targets are of shape (samples, height, width), and the model gives (samples, C, height, width)
    scores. The score is the mean over the classes of IoU = TP / (TP + FP + FN), over all pixels of
    the set; Dice = 2 TP / (2 TP + FP + FN) likewise. A class that is neither there nor said does
    not count.

    >>> import torch
    >>> scores = torch.tensor([[[[2.0, 2.0]], [[1.0, 3.0]]]])  # says classes 0 and 1
    >>> task = Segmentation()
    >>> task.finish(task.metrics_of(scores, torch.tensor([[[0, 0]]])))["iou"]  # (1/2 + 0/1) / 2
    0.25
    """

    score: ClassVar[str] = "iou"
    higher: ClassVar[bool] = True
    chunk: ClassVar[int] = 50

    ignore: Annotated[int, "a label of pixels that do not count, such as 255"] = IGNORED

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        return mean_of_counted(scores, y, self.ignore)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        counted = y != self.ignore
        n = int(counted.sum())
        said, there = scores.argmax(dim=1)[counted], y[counted]
        return {
            "loss": (float(self.loss_of(scores, y)) * n if n else 0.0, n),
            "accuracy": (int((said == there).sum()), n),
            "confusion": (confusion(said, there, scores.shape[1]), 1),
        }

    def finish(self, sums: Sums) -> dict[str, float]:
        table = sums["confusion"][0]
        right, both = np.diag(table), table.sum(axis=0) + table.sum(axis=1)
        named = both > 0
        right, both = right[named], both[named]
        return {
            **{name: ratio(*sums[name]) for name in ("loss", "accuracy")},
            "iou": ratio((right / (both - right)).sum(), len(right)),
            "dice": ratio((2 * right / both).sum(), len(right)),
        }

    def misfit(self, scores: Tensor, y: Any) -> str:
        if y is not None and y.dim() > 2 and (wrong := no_labels(y)):
            return wrong
        if y is None or y.dim() < 3:
            shape = None if y is None else tuple(y.shape[1:])
            return (
                f"the targets of a sample are of shape {shape}: a label for each pixel, "
                "(height, width) whole numbers, is needed"
            )
        if scores.dim() != y.dim() + 1 or scores.shape[2:] != y.shape[1:]:
            shape = tuple(y.shape[1:])
            return (
                f"the model gives {tuple(scores.shape[1:])} scores a sample, but its targets are "
                f"of shape {shape}: (classes, {', '.join(map(str, shape))}) are needed"
            )
        labels = y[y != self.ignore]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < scores.shape[1]:
            wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
            return (
                f"a label is {wrong}, but the model has scores for 0 … {scores.shape[1] - 1}: if "
                f"such pixels do not count, set task.ignore={wrong}"
            )
        return ""
