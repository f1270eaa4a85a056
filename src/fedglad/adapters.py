"""Adapters: Statistics in, one factor per group out. They know no optimizer and no tensor.

An adapter is frozen settings; what it remembers is a dict of arrays with one entry per group.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.records import CANCELLED, Statistics, indicator

Grouping = Literal["tensor", "layer", "all"] | Callable[[str], str]
State = dict[str, np.ndarray]
GROUPS = "tensor, layer or all: what is measured and scaled together"


@dataclass(frozen=True)
class Groups:
    """Which tensors are measured and scaled together: labels, and each tensor's place in them."""

    labels: tuple[str, ...]
    index: np.ndarray

    def sum(self, per_tensor: Mapping[str, float] | None) -> np.ndarray:
        """Sums over the tensors of each group."""
        if per_tensor is None:
            raise ValueError("a statistic the adapter needs was not measured: see Statistics")
        values = np.fromiter(per_tensor.values(), float, len(per_tensor))
        return np.bincount(self.index, weights=values, minlength=len(self.labels))


@dataclass(frozen=True)
class Factors:
    """An adapter's answer, per group: GSI, what it was compared with (0: nothing yet), and s.

    `shrink` is what θ is multiplied with after the step, if anything.
    """

    gsi: np.ndarray
    baseline: np.ndarray
    scale: np.ndarray
    shrink: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """No adaptation: every factor is 1; GSI is measured all the same."""

    compares: ClassVar[bool] = False  # means nothing for a cohort of one
    needs_model: ClassVar[bool] = False  # ‖θ‖² is in Statistics

    groups: Annotated[Grouping, GROUPS] = "tensor"
    min_group: Annotated[int, "a layer with a smaller tensor becomes one group"] = 1

    def __post_init__(self) -> None:
        if not callable(self.groups) and self.groups not in ("tensor", "layer", "all"):
            raise ValueError(
                f"{type(self).__name__}(groups={self.groups!r}): choose 'tensor', 'layer', 'all' "
                "or a function from a tensor's name to its group's"
            )
        self._check("min_group", self.min_group, self.min_group >= 1, "1 or more")

    def _check(self, name: str, value: object, good: bool, must: str) -> None:
        if not good:
            raise ValueError(f"{type(self).__name__}({name}={value!r}): must be {must}")

    @property
    def direction(self) -> float | None:
        """Decay β of a running mean m ← βm + (1−β)ḡ the server keeps; Statistics has ⟨ḡ, m⟩ then.

        m starts as 0; after t rounds its weights sum to 1 − β^t.
        """
        return None

    def group(self, sizes: Mapping[str, int]) -> Groups:
        """The groups of tensors with these names and numbers of elements."""
        small = {_layer(name) for name, size in sizes.items() if 0 < size < self.min_group}

        def label(name: str) -> str:
            if callable(self.groups):
                given: Any = self.groups(name)
                if not isinstance(given, str):
                    raise TypeError(f"groups({name!r}) returned {given!r}: it must be a string")
                return given
            if self.groups == "all":
                return "all"
            return _layer(name) if self.groups == "layer" or _layer(name) in small else name

        of_tensor = [label(name) for name in sizes]
        labels = tuple(dict.fromkeys(of_tensor))
        place = {name: i for i, name in enumerate(labels)}
        return Groups(labels, np.array([place[name] for name in of_tensor]))

    def start(self, groups: Groups) -> State:
        """What it remembers before the first round."""
        return {}

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        """The factors of round t (counting rounds that stepped) and what to remember."""
        gsi = _gsi(stats, groups)
        return Factors(gsi, np.zeros_like(gsi), self.scale(stats, groups)), state

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        """The factors of a rule without memory."""
        return np.ones(len(groups.labels))


def _layer(name: str) -> str:
    """The module a tensor belongs to: `conv1` of `conv1.weight`, or of `conv1/weight`."""
    return name[: max(name.rfind("."), name.rfind("/"), 0)] or "(root)"


