"""How far one client can move the model: norms and weights against what is usual."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

MAX_NORM = 1e12
ABSURD = 1e4  # times what is left out, as long as nothing is known: training has diverged
FASTEST = 8.0  # times that what is usual may grow or fall in a round
KINDS = ("norm", "extra", "buffers", "counters", "weight")
NOTHING = {"extra": 1e-6}  # what is usual where most have none of it at all


class Rejected(Exception):
    """An update is left out; the message is the reason kept in the record."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Bounds what one client can do to the model, by what is usual in its federation.

    The usual norm C follows the median M of each round's accepted norms: C ← √(C·M), at most 8
    times as much or as little. Fewer than half of the clients cannot lead it, and it locks nobody
    out. Before the first round C is max(1, ‖θ‖), and nothing is cut; if then one update, or its
    buffers, is more than `norm` times as long as the round's median, the round is skipped, once.

    | an update | is |
    |---|---|
    | longer than `clip` · C | cut to that length |
    | longer than `norm` · C | left out, unless more than half of the round's are so long |
    | of more weight than `weight` times the equal share, or half of the round | cut to that |

    What a client method sends beside its update is cut with it, and left out with it if it is too
    long for it; buffers are cut by how far they moved.

    Adaptive clipping to a quantile: Andrew et al. 2021, arXiv:1905.03871.
    Differs from the paper: C moves by how far the median is away, not by how many norms lie above
    it, so it has no rate to tune and does not jitter with few clients.

    `math.inf` switches a bound off, `Server(guard=None)` all of them.

    >>> import torch
    >>> from fedglad import Server
    >>> server = Server({"w": torch.zeros(1)}, guard=Guard(clip=3))
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 1.0, 1.0)])
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 1.0, 40.0)])
    >>> [client.get("clipped") for client in record.clients]  # 40 becomes 3
    [None, None, 0.075]
    """

    norm: Annotated[float, "times the usual norm from which an update is left out"] = 100.0
    clip: Annotated[float, "times the usual norm to which an update is cut"] = 3.0
    weight: Annotated[float, "times the equal share to which a client's weight is cut"] = 10.0

    def __post_init__(self) -> None:
        for name in ("norm", "clip", "weight"):
            value = getattr(self, name)
            if not value > 1:
                raise ValueError(f"Guard({name}={value!r}): the factor must be greater than 1")


@dataclass(frozen=True, kw_only=True)
class NoGuard:
    """No bounds but those of floating point: what the paper's numbers were made with."""


