"""One label of several for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.core.checks import check
from fedglad.tasks.base import IGNORED, ByScores, Sums, functional, no_labels, ratio

if TYPE_CHECKING:
    from torch import Tensor

More = Literal["top_k", "balanced_accuracy", "macro_f1", "calibration_error", "per_class"]


@dataclass(frozen=True, kw_only=True)
class Classification(ByScores):
    """Each sample has one label, 0 … C − 1; trained by cross-entropy, scored by accuracy.

    A model gives C scores a sample; a label of −100 does not count.

    | metric of `also` | meaning |
    |---|---|
    | `top_k` | share of samples whose label is among the k highest scores, `top_5_accuracy` |
    | `balanced_accuracy` | mean over the classes of the share that is recognised |
    | `macro_f1` | mean over the classes of F1 = 2 TP / (2 TP + FP + FN) |
    | `calibration_error` | Σ_b n_b/n · abs(accuracy_b − confidence_b), over bins of confidence |
    | `per_class` | the share of each class that is recognised, `class_3_accuracy` |

    >>> import torch
    >>> scores, y = torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1])
    >>> task = Classification(also=("balanced_accuracy",))
    >>> sums = task.metrics_of(scores, y)
    >>> task.finish(sums)["balanced_accuracy"]  # class 0 is recognised, class 1 is not
    0.5
    """

    score: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True
    by_sample: ClassVar[bool] = True

    also: Annotated[
        tuple[More, ...],
        "further metrics: top_k, balanced_accuracy, macro_f1, calibration_error, per_class",
    ] = ()
    k: Annotated[int, "of top_k"] = 5
    bins: Annotated[int, "of calibration_error"] = 15

    def __post_init__(self) -> None:
        check(self, k=1, bins=1)

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        return functional().cross_entropy(scores, y)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        counted = y != IGNORED
        n = int(counted.sum())
        best = scores.argmax(dim=1)
        loss = float(self.loss_of(scores, y)) * n if n else 0.0
        sums: Sums = {"loss": (loss, n), "accuracy": (int((best == y).sum()), n)}
        if self.also:
            sums |= self._further(scores[counted], best[counted], y[counted])
        return sums

    def _further(self, scores: Tensor, best: Tensor, y: Tensor) -> Sums:
        sums: Sums = {}
        classes = scores.shape[1]
        if "top_k" in self.also:
            among = scores.topk(min(self.k, classes), dim=1).indices
            sums[f"top_{self.k}_accuracy"] = int((among == y[:, None]).sum()), len(y)
        if {"balanced_accuracy", "macro_f1", "per_class"} & {*self.also}:
            sums["confusion"] = confusion(best, y, classes), 1
        if "calibration_error" in self.also:
            confidence = scores.softmax(dim=1).amax(dim=1).double().numpy(force=True)
            right = (best == y).numpy(force=True)
            # (0, 1/bins], (1/bins, 2/bins], …
            # and scores that are not finite lie somewhere: what comes of them is NaN
            place = np.nan_to_num(np.ceil(confidence * self.bins)).astype(int)
            place = np.clip(place - 1, 0, self.bins - 1)
            rows = [np.ones_like(confidence), right, confidence]
            parts = [np.bincount(place, weights=row, minlength=self.bins) for row in rows]
            sums["calibration"] = np.stack(parts), 1
        return sums

    def finish(self, sums: Sums) -> dict[str, float]:
        metrics = {
            name: ratio(*pair)
            for name, pair in sums.items()
            if name not in ("confusion", "calibration")
        }
        if "confusion" in sums:
            metrics |= self._by_class(sums["confusion"][0])
        if "calibration" in sums:
            n, right, confidence = sums["calibration"][0]
            metrics["calibration_error"] = ratio(np.abs(right - confidence).sum(), n.sum())
        return metrics

    def _by_class(self, table: np.ndarray) -> dict[str, float]:
        right, there, said = np.diag(table), table.sum(axis=1), table.sum(axis=0)
        met, named = there > 0, there + said > 0
        recalls, metrics = right[met] / there[met], dict[str, float]()
        if "balanced_accuracy" in self.also:
            metrics["balanced_accuracy"] = ratio(recalls.sum(), len(recalls))
        if "macro_f1" in self.also:
            f1 = 2 * right[named] / (there + said)[named]
            metrics["macro_f1"] = ratio(f1.sum(), len(f1))
        if "per_class" in self.also:
            names = (f"class_{c}_accuracy" for c in np.flatnonzero(met))
            metrics |= dict(zip(names, recalls.tolist(), strict=True))
        return metrics

    def misfit(self, scores: Tensor, y: Any) -> str:
        if y is None:
            return "there are no targets: a language model's inputs alone are task.name=causal-lm"
        shape = tuple(y.shape[1:])
        if wrong := no_labels(y):
            return wrong
        if y.dim() == 2 and scores.dim() == 3:
            return (
                f"each sample has a sequence of {shape[0]} targets: set task.name=next-token, "
                "or give one label a sample"
            )
        if y.dim() == 3 and scores.dim() == 4:
            return (
                f"each sample has {shape} targets: for labelled pixels set task.name=segmentation"
            )
        if y.dim() == 2:
            return (
                f"each sample has {shape[0]} targets: for several labels set "
                "task.name=multilabel, for one label give targets of shape (samples,)"
            )
        if y.dim() != 1:
            return f"each sample has targets of shape {shape}: it needs one label"
        if scores.dim() != 2:
            wrong = tuple(scores.shape)
            return f"the model gives scores of shape {wrong}: (samples, classes) are needed"
        low = int(y[y != IGNORED].min()) if bool((y != IGNORED).any()) else 0
        if low < 0:
            return f"a label is {low}: labels are 0 … C − 1, and −100 where one does not count"
        if int(y.max()) >= scores.shape[1]:
            return (
                f"a label is {int(y.max())}, but the model has scores for 0 … {scores.shape[1] - 1}"
            )
        return ""


def confusion(said: Tensor, y: Tensor, classes: int) -> np.ndarray:
    """How often each label (row) was said to be each class (column).

    >>> import torch
    >>> confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
    array([[1, 1],
           [0, 1]])
    """
    places = (y.flatten() * classes + said.flatten()).bincount(minlength=classes**2)
    return places.view(classes, classes).numpy(force=True)
