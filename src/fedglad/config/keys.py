"""Settings of runs side by side: dotted keys, in which they differ, labels, what can be paired."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedglad.config.schema import ConfigError, find

SEEDS = ("seed", "data.seed")
"""What repetitions differ in; all other keys tell groups apart, but those of exact engines."""

KEYS = 4  # in a label, if so many tell the groups apart
CONTROL = "control"  # among settings: they are those of the rule that the run is a control of

Seed = tuple[Any, ...]
T = TypeVar("T")


class CompareError(ValueError):
    """Runs that cannot be compared; the message says which and why."""


def label(settings: Mapping[str, Any]) -> str:
    """Settings in one line, as the command line takes them.

    >>> label({"adapter.name": "glad", "adapter.gamma": 0.02})
    'adapter.name=glad adapter.gamma=0.02'
    """
    return " ".join(f"{key}={shown(value)}" for key, value in settings.items())


def no_folder(path: Path) -> str:
    """What is wrong with a path that should be a run's folder and is none."""
    if path.is_file():
        return f"{path} is a file: give the folder of a run, or of runs"
    return f"there is no folder {path}"


def shown(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """All engines that give the same bits stand as one, under the name of the default."""
    given = config.get("engine", {})
    try:
        exact = getattr(find("engine", str(given.get("name", "local"))), "exact", True)
    except ConfigError:  # somebody's own, and not here
        exact = False
    return {"name": "local"} if exact else given


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys; a table inside a section stays a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def repetitions(
    runs: Iterable[tuple[str, Seed, T]],
) -> tuple[list[dict[Seed, T]], list[tuple[T, T]]]:
    """Runs of the same key together, by seed; and those met before, each after the first of them.

    >>> repetitions([("a", (2,), "x"), ("a", (1,), "y"), ("b", (1,), "z"), ("a", (2,), "u")])
    ([{(1,): 'y', (2,): 'x'}, {(1,): 'z'}], [('x', 'u')])
    """
    groups: dict[str, dict[Seed, T]] = {}
    twice: list[tuple[T, T]] = []
    for key, seed, run in runs:
        first = groups.setdefault(key, {}).setdefault(seed, run)
        if first is not run:
            twice.append((first, run))
    return [dict(sorted(group.items(), key=_order)) for group in groups.values()], twice


def _order(repetition: tuple[Seed, Any]) -> list[Any]:
    return [(type(value).__name__, value) for value in repetition[0]]


def differing(all_settings: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each, the keys in which it differs; in a section, from those with the same name.

    What another class has for its fields says nothing: its name stands for them.
    """
    found: list[dict[str, Any]] = []
    named = ["adapter.name"] if any(CONTROL in settings for settings in all_settings) else []
    for settings in all_settings:
        told: dict[str, Any] = {}
        for key in sorted(settings, key=lambda key: (key[-5:] != ".name", key.partition(".")[0])):
            name = f"{key.partition('.')[0]}.name"
            alike = [s for s in all_settings if key == name or s.get(name) == settings.get(name)]
            if key in named or any(s.get(key) != settings[key] for s in alike):
                told[key] = settings[key]
        found.append(told)
    return found


def labels_of(configs: list[dict[str, Any]]) -> list[str]:
    """Each with its first KEYS keys, or as many as it takes to tell it from the others."""

    def text(told: dict[str, Any], keys: int) -> str:
        config = {key: value for key, value in told.items() if key != CONTROL}
        shown = label(dict(list(config.items())[:keys]))
        shown = f"control of {shown}" if CONTROL in told else shown
        return f"{shown} +{len(config) - keys} more" if len(config) > keys else shown

    def shortest(k: int) -> str:
        others = configs[:k] + configs[k + 1 :]
        keys = KEYS
        while keys < len(configs[k]) and any(
            text(other, keys) == text(configs[k], keys) for other in others
        ):
            keys += 1
        return text(configs[k], keys)

    return [shortest(k) or "all runs" for k in range(len(configs))]


def usual_baseline(groups: Sequence[Mapping[str, Any] | None]) -> int:
    """The first without an adapter, else the first whose settings are known."""
    plain = [k for k, own in enumerate(groups) if own and own.get("adapter.name") == "none"]
    known = [k for k, own in enumerate(groups) if own is not None]
    return next(iter(plain or known), 0)


def place(labels: list[str], configs: list[dict[str, Any]], text: str) -> int:
    exact = [k for k, found in enumerate(labels) if found == text]
    matching = exact or [k for k, config in enumerate(configs) if text == label(config)]
    own = [k for k, config in enumerate(configs) if CONTROL not in config]
    matching = matching or [k for k in own if text in label(configs[k])]
    matching = matching or [k for k, found in enumerate(labels) if text in found]
    if len(matching) != 1:
        many = "matches no group" if not matching else "matches several groups"
        raise CompareError(f"baseline {text!r} {many}: choose from {'; '.join(labels)}")
    return matching[0]


def unpaired(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    seeds: Collection[Seed],
    others: Collection[Seed],
) -> str:
    """Why a difference by seed would mean nothing; empty if it means something."""
    if first["format"] != second["format"]:
        return "versions of fedglad made them whose random draws differ"
    for section, what in {"data": "data", "sampler": "cohorts"}.items():
        own = [{k: v for k, v in s.items() if k.startswith(f"{section}.")} for s in (first, second)]
        if own[0] != own[1]:
            return f"the {what} differ"
    return "" if set(seeds) & set(others) else "they have no seed in common"