class Limits:
    """What is usual in a federation, and what that allows an update to be.

    What is usual is as it was before the round, so no update can shut out another of its own
    round. A round works on a copy and keeps it only if it stepped.
    """

    def __init__(self, guard: Guard | None, usual: Mapping[str, float] | None = None) -> None:
        self.guard = guard
        self.usual = dict(usual or {})
        self.seen: dict[str, list[float]] = {kind: [] for kind in KINDS}

    @classmethod
    def of(cls, guard: Guard | None, saved: Mapping[str, Any]) -> "Limits":
        """As a checkpoint has it; one of the first edition had the last norms and weights."""
        old = {"norms": "norm", "weights": "weight"}
        if saved.keys() != old.keys():
            usual = {str(kind): float(value) for kind, value in saved.items()}
            for kind, value in usual.items():
                if not 0 < value < math.inf:
                    raise ValueError(f"the usual {kind} is {value}")
            return cls(guard, usual)
        usual = {kind: upper_median(saved[name]) for name, kind in old.items()}
        return cls(guard, {kind: value for kind, value in usual.items() if value > 0})

    def copy(self) -> "Limits":
        """One that a round may change."""
        return Limits(self.guard, self.usual)

    def next(self) -> "Limits":
        """The same for the next round, after all that was seen in this one."""
        usual = dict(self.usual)
        for kind in self.seen:
            if (middle := self._middle(kind)) > 0:
                before = usual.get(kind, middle)
                step = min(max(math.sqrt(middle / before), 1 / FASTEST), FASTEST)
                usual[kind] = before * step
        if self.seen["weight"]:
            usual["count"] = float(len(self.seen["weight"]))
        return Limits(self.guard, usual)

    def measure(
        self, kind: str, value: float, start: float, most: float | None = None
    ) -> tuple[float, str]:
        """What a length is to be multiplied with, and why it is far from usual, or "".

        `start` is what is usual as long as nothing is known. `most` is how many times the usual
        are far from it, instead of the guard's own number.
        """
        if not value <= MAX_NORM:
            raise Rejected(f"{kind} {value:.3g} is above {MAX_NORM:.0e}")
        if not self.guard:
            return 1.0, ""
        usual, scale = self.usual.get(kind), 1.0
        if usual and value > 0:
            scale = min(1.0, min(self.guard.clip, self.guard.norm) * usual / value)
        most = self.guard.norm if most is None else most
        if value <= most * (usual or start):
            return scale, ""
        name = "norm" if kind == "norm" else f"norm of the {kind}"
        what = f"the usual {usual:.4g}" if usual else f"{start:.4g}, where nothing is usual yet"
        if not usual and value > ABSURD * most * start:  # also if all are like it
            raise Rejected(f"{name} {value:.4g} is more than {ABSURD * most:g} times {what}")
        return scale, f"{name} {value:.4g} is more than {most:g} times {what}"

    @property
    def ordinary(self) -> float:
        """The norm up to which an update is neither cut nor left out."""
        if not self.guard:
            return MAX_NORM
        return min(self.guard.clip, self.guard.norm) * self.usual.get("norm", 0.0)

    def cap(self, weight: float) -> float:
        """A client's weight, cut to what it may be by the weights of the rounds before."""
        usual = self.usual.get("weight")
        if not self.guard or not usual:
            return weight
        others = max(1.0, self.usual.get("count", math.inf) - 1)  # not over half of the round
        return min(weight, usual * min(self.guard.weight, others))

    def remember(self, **lengths: float) -> None:
        """Notes what was accepted: a norm, a weight, and so on."""
        for kind, value in lengths.items() if self.guard else ():
            self.seen[kind].append(value)

    def too_much(self, kind: str, most: float) -> float | None:
        """The largest of a first round, if it is more than so many times the median of all."""
        values, middle = self.seen[kind], self._middle(kind)
        if not self.guard or kind in self.usual or len(values) < 3 or not middle:
            return None
        return max(values) if max(values) > most * middle else None

    def _middle(self, kind: str) -> float:
        """The median of what was seen in this round; 0 if that says nothing."""
        values = self.seen[kind]
        return upper_median(values) or (NOTHING.get(kind, 0.0) if values else 0.0)

    @property
    def farthest(self) -> float:
        """How many times the usual length is left out."""
        return self.guard.norm if self.guard else math.inf

    @property
    def heaviest(self) -> float:
        """How many times the equal share a client may have."""
        return self.guard.weight if self.guard else math.inf

    def longest(self, steps: Sequence[int]) -> int:
        """How many local steps of a round's clients are believed."""
        if not self.guard or math.isinf(self.guard.weight):
            return max(steps)
        return math.ceil(self.guard.weight * upper_median(steps))

    def heed(self, weights: Sequence[float]) -> list[float]:
        """A whole round's weights, none over `weight` times the equal share, or over half."""
        n = len(weights)
        if not self.guard or math.isinf(self.guard.weight) or n < 2:
            return list(weights)
        # Of two clients each is half of the round: there, so many times the other.
        most = min(self.guard.weight / n, 1 / 2) if n > 2 else 1 - 1 / (self.guard.weight + 1)
        ordered = sorted(weights, reverse=True)
        for count in range(n):  # so many are cut, to one level
            rest, left = math.fsum(ordered[count:]), 1 - count * most
            level = most * rest / left if left > 1e-9 else ordered[-1]
            if ordered[count] <= level * (1 + 1e-12):
                return [min(weight, level) if count else weight for weight in weights]
        return list(weights)


def upper_median(values: Collection[float]) -> float:
    """The upper of the middle two; 0 if there is none."""
    middle = len(values) // 2
    array = np.fromiter(values, float, len(values))
    return float(np.partition(array, middle)[middle]) if values else 0.0


REGISTRY = {"adaptive": Guard, "none": NoGuard}
