"""The next one of a sequence of tokens: characters, words or their parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedglad.tasks.base import (
    IGNORED,
    Batch,
    ByScores,
    Sums,
    Task,
    mean_of_counted,
    no_labels,
    ratio,
    scores_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class NextToken(ByScores):
    """Each place of a sequence has a target, its next token; trained by their mean cross-entropy.

    Targets are ids of shape (samples, length), −100 where there is only padding, and the model
    gives scores of shape (samples, length, vocabulary). The score is the accuracy over all tokens
    that count; perplexity = exp(mean loss of a token).

    >>> import torch
    >>> scores = torch.tensor([[[2.0, 1.0], [0.0, 1.0], [0.0, 9.0]]])
    >>> task = NextToken()
    >>> task.finish(task.metrics_of(scores, torch.tensor([[0, 0, -100]])))["accuracy"]
    0.5
    """

    score: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True
    chunk: ClassVar[int] = 50

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        return mean_of_counted(scores.flatten(0, -2), y.flatten(), IGNORED)

    def metrics_of(self, scores: Tensor, y: Tensor) -> Sums:
        return _sums(self, scores, y)

    def finish(self, sums: Sums) -> dict[str, float]:
        return _with_perplexity(sums)

    def misfit(self, scores: Tensor, y: Any) -> str:
        if y is not None and y.dim() == 2 and (wrong := no_labels(y)):
            return wrong
        if y is None or y.dim() != 2:
            shape = None if y is None else tuple(y.shape[1:])
            return (
                f"the targets of a sample are of shape {shape}: the ids of its next tokens, "
                "(length,) whole numbers, are needed; for one label a sample set "
                "task.name=classification"
            )
        if scores.dim() != 3 or scores.shape[1] != y.shape[1]:
            return (
                f"the model gives {tuple(scores.shape[1:])} scores a sample, but it has "
                f"{y.shape[1]} targets: (samples, {y.shape[1]}, vocabulary) are needed"
            )
        return _unknown(scores, y)


@dataclass(frozen=True, kw_only=True)
class CausalLM(Task):
    """A causal language model as in transformers, whole or with peft: tokens follow from those
    before them.

    Inputs are ids of shape (samples, length), or a dict with `input_ids` and `attention_mask`.
    Targets are None, where every token but padding counts, or ids of the same shape with −100 where
    one does not. The token at place i is foretold by the scores at i − 1. The score is the
    perplexity, exp(mean loss of a token).

    >>> import torch
    >>> scores = torch.eye(3)  # a model that says the last token once more
    >>> task, ids = CausalLM(), torch.tensor([[2, 2, 0]])
    >>> sums = task.metrics(torch.nn.Embedding.from_pretrained(scores), (ids, None))
    >>> task.finish(sums)["accuracy"]  # 2 after 2 is right, 0 after 2 is not
    0.5
    """

    score: ClassVar[str] = "perplexity"
    higher: ClassVar[bool] = False
    chunk: ClassVar[int] = 10

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return NextToken().loss_of(*_shifted(model, batch))

    def metrics(self, model: nn.Module, batch: Batch) -> Sums:
        sums = _sums(NextToken(), *_shifted(model, batch))
        if _already_shifted(*batch):
            raise ValueError(
                "the targets are the next tokens already, and would be shifted once more: set "
                "task.name=next-token, or give each token as its own target (shakespeare: "
                "data.targets=same)"
            )
        return sums

    def finish(self, sums: Sums) -> dict[str, float]:
        return _with_perplexity(sums)


def _shifted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The scores, and the tokens that they foretell."""
    x, y = batch
    if isinstance(x, dict):
        x, y = dict(x), x.get("labels", y) if y is None else y
        x.pop("labels", None)
    if y is None:
        y = x["input_ids"] if isinstance(x, dict) else x
        if isinstance(x, dict) and "attention_mask" in x:
            y = y.masked_fill(x["attention_mask"] == 0, IGNORED)
    if not hasattr(y, "shape"):
        raise ValueError(f"the targets are a {type(y).__name__}: one tensor of ids is needed")
    scores = scores_of(model, x)
    if scores.dim() != 3 or scores.shape[:2] != y.shape:
        raise ValueError(
            f"the model gives scores of shape {tuple(scores.shape)} for tokens of shape "
            f"{tuple(y.shape)}: (samples, length, vocabulary) are needed"
        )
    return scores[:, :-1], y[:, 1:]


def _already_shifted(x: Any, y: Any) -> bool:
    """Whether each target is the token after its place, and not the one at it."""
    ids = x.get("input_ids") if isinstance(x, dict) else x
    if y is None or ids is None or y.shape[1] < 2:
        return False
    counted = y[:, :-1] != IGNORED
    following = (y[:, :-1] == ids[:, 1:])[counted]
    same = (y[:, :-1] == ids[:, :-1])[counted]
    return bool(following.all()) and not bool(same.all())


def _sums(task: NextToken, scores: Tensor, y: Tensor) -> Sums:
    n = int((y != IGNORED).sum())
    loss = float(task.loss_of(scores, y)) * n if n else 0.0
    return {"loss": (loss, n), "accuracy": (int((scores.argmax(dim=-1) == y).sum()), n)}


def _with_perplexity(sums: Sums) -> dict[str, float]:
    metrics = {name: ratio(*pair) for name, pair in sums.items()}
    loss = metrics["loss"]
    return {**metrics, "perplexity": math.inf if loss > 700 else math.exp(loss)}


def _unknown(scores: Tensor, y: Tensor) -> str:
    known = y[y != IGNORED]
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < scores.shape[-1]:
        wrong = int(known.min()) if int(known.min()) < 0 else int(known.max())
        return f"a target is {wrong}, but the model has scores for 0 … {scores.shape[-1] - 1}"
    return ""
