"""Blocks of groups that share data, task, model and cohorts; the same methods are in each.

A block's settings are what its groups share and other blocks have otherwise; a method is what
groups of one block differ in. Only within a block are groups compared with the baseline.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedglad.analysis.grouping import (
    CONTROL,
    CompareError,
    Grouping,
    Settings,
    differing,
    in_order,
    labels_of,
    place,
    usual_baseline,
)
from fedglad.config.keys import SEEDS, label
from fedglad.runs.twins import KINDS

SECTIONS = ("data", "task", "model", "sampler")
"""What makes blocks, unless keys are named: with other data or cohorts nothing is paired."""

NOT_KNOWN = "settings not known"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Groups that are compared with each other, by their places in a `Grouping`.

    `label` and `settings` say what the block has otherwise than the others: both are empty where
    there is but one. `base` is the group of the baseline, None if the block has none of it.
    """

    label: str
    settings: dict[str, Any]
    order: list[int]  # the baseline first
    base: int | None
    labels: dict[int, str]  # each group's method
    configs: dict[int, dict[str, Any]]  # the same by keys


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All of them, the label of the baseline, and what is to be known; `plain` has all labels
    before they got other names."""

    blocks: list[Block]
    baseline: str
    notes: list[str]
    plain: list[str]

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self.blocks) > 1


def blocks_of(
    made: Grouping,
    *,
    by: Sequence[str] | None = None,
    baseline: str | None = None,
    alias: Mapping[str, str] | None = None,
) -> Blocks:
    """Puts groups into blocks by sections or keys, by default by SECTIONS.

    By default there is one block for all, unless two methods or more are in two blocks or more
    each: only then is there something to be read across. `by` empty: one block. `baseline` names
    a method as `group` has it, and `alias` new names for labels or parts of them.
    """
    rename = renaming(alias or {})
    if by:
        _check(by, made.settings)
    found = None if by is not None and not by else _several(made, by, baseline, rename)
    if found:
        return found
    base = _place(made.labels, made.configs, baseline, rename) if baseline else made.base
    labels = dict(enumerate(_renamed(made.labels, rename)))
    order = sorted(labels, key=lambda k: k != base)
    configs = dict(enumerate(made.configs))
    block = Block(label="", settings={}, order=order, base=base, labels=labels, configs=configs)
    return Blocks(blocks=[block], baseline=labels[base], notes=[], plain=made.labels)


def _several(
    made: Grouping, by: Sequence[str] | None, baseline: str | None, rename: Callable[[str], str]
) -> Blocks | None:
    """None where one block is all that there is to be made."""
    settings = made.settings
    shared = [_shared(one, by or SECTIONS) if one else None for one in settings]
    parts: dict[str, list[int]] = {}
    for k, one in enumerate(shared):
        parts.setdefault(_same(one), []).append(k)
    if len(parts) < 2:
        return None
    members = list(parts.values())
    methods = _methods(settings, members)
    names = [made.labels[k] if settings[k] is None else _same(one) for k, one in enumerate(methods)]
    if by is None:
        count = Counter(name for part in members for name in {names[k] for k in part})
        if sum(blocks > 1 for blocks in count.values()) < 2:
            return None
    firsts = {name: names.index(name) for name in names}
    configs = [methods[k] for k in firsts.values()]
    plain = [
        made.labels[k] if settings[k] is None else text
        for k, text in zip(firsts.values(), labels_of(configs), strict=True)
    ]
    shown = dict(zip(firsts, _renamed(plain, rename), strict=True))
    order = [*firsts]
    usual = order.index(names[usual_baseline(settings)])
    base = order.pop(_place(plain, configs, baseline, rename) if baseline else usual)
    order.insert(0, base)
    heads = differing([shared[part[0]] for part in members])
    blocks: list[Block] = []
    for part, title, head in zip(members, labels_of(heads), heads, strict=True):
        part = sorted(part, key=lambda k: order.index(names[k]))
        block = Block(
            label=NOT_KNOWN if settings[part[0]] is None else rename(title),
            settings=head,
            order=part,
            base=part[0] if names[part[0]] == base else None,
            labels={k: shown[names[k]] for k in part},
            configs={k: methods[k] for k in part},
        )
        blocks.append(block)
    notes = [
        f"{block.label} has no run of the baseline {shown[base]}: no differences"
        for block in blocks
        if block.base is None
    ]
    keys = {key for one in (*shared, *methods) for key in one or {}}
    notes += _tied(settings, blocks, keys)
    plain += labels_of(heads)
    return Blocks(blocks=blocks, baseline=shown[base], notes=notes, plain=plain)


def _same(settings: Settings | None) -> str:
    """The same text for the same settings."""
    return json.dumps(settings, sort_keys=True, default=str)


def _shared(settings: Settings, chosen: Collection[str]) -> dict[str, Any]:
    """Those of a group that make its block."""
    return {
        key: value
        for key, value in settings.items()
        if key in chosen or key.partition(".")[0] in chosen
    }


def _methods(
    settings: Sequence[Settings | None], members: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Of each group the keys in which the groups of some block differ.

    A constant that was tuned in each block is the same method in all of them.
    """
    within = [differing([settings[k] for k in part]) for part in members]
    keys = {key for configs in within for one in configs for key in one}
    named = [{key: s[key] for key in in_order(s) if key in keys} if s else {} for s in settings]
    alike = [{**one, CONTROL: _kind(one[CONTROL])} if CONTROL in one else one for one in named]
    if any(alike[j] == alike[k] for part in members for j in part for k in part if j < k):
        return named
    words: dict[str, set[Any]] = {}
    for one, whole in zip(alike, named, strict=True):
        words.setdefault(_same(one), set()).add(whole.get(CONTROL))
    pairs = zip(alike, named, strict=True)
    return [one if len(words[_same(one)]) > 1 else whole for one, whole in pairs]


