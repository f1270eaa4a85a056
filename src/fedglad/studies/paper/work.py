"""What is missing of an experiment, as tasks of a sweep, and what it costs on this machine."""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from fedglad.config.schema import Config
from fedglad.core.files import write_text
from fedglad.core.threads import threads
from fedglad.data.store import cache_folder
from fedglad.runs.summary import machine
from fedglad.runs.sweeping import Task
from fedglad.studies.paper.cells import Experiment, PaperError
from fedglad.studies.paper.results import Library
from fedglad.studies.paper.settings import DATA, DataSet

TESTING = 1 / 3  # the share of a training sample's cost that a test sample has: no backward pass
SECONDS = 2.0  # of measuring a model
TEXTS, LENGTH, WORDS = 8, 128, 1000  # of a batch that is timed: few, or it takes long


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
    """An experiment in numbers; hours are those of one core, without `unmeasured` runs."""

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
        unmeasured=sum(cost is None for _, cost in seconds.values()),
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
    """Samples a second on one core: of runs on such machines, else measured once and kept."""

    def __init__(self, library: Library, *, tell: Callable[[str], None] = lambda _: None) -> None:
        self.tell = tell  # what is being measured, which takes some seconds
        self._measured: dict[str, float | None] | None = None
        self._seen: dict[str, list[float]] = {}
        here = machine()
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
        source += f" on {machine()}" if runs else ""
        return f"{name}: {speed:,.{1 if speed < 10 else 0}f} samples/s on a core, from {source}"

    def _kept(self, data: str, config: Config) -> float | None:
        path = cache_folder() / "paper-speed.json"
        if self._measured is None:
            self._measured = _load(path)
        name = f"{_model(data, config)}, torch {torch.__version__}, {platform.machine()}"
        if name not in self._measured:
            self.tell(f"measuring {_model(data, config)}, once")
            try:
                self._measured[name] = measured(config, DATA[data])
            except ValueError:  # a package that it needs is not installed
                self._measured[name] = None
            known = {key: speed for key, speed in self._measured.items() if speed is not None}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(known, indent=2))
        return self._measured[name]


def measured(config: Config, data: DataSet) -> float:
    """Training samples a second of the configuration's model on one core, from random inputs.

    By the processor's time: what else the machine does should not count.
    """
    settings = config.sections["model"]
    model = getattr(settings, "untrained", settings.build)().train()
    batch = int(config.to_dict()["client"]["batch_size"]) if data.shape else TEXTS
    x = torch.rand(batch, *data.shape) if data.shape else torch.randint(1, WORDS, (batch, LENGTH))
    y = torch.arange(batch) % data.classes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    took: list[float] = []
    with threads(1), torch.random.fork_rng(devices=[]):
        while len(took) < 2 or sum(took) < SECONDS:
            begin = time.process_time()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            took.append(time.process_time() - begin)
    return batch / median(took[1:])


def _model(data: str, config: Config) -> str:
    """Its kind: other vectors or another encoder have another speed."""
    told = config.to_dict()["model"]
    kind = " ".join(str(told[key]) for key in ("name", "source", "vectors") if key in told)
    return f"{kind} on {DATA[data].title}"


def _load(path: Path) -> dict[str, float | None]:
    try:
        found: Mapping[str, float | None] = json.loads(path.read_text("utf-8"))
        return dict(found)
    except (OSError, ValueError, TypeError):  # it is measured anew
        return {}


def _hours(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return math.fsum(known) / 3600 if known or not seconds else None
