"""Tuning as in the paper: settings from grids, judged by the training loss of the first rounds.

Every trial is an ordinary run, shortened to these rounds. An Optuna study beside the runs chooses
what is tried next and remembers the scores.
"""

import fcntl
import hashlib
import json
import math
import shlex
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fedglad.config.keys import SEEDS, label, shown
from fedglad.config.schema import ConfigError
from fedglad.runs.folder import Run, RunError, make_folder
from fedglad.runs.sweeping import DONE, Event, Task, first_rounds, parse_grids, sweep, tasks

SEED = 0  # of the sampler
ASKS = 20  # a sampler that proposes only what is known so often is not asked again
SHARE = 0.2


@dataclass(frozen=True)
class Plan:
    """What is to be tuned: a study's name, and every combination as a shortened run."""

    name: str
    grid: Mapping[str, list[Any]]
    tasks: list[Task]
    rounds: int
    full_rounds: int
    out: Path

    @property
    def journal(self) -> Path:
        """The file of the study."""
        return self.out / f"{self.name}.journal"


@dataclass(frozen=True)
class Trial:
    """A combination that was tried; one that is not "scored" has a reason instead of a score."""

    settings: dict[str, Any]
    status: Literal["scored", "diverged", "failed"]
    score: float | None
    reason: str
    folder: str

    @property
    def arguments(self) -> str:
        """Its settings as `fedglad run` takes them."""
        return " ".join(f"--set {shlex.quote(label({k: v}))}" for k, v in self.settings.items())


@dataclass(frozen=True)
class Tuning:
    """The trials of a study, the best first."""

    study: str
    rounds: int
    full_rounds: int
    grid: dict[str, list[Any]]
    trials: list[Trial]
    best: Trial | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        best = {**asdict(self.best), "arguments": self.best.arguments} if self.best else None
        return {**asdict(self), "shortened": self.rounds < self.full_rounds, "best": best}


def plan(
    source: str | Path,
    grids: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    *,
    share: float = SHARE,
) -> Plan:
    """Every combination of "KEY=V1,V2" grids, checked, with the first `share` of its rounds."""
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share}: must be more than 0, and 1 at most")
    if not grids:
        raise ConfigError("tuning needs a grid: --grid server.lr=0.5,1,2")
    grid = {key: _distinct(values) for key, values in parse_grids(grids).items()}
    for key in grid.keys() & {*SEEDS, "rounds"}:
        raise ConfigError(
            f"--grid {key!r} cannot be tuned: the best of several would be luck. Use --set {key}=…"
        )
    whole = tasks(source, grids, overrides, out)
    full = whole[0].config.rounds
    rounds = math.ceil(round(share * full, 9))
    short = [_shortened(task, rounds) for task in whole]
    texts = {key: [json.dumps(value) for value in values] for key, values in grid.items()}
    identity = json.dumps([texts, [task.config.hash() for task in short]])
    name = f"{short[0].name}-study-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"
    return Plan(name, grid, short, rounds, full, out)


def tune(plan: Plan, *, trials: int | None = None, jobs: int = 1) -> Generator[Event]:
    """Runs all combinations, or `trials` of them that Optuna chooses; tells what happens.

    What the study has already is not run again; unfinished runs go on. Ctrl-C: as in a sweep.
    """
    _optuna()
    make_folder(plan.out)
    with _held(plan.journal):
        search = _Search(plan, trials)
        for task in search.tried[: search.wanted]:
            yield Event(task, "kept")
        first = [task for task in (search.next() for _ in range(jobs)) if task]
        with closing(sweep(first, jobs=jobs, then=search.ended)) as events:
            yield from events


def result(plan: Plan) -> Tuning:
    """What the study knows."""
    by_key = {_key(task.settings): task for task in plan.tasks}
    found: dict[str, Trial] = {}
    for trial in _study(plan).get_trials(deepcopy=False):
        key = _key_of(trial.params, plan)
        told = trial.user_attrs.get("status")
        if key in by_key and told and (key not in found or found[key].status == "failed"):
            task, reason = by_key[key], trial.user_attrs.get("reason", "")
            value = trial.value if told == "scored" else None
            found[key] = Trial(dict(task.settings), told, value, reason, str(task.folder))
    places = ["scored", "diverged", "failed"]
    ordered = sorted(
        found.values(), key=lambda trial: (places.index(trial.status), trial.score or 0.0)
    )
    best = ordered[0] if ordered and ordered[0].status == "scored" else None
    grid = dict(plan.grid)
    notes = [*_as_good(best, ordered), *_at_an_edge(best, plan.grid)] if best else []
    return Tuning(plan.name, plan.rounds, plan.full_rounds, grid, ordered, best, notes)


