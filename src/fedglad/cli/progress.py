"""Runs as they go on: a live line in a terminal, plain lines elsewhere."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from fedglad import privacy as private
from fedglad.cli.console import complain, console, escape, say
from fedglad.records import ACCURACY, Record, Round, Score
from fedglad.runs.control import Controls
from fedglad.runs.folder import Interrupted, Run
from fedglad.runs.reader import BULK
from fedglad.runs.scores import Number
from fedglad.runs.sweeping import DONE, ENDS, Event, Task

NAMED = 20  # distrusted rounds of a kind that a line names


class _Live:
    """A progress display that is there only in a terminal, and only if wanted."""

    def __init__(self, *, quiet: bool) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        # Rounds may take minutes: the time left is estimated from the last hour.
        self.progress = Progress(
            *columns, console=console, transient=True, speed_estimate_period=3600
        )
        self.quiet = quiet
        self.live = console.is_terminal and not quiet

    def __enter__(self):
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.progress.stop()


class ShowRun(_Live):
    """One run: its last round, or elsewhere a line every tenth of the run; and distrusted ones."""

    def __init__(self, rounds: int, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.rounds, self.seen = rounds, 0
        self.task = self.progress.add_task("starting", total=rounds)

    def round(self, done: Round) -> None:
        self.seen += 1
        line = round_line(done, self.rounds)
        if done.warning and not self.quiet:
            console.print(f"round {done.t + 1}: [yellow]{escape(done.warning)}[/]", soft_wrap=True)
        if self.live:
            self.progress.update(self.task, completed=done.t + 1, description=line)
            if done.alarm:  # the line above is gone with the next round
                console.print(line)
        elif not self.quiet and (
            done.alarm or done.warning or (done.t + 1) % max(1, self.rounds // 10) == 0
        ):
            console.print(line, soft_wrap=True)


class ShowSweep(_Live):
    """A line for each running job and one for all; a line for each run that has ended."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        quiet: bool,
        controls: Controls | None = None,
        result: Callable[[Run], str] | None = None,
    ) -> None:
        """`controls` are the runs that follow those of rules."""
        super().__init__(quiet=quiet)
        self.tasks, self.controls, self.result = len(tasks), controls, result or _scored
        self.usual = fmean(task.config.rounds for task in tasks) if tasks else 0.0
        self.ended, self.played, self.kept = 0, 0, 0
        self.lines: dict[Path, TaskID] = {}  # of those that run
        self.total = self.progress.add_task("starting", total=None)

    @property
    def runs(self) -> int:
        """How many there will be, as far as it is known."""
        return self.controls.runs if self.controls else self.tasks

    def __exit__(self, *_: object) -> None:
        self._say_kept()
        super().__exit__()

    def event(self, event: Event) -> None:
        if event.what == "kept":  # these come first
            self.kept += 1
        else:
            self._say_kept()
        if event.what in ENDS:
            self._end(event)
        elif event.round is not None:
            self.played += 1
            shown = round_line(event.round, event.task.config.rounds)
            line, done = f"{escape(event.task.label)}  {shown}", event.round.t + 1
            self.progress.update(self.lines[event.task.folder], completed=done, description=line)
        elif event.what == "started":
            line, rounds = f"{escape(event.task.label)}  starting", event.task.config.rounds
            self.lines[event.task.folder] = self.progress.add_task(line, total=rounds)
        else:
            self._say(event.task, event.reason or "waits for another process that is at it")
        left = sum(line.remaining or 0 for line in self.progress.tasks if line.id != self.total)
        left += max(0, self.runs - self.ended - len(self.lines)) * self.usual
        self.progress.update(
            self.total,
            description=f"{self.ended} of {self.runs} runs",
            completed=self.played,
            total=self.played + left,
        )

    def _end(self, event: Event) -> None:
        self.ended += 1
        if event.task.folder in self.lines:
            self.progress.remove_task(self.lines.pop(event.task.folder))
        if event.what != "kept":
            done = event.what == "finished"
            self._say(event.task, self.result(Run(event.task.folder)) if done else event.reason)

    def _say_kept(self) -> None:
        if self.kept and not self.quiet:
            console.print(f"{self.kept} of {self.runs} runs were finished already.")
        self.kept = 0

    def _say(self, task: Task, text: str) -> None:
        if not self.quiet:
            say(f"{self.ended}/{self.runs}  {task.label}  {text}")


