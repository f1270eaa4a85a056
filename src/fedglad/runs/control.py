"""Controls: what a rule's gain is worth if the rate had merely been another one.

Each finished run of a rule is followed by its twins with the same seed: the constant factor that
the rule had on average, the constant that was best on the sweep's first seed, and a rate that falls
linearly. They are ordinary runs; a file in their folders says what they are controls of.
"""

import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedglad.config.keys import SEEDS, flat
from fedglad.config.schema import Config
from fedglad.core.checksums import json_with_crc
from fedglad.core.files import write_text
from fedglad.runs.line import number
from fedglad.runs.own_code import folder_of
from fedglad.runs.reader import CONTROL_FILE, Run, RunError
from fedglad.runs.scores import Number
from fedglad.runs.sweeping import DONE, ENDS, Event, Task, sweep
from fedglad.runs.twins import KINDS, RULE, kind_of, made_of, overridden, replaces

Seed = tuple[Any, ...]

FACTORS = (0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)
"""Among which the constant is chosen."""

AVERAGE = {"average.name": "ema"}
"""What the runs of a controlled sweep keep, unless their configuration says otherwise."""


def controlled(
    tasks: Sequence[Task], *, jobs: int = 1, factors: Sequence[float] = FACTORS
) -> Generator[Event]:
    """A sweep in which each run of a rule is followed by its controls."""
    controls = Controls(tasks, factors)
    return sweep(tasks, jobs=jobs, then=controls.then)


def has_control(task: Task) -> bool:
    """Whether it is a run of a rule: an adaptive one, or one that repairs the mean."""
    parts = task.config.sections
    repaired = "estimator" in parts and task.config.to_dict()["estimator"]["name"] != "none"
    task.config.require_loaded("adapter")
    return task.rule is None and (parts["adapter"].adaptive or repaired)


@dataclass
class _Family:
    """Rules of a sweep that have the same constants, and how the choice among these stands."""

    first: Seed  # that of the first in the sweep: on it constants are chosen
    kinds: list[str]  # those whose constants are chosen
    waiting: dict[Seed, set[Path]] = field(default_factory=dict[Seed, set[Path]])  # not ended
    rules: dict[Seed, Task] = field(default_factory=dict[Seed, Task])  # finished, one of each seed
    trials: dict[Path, float] = field(default_factory=dict[Path, float])  # runs at constants
    chosen: list[dict[str, Any]] | None = None  # entries of control.json


