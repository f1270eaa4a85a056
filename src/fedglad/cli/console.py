"""What the commands show: live lines in a terminal, plain ones elsewhere, and tables."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedglad.analysis.comparison import Comparison, Difference, Group
from fedglad.config.keys import SEEDS, label, shown
from fedglad.records import Record, Round
from fedglad.runs.folder import Run
from fedglad.runs.sweeping import DONE, ENDS, Event, Task, has_control
from fedglad.runs.tuning import Tuning, score

console = Console(highlight=False)
complain = Console(stderr=True, highlight=False, soft_wrap=True)

WIDE = 1000  # a file has room for any table
NAMED = 20  # distrusted rounds of a kind that a line names


def error(text: str) -> None:
    """A mistake or a failure, on stderr."""
    complain.print(f"[red]error:[/] {escape(text)}")


def warn(text: str) -> None:
    """A result that is not what it seems, on stderr."""
    complain.print(f"[yellow]warning:[/] {escape(text)}")


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
        if self.live:
            self.progress.update(self.task, completed=done.t + 1, description=line)
            if done.alarm:  # the line above is gone with the next round
                console.print(line)
        elif not self.quiet and (done.alarm or (done.t + 1) % max(1, self.rounds // 10) == 0):
            console.print(line, soft_wrap=True)


class ShowSweep(_Live):
    """A line for each running job and one for all; a line for each run that has ended."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        quiet: bool,
        runs: int | None = None,
        control: bool = False,
        result: Callable[[Run], str] | None = None,
    ) -> None:
        """`runs`: of how many of the tasks; `control`: each adaptive rule has one more run."""
        super().__init__(quiet=quiet)
        self.control, self.result = control, result or _accuracy
        controls = sum(map(has_control, tasks)) if control else 0
        self.runs = (len(tasks) if runs is None else runs) + controls
        self.usual = fmean(task.config.rounds for task in tasks) if tasks else 0.0
        self.left: dict[Path, int] = {}  # rounds of those that run
        self.ended, self.played, self.kept = 0, 0, 0
        self.lines: dict[Path, TaskID] = {}
        self.total = self.progress.add_task("starting", total=None)

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
            self._round(event.task, event.round)
        elif event.what == "started":
            rounds = event.task.config.rounds
            line = self.progress.add_task(_short(event.task, "starting"), total=rounds)
            self.lines[event.task.folder] = line
            self.left[event.task.folder] = rounds
        else:
            self._say(event.task, "waits for another process that is at it")
        waiting = max(0, self.runs - self.ended - len(self.left)) * self.usual
        self.progress.update(
            self.total,
            description=f"{self.ended} of {self.runs} runs",
            completed=self.played,
            total=self.played + sum(self.left.values()) + waiting,
        )

    def _round(self, task: Task, done: Round) -> None:
        self.played += 1
        self.left[task.folder] = task.config.rounds - done.t - 1
        line = _short(task, round_line(done, task.config.rounds))
        self.progress.update(self.lines[task.folder], completed=done.t + 1, description=line)

    def _end(self, event: Event) -> None:
        self.ended += 1
        self.left.pop(event.task.folder, None)
        if self.control and has_control(event.task) and event.what not in DONE:
            self.runs -= 1  # without its mean factor there is no control
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
            line = f"{self.ended}/{self.runs}  {task.label}  {text}"
            console.print(escape(line), soft_wrap=True)


def _short(task: Task, text: str) -> str:
    return f"{escape(task.label)}  {text}"


def _accuracy(run: Run) -> str:
    summary = run.summary or {}
    last10, final = (100 * summary[key] for key in ("last10_accuracy", "final_accuracy"))
    skipped = f"; {run.skipped}" if run.skipped else ""
    return f"accuracy {last10:.2f} %, final {final:.2f} %{skipped}"


