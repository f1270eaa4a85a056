"""What is read of the metrics that clients and servers report. Loads no torch: clients ask, too."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

KNOWN = ("loss", "accuracy", "acc", "num_examples")  # they have fields of their own
SHORT = 40  # letters of a metric's name in a record


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
        number = None if isinstance(value, list) else as_number(value)
        if matches and number is not None and least <= number <= most:
            return number
    return None


def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers among metrics but loss, accuracy and counts, by names for records.

    >>> numbers({"loss": 0.5, "eval-F1": 0.25, "num-examples": 8, "per class": [1.0, 2.0]})
    {'f1': 0.25}
    """
    named: dict[str, float] = {}
    for name, value in metrics.items():
        words = re.sub(r"[^a-z0-9]+", "_", name[:200].lower()).strip("_")
        short = re.sub(r"^(eval|evaluate|test|val)_", "", words)[:SHORT]
        number = None if isinstance(value, list | bool) else as_number(value)
        if short and short not in KNOWN and number is not None:
            named.setdefault(short, number)
    return named


def as_number(value: Any) -> float | None:
    """A finite float, or None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def plain(metrics: Mapping[str, object] | None, hidden: Collection[str] = ()) -> dict[str, object]:
    """Metrics as JSON types, but those that are hidden; what is not finite becomes null."""

    def one(value: object) -> object:
        if isinstance(value, list):
            return [one(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: one(value) for name, value in (metrics or {}).items() if name not in hidden}
