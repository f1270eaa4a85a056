"""Schedules: how a rate changes over the rounds of a run, at the server and at the clients.

>>> [schedule("cosine").factor(t, 4) for t in (0, 2, 4)]
[1.0, 0.5, 0.0]

A rate of round t is its lr times `factor(t, rounds)`. `[server]` has one as `schedule`, clients as
`rounds_schedule`, with `over` and `drop` beside them; an own one is named "package.module:Class".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Annotated, Any, ClassVar, Protocol

from fedglad.core import user_code
from fedglad.core.checks import check

SCHEDULE = "how the rate changes over the rounds: constant, linear, cosine, step, exponential"
OVER = (
    "linear, cosine: rounds until the rate is 0, exponential: until it is `drop` times as much, "
    "0 for the whole run; step: rounds between drops"
)
DROP = "step, exponential: what the rate is multiplied by after every `over` rounds"


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """What all have in common. An own one is a dataclass that has `factor`.

    >>> class Inverse(Schedule):  # 1/√(1 + t)
    ...     def factor(self, t, rounds):
    ...         return 1 / math.sqrt(1 + t)
    >>> Inverse().factor(3, 10)
    0.5
    """

    drop: Annotated[float, DROP] = 0.1

    ends: ClassVar[bool] = True  # whether it must know how many rounds there are
    paced: ClassVar[bool] = (
        False  # whether `over` must be set, for the whole run would mean nothing
    )

    def __post_init__(self) -> None:
        check(self, drop=(0 < self.drop <= 1, "in (0, 1]"))

    @abstractmethod
    def factor(self, t: int, rounds: int) -> float:
        """What the rate is multiplied by in round t, counted from 0; `rounds` is `over`, or how
        many rounds the run has."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Constant: η in every round.

    >>> Constant().factor(t=7, rounds=10)
    1.0
    """

    ends: ClassVar[bool] = False

    def factor(self, t: int, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """Linear: η (1 − t/over), and 0 from round `over` on.

    >>> [Linear().factor(t, rounds=4) for t in (0, 1, 4, 5)]
    [1.0, 0.75, 0.0, 0.0]
    """

    def factor(self, t: int, rounds: int) -> float:
        return 1 - min(t / rounds, 1.0)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Cosine: η (1 + cos(π t/over))/2, and 0 from round `over` on.

    Loshchilov & Hutter 2017, arXiv:1608.03983.

    >>> [Cosine().factor(t, rounds=4) for t in (0, 2, 4)]
    [1.0, 0.5, 0.0]
    """

    def factor(self, t: int, rounds: int) -> float:
        return (1 + math.cos(math.pi * min(t / rounds, 1))) / 2


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """Step: η drop^⌊t/over⌋, a drop after every `over` rounds.

    >>> [Step(drop=0.5).factor(t, rounds=10) for t in (9, 10, 25)]
    [1.0, 0.5, 0.25]
    """

    ends: ClassVar[bool] = False
    paced: ClassVar[bool] = True

    def factor(self, t: int, rounds: int) -> float:
        return self.drop ** (t // rounds)


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """Exponential: η drop^(t/over), the same drop little by little.

    With over = 1 and drop = γ it is γ^t.

    >>> [Exponential(drop=0.25).factor(t, rounds=10) for t in (0, 5, 10, 20)]
    [1.0, 0.5, 0.25, 0.0625]
    """

    def factor(self, t: int, rounds: int) -> float:
        return self.drop ** (t / rounds)


REGISTRY: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "step": Step,
    "exponential": Exponential,
}


def schedule(name: str, drop: float = 0.1) -> Schedule:
    """The schedule of a name, or of "package.module:Class"; ValueError if there is none.

    >>> schedule("step", drop=0.5)
    Step(drop=0.5)
    >>> schedule("stp")
    Traceback (most recent call last):
    ...
    ValueError: 'constant', 'linear', 'cosine', 'step', 'exponential' or "package.module:Class"
    """
    return _made(name, drop)


@lru_cache(maxsize=64)
def _made(name: str, drop: float) -> Schedule:
    cls: Any = REGISTRY.get(name)
    if cls is None and ":" not in name:
        raise ValueError(f'{", ".join(map(repr, REGISTRY))} or "package.module:Class"')
    if cls is None:
        try:
            cls = user_code.load(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"one that can be loaded: {error}") from None
        if not (isinstance(cls, type) and issubclass(cls, Schedule) and is_dataclass(cls)):
            raise ValueError("a dataclass that is derived from fedglad.schedules.Schedule")
    return cls(drop=drop)


class _Scheduled(Protocol):
    """Settings with a rate that has a schedule, whose name is in a field of its own."""

    @property
    def over(self) -> int: ...
    @property
    def drop(self) -> float: ...


def require(settings: _Scheduled, key: str = "schedule") -> None:
    """Raises ValueError unless it is a schedule; `key` is the field that has its name.

    >>> from fedglad.optimizers import SGD
    >>> require(SGD(schedule="step", over=10))
    """
    check(settings, drop=(0 < settings.drop <= 1, "in (0, 1]"))
    made = _of(settings, key)
    asked = f" with {key}={getattr(settings, key)!r}: the rounds between drops"
    least, more = (1, asked) if made.paced else (0, "")
    check(settings, over=(settings.over >= least, f"{least} or more{more}"))


def factor(settings: _Scheduled, t: int, key: str = "schedule") -> float:
    """What the rate of these settings is multiplied by in round t.

    >>> from fedglad.optimizers import SGD
    >>> factor(SGD(schedule="linear", over=10), 5)
    0.5
    """
    made = _of(settings, key)
    must = "the rounds until the rate is 0: set over=50, say, or call within(50)"
    check(settings, over=(settings.over > 0 or not made.ends, must))
    given: Any = made.factor(t, settings.over)
    if isinstance(given, bool) or not isinstance(given, Real):
        what = f"a {type(given).__name__}"
        check(settings, **{key: (False, f"one that gives a number: it gave {what} in round {t}")})
    value = float(given)
    check(settings, **{key: (0 <= value < math.inf, f"positive: it is {value!r} in round {t}")})
    return value


def within(settings: Any, rounds: int, key: str = "schedule") -> Any:
    """The same settings for a run of so many rounds, with which the schedule ends if `over` is 0.

    >>> from fedglad.optimizers import SGD
    >>> within(SGD(schedule="linear"), 50).over
    50
    """
    endless = settings.over == 0 and _of(settings, key).ends
    return replace(settings, over=rounds) if endless else settings


def _of(settings: _Scheduled, key: str) -> Schedule:
    try:
        return schedule(getattr(settings, key), settings.drop)
    except ValueError as error:
        check(settings, **{key: (False, str(error))})
        raise
