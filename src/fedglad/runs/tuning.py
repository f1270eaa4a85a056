"""Tuning: settings from grids, judged by the first rounds.

What judges is the training loss, as in the paper, or the score on a validation set, if there is
one.
A trial is an ordinary run that is shortened to these rounds, and all trials are a sweep, sorted by
score. What is finished is known from the runs' own folders.
"""

import json
import math
import shlex
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fedglad.config.keys import SEEDS, label, shown
from fedglad.config.schema import ConfigError
from fedglad.records import ACCURACY, READOUTS, Score
from fedglad.rng import stream
from fedglad.runs.folder import Run, make_folder
from fedglad.runs.line import number
from fedglad.runs.own_code import folder_of
from fedglad.runs.reader import BULK
from fedglad.runs.scores import Number, metrics_in
from fedglad.runs.sweeping import Event, Task, first_rounds, parse_grids, sweep, tasks
from fedglad.tasks.base import score_of

SHARE = 0.2
METRIC = "train_loss"
"""What the paper chooses by."""
METRICS = (
    METRIC,
    *(Number(when, r, ACCURACY.name).name for r in READOUTS for when in ("last10", "final")),
)
"""What classification may be tuned by; other tasks have their own score in place of accuracy."""


@dataclass(frozen=True)
class Search:
    """What is to be tuned: the grid, and every combination of its values as a shortened run."""

    grid: Mapping[str, list[Any]]
    tasks: list[Task]
    rounds: int
    full_rounds: int
    out: Path

    @property
    def score(self) -> Score:
        """That of the task; trials may differ in its settings, but have one task."""
        return score_of(self.tasks[0].config.sections["task"])

    @property
    def validated(self) -> bool:
        """Whether all trials have a validation set."""
        data = (task.config.sections["data"] for task in self.tasks)
        return all(getattr(one, "validation", 0.0) > 0 for one in data)

    @property
    def personal(self) -> bool:
        """Whether clients keep parameters, without which the server's model says nothing."""
        return any(task.config.sections["client"].has_personal for task in self.tasks)

    @property
    def metric(self) -> str:
        """What judges by default: the score on the validation set, else the training loss."""
        by = Number("last10", "validation", self.score.name).name
        return by if self.validated and not self.personal else METRIC

    @property
    def metrics(self) -> list[str]:
        """What may judge: never the test set, where there is a validation set.

        Data of one's own may bring one that is not known before they are loaded.
        """
        if self.personal:
            return [METRIC]
        metrics = metrics_in([{"test_loss": 0.0}], self.score)
        own = any(":" in task.config.to_dict()["data"]["name"] for task in self.tasks)
        held_out = {True} if self.validated else {False, own}
        readouts = [r for r in READOUTS if r.endswith("validation") in held_out]
        whens = ("last10", "final")
        return [METRIC, *(Number(w, r, m).name for m in metrics for r in readouts for w in whens)]

    def first(self, trials: int | None = None) -> list[Task]:
        """All combinations in the grid's order, or the first `trials` of a random order.

        The order is always the same, so that more trials later keep those that were made.
        """
        if trials is None or trials >= len(self.tasks):
            return self.tasks
        order = stream(0, "trials").permutation(len(self.tasks))
        return [self.tasks[int(place)] for place in order[:trials]]


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
    """The trials of a search, the best first."""

    rounds: int
    full_rounds: int
    grid: dict[str, list[Any]]
    trials: list[Trial]
    best: Trial | None
    notes: list[str]
    metric: str = METRIC
    score: Score = ACCURACY
    """Of the metric: its name, and whether more is better."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        best = {**asdict(self.best), "arguments": self.best.arguments} if self.best else None
        return {**asdict(self), "shortened": self.rounds < self.full_rounds, "best": best}


def combinations(
    source: str | Path,
    grids: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    *,
    share: float = SHARE,
    trust_code: bool = False,
) -> Search:
    """Every combination of "KEY=V1,V2" grids, checked, with the first `share` of its rounds."""
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share}: must be more than 0, and 1 at most")
    if not grids:
        raise ConfigError("tuning needs a grid: --grid server.lr=0.5,1,2")
    grid = {
        key: list({json.dumps(value): value for value in values}.values())  # each once
        for key, values in parse_grids(grids).items()
    }
    for key in grid.keys() & {*SEEDS, "rounds"}:
        raise ConfigError(
            f"--grid {key!r} cannot be tuned: the best of several would be luck. Use --set {key}=…"
        )
    whole = tasks(source, grids, overrides, out, trust_code=trust_code)
    full = whole[0].config.rounds
    rounds = math.ceil(round(share * full, 9))
    shortened: list[Task] = []
    for task in whole:
        config = first_rounds(task.config, rounds)
        folder = folder_of(task.name, config, out)
        shortened.append(replace(task, config=config, folder=folder))
    return Search(grid, shortened, rounds, full, out)


def tune(search: Search, *, trials: int | None = None, jobs: int = 1) -> Generator[Event]:
    """A sweep of all combinations, or of `trials` of them; yields what happens.

    Finished runs are kept, and unfinished or failed ones go on. Ctrl-C: as in a sweep.

    >>> import pathlib, tempfile
    >>> from fedglad.runs import execute
    >>> from fedglad.runs.tuning import combinations, result
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> search = combinations("digits", ["client.lr=0.001,0.1"], {"rounds": 5}, folder)
    >>> runs = [execute(task.name, task.config, out=task.folder) for task in search.tasks]
    >>> [event.what for event in tune(search)], result(search).best.settings  # both are done
    (['kept', 'kept'], {'client.lr': 0.1})
    """
    make_folder(search.out)
    return sweep(search.first(trials), jobs=jobs)


def result(search: Search, ends: Sequence[Event] = (), *, metric: str | None = None) -> Tuning:
    """The scores of all combinations that are finished, and which failed of the runs that ended.

    The metric is one of the search's; the best by its direction comes first.
    """
    metric = check_metric(search, metric)
    trials = [_finished(task, metric) for task in search.tasks if task.finished]
    trials += [_trial(end.task, None, end.reason) for end in ends if end.what == "failed"]
    judged = Number.named(metric)
    score = search.score.of(judged.metric if judged else metric)
    places = ["scored", "diverged", "failed"]
    trials.sort(key=lambda trial: (places.index(trial.status), -score.sign * (trial.score or 0.0)))
    best = trials[0] if trials and trials[0].status == "scored" else None
    notes = [*_as_good(best, trials), *_at_an_edge(best, search.grid)] if best else []
    if judged and judged.readout.endswith("validation"):
        notes.append("chosen by the validation set: the test set was not looked at")
    elif judged:
        notes.append("chosen by the test set: it can no longer tell how good the choice is")
        by = Number("last10", "validation", judged.metric).name
        if best and by in (Run(Path(best.folder)).summary or {}):
            notes.append(f"there is a validation set to choose by: --metric {by}")
    found = dict(search.grid), trials, best, notes, metric, score
    return Tuning(search.rounds, search.full_rounds, *found)


def check_metric(search: Search, metric: str | None) -> str:
    """The metric, or that of the search; raises if the trials will not have it."""
    if metric is None:
        return search.metric
    known = search.metrics
    if metric not in known:
        judged = Number.named(metric)
        if search.personal and judged:
            raise ConfigError(
                f"--metric {metric!r} is of the server's model, in which the clients' personal "
                f"parameters stay as they began: choose {METRIC}"
            )
        if search.validated and judged and not judged.readout.endswith("validation"):
            raise ConfigError(
                f"--metric {metric!r} is of the test set, and there is a validation set to choose "
                f"by: choose from {', '.join(known)}"
            )
        if judged and judged.readout.endswith("validation") and not search.validated:
            raise ConfigError(
                f"--metric {metric!r} needs a validation set: --set data.validation=0.1"
            )
        raise ConfigError(f"--metric {metric!r} is no score: choose from {', '.join(known)}")
    judged = Number.named(metric)
    for task in search.tasks if judged and judged.readout.startswith("averaged") else ():
        sections = task.config.sections
        itself = getattr(sections["server"], "reads_out", None)  # the optimizer keeps one
        if not itself and not getattr(sections["average"], "test", False):
            raise ConfigError(
                f"--metric {metric!r} needs an average that is tested: --set average.name=ema"
            )
    return metric


def value_of(run: Run, metric: str = METRIC) -> tuple[float, str]:
    """A finished run's score; infinite, and why, for one that diverged."""
    value, reason = score(run.rounds(without=BULK))
    if metric == METRIC or reason:
        return value, reason
    known = number((run.summary or {}).get(metric))
    return (math.inf, f"its {metric} was not measured") if known is None else (known, "")