def _gsi(stats: Statistics, groups: Groups) -> np.ndarray:
    return indicator(groups.sum(stats.sum_sq), groups.sum(stats.mean_sq), stats.weights)


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom, capped at ±1000 as GSI is."""
    small = np.abs(top) / CANCELLED < bottom
    return np.divide(top, bottom, out=CANCELLED * np.sign(top), where=small)


@dataclass(frozen=True, kw_only=True)
class Relative(Adapter):
    """A number x of each group against its own past: what Glad, Pooled and Aligned share.

        s = clip(x / E, 1 − γt, 1 + γt),  then  E ← βE + (1−β) x

    E starts as the first x there is. Where there is none in a round, s = 1 and E stays. An x of
    1000 or more gets 1 + γt, one of −1000 or less 1 − γt, and E stays: one such round would be
    remembered for hundreds. A factor is never negative. γ = 0: no adaptation; γ = ∞: no bounds.
    """

    gamma: Annotated[
        float, "how fast the bounds open: 1 ± γt; 0: no adaptation, inf: no bounds"
    ] = 0.02
    beta: Annotated[float, "how slowly the baseline follows"] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("gamma", self.gamma, self.gamma >= 0, "0 or more, inf for no bounds")
        self._check("beta", self.beta, 0 <= self.beta < 1, "in [0, 1)")

    def start(self, groups: Groups) -> State:
        return {"baseline": np.zeros(len(groups.labels))}  # 0: none yet

    def compare(
        self, x: np.ndarray, there: np.ndarray, past: np.ndarray, t: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """E with its first value if it had none, s, and the next E; `there`: which x there are."""
        far = there & (np.abs(x) >= CANCELLED)
        usable = there & ~far
        baseline = np.where(usable & (past == 0), x, past)

        bound = self.gamma * t if t else 0.0  # ∞ · 0 is no bound's worth
        enough = usable & (baseline > 1e-12)  # at or below 0 there is nothing to compare with
        ratio = np.divide(x, baseline, out=np.ones_like(x), where=enough)
        ratio[far] = 1 + np.sign(x[far]) * bound if math.isfinite(bound) else 1.0
        scale = np.clip(ratio, max(0.0, 1 - bound), 1 + bound)

        moved = np.where(usable, self.beta * baseline + (1 - self.beta) * x, baseline)
        return baseline, scale, moved


@dataclass(frozen=True, kw_only=True)
class Glad(Relative):
    """FedGLAD (Yang et al. 2023, Alg. 1): the step follows this round's disagreement.

        s = clip(GSI / B, 1 − γt, 1 + γt),  then  B ← βB + (1−β) GSI

    B starts as the group's first GSI. A group whose updates are all zero keeps s = 1 and its B;
    one whose updates cancel (GSI ≥ 1000) gets 1 + γt and keeps its B. γ = 0: no adaptation; γ = ∞:
    no bounds. A layer with a tensor of fewer than `min_group` elements becomes one group.
    arXiv:2301.10400.

    Differs from the paper: weights need not be equal, and the two degenerate cases.
    """

    compares: ClassVar[bool] = True

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        gsi = _gsi(stats, groups)
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
    """

    compares: ClassVar[bool] = True

    def start(self, groups: Groups) -> State:
        return {**super().start(groups), "pooled": np.zeros(len(groups.labels))}  # 0: none yet

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        gsi = _gsi(stats, groups)
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

        x = _ratio(pooled, mean_sq)
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
    """

    @property
    def direction(self) -> float:
        return self.beta

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        mean_sq, along = groups.sum(stats.mean_sq), groups.sum(stats.direction)
        y = _ratio(along / (1 - self.beta**t if t else 1.0), mean_sq)  # 0 in the first round
        baseline, scale, following = self.compare(y, mean_sq > 0, state["baseline"], t)
        return Factors(_gsi(stats, groups), baseline, scale), {"baseline": following}


@dataclass(frozen=True, kw_only=True)
class FedExP(Adapter):
    """One factor from this round alone: s = max(1, Σw‖g‖² / (2(‖ḡ‖² + ε))).

    At ε = 0 it is max(1, GSI²/2). Jhunjhunwala et al. 2023, arXiv:2301.09604.
    Differs from the paper: updates that cancel (GSI ≥ 1000) give 1, not an unbounded step.
    """

    compares: ClassVar[bool] = True
    groups: Annotated[Grouping, GROUPS] = "all"
    eps: Annotated[float, "ε, added to the squared norm of the mean"] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("eps", self.eps, self.eps >= 0, "0 or more")

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        top, mean_sq = groups.sum(stats.sum_sq), groups.sum(stats.mean_sq)
        usable = indicator(top, mean_sq, stats.weights) < CANCELLED
        total = math.fsum(stats.weights)
        half = np.divide(
            total * top, 2 * (mean_sq + self.eps), out=np.ones_like(top), where=usable & (top > 0)
        )
        return np.maximum(1.0, half)


@dataclass(frozen=True, kw_only=True)
class FedHyper(Adapter):
    """FedHyper-G: the factor grows while successive rounds agree, and falls when they do not.

        a_t = clip(a_{t−1} + ⟨ḡ_t, ḡ_{t−1}⟩, 1/b, b),  a_0 = 1

    It depends on the updates' scale, and keeps one model, ḡ_{t−1}. Wang et al. 2024,
    arXiv:2310.03156.
    """

    groups: Annotated[Grouping, GROUPS] = "all"
    bound: Annotated[float, "b: the factor stays between 1/b and b"] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("bound", self.bound, 1 <= self.bound <= 1e15, "from 1 to 1e15")

    @property
    def direction(self) -> float:
        return 0.0  # m is the last ḡ itself, and 0 before the first

    def start(self, groups: Groups) -> State:
        return {"factor": np.ones(len(groups.labels))}

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        gsi, along = _gsi(stats, groups), groups.sum(stats.direction)
        factor = np.clip(state["factor"] + along, 1 / self.bound, self.bound)
        return Factors(gsi, np.zeros_like(gsi), factor), {"factor": factor}


@dataclass(frozen=True, kw_only=True)
class FedLWS(Adapter):
    """Shrinks each layer after the step, the more the updates differ: θ ← γ(θ − ḡ).

        γ = ‖θ‖ / (‖θ‖ + τ‖ḡ‖),  τ = clip(b √(Σw‖g‖² − ‖ḡ‖²), τ_min, τ_max)

    ‖θ‖ is from before the step, ḡ what enters the server optimizer: with another than SGD at rate
    1 the shrinking follows its own step. It depends on the updates' scale. A layer is a group:
    alone, a bias that starts as 0 would be held there. Shi et al. 2025, arXiv:2503.15111.
    Differs from the paper: it averages ‖g_k − ḡ‖ in the place of the root; this form streams. A
    layer that is all zero is not shrunk: γ would be 0, and it would never move.
    """

    needs_model: ClassVar[bool] = True
    groups: Annotated[Grouping, GROUPS] = "layer"
    slope: Annotated[float, "b: how much τ grows with the updates' spread"] = 0.03
    min_tau: Annotated[float, "the least τ"] = 0.01
    max_tau: Annotated[float, "the largest τ"] = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("slope", self.slope, 0 <= self.slope <= 1e15, "0 or more, up to 1e15")
        self._check("min_tau", self.min_tau, 0 <= self.min_tau <= 1e15, "0 or more, up to 1e15")
        most = self.min_tau <= self.max_tau <= 1e15
        self._check("max_tau", self.max_tau, most, f"min_tau={self.min_tau} or more, up to 1e15")

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        factors, state = super().adapt(stats, groups, state, t)
        total, mean_sq = math.fsum(stats.weights), groups.sum(stats.mean_sq)
        variance = np.maximum(groups.sum(stats.sum_sq) / total - mean_sq / total**2, 0)
        tau = np.clip(self.slope * np.sqrt(variance), self.min_tau, self.max_tau)
        norm = np.sqrt(groups.sum(stats.model_sq))
        shrink = np.divide(
            norm, norm + tau * np.sqrt(mean_sq), out=np.ones_like(norm), where=norm > 0
        )
        return replace(factors, shrink=shrink), state


@dataclass(frozen=True, kw_only=True)
class Fixed(Adapter):
    """The same factor in every round: what any adaptive rule has to beat."""

    value: Annotated[float, "the factor"] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        good = 0 < self.value <= 1e15
        self._check("value", self.value, good, "positive and finite, up to 1e15")

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        return np.full(len(groups.labels), self.value)


REGISTRY = {
    "none": Adapter,
    "glad": Glad,
    "fedexp": FedExP,
    "fixed": Fixed,
    "fedhyper": FedHyper,
    "fedlws": FedLWS,
    "pooled": Pooled,
    "aligned": Aligned,
}
