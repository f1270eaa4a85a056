"""Runs side by side: mean and spread over the seeds, and paired differences to a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

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
from fedglad.config.keys import SEEDS
from fedglad.config.keys import label as label_of
from fedglad.config.presets import shortened
from fedglad.records import ACCURACY, Score
from fedglad.runs.line import clean, number
from fedglad.runs.reader import CHANGED, Lines, Run, RunError, objects, run_folders, skipped_of
from fedglad.runs.scores import Number, score_of
from fedglad.runs.summary import disagreement, figures
from fedglad.runs.twins import KINDS, kind_of, made_of

OF_AVERAGE = " · averaged"


@dataclass(frozen=True)
class Entry:
    """A finished run: its settings with dotted keys, and its values of SEEDS.

    `curves` are its numbers by round, None without any rounds, and `score` is that of its task.
    `reached` says by readout when it reached the target, if one was asked for: None if it never
    did; a readout is not in it where that is not known.
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
class OfClients:
    """The scores of single clients when they were tested last, each the mean over the runs."""

    score: Score
    mean: float
    worst_decile: float
    std: float


@dataclass(frozen=True)
class Group:
    """Repetitions of one configuration; `config` has all keys in which the groups differ.

    Controls have their kind in `control`, the label of their rule, if they have but one, in
    `control_of`, and their constants in `factors`. A rule has its difference to each in
    `over_controls`, by their labels, and that to its mean factor in `over_control`. Runs that kept
    an average of their models have a second group for it, with the label of the first in
    `averaged_of`; its difference to the newest models of the same runs is in `over_newest`.
    `to_target` is there if a target was asked for, and `clients` if every run tested its clients.
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


@dataclass(frozen=True)
class Comparison:
    """The groups, the baseline first, and what a reader has to know beside the numbers.

    `score` says of which metric the number `metric` of summary.json is, and whether more of it is
    better; `tested` is the metric that curves, stability and the target are of, and `final` names
    the number that `final_mean` is of.

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

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return asdict(self)


