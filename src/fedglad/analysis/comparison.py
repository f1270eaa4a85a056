"""Runs side by side: mean and spread over the seeds, and paired differences to a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from fedglad.analysis.blocks import blocks_of, check_aliases, nearest
from fedglad.analysis.curves import Curve, Series, curve, series
from fedglad.analysis.grouping import (
    CONTROL,
    CompareError,
    Grouping,
    Seed,
    Settings,
    group,
    is_control_of,
    named_seed,
    pop_seed,
    settings_of,
)
from fedglad.analysis.statistics import Stability, interval, spread, stability
from fedglad.analysis.targets import Reached, rounds_to, target_of
from fedglad.config.keys import SEEDS, shown
from fedglad.config.keys import label as label_of
from fedglad.config.presets import shortened
from fedglad.config.schema import parse_value
from fedglad.records import ACCURACY, Score
from fedglad.runs.line import clean, number
from fedglad.runs.reader import (
    BULK,
    CHANGED,
    Lines,
    Run,
    RunError,
    objects,
    run_folders,
    skipped_of,
)
from fedglad.runs.scores import Number, score_of
from fedglad.runs.summary import best_round, disagreement, figures
from fedglad.runs.twins import KINDS, kind_of, made_of

OF_AVERAGE = " · averaged"
HEADS = ("n", "mean", "std", "final", "best", "difference")
"""Words at the head of a table's columns, beside the metric."""

BY_VALIDATION = {"test": "validation", "averaged": "averaged_validation"}
"""By which readout the best round of another is chosen, where there is a validation set."""


@dataclass(frozen=True)
class Entry:
    """A finished run: its settings with dotted keys, and its values of SEEDS.

    `curves` are its numbers by round, None without any rounds, and `score` is that of its task.
    `reached` says by readout when it reached the target, if one was asked for: None if it never
    did; a readout is not in it where that is not known. `best` has by readout the score in the best
    round, by what chooses that round (another readout, or itself), and `tests` is their number.
    `control` is the entry of control.json that makes it a control: its settings are those of its
    rule then, with CONTROL among them.
    """

    folder: Path
    settings: Settings
    seed: Seed
    summary: Mapping[str, Any]
    curves: Mapping[str, Series] | None
    control: Mapping[str, Any] | None = None
    score: Score = ACCURACY
    reached: Mapping[str, Reached | None] = field(default_factory=dict[str, Reached | None])
    best: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    tests: int | None = None

    @property
    def kind(self) -> str:
        """Of a control, which one it is; else empty."""
        return kind_of(self.control) if self.control else ""

    @property
    def chosen_on(self) -> list[Seed]:
        """The seeds by whose results its constant was chosen."""
        seeds = (self.control or {}).get("on", [])
        return [tuple(seed.get(key) for key in SEEDS) for seed in seeds]

    def value(self, metric: str) -> float:
        """One number of the summary."""
        value = number(self.summary.get(metric))
        if value is None:
            numbers = [name for name, one in self.summary.items() if number(one) is not None]
            raise CompareError(
                f"{self.folder}/summary.json has no number {metric!r}: choose from "
                f"{', '.join(numbers)}"
            )
        return value

    def has(self, metric: str) -> bool:
        """Whether the summary has it."""
        return number(self.summary.get(metric)) is not None


Cell = Mapping[Seed, Entry]
"""The runs of a group by their seeds."""


@dataclass(frozen=True)
class Difference:
    """A group minus the baseline, seed by seed; the interval is Student's, 95 %, from n = 3 on."""

    seeds: list[dict[str, Any]]
    values: list[float]
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ToTarget:
    """How a group's runs came to a score.

    `reached` of the `known` runs did; `rounds` and `bytes` are the means over these, None if there
    is none, and `bytes` also where those of a run are not known. `by_run` has the rounds of every
    run in the group's order, None for one that never did or of which it is not known.
    """

    reached: int
    known: int
    rounds: float | None
    bytes: float | None
    by_run: list[int | None]


@dataclass(frozen=True)
class Best:
    """The score in each run's best round, and on which data that round was chosen.

    `by` is one of `fedglad.records.READOUTS`: where it is the readout of the score itself, the best
    of many numbers is taken for the result, which flatters.
    """

    mean: float
    values: list[float]
    by: str


