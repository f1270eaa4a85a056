"""Runs side by side: mean and spread over the seeds, and paired differences to a baseline."""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeGuard

from fedglad.analysis.curves import (
    METRICS,
    Curve,
    Line,
    Rounds,
    Stability,
    curve,
    plot,
    slim,
    stability,
    tested,
)
from fedglad.config.keys import (
    CONTROL,
    SEEDS,
    CompareError,
    Seed,
    differing,
    engine,
    flat,
    labels_of,
    no_folder,
    place,
    repetitions,
    unpaired,
    usual_baseline,
)
from fedglad.config.presets import shortened
from fedglad.runs.control import rules
from fedglad.runs.folder import Run, RunError

METRIC, FINAL = "last10_accuracy", "final_accuracy"


@dataclass(frozen=True)
class Entry:
    """A finished run: its settings with dotted keys, and its values of SEEDS.

    A control has its own constant `factor` and the settings of its rule, with CONTROL among them.
    """

    folder: Path
    settings: Mapping[str, Any]
    seed: Seed
    summary: Mapping[str, Any]
    rounds: Rounds
    factor: float | None = None

    @property
    def key(self) -> str:
        """The same for all repetitions."""
        return json.dumps(self.settings, sort_keys=True, default=str)

    def value(self, metric: str) -> float:
        """One number of the summary."""
        found = self.summary.get(metric)
        if not _is_number(found):
            numbers = [name for name, value in self.summary.items() if _is_number(value)]
            raise CompareError(
                f"{self.folder}/summary.json has no number {metric!r}: choose from "
                f"{', '.join(numbers)}"
            )
        return float(found)


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
    has its difference to them in `over_control`.
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


@dataclass(frozen=True)
class Comparison:
    """The groups, the baseline first, and what a reader has to know beside the numbers."""

    metric: str
    baseline: str
    groups: list[Group]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return asdict(self)

    def plot(self, path: Path) -> None:
        """Accuracy and GSI over the rounds, by group."""
        lines = [Line(group.label, **group.curves) for group in self.groups if group.curves]
        if not lines:
            raise CompareError("there are no rounds to plot: the runs have only a summary")
        try:
            plot(lines, path)
        except ValueError as error:
            raise CompareError(str(error)) from None


