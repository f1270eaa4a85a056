"""The engines' settings: where clients train. Each starts its engine when it is asked to."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from fedglad.server.compatibility import refuse_training

if TYPE_CHECKING:
    from fedglad.simulation.engines.base import Job
    from fedglad.simulation.engines.batched import BatchedEngine
    from fedglad.simulation.engines.local import LocalEngine
    from fedglad.simulation.engines.ray import RayEngine
    from fedglad.simulation.engines.serial import SerialEngine

DEVICE = "auto: a GPU where there is one; or cpu, cuda, cuda:1, ..."
DEVICES = "auto: the GPUs in turn where there are any; or cpu, cuda, cuda:1, ..."


@dataclass(frozen=True, kw_only=True)
class Serial:
    """One client after the other in this process."""

    device: Annotated[str, DEVICE] = "auto"

    def start(self, job: Job) -> SerialEngine:
        """Ready to train."""
        from fedglad.simulation.engines.base import Worker, find_device
        from fedglad.simulation.engines.serial import SerialEngine

        return SerialEngine(Worker(job, find_device(self.device)))


@dataclass(frozen=True, kw_only=True)
class Local:
    """Worker processes on this machine, one thread each."""

    workers: Annotated[int | Literal["auto"], "processes; auto: one a core"] = "auto"
    device: Annotated[str, DEVICES] = "auto"
    client_timeout: Annotated[float, "seconds until a client is given up; 0: never"] = 0

    def __post_init__(self) -> None:
        if self.workers != "auto" and self.workers < 1:
            raise ValueError(f"workers = {self.workers!r}: must be 1 or more, or 'auto'")
        if self.client_timeout < 0:
            raise ValueError(f"client_timeout = {self.client_timeout!r}: must be 0 (never) or more")

    def start(self, job: Job) -> LocalEngine:
        """Ready to train, with all its processes."""
        from fedglad.simulation.engines.base import find_devices
        from fedglad.simulation.engines.local import LocalEngine

        workers = os.cpu_count() or 1 if self.workers == "auto" else self.workers
        return LocalEngine(job, workers, find_devices(self.device), self.client_timeout)


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Workers on the machines of a Ray cluster, one thread each; the same bits as serial and local.

    docs/cluster.md says how to start one, and what travels.
    """

    address: Annotated[str, '"": a cluster of this machine alone; or auto, or host:port'] = ""
    workers: Annotated[
        int | Literal["auto"], "processes; auto: one a free CPU, as machines come and go"
    ] = "auto"
    cpus: Annotated[float, "CPUs that a worker takes"] = 1.0
    gpus: Annotated[float, "GPUs that a worker takes, or a share of one; 0: it uses none"] = 0.0
    client_timeout: Annotated[float, "seconds until a client is given up; 0: never"] = 0
    patience: Annotated[float, "seconds that a cluster may have no room before the run stops"] = 300

    sums: ClassVar[bool] = True  # whole blocks of a cohort come back as their sums

    def __post_init__(self) -> None:
        if self.workers != "auto" and self.workers < 1:
            raise ValueError(f"workers = {self.workers!r}: must be 1 or more, or 'auto'")
        for name in ("cpus", "patience"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} = {value!r}: must be greater than 0")
        for name in ("gpus", "client_timeout"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} = {value!r}: must be 0 or more")

    def start(self, job: Job) -> RayEngine:
        """Ready to train, with a worker at least."""
        from fedglad.simulation.engines.ray import RayEngine

        return RayEngine(job, self)


@dataclass(frozen=True, kw_only=True)
class Batched:
    """All clients of a cohort together (vmap), for small models; other bits than the others."""

    device: Annotated[str, DEVICE] = "auto"
    threads: Annotated[int, "of torch; the bits may depend on it"] = 1

    exact: ClassVar[bool] = False  # a run's name tells it from the same run in another engine
    trains_alike: ClassVar[bool] = True  # it has no other training than the usual loop

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads = {self.threads!r}: must be 1 or more")

    def start(self, job: Job) -> BatchedEngine:
        """Ready to train; ValueError for a model or a method that it cannot train."""
        from fedglad.simulation.engines.base import Worker, find_device
        from fedglad.simulation.engines.batched import BatchedEngine

        refuse_training(job.client, self)
        device = find_device(self.device)
        # On a worker of its own: a model may change itself whenever it is called.
        BatchedEngine(Worker(job, device), self.threads).try_out()
        return BatchedEngine(Worker(job, device), self.threads)