@dataclass(frozen=True)
class OfClients:
    """The scores of single clients when they were tested last, each the mean over the runs.

    `personal` says that they were tested with models of their own, and not with the server's.
    """

    score: Score
    mean: float
    worst_decile: float
    std: float
    personal: bool = False


@dataclass(frozen=True)
class Group:
    """Repetitions of one configuration; `config` has all keys in which the groups differ.

    Controls have their kind in `control`, the label of their rule, if they have but one, in
    `control_of`, and their constants in `factors`. A rule has its difference to each in
    `over_controls`, by their labels, and that to its mean factor in `over_control`. Runs that kept
    an average of their models have a second group for it, with the label of the first in
    `averaged_of`; its difference to the newest models of the same runs is in `over_newest`.
    `to_target` is there if a target was asked for, and `clients` if every run tested its clients.
    `block` is the label of the block that it is in, empty if there is but one.
    """

    label: str
    config: dict[str, Any]
    runs: list[str]
    seeds: list[dict[str, Any]]
    values: list[float]
    mean: float
    std: float | None
    final_mean: float | None
    difference: Difference | None = None
    control_of: str | None = None
    factors: list[float] | None = None
    over_control: Difference | None = None
    stability: Stability | None = None
    curves: dict[str, Curve] | None = None
    averaged_of: str | None = None
    over_newest: Difference | None = None
    control: str | None = None
    over_controls: dict[str, Difference] | None = None
    to_target: ToTarget | None = None
    clients: OfClients | None = None
    best: Best | None = None
    block: str = ""


@dataclass(frozen=True)
class Comparison:
    """The groups, the baseline first, and what a reader has to know beside the numbers.

    `score` says of which metric the number `metric` of summary.json is, and whether more of it is
    better; `tested` is the metric that curves, stability and the target are of, and `final` names
    the number that `final_mean` is of. `tests` is of how many tests the least and the most mean
    over the last ten is, where that is known.

    Runs on several data sets, models or ways of sampling are in `blocks`, {label: settings}: the
    groups come block by block, with the label of a method, and the baseline is in each.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> run = execute(*load("digits", {"rounds": 1}), out=pathlib.Path(tempfile.mkdtemp()))
    >>> compare([run.folder]).groups[0].seeds
    [{'seed': 1, 'data.seed': 0}]
    """

    metric: str
    baseline: str
    groups: list[Group]
    notes: list[str]
    score: Score = ACCURACY
    tested: Score | None = ACCURACY
    final: str = "final_accuracy"
    target: float | None = None
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    tests: tuple[int, int] | None = None
    alias: dict[str, str] = field(default_factory=dict[str, str])

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group: its settings, and its numbers as they are, a share from 0 to 1.

        `block` and `label` come first, then the keys in which blocks and groups differ; `low` and
        `high` are the ends of the difference's interval, and `best_by` says what chose the round.
        """
        return [self._row(group) for group in self.groups]

    def _row(self, group: Group) -> dict[str, Any]:
        numbers = {
            "n": len(group.values),
            "metric": self.metric,
            "mean": group.mean,
            "std": group.std,
            "final": group.final_mean,
            "best": group.best.mean if group.best else None,
            "best_by": group.best.by if group.best else None,
        }
        if self.target is not None:
            its = group.to_target
            numbers |= {
                "rounds_to_target": its.rounds if its else None,
                "bytes_to_target": its.bytes if its else None,
                "reached": its.reached if its else None,
            }
        difference = group.difference
        low, high = (difference and difference.interval) or (None, None)
        return {
            **({"block": group.block} if self.blocks else {}),
            "label": group.label,
            **self.blocks.get(group.block, {}),
            **group.config,
            **numbers,
            "difference": difference.mean if difference else None,
            "low": low,
            "high": high,
        }

    def frame(self) -> Any:
        """The rows as a data frame of pandas, which has to be installed for it."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            raise CompareError("a data frame needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.rows())