def _scored(run: Run) -> str:
    summary, score = run.summary or {}, run.score
    last10, final = results(summary, score)
    skipped = f"; {run.skipped}" if run.skipped else ""
    held_out = f"; {validated}" if (validated := validation(summary, score)) else ""
    own = f"; {tested}" if (tested := single_clients(summary, score)) else ""
    return f"{score.words} {last10}, final {final}{held_out}{own}{skipped}"


def results(
    summary: Mapping[str, Any], score: Score = ACCURACY, readout: str = "test"
) -> tuple[str, str]:
    """Over the last ten rounds and in the last; of the average too, where it was tested.

    >>> results({"last10_accuracy": 0.5, "final_accuracy": None})
    ('50.00 %', 'not measured')
    >>> averaged = {"last10_averaged_accuracy": 0.75, "final_averaged_accuracy": 0.8}
    >>> results({"last10_accuracy": 0.5, "final_accuracy": 0.4, **averaged})
    ('50.00 % (averaged 75.00 %)', '40.00 % (averaged 80.00 %)')
    """

    def text(number: Number | None) -> str:
        value = summary.get(number.name) if number else None
        return "" if value is None else score.text(value, 2)

    def both(when: str) -> str:
        newest = Number(when, readout, score.name)
        averaged = text(newest.averaged)
        more = f" (averaged {averaged})" if averaged else ""
        return f"{text(newest) or 'not measured'}{more}"

    return both("last10"), both("final")


def validation(summary: Mapping[str, Any], score: Score = ACCURACY) -> str:
    """The same of the validation set, and the best round by it; empty if there is none.

    >>> validation({"last10_validation_mae": 0.5, "best_round": 6, "best_validation_mae": 0.25,
    ...     "final_validation_mae": 0.5}, Score("mae", higher=False))
    'validation 0.5, best 0.25 after round 7'
    """
    best, place = Number("best", "validation", score.name), summary.get("best_round")
    if place is None or best.name not in summary:
        return ""
    last10, _ = results(summary, score, "validation")
    return f"validation {last10}, best {score.text(summary[best.name], 2)} after round {place + 1}"


OWN_MODELS = "clients' own models"
"""What is tested of clients that have parameters or models of their own."""


def single_clients(summary: Mapping[str, Any], score: Score = ACCURACY) -> str:
    """The clients' own scores when they were tested last, of the average too; or empty.

    >>> single_clients({"last_client_mean": 0.712, "last_client_worst_decile": 0.401})
    'clients 71.20 % (worst tenth 40.10 %)'
    """
    parts: list[str] = []
    whose = OWN_MODELS if summary.get("last_client_model") else "clients"
    for which, word in (("", whose), ("averaged_", "averaged")):
        names = (f"last_{which}client_{name}" for name in ("mean", "worst_decile"))
        mean, worst = map(summary.get, names)
        parts += [] if mean is None else [_own(mean, worst, score, 2, word)]
    return ", ".join(parts)


def _own(
    mean: float | None, worst: float | None, score: Score, digits: int = 1, word: str = "clients"
) -> str:
    return f"{word} {score.text(mean, digits)} (worst tenth {score.text(worst, digits)})"


def last_tests(run: Run) -> str:
    """Which tests the result of a run is the mean of, at most ten."""
    rounds = run.rounds(without=BULK)
    tests = sum(one.get(f"test_{run.score.name}") is not None for one in rounds)
    what = "round" if tests == len(rounds) else "test"
    if tests >= 10:
        return f"the last 10 {what}s"
    return f"its {tests} {what}{'s' if tests != 1 else ''}"