class Controls:
    """Which runs follow a sweep's runs of rules; one that several rules share is there once."""

    def __init__(self, tasks: Sequence[Task], factors: Sequence[float] = FACTORS) -> None:
        if not factors or any(not (0 < factor < math.inf) for factor in factors):
            raise ValueError(f"factors {list(factors)}: must be positive numbers, at least one")
        self.factors = tuple(dict.fromkeys(map(float, factors)))
        self.known = {task.folder: task for task in tasks}
        self.asked = set(self.known)
        self.ended: dict[Path, bool] = {}  # whether it was finished
        self.means = {task.folder for task in tasks if _adaptive(task) and has_control(task)}
        self.families: dict[str, _Family] = {}
        for task in filter(has_control, tasks):
            new = _Family(_seed(task), _tuned(task))
            family = self.families.setdefault(_common(task.config), new)
            family.waiting.setdefault(_seed(task), set()).add(task.folder)

    @property
    def runs(self) -> int:
        """How many runs there will be, as far as it can be known; no more than that."""
        return len(self.known) + len(self.means) + sum(map(self._expected, self.families.values()))

    def then(self, event: Event) -> list[Task | Event]:
        """What is to be run because a run has ended, or cannot be."""
        task, made = event.task, list[Task | Event]()
        if event.what not in ENDS or event.what == "stopped":
            return []
        self.ended[task.folder] = done = event.what in DONE
        if has_control(task):
            family = self.families[_common(task.config)]
            family.waiting[_seed(task)].discard(task.folder)
            self.means.discard(task.folder)
            made += self._follow(task, family) if done else []
        for family in self.families.values():
            over = family.trials and family.trials.keys() <= self.ended.keys()
            if over and family.chosen is None:
                made += self._choose(family)
        return made

    def _follow(self, rule: Task, family: _Family) -> list[Task | Event]:
        made = self._mean(rule) if _adaptive(rule) else []
        if _seed(rule) in family.rules:  # another rule has the other controls already
            return made
        family.rules[_seed(rule)] = rule
        made += self._twin(rule, {"kind": "linear"})
        for factor in self.factors if _seed(rule) == family.first else ():
            made += (new := self._twin(rule, {"kind": "trial", "factor": factor}))
            if not any(isinstance(one, Event) for one in new):
                family.trials[twin(rule, "trial", factor).folder] = factor
        for entry in family.chosen or []:
            made += self._twin(rule, entry)
        return made

    def _mean(self, rule: Task) -> list[Task | Event]:
        try:
            factor = mean_factor(rule.folder, rule.config)
        except (ValueError, RunError, OSError) as error:
            return self._fails(rule, "mean", str(error))
        return self._twin(rule, {"adapter": rule.config.to_dict()["adapter"], "factor": factor})

    def _choose(self, family: _Family) -> list[Task | Event]:
        """The constants that are best on the first seed, for it and all others that are there."""
        rule, family.chosen = family.rules[family.first], []
        there = {factor: folder for folder, factor in family.trials.items() if self.ended[folder]}
        on = [dict(zip(SEEDS, family.first, strict=True))]
        for kind in family.kinds:
            values = {factor: _value(folder, kind) for factor, folder in there.items()}
            if not (known := {factor: v for factor, v in values.items() if v is not None}):
                return self._fails(rule, kind, "no run at a constant factor came to its end")
            sign = Run(next(iter(there.values()))).score.sign
            # Of equals the one nearest to 1.
            best = max(known, key=lambda factor: (sign * known[factor][0], -abs(math.log(factor))))
            tried = {"by": known[best][1], "among": sorted(known), "on": on}
            family.chosen.append({"kind": kind, "factor": best, **tried})
        rules = family.rules.values()
        return [new for entry in family.chosen for one in rules for new in self._twin(one, entry)]

    def _twin(self, rule: Task, entry: dict[str, Any]) -> list[Task | Event]:
        """A control with a note in its folder; nothing if its run is there for another reason."""
        kind = kind_of(entry)
        try:
            made = twin(rule, kind, entry.get("factor"))
            mark(made.folder, entry | ({"asked": True} if made.folder in self.asked else {}))
        except (ValueError, RunError, OSError) as error:
            return self._fails(rule, kind, str(error))
        if made.folder in self.known:
            return []
        self.known[made.folder] = made
        return [made]

    def _fails(self, rule: Task, kind: str, reason: str) -> list[Task | Event]:
        nowhere = rule.folder.with_name(f"{rule.folder.name}-{kind}")
        self.known[nowhere] = replace(rule, folder=nowhere, rule=rule, kind=kind)
        return [Event(self.known[nowhere], "failed", reason=reason)]

    def _expected(self, family: _Family) -> int:
        """Controls that are not known yet."""
        left = {s for s, rules in family.waiting.items() if rules and s not in family.rules}
        trials = len(self.factors) if family.first in left else 0
        constants = 0
        if family.chosen is not None:
            constants = len({entry["factor"] for entry in family.chosen}) * len(left)
        elif family.first in left or family.trials:
            constants = len(family.kinds) * len({*left, *family.rules} - {family.first})
        return len(left) + trials + constants


def twin(rule: Task, kind: str, factor: float | None = None) -> Task:
    """The run that is a rule's control of this kind; nothing is written."""
    config = Config.of(overridden(kind, rule.config.to_dict(), factor))
    folder = folder_of(rule.name, config, rule.folder.parent)
    settings = {k: v for k, v in rule.settings.items() if not replaces(kind, k)}
    settings |= made_of({"kind": kind, "factor": factor})
    return replace(rule, config=config, folder=folder, settings=settings, rule=rule, kind=kind)


