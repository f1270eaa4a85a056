"""What is read off the rounds of one run."""

import math
from dataclasses import dataclass
from statistics import fmean

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


@dataclass(frozen=True)
class Fluctuation:
    """GSI of a group over the rounds."""

    group: str
    mean: float
    std: float
    lowest: float
    highest: float


def fluctuations(result: FinishedRun) -> list[Fluctuation]:
    """Of every group in the order of the model."""
    groups: list[Fluctuation] = []
    for name, parts in result.columns["groups"].items():
        values = [value for value in parts["gsi"] if value is not None]
        groups.append(
            Fluctuation(name, fmean(values), spread(values) or 0.0, min(values), max(values))
        )
    return groups


@dataclass(frozen=True)
class BadRound:
    """The scripted round t: accuracy before and after it, its GSI and the lowest of the others."""

    t: int
    before: float
    after: float
    gsi: float
    lowest_other: float


def bad_round(result: FinishedRun) -> BadRound:
    """Of a run whose sampler has a script; every round of it has to be tested."""
    sampler = result.config.to_dict()["sampler"]
    scripted = {**sampler.get("cohorts", {}), **sampler.get("largest_class", {})}
    t = min(int(number) for number in scripted)
    gsi = result.columns["gsi_all"]
    others = [value for k, value in enumerate(gsi) if k != t and value is not None]
    tested = result.columns["test_accuracy"]
    if tested[t - 1] is None or tested[t] is None:
        raise PaperError(f"{result.path}: rounds {t - 1} and {t} were not tested: eval_every=1")
    return BadRound(t, 100 * tested[t - 1], 100 * tested[t], gsi[t], min(others))
