"""What is read off the rounds of one run."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fedglad.analysis.statistics import spread
from fedglad.studies.paper.cells import PaperError
from fedglad.studies.paper.results import FinishedRun


def last10(result: FinishedRun) -> float:
    """The paper's figure: the mean accuracy over the last 10 rounds that were tested."""
    return 100 * result.summary["last10_accuracy"]


def norm_ratio(result: FinishedRun) -> float:
    """std/mean of the updates' squared norms, averaged over the rounds."""
    return fmean(value for value in result.columns["norm_ratio"] if value is not None)


@dataclass(frozen=True)
class Correlation:
    """GSI and label similarity of the rounds; the interval takes the rounds as independent."""

    similarity: list[float]
    gsi: list[float]
    r: float | None
    interval: tuple[float, float] | None


def correlation(result: FinishedRun) -> Correlation:
    """Pearson's r, with Fisher's 95 % interval; None where a side does not vary."""
    pairs = zip(result.columns["label_similarity"], result.columns["gsi_all"], strict=True)
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    x, y = [pair[0] for pair in known], [pair[1] for pair in known]
    if len(known) < 3 or min(np.ptp(x), np.ptp(y)) == 0:
        return Correlation(x, y, None, None)
    r = float(np.corrcoef(x, y)[0, 1])
    if len(known) == 3 or abs(r) >= 1:
        return Correlation(x, y, r, None)
    half = 1.96 / math.sqrt(len(known) - 3)
    return Correlation(x, y, r, (math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)))


def fluctuations(result: FinishedRun) -> list[dict[str, Any]]:
    """GSI of every group over the rounds, in the order of the model; `relative` is std/mean."""
    groups: list[dict[str, Any]] = []
    for name, parts in result.columns["groups"].items():
        values = [value for value in parts["gsi"] if value is not None]
        mean, std = fmean(values), spread(values) or 0.0
        numbers = {"mean": mean, "std": std, "relative": std / mean}
        groups.append({"group": name, **numbers, "lowest": min(values), "highest": max(values)})
    return groups


def bad_round(result: FinishedRun) -> dict[str, Any]:
    """The scripted round t: accuracy before and after it, its GSI and the lowest of the others.

    Both accuracies have to be tested.
    """
    sampler = result.config.to_dict()["sampler"]
    t = min(map(int, {**sampler.get("cohorts", {}), **sampler.get("largest_class", {})}))
    gsi, tested = result.columns["gsi_all"], result.columns["test_accuracy"]
    if tested[t - 1] is None or tested[t] is None:
        raise PaperError(f"{result.path}: rounds {t - 1} and {t} were not tested: eval_every=1")
    return {
        "t": t,
        "before": 100 * tested[t - 1],
        "after": 100 * tested[t],
        "gsi": gsi[t],
        "lowest_other": min(v for k, v in enumerate(gsi) if k != t and v is not None),
    }