def round_line(done: Round, rounds: int) -> str:
    """A round in one line of rich markup."""
    record = done.record
    parts: list[str] = []
    if tested := _tested(done):
        loss = done.test_loss if done.score.name != "loss" else None
        parts.append(tested + ("" if loss is None else f"  loss {loss:.3f}"))
    if done.client_scores:
        own = done.client_scores.to_dict()
        word = OWN_MODELS if "model" in own else "clients"
        parts.append(_own(own["mean"], own["worst_decile"], done.score, word=word))
    if record.gsi_all is not None:
        parts.append(f"GSI {record.gsi_all:.2f}")
    if record.baseline:
        parts.append(f"clipped {clipped(record)}/{len(record.scale)}")
    if record.epsilon is not None:
        parts.append(f"ε {private.text(record.epsilon)}")
    if record.rejected:
        parts.append(f"{len(record.rejected)} rejected")
    if not record.stepped:
        parts.append(f"skipped: {record.reason}")
    rate = len(done.cohort) / max(done.seconds.get("train", 0), 1e-9)
    mark = f"  [yellow]! {done.alarm}[/]" if done.alarm else ""  # where no narrow terminal cuts it
    return f"round {done.t + 1}/{rounds}{mark}  " + escape(
        "  ".join([*parts, f"{_rate(rate)} clients/s"])
    )


def _rate(rate: float) -> str:
    """
    >>> _rate(123.4), _rate(2.34), _rate(0.0456)
    ('123', '2.3', '0.046')
    """
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def _tested(done: Round) -> str:
    """The score of the model and of the average, on the test set and on the validation set."""
    score, shown = done.score, list[str]()
    for name, readouts in {
        score.words: ("test", "averaged"),
        "validation": ("validation", "averaged_validation"),
    }.items():
        values = zip((name, "averaged"), map(done.scored, readouts), strict=True)
        texts = [f"{word} {_aligned(score, value)}" for word, value in values if value is not None]
        shown += [", ".join(texts)] if texts else []
    return "; ".join(shown)


def _aligned(score: Score, value: float) -> str:
    return f"{score.text(value):>{7 if score.share else 0}}"


def distrusted(rounds: Sequence[Mapping[str, Any]]) -> str:
    """The rounds of a run that have an alarm, in one line; empty if none has."""
    flagged: dict[str, list[int]] = {}
    for record in rounds:
        if flag := record.get("alarm"):
            flagged.setdefault(flag, []).append(record["round"] + 1)
    named: list[str] = []
    for flag, numbers in sorted(flagged.items()):
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        named.append(f"{', '.join(map(str, numbers[:NAMED]))}{more} ({flag})")
    count = sum(map(len, flagged.values()))
    return f"{count} of {len(rounds)} rounds distrusted: {', '.join(named)}" if count else ""


def clipped(record: Record) -> int:
    """How many groups Glad scaled by a bound and not by GSI/B.

    Exact, as the record has the floats that were divided. A group without updates has s = 1, which
    no bound is but in the first round, where GSI/B is 1 too.
    """

    def at_a_bound(name: str, scale: float) -> bool:
        baseline = record.baseline.get(name)
        return scale != 1 and (baseline is None or scale != record.gsi[name] / baseline)

    return sum(at_a_bound(name, scale) for name, scale in record.scale.items())


def follow(events: Generator[Event], show: ShowSweep) -> list[Event]:
    """Shows what happens, to the end; how each run ended."""
    ends: list[Event] = []
    try:
        with show, closing(events):
            for event in events:
                show.event(event)
                ends += [event] if event.what in ENDS else []
    except Interrupted as stopped:
        done = sum(event.what in DONE for event in ends)
        complain.print(f"{done} of {show.runs} runs are finished; {escape(str(stopped))}")
        raise typer.Exit(130) from None
    return ends
