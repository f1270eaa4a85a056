"""Runs side by side: mean and spread over the seeds, and paired differences to a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedglad.analysis.curves import Curve, Series, curve, series
from fedglad.analysis.grouping import (
    CONTROL,
    CompareError,
    Seed,
    Settings,
    group,
    named_seed,
    pop_seed,
    settings_of,
)
from fedglad.analysis.statistics import Stability, interval, spread, stability
from fedglad.config.presets import shortened
from fedglad.runs.line import number
from fedglad.runs.reader import CHANGED, Lines, Run, RunError, objects, run_folders, skipped_of
from fedglad.runs.summary import disagreement, figures

METRIC, FINAL = "last10_accuracy", "final_accuracy"
AVERAGED = {METRIC: "last10_averaged_accuracy", FINAL: "final_averaged_accuracy"}
"""What summary.json calls the same number of the average of a run's models."""
CURVES = {"accuracy": "test_accuracy", "gsi": "gsi_all", "averaged": "averaged_accuracy"}


@dataclass(frozen=True)
class Entry:
    """A finished run: its settings with dotted keys, and its values of SEEDS.

    `curves` are its numbers by round, None without any rounds. A control has its own constant
    `factor` and the settings of its rule, with CONTROL among them.
    """

    folder: Path
    settings: Settings
    seed: Seed
    summary: Mapping[str, Any]
    curves: Mapping[str, Series] | None
    factor: float | None = None

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


@dataclass(frozen=True)
class Difference:
    """A group minus the baseline, seed by seed; the interval is Student's, 95 %, from n = 3 on."""

    seeds: list[dict[str, Any]]
    values: list[float]
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Group:
    """Repetitions of one configuration; `config` has all keys in which the groups differ.

    Controls have the label of their rule in `control_of` and their constants in `factors`; the rule
    has its difference to them in `over_control`. Runs that kept an average of their models have a
    second group for it, with the label of the first in `averaged_of`; its difference to the newest
    models of the same runs is in `over_newest`.
    """

    label: str
    config: dict[str, Any]
    runs: list[str]
    seeds: list[dict[str, Any]]
    values: list[float]
    mean: float
    std: float | None
    final_mean: float
    difference: Difference | None = None
    control_of: str | None = None
    factors: list[float] | None = None
    over_control: Difference | None = None
    stability: Stability | None = None
    curves: dict[str, Curve] | None = None
    averaged_of: str | None = None
    over_newest: Difference | None = None


