"""A federated run as a generator of rounds; reads like the paper's algorithm."""

import copy
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from fedglad.adapters import Adapter
from fedglad.clients.loop import Plain
from fedglad.engines import Engine, Federation, Job
from fedglad.filters import Filter
from fedglad.optimizers import Optimizer
from fedglad.records import Failure, Round, Update
from fedglad.rng import stream
from fedglad.samplers import Pool, Sampler, State
from fedglad.server import Server
from fedglad.weights import Samples

logger = logging.getLogger("fedglad")

COUNTED = 1_000  # up to so many clients the labels of the whole population are counted once


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run is made of."""

    rounds: int
    seed: int
    eval_every: int
    model: nn.Module
    data: Federation
    client: Plain
    sampler: Sampler
    optimizer: Optimizer
    adapter: Adapter
    filter: Filter
    weighting: Samples
    engine: Any  # settings with start(job)


class Simulation:
    """A run in progress: what changes are the server, the sampler's state and the round."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        labels = getattr(plan.data, "labels", _unknown)
        self.pool = Pool(plan.data.clients, plan.data.size, labels)
        plan.sampler.check(self.pool)
        self.population = _population(self.pool)
        self.server = Server(
            plan.model,
            optimizer=plan.optimizer,
            adapter=plan.adapter,
            filter=plan.filter,
            weighting=plan.weighting,
        )
        self.sampler_state: State = {}
        self.t = 0
        start = copy.deepcopy(plan.model)
        job = Job(lambda: copy.deepcopy(start), plan.data, plan.client, cross_entropy, plan.seed)
        self.engine: Engine = plan.engine.start(job)

    def rounds(self) -> Iterator[Round]:
        """The rounds from here to the last."""
        plan, server = self.plan, self.server
        for t in range(self.t, plan.rounds):
            begin = time.perf_counter()
            rng = stream(self._sampler_seed(), "cohort", t)
            cohort = plan.sampler.sample(rng, t, self.sampler_state, self.pool, _ask)
            updates = self.engine.train(t, cohort.ids, server.packed, {})
            seen = _seen(t, updates, cohort.weights)
            record = server.step(seen, population=self.pool.clients)
            self.sampler_state = plan.sampler.observe(self.sampler_state, record)
            self.t = t + 1
            trained = time.perf_counter()
            tested = self.t % plan.eval_every == 0 or self.t == plan.rounds
            result = self.engine.evaluate(server.packed) if tested else None
            yield Round(
                t,
                cohort.ids,
                record,
                test_loss=result.loss if result else None,
                test_accuracy=result.accuracy if result else None,
                label_similarity=self._similarity(cohort.ids),
                seconds={"train": trained - begin, "test": time.perf_counter() - trained},
            )

    def close(self) -> None:
        """Ends the engine's processes."""
        self.engine.close()

    def _sampler_seed(self) -> int:
        seed = self.plan.sampler.seed
        if isinstance(seed, int):
            return seed
        return self.plan.seed if seed == "run" else 0

    def _similarity(self, cohort: tuple[int, ...]) -> float | None:
        """The paper's sim_score: cosine of the cohort's merged class counts and everybody's."""
        if self.population is None:
            return None
        merged = _merged(self.pool, cohort)
        length = np.linalg.norm(merged) * np.linalg.norm(self.population)
        return float(merged @ self.population / length) if length else None


def _seen(
    t: int, updates: Iterator[Update | Failure], weights: tuple[float, ...] | None
) -> Iterator[Update | Failure]:
    """The updates with the cohort's weights; what a failed client said goes to the log."""
    for k, update in enumerate(updates):
        if isinstance(update, Failure):
            if update.detail:
                logger.error("round %d: client %s failed:\n%s", t, update.client, update.detail)
            yield update
        else:
            yield replace(update, weight=weights[k]) if weights else update


def _ask(clients: list[int]) -> list[float]:
    raise NotImplementedError("this sampler asks clients for their losses, which no engine answers")


def _unknown(k: int) -> None:
    return None


def _population(pool: Pool) -> np.ndarray | None:
    if pool.clients > COUNTED or pool.labels(0) is None:
        return None
    return _merged(pool, range(pool.clients))


def _merged(pool: Pool, clients: Any) -> np.ndarray:
    counts = [found for k in clients if (found := pool.labels(k)) is not None]
    return np.sum(counts, axis=0, dtype=float)