def control(rule: Task) -> Task:
    """The run at a constant factor, the mean of a finished rule; a file in its folder notes it."""
    factor = mean_factor(rule.folder, rule.config)
    made = twin(rule, "mean", factor)
    mark(made.folder, {"adapter": rule.config.to_dict()["adapter"], "factor": factor})
    return made


def _adaptive(task: Task) -> bool:
    return task.config.sections["adapter"].adaptive


def _seed(task: Task) -> tuple[Any, ...]:
    keys = flat(task.config.to_dict())
    return tuple(keys.get(key) for key in SEEDS)


def _common(config: Config) -> str:
    """What rules share whose constants are the same runs, apart from the seed."""
    keys = flat({k: v for k, v in config.to_dict().items() if k not in (*RULE, "engine")})
    return json.dumps({k: v for k, v in keys.items() if k not in SEEDS}, default=str)


def _tuned(rule: Task) -> list[str]:
    """The kinds whose constants are chosen: for the newest model, for the average if tested."""
    averaged = getattr(rule.config.sections.get("average"), "test", False)
    return ["tuned", "tuned-averaged"] if averaged else ["tuned"]


def _value(folder: Path, kind: str) -> tuple[float, str] | None:
    """The number of a finished run that chooses among constants, and its name."""
    run = Run(folder)
    summary, score = run.summary or {}, run.score
    names = (Number("last10", readout, score.name).name for readout in KINDS[kind].by)
    known = ((number(summary.get(name)), name) for name in names)
    return next(((value, name) for value, name in known if value is not None), None)


def mean_factor(folder: Path, config: Config) -> float:
    """The mean factor of a finished run per parameter and round: the groups by their sizes.

        s̄ = 1/T Σ_t Σ_G n_G s_G(t) / Σ_G n_G

    n_G is a group's number of parameters, T that of the rounds that stepped.
    """
    run = Run(folder)
    per_tensor = run.sizes() or built_sizes(config)
    groups = config.sections["adapter"].group(per_tensor)
    sizes = dict(zip(groups.labels, groups.sum(per_tensor), strict=True))
    lines = run.lines()
    if lines.damage:
        raise RunError(f"{folder}/{lines.damage}")
    stepped = [r["groups"] for r in run.rounds() if r["status"] == "stepped"]
    if not stepped:
        raise ValueError("no round of its rule stepped, so there is no mean factor")
    return fmean(_weighted(one, sizes) for one in stepped)


def built_sizes(config: Config) -> dict[str, int]:
    """The same as `Run.sizes` where there is no checkpoint: by building the model."""
    import torch

    from fedglad.core.layout import split

    config.require_loaded("model")
    with torch.random.fork_rng(devices=[]):
        layout = split(config.sections["model"].build())[0]
    return dict(zip(layout.names, layout.numels, strict=True))


def _weighted(groups: Mapping[str, Mapping[str, float]], sizes: Mapping[str, float]) -> float:
    """A round's factors, as in its record, averaged by the groups' sizes.

    >>> _weighted({"a": {"scale": 0.5}, "b": {"scale": 1.0}}, {"a": 3, "b": 1})
    0.625
    """
    total = math.fsum(sizes[name] * group["scale"] for name, group in groups.items())
    return total / math.fsum(sizes[name] for name in groups)


def mark(folder: Path, entry: Mapping[str, Any]) -> None:
    """Notes in a control's folder whose it is; a constant may be chosen on several seeds."""
    known, notes = Run(folder).control_of(), dict[str, dict[str, Any]]()
    for one in (*known, entry):
        # What makes two entries one: the kind, the constant, and of a mean its rule.
        who = json.dumps([kind_of(one), one.get("factor"), one.get("adapter")], sort_keys=True)
        before = notes.get(who, {})
        seeds = {json.dumps(seed): seed for seed in (*before.get("on", []), *one.get("on", []))}
        notes[who] = {**before, **one} | ({"on": list(seeds.values())} if seeds else {})
    if known != [*notes.values()]:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"control_of": [*notes.values()]}, indent=2)
        write_text(folder / CONTROL_FILE, json_with_crc(f"{text}\n"))
