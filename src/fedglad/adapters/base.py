"""What all adapters have in common, and what those share that compare a group with its past."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.core.checks import check
from fedglad.records import CANCELLED, Statistics, indicator

Grouping = Literal["tensor", "layer", "all"] | Callable[[str], str]
AdapterState = dict[str, np.ndarray]
GROUPS = "tensor, layer or all: what is measured and scaled together"


@dataclass(frozen=True)
class Groups:
    """Which tensors are measured and scaled together: labels, and each tensor's place in them.

    >>> layers = Adapter(groups="layer").group({"a.weight": 6, "a.bias": 2, "b.weight": 3})
    >>> layers.labels, layers.sum({"a.weight": 1.0, "a.bias": 2.0, "b.weight": 4.0})
    (('a', 'b'), array([3., 4.]))
    """

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

    >>> from fedglad import Statistics
    >>> cohort = Statistics({"w": 5.0}, {"w": 2.5}, {"w": 1.25}, (0.5, 0.5))
    >>> Adapter().adapt(cohort, Adapter().group({"w": 1}), {}, t=0)[0]  # none: s is 1
    Factors(gsi=array([2.]), baseline=array([0.]), scale=array([1.]), shrink=None)
    """

    gsi: np.ndarray
    baseline: np.ndarray
    scale: np.ndarray
    shrink: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """No adaptation: every factor is 1; GSI is measured all the same.

    >>> class Cautious(Adapter):  # an own rule: s = 1/GSI
    ...     def scale(self, stats, groups):
    ...         return np.full(len(groups.labels), 1 / stats.gsi_all)
    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, adapter=Cautious())
    >>> server.step([{"w": torch.tensor([g])} for g in (7.0, -1.0)]).scale  # GSI is 5/3
    {'w': 0.6}
    """

    compares: ClassVar[bool] = False  # means nothing for a cohort of one
    needs_model: ClassVar[bool] = False  # ‖θ‖² is in Statistics
    needs_population: ClassVar[bool] = False  # looks at the number of clients there are
    shrinks: ClassVar[bool] = False  # multiplies θ after the step: `Factors.shrink`

    groups: Annotated[Grouping, GROUPS] = "tensor"
    min_group: Annotated[int, "a layer with a smaller tensor becomes one group"] = 1

    def __post_init__(self) -> None:
        if not callable(self.groups) and self.groups not in ("tensor", "layer", "all"):
            raise ValueError(
                f"{type(self).__name__}(groups={self.groups!r}): choose 'tensor', 'layer', 'all' "
                "or a function from a tensor's name to its group's"
            )
        check(self, min_group=(self.min_group >= 1, "1 or more"))

    @property
    def direction(self) -> float | None:
        """Decay β of a running mean m ← βm + (1−β)ḡ the server keeps; Statistics has ⟨ḡ, m⟩ then.

        m starts as 0; after t rounds its weights sum to 1 − β^t.
        """
        return None

    @property
    def adaptive(self) -> bool:
        """Whether its factors may change from round to round."""
        return type(self) is not Adapter

    @property
    def beyond_records(self) -> str | None:
        """What it looks at that a run's record does not have; None: it can be replayed."""
        if self.direction is not None:
            return (
                "compares each round's mean update with those before it, and a record has norms "
                "of updates, no inner products"
            )
        if self.needs_model:
            return "goes by the norm of the model, which a record does not have"
        return None

    def bounds(self, t: int) -> tuple[float, float]:
        """Between which it keeps its factors in the t-th round that steps; ∓∞ for none."""
        return -math.inf, math.inf

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

    def start(self, groups: Groups) -> AdapterState:
        """What it remembers before the first round."""
        return {}

    def adapt(
        self, stats: Statistics, groups: Groups, state: AdapterState, t: int
    ) -> tuple[Factors, AdapterState]:
        """The factors of round t (counting rounds that stepped) and what to remember."""
        gsi = gsi_of(stats, groups)
        return Factors(gsi, np.zeros_like(gsi), self.scale(stats, groups)), state

    def scale(self, stats: Statistics, groups: Groups) -> np.ndarray:
        """The factors of a rule without memory."""
        return np.ones(len(groups.labels))


def _layer(name: str) -> str:
    """The module a tensor belongs to: `conv1` of `conv1.weight`, or of `conv1/weight`."""
    return name[: max(name.rfind("."), name.rfind("/"), 0)] or "(root)"


def gsi_of(stats: Statistics, groups: Groups) -> np.ndarray:
    return indicator(groups.sum(stats.sum_sq), groups.sum(stats.mean_sq), stats.weights)


def capped_ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
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

    >>> Relative(gamma=0.25).compare(np.array([3.0]), np.array([True]), past=np.array([2.0]), t=4)
    (array([2.]), array([1.5]), array([2.1]))
    """

    gamma: Annotated[
        float, "how fast the bounds open: 1 ± γt; 0: no adaptation, inf: no bounds"
    ] = 0.02
    beta: Annotated[float, "how slowly the baseline follows"] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            gamma=(self.gamma >= 0, "0 or more, inf for no bounds"),
            beta=(0 <= self.beta < 1, "in [0, 1)"),
        )

    def bounds(self, t: int) -> tuple[float, float]:
        """1 ± γt. In the first round, and with γ = 0, all factors are 1 and no bound is met."""
        if not self.gamma or not t:
            return super().bounds(t)
        return max(0.0, 1 - self.gamma * t), 1 + self.gamma * t

    def start(self, groups: Groups) -> AdapterState:
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