@dataclass(frozen=True)
class Comparison:
    """The groups, the baseline first, and what a reader has to know beside the numbers.

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

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return asdict(self)


def compare(
    paths: Sequence[str | Path], *, metric: str = METRIC, baseline: str | None = None
) -> Comparison:
    """Compares finished runs, given as run folders or as folders of run folders.

    Groups come in the order in which they are met, each followed by the average of its models, if
    its runs kept one. The baseline is the one whose label is, or has as a part, `baseline`; by
    default the first with adapter.name=none, else the first.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("none", "glad"):
    ...     run = execute(*load("digits", {"rounds": 1, "adapter.name": name}), out=folder / name)
    >>> [group.label for group in compare([folder]).groups]
    ['adapter.name=none', 'adapter.name=glad']
    """
    try:
        entries, notes = _read(run_folders(map(Path, paths), files=("config.toml",)))
    except (RunError, OSError) as error:
        raise CompareError(str(error)) from None
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
        one = _group(labels[k], grouping.configs[k], parts[k], paired, metric)
        wanted = {**settings[k], CONTROL: True}  # the settings of its control
        if CONTROL not in settings[k] and wanted in settings:
            control = settings.index(wanted)
            if not grouping.unpaired(k, control):
                one = replace(one, over_control=_difference(parts[k], parts[control], metric))
        groups.append(one)
        if averaged := _averaged(one, parts[k], parts[base] if paired or k == base else {}, metric):
            groups.append(averaged)
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
    return Comparison(metric, labels[base], groups, notes)


def _read(folders: Iterable[Path]) -> tuple[list[Entry], list[str]]:
    """The finished runs, and a note for each of the others."""
    entries, notes = list[Entry](), list[str]()
    for run in map(Run, folders):
        config, summary = run.config, run.summary
        if config is None:
            raise CompareError(f"{run.folder}/config.toml cannot be read: it leads nowhere")
        if summary is None:
            rounds = f"{len(run.rounds())} of {config.get('rounds', '?')} rounds"
            notes.append(f"{run.folder} is left out: unfinished, {rounds}")
            continue
        lines, adapter = run.lines(), config.get("adapter", {})
        records = objects(lines.records)
        summary, doubts = _believed(run, config, summary, lines, records)
        notes += [f"{run.folder}: {doubt}" for doubt in doubts]
        curves = None
        if records and not lines.damage:  # whole records of many runs would fill the memory
            curves = {name: series(records, key) for name, key in CURVES.items()}
        controls = [(rule, adapter["value"]) for rule in run.rules(adapter)]
        for rule, factor in controls or [(None, None)]:
            settings = settings_of(config, summary, rule)
            seed = pop_seed(settings)
            entries.append(Entry(run.folder, settings, seed, summary, curves, factor))
        if skipped := skipped_of(summary, records):
            notes.append(f"{run.folder}: {skipped}")
    if not entries:
        raise CompareError("; ".join(["there is no finished run to compare", *notes]))
    return entries, notes


def _believed(
    run: Run,
    config: Mapping[str, Any],
    summary: dict[str, Any],
    lines: Lines,
    records: list[dict[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """The summary, by the rounds where all of them are there; and what is not as it was written."""
    doubts = [CHANGED] if run.config_changed else []
    if lines.damage:
        doubts.append(f"{lines.damage}; what follows is not read, and the summary counts")
    elif len(records) == config.get("rounds") and (wrong := disagreement(summary, records)):
        doubts.append(f"{wrong}: the rounds count")
        summary = {**summary, **figures(records)}
    elif len(records) != config.get("rounds") and (run.folder / "checkpoints").is_dir():
        # Somebody may have kept no more than the results of a run: those have no checkpoints.
        rounds = f"{len(records)} of {config.get('rounds')} rounds"
        doubts.append(f"rounds.jsonl has {rounds}, and the summary counts")
    return summary, doubts


def _group(
    name: str,
    config: dict[str, Any],
    cell: Mapping[Seed, Entry],
    base: Mapping[Seed, Entry],
    metric: str,
) -> Group:
    values = [entry.value(metric) for entry in cell.values()]
    final = AVERAGED[FINAL] if metric in AVERAGED.values() else FINAL
    curves = _curves(cell)
    factors = [entry.factor for entry in cell.values() if entry.factor is not None]
    if CONTROL in config:
        kept = {k: v for k, v in config.items() if not k.startswith("adapter.") and k != CONTROL}
        config = {"adapter.name": "fixed", **kept}
    return Group(
        label=name,
        config=config,
        runs=[str(entry.folder) for entry in cell.values()],
        seeds=list(map(named_seed, cell)),
        values=values,
        mean=fmean(values),
        std=spread(values),
        final_mean=fmean(entry.value(final) for entry in cell.values()),
        difference=_difference(cell, base, metric) if base else None,
        control_of=name.removeprefix("control of ") if factors else None,
        factors=factors or None,
        stability=stability([[*one["accuracy"].values()] for one in curves]) if curves else None,
        curves=(
            {name: curve(one[name] for one in curves) for name in ("accuracy", "gsi")}
            if curves
            else None
        ),
    )


def _averaged(
    newest: Group, cell: Mapping[Seed, Entry], base: Mapping[Seed, Entry], metric: str
) -> Group | None:
    """The row below a group: the average of its runs' models, if every run tested one."""
    theirs = AVERAGED.get(metric, "")
    if not all(entry.has(theirs) for entry in cell.values()):
        return None
    values, curves = [entry.value(theirs) for entry in cell.values()], _curves(cell)
    return replace(
        newest,
        label=f"{newest.label} · averaged",
        values=values,
        mean=fmean(values),
        std=spread(values),
        final_mean=fmean(entry.value(AVERAGED[FINAL]) for entry in cell.values()),
        difference=_difference(cell, base, metric, theirs) if base else None,
        control_of=None,
        factors=None,
        over_control=None,
        stability=stability([[*one["averaged"].values()] for one in curves]) if curves else None,
        curves={"accuracy": curve(one["averaged"] for one in curves)} if curves else None,
        averaged_of=newest.label,
        over_newest=_difference(cell, cell, metric, theirs),
    )


def _curves(cell: Mapping[Seed, Entry]) -> list[Mapping[str, Series]]:
    """Of every run; none if one has no rounds."""
    curves = [entry.curves for entry in cell.values() if entry.curves is not None]
    return curves if len(curves) == len(cell) else []


def _difference(
    cell: Mapping[Seed, Entry], base: Mapping[Seed, Entry], metric: str, theirs: str = ""
) -> Difference:
    """Between the same number of both, unless `theirs` is another one of the first."""
    common = [seed for seed in cell if seed in base]
    values = [cell[seed].value(theirs or metric) - base[seed].value(metric) for seed in common]
    return Difference(list(map(named_seed, common)), values, fmean(values), interval(values))
