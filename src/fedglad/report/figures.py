"""The numbers of every chart, from a run's folder: plain types, as the page reads them.

    payload([Run(folder).read(), ...]) -> {"version": 2, "title": ..., "runs": [...], ...}

Rounds are counted from 1, shares are percentages, numbers are rounded for showing; what is not
known is None.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import correlation, fmean, linear_regression
from typing import Any

import numpy as np

from fedglad.analysis.per_client import clients, is_rejected, norm_of
from fedglad.config.keys import flat
from fedglad.config.presets import shortened
from fedglad.records import FLAGS, Score
from fedglad.report import ReportError, RunFigures
from fedglad.report.clients import columns, listed, mask, rows
from fedglad.report.groups import group, in_words
from fedglad.report.headline import average, disagreement, headline, verdict
from fedglad.report.numbers import short
from fedglad.report.results import table
from fedglad.runs.line import NUMBERS, by_design, number, text
from fedglad.runs.reader import RunView
from fedglad.runs.summary import has_own_models, warning_of
from fedglad.trust import Alarm

VERSION = 2
POLL = 2  # seconds between two looks of a live page
# So much of each, over all runs, makes a page of less than 5 MB.
CLIENTS = 5000  # in the tables
CELLS = 100_000  # groups × rounds; each has its factor and its GSI/B
NAME = 20  # cells that a group with few rounds counts as: its name takes room too
ENTRIES = 25_000  # clients in the cohorts
SHARES = 40_000  # rounds × classes
REASON = 40  # characters that take as much room as another client
FEWEST = 3  # clients that every cohort and every table shows
NAMED = 3  # runs before a note
ALIKE = 1e-9  # values that differ by less are the same but for rounding
NOTHING = dict.fromkeys(("gsi", "baseline", "scale"))  # of a group that a round does not have

Record = Mapping[str, Any]
"""A round as `fedglad.runs.line.clean` gives it."""


def payload(
    views: Sequence[RunView], *, baseline: str | None = None, live: bool = False
) -> dict[str, Any]:
    """All that the page shows."""
    if not views:
        raise ReportError("there is no run to report on")
    grouped = group(views, baseline)
    runs = [run(view, share=len(grouped.views)) for view in grouped.views]
    groups, seeds = grouped.groups, grouped.seeds
    blocks = grouped.blocks
    order = [k for block in blocks.blocks for k in block.order]
    for place, k in enumerate(order):
        for member in groups.parts[k].values():
            runs[member] |= {"label": groups.labels[k], "seed": seeds[member], "group": place}
    return {
        "version": VERSION,
        "title": f"{len(runs)} runs" if len(runs) > 1 else runs[0]["name"],
        "live": {"seconds": POLL} if live else None,
        "headline": headline(grouped, runs),
        "table": table(grouped, runs),
        "verdict": verdict(runs),
        "average": average(grouped, runs),
        "notes": [*_notes(runs), *(f"{text(note, 400)}." for note in grouped.notes)],
        "groups": [
            {
                "label": groups.labels[k],
                "baseline": groups.labels[k] == blocks.baseline and len(groups.parts) > 1,
                "runs": list(groups.parts[k].values()),
            }
            for k in order
        ],
        "flags": list(FLAGS),
        "score": common_score(grouped.views),
        "runs": runs,
    }


def run(view: RunView, *, share: int = 1) -> RunFigures:
    """One run's figures; `share` is how many runs have to fit into the page."""
    rounds, score = view.rounds, view.score
    usual, alarm, worked_out = alarms(rounds)
    notes = list(view.missing)
    if warning := warning_of(rounds):
        notes.append(warning)
    if has_own_models(rounds):
        notes.append(
            "scores of single clients are those of their own models, and all others those of the "
            "server's"
        )
    if fewer := shortened(flat(view.config)):
        notes.append(f"shortened: {fewer}")
    if worked_out:
        whose = "this run" if worked_out == len(rounds) else f"{worked_out} rounds"
        notes.append(f"alarms were not recorded by {whose}: they are worked out from its GSI")
    if note := disagreement(view):
        notes.append(note)
    summaries = clients(rounds)
    kept = listed(summaries, max(FEWEST, CLIENTS // share))
    everybody = [client for record in rounds for client in record["clients"]]
    return {
        "name": view.name,
        "label": "",
        "seed": "",
        "group": 0,
        "finished": view.finished,
        "summed": view.summary is not None,
        "rounds_planned": view.planned,
        "config": in_words(view.config),
        "rounds": [record["round"] + 1 for record in rounds],
        "status": [record["status"] for record in rounds],
        "reason": [record["reason"] for record in rounds],
        "score": in_short(score),
        "scores": _scores(rounds, score, "test"),
        "lost": lost(rounds, score),
        "averaged": _or_none(_scores(rounds, score, "averaged")),
        "validation": _or_none(_scores(rounds, score, "validation")),
        "averaged_validation": _or_none(_scores(rounds, score, "averaged_validation")),
        "own": own(rounds, score, "client_scores"),
        "averaged_own": own(rounds, score, "averaged_client_scores"),
        "test_loss": _column(rounds, "test_loss"),
        "averaged_loss": _or_none(_column(rounds, "averaged_loss")),
        "train_loss": _column(rounds, "train_loss"),
        "gsi": _column(rounds, "gsi_all"),
        "gsi_unfiltered": _unfiltered(rounds),
        "usual": [short(value) for value in usual],
        "alarm": alarm,
        "similarity": _or_none(_column(rounds, "label_similarity")),
        "sizes": [len(record["clients"]) for record in rounds],
        "rejections": [sum(map(is_rejected, record["clients"])) for record in rounds],
        "flagged": [sum("flags" in one for one in record["clients"]) for record in rounds],
        "cohorts": cohorts(rounds, notes, entries=ENTRIES // share),
        "factor": factor(rounds),
        "heat": heat(rounds, notes, cells=CELLS // share),
        "fit": fit(rounds),
        "labels": labels(rounds, view.labels, notes, alarm, cells=SHARES // share),
        "updates": len(everybody),
        "rejected": sum(map(is_rejected, everybody)),
        "left_out": sum(by_design(client.get("rejected")) for client in everybody),
        "clients": rows(kept),
        "clients_left_out": len(summaries) - len(kept),
        "client_columns": columns(summaries, kept, _shown_scores(view.client_scores, score)),
        "to_look_at": [client.id for client in summaries if client.to_look_at],
        "seconds": short(seconds(view)),
        "missing": [_sentence(note) for note in notes],
    }


def in_short(score: Score) -> dict[str, Any]:
    """A score as the page reads it."""
    return {**score.to_dict(), "words": score.words, "title": score.title, "share": score.share}


def common_score(views: Sequence[RunView]) -> dict[str, Any]:
    """That of all runs; where they have several, it has no name and no unit."""
    scores = {view.score: None for view in views}
    return in_short(next(iter(scores)) if len(scores) == 1 else Score("score"))


def own(rounds: Sequence[Record], score: Score, field: str) -> dict[str, list[Any]] | None:
    """Of each round in which single clients were tested the figures of their own scores.

    `low` and `high` are the mean ± the standard deviation, which a share of one does not leave.
    None if they never were tested.
    """
    tested = [(r["round"] + 1, r[field]) for r in rounds if field in r]
    tested = [(t, one) for t, one in tested if one["mean"] is not None]
    if not tested:
        return None

    def shown(value: float | None) -> float | int | None:
        return None if value is None else short(score.unit * value)

    def edge(one: Record, sign: int) -> float | int | None:
        end = None if one["std"] is None else one["mean"] + sign * one["std"]
        return shown(min(max(end, 0.0), 1.0) if score.share and end is not None else end)

    return {
        "rounds": [t for t, _ in tested],
        "count": [one["count"] for _, one in tested],
        "mean": [shown(one["mean"]) for _, one in tested],
        "worst": [shown(one["worst_decile"]) for _, one in tested],
        "std": [shown(one["std"]) for _, one in tested],
        "low": [edge(one, -1) for _, one in tested],
        "high": [edge(one, 1) for _, one in tested],
    }


def lost(rounds: Sequence[Record], score: Score) -> bool:
    """Whether the last test gave no finite number; accuracy is always one."""
    field = f"test_{score.name}"
    tested = [record for record in rounds if field in record and field not in NUMBERS]
    return bool(tested) and tested[-1][field] is None


def alarms(rounds: Sequence[Record]) -> tuple[list[float | None], list[str | None], int]:
    """For each round the usual GSI before it and its flag; how many flags were not recorded."""
    rule, state = Alarm(), dict[str, Any]()
    usual: list[float | None] = []
    flags: list[str | None] = []
    for record in rounds:
        usual.append(rule.usual(state))
        gsi = record["gsi_all"] if record["status"] == "stepped" else None
        flag, state = rule.judge(gsi, state)
        flags.append(record.get("alarm", flag))
    return usual, flags, sum("alarm" not in record for record in rounds)


def cohorts(rounds: Sequence[Record], notes: list[str], *, entries: int) -> list[list[list[Any]]]:
    """Of each round its clients: id, share in the mean, loss, norm, why rejected.

    A client that was judged also has its trust, and its flags as a `mask` if it has any. Where all
    would be too much, so many of each round that it is not; the rejected ones come first, then the
    flagged ones, then those that a filter left out. A long reason counts as more than one client.
    """

    def rank(member: Sequence[Any]) -> int:
        rejected, flagged = member[4], len(member) > 6
        if rejected is not None and not by_design(rejected):
            return 0
        return 1 if flagged else 3 - int(rejected is not None)

    lists = [[_member(k, one) for k, one in enumerate(record["clients"])] for record in rounds]
    ranked = [sorted(members, key=rank) for members in lists]
    room = [
        [0, *accumulate(1 + len(member[4] or "") // REASON for member in members)]
        for members in ranked
    ]
    if sum(used[-1] for used in room) <= entries:
        return lists

    def needed(most: int) -> int:
        return sum(used[min(most, len(used) - 1)] for used in room)

    sizes = range(max(map(len, lists)) + 1)
    most = max(FEWEST, bisect_right(sizes, entries, key=needed) - 1)
    flagged = " and flagged" if any(len(one) > 6 for members in lists for one in members) else ""
    notes.append(
        f"of each cohort at most {most} clients are listed, the rejected{flagged} ones first"
    )
    pairs = zip(lists, ranked, strict=True)
    return [members if len(members) <= most else first[:most] for members, first in pairs]


def factor(rounds: Sequence[Record]) -> dict[str, list[float | int | None]]:
    """The least, the mean and the greatest factor over the groups of each round."""
    scales = [[one["scale"] for one in record["groups"].values()] for record in rounds]
    over = {"least": min, "mean": fmean, "most": max}
    return {name: [short(f(all_)) if all_ else None for all_ in scales] for name, f in over.items()}


def heat(rounds: Sequence[Record], notes: list[str], *, cells: int) -> dict[str, Any] | None:
    """The factors, and GSI/B, of groups by rounds, in the order of the model.

    None if no group was ever scaled or compared. Where there are too many, the groups whose factor
    moved the most.
    """
    scales: dict[str, list[float]] = {}
    something = False
    for name, one in (item for record in rounds for item in record["groups"].items()):
        scales.setdefault(name, []).append(one["scale"])
        something = something or one["scale"] != 1 or _ratio(one) is not None
    if not something:
        return None
    names, most = list(scales), max(1, cells // max(NAME, len(rounds)))
    if len(names) > most:
        moved = sorted(names, key=lambda name: min(scales[name]) - max(scales[name]))
        kept = set(moved[:most])
        notes.append(
            f"the heat map has {most} of {len(names)} groups, those whose factor moved the most"
        )
        names = [name for name in names if name in kept]
    rows = [[record["groups"].get(name, NOTHING) for record in rounds] for name in names]
    return {
        "groups": names,
        "scale": [[short(one["scale"], 4) for one in row] for row in rows],
        "ratio": [[short(_ratio(one), 4) for one in row] for row in rows],
    }


def fit(rounds: Sequence[Record]) -> dict[str, Any] | None:
    """GSI on the cohort's label similarity: least squares and Pearson's r, from 3 rounds on."""
    stepped = [record for record in rounds if record["status"] == "stepped"]
    pairs = [(record["label_similarity"], record["gsi_all"]) for record in stepped]
    pairs = [pair for pair in pairs if None not in pair]
    if len(pairs) < 3 or any(max(all_) - min(all_) < ALIKE for all_ in zip(*pairs, strict=True)):
        return None
    x, y = zip(*pairs, strict=True)
    line, r = linear_regression(x, y), correlation(x, y)
    slope, intercept = short(line.slope), short(line.intercept)
    return {"n": len(pairs), "r": short(r), "slope": slope, "intercept": intercept}


def labels(
    rounds: Sequence[Record],
    counts: np.ndarray | None,
    notes: list[str],
    alarm: Sequence[str | None],
    *,
    cells: int = SHARES,
) -> dict[str, Any] | None:
    """The shares of the classes in the population and in each cohort, all its clients together.

    Where that would be too much, of the distrusted rounds and the last ones; `most` is the largest.
    """
    if counts is None or counts.sum() == 0:
        return None
    fit_in = max(FEWEST, cells // counts.shape[1])
    if len(rounds) > fit_in:
        notes.append(
            f"the classes of {fit_in} of {len(rounds)} cohorts are shown: of the distrusted rounds "
            "first, then of the last ones"
        )
    order = sorted(range(len(rounds)), key=lambda t: (alarm[t] is None, -t))
    kept = set(order[:fit_in])

    def shares(rows: np.ndarray) -> list[Any] | None:
        total = rows.sum()
        return [short(float(x)) for x in rows.sum(axis=0) / total] if total else None

    cohorts: list[list[Any] | None] = []
    for t, record in enumerate(rounds):
        ids = [client["id"] for client in record["clients"] if t in kept]
        known = all(isinstance(k, int) and 0 <= k < len(counts) for k in ids)
        cohorts.append(shares(counts[ids]) if ids and known else None)
    population = shares(counts)
    most = max(x for row in (population, *cohorts) if row for x in row)
    return {"population": population, "cohorts": cohorts, "most": most}


def seconds(view: RunView) -> float:
    """Of the rounds that are recorded; the summary's where some are not."""
    total = math.fsum(x for record in view.rounds for x in record["seconds"].values())
    summed = number((view.summary or {}).get("seconds"), 0.0)
    return total if summed is None or view.complete else summed


def _scores(rounds: Sequence[Record], score: Score, readout: str) -> list[float | int | None]:
    return _column(rounds, f"{readout}_{score.name}", unit=score.unit)


def _shown_scores(scores: Mapping[int | str, float], score: Score) -> dict[int | str, float]:
    """As the page shows them; a share that is none is left out."""
    good = {k: x for k, x in scores.items() if not score.share or 0 <= x <= 1}
    return {k: score.unit * x for k, x in good.items()}


def _column(rounds: Sequence[Record], key: str, unit: float = 1) -> list[float | int | None]:
    values = (record.get(key) for record in rounds)
    return [None if value is None else short(unit * value) for value in values]


def _or_none(column: list[float | int | None]) -> list[float | int | None] | None:
    """None where no round has the number."""
    return column if any(value is not None for value in column) else None


def _unfiltered(rounds: Sequence[Record]) -> list[float | int | None] | None:
    """None where no filter changed anything."""
    pairs = [(record["gsi_unfiltered"], record["gsi_all"]) for record in rounds]
    differ = any(a is not None and (b is None or abs(a - b) > ALIKE * a) for a, b in pairs)
    return _column(rounds, "gsi_unfiltered") if differ else None


def _member(place: int, client: Mapping[str, Any]) -> list[Any]:
    name = f"#{place + 1}" if client["id"] is None else client["id"]
    numbers = (short(client["weight"]), short(client["loss"]), short(norm_of(client)))
    judged = [short(client["trust"], 3)] if "trust" in client else []
    flags = [mask(client["flags"])] if judged and "flags" in client else []
    return [name, *numbers, client.get("rejected"), *judged, *flags]


def _ratio(group: Mapping[str, float | None]) -> float | None:
    gsi, baseline = group["gsi"], group["baseline"]
    return None if gsi is None or baseline is None else gsi / baseline


def _notes(runs: Sequence[RunFigures]) -> list[str]:
    """What is missing, each once, with the names of the runs where there are several."""
    whose: dict[str, list[str]] = {}
    for one in runs:
        for note in one["missing"]:
            whose.setdefault(note, []).append(one["name"])
    if len(runs) == 1:
        return list(whose)

    def few(names: list[str]) -> str:
        if len(names) == len(runs):
            return "All runs"
        return ", ".join(names) if len(names) <= NAMED else f"{len(names)} runs"

    return [f"{few(names)}: {note}" for note, names in whose.items()]


def _sentence(note: str) -> str:
    """
    >>> _sentence("there is no config.toml: nothing is known"), _sentence("a.json is damaged")
    ('There is no config.toml: nothing is known.', 'a.json is damaged.')
    """
    named = "." in note.partition(" ")[0]
    return text(note if named else f"{note[:1].upper()}{note[1:]}", 400).rstrip(".") + "."
