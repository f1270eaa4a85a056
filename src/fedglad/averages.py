"""Averages of the server's past models: what one deploys. Clients still train on the newest.

With few clients a round the newest model θ jumps about with each cohort; the average of those that
it has been is steadier, costs a model of memory, and changes nothing in training.

>>> import torch
>>> from fedglad import Server
>>> server = Server({"w": torch.zeros(1)}, average=EMA(beta=0.5))
>>> for g in (-1.0, -3.0, 2.0):  # θ is 1, 4 and then 2
...     record = server.step([{"w": torch.tensor([g])}])
>>> server.averaged["w"]  # 1, (1 + 4)/2 = 2.5, (2.5 + 2)/2
tensor([2.2500])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Average(ABC):
    """What all have in common. An own one has `follow`.

    >>> class Newest(Average):
    ...     def follow(self, x, theta, past, t):
    ...         x.copy_(theta)
    """

    test: Annotated[bool, "test the average too whenever the model is tested"] = True

    def keeps(self) -> int:
        """How many vectors of the model's size it needs beside x: `past`, zeros at first."""
        return 0

    @abstractmethod
    def follow(self, x: Tensor, theta: Tensor, past: list[Tensor], t: int) -> None:
        """Moves x in place, to the average with θ after round t; t counts rounds that stepped.

        It is called for stretches of the model, in the pass that steps it, and must do the same
        for every coordinate. What x holds at t = 0 must not matter.
        """


@dataclass(frozen=True, kw_only=True)
class NoAverage:
    """None: the newest model is all there is.

    >>> from fedglad.config import load
    >>> load("mnist")[1].sections["average"]
    NoAverage()
    """


@dataclass(frozen=True, kw_only=True)
class EMA(Average):
    """Exponential moving average: x ← (1−a)x + aθ, a = max(1−β, 1/(t+1)).

    The plain mean of all models until there are 1/(1−β) of them; then each counts β times as much
    as the next. Morales-Brotons et al. 2024, arXiv:2411.18704.

    >>> EMA(beta=0.9).share(0), EMA(beta=0.9).share(3), round(EMA(beta=0.9).share(99), 3)
    (1.0, 0.25, 0.1)
    """

    beta: Annotated[float, "what stays of the average in a round"] = 0.9

    def __post_init__(self) -> None:
        check(self, beta=(0 <= self.beta < 1, "in [0, 1)"))

    def share(self, t: int) -> float:
        """a, what the newest model is of the average."""
        return max(1 - self.beta, 1 / (t + 1))

    def follow(self, x: Tensor, theta: Tensor, past: list[Tensor], t: int) -> None:
        x.lerp_(theta, self.share(t))


@dataclass(frozen=True, kw_only=True)
class Poly(Average):
    """Polynomial-decay average: x ← (1−a)x + aθ, a = (1+γ)/(t+1+γ).

    Model t counts like t^γ, so it always looks at the same share of the past: no horizon to
    choose. Shamir & Zhang 2013, arXiv:1212.1824. γ = 0 is the mean of all models.

    >>> Poly(gamma=3).share(0), Poly(gamma=3).share(12), Poly(gamma=0).share(3)
    (1.0, 0.25, 0.25)
    """

    gamma: Annotated[float, "γ: larger forgets faster"] = 3.0

    def __post_init__(self) -> None:
        check(self, gamma=(0 <= self.gamma <= 1e6, "in [0, 1e6]"))

    def share(self, t: int) -> float:
        """a, what the newest model is of the average."""
        return (1 + self.gamma) / (t + 1 + self.gamma)

    def follow(self, x: Tensor, theta: Tensor, past: list[Tensor], t: int) -> None:
        x.lerp_(theta, self.share(t))


@dataclass(frozen=True, kw_only=True)
class Window(Average):
    """The mean of the last W models, each of which it keeps (Kaddour 2022, arXiv:2209.14981).

    >>> Window(size=3).keeps()
    3
    """

    size: Annotated[int, "W: models that are averaged, and kept"] = 10

    def __post_init__(self) -> None:
        check(self, size=(1 <= self.size <= 1000, "from 1 to 1000: each is kept"))

    def keeps(self) -> int:
        return self.size

    def follow(self, x: Tensor, theta: Tensor, past: list[Tensor], t: int) -> None:
        past[t % self.size].copy_(theta)
        there = past[: t + 1]
        x.copy_(there[0])
        for model in there[1:]:
            x.add_(model)
        x.div_(len(there))


REGISTRY: dict[str, type] = {
    "none": NoAverage,
    "ema": EMA,
    "poly": Poly,
    "window": Window,
}
