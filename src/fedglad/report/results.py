"""The results of several runs as the table that `compare` shows, from folders in any state."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedglad.analysis import tables
from fedglad.analysis.blocks import Block
from fedglad.analysis.comparison import OF_AVERAGE, Comparison, Difference, Group
from fedglad.analysis.grouping import named_seed
from fedglad.analysis.statistics import interval, known, spread
from fedglad.records import Score
from fedglad.report import RunFigures
from fedglad.report.groups import Grouped
from fedglad.report.headline import gains, result, results
from fedglad.runs.line import text
from fedglad.runs.reader import RunView
from fedglad.runs.scores import Number


def table(grouped: Grouped, runs: Sequence[RunFigures]) -> dict[str, Any] | None:
    """What the page shows in the place of the groups' tiles, of which `tiles` says the number.

    `blocks` have rows, these a label, texts below the `heads`, a tone, and the place of their line
    in the charts; `remarks` stand below, and `details` are differences seed by seed. None for one
    group, for runs with different scores, and where nothing was tested.
    """
    scores = {view.score for view in grouped.views}
    if len(grouped.groups.parts) < 2 or len(scores) > 1:
        return None
    made = _comparison(grouped, scores.pop())
    if not made.groups:
        return None
    columns = tables.columns(made)
    shown = {(g.block, g.label): (k, g) for k, g in enumerate(made.groups)}
    place = 0
    blocks: list[dict[str, Any]] = []
    for block in grouped.blocks.blocks:
        rows: list[dict[str, Any]] = []
        for label in (block.labels[k] for k in block.order):
            for name in (label, f"{label}{OF_AVERAGE}"):
                k, group = shown.get((block.label, name), (None, None))
                if group is None and name != label:
                    continue
                texts = [c.texts[k] if k is not None else tables.NONE for c in columns]
                row = {"label": text(name), "cells": texts, "tone": _tone(group, made.score)}
                rows.append({**row, "group": place, "averaged": name != label})
            place += 1
        blocks.append({"label": text(block.label), "rows": rows})
    return {
        "tiles": len(results(grouped, runs)),
        "columns": [column.name for column in columns],
        "heads": [column.head for column in columns],
        "blocks": blocks,
        "remarks": [f"{text(one, 400)}." for one in (tables.caption(made), *made.notes) if one],
        "details": [
            {"title": text(title, 400), "lines": [text(line, 400) for line in lines]}
            for title, lines in tables.differences(made)
        ],
    }


def _tone(group: Group | None, score: Score) -> str:
    """Good or bad, if the interval of the difference says so."""
    if not (group and group.difference and group.difference.interval):
        return "plain"
    low, high = sorted(score.sign * end for end in group.difference.interval)
    return "good" if low > 0 else "bad" if high < 0 else "plain"


def _comparison(grouped: Grouped, score: Score) -> Comparison:
    """As `compare` makes it of finished runs; a group that was never tested has no row."""
    blocks, groups, notes = grouped.blocks, list[Group](), list[str]()
    tests: list[int] = []
    for block in blocks.blocks:
        for k in block.order:
            newest = _group(grouped, block, k, "test", notes)
            if newest is None:
                continue
            groups.append(newest)
            members = _members(grouped, k)
            tests += [one for view in members if (one := result(view).tests)]
            if mean := _group(grouped, block, k, "averaged", notes):
                pairs = [(result(v, "averaged").last10, result(v).last10) for v in members]
                values = [a - b for a, b in pairs if a is not None and b is not None]
                over = _difference(newest.seeds, values) if len(values) == len(members) else None
                label, of = f"{newest.label}{OF_AVERAGE}", newest.label
                groups.append(replace(mean, label=label, averaged_of=of, over_newest=over))
    return Comparison(
        Number("last10", "test", score.name).name,
        blocks.baseline,
        groups,
        notes,
        score=score,
        tested=score,
        final=Number("final", "test", score.name).name,
        blocks={b.label: b.settings for b in blocks.blocks} if blocks.several else {},
        tests=(min(tests), max(tests)) if tests else None,
    )


def _members(grouped: Grouped, k: int) -> list[RunView]:
    return [grouped.views[member] for member in grouped.groups.parts[k].values()]


def _group(grouped: Grouped, block: Block, k: int, readout: str, notes: list[str]) -> Group | None:
    """A row; None where nothing was tested."""
    views = _members(grouped, k)
    found = [result(view, readout) for view in views]
    values, final = known(one.last10 for one in found), known(one.final for one in found)
    if not values:
        return None
    difference, base = None, block.base
    paired = base is not None and not grouped.groups.unpaired(k, base, same_length=True)
    if base is not None and paired and (k != base or readout != "test"):
        over = gains(grouped, k, base, readout)
        difference = _difference([named_seed(seed) for seed in over.seeds], over.values)
        if over.until is not None and readout == "test":
            whose = f"{block.label}: " if block.label else ""
            notes.append(f"The difference of {whose}{block.labels[k]} is up to round {over.until}")
    return Group(
        label=block.labels[k],
        config=block.configs[k],
        runs=[str(view.folder) for view in views],
        seeds=[named_seed(seed) for seed in grouped.groups.parts[k]],
        values=values,
        mean=fmean(values),
        std=spread(values),
        final_mean=fmean(final) if final else None,
        difference=difference,
        block=block.label,
    )


def _difference(seeds: list[dict[str, Any]], values: list[float]) -> Difference | None:
    return Difference(seeds, values, fmean(values), interval(values)) if values else None
