"""The kinds of controls: ordinary runs, each of which a rule has to beat to be worth anything.

A kind is a name and the overrides that make it. A run's control.json says of which kinds it is; an
entry without a kind is a `mean`, as the first edition wrote them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedglad.config.keys import flat

RULE = ("adapter", "estimator")
"""Sections that make a rule; a twin without one has the name `none` there."""

SCHEDULE = ("server.schedule", "server.over", "server.drop")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a control is called, and which sections or keys it has otherwise than its rule."""

    words: str
    replaces: tuple[str, ...]
    rows: tuple[bool, ...] = (False, True)
    """Which of its models are shown: the newest (False), the average of its models (True)."""
    by: tuple[str, ...] = ()
    """Of READOUTS, the first whose score a summary has chooses the constant."""


KINDS = {
    "mean": Kind(words="control", replaces=("adapter",)),
    "tuned": Kind(
        words="tuned constant",
        replaces=RULE,
        rows=(False,),
        by=("validation", "test"),
    ),
    "tuned-averaged": Kind(
        words="constant tuned for the average",
        replaces=RULE,
        rows=(True,),
        by=("averaged_validation", "averaged"),
    ),
    "linear": Kind(words="linear decay", replaces=(*RULE, *SCHEDULE)),
    "trial": Kind(words="trial constant", replaces=RULE),
}


def overridden(kind: str, tree: Mapping[str, Any], factor: float | None) -> dict[str, Any]:
    """A rule's configuration, as a tree, with the overrides that make a control of it.

    >>> rule = {"adapter": {"name": "glad"}, "server": {"name": "sgd", "lr": 0.5}}
    >>> overridden("mean", rule, 0.9)["adapter"]
    {'name': 'fixed', 'value': 0.9}
    >>> overridden("linear", rule, None)
    {'adapter': {'name': 'none'}, 'server': {'name': 'sgd', 'lr': 0.5, 'schedule': 'linear'}}
    """
    made = {**tree, **{s: {"name": "none"} for s in KINDS[kind].replaces if s in tree}}
    if kind == "linear":
        server = {k: v for k, v in tree["server"].items() if f"server.{k}" not in SCHEDULE}
        return {**made, "server": {**server, "schedule": "linear"}}
    return {**made, "adapter": {"name": "fixed", "value": factor}}


def is_entry(raw: Any) -> bool:
    """Whether an entry of control.json has what its kind needs."""
    if not isinstance(raw, dict):
        return False
    kind = kind_of(raw)
    if kind == "linear":
        return True
    if kind == "mean":
        return {"adapter", "factor"} <= {*raw}
    on = raw.get("on", [])
    seeds = isinstance(on, list) and all(isinstance(seed, dict) for seed in on)
    return kind in KINDS and isinstance(raw.get("factor"), int | float) and seeds


def kind_of(entry: Mapping[str, Any]) -> str:
    """The kind that an entry of control.json names; of the first edition, the only one."""
    kind = entry.get("kind", "mean")
    return kind if isinstance(kind, str) else ""


def fits(entry: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a run is what an entry in its folder says; one that was overwritten is not."""
    if kind_of(entry) == "mean" and not isinstance(entry["adapter"], dict):
        return False
    keys = flat({name: config.get(name) or {} for name in ("adapter", "server")})
    return made_of(entry).items() <= keys.items()


def words_of(entry: Mapping[str, Any]) -> str:
    """What its group is called; a constant that was chosen is named.

    >>> words_of({"kind": "tuned", "factor": 1.25}), words_of({"kind": "linear"})
    ('tuned constant 1.25', 'linear decay')
    """
    kind = kind_of(entry)
    chosen = "" if kind in ("mean", "linear") else f" {entry['factor']:g}"
    return f"{KINDS[kind].words}{chosen}"


def made_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that make a run the control that an entry describes.

    >>> made_of({"kind": "tuned", "factor": 1.25})
    {'adapter.name': 'fixed', 'adapter.value': 1.25}
    """
    if kind_of(entry) == "linear":
        return {"adapter.name": "none", "server.schedule": "linear"}
    return {"adapter.name": "fixed", "adapter.value": entry["factor"]}


def replaces(kind: str, key: str) -> bool:
    """Whether a control of this kind has a dotted key otherwise than its rule.

    >>> replaces("linear", "server.schedule"), replaces("tuned", "server.schedule")
    (True, False)
    """
    return bool({key, key.partition(".")[0]} & {*KINDS[kind].replaces})