def compare(
    paths: Sequence[str | Path],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    target: float | str | None = None,
    where: Mapping[str, Any] | None = None,
    by: Sequence[str] | None = None,
    alias: Mapping[str, str] | None = None,
    averaged: bool = True,
) -> Comparison:
    """Compares finished runs, given as run folders or as folders of run folders.

    The metric is a number of summary.json, by default the mean of the task's score over the last
    ten tests. With a `target`, a score in its own unit (of a share also "80%"), groups say how many
    rounds and bytes their runs took to it. `where` takes only the runs whose settings have these
    values, one for a key or a list, and `alias` gives labels, or words in them, other names.

    Runs that differ in what is in [data], [task], [model] or [sampler] are in different blocks, if
    at least two methods are in two blocks or more each: every block has its baseline. `by` names
    the keys or sections that make blocks instead; none of them: all runs are in one.

    Groups come in the order in which they are met, each followed by the average of its models, if
    its runs kept one, unless `averaged` is false. The baseline is the one whose label is, or has as
    a part, `baseline`; by default the first with adapter.name=none, else the first.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("none", "glad"):
    ...     run = execute(*load("digits", {"rounds": 1, "adapter.name": name}), out=folder / name)
    >>> [group.label for group in compare([folder]).groups if not group.averaged_of]
    ['adapter.name=none', 'adapter.name=glad']
    """
    try:
        folders = run_folders(map(Path, paths), files=("config.toml",))
        entries, notes = _read(folders, metric, target, where or {})
    except (RunError, OSError) as error:
        raise CompareError(str(error)) from None
    chosen = _chosen_number(entries, metric)
    if target is not None and chosen.tested is None:
        raise CompareError("the runs have different scores: a target needs one that all have")
    grouping = group([(entry.settings, entry.seed) for entry in entries])
    keys = [by] if isinstance(by, str) else by
    made = blocks_of(grouping, by=keys, baseline=baseline, alias=alias)
    for first, again in grouping.twice:
        notes.append(
            f"{entries[again].folder} is left out: the same configuration as "
            f"{entries[first].folder}"
        )
    notes += made.notes
    parts = [{seed: entries[k] for seed, k in part.items()} for part in grouping.parts]
    settings = [next(iter(part.values())).settings for part in parts]
    groups: list[Group] = []
    names: list[str] = []
    for block in made.blocks:
        labels, base = block.labels, block.base
        whose = f"{block.label}: " if block.label else ""
        lengths: dict[Any, None] = {}
        for k in block.order:
            names.append(f"{whose}{labels[k]}")
            reason = "" if base is None else grouping.unpaired(k, base)
            if reason and base is not None:
                notes.append(f"{names[-1]} is not paired with {labels[base]}: {reason}")
            cell, of_base = parts[k], {} if base is None or reason else parts[base]
            paired = {} if k == base else of_base
            one = _group(labels[k], block.configs[k], cell, paired, chosen)
            one = replace(one, block=block.label)
            mean = _averaged(one, cell, of_base, chosen) if averaged else None
            twins = _twins(grouping, labels, parts, k)
            # Of some controls only one row is shown.
            rows = KINDS[one.control].rows if one.control and mean and k != base else (False, True)
            for row, of_average in ((one, False), (mean, True)):
                if row and of_average in rows:
                    row = _over_controls(row, cell, twins, chosen, averaged=of_average)
                    groups.append(row)
            notes += _chosen(names[-1], cell)
            if k == base or paired:
                lengths |= {settings[k].get("rounds"): None}
        if len(lengths) > 1:
            first, *others = map(str, lengths)
            notes.append(
                f"{whose}the baseline has {first} rounds, what is compared with it "
                f"{', '.join(others)}"
            )
    order = sorted(zip((k for block in made.blocks for k in block.order), names, strict=True))
    short = list(map(shortened, settings))
    if short[0] and len(set(short)) == 1:
        notes.append(f"all runs are shortened: {short[0]}")
    else:
        notes += [f"{name} is shortened: {short[k]}" for k, name in order if short[k]]
    if alias:
        check_aliases(alias, [*made.plain, chosen.name, *HEADS])
    several = {block.label: block.settings for block in made.blocks} if made.several else {}
    tests = [entry.tests for entry in entries if entry.tests and chosen.name.startswith("last10_")]
    return Comparison(
        chosen.name,
        made.baseline,
        groups,
        notes,
        score=chosen.score,
        tested=chosen.tested,
        final=chosen.final,
        target=None if target is None or not chosen.tested else target_of(target, chosen.tested),
        blocks=several,
        tests=(min(tests), max(tests)) if tests else None,
        alias=dict(alias or {}),
    )


