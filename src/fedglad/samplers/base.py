"""What all samplers have in common, and what they draw from."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np

from fedglad.records import Record
from fedglad.samplers.availability import bernoulli, cyclic, markov, window

if TYPE_CHECKING:
    from torch import Tensor

SEED = (
    "round: cohorts depend on the round alone, for every run; run: on the run's seed; or a number"
)
AVAILABILITY = "always; or a client is reachable in some rounds: bernoulli, markov, cyclic"

State = dict[str, Any]
Ask = Callable[[list[int]], list[float]]
"""Losses of the given clients at the current model (power-of-choice)."""


def _none(client: int) -> None:
    return None


@dataclass(frozen=True)
class Pool:
    """Who there is, and their sizes and class counts where they are known.

    | field | meaning |
    |---|---|
    | `clients` | how many there are, 0 … N − 1 |
    | `size`, `labels` | a client's number of samples, and of each class |
    | `last` | a client's last accepted update, a packed vector, or None if there is none yet |
    | `update_bytes` | the size of an update; 0: not known |
    | `ids` | those that can be reached in this round; None: all |
    | `memo` | what is computed once and kept; the pools of all rounds share it |

    >>> Pool(clients=3, size=[10, 20, 10].__getitem__, labels=lambda k: None).shares
    array([0.25, 0.5 , 0.25])
    """

    clients: int
    size: Callable[[int], int]
    labels: Callable[[int], np.ndarray | None]
    last: Callable[[int], Tensor | None] = _none
    update_bytes: int = 0
    ids: np.ndarray | None = None
    memo: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False, compare=False)

    @property
    def who(self) -> int | np.ndarray:
        """Those that can be drawn, as `rng.choice` takes them."""
        return self.clients if self.ids is None else self.ids

    @property
    def count(self) -> int:
        """How many can be drawn."""
        return self.clients if self.ids is None else len(self.ids)

    @property
    def sizes(self) -> np.ndarray:
        """The sizes of those that can be drawn. Every client of the N is asked once in a run."""
        if (known := self.memo.get("sizes")) is None:
            asked = (self.size(k) for k in range(self.clients))
            known = self.memo["sizes"] = np.fromiter(asked, np.int64, self.clients)
            if known[least := int(known.argmin())] < 1:
                raise ValueError(f"client {least} has {known[least]} samples: leave it out")
        return known if self.ids is None else known[self.ids]

    @property
    def shares(self) -> np.ndarray:
        """n_k/n of those that can be drawn."""
        sizes = self.sizes
        return sizes / sizes.sum()

    def draw(
        self, rng: np.random.Generator | np.random.RandomState, r: int, p: np.ndarray | None = None
    ) -> tuple[int, ...]:
        """r of those that can be drawn, or all, without replacement; by p if it is given."""
        return tuple(rng.choice(self.who, min(r, self.count), replace=False, p=p).tolist())


@dataclass(frozen=True)
class Cohort:
    """Who takes part; `weights` override the clients' numbers of samples.

    >>> Cohort.of_draws(np.array([4, 7, 4, 4]))  # client 4 was drawn three times
    Cohort(ids=(4, 7), weights=(0.75, 0.25))
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def of_draws(cls, drawn: np.ndarray) -> Self:
        """A client that was drawn m times of r takes part once, with weight m/r."""
        times = Counter[int](drawn.tolist())
        return cls(tuple(times), tuple(m / len(drawn) for m in times.values()))


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What all samplers have in common; each defines `draw`.

    Not all clients need be reachable in every round: a sampler draws from those that are. Are there
    fewer than r, these take part; if there is nobody, the round is skipped. With `always` it costs
    nothing, otherwise a step over all N clients a round.

    | availability | a client is reachable |
    |---|---|
    | `bernoulli` | in each round with probability `reachable` |
    | `markov` | as in the round before with probability `persistence`, else drawn as above |
    | `cyclic` | in the first `reachable` of every `cycle` rounds, client k a round after k − 1 |

    >>> class First(Sampler):  # an own one: always the first r
    ...     def draw(self, rng, t, state, pool, ask):
    ...         return Cohort(tuple(range(self.clients_per_round)))
    >>> pool = Pool(clients=10, size=lambda k: 1, labels=lambda k: None)
    >>> First(clients_per_round=3).sample(np.random.default_rng(1), 0, {}, pool, list).ids
    (0, 1, 2)
    """

    clients_per_round: Annotated[int, "r"] = 10
    seed: Annotated[int | Literal["round", "run"], SEED] = "round"
    availability: Annotated[Literal["always", "bernoulli", "markov", "cyclic"], AVAILABILITY] = (
        "always"
    )
    reachable: Annotated[float, "share of rounds in which a client is so, unless always"] = 0.5
    persistence: Annotated[float, "markov: correlation of a round with the one before"] = 0.8
    cycle: Annotated[int, "cyclic: rounds until it begins again"] = 10
    availability_seed: Annotated[int, "of who is reachable when: the same in every run"] = 0

    counts: ClassVar[tuple[str, ...]] = ("clients_per_round",)  # so many clients there must be
    distances: ClassVar[bool] = False  # wants the record's distances from the mean update
    own_weights: ClassVar[bool] = False  # its weights are part of it: no weighting but by samples
    needs_sizes: ClassVar[bool] = False  # asks for all clients' sizes, which then are 1 or more
    uniform: ClassVar[bool] = False  # any r of those that can be reached are as likely as others
    # Whether the mean by its weights is that of all clients in expectation, if all are reachable.
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clients_per_round < 1:
            raise ValueError(f"clients_per_round={self.clients_per_round!r}: must be 1 or more")
        if not 0 < self.reachable <= 1:
            raise ValueError(f"reachable={self.reachable!r}: must be greater than 0, at most 1")
        if not 0 <= self.persistence < 1:
            raise ValueError(f"persistence={self.persistence!r}: must be in [0, 1)")
        if self.cycle < 1:
            raise ValueError(f"cycle={self.cycle!r}: must be 1 or more")
        if self.availability == "cyclic" and not window(self.reachable, self.cycle):
            raise ValueError(
                f"reachable={self.reachable!r} of cycle={self.cycle!r} is less than a round: "
                "nobody would ever be; raise one of them"
            )
        if self.availability != "always" and type(self).sample is not Sampler.sample:
            raise ValueError(
                f"availability={self.availability!r}: {type(self).__name__} has its own `sample`, "
                "which reaches everybody; let it define `draw` instead"
            )

    @property
    def keeps_updates(self) -> bool:
        """Whether it asks the pool for clients' last updates."""
        return False

    @property
    def weighting(self) -> Any:
        """The weighting that belongs to it, for one that also thins what comes back."""
        return None

    @property
    def largest_cohort(self) -> int:
        """The most clients that may take part in a round."""
        return self.clients_per_round

    def importance(self, cohort: Cohort, pool: Pool) -> dict[int, float] | None:
        """N n_k/n of a cohort whose weights are those of a draw by size; None: they are not."""
        if not (self.own_weights and self.needs_sizes):
            return None
        mean = float(pool.sizes.mean())
        return {client: pool.size(client) / mean for client in cohort.ids}

    def sample(
        self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask
    ) -> Cohort:
        """The cohort of round t, of those that can be reached."""
        if self.availability != "always":
            ids = np.flatnonzero(self._reached(t, pool))
            pool = replace(pool, ids=ids if pool.ids is None else np.intersect1d(ids, pool.ids))
        return self.draw(rng, t, state, pool, ask) if pool.count else Cohort(())

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        """The cohort of round t, of the clients in `pool.who`; there is at least one."""
        raise NotImplementedError(f"{type(self).__name__} has no `draw`")

    def check(self, pool: Pool) -> None:
        """Raises ValueError, before the run starts, if these clients will not do."""
        for name in self.counts:
            if (count := getattr(self, name)) > pool.clients:
                raise ValueError(
                    f"{name}={count} is more than the {pool.clients} clients there are: lower it "
                    "or raise data.clients"
                )
        if self.needs_sizes:
            _ = pool.sizes

    def observe(self, state: State, record: Record) -> State:
        """What to remember of a round."""
        return state

    def restored(self, state: State) -> State:
        """A state that a file had; raises ValueError or TypeError if it cannot be one."""
        return state

    def _reached(self, t: int, pool: Pool) -> np.ndarray:
        share, seed = self.reachable, self.availability_seed
        if self.availability == "bernoulli":
            return bernoulli(t, pool.clients, share, seed)
        if self.availability == "markov":
            return markov(t, pool.clients, share, self.persistence, seed, pool.memo)
        return cyclic(t, pool.clients, share, self.cycle)


@dataclass(frozen=True, kw_only=True)
class Choosing(Sampler):
    """What samplers have in common that choose r of more candidates."""

    candidates: Annotated[int, "at least r; 0: as many as `by_default` says"] = 0

    counts: ClassVar[tuple[str, ...]] = ("clients_per_round", "candidates")
    own_weights: ClassVar[bool] = True
    by_default: ClassVar[str] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates and self.candidates < self.clients_per_round:
            raise ValueError(
                f"candidates={self.candidates} is less than clients_per_round="
                f"{self.clients_per_round}: r are chosen of the candidates; raise it, or 0 for "
                f"{self.by_default}"
            )

    @property
    def largest_cohort(self) -> int:
        """r, or all candidates (all clients may be many) where a weighting thins their updates."""
        return self.clients_per_round if self.weighting is None else self.candidates or sys.maxsize