def compare(
    paths: Sequence[str | Path], *, metric: str = METRIC, baseline: str | None = None
) -> Comparison:
    """Compares finished runs, given as run folders or as folders of run folders.

    Groups come in the order in which they are met. The baseline is the one whose label is, or has
    as a part, `baseline`; by default the first with adapter.name=none, else the first.
    """
    entries, notes = _read(
        list(dict.fromkeys(p for path in paths for p in run_folders(Path(path))))
    )
    parts, twice = repetitions((entry.key, entry.seed, entry) for entry in entries)
    for first, again in twice:
        notes.append(f"{again.folder} is left out: the same configuration as {first.folder}")
    settings = [next(iter(cell.values())).settings for cell in parts]
    configs = differing(settings)
    labels = labels_of(configs)
    base = place(labels, configs, baseline) if baseline else usual_baseline(settings)
    groups: list[Group] = []
    lengths: dict[Any, None] = {}
    for k in sorted(range(len(parts)), key=lambda k: k != base):
        reason = _unpaired(parts[base], parts[k])
        if reason:
            notes.append(f"{labels[k]} is not paired with {labels[base]}: {reason}")
        paired = {} if k == base or reason else parts[base]
        own = next((o for o, found in enumerate(settings) if _controls(found, settings[k])), None)
        group = _group(labels[k], configs[k], parts[k], paired, metric)
        if own is not None and not _unpaired(parts[own], parts[k]):
            group = replace(group, over_control=_difference(parts[k], parts[own], metric))
        groups.append(group)
        lengths |= {settings[k].get("rounds"): None} if k == base or paired else {}
    if len(lengths) > 1:
        own, *others = map(str, lengths)
        notes.append(f"the baseline has {own} rounds, what is compared with it {', '.join(others)}")
    short = [shortened(found) for found in settings]
    if short[0] and len(set(short)) == 1:
        notes.append(f"all runs are shortened: {short[0]}")
    else:
        notes += [f"{labels[k]} is shortened: {told}" for k, told in enumerate(short) if told]
    return Comparison(metric, labels[base], groups, notes)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """mean ± t·s/√n, where two values or fewer are too few to speak of one."""
    if len(values) < 3:
        return None
    half = students_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def students_t(df: int, level: float = 0.95) -> float:
    """The t with P(|T| ≤ t) = level for `df` degrees of freedom, by bisection.

    With θ = atan(t/√df), P is a finite sum of powers of cos θ (Abramowitz and Stegun 26.7.3-4).

    >>> round(students_t(2), 3)
    4.303
    """

    def within(theta: float) -> float:
        odd = df % 2
        term, total = (math.cos(theta) if odd else 1.0), 0.0
        for k in range(1 + odd, df, 2):
            total += term
            term *= math.cos(theta) ** 2 * k / (k + 1)
        total *= math.sin(theta)
        return 2 / math.pi * (theta + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < level else (low, middle)
    return math.sqrt(df) * math.tan(low)


def run_folders(path: Path) -> list[Path]:
    """A run's own folder, or the runs in a folder in the order in which they were started."""
    if not path.is_dir():
        raise CompareError(no_folder(path))
    if (path / "config.toml").is_file():
        return [path]
    found = [config.parent for config in path.glob("*/config.toml")]
    if not found:
        raise CompareError(f"{path} holds no run: there is no config.toml in it or one level below")
    return sorted(found, key=lambda run: ((run / "config.toml").stat().st_mtime_ns, run.name))


def _read(folders: Iterable[Path]) -> tuple[list[Entry], list[str]]:
    """The finished runs, and a note for each of the others."""
    entries, notes = list[Entry](), list[str]()
    for folder in {path.resolve(): path for path in folders}.values():
        config, summary = _config(folder), _summary(folder)
        if summary is None:
            rounds = f"{len(Run(folder).rounds())} of {config.get('rounds', '?')} rounds"
            notes.append(f"{folder} is left out: unfinished, {rounds}")
            continue
        config |= {"engine": engine(config), "format": _format(summary)}
        adapter, rounds = config.get("adapter", {}), slim(Run(folder).rounds())
        controlled = [
            (flat({**config, "adapter": rule, CONTROL: True}), adapter["value"])
            for rule in rules(folder, adapter)
        ]
        for settings, factor in controlled or [(flat(config), None)]:
            seed = tuple(settings.pop(key, None) for key in SEEDS)
            entries.append(Entry(folder, settings, seed, summary, rounds, factor))
        if skipped := Run(folder).skipped:
            notes.append(f"{folder}: {skipped}")
    if not entries:
        raise CompareError("; ".join(["there is no finished run to compare", *notes]))
    return entries, notes


def _config(folder: Path) -> dict[str, Any]:
    """As plain TOML: a complete file needs no class to be read."""
    try:
        return tomllib.loads((folder / "config.toml").read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CompareError(f"{folder}/config.toml cannot be read: {error}") from None


def _summary(folder: Path) -> dict[str, Any] | None:
    try:
        return Run(folder).summary
    except (RunError, OSError) as error:
        raise CompareError(str(error)) from None


def _format(summary: Mapping[str, Any]) -> int:
    return summary.get("versions", {}).get("format", 1)


def _unpaired(base: Mapping[Seed, Entry], other: Mapping[Seed, Entry]) -> str:
    first, second = (next(iter(cell.values())).settings for cell in (base, other))
    return unpaired(first, second, base.keys(), other.keys())


def _group(
    name: str,
    config: dict[str, Any],
    cell: Mapping[Seed, Entry],
    base: Mapping[Seed, Entry],
    metric: str,
) -> Group:
    values = [entry.value(metric) for entry in cell.values()]
    runs = [entry.rounds for entry in cell.values()]
    factors = [entry.factor for entry in cell.values() if entry.factor is not None]
    if CONTROL in config:
        kept = {k: v for k, v in config.items() if not k.startswith("adapter.") and k != CONTROL}
        config = {"adapter.name": "fixed", **kept}
    return Group(
        label=name,
        config=config,
        runs=[str(entry.folder) for entry in cell.values()],
        seeds=[_named(seed) for seed in cell],
        values=values,
        mean=fmean(values),
        std=stdev(values) if len(values) > 1 else None,
        final_mean=fmean(entry.value(FINAL) for entry in cell.values()),
        difference=_difference(cell, base, metric) if base else None,
        control_of=name.removeprefix("control of ") if factors else None,
        factors=factors or None,
        stability=stability([tested(rounds) for rounds in runs]),
        curves={k: curve(runs, key) for k, key in METRICS.items()} if all(runs) else None,
    )


def _controls(settings: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """Whether the first are those of a control of the second."""
    return CONTROL in settings and {**rule, CONTROL: True} == settings and CONTROL not in rule


def _difference(cell: Mapping[Seed, Entry], base: Mapping[Seed, Entry], metric: str) -> Difference:
    common = [seed for seed in cell if seed in base]
    values = [cell[seed].value(metric) - base[seed].value(metric) for seed in common]
    return Difference([_named(s) for s in common], values, fmean(values), interval(values))


def _named(seed: Seed) -> dict[str, Any]:
    named = zip(SEEDS, seed, strict=True)
    return {key: value for key, value in named if value is not None}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