@dataclass(frozen=True)
class _Chosen:
    """The number of summary.json that runs are compared by, and those that go with it.

    `averaged` is the same of the average of their models, `final` that of the last test; both are
    empty where there is none. `tested` is the metric whose curves are shown, None if runs have
    different ones. `best_by` has for each readout what chooses its best round in all runs.
    """

    name: str
    score: Score
    tested: Score | None
    averaged: str
    final: str
    best_by: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def readout(self) -> str:
        """One of READOUTS, on which runs are looked at for a target."""
        found = Number.named(self.name)
        return found.readout if found else "test"

    @property
    def of_average(self) -> "_Chosen":
        """What a row for the averages has in their place."""
        final = Number.named(self.final)
        theirs = final.averaged if final else None
        return replace(self, name=self.averaged, final=theirs.name if theirs else self.final)


def _chosen_number(entries: Sequence[Entry], metric: str | None) -> _Chosen:
    """What is asked for; else what the runs' one score says."""
    chosen = _named_number(entries, metric)
    best_by: dict[str, str] = {}
    for readout in {readout for entry in entries for readout in entry.best}:
        found = [entry.best[readout] for entry in entries if readout in entry.best]
        held_out = BY_VALIDATION.get(readout, "")
        best_by[readout] = held_out if all(held_out in one for one in found) else readout
    return replace(chosen, best_by=best_by)


def _named_number(entries: Sequence[Entry], metric: str | None) -> _Chosen:
    scores: dict[Score, Path] = {}
    for entry in entries:
        scores.setdefault(entry.score, entry.folder)
    if metric is None and len(scores) > 1:
        (one, there), (other, elsewhere), *_ = scores.items()
        raise CompareError(
            f"the runs have different scores, {one.words} ({there}) and {other.words} "
            f"({elsewhere}): compare those of one task, or choose a --metric that all have"
        )
    score = entries[0].score
    metric = metric or Number("last10", "test", score.name).name
    if number := Number.named(metric):
        score, averaged = score.of(number.metric), number.averaged
        final = replace(number, when="final").name
        return _Chosen(metric, score, score, averaged.name if averaged else "", final)
    tested = score if len(scores) == 1 else None
    final = Number("final", "test", tested.name).name if tested else ""
    return _Chosen(metric, score.of(metric), tested, "", final)


def _read(
    folders: Iterable[Path],
    metric: str | None,
    target: float | str | None,
    where: Mapping[str, Any],
) -> tuple[list[Entry], list[str]]:
    """The finished runs that are asked for, and a note for each that is not finished."""
    entries, notes, tried = list[Entry](), list[str](), 0
    wanted = _Where(where)
    for run in map(Run, folders):
        config, summary = run.config, run.summary
        if config is None:
            raise CompareError(f"{run.folder}/config.toml cannot be read: it leads nowhere")
        if where and not wanted.takes(settings_of(config, summary)):
            continue
        if summary is None:
            rounds = f"{run.count()} of {config.get('rounds', '?')} rounds"
            notes.append(f"{run.folder} is left out: unfinished, {rounds}")
            continue
        # Clients say how much was sent until the target was reached.
        lines = run.lines(without=BULK if target is None else ("tensors", "groups"))
        records = objects(lines.records)
        summary, doubts = _believed(run, config, summary, lines)
        notes += [f"{run.folder}: {doubt}" for doubt in doubts]
        curves, score = None, score_of(records, summary)
        best, tests = dict[str, dict[str, float]](), None
        if records and not lines.damage:  # whole records of many runs would fill the memory
            curves = _curves(records, score, metric)
            best, tests = _best_rounds(records, score, metric)
        reached = dict[str, Reached | None]()
        if target is not None:
            reached, doubt = _reached(lines, summary, score, metric, target)
            notes += [f"{run.folder}: {doubt}"] if doubt else []
        controls = run.controls(config)
        itself = not controls or any(one.get("asked") for one in controls)
        shown = [one for one in controls if kind_of(one) != "trial"]
        for control in [*([None] if itself else []), *shown]:
            settings = settings_of(config, summary, control)
            seed = pop_seed(settings)
            known = (summary, curves, control, score, reached, best, tests)
            entries.append(Entry(run.folder, settings, seed, *known))
        if not itself and not shown:
            tried += 1
            continue
        if skipped := skipped_of(summary, records):
            notes.append(f"{run.folder}: {skipped}")
    if tried:
        notes.append(f"{tried} of the runs are left out: constants that were tried, not chosen")
    wanted.check()
    if not entries:
        wish = f" with {label_of(where)}" if where else ""
        raise CompareError("; ".join([f"there is no finished run to compare{wish}", *notes]))
    return entries, notes