def compare(
    paths: Sequence[str | Path],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    target: float | str | None = None,
) -> Comparison:
    """Compares finished runs, given as run folders or as folders of run folders.

    The metric is a number of summary.json, by default the mean of the task's score over the last
    ten tests. With a `target`, a score in its own unit (of a share also "80%"), groups say how many
    rounds and bytes their runs took to it.

    Groups come in the order in which they are met, each followed by the average of its models, if
    its runs kept one. The baseline is the one whose label is, or has as a part, `baseline`; by
    default the first with adapter.name=none, else the first.

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
        entries, notes = _read(folders, metric, target)
    except (RunError, OSError) as error:
        raise CompareError(str(error)) from None
    chosen = _chosen_number(entries, metric)
    if target is not None and chosen.tested is None:
        raise CompareError("the runs have different scores: a target needs one that all have")
    grouping = group([(entry.settings, entry.seed) for entry in entries], baseline)
    for first, again in grouping.twice:
        notes.append(
            f"{entries[again].folder} is left out: the same configuration as "
            f"{entries[first].folder}"
        )
    labels, base = grouping.labels, grouping.base
    parts = [{seed: entries[k] for seed, k in part.items()} for part in grouping.parts]
    settings = [next(iter(part.values())).settings for part in parts]
    groups: list[Group] = []
    lengths: dict[Any, None] = {}
    for k in grouping.order:
        reason = grouping.unpaired(k)
        if reason:
            notes.append(f"{labels[k]} is not paired with {labels[base]}: {reason}")
        paired = {} if k == base or reason else parts[base]
        one = _group(labels[k], grouping.configs[k], parts[k], paired, chosen)
        mean = _averaged(one, parts[k], parts[base] if paired or k == base else {}, chosen)
        twins = _twins(grouping, parts, k)
        # Of some controls only one row is shown.
        rows = KINDS[one.control].rows if one.control and mean and k != base else (False, True)
        for row, averaged in ((one, False), (mean, True)):
            if row and averaged in rows:
                groups.append(_over_controls(row, parts[k], twins, chosen, averaged=averaged))
        notes += _chosen(labels[k], parts[k])
        lengths |= {settings[k].get("rounds"): None} if k == base or paired else {}
    if len(lengths) > 1:
        of_base, *others = map(str, lengths)
        notes.append(
            f"the baseline has {of_base} rounds, what is compared with it {', '.join(others)}"
        )
    short = list(map(shortened, settings))
    if short[0] and len(set(short)) == 1:
        notes.append(f"all runs are shortened: {short[0]}")
    else:
        notes += [f"{labels[k]} is shortened: {fewer}" for k, fewer in enumerate(short) if fewer]
    return Comparison(
        chosen.name,
        labels[base],
        groups,
        notes,
        score=chosen.score,
        tested=chosen.tested,
        final=chosen.final,
        target=None if target is None or not chosen.tested else target_of(target, chosen.tested),
    )


@dataclass(frozen=True)
class _Chosen:
    """The number of summary.json that runs are compared by, and those that go with it.

    `averaged` is the same of the average of their models, `final` that of the last test; both are
    empty where there is none. `tested` is the metric whose curves are shown, None if runs have
    different ones.
    """

    name: str
    score: Score
    tested: Score | None
    averaged: str
    final: str

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
    folders: Iterable[Path], metric: str | None, target: float | str | None
) -> tuple[list[Entry], list[str]]:
    """The finished runs, and a note for each of the others."""
    entries, notes, tried = list[Entry](), list[str](), 0
    for run in map(Run, folders):
        config, summary = run.config, run.summary
        if config is None:
            raise CompareError(f"{run.folder}/config.toml cannot be read: it leads nowhere")
        if summary is None:
            rounds = f"{len(run.rounds())} of {config.get('rounds', '?')} rounds"
            notes.append(f"{run.folder} is left out: unfinished, {rounds}")
            continue
        lines = run.lines()
        records = objects(lines.records)
        summary, doubts = _believed(run, config, summary, lines)
        notes += [f"{run.folder}: {doubt}" for doubt in doubts]
        curves, score = None, score_of(records, summary)
        if records and not lines.damage:  # whole records of many runs would fill the memory
            curves = _curves(records, score, metric)
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
            known = (summary, curves, control, score, reached)
            entries.append(Entry(run.folder, settings, seed, *known))
        if not itself and not shown:
            tried += 1
            continue
        if skipped := skipped_of(summary, records):
            notes.append(f"{run.folder}: {skipped}")
    if tried:
        notes.append(f"{tried} of the runs are left out: constants that were tried, not chosen")
    if not entries:
        raise CompareError("; ".join(["there is no finished run to compare", *notes]))
    return entries, notes


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


def _of_clients(cell: Cell, which: str) -> OfClients | None:
    """None unless every run has them, and of one score."""
    scores = {entry.score for entry in cell.values()}
    names = {name: f"last_{which}client_{name}" for name in ("mean", "worst_decile", "std")}
    there = all(entry.has(key) for entry in cell.values() for key in names.values())
    if not there or len(scores) > 1:
        return None
    over = {name: fmean(e.value(key) for e in cell.values()) for name, key in names.items()}
    return OfClients(scores.pop(), **over)


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


def _twins(grouping: Grouping, parts: Sequence[Cell], k: int) -> dict[str, Cell]:
    """The controls of a group's rule that met the same data and cohorts, by their labels."""
    firsts = [next(iter(part.values())) for part in parts]
    rule = firsts[k].settings
    paired = [j for j, one in enumerate(firsts) if one.kind and not grouping.unpaired(k, j)]
    there = [j for j in paired if is_control_of(firsts[j].settings, firsts[j].kind, rule)]
    there.sort(key=lambda j: [*KINDS].index(firsts[j].kind))
    return {grouping.labels[j]: parts[j] for j in there}


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