def score(rounds: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """The mean training loss of a run's records; infinite, and why, for one that diverged."""
    skipped = [found for found in rounds if found["status"] != "stepped"]
    if skipped:
        reason = skipped[-1].get("reason", "unknown")
        return math.inf, f"{len(skipped)} of {len(rounds)} rounds were skipped: {reason}"
    losses = [found["train_loss"] for found in rounds]
    for t, loss in enumerate(losses):
        if loss is None or not math.isfinite(loss):
            return math.inf, f"the training loss of round {t + 1} is not finite"
    return fmean(losses), ""


def _shortened(task: Task, rounds: int) -> Task:
    """Its first rounds."""
    config = first_rounds(task.config, rounds)
    folder = task.folder.with_name(f"{task.name}-{config.hash()}")
    return replace(task, config=config, folder=folder)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({json.dumps(value): value for value in values}.values())


def _as_good(best: Trial, trials: Sequence[Trial]) -> list[str]:
    """In two rounds, say, γ changes no loss: the factors of the second act on the third."""
    others = [trial for trial in trials if trial.score == best.score and trial is not best]
    few = "; ".join(trial.arguments for trial in others[:3]) + ("; …" if len(others) > 3 else "")
    return [f"the first rounds do not tell it from {few}: the same score"] if others else []


def _at_an_edge(best: Trial, grid: Mapping[str, list[Any]]) -> list[str]:
    notes: list[str] = []
    for key, values in grid.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(values) > 1 and best.settings[key] in (min(numbers), max(numbers)):
            which = "smallest" if best.settings[key] == min(numbers) else "largest"
            value = shown(best.settings[key])
            notes.append(f"the best {key}, {value}, is the {which} of its grid: widen the grid")
    return notes


# -------------------------------------------------------------------------------------- the study


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps({key: json.dumps(value) for key, value in settings.items()})


def _key_of(params: Mapping[str, Any], plan: Plan) -> str:
    """Of a trial, whose parameters are the values' texts: Optuna takes no lists or tables."""
    return json.dumps({key: params.get(key) for key in plan.grid})


class _Search:
    """What to try next, and what came out; the study is its memory."""

    def __init__(self, plan: Plan, trials: int | None) -> None:
        self.plan, self.states = plan, _optuna().trial.TrialState
        self.wanted = min(trials or len(plan.tasks), len(plan.tasks))
        self.study = _study(plan, startup=max(2, self.wanted // 3))
        self.by_key = {_key(task.settings): task for task in plan.tasks}
        self.running: dict[Path, Any] = {}
        found = self.study.get_trials(deepcopy=False)
        # No other process has the study, so what runs in it was killed.
        for trial in found:
            if trial.state == self.states.RUNNING:
                self.study.tell(trial.number, state=self.states.FAIL)
        keys = [_key_of(trial.params, plan) for trial in found]
        done = [trial.state == self.states.COMPLETE for trial in found]
        self.begun = {key for key, there in zip(keys, done, strict=True) if there}
        again = (key for key in keys if key in self.by_key and key not in self.begun)
        self.again = deque(dict.fromkeys(again))
        self.tried = [task for key, task in self.by_key.items() if key in self.begun]

    def next(self) -> Task | None:
        """The next one to run: what was begun before, then the grid in order or by the sampler."""
        if len(self.begun) >= self.wanted:
            return None
        sampled = self.wanted < len(self.plan.tasks) and not self.again
        for asked in range(ASKS + 1):
            if not sampled or asked == ASKS:
                left = [*self.again, *(key for key in self.by_key if key not in self.begun)]
                self.study.enqueue_trial(json.loads(left[0]))
            trial = self.study.ask()
            params = {
                key: trial.suggest_categorical(key, [json.dumps(value) for value in values])
                for key, values in self.plan.grid.items()
            }
            key = _key_of(params, self.plan)
            if key in self.by_key and key not in self.begun:
                break
            self.study.tell(trial, state=self.states.FAIL)  # known
        else:
            return None
        if key in self.again:
            self.again.remove(key)
        self.begun.add(key)
        task = self.by_key[key]
        self.running[task.folder] = trial
        return task

    def ended(self, event: Event) -> list[Task]:
        """Tells the study; gives what comes next."""
        trial = self.running.pop(event.task.folder)
        if event.what in DONE:
            value, reason = score(Run(event.task.folder).rounds())
            trial.set_user_attr("status", "diverged" if reason else "scored")
            trial.set_user_attr("reason", reason)
            self.study.tell(trial, value)
        else:
            if event.what == "failed":
                trial.set_user_attr("status", "failed")
                trial.set_user_attr("reason", event.reason)
            self.study.tell(trial, state=self.states.FAIL)
        following = self.next() if event.what != "stopped" else None
        return [following] if following else []


class _NoLock:
    """For Optuna, whose own lock would outlive a killed process: the file is locked by us."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _optuna() -> Any:
    """Imported here alone, and quiet."""
    try:
        import optuna
    except ImportError:
        raise RunError(
            "tuning needs optuna, which is not installed: pip install 'fedglad[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _study(plan: Plan, startup: int = 10) -> Any:
    """The study in its file."""
    optuna = _optuna()
    try:
        journal = optuna.storages.journal.JournalFileBackend(str(plan.journal), lock_obj=_NoLock())
        own = {"storage": optuna.storages.JournalStorage(journal), "study_name": plan.name}
        there = plan.name in optuna.get_all_study_names(own["storage"])
        study = optuna.load_study(**own) if there else optuna.create_study(**own)
        # Another seed after each trial: a study that goes on must not draw the same again.
        number = len(study.get_trials(deepcopy=False))
        study.sampler = optuna.samplers.TPESampler(seed=SEED + number, n_startup_trials=startup)
    except (ValueError, KeyError) as error:
        raise RunError(
            f"{plan.journal} is damaged: {error}. Remove that file: the runs beside it are kept"
        ) from None
    return study


@contextmanager
def _held(journal: Path) -> Generator[None]:
    """One process at a time has the study; a line that a killed one left half is cut off."""
    try:
        journal.touch()
    except OSError as error:
        raise RunError(f"{journal} cannot be written: {error}; choose another --out") from None
    with open(journal, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{journal} is in use by another process: wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        file.truncate(file.read().rfind(b"\n") + 1)
        yield