def round_line(done: Round, rounds: int) -> str:
    """A round in one line of rich markup."""
    record = done.record
    parts: list[str] = []
    if done.test_accuracy is not None and done.test_loss is not None:
        parts.append(f"accuracy {100 * done.test_accuracy:5.1f} %  loss {done.test_loss:.3f}")
    if record.gsi_all is not None:
        parts.append(f"GSI {record.gsi_all:.2f}")
    if record.baseline:
        parts.append(f"clipped {clipped(record)}/{len(record.scale)}")
    if record.rejected:
        parts.append(f"{len(record.rejected)} rejected")
    if not record.stepped:
        parts.append(f"skipped: {record.reason}")
    rate = len(done.cohort) / max(done.seconds.get("train", 0), 1e-9)
    mark = f"  [yellow]! {done.alarm}[/]" if done.alarm else ""  # where no narrow terminal cuts it
    return f"round {done.t + 1}/{rounds}{mark}  " + escape(
        "  ".join([*parts, f"{rate:.0f} clients/s"])
    )


def distrusted(rounds: Sequence[Mapping[str, Any]]) -> str:
    """The rounds of a run that have an alarm, in one line; empty if none has."""
    flagged: dict[str, list[int]] = {}
    for found in rounds:
        if flag := found.get("alarm"):
            flagged.setdefault(flag, []).append(found["round"] + 1)
    named = [f"{_numbers(flagged[flag])} ({flag})" for flag in sorted(flagged)]
    count = sum(map(len, flagged.values()))
    return f"{count} of {len(rounds)} rounds distrusted: {', '.join(named)}" if count else ""


def _numbers(rounds: Sequence[int]) -> str:
    more = f" and {len(rounds) - NAMED} more" if len(rounds) > NAMED else ""
    return ", ".join(map(str, rounds[:NAMED])) + more


def clipped(record: Record) -> int:
    """How many groups Glad scaled by a bound and not by GSI/B.

    Exact, as the record has the floats that were divided. A group without updates has s = 1, which
    no bound is but in the first round, where GSI/B is 1 too.
    """

    def at_a_bound(name: str, scale: float) -> bool:
        baseline = record.baseline.get(name)
        return scale != 1 and (baseline is None or scale != record.gsi[name] / baseline)

    return sum(at_a_bound(name, scale) for name, scale in record.scale.items())


def show_comparison(found: Comparison) -> None:
    """The table, the differences by seed, and the notes."""
    percent = found.metric.endswith("accuracy")
    table = _table("")
    if len(found.groups) > 1:
        table.caption = escape(f"Baseline: {found.baseline}")
        table.caption_justify, table.caption_style = "left", "none"
    rows = [_row(group, found, percent=percent) for group in found.groups]
    # A column in which no group has anything is left out.
    for head in [head for head in rows[0] if any(row[head] for row in rows)]:
        table.add_column(head, justify="right", no_wrap=True)
    for group, row in zip(found.groups, rows, strict=True):
        table.add_row(escape(group.label), *(row[str(c.header)] for c in table.columns[1:]))
    _print_wide(table)
    if any(group.difference for group in found.groups):
        _show_differences(found, percent=percent)
    _show_controls(found, percent=percent)
    _show_stability(found)
    for note in found.notes:
        console.print(escape(f"Note: {note}."), soft_wrap=True)


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    return table


def _print_wide(table: Table) -> None:
    wide = console if console.is_terminal else Console(highlight=False, width=WIDE)
    wide.print(table)


def _row(group: Group, found: Comparison, *, percent: bool) -> dict[str, str]:
    """A group's cells by the heads of their columns."""

    def text(value: float) -> str:
        return f"{100 * value:.2f}" if percent else f"{value:.4g}"

    spread = text(group.mean) + (f" ± {text(group.std)}" if group.std is not None else "")
    cells = {"n": str(len(group.values)), f"{found.metric}{' %' if percent else ''}": spread}
    if found.metric != "final_accuracy":
        cells["final %"] = f"{100 * group.final_mean:.2f}"
    mean, interval = "", ""
    if any(other.difference for other in found.groups):
        mean, interval = ("baseline", "") if group.label == found.baseline else ("-", "-")
    if group.difference:
        mean, interval = _cells(group.difference, percent=percent)
    return {**cells, "difference": mean, "95 % interval": interval}


