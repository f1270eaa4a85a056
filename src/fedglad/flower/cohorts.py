"""Who takes part in a round: waits for nodes, and lets a sampler draw among them."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from torch import Tensor

from fedglad.flower.nodes import PATIENCE, Directory, NoSize
from fedglad.flower.rounds import wait_for
from fedglad.flower.told import note, tell
from fedglad.records import Record
from fedglad.rng import stream
from fedglad.samplers.base import Ask, Cohort, Pool, Sampler, State


class Chooser:
    """A sampler and the nodes that it draws from; `state` is what the sampler remembers."""

    def __init__(
        self,
        sampler: Sampler,
        seed: int,
        directory: Directory,
        least: int,
        last: Callable[[int], Tensor | None],
    ) -> None:
        """`last` is a client's last update, for a sampler that keeps them."""
        self.sampler, self.seed, self.directory, self.least = sampler, seed, directory, least
        self._last = last
        self.state: State = {}
        self._memo: dict[Any, Any] = {}  # of the pools
        self._met = False  # whether the nodes of a first round were there

    def observe(self, record: Record) -> None:
        """What the sampler remembers of a round."""
        self.state = self.sampler.observe(self.state, record)

    def wait(self, grid: Grid, patience: float) -> str | None:
        """Waits until there are nodes enough; says why if there are not.

        A run begins when there is a whole cohort, whenever that is; one that goes on waits a while
        for all those it had. Later it goes on with whoever is left, if they are enough.
        """
        least = wanted = max(self.least, 1)
        if not self._met:
            wanted = max(least, self.sampler.clients_per_round, self.directory.expected)
        endless = not self._met and not self.directory.expected
        if not self._met:
            patience = min(patience, PATIENCE)
        count = 0
        for count in wait_for(grid, wanted, None if endless else patience):
            if count < wanted:
                tell("Waiting for nodes to connect: %d of %d", count, wanted)
        if count < least:
            return f"{count} nodes are connected, at least {least} are needed"
        self._met = True
        self.directory.refresh(grid, patience)
        return None if self.directory.online else "no node can be told apart"

    def draw(
        self, grid: Grid, t: int, timeout: float, attempt: int, avoid: Collection[int], ask: Ask
    ) -> Cohort:
        """The cohort of round t; another one for every attempt, of others if there are."""
        online = set(self.directory.online)
        usable = online - set(avoid) or online
        while True:
            try:
                found = self._draw(grid, t, timeout, attempt, sorted(usable), ask)
                break
            except NoSize as error:
                note("%s", error)
                usable = usable - {error.client}
                if not usable:
                    raise
        here = [k for k, client in enumerate(found.ids) if client in online]
        weights = found.weights and tuple(found.weights[k] for k in here)
        return Cohort(tuple(found.ids[k] for k in here), weights)

    def _draw(
        self, grid: Grid, t: int, timeout: float, attempt: int, usable: list[int], ask: Ask
    ) -> Cohort:
        directory, within = self.directory, set(usable)
        self._memo.pop("sizes", None)  # of others, if nodes came or went
        pool = Pool(
            directory.count,
            lambda k: directory.size(grid, k, timeout) if k in within else 1,
            lambda k: None,
            self._last,
            ids=None if len(usable) == directory.count else np.array(usable, dtype=np.int64),
            memo=self._memo,
        )
        seed = self.sampler.seed
        seed = seed if isinstance(seed, int) else self.seed if seed == "run" else 0
        rng = stream(seed, "cohort", t, *([attempt] if attempt else []))
        return self.sampler.sample(rng, t, self.state, pool, ask)