class _Where:
    """Takes runs whose settings have certain values; and knows which keys and values there are."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self.wanted = {
            key: list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]
            for key, value in wanted.items()
        }
        self.seen: dict[str, dict[str, None]] = {}

    def takes(self, settings: Settings) -> bool:
        """Whether a run is among those that are asked for."""
        for key, value in settings.items():
            self.seen.setdefault(key, {})[shown(value)] = None
        return all(
            key in settings and any(_alike(settings[key], value) for value in values)
            for key, values in self.wanted.items()
        )

    def check(self) -> None:
        """Raises CompareError for a key or a value that no run has."""
        for key, values in self.wanted.items():
            if key not in self.seen:
                close = nearest(key, self.seen)
                raise CompareError(f"where {key!r}: no run has that key{close}")
            for value in values:
                if not any(_alike(parse_value(one), value) or one == shown(value)
                           for one in self.seen[key]):  # fmt: skip
                    raise CompareError(
                        f"where {label_of({key: value})}: no run has that value, they have "
                        f"{', '.join(self.seen[key])}"
                    )


def _alike(mine: Any, theirs: Any) -> bool:
    """Whether a setting has a value, as it is or as it is written."""
    return mine == theirs or shown(mine) == shown(theirs)


def _best_rounds(
    records: Sequence[Mapping[str, Any]], score: Score, metric: str | None
) -> tuple[dict[str, dict[str, float]], int]:
    """The score in the best round, by readout and by what chooses the round; how many tests."""
    asked = Number.named(metric or "") or Number("last10", "test", score.name)
    score = score.of(asked.metric)
    best: dict[str, dict[str, float]] = {}
    for one in filter(None, (asked, asked.averaged)):
        for by in filter(None, (one.readout, BY_VALIDATION.get(one.readout))):
            place = best_round(records, replace(one, readout=by).field, score)
            value = None if place is None else number(records[place].get(one.field))
            if value is not None:
                best.setdefault(one.readout, {})[by] = value
    return best, sum(number(record.get(asked.field)) is not None for record in records)


def _curves(
    records: Sequence[Mapping[str, Any]], score: Score, metric: str | None
) -> dict[str, Series]:
    """The metric that is compared, else the score, of the model and of the average; and GSI."""
    number = Number.named(metric or "") or Number("last10", "test", score.name)
    fields = {"score": f"test_{number.metric}", "averaged": f"averaged_{number.metric}"}
    return {name: series(records, key) for name, key in {**fields, "gsi": "gsi_all"}.items()}


def _reached(
    lines: Lines, summary: Mapping[str, Any], score: Score, metric: str | None, target: float | str
) -> tuple[dict[str, Reached | None], str]:
    """When a run's models first had the target, by readout; and why that is not known."""
    asked = Number.named(metric or "") or Number("last10", "test", score.name)
    score = score.of(asked.metric)
    try:
        goal = target_of(target, score)
    except ValueError as error:
        raise CompareError(str(error)) from None
    cleaned = map(clean, objects(lines.records))
    records = [found[0] if found else dict[str, Any]() for found in cleaned]
    whole = bool(records) and not lines.damage and len(records) == summary.get("rounds")
    reached: dict[str, Reached | None] = {}
    for one in filter(None, (asked, asked.averaged)):
        when = rounds_to(
            records, score, goal, which=one.readout, update_bytes=_update_bytes(summary)
        )
        if when or (whole and any(record.get(one.field) is not None for record in records)):
            reached[one.readout] = when
    known = asked.readout in reached
    return reached, "" if known else "its rounds do not say whether it reached the target"


def _update_bytes(summary: Mapping[str, Any]) -> dict[str, int] | None:
    """What a client receives and sends in a round; None in an older summary."""
    given = summary.get("update_bytes")
    named = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    down, up = (number(named.get(name), 0.0) for name in ("down", "up"))
    return None if down is None or up is None else {"down": int(down), "up": int(up)}


