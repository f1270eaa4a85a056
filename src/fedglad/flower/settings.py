"""What stands in the configuration of a run with Flower where the simulator's has its classes.

A run's folder has the same config.toml, so that `compare` and `report` read both. Such a file
cannot be run by `fedglad run`: its clients are elsewhere.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, State
from fedglad.samplers.uniform import Uniform


def _elsewhere(self: Any, *job: Any) -> NoReturn:
    raise ValueError("this is the record of a run with Flower: start it again with `flwr run`")


@dataclass(frozen=True, kw_only=True)
class Share(Uniform):
    """A share of the nodes that are connected, but at least `clients_per_round`."""

    clients_per_round: Annotated[int, "at least so many"] = 2
    fraction: Annotated[float, "of the nodes that are connected"] = 1.0

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        r = max(int(pool.count * self.fraction), self.clients_per_round)
        return Cohort(pool.draw(rng, r))


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The data of Flower's nodes."""

    told_apart_by: Annotated[str, "auto, name, key, partition-id or id"] = "auto"
    load_federation = _elsewhere


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The model that a ServerApp was given as arrays."""

    tensors: Annotated[int, "parameter tensors"] = 0
    parameters: Annotated[int, "all their elements"] = 0
    build = _elsewhere


@dataclass(frozen=True, kw_only=True)
class ClientApp:
    """Whatever the ClientApp does; nothing is known that would forbid a server's rule."""

    needs_mean: ClassVar[bool] = False
    needs_plain_step: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Flower's SuperLink and SuperNodes, or its simulation."""

    report: Annotated[str, "updates; of sums alone: norms, or secure"] = "updates"
    weighted_by: Annotated[str, "the metric that is a client's weight"] = "num-examples"
    min_clients: Annotated[int, "good replies that make a round"] = 1

    exact: ClassVar[bool] = False  # another one gives other results
    start = _elsewhere
