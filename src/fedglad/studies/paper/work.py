"""What is missing of an experiment, as tasks of a sweep, and what it costs on this machine."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fedglad.config.schema import Config
from fedglad.runs.own_code import folder_of
from fedglad.runs.summary import machine
from fedglad.runs.sweeping import Task
from fedglad.studies.paper.cells import Experiment, PaperError
from fedglad.studies.paper.results import Library
from fedglad.studies.paper.settings import DATA

TESTING = 1 / 3  # the share of a training sample's cost that a test sample has: no backward pass


@dataclass(frozen=True)
class Work:
    """The tasks of an experiment that are missing, how many are there, and what cannot be run."""

    tasks: list[Task]
    there: int
    absent: dict[str, str]


def plan(
    experiment: Experiment,
    library: Library,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    rounds: int | None = None,
) -> Work:
    """What has to be run; a run that the library has, from wherever, is not run again."""
    if rounds is not None and rounds < experiment.least_rounds:
        raise PaperError(
            f"--rounds {rounds}: {experiment.name} shows what happens in round "
            f"{experiment.least_rounds}, so it needs as many"
        )
    tasks: dict[Path, Task] = {}
    absent: dict[str, str] = {}
    there: set[Path] = set()
    for cell in experiment.chosen(only):
        if cell.absent:
            absent[cell.label] = cell.absent
            continue
        for seed in seeds or cell.seeds:
            config = cell.config(seed, rounds)
            folder = folder_of(cell.preset, config, out)
            if library.has(config):
                there.add(folder)
                continue
            settings = {"cell": cell.label, "seed": seed}
            if config.rounds < cell.rounds:
                settings["shortened"] = f"{config.rounds} of {cell.rounds} rounds"
            tasks.setdefault(folder, Task(cell.preset, config, folder, settings))
    return Work(list(tasks.values()), len(there), absent)


@dataclass(frozen=True)
class Status:
    """An experiment in numbers; hours are those of one core, without `unmeasured` runs: those of a
    model of which no run is finished on a machine like this."""

    cells: int
    runs: int
    absent: int
    done: int
    shortened: int
    hours: float | None
    hours_left: float | None
    unmeasured: int
    basis: list[str]


def status(experiment: Experiment, library: Library, speeds: "Speeds") -> Status:
    """How much of it there is, and what the rest costs."""
    cells = [cell for cell in experiment.cells if not cell.absent]
    done = shortened = 0
    seconds: dict[str, float | None] = {}  # a run that two cells share costs once
    left: dict[str, float | None] = {}
    for cell in cells:
        for seed in cell.seeds:
            config = cell.config(seed)
            here = library.has(config)
            done += here
            shortened += not here and any(key[1] == seed for key in library.find(config))
            speed = speeds.of(cell.data, config)
            cost = samples(cell.data, config) / speed if speed else None
            seconds[config.hash()] = cost
            if not here:
                left[config.hash()] = cost
    runs = sum(len(cell.seeds) for cell in experiment.cells)
    return Status(
        cells=len(experiment.cells),
        runs=runs,
        absent=runs - sum(len(cell.seeds) for cell in cells),
        done=done,
        shortened=shortened,
        hours=_hours(seconds.values()) if seconds else None,
        hours_left=_hours(left.values()) if seconds else None,
        unmeasured=sum(cost is None for cost in seconds.values()),
        basis=sorted({speeds.basis(cell.data, cell.config(1)) for cell in cells}),
    )


def samples(data: str, config: Config) -> float:
    """How many training samples a run costs, test samples counted by what they cost."""
    tree = config.to_dict()
    size = DATA[data].train // int(tree["data"]["clients"])
    client = tree["client"]
    if client["drop_last"]:
        size -= size % int(client["batch_size"])
    trained = int(tree["sampler"]["clients_per_round"]) * int(client["epochs"]) * size
    tests = math.ceil(config.rounds / config.eval_every)
    return config.rounds * trained + tests * DATA[data].test * TESTING


class Speeds:
    """Samples a second on one core, of each model that has finished runs on machines like this."""

    def __init__(self, library: Library) -> None:
        self._seen: dict[str, list[float]] = {}
        here = machine()
        for result in library.all():
            tree, seconds = result.config.to_dict(), result.summary.get("seconds")
            data, alone = str(tree["data"]["name"]), tree["engine"]["name"] == "serial"
            if result.config.own_names(loaded=False):
                continue  # what it costs is its code's matter
            if alone and data in DATA and seconds and result.summary.get("machine") == here:
                speed = samples(data, result.config) / seconds
                self._seen.setdefault(_model(data, result.config), []).append(speed)

    def of(self, data: str, config: Config) -> float | None:
        """The median of its model's runs; None if there is none."""
        speeds = self._seen.get(_model(data, config))
        return median(speeds) if speeds else None

    def basis(self, data: str, config: Config) -> str:
        """Where the speed comes from, in words."""
        name, speed = _model(data, config), self.of(data, config)
        if speed is None:
            return f"{name}: no run is finished on {machine()}"
        runs = len(self._seen[name])
        source = f"{runs} finished run{'s' * (runs > 1)} on {machine()}"
        return f"{name}: {speed:,.{1 if speed < 10 else 0}f} samples/s on a core, from {source}"


def _model(data: str, config: Config) -> str:
    """Its kind: other vectors or another encoder have another speed."""
    model = config.to_dict()["model"]
    kind = " ".join(str(model[key]) for key in ("name", "source", "vectors") if key in model)
    return f"{kind} on {DATA[data].title}"


def _hours(seconds: Collection[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return math.fsum(known) / 3600 if known or not seconds else None
