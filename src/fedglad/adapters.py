"""Adapters: Statistics in, one factor per group out. They know no optimizer and no tensor.

An adapter is frozen settings; what it remembers is a dict of arrays with one entry per group.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.records import CANCELLED, Statistics, indicator

Grouping = Literal["tensor", "layer", "all"] | Callable[[str], str]
State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Groups:
    """Which tensors are measured and scaled together: labels, and each tensor's place in them."""

    labels: tuple[str, ...]
    index: np.ndarray

    def sum(self, per_tensor: Mapping[str, float]) -> np.ndarray:
        """Sums over the tensors of each group."""
        values = np.fromiter(per_tensor.values(), float, len(per_tensor))
        return np.bincount(self.index, weights=values, minlength=len(self.labels))


@dataclass(frozen=True)
class Factors:
    """An adapter's answer, per group: GSI, what it was compared with (0: nothing yet), and s."""

    gsi: np.ndarray
    baseline: np.ndarray
    scale: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """No adaptation: every factor is 1; GSI is measured all the same."""

    compares: ClassVar[bool] = False  # means nothing for a cohort of one
    direction: ClassVar[float | None] = None
    """Decay β of a running mean m ← βm + (1−β)ḡ the server keeps; ⟨ḡ, m⟩ is in Statistics then."""

    groups: Annotated[Grouping, "tensor, layer or all: what is measured and scaled together"] = (
        "tensor"
    )
    min_group: Annotated[int, "a layer with a smaller tensor becomes one group"] = 1

    def __post_init__(self) -> None:
        if not callable(self.groups) and self.groups not in ("tensor", "layer", "all"):
            raise ValueError(
                f"{type(self).__name__}(groups={self.groups!r}): choose 'tensor', 'layer', 'all' "
                "or a function from a tensor's name to its group's"
            )
        if self.min_group < 1:
            raise ValueError(
                f"{type(self).__name__}(min_group={self.min_group!r}): must be 1 or more"
            )

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
        gsi = indicator(groups.sum(stats.sum_sq), groups.sum(stats.mean_sq), stats.weights)
        return Factors(gsi, np.zeros_like(gsi), self.scale(stats, groups)), state

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        """The factors of a rule without memory."""
        return np.ones(len(groups.labels))


def _layer(name: str) -> str:
    """The module a tensor belongs to: `conv1` of `conv1.weight`, or of `conv1/weight`."""
    return name[: max(name.rfind("."), name.rfind("/"), 0)] or "(root)"


@dataclass(frozen=True, kw_only=True)
class Glad(Adapter):
    """FedGLAD (Yang et al. 2023, Alg. 1): the step follows this round's disagreement.

        s = clip(GSI / B, 1 − γt, 1 + γt),  then  B ← βB + (1−β) GSI

    B starts as the group's first GSI. A group whose updates are all zero keeps s = 1 and its B;
    one whose updates cancel (GSI ≥ 1000) gets 1 + γt and keeps its B. γ = 0: no adaptation; γ = ∞:
    no bounds. A layer with a tensor of fewer than `min_group` elements becomes one group.

    Differs from the paper: weights need not be equal, and the two degenerate cases.
    """

    compares: ClassVar[bool] = True
    gamma: Annotated[
        float, "how fast the bounds open: 1 ± γt; 0: no adaptation, inf: no bounds"
    ] = 0.02
    beta: Annotated[float, "how slowly the baseline follows"] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma >= 0:
            raise ValueError(f"Glad(gamma={self.gamma!r}): must be 0 or more, inf for no bounds")
        if not 0 <= self.beta < 1:
            raise ValueError(f"Glad(beta={self.beta!r}): must be in [0, 1)")

    def start(self, groups: Groups) -> State:
        return {"baseline": np.zeros(len(groups.labels))}  # 0: none yet, as GSI is never 0

    def adapt(
        self, stats: Statistics, groups: Groups, state: State, t: int
    ) -> tuple[Factors, State]:
        sum_sq = groups.sum(stats.sum_sq)
        gsi = indicator(sum_sq, groups.sum(stats.mean_sq), stats.weights)
        cancelled = gsi >= CANCELLED
        usable = (sum_sq > 0) & ~cancelled
        known = state["baseline"] > 0

        baseline = np.where(usable & ~known, gsi, state["baseline"])
        bound = self.gamma * t if t else 0.0  # ∞ · 0 is no bound's worth
        ratio = np.divide(gsi, baseline, out=np.ones_like(gsi), where=usable)
        ratio[cancelled] = 1 + bound if math.isfinite(bound) else 1.0
        scale = np.clip(ratio, 1 - bound, 1 + bound)

        moved = np.where(usable, self.beta * baseline + (1 - self.beta) * gsi, baseline)
        return Factors(gsi, baseline, scale), {"baseline": moved}


@dataclass(frozen=True, kw_only=True)
class FedExP(Adapter):
    """One factor from this round alone: s = max(1, Σw‖g‖² / (2(‖ḡ‖² + ε))).

    At ε = 0 it is max(1, GSI²/2). Jhunjhunwala et al. 2023, arXiv:2301.09604.
    Differs from the paper: updates that cancel (GSI ≥ 1000) give 1, not an unbounded step.
    """

    compares: ClassVar[bool] = True
    groups: Annotated[Grouping, "tensor, layer or all: what is measured and scaled together"] = (
        "all"
    )
    eps: Annotated[float, "ε, added to the squared norm of the mean"] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps >= 0:
            raise ValueError(f"FedExP(eps={self.eps!r}): must be 0 or more")

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        top, mean_sq = groups.sum(stats.sum_sq), groups.sum(stats.mean_sq)
        usable = indicator(top, mean_sq, stats.weights) < CANCELLED
        total = math.fsum(stats.weights)
        half = np.divide(
            total * top, 2 * (mean_sq + self.eps), out=np.ones_like(top), where=usable & (top > 0)
        )
        return np.maximum(1.0, half)


@dataclass(frozen=True, kw_only=True)
class Fixed(Adapter):
    """The same factor in every round: what any adaptive rule has to beat."""

    value: Annotated[float, "the factor"] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.value <= 1e15:
            raise ValueError(
                f"Fixed(value={self.value!r}): must be positive and finite, up to 1e15"
            )

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        return np.full(len(groups.labels), self.value)


REGISTRY = {
    "none": Adapter,
    "glad": Glad,
    "fedexp": FedExP,
    "fixed": Fixed,
}
