"""Which runs are repetitions of each other, their labels, the baseline, and what can be paired.

Repetitions differ in SEEDS; all other keys distinguish groups, but those of exact engines.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedglad.config.keys import SEEDS, flat, label
from fedglad.config.schema import FORMAT, KEEPING, ConfigError, find, younger
from fedglad.runs.twins import KINDS, kind_of, replaces, words_of

KEYS = 4  # in a label, if so many distinguish the groups
CONTROL = "control"  # among settings: what the run is a control of; they are those of its rule

Settings = Mapping[str, Any]
"""Dotted keys, as `settings_of` gives them."""

Seed = tuple[Any, ...]


class CompareError(ValueError):
    """Runs that cannot be compared; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Groups of runs, in the order in which they were met; a run is its place in what was given."""

    parts: list[dict[Seed, int]]  # each group's runs by their seeds
    settings: list[Settings | None]  # None where they are not known
    configs: list[dict[str, Any]]  # of these, the keys in which a group differs from the others
    labels: list[str]  # the same in a line
    base: int  # which group is the baseline
    twice: list[tuple[int, int]]  # runs that are left out, each after the one that it repeats

    @property
    def order(self) -> list[int]:
        """The groups, the baseline first."""
        return sorted(range(len(self.parts)), key=lambda k: k != self.base)

    def unpaired(self, k: int, base: int | None = None, *, same_length: bool = False) -> str:
        """Why a group's difference to another by seed would mean nothing; empty if not.

        The other is the baseline, unless one is given. With `same_length`, both must have been
        meant to have the same number of rounds.
        """
        base = self.base if base is None else base
        if k == base:
            return ""
        first, second = self.settings[base], self.settings[k]
        if first is None or second is None:
            return "settings are not known"
        if same_length and first.get("rounds") != second.get("rounds"):
            return f"{first.get('rounds')} and {second.get('rounds')} rounds"
        if first["format"] != second["format"]:
            return "versions of fedglad made them whose random draws differ"
        for section, what in {"data.": "data", "sampler.": "cohorts"}.items():
            keys = [key for key in {**first, **second} if key.startswith(section)]
            if any(first.get(key) != second.get(key) for key in keys):
                return f"the {what} differ"
        common = self.parts[base].keys() & self.parts[k].keys()
        return "" if common else "they have no seed in common"


def group(
    runs: Sequence[tuple[Settings | None, Seed]],
    baseline: str | None = None,
    *,
    alone: Callable[[Settings], str] | None = None,
    unknown: Callable[[int], str] = str,
    clean: Callable[[str], str] = str,
) -> Grouping:
    """Puts runs together that differ in SEEDS alone; one without settings is by itself.

    The baseline is the group whose label is, or has as a part, `baseline`; by default the usual
    one. `alone` labels the only group whose settings are known, `unknown` a run without any, and
    `clean` makes a label fit to be shown.

    >>> lr = [{"lr": 1}, {"lr": 2}]
    >>> made = group([(lr[0], (2,)), (lr[0], (1,)), (lr[1], (1,)), (lr[0], (2,))])
    >>> made.labels, made.parts, made.twice
    (['lr=1', 'lr=2'], [{(1,): 1, (2,): 0}, {(1,): 2}], [(0, 3)])
    """
    groups: dict[str, dict[Seed, int]] = {}
    twice: list[tuple[int, int]] = []
    for k, (config, seed) in enumerate(runs):
        same = f"#{k}" if config is None else json.dumps(config, sort_keys=True, default=str)
        first = groups.setdefault(same, {}).setdefault(seed, k)
        if first != k:
            twice.append((first, k))
    parts = [{seed: part[seed] for seed in sorted(part, key=_order)} for part in groups.values()]
    firsts = [next(iter(part.values())) for part in parts]
    settings = [runs[k][0] for k in firsts]
    configs = differing(settings)
    known = [config for config in settings if config is not None]
    only = alone(known[0]) if alone and len(known) == 1 else ""
    labels = [
        clean(unknown(k) if config is None else only or name)
        for k, config, name in zip(firsts, settings, labels_of(configs), strict=True)
    ]
    labels = _told_apart(labels)
    base = place(labels, configs, baseline) if baseline else usual_baseline(settings)
    return Grouping(
        parts=parts, settings=settings, configs=configs, labels=labels, base=base, twice=twice
    )


def _told_apart(labels: Sequence[str]) -> list[str]:
    """Labels that were cut to the same text get a number.

    >>> _told_apart(["a…", "b", "a…"])
    ['a… (1)', 'b', 'a… (2)']
    """
    seen = Counter[str]()
    made: list[str] = []
    for name in labels:
        seen[name] += 1
        made.append(f"{name} ({seen[name]})" if labels.count(name) > 1 else name)
    return made


def settings_of(
    config: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    control: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A run's config.toml with dotted keys, and the format of the fedglad that made it.

    All engines that give the same bits stand as one. `control` is an entry of control.json: what
    such a control has otherwise than its rule is left out, but for the rule's [adapter] section
    where the control is that of one rule.
    """
    versions = {"format": FORMAT} if summary is None else summary.get("versions")
    made = versions.get("format", 1) if isinstance(versions, Mapping) else 1
    tree = {key: v for key, v in {**younger(), **config}.items() if key not in KEEPING}
    if isinstance(data := config.get("data"), Mapping):
        tree["data"] = {"validation": 0.0, **data}
    if summary is not None and isinstance(code := summary.get("code"), Mapping):
        tree |= _with_code(tree, cast(Mapping[str, Any], code))
    tree |= {"engine": _engine(config.get("engine")), "format": made}
    if control is None:
        return flat(tree)
    kind = kind_of(control)
    shared = {key: v for key, v in flat(tree).items() if not replaces(kind, key)}
    rule = flat({"adapter": control["adapter"]}) if kind == "mean" else {}
    return {**shared, **rule, CONTROL: words_of(control)}