def _cells(difference: Difference, *, percent: bool) -> tuple[str, str]:
    mean = _signed(difference.mean, percent=percent)
    if difference.interval is None:
        return mean, "-"
    low, high = (_signed(value, percent=percent) for value in difference.interval)
    return mean, escape(f"[{low}, {high}]")


def _show_differences(found: Comparison, *, percent: bool) -> None:
    unit = " in percentage points" if percent else ""
    console.print(f"\nDifferences to {escape(found.baseline)} by seed{unit}:", soft_wrap=True)
    for group in found.groups:
        if group.difference:
            told = _by_seed(group.difference, found, percent=percent)
            console.print(escape(f"  {group.label}   {told}"), soft_wrap=True)


def _show_controls(found: Comparison, *, percent: bool) -> None:
    factors = {group.control_of: group.factors or [] for group in found.groups}
    pairs = [(group, group.over_control) for group in found.groups if group.over_control]
    if pairs:
        unit = " in percentage points" if percent else ""
        console.print(f"\nRule − control, at the rule's own mean factor{unit}:", soft_wrap=True)
    for group, difference in pairs:
        mean, interval = _cells(difference, percent=percent)
        text = f"  {escape(group.label)}   {mean} {interval}".removesuffix(" -")
        seeds = escape(_by_seed(difference, found, percent=percent))
        constant = ", ".join(f"{factor:.4f}" for factor in factors[group.label])
        console.print(f"{text}   by seed {seeds}   (factors {constant})", soft_wrap=True)


def _show_stability(found: Comparison) -> None:
    steady = [(group.label, group.stability) for group in found.groups if group.stability]
    if steady:
        console.print("\nTest accuracy in the second half of the rounds, mean over the runs:")
        table = _table("")
        table.add_column("std %", justify="right")
        table.add_column("worst round %", justify="right")
        for name, its in steady:
            table.add_row(escape(name), f"{100 * its.std:.2f}", f"{100 * its.worst:.2f}")
        _print_wide(table)


def _by_seed(difference: Difference, found: Comparison, *, percent: bool) -> str:
    names = _varying([seed for group in found.groups for seed in group.seeds])
    pairs = zip(difference.seeds, difference.values, strict=True)
    return ",  ".join(
        f"{'/'.join(str(seed.get(name)) for name in names)}: {_signed(v, percent=percent)}"
        for seed, v in pairs
    )


def _varying(seeds: list[dict[str, Any]]) -> list[str]:
    """The seeds' names that tell the runs apart."""
    varying = [name for name in SEEDS if len({seed.get(name) for seed in seeds}) > 1]
    return varying or ["seed"]


def _signed(value: float, *, percent: bool) -> str:
    return f"{100 * value:+.2f}" if percent else f"{value:+.4g}"


def training_loss(run: Run) -> str:
    """What a trial came to."""
    value, reason = score(run.rounds())
    return f"diverged: {reason}" if reason else f"training loss {value:.4f}"


def show_tuning(found: Tuning) -> None:
    """The trials, the best first, and its settings as arguments."""
    table = _table("score")
    keys = list(found.grid)
    for key in keys:
        table.add_column(escape(key), justify="right", no_wrap=True)
    table.add_column("run", overflow="fold")
    for trial in found.trials:
        score = f"{trial.score:.4f}" if trial.score is not None else trial.status
        values = (escape(shown(trial.settings[key])) for key in keys)
        table.add_row(score, *values, escape(str(trial.folder)))
    _print_wide(table)
    console.print(
        f"\nThe score is the mean training loss over the first {found.rounds} of "
        f"{found.full_rounds} rounds. The runs are shortened to these: no result of theirs stands "
        "for a whole run.",
        soft_wrap=True,
    )
    for trial in found.trials:
        if trial.status == "diverged":
            told = f"Diverged: {label(trial.settings)}: {trial.reason}."
            console.print(escape(told), soft_wrap=True)
    if found.best:
        console.print(f"Best: [bold]{escape(found.best.arguments)}[/]", soft_wrap=True)
    for note in found.notes:
        console.print(escape(f"Note: {note}."), soft_wrap=True)
