"""Replay: the factors that another rule would have given to the rounds of a recorded run.

Statistics are recorded per tensor, and an adapter looks at nothing else, so nothing is trained. The
answer is "which factors for these same rounds", not "where would training have gone": with other
factors the model would have moved elsewhere, and later updates would have been others.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from fedglad.adapters import REGISTRY, Adapter, Groups
from fedglad.analysis.recording import (
    GroupValues,
    Line,
    Recording,
    ReplayError,
    of_rounds,
    read,
    section,
)
from fedglad.config.schema import REGISTRIES, Config, ConfigError, find
from fedglad.core.given import KEY as FROM_PYTHON
from fedglad.core.user_code import is_own
from fedglad.records import Round


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The factors of a round: the least, the mean over the groups, the largest."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, scales: Collection[float]) -> "Spread":
        return cls(least=min(scales), mean=fmean(scales), most=max(scales))


@dataclass(frozen=True, kw_only=True)
class ReplayedRound:
    """A round that stepped, how another rule would have scaled it, and how far that is off."""

    round: int  # counted from 0, as in rounds.jsonl
    groups: GroupValues  # as replayed, in the form of rounds.jsonl
    same: bool  # as recorded, to the bit
    replayed: Spread
    recorded: Spread
    low: tuple[str, ...]  # the groups whose factor is the lower bound
    high: tuple[str, ...]  # or the upper one
    difference: float | None  # replayed − recorded where it is largest
    where: str | None  # the group or tensor that this is


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rounds: of their mean factors the mean, the deviation, and how many are below or above 1.

    `low` and `high` are the shares of all factors that are the lower or the upper bound, None where
    the rule is not known.
    """

    mean: float
    deviation: float
    least: float
    most: float
    slowed: int
    sped: int
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a rule would have done to the factors of recorded rounds.

    >>> from fedglad import Glad, simulate
    >>> replayed = replay(simulate("digits", {"rounds": 2, "client.epochs": 1}), Glad())
    >>> replayed.exact, len(replayed.rounds)  # Glad is the run's own rule
    (True, 2)
    """

    adapter: Adapter
    rounds: tuple[ReplayedRound, ...]
    replayed: Summary
    recorded: Summary
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether gsi, baseline and scale of every group in every round are the recorded ones."""
        return all(one.same for one in self.rounds)

    @property
    def largest(self) -> ReplayedRound | None:
        """The round with the largest difference; None if there is none, or none is known."""
        different = [one for one in self.rounds if one.difference]
        return max(different, key=lambda one: abs(one.difference or 0), default=None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        tree = asdict(replace(self, adapter=Adapter()))  # a user's rule may hold anything
        return {**tree, "adapter": settings(self.adapter), "exact": self.exact}


def replay(
    run: Recording | str | PathLike[str] | Iterable[Round | Mapping[str, Any]],
    adapter: Adapter,
    *,
    population: int | None = None,
) -> Replayed:
    """The factors that the adapter would have given to the recorded rounds.

    `run` is a run's folder, or its rounds: those that `simulate` yields, or lines of rounds.jsonl.
    The adapter starts anew and counts the rounds that stepped, as the server does. `population` is
    the number of clients there are, which Pooled asks for, where the run does not tell it.

    >>> from fedglad import simulate
    >>> from fedglad.adapters import Fixed
    >>> rounds = simulate("digits", {"rounds": 2, "client.epochs": 1})
    >>> replay(rounds, Fixed(value=0.5)).replayed.mean
    0.5
    """
    if isinstance(run, str | PathLike):
        run = read(run, population=population)
    elif not isinstance(run, Recording):
        run = of_rounds(run, population=population)
    _require_replayable(run, adapter)
    notes = list(run.notes)
    if adapter.needs_population and run.population_may_grow:
        notes.append(
            f"{type(adapter).__name__} reckons with {run.lines[0].stats.N} clients in every round: "
            "some may have come later"
        )
    groups = run.group(adapter)
    before = _places(groups, run)
    if before is None:
        notes.append("which tensors the recorded groups have is not known: no differences")

    state, t = adapter.start(groups), 0
    rounds: list[ReplayedRound] = []
    for line in run.lines:
        try:
            factors, following = adapter.adapt(line.stats, groups, state, t)
        except Exception as error:  # of somebody's own rule
            raise ReplayError(f"{adapter} failed in round {line.round + 1}: {error}") from error
        if not np.isfinite(factors.scale).all():  # the server skips such a round
            notes.append(f"round {line.round + 1} would have been skipped: a factor is not finite")
            continue
        values = (part.tolist() for part in (factors.gsi, factors.baseline, factors.scale))
        given: GroupValues = {
            label: {"gsi": gsi, "baseline": baseline or None, "scale": scale}
            for label, gsi, baseline, scale in zip(groups.labels, *values, strict=True)
        }
        rounds.append(_round(line, given, adapter.bounds(t), groups, before))
        state, t = following, t + 1
    if not rounds:
        raise ReplayError(f"{adapter} gave no finite factor in any round")
    return Replayed(
        adapter=adapter,
        rounds=tuple(rounds),
        replayed=_summary([_scales(one.groups) for one in rounds], adapter),
        recorded=_summary(
            [_scales(line.groups) for line in run.lines], own_rule(run.config, [adapter])
        ),
        notes=tuple(notes),
    )


def own_rule(config: Mapping[str, Any] | None, loaded: Iterable[Adapter] = ()) -> Adapter | None:
    """The rule that a run had; None if its configuration is not there, or its class.

    Somebody's own class is not loaded for it, unless it is that of one of these.
    """
    try:
        return rule(config, {}, trusted=[settings(adapter)["name"] for adapter in loaded])
    except ConfigError:
        return None


def rule(
    config: Mapping[str, Any] | None, overrides: Mapping[str, Any], *, trusted: Collection[str] = ()
) -> Adapter:
    """The rule of a run with dotted keys, all of them adapter.*, set on top.

    Somebody's own class is loaded if the overrides, and not only the run, name it, or `trusted`.
    """
    given = section(config or {}, "adapter")
    name = given.get("name", "glad")
    for key in sorted(overrides, key=lambda key: key != "adapter.name"):
        start, _, rest = key.partition(".")
        if start != "adapter" or not rest:
            raise ConfigError(_why_not(key))
        if rest == "name" and overrides[key] != name:
            given = {}  # another class: the old one's fields mean nothing to it
        given[rest] = overrides[key]
    if config is None and "name" not in given:
        raise ConfigError("without config.toml the run's rule is not known: --set adapter.name=...")
    chosen = str(given.get("name", name))
    if FROM_PYTHON in given:
        raise ConfigError(
            "the run's rule was an object that was given from Python, which no file holds: name "
            "one, --set adapter.name=..."
        )
    if is_own(chosen) and chosen not in (overrides.get("adapter.name"), *trusted):
        raise ConfigError(
            f"the run's rule is somebody's own code, adapter.name = {chosen!r}, and reading a run "
            f"loads none. If you trust it, name it: --set adapter.name={chosen}"
        )
    if not issubclass(find("adapter", chosen), Adapter):
        raise ConfigError(f"adapter.name = {chosen!r} is not a fedglad.adapters.Adapter")
    try:
        return Config.of({"adapter": given}).sections["adapter"]
    except ConfigError as error:
        known = "adapter.name" in overrides or not overrides
        raise ConfigError(f"{error}{'' if known else f'  (adapter.name={name})'}") from None


def _why_not(key: str) -> str:
    """Why a key cannot be set in a replay."""
    start = key.partition(".")[0]
    known = {f.name for cls in REGISTRY.values() for f in fields(cls)} | {"name"}
    if start == "adapter":
        return f"{key!r} is a section: set its keys, such as adapter.name=glad"
    if key in known:
        return f"unknown key {key!r}: did you mean 'adapter.{key}'?"
    if start in REGISTRIES or start in {f.name for f in fields(Config)}:
        return (
            f"{key!r} cannot be replayed, only keys of [adapter] can: with another {start} the "
            "recorded updates would have been others. Run it: fedglad run"
        )
    return f"unknown key {key!r}: only keys of [adapter] can be replayed, such as adapter.gamma"


def _require_replayable(run: Recording, adapter: Adapter) -> None:
    """Raises for a rule that looks at more than the record has."""
    name = type(adapter).__name__
    if why := adapter.beyond_records:
        able = [rule for rule, cls in REGISTRY.items() if not cls().beyond_records]
        raise ReplayError(
            f"{name} cannot be replayed: it {why}. These can: {', '.join(able)} "
            "(--set adapter.name=...)"
        )
    if adapter.needs_population and any(line.stats.N is None for line in run.lines):
        raise ReplayError(
            f"{name} asks for the number of clients there are, which this run does not tell: "
            "--population N, or population=N from Python"
        )


def settings(adapter: Adapter) -> dict[str, Any]:
    """Its name and fields as JSON types."""

    def plain(value: Any) -> Any:
        if callable(value):
            return f"{value.__module__}:{value.__qualname__}"
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    names = {cls: name for name, cls in REGISTRY.items()}
    name = names.get(type(adapter), plain(type(adapter)))
    return {"name": name} | {f.name: plain(getattr(adapter, f.name)) for f in fields(adapter)}


# ------------------------------------------------------------------------------------- one round


def _round(
    line: Line,
    given: GroupValues,
    bound: tuple[float, float],
    groups: Groups,
    before: list[str] | None,
) -> ReplayedRound:
    """How a round's factors differ; `bound` are the bounds, `before` each tensor's old group."""
    scales, recorded = _scales(given), _scales(line.groups)
    difference = where = None
    if before is not None:
        now = [groups.labels[place] for place in groups.index]
        apart = [scales[a] - recorded[b] for a, b in zip(now, before, strict=True)]
        most = max(range(len(apart)), key=lambda k: abs(apart[k]))
        difference = apart[most]
        where = now[most] if now == before else list(line.stats.sum_sq)[most]
    return ReplayedRound(
        round=line.round,
        groups=given,
        same=given == line.groups,
        replayed=Spread.of(scales.values()),
        recorded=Spread.of(recorded.values()),
        low=tuple(label for label, s in scales.items() if s <= bound[0]),
        high=tuple(label for label, s in scales.items() if s >= bound[1]),
        difference=difference,
        where=where if difference else None,
    )


def _scales(groups: GroupValues) -> dict[str, float]:
    return {label: group["scale"] or 0.0 for label, group in groups.items()}


def _summary(rounds: Sequence[Mapping[str, float]], adapter: Adapter | None) -> Summary:
    """Of every round's factors; the adapter is the one that gave them, if it is known."""
    scales = [(one.values(), adapter and adapter.bounds(t)) for t, one in enumerate(rounds)]
    means = [fmean(values) for values, _ in scales]
    every = [(x, bounds) for values, bounds in scales for x in values]
    return Summary(
        mean=fmean(means),
        deviation=pstdev(means),
        least=min(x for x, _ in every),
        most=max(x for x, _ in every),
        slowed=sum(mean < 1 for mean in means),
        sped=sum(mean > 1 for mean in means),
        low=sum(x <= b[0] for x, b in every if b) / len(every) if adapter else None,
        high=sum(x >= b[1] for x, b in every if b) / len(every) if adapter else None,
    )


def _places(groups: Groups, run: Recording) -> list[str] | None:
    """Each tensor's recorded group: by the same grouping, or by its name; None if not known."""
    labels = tuple(run.lines[0].groups)
    if labels == groups.labels:
        return [labels[place] for place in groups.index]
    layers = run.group(Adapter(groups="layer"))
    places = [
        next((label for label in (name, layers.labels[place], "all") if label in labels), "")
        for name, place in zip(run.tensors, layers.index, strict=True)
    ]
    return places if set(places) == set(labels) else None
