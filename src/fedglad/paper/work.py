"""What is missing of an experiment, as tasks of a sweep, and what it costs on this machine."""

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from fedglad.checkpoint import write_text
from fedglad.config import Config
from fedglad.data.store import cache_folder
from fedglad.engines import threads
from fedglad.paper.cells import Experiment, PaperError
from fedglad.paper.results import Library
from fedglad.paper.settings import DATA
from fedglad.sweep import Task

TESTING = 1 / 3  # the share of a training sample's cost that a test sample has: no backward pass
SECONDS = 2.0  # of measuring a model


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
            folder = out / f"{cell.preset}-{config.hash()}"
            if library.has(config):
                there.add(folder)
                continue
            told = {"cell": cell.label, "seed": seed}
            if config.rounds < cell.rounds:
                told["shortened"] = f"{config.rounds} of {cell.rounds} rounds"
            tasks.setdefault(folder, Task(cell.preset, config, folder, told))
    return Work(list(tasks.values()), len(there), absent)


@dataclass(frozen=True)
class Status:
    """An experiment in numbers; hours are those of one core, None where none is measured."""

    cells: int
    runs: int
    absent: int
    done: int
    shortened: int
    hours: float | None
    hours_left: float | None
    basis: list[str]


def status(experiment: Experiment, library: Library, speeds: "Speeds") -> Status:
    """How much of it there is, and what the rest costs."""
    absent = [cell for cell in experiment.cells if cell.absent]
    done = shortened = 0
    seconds: dict[str, tuple[bool, float | None]] = {}  # a run that two cells share costs once
    for cell in experiment.cells:
        if cell.absent:
            continue
        for seed in cell.seeds:
            config = cell.config(seed)
            here = library.has(config)
            done += here
            shortened += not here and any(key[1] == seed for key in library.find(config))
            speed = speeds.of(cell.data, config)
            cost = samples(cell.data, config) / speed if speed else None
            seconds[config.hash()] = (here, cost)
    return Status(
        cells=len(experiment.cells),
        runs=sum(len(cell.seeds) for cell in experiment.cells),
        absent=sum(len(cell.seeds) for cell in absent),
        done=done,
        shortened=shortened,
        hours=_hours([cost for _, cost in seconds.values()]) if seconds else None,
        hours_left=_hours([c for here, c in seconds.values() if not here]) if seconds else None,
        basis=sorted({speeds.basis(c.data, c.config(1)) for c in experiment.cells if not c.absent}),
    )


def samples(data: str, config: Config) -> float:
    """How many training samples a run costs, test samples counted by what they cost."""
    found, tree = DATA[data], config.to_dict()
    size = found.train // int(tree["data"]["clients"])
    client = tree["client"]
    if client["drop_last"]:
        size -= size % int(client["batch_size"])
    trained = int(tree["sampler"]["clients_per_round"]) * int(client["epochs"]) * size
    tests = math.ceil(config.rounds / config.eval_every)
    return config.rounds * trained + tests * found.test * TESTING


class Speeds:
    """Samples a second on one core: of the runs made here, else measured once and kept."""

    def __init__(self, library: Library, *, measure: bool = True) -> None:
        self.measure = measure
        self._measured: dict[str, float] | None = None
        self._seen: dict[str, list[float]] = {}
        here = f"{platform.machine()}, {os.cpu_count()} cores"
        for result in library.all():
            tree, seconds = result.config.to_dict(), result.summary.get("seconds")
            data, alone = str(tree["data"]["name"]), tree["engine"]["name"] == "serial"
            if alone and data in DATA and seconds and result.summary.get("machine") == here:
                speed = samples(data, result.config) / seconds
                self._seen.setdefault(_model(data, result.config), []).append(speed)

    def of(self, data: str, config: Config) -> float | None:
        """None if it cannot be measured."""
        name = _model(data, config)
        if name in self._seen:
            return median(self._seen[name])
        return self._kept(data, config)

    def basis(self, data: str, config: Config) -> str:
        """Where the speed comes from, in words."""
        name, speed = _model(data, config), self.of(data, config)
        if speed is None:
            return f"{name}: not measured"
        runs = len(self._seen.get(name, ()))
        source = f"{runs} finished run{'s' * (runs > 1)}" if runs else "some training steps"
        return f"{name}: {speed:,.0f} samples/s on a core, from {source}"

    def _kept(self, data: str, config: Config) -> float | None:
        shape = DATA[data].shape
        if shape is None:
            return None
        path = cache_folder() / "paper-speed.json"
        if self._measured is None:
            self._measured = _load(path)
        name = f"{_model(data, config)}, torch {torch.__version__}, {platform.machine()}"
        if name not in self._measured and self.measure:
            self._measured[name] = measured(config, shape, DATA[data].classes)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(self._measured, indent=2))
        return self._measured.get(name)


def measured(config: Config, shape: Sequence[int], classes: int) -> float:
    """Training samples a second of the configuration's model on one core, from random inputs."""
    model = config.sections["model"].build().train()
    batch = int(config.to_dict()["client"]["batch_size"])
    x, y = torch.rand(batch, *shape), torch.arange(batch) % classes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    took: list[float] = []
    with threads(1), torch.random.fork_rng(devices=[]):
        while len(took) < 4 or sum(took) < SECONDS:
            begin = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            took.append(time.perf_counter() - begin)
    return batch / median(took[1:])


def _model(data: str, config: Config) -> str:
    return f"{config.to_dict()['model']['name']} on {DATA[data].title}"


def _load(path: Path) -> dict[str, float]:
    try:
        found: Mapping[str, float] = json.loads(path.read_text("utf-8"))
        return dict(found)
    except (OSError, ValueError, TypeError):  # it is measured anew
        return {}


def _hours(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return math.fsum(known) / 3600 if known or not seconds else None
