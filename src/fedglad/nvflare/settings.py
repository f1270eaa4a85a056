"""What stands in the configuration of a run with NVFlare where the simulator's has its classes.

A run's folder has the same config.toml, so that `compare` and `report` read both. Such a file
cannot be run by `fedglad run`: its clients are elsewhere.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, State
from fedglad.samplers.uniform import Uniform


def _elsewhere(self: Any, *job: Any) -> NoReturn:
    raise ValueError("this is the record of a run with NVFlare: submit its job again")


@dataclass(frozen=True, kw_only=True)
class Everyone(Uniform):
    """All sites that are connected."""

    clients_per_round: Annotated[int, "at least so many"] = 1

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        return Cohort(pool.draw(rng, pool.count))


@dataclass(frozen=True, kw_only=True)
class Sites:
    """The data of NVFlare's sites, which are known by their names."""

    load_federation = _elsewhere


@dataclass(frozen=True, kw_only=True)
class Params:
    """The initial model that the controller was given."""

    tensors: Annotated[int, "parameter tensors"] = 0
    parameters: Annotated[int, "all their elements"] = 0
    build = _elsewhere


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Whatever the sites' executors do; nothing is known that would forbid a server's rule."""

    needs_mean: ClassVar[bool] = False
    needs_plain_step: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Engine:
    """NVFlare's server and clients, or its simulator."""

    task: Annotated[str, "the name of the task that is training"] = "train"
    weighted_by: Annotated[str, "the entry of a reply's meta that is its weight; or empty"] = (
        "NUM_STEPS_CURRENT_ROUND"
    )
    min_clients: Annotated[int, "good replies that make a round"] = 1

    exact: ClassVar[bool] = False  # another one gives other results
    start = _elsewhere