def _believed(
    run: Run, config: Mapping[str, Any], summary: dict[str, Any], lines: Lines
) -> tuple[dict[str, Any], list[str]]:
    """The summary, by the rounds where all of them are there; and what is not as it was written."""
    doubts, records = [CHANGED] if run.config_changed else [], objects(lines.records)
    rounds = summary.get("rounds") if "stopped" in summary else config.get("rounds")
    if lines.damage:
        doubts.append(f"{lines.damage}; what follows is not read, and the summary counts")
    elif len(records) == rounds and (wrong := disagreement(summary, records)):
        doubts.append(f"{wrong}: the rounds count")
        summary = {**summary, **figures(records)}
    elif len(records) != rounds and (run.folder / "checkpoints").is_dir():
        # Somebody may have kept no more than the results of a run: those have no checkpoints.
        doubts.append(f"rounds.jsonl has {len(records)} of {rounds} rounds, and the summary counts")
    return summary, doubts


def _group(name: str, config: dict[str, Any], cell: Cell, base: Cell, chosen: _Chosen) -> Group:
    controls = [entry.control for entry in cell.values() if entry.control]
    factors = [entry["factor"] for entry in controls if "factor" in entry]
    kind = next(iter(cell.values())).kind
    if kind:
        kept = {k: v for k, v in config.items() if not k.startswith("adapter.") and k != CONTROL}
        config = {**made_of(controls[0]), **kept}
        if kind == "mean":  # which each seed has of its own
            del config["adapter.value"]
    return Group(
        label=name,
        config=config,
        runs=[str(entry.folder) for entry in cell.values()],
        seeds=list(map(named_seed, cell)),
        control_of=name.removeprefix("control of ") if kind == "mean" else None,
        factors=factors or None,
        control=kind or None,
        **_numbers(cell, base, chosen, chosen, {"score": "", "gsi": "gsi"}),
        to_target=_to_target(cell, chosen.readout),
        clients=_of_clients(cell, ""),
        best=_best(cell, chosen.readout, chosen),
    )


def _averaged(newest: Group, cell: Cell, base: Cell, chosen: _Chosen) -> Group | None:
    """The row below a group: the average of its runs' models, if every run tested one."""
    theirs = chosen.of_average
    if not all(entry.has(theirs.name) for entry in cell.values()):
        return None
    return replace(
        newest,
        label=f"{newest.label}{OF_AVERAGE}",
        averaged_of=newest.label,
        over_newest=_difference(cell, cell, chosen.name, theirs.name),
        **_numbers(cell, base, chosen, theirs, {"averaged": ""}),
        to_target=_to_target(cell, theirs.readout),
        clients=_of_clients(cell, "averaged_"),
        best=_best(cell, theirs.readout, chosen),
    )


def _to_target(cell: Cell, readout: str) -> ToTarget | None:
    """None if no target was asked for, or nothing is known of any run."""
    known = [entry.reached.get(readout) for entry in cell.values()]
    count = sum(readout in entry.reached for entry in cell.values())
    if not count:
        return None
    reached = [one for one in known if one]
    sizes = [one.bytes for one in reached if one.bytes is not None]
    return ToTarget(
        reached=len(reached),
        known=count,
        rounds=fmean(one.round for one in reached) if reached else None,
        bytes=fmean(sizes) if sizes and len(sizes) == len(reached) else None,
        by_run=[one.round if one else None for one in known],
    )


def _best(cell: Cell, readout: str, chosen: _Chosen) -> Best | None:
    """None unless every run has it."""
    by = chosen.best_by.get(readout, "")
    values = [one.best[readout][by] for one in cell.values() if by in one.best.get(readout, {})]
    return Best(fmean(values), values, by) if by and len(values) == len(cell) else None


def _of_clients(cell: Cell, which: str) -> OfClients | None:
    """None unless every run has them, and of one score."""
    scores = {entry.score for entry in cell.values()}
    names = {name: f"last_{which}client_{name}" for name in ("mean", "worst_decile", "std")}
    there = all(entry.has(key) for entry in cell.values() for key in names.values())
    if not there or len(scores) > 1:
        return None
    over = {name: fmean(e.value(key) for e in cell.values()) for name, key in names.items()}
    personal = all("last_client_model" in entry.summary for entry in cell.values())
    return OfClients(scores.pop(), **over, personal=personal)