def _with_code(tree: Mapping[str, Any], code: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that name own code, with a key `code` of what it was: an edited method is
    another one."""
    sections = {key.partition(".")[0]: text for key, text in code.items()}
    return {
        name: {
            **cast(Mapping[str, Any], tree[name]),
            "code": "+".join(part[:8] for part in str(text).split("+")),
        }
        for name, text in sections.items()
        if isinstance(tree.get(name), Mapping)
    }


def is_control_of(control: Settings, kind: str, rule: Settings) -> bool:
    """Whether a group of controls, by its settings, is one of a rule's."""
    repaired = rule.get("estimator.name", "none") != "none"
    if CONTROL in rule or not (repaired or rule.get("adapter.name") not in (None, "none", "fixed")):
        return False
    common = {key: v for key, v in rule.items() if kind == "mean" or not replaces(kind, key)}
    return {key: v for key, v in control.items() if key != CONTROL} == common


def pop_seed(settings: dict[str, Any]) -> Seed:
    """The values of SEEDS, which no longer stand among the settings then."""
    return tuple(settings.pop(key, None) for key in SEEDS)


def _engine(raw: Any) -> dict[str, Any]:
    """An exact one under the name of the default; somebody's own class is not loaded for it."""
    given = dict(raw) if isinstance(raw, Mapping) else {}
    name = str(given.get("name", "local"))
    try:
        exact = ":" not in name and getattr(find("engine", name), "exact", True)
    except ConfigError:  # of another version
        exact = False
    return {"name": "local"} if exact else given


def _order(seed: Seed) -> list[tuple[str, Any]]:
    return [(type(value).__name__, value) for value in seed]


def differing(groups: Sequence[Settings | None]) -> list[dict[str, Any]]:
    """Of each, the keys in which it differs; in a section, from those with the same name.

    The fields of another class cannot be compared: its name stands for them.
    """
    known = [settings for settings in groups if settings is not None]
    named = ["adapter.name"] if any(CONTROL in settings for settings in known) else []
    result: list[dict[str, Any]] = []
    for settings in (one or {} for one in groups):
        kept: dict[str, Any] = {}
        for key in in_order(settings):
            name = f"{key.partition('.')[0]}.name"
            # A control lacks what it has otherwise than its rule: that distinguishes nobody else.
            having = [s for s in known if key in s or CONTROL not in s]
            alike = [s for s in having if key == name or s.get(name) == settings.get(name)]
            if key in named or any(s.get(key) != settings[key] for s in alike):
                kept[key] = settings[key]
        result.append(kept)
    return result


def in_order(settings: Settings) -> list[str]:
    """The keys as a label has them: the classes' names first, then section by section."""
    return sorted(settings, key=lambda key: (key[-5:] != ".name", key.partition(".")[0]))


def labels_of(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each with its first KEYS keys, or as many as distinguish it from the others."""

    def text(config: Mapping[str, Any], keys: int) -> str:
        plain = {key: value for key, value in config.items() if key != CONTROL}
        shown = label(dict(list(plain.items())[:keys]))
        if CONTROL in config:
            of = " of" if config[CONTROL] == KINDS["mean"].words else ""
            shown = f"{config[CONTROL]}{of} {shown}".rstrip()
        return f"{shown} +{len(plain) - keys} more" if len(plain) > keys else shown

    def shortest(config: Mapping[str, Any]) -> str:
        for keys in range(KEYS, len(config)):
            if [text(one, keys) for one in configs].count(text(config, keys)) == 1:
                return text(config, keys)
        return text(config, max(KEYS, len(config)))

    return [shortest(config) or "all runs" for config in configs]


def usual_baseline(groups: Sequence[Settings | None]) -> int:
    """The first without an adapter, else the first whose settings are known."""
    known = {k: settings for k, settings in enumerate(groups) if settings is not None}
    plain = [k for k, settings in known.items() if settings.get("adapter.name") == "none"]
    return next(iter(plain or known), 0)


def place(labels: Sequence[str], configs: Sequence[Mapping[str, Any]], text: str) -> int:
    """The one group that a text names."""
    exact = [k for k, one in enumerate(labels) if one == text]
    matching = exact or [k for k, config in enumerate(configs) if text == label(config)]
    rules = [k for k, config in enumerate(configs) if CONTROL not in config]
    matching = matching or [k for k in rules if text in label(configs[k])]
    matching = matching or [k for k, one in enumerate(labels) if text in one]
    if len(matching) != 1:
        many = "matches no group" if not matching else "matches several groups"
        raise CompareError(f"baseline {text!r} {many}: choose from {'; '.join(labels)}")
    return matching[0]


def named_seed(seed: Seed) -> dict[str, Any]:
    """{name: value} of SEEDS, as far as they are known."""
    named = zip(SEEDS, seed, strict=False)  # empty without settings
    return {key: value for key, value in named if value is not None}


def varying_seeds(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the seeds in which runs differ, at least the first."""
    varying = [name for name in SEEDS if len({json.dumps(seed.get(name)) for seed in seeds}) > 1]
    return varying or [SEEDS[0]]