def score(rounds: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """The mean training loss of a run's records; infinite, and why, for one that diverged."""
    skipped = [record for record in rounds if record["status"] != "stepped"]
    if skipped:
        reason = skipped[-1].get("reason", "unknown")
        return math.inf, f"{len(skipped)} of {len(rounds)} rounds were skipped: {reason}"
    losses = [record["train_loss"] for record in rounds]
    for t, loss in enumerate(losses):
        if loss is None or not math.isfinite(loss):
            return math.inf, f"the training loss of round {t + 1} is not finite"
    return fmean(losses), ""


def _finished(task: Task, metric: str) -> Trial:
    records, wanted = Run(task.folder).rounds(without=BULK), task.config.rounds
    stopped = (Run(task.folder).summary or {}).get("stopped")
    if len(records) < wanted and not stopped:
        damage = f"rounds.jsonl is damaged: {len(records)} of {wanted} rounds can be read"
        return _trial(task, None, f"{damage}. Remove the folder and tune again")
    return _trial(task, *value_of(Run(task.folder), metric))


def _trial(task: Task, score: float | None, reason: str) -> Trial:
    """`score` is None if the run failed, and infinite if it diverged."""
    status = "failed" if score is None else "diverged" if reason else "scored"
    value = score if status == "scored" else None
    return Trial(dict(task.settings), status, value, reason, str(task.folder))


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