def _numbers(
    cell: Cell, base: Cell, chosen: _Chosen, theirs: _Chosen, named: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of a row that are numbers: `theirs` of its runs, minus those chosen of the base.

    `named` has the curves of a run that the row has, its score first, which is called as it is.
    """
    values = [entry.value(theirs.name) for entry in cell.values()]
    final = [entry.value(theirs.final) for entry in cell.values() if entry.has(theirs.final)]
    curves = [entry.curves for entry in cell.values() if entry.curves is not None]
    numbers: dict[str, Any] = {
        "values": values,
        "mean": fmean(values),
        "std": spread(values),
        "final_mean": fmean(final) if len(final) == len(cell) else None,
        "difference": _difference(cell, base, chosen.name, theirs.name) if base else None,
    }
    if len(curves) == len(cell) and (tested := chosen.tested):  # else a run has no rounds
        scores = [[*one[next(iter(named))].values()] for one in curves]
        numbers["stability"] = stability(scores, higher=tested.higher)
        numbers["curves"] = {
            name or tested.name: curve(one[key] for one in curves) for key, name in named.items()
        }
    return numbers


def _twins(
    grouping: Grouping, labels: Mapping[int, str], parts: Sequence[Cell], k: int
) -> dict[str, Cell]:
    """The controls of a group's rule that met the same data and cohorts, by their labels."""
    firsts = [next(iter(part.values())) for part in parts]
    rule = firsts[k].settings
    paired = [j for j, one in enumerate(firsts) if one.kind and not grouping.unpaired(k, j)]
    there = [j for j in paired if is_control_of(firsts[j].settings, firsts[j].kind, rule)]
    there.sort(key=lambda j: [*KINDS].index(firsts[j].kind))
    return {labels[j]: parts[j] for j in there if j in labels}


def _over_controls(
    row: Group, cell: Cell, twins: Mapping[str, Cell], chosen: _Chosen, *, averaged: bool
) -> Group:
    """The row of a rule with its differences to its controls, newest to newest model."""
    which = chosen.averaged if averaged else chosen.name
    over: dict[str, Difference] = {}
    mean: Difference | None = None
    for label, twin in twins.items():
        kind = next(iter(twin.values())).kind
        if averaged in KINDS[kind].rows and all(entry.has(which) for entry in twin.values()):
            name = f"{label}{OF_AVERAGE}" if averaged else label
            over[name] = _difference(cell, twin, which)
            mean = over[name] if kind == "mean" else mean
    return replace(row, over_control=mean, over_controls=over) if over else row


def _chosen(label: str, cell: Cell) -> list[str]:
    """How the constant of these controls was chosen, if it was."""
    first = next(iter(cell.values()))
    if not first.chosen_on or not first.control:
        return []
    among, by = first.control.get("among"), first.control.get("by")
    tried = [x for x in among if number(x) is not None] if isinstance(among, list) else []
    best = f" of {', '.join(f'{x:g}' for x in tried)}" if tried else ""
    seeds = {label_of(named_seed(seed)): None for one in cell.values() for seed in one.chosen_on}
    left = _left_out(cell)
    so = "its differences leave that seed out" if {*cell} - left else "no other seed is there"
    edge = ""
    if len(tried) > 1 and first.control["factor"] in (tried[0], tried[-1]):
        edge = "; it is at the end of these: --factors takes others"
    what = "the validation data" if "validation" in str(by) else "the test data"
    return [f"{label}: the best{best} by {by}, on {what}, of {', '.join(seeds)}; {so}{edge}"]


def _left_out(*cells: Cell) -> set[Seed]:
    """Seeds whose results chose a constant: there it has an advantage that it has nowhere else."""
    return {seed for cell in cells for entry in cell.values() for seed in entry.chosen_on}


def _difference(cell: Cell, base: Cell, metric: str, theirs: str = "") -> Difference:
    """Between the same number of both, unless `theirs` is another one of the first.

    Seeds on which a constant was chosen do not count, unless there are no others.
    """
    common = [seed for seed in cell if seed in base]
    common = [seed for seed in common if seed not in _left_out(cell, base)] or common
    values = [cell[seed].value(theirs or metric) - base[seed].value(metric) for seed in common]
    return Difference(list(map(named_seed, common)), values, fmean(values), interval(values))