def _kind(words: str) -> str:
    """What a control is called, without its constant."""
    kinds = (kind.words for kind in KINDS.values())
    return next((kind for kind in kinds if words == kind or words.startswith(f"{kind} ")), words)


def _tied(
    settings: Sequence[Settings | None], blocks: Sequence[Block], keys: Iterable[str]
) -> list[str]:
    """What else blocks have otherwise: a preset's rate for each α, or a number of rounds."""
    of_method: dict[str, list[Settings]] = {}
    for block in blocks:
        for k, name in block.labels.items():
            of_method.setdefault(name, []).append(settings[k] or {})
    differ = {key for alike in of_method.values() for one in differing(alike) for key in one}
    notes: list[str] = []
    for key in sorted(differ - {*keys, CONTROL}):
        values: dict[str, list[str]] = {}
        for block in blocks:
            there = [one[key] for k in block.order if key in (one := settings[k] or {})]
            text = "/".join(dict.fromkeys(label({key: value}) for value in there))
            values.setdefault(text, []).append(block.label)
        given = (f"{text} where {', '.join(where)}" for text, where in values.items() if text)
        notes.append(f"not the same in all blocks: {'; '.join(given)}")
    return notes


def _check(by: Sequence[str], settings: Sequence[Settings | None]) -> None:
    known = {key for one in settings for key in one or {}} - {"format", CONTROL}
    known |= {key.partition(".")[0] for key in known}
    for key in by:
        if key in SEEDS:
            raise CompareError(f"blocks by {key!r}: runs that differ in it are repetitions")
        if key not in known:
            raise CompareError(f"blocks by {key!r}: no run has that key{nearest(key, known)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """The most similar of some names as the end of a message; nothing if none is."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


# -------------------------------------------------------------------------------------- aliases


def renaming(alias: Mapping[str, str]) -> Callable[[str], str]:
    """Gives whole labels, or words and keys in them, other names, all in one pass.

    >>> renaming({"adapter.name=glad": "FedGLAD", "data.alpha": "α"})("adapter.name=glad")
    'FedGLAD'
    >>> renaming({"data.alpha": "α"})("data.alpha=0.1"), renaming({"a": "b"})("a.c=1 aa=2")
    ('α=0.1', 'a.c=1 aa=2')
    """
    if not alias:
        return str
    longest = sorted(alias, key=len, reverse=True)
    words = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, longest))})(?=[\s=]|$)")
    return lambda text: words.sub(lambda found: alias[found.group()], text)


def check_aliases(alias: Mapping[str, str], texts: Iterable[str]) -> None:
    """Raises CompareError for an alias that no text has."""
    texts = list(dict.fromkeys(texts))
    for old, new in alias.items():
        if not old.strip() or not new.strip():
            raise CompareError(f"the alias {old!r}, {new!r} has an empty name")
        if all(renaming({old: f"{new} "})(text) == text for text in texts):
            raise CompareError(
                f"the alias {old!r} is no part of a label{nearest(old, texts)}"
                f"  (there are {'; '.join(texts)})"
            )


def _renamed(labels: Sequence[str], rename: Callable[[str], str]) -> list[str]:
    shown = [rename(one) for one in labels]
    for name in shown:
        if shown.count(name) > 1:
            same = [old for old, new in zip(labels, shown, strict=True) if new == name]
            raise CompareError(f"aliases give several groups the name {name!r}: {'; '.join(same)}")
    return shown


def _place(
    labels: Sequence[str],
    configs: Sequence[Mapping[str, Any]],
    text: str,
    rename: Callable[[str], str],
) -> int:
    """The group that a baseline's text names, by its label, its keys or its alias."""
    shown = [rename(one) for one in labels]
    return shown.index(text) if text in shown else place(labels, configs, text)
