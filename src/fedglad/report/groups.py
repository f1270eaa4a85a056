"""Which runs are repetitions of each other, their names, and which are paired: as in `compare`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedglad.analysis.comparison import Entry
from fedglad.config.keys import (
    CONTROL,
    SEEDS,
    CompareError,
    Seed,
    differing,
    engine,
    flat,
    label,
    labels_of,
    place,
    repetitions,
    shown,
    unpaired,
    usual_baseline,
)
from fedglad.config.schema import FORMAT
from fedglad.report.folder import ReportError, Story
from fedglad.report.record import text
from fedglad.runs.control import rules


@dataclass(frozen=True, kw_only=True)
class Group:
    """Repetitions of one configuration: indices into the stories, by their seeds."""

    label: str
    members: dict[Seed, int]
    baseline: bool = False
    unpaired: str = ""  # why there is no difference to the baseline

    @property
    def runs(self) -> list[int]:
        return list(self.members.values())


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The groups, the baseline first, of `stories`; `seeds` names the repetition of each."""

    stories: list[Story]
    groups: list[Group]
    seeds: list[str]
    notes: list[str]


def group(stories: Sequence[Story], baseline: str | None = None) -> Grouping:
    """Puts runs together that differ in SEEDS alone; a run without settings is by itself.

    The baseline is found as by `compare`; one group alone has none.
    """
    entries = {k: _entry(story) for k, story in enumerate(stories) if story.config}
    keys = {k: (entry.key, entry.seed) for k, entry in entries.items()}
    runs = ((*keys.get(k, (f"#{k}", ())), k) for k in range(len(stories)))
    parts, twice = repetitions(runs)
    notes = [
        f"{stories[again].folder} is left out: the same configuration as {stories[first].folder}"
        for first, again in twice
    ]
    labels, configs = _named(parts, entries, stories)
    base = _base(parts, entries, labels, configs, baseline)
    kept = sorted(k for part in parts for k in part.values())
    number = {k: n for n, k in enumerate(kept)}
    groups: list[Group] = []
    for k in sorted(range(len(parts)), key=lambda k: k != base):
        reason = "" if k == base else _why_unpaired(parts[base], parts[k], entries)
        if reason:
            notes.append(f"{labels[k]} is not paired with {labels[base]}: {reason}")
        groups.append(
            Group(
                label=labels[k],
                members={seed: number[run] for seed, run in parts[k].items()},
                baseline=k == base and len(parts) > 1,
                unpaired=reason,
            )
        )
    names = _seed_names(entries)
    seeds = [_seed(entries.get(k), names) for k in kept]
    return Grouping(stories=[stories[k] for k in kept], groups=groups, seeds=seeds, notes=notes)


def in_words(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted keys and values as the command line takes them, of any TOML."""
    return {text(key): text(written(value)) for key, value in flat(config).items()}


def written(raw: Any) -> str:
    """A TOML value in words; it may be a date, which JSON has not.

    `?` for a number too long or a table too deep to be written.
    """
    try:
        return shown(json.loads(json.dumps(raw, default=str)))
    except (ValueError, RecursionError):
        return "?"


def _entry(story: Story) -> Entry:
    """As `compare` has it; the values as words, so that what looks the same is the same."""
    config = dict(story.config)
    given, adapter = (_section(config, name) for name in ("engine", "adapter"))
    name = str(given.get("name", "local"))
    # A report loads nobody's own class: a folder may come from anywhere.
    config["engine"] = given if ":" in name else engine({"engine": given})
    versions = (story.summary or {}).get("versions")
    made = cast(dict[str, Any], versions).get("format", 1) if isinstance(versions, dict) else FORMAT
    config["format"] = made
    if control := _rule(story, adapter):
        config |= {"adapter": control, CONTROL: True}
    own = flat(config)
    seed = tuple(_seed_value(own.pop(key, None)) for key in SEEDS)
    words = {_word(key): _word(value) for key, value in own.items()}
    return Entry(story.folder, words, seed, story.summary or {}, [])


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(cast(dict[str, Any], found)) if isinstance(found, dict) else {}


def _rule(story: Story, adapter: dict[str, Any]) -> dict[str, Any] | None:
    """The adapter that this run is the control of; the first of several."""
    try:
        found: list[Any] = list(rules(story.folder, adapter))
    except (RecursionError, TypeError):  # a damaged control.json
        return None
    return next((one for one in found if isinstance(one, dict)), None)


def _named(
    parts: list[dict[Seed, int]], entries: Mapping[int, Entry], stories: Sequence[Story]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Each group's label and the keys in which it differs."""
    first = [next(iter(part.values())) for part in parts]
    known = [k for k in first if k in entries]
    told = dict(zip(known, differing([entries[k].settings for k in known]), strict=True))
    short = dict(zip(known, labels_of(list(told.values())), strict=True))
    if len(known) == 1:  # nothing to tell it from
        (k,) = known
        own = entries[k].settings
        short[k] = label({key: own[key] for key in ("data.name", "adapter.name") if key in own})
    labels = [short.get(k) or f"{stories[k].name} (settings not known)" for k in first]
    return [text(found) for found in labels], [told.get(k, {}) for k in first]


def _base(
    parts: list[dict[Seed, int]],
    entries: Mapping[int, Entry],
    labels: list[str],
    configs: list[dict[str, Any]],
    baseline: str | None,
) -> int:
    if baseline:
        try:
            return place(labels, configs, baseline)
        except CompareError as error:
            raise ReportError(str(error)) from None
    first = [entries.get(next(iter(part.values()))) for part in parts]
    return usual_baseline([entry and entry.settings for entry in first])


def _why_unpaired(
    base: Mapping[Seed, int], other: Mapping[Seed, int], entries: Mapping[int, Entry]
) -> str:
    first, second = (entries.get(next(iter(cell.values()))) for cell in (base, other))
    if first is None or second is None:
        return "settings are not known"
    rounds = [entry.settings.get("rounds") for entry in (first, second)]
    if rounds[0] != rounds[1]:
        return f"{rounds[0]} and {rounds[1]} rounds"
    return unpaired(first.settings, second.settings, base, other)


def _seed_names(entries: Mapping[int, Entry]) -> list[str]:
    """`seed`, and `data.seed` where it tells runs apart."""
    varying = [
        name
        for k, name in enumerate(SEEDS)
        if len({json.dumps(entry.seed[k]) for entry in entries.values()}) > 1
    ]
    return varying or [SEEDS[0]]


def _seed(entry: Entry | None, names: list[str]) -> str:
    if entry is None:
        return ""
    values: dict[str, Any] = dict(zip(SEEDS, entry.seed, strict=True))
    return " ".join(f"{name}={values[name]}" for name in names if values[name] is not None)


def _seed_value(raw: Any) -> int | str | None:
    whole = isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < 2**64
    return raw if raw is None or whole else text(written(raw), 40)


def _word(raw: Any) -> str:
    """So that a label can be read in one way only."""
    if not isinstance(raw, str):
        return written(raw)
    return raw if re.fullmatch(r'[^\s="\[{][^\s="]*', raw) else json.dumps(raw)
