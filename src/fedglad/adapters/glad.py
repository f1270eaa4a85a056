"""Rules that compare a round with the rounds before it: FedGLAD, and two of our own."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedglad.adapters.base import AdapterState, Factors, Groups, Relative, capped_ratio, gsi_of
from fedglad.records import CANCELLED, Statistics


@dataclass(frozen=True, kw_only=True)
class Glad(Relative):
    """FedGLAD (Yang et al. 2023, Alg. 1): the step follows this round's disagreement.

        s = clip(GSI / B, 1 − γt, 1 + γt),  then  B ← βB + (1−β) GSI

    B starts as the group's first GSI. A group whose updates are all zero keeps s = 1 and its B;
    one whose updates cancel (GSI ≥ 1000) gets 1 + γt and keeps its B. γ = 0: no adaptation; γ = ∞:
    no bounds. A layer with a tensor of fewer than `min_group` elements becomes one group.
    arXiv:2301.10400.

    Differs from the paper: weights need not be equal, and the two degenerate cases.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(2)}, adapter=Glad(gamma=0.5))
    >>> for second in (1.0, -0.5):  # they agree, then they do not
    ...     record = server.step([{"w": torch.tensor([1.0, g])} for g in (1.0, second)])
    >>> record.baseline["w"], round(record.scale["w"], 3)  # GSI is √1.625/√1.0625
    (1.0, 1.237)
    """

    compares: ClassVar[bool] = True

    def adapt(
        self, stats: Statistics, groups: Groups, state: AdapterState, t: int
    ) -> tuple[Factors, AdapterState]:
        gsi = gsi_of(stats, groups)
        moved = groups.sum(stats.sum_sq) > 0
        baseline, scale, following = self.compare(gsi, moved, state["baseline"], t)
        return Factors(gsi, baseline, scale), {"baseline": following}


@dataclass(frozen=True, kw_only=True)
class Pooled(Relative):
    """The optimal rate ⟨ḡ, g_c⟩/‖ḡ‖², its numerator pooled over rounds; g_c: the mean of all N.

        P = (‖ḡ‖² − Σw²‖g‖²) / (1 − Σw²),  V = (1 − r/N)(‖ḡ‖² − P),  P_N = ‖ḡ‖² − V
        P̄ ← βP̄ + (1−β) P_N,  x = P̄ / ‖ḡ‖²
        s = clip(x / E, 1 − γt, 1 + γt),  then  E ← βE + (1−β) x

    P is unbiased for ‖g_c‖² in an endless population, P_N in one of N from which r are drawn
    without replacement with equal weights; an unknown N counts as endless, and a sampler that may
    draw a client twice (md, clustered) leaves a small bias. P̄ and E start as the first P_N and x.
    P̄ ≤ 0: s = 1. Updates that are all zero or cancel, and a cohort of one client (or of one with
    all but 1/2000 of the weight), leave P̄ as it is. A rule of our own.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, adapter=Pooled(gamma=0.5, beta=0.5))
    >>> [server.step([{"w": torch.tensor([g])}] * 2).scale["w"] for g in (1.0, 2.0)]  # (1+4)/2/4
    [1.0, 0.625]
    """

    compares: ClassVar[bool] = True
    needs_population: ClassVar[bool] = True

    def start(self, groups: Groups) -> AdapterState:
        return {**super().start(groups), "pooled": np.zeros(len(groups.labels))}  # 0: none yet

    def adapt(
        self, stats: Statistics, groups: Groups, state: AdapterState, t: int
    ) -> tuple[Factors, AdapterState]:
        gsi = gsi_of(stats, groups)
        weights = np.array(stats.weights) / math.fsum(stats.weights)
        pairs = 1 - float(weights @ weights)
        total_sq = math.fsum(stats.weights) ** 2
        mean_sq = groups.sum(stats.mean_sq) / total_sq
        moved = groups.sum(stats.sum_sq) > 0

        pooled = state["pooled"]
        if pairs > 1e-3:
            unbiased = (mean_sq - groups.sum(stats.sum_sq2) / total_sq) / pairs
            unseen = 1 - min(1.0, stats.r / stats.N) if stats.N else 1.0
            now = mean_sq - unseen * (mean_sq - unbiased)
            following = np.where(pooled == 0, now, self.beta * pooled + (1 - self.beta) * now)
            pooled = np.where(moved & (gsi < CANCELLED), following, pooled)

        x = capped_ratio(pooled, mean_sq)
        baseline, scale, following = self.compare(x, moved & (pooled > 0), state["baseline"], t)
        return Factors(gsi, baseline, scale), {"baseline": following, "pooled": pooled}


@dataclass(frozen=True, kw_only=True)
class Aligned(Relative):
    """The optimal rate ⟨ḡ, g_c⟩/‖ḡ‖², with past rounds' mean m in the place of g_c.

        y = ⟨ḡ, m⟩ / ‖ḡ‖²,  m = Σ_i β^i ḡ_{t−1−i} / Σ_i β^i
        s = clip(y / E, 1 − γt, 1 + γt),  then  E ← βE + (1−β) y

    There is no m in the first round, and no E in the second: s = 1 in both, and where E ≤ 0. A
    cohort that opposes its past is slowed down to 0 at most, not turned round. Keeps one model, m.
    A rule of our own.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, adapter=Aligned(gamma=0.5))
    >>> [server.step([{"w": torch.tensor([g])}]).scale["w"] for g in (1.0, 1.0, -1.0)]
    [1.0, 1.0, 0.0]
    """

    @property
    def direction(self) -> float:
        return self.beta

    def adapt(
        self, stats: Statistics, groups: Groups, state: AdapterState, t: int
    ) -> tuple[Factors, AdapterState]:
        mean_sq, along = groups.sum(stats.mean_sq), groups.sum(stats.direction)
        y = capped_ratio(along / (1 - self.beta**t if t else 1.0), mean_sq)  # 0 in the first round
        baseline, scale, following = self.compare(y, mean_sq > 0, state["baseline"], t)
        return Factors(gsi_of(stats, groups), baseline, scale), {"baseline": following}
