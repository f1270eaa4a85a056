"""Which of a reply's metrics is the loss, which the accuracy. Imports nothing: clients ask, too."""

import math
import re
from collections.abc import Mapping


def loss_of(metrics: Mapping[str, object]) -> float | None:
    """A loss among metrics: train_loss, train-loss, loss, or the first with that word."""
    return _first(metrics, ("loss",), least=-math.inf, most=math.inf)


def accuracy_of(metrics: Mapping[str, object]) -> float | None:
    """An accuracy among metrics, a share of 1: accuracy, eval_acc, test-accuracy."""
    return _first(metrics, ("accuracy", "acc"), least=0.0, most=1.0)


def _first(
    metrics: Mapping[str, object], words: tuple[str, ...], *, least: float, most: float
) -> float | None:
    known = [f"{part}{word}" for word in words for part in ("train_", "train-", "")]
    for name, value in sorted(metrics.items(), key=lambda item: item[0] not in known):
        matches = set(re.split(r"[^a-z]+", name.lower())) & set(words)
        number = _number(value)
        if matches and number is not None and least <= number <= most:
            return number
    return None


def _number(value: object) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
