"""Cohorts given beforehand: a bad round on purpose, or the rounds of another run."""

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, State
from fedglad.samplers.uniform import Uniform


@dataclass(frozen=True, kw_only=True)
class Scripted(Uniform):
    """In the rounds named, these clients or clients of one class; in all others, uniform.

    Of those named, the ones that are reachable take part.
    Rounds count from 0 and are strings, as TOML's keys are: `cohorts = {"39" = [3, 14, 15]}`.

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=10, size=lambda k: 1, labels=lambda k: None)
    >>> chosen = Scripted(clients_per_round=3, cohorts={"39": [3, 1, 4]})
    >>> chosen.sample(stream(1, "cohort", 39), 39, {}, pool, list).ids
    (3, 1, 4)
    """

    cohorts: Annotated[dict[str, list[int]], "round to the clients that take part in it"] = field(
        default_factory=dict[str, list[int]]
    )
    largest_class: Annotated[dict[str, int], "round to the class its clients hold most of"] = field(
        default_factory=dict[str, int]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*self.cohorts, *self.largest_class):
            if not (name.isdecimal() and str(int(name)) == name):
                raise ValueError(f"scripted round {name!r}: rounds are whole numbers from 0 on")

    @property
    def largest_cohort(self) -> int:
        return max([self.clients_per_round, *map(len, self.cohorts.values())])

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        if (given := self.cohorts.get(str(t))) is not None:
            return Cohort(tuple(_reachable(given, pool)))
        if (wanted := self.largest_class.get(str(t))) is not None:
            holders = np.array(_reachable(self._holders(wanted, t, pool), pool), np.int64)
            return Cohort(replace(pool, ids=holders).draw(rng, self.clients_per_round))
        return super().draw(rng, t, state, pool, ask)

    def check(self, pool: Pool) -> None:
        """Raises for a script that cannot be played with these clients."""
        super().check(pool)
        for t, cohort in self.cohorts.items():
            for client in cohort:
                if not 0 <= client < pool.clients:
                    last = pool.clients - 1
                    raise ValueError(
                        f"scripted round {t} names client {client}: there are 0 to {last}"
                    )
            if not cohort or len(set(cohort)) < len(cohort):
                raise ValueError(f"scripted round {t} has {cohort}: name each client once")
        for t, wanted in self.largest_class.items():
            self._holders(wanted, int(t), pool)

    def _holders(self, wanted: int, t: int, pool: Pool) -> list[int]:
        counts = [pool.labels(k) for k in range(pool.clients)]
        holders = [k for k, c in enumerate(counts) if c is not None and int(c.argmax()) == wanted]
        if len(holders) < self.clients_per_round:
            raise ValueError(
                f"scripted round {t} asks for {self.clients_per_round} clients whose largest "
                f"class is {wanted}: there are {len(holders)}"
            )
        return holders


def _reachable(clients: list[int], pool: Pool) -> list[int]:
    if pool.ids is None:
        return clients
    there = set(pool.ids.tolist())
    return [k for k in clients if k in there]
