"""What the commands show: live lines in a terminal, plain ones elsewhere, and tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedglad.compare import SEEDS, Comparison, Difference, Group, label
from fedglad.records import Record, Round
from fedglad.runs import Run
from fedglad.sweep import ENDS, Event, Task

console = Console(highlight=False)
complain = Console(stderr=True, highlight=False, soft_wrap=True)

WIDE = 1000  # a file has room for any table


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
    """One run: its last round, or elsewhere a line every tenth of the run."""

    def __init__(self, rounds: int, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.rounds, self.seen = rounds, 0
        self.task = self.progress.add_task("starting", total=rounds)

    def round(self, done: Round) -> None:
        self.seen += 1
        line = round_line(done, self.rounds)
        if self.live:
            self.progress.update(self.task, completed=done.t + 1, description=line)
        elif not self.quiet and (done.t + 1) % max(1, self.rounds // 10) == 0:
            console.print(line, soft_wrap=True)


class ShowSweep(_Live):
    """A line for each running job and one for all; a line for each run that has ended."""

    def __init__(self, tasks: Sequence[Task], *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.left = {task.folder: task.config.rounds for task in tasks}
        self.runs, self.ended, self.played, self.kept = len(tasks), 0, 0, 0
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
        else:
            self._say(event.task, "waits for another process that is at it")
        self.progress.update(
            self.total,
            description=f"{self.ended} of {self.runs} runs",
            completed=self.played,
            total=self.played + sum(self.left.values()),
        )

    def _round(self, task: Task, done: Round) -> None:
        self.played += 1
        self.left[task.folder] = task.config.rounds - done.t - 1
        line = _short(task, round_line(done, task.config.rounds))
        self.progress.update(self.lines[task.folder], completed=done.t + 1, description=line)

    def _end(self, event: Event) -> None:
        self.ended += 1
        self.left.pop(event.task.folder)
        if event.task.folder in self.lines:
            self.progress.remove_task(self.lines.pop(event.task.folder))
        if event.what != "kept":
            self._say(event.task, _result(event))

    def _say_kept(self) -> None:
        if self.kept and not self.quiet:
            console.print(f"{self.kept} of {self.runs} runs were finished already.")
        self.kept = 0

    def _say(self, task: Task, text: str) -> None:
        if not self.quiet:
            line = f"{self.ended}/{self.runs}  {label(task.settings)}  {text}"
            console.print(escape(line), soft_wrap=True)


def _short(task: Task, text: str) -> str:
    return f"{escape(label(task.settings))}  {text}"


def _result(event: Event) -> str:
    if event.what != "finished":
        return event.reason
    run = Run(event.task.folder)
    summary = run.summary or {}
    last10, final = (100 * summary[key] for key in ("last10_accuracy", "final_accuracy"))
    skipped = f"; {run.skipped}" if run.skipped else ""
    return f"accuracy {last10:.2f} %, final {final:.2f} %{skipped}"


def round_line(done: Round, rounds: int) -> str:
    """A round in one line of rich markup."""
    record = done.record
    parts = [f"round {done.t + 1}/{rounds}"]
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
    return escape("  ".join([*parts, f"{rate:.0f} clients/s"]))


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
    unit = " %" if percent else ""
    paired = any(group.difference for group in found.groups)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if len(found.groups) > 1:
        table.caption = escape(f"Baseline: {found.baseline}")
        table.caption_justify, table.caption_style = "left", "none"
    table.add_column("", overflow="fold")
    heads = ["n", f"{found.metric}{unit}"]
    heads += ["final %"] if found.metric != "final_accuracy" else []
    heads += ["difference", "95 % interval"] if paired else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for group in found.groups:
        table.add_row(*_row(group, found, percent=percent)[: len(heads) + 1])
    wide = console if console.is_terminal else Console(highlight=False, width=WIDE)
    wide.print(table)
    if paired:
        _show_differences(found, percent=percent)
    for note in found.notes:
        console.print(escape(f"Note: {note}."), soft_wrap=True)


def _row(group: Group, found: Comparison, *, percent: bool) -> list[str]:
    def text(value: float) -> str:
        return f"{100 * value:.2f}" if percent else f"{value:.4g}"

    spread = text(group.mean) + (f" ± {text(group.std)}" if group.std is not None else "")
    cells = [escape(group.label), str(len(group.values)), spread]
    if found.metric != "final_accuracy":
        cells.append(f"{100 * group.final_mean:.2f}")
    if group.label == found.baseline:
        return [*cells, "baseline", ""]
    return [*cells, *_cells(group.difference, percent=percent)]


def _cells(difference: Difference | None, *, percent: bool) -> list[str]:
    if difference is None:
        return ["-", "-"]
    mean = _signed(difference.mean, percent=percent)
    if difference.interval is None:
        return [mean, "-"]
    low, high = (_signed(value, percent=percent) for value in difference.interval)
    return [mean, escape(f"[{low}, {high}]")]


def _show_differences(found: Comparison, *, percent: bool) -> None:
    unit = " in percentage points" if percent else ""
    console.print(f"\nDifferences to {escape(found.baseline)} by seed{unit}:", soft_wrap=True)
    names = _varying([seed for group in found.groups for seed in group.seeds])
    for group in found.groups:
        if group.difference:
            pairs = zip(group.difference.seeds, group.difference.values, strict=True)
            told = [
                f"{'/'.join(str(seed.get(name)) for name in names)}: {_signed(v, percent=percent)}"
                for seed, v in pairs
            ]
            console.print(escape(f"  {group.label}   {',  '.join(told)}"), soft_wrap=True)


def _varying(seeds: list[dict[str, Any]]) -> list[str]:
    """The seeds' names that tell the runs apart."""
    varying = [name for name in SEEDS if len({seed.get(name) for seed in seeds}) > 1]
    return varying or ["seed"]


def _signed(value: float, *, percent: bool) -> str:
    return f"{100 * value:+.2f}" if percent else f"{value:+.4g}"
