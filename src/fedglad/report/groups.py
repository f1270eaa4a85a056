"""The runs of a page in groups, as `compare` has them, from folders in any state."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedglad.analysis import grouping
from fedglad.analysis.blocks import Blocks, blocks_of
from fedglad.analysis.grouping import CompareError, Grouping, Seed, Settings, pop_seed, settings_of
from fedglad.config.keys import flat, label, shown
from fedglad.report import ReportError
from fedglad.runs.line import text
from fedglad.runs.reader import Run, RunView
from fedglad.runs.twins import kind_of


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The groups of `views`, and their blocks as `compare` has them; `seeds` names the repetition
    of each, `notes` what is to be known."""

    views: list[RunView]
    groups: Grouping
    blocks: Blocks
    seeds: list[str]
    notes: list[str]


def group(views: Sequence[RunView], baseline: str | None = None) -> Grouped:
    """Puts runs together that differ in SEEDS alone; a run without settings is by itself.

    The baseline is chosen as by `compare`; one group alone has none.
    """
    runs = [_settings(view) for view in views]
    try:
        made = grouping.group(
            runs,
            alone=lambda settings: label(
                {key: settings[key] for key in ("data.name", "adapter.name") if key in settings}
            ),
            unknown=lambda k: f"{views[k].name} (settings not known)",
            clean=text,
        )
        blocks = blocks_of(made, baseline=baseline)
    except CompareError as error:
        raise ReportError(str(error)) from None
    notes = [
        f"{views[again].folder} is left out: the same configuration as {views[first].folder}"
        for first, again in made.twice
    ]
    kept = sorted(k for part in made.parts for k in part.values())
    number = {k: n for n, k in enumerate(kept)}
    parts = [{seed: number[k] for seed, k in part.items()} for part in made.parts]
    notes += blocks.notes
    for block in blocks.blocks:
        base, whose = block.base, f"{block.label}: " if block.label else ""
        for k in () if base is None else block.order:
            if reason := made.unpaired(k, base, same_length=True):
                name = f"{whose}{block.labels[k]}"
                notes.append(f"{name} is not paired with {blocks.baseline}: {reason}")
    seeds = [grouping.named_seed(seed) for _, seed in runs]
    known = [seeds[k] for k, (settings, _) in enumerate(runs) if settings is not None]
    names = grouping.varying_seeds(known)
    return Grouped(
        views=[views[k] for k in kept],
        groups=replace(made, parts=parts),
        blocks=blocks,
        seeds=[
            " ".join(f"{name}={seeds[k][name]}" for name in names if name in seeds[k]) for k in kept
        ],
        notes=notes,
    )


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


def _settings(view: RunView) -> tuple[Settings | None, Seed]:
    """As `compare` has them; the values as words, so that what looks the same is the same."""
    if not view.config:
        return None, ()
    controls = Run(view.folder).controls(view.config)
    controls.sort(key=lambda one: kind_of(one) == "trial")  # one that was chosen is that first
    itself = not controls or any(one.get("asked") for one in controls)
    settings = settings_of(view.config, view.summary, None if itself else controls[0])
    seed = tuple(map(_seed_value, pop_seed(settings)))
    return {_word(key): _word(value) for key, value in settings.items()}, seed


def _seed_value(raw: Any) -> int | str | None:
    whole = isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < 2**64
    return raw if raw is None or whole else text(written(raw), 40)


def _word(raw: Any) -> str:
    """So that a label can be read in one way only."""
    if not isinstance(raw, str):
        return written(raw)
    return raw if re.fullmatch(r'[^\s="\[{][^\s="]*', raw) else json.dumps(raw)
