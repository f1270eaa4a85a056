"""The result in a few figures, the paired gain, and the verdict on the health of training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedglad.analysis.curves import series
from fedglad.analysis.grouping import Seed
from fedglad.analysis.statistics import LAST, interval, known, last_mean, spread
from fedglad.privacy import text
from fedglad.records import Score
from fedglad.report import RunFigures
from fedglad.report.groups import Grouped
from fedglad.runs.line import LARGEST, number
from fedglad.runs.reader import RunView
from fedglad.runs.scores import Number
from fedglad.runs.summary import figures

COLLAPSED = 10.0  # percentage points that the last rounds are below the best ones
RISEN = 1.0  # percentage points over the first test, by which it has risen at least
LOST = 0.5  # the same of a score that is no share: of the way from the first test to the best
MOVED = 0.01  # of the first test
ENOUGH = 20  # tests before that is asked for
GROWN = 2.0  # the loss of the last rounds over that of the best ones, where nothing is tested
SKIPPED = 0.5  # of the rounds
DISTRUSTED = 0.25  # of the rounds
REJECTED = 0.1  # of the updates
NAMED = 3  # runs in the verdict, clients in a tile


@dataclass(frozen=True)
class Result:
    """The score, as in summary.json; None where nothing was tested.

    `tests` is how many `last10` is the mean of.
    """

    last10: float | None
    final: float | None
    tests: int


def result(view: RunView, readout: str = "test") -> Result:
    """From the rounds; where a finished run lacks some, from its summary.

    `readout` says of which model, on which samples: one of READOUTS.
    """
    score = view.score
    last10, final = (Number(when, readout, score.name) for when in ("last10", "final"))
    numbers, tests = figures(view.rounds, score), len(series(view.rounds, last10.field))
    if not view.complete and _known(view.summary, last10, score) is not None:
        every = int(number(view.config.get("eval_every"), 1.0) or 1)
        numbers, tests = view.summary, math.ceil((view.planned or LAST) / every)
    return Result(_known(numbers, last10, score), _known(numbers, final, score), min(LAST, tests))


def disagreement(view: RunView) -> str | None:
    """That the summary has another result than the rounds, of which none is missing."""
    score = view.score
    last10 = Number("last10", "test", score.name)
    both = (view.summary, figures(view.rounds, score))
    summed, rounds = (_known(numbers, last10, score) for numbers in both)
    if not view.complete or summed is None or rounds is None:
        return None
    if abs(summed - rounds) < 1e-6 * max(1.0, abs(rounds)):
        return None
    return (
        f"summary.json has {score.words} {score.text(summed, 2)}, its rounds "
        f"have {score.text(rounds, 2)}: the rounds count"
    )


def headline(grouped: Grouped, runs: Sequence[RunFigures]) -> list[dict[str, str]]:
    """The figures at the head of the page."""
    return [*results(grouped, runs), *facts(grouped, runs)]


def results(grouped: Grouped, runs: Sequence[RunFigures]) -> list[dict[str, str]]:
    """The tiles of the groups: what they came to, and their gain over the baseline."""
    tiles: list[dict[str, str]] = []
    for block in grouped.blocks.blocks:
        for k in block.order:
            tiles.append(_scored(grouped, k, runs))
            tiles += _averaged(grouped, k)
            base = block.base
            if base not in (None, k) and not grouped.groups.unpaired(k, base, same_length=True):
                tiles += _gain(grouped, k, base)
    return tiles


def facts(grouped: Grouped, runs: Sequence[RunFigures]) -> list[dict[str, str]]:
    """The tiles of all runs together."""
    return [
        *_privacy(grouped.views),
        *[_distrusted(runs), *_clients(runs), _rejected(runs), _time(runs)],
    ]


def average(grouped: Grouped, runs: Sequence[RunFigures]) -> str | None:
    """What the averaged model is, in one sentence; None if no run tested one."""
    pairs = zip(grouped.views, runs, strict=True)
    kinds = [_averaging(view.config) for view, run in pairs if run["averaged"]]
    if not kinds:
        return None
    same = all(kind == kinds[0] for kind in kinds)
    what = _in_words(kinds[0]) if same else "an average of the models that a run’s server has had"
    return f"Averaged: {what}. It is what you may deploy; clients train on the newest model."


def _averaging(config: Mapping[str, Any]) -> Any:
    """The section of what averages: the optimizer, if it does so itself."""
    server = config.get("server")
    itself = isinstance(server, Mapping) and server.get("name") == "schedule-free"
    return server if itself else config.get("average")


def _in_words(section: Any) -> str:
    """
    >>> _in_words({"name": "window", "size": 5})
    'the mean of the last 5 models that the server has had'
    """
    settings: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    models = "models that the server has had"
    beta, size = number(settings.get("beta"), 0.0, 0.999999), number(settings.get("size"), 1.0)
    match settings.get("name"):
        case "ema" if beta is not None:
            return f"a running mean of the {models}, the last {1 / (1 - beta):.0f} or so count most"
        case "window" if size is not None:
            return f"the mean of the last {size:.0f} {models}"
        case "poly":
            return f"a mean of all {models}, in which later ones count more"
        case "schedule-free":
            return "the mean x of all points that the server’s own steps have reached"
        case _:
            return f"an average of the {models}"


def verdict(runs: Sequence[RunFigures]) -> str:
    """One sentence; the rules are in docs/report.md."""
    if len(runs) == 1:
        return _verdict(runs[0])
    if not any(run["rounds"] for run in runs):
        return "No run has a round yet."
    ill = [(run["name"], wrong) for run in runs if (wrong := problems(run))]
    if not ill:
        if early := sum(map(_early, runs)):
            few = f"{early} of them too short to judge"
            return f"Nothing is plainly wrong in any of {len(runs)} runs, {few}."
        so_far = "" if all(run["finished"] for run in runs) else " so far"
        return f"Training looks healthy{so_far} in all {len(runs)} runs."
    named = [f"{name}: {'; '.join(wrong)}" for name, wrong in ill[:NAMED]]
    more = f"; and {len(ill) - NAMED} more" if len(ill) > NAMED else ""
    need = "needs" if len(ill) == 1 else "need"
    return f"{len(ill)} of {len(runs)} runs {need} a look: {'; '.join(named)}{more}."


def problems(run: RunFigures) -> list[str]:
    """What is wrong with a run, in words; nothing if it is healthy."""
    wrong: list[str] = []
    rounds, tested = len(run["rounds"]), known(run["scores"])
    if not rounds:
        return ["no round can be read"] if run["finished"] else []
    score = _score(run)
    if run["lost"] and tested:
        wrong.append(f"{score.words} is no longer a finite number")
    elif run["lost"]:
        wrong.append(f"{score.words} was never a finite number")
    elif tested:
        wrong += _fallen(tested, score)
        both = zip(run["scores"], run["test_loss"], strict=True)
        losses = [loss for value, loss in both if value is not None]
        if losses[-1] is None and known(run["test_loss"]):
            wrong.append("the test loss is no longer a finite number")
    elif losses := known(run["train_loss"]):
        last, best = last_mean(losses), min(_means(losses))
        if best > 0 and last > GROWN * best:
            wrong.append(
                f"the training loss rose from {best:.3g} to {last:.3g} (means over {LAST} rounds)"
            )
    skipped = sum(status == "skipped" for status in run["status"])
    if skipped >= SKIPPED * rounds:
        reasons = [reason for reason in run["reason"] if reason]
        why = f", the last one because {reasons[-1]}" if reasons else ""
        wrong.append(f"{skipped} of {rounds} rounds were skipped{why}")
    flagged = sum(flag is not None for flag in run["alarm"])
    if flagged >= DISTRUSTED * rounds:
        wrong.append(f"{flagged} of {rounds} rounds are distrusted")
    updates, rejected = run["updates"], run["rejected"]
    if rejected and rejected >= REJECTED * updates:
        wrong.append(f"{rejected} of {updates} updates were rejected")
    return wrong


def _score(run: RunFigures) -> Score:
    return Score(run["score"]["name"], run["score"]["higher"])


def _fallen(tested: Sequence[float], score: Score) -> list[str]:
    """That the score of the last tests is far from the best, or has not moved; as it is shown."""
    last, best = last_mean(tested), score.sign * max(score.sign * x for x in _means(tested))
    worse, gained = score.sign * (best - last), score.sign * (best - tested[0])
    far = COLLAPSED if score.share else LOST * gained
    away, towards = ("fell", "risen") if score.higher else ("rose", "fallen")
    if worse > far > 0:
        ends = " to ".join(_shown(x, score) for x in (best, last))
        return [f"{score.words} {away} from {ends} (means over {LAST} tests)"]
    least = RISEN if score.share else MOVED * abs(tested[0])
    if len(tested) >= ENOUGH and score.sign * (last - tested[0]) < least:
        return [f"{score.words} has not {towards} from its first {_shown(tested[0], score)}"]
    return []


def _shown(value: float, score: Score) -> str:
    """A number of the page, where shares are percentages already."""
    return score.text(value / score.unit)


def span(seconds: float) -> str:
    """
    >>> span(0.042), span(0.42), span(75), span(5080), span(200_000)
    ('42 ms', '0.4 s', '1 min 15 s', '1 h 25 min', '2 d 8 h')
    """
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3599.5:
        whole, rest = divmod(round(seconds), 60)
        return f"{whole} min {rest} s"
    whole, rest = divmod(round(seconds / 60), 60)
    if whole < 24:
        return f"{whole} h {rest} min"
    whole, rest = divmod(round(seconds / 3600), 24)
    return f"{whole:,} d {rest} h"


def _known(numbers: Mapping[str, Any] | None, name: Number, score: Score) -> float | None:
    within = (0.0, 1.0) if score.share else (-LARGEST, LARGEST)
    return number((numbers or {}).get(name.name), *within)


def _scored(grouped: Grouped, k: int, runs: Sequence[RunFigures]) -> dict[str, str]:
    """A group's result; of runs that were never tested, the training loss."""
    of, members = _of(grouped, k), grouped.groups.parts[k].values()
    views = [grouped.views[member] for member in members]
    results, score = [result(view) for view in views], views[0].score
    details = [f"{len(views)} seeds"] if len(views) > 1 else []
    details += _progress(views)
    if value := _mean(results, score):
        tests = max(one.tests for one in results)
        unit = "round" if tests == LAST and all(map(_every_round, views)) else "test"
        held_out = _mean([result(view, "validation") for view in views], score)
        validated = [f"validation {held_out}"] if held_out else []
        details = [*_final(results, score), *validated, *details]
        return _tile(f"{score.title}, {_last_few(tests, unit)}{of}", value, details)
    all_losses = [losses for m in members if (losses := known(runs[m]["train_loss"]))]
    if all_losses:
        details = [f"no {score.words} was measured", *details]
        few = _last_few(max(map(len, all_losses)), "round")
        value = f"{fmean(last_mean(losses) for losses in all_losses):.4g}"
        return _tile(f"Training loss, {few}{of}", value, details)
    return _tile(f"{score.title}{of}", "–", ["nothing was measured", *details])


def _averaged(grouped: Grouped, k: int) -> list[dict[str, str]]:
    """The average of a group's models, and how much better it is; no tile without one."""
    views = [grouped.views[member] for member in grouped.groups.parts[k].values()]
    results, score = [result(view, "averaged") for view in views], views[0].score
    if not (value := _mean(results, score)):
        return []
    pairs = [(one.last10, result(view).last10) for one, view in zip(results, views, strict=True)]
    gains = [mine - newest for mine, newest in pairs if mine is not None and newest is not None]
    better = [f"{_points(fmean(gains), score)} over the newest model"] if gains else []
    tone, bounds = _interval(gains, score)
    details = [*_final(results, score), *better, *bounds]
    return [_tile(f"Averaged model{_of(grouped, k)}", value, details, tone)]


def _of(grouped: Grouped, k: int) -> str:
    """Whose a tile is, if there are several groups."""
    return "" if len(grouped.groups.parts) == 1 else f": {grouped.groups.labels[k]}"


def _final(results: Sequence[Result], score: Score) -> list[str]:
    final = known(one.final for one in results)
    return [f"final {score.text(fmean(final))}"] if final else []


def _interval(differences: Sequence[float], score: Score) -> tuple[str, list[str]]:
    """The tone of a tile of differences, and their interval in words, from three on."""
    if not (bounds := interval(differences)):
        return "plain", []
    low, high = bounds
    up, down = ("good", "bad") if score.higher else ("bad", "good")
    tone = up if low > 0 else down if high < 0 else "plain"
    return tone, [f"95 % interval {_signed(low, score)} to {_signed(high, score)}"]


def _mean(results: Sequence[Result], score: Score) -> str:
    """The mean of the results ± their deviation; empty if nothing was tested."""
    last10 = known(one.last10 for one in results)
    if not last10:
        return ""
    parts = [score.figure(x, 1) for x in (fmean(last10), spread(last10)) if x is not None]
    return f"{' ± '.join(parts)}{' %' if score.share else ''}"


def _every_round(view: RunView) -> bool:
    """Whether the tests of the result are those of rounds in a row."""
    tested = list(series(view.rounds, f"test_{view.score.name}"))[-LAST:]
    in_a_row = not tested or tested[-1] - tested[0] == len(tested) - 1
    return in_a_row and view.config.get("eval_every", 1) == 1


def _last_few(many: int, what: str) -> str:
    """
    >>> _last_few(40, "round"), _last_few(3, "test"), _last_few(1, "test")
    ('last 10 rounds', 'last 3 tests', 'last test')
    """
    return f"last {what}" if many == 1 else f"last {min(many, LAST)} {what}s"


def _progress(views: Sequence[RunView]) -> list[str]:
    going = [view for view in views if not view.finished]
    if not going:
        return []
    if len(views) > 1:
        return [f"{len(going)} of {len(views)} runs are not finished"]
    last = going[0].rounds[-1]["round"] + 1 if going[0].rounds else 0
    return [f"round {last}" + (f" of {going[0].planned}" if going[0].planned else "")]


@dataclass(frozen=True)
class Gains:
    """Of the seeds that two groups have in common, the differences of their results.

    While a run goes on, both end at the last common test: `until` is the least such round.
    """

    seeds: list[Seed]
    values: list[float]
    until: int | None


def gains(grouped: Grouped, k: int, base: int, readout: str = "test") -> Gains:
    """A group's results minus the baseline's; `readout` says which models of the first count."""
    members, others = grouped.groups.parts[k], grouped.groups.parts[base]
    score, other_score = (
        grouped.views[next(iter(part.values()))].score for part in (members, others)
    )
    seeds, values, ends = list[Seed](), list[float](), list[int]()
    if score != other_score:
        return Gains(seeds, values, None)
    for seed in (seed for seed in members if seed in others):
        one, other = (grouped.views[part[seed]] for part in (members, others))
        mine, theirs = result(one, readout).last10, result(other).last10
        if not (one.finished and other.finished):
            tests = [
                series(view.rounds, Number("last10", which, score.name).field)
                for view, which in ((one, readout), (other, "test"))
            ]
            common = [t for t in tests[0] if t in tests[1]]
            ends += common[-1:]
            mine, theirs = (
                last_mean([tested[t] for t in common]) if common else None for tested in tests
            )
        if mine is not None and theirs is not None:
            seeds.append(seed)
            values.append(mine - theirs)
    return Gains(seeds, values, min(ends, default=None))


def _gain(grouped: Grouped, k: int, base: int) -> list[dict[str, str]]:
    """A group's result minus the baseline's, by the seeds that both have; nothing without any."""
    groups, found = grouped.groups, gains(grouped, k, base)
    values, score = found.values, grouped.views[next(iter(groups.parts[k].values()))].score
    if not values:
        return []
    seeds = f"{len(values)} seeds"
    tone, details = _interval(values, score)
    if details:
        details.append(seeds)
    elif len(values) == 1:
        details = ["one seed: no interval"]
    else:
        each = ", ".join(_signed(x, score) for x in values)
        details = [f"{seeds}: {each}", "no interval below 3"]
    details += [f"up to round {found.until}"] if found.until is not None else []
    details += [] if score.higher else [f"of {score.words} less is better"]
    what = "gain over" if score.higher else "difference to"
    who = f"{groups.labels[k]}: {what}" if len(groups.parts) > 2 else what.capitalize()
    value = _points(fmean(values), score)
    return [_tile(f"{who} {groups.labels[base]}", value, details, tone)]


def _distrusted(runs: Sequence[RunFigures]) -> dict[str, str]:
    flags = [flag for run in runs for flag in run["alarm"]]
    by = {name: flags.count(name) for name in ("one-sided", "outlier")}
    flagged = sum(by.values())
    tone = "bad" if flagged and flagged >= DISTRUSTED * len(flags) else "plain"
    details = [f"{count} {name}" for name, count in by.items()] if flagged else []
    return _tile("Rounds distrusted", f"{flagged} of {len(flags)}", details, tone)


def _privacy(views: Sequence[RunView]) -> list[dict[str, str]]:
    """The largest ε so far of runs with central differential privacy; no tile if there are none."""
    spent: list[tuple[float, Any]] = []
    for view in views:
        known = [e for r in view.rounds if (e := number(r.get("epsilon"), 0.0)) is not None]
        section = view.config.get("privacy")
        given = section.get("delta") if isinstance(section, Mapping) else None
        spent += [(known[-1], number(given, 0.0, 1.0))] if known else []
    if not spent:
        return []
    epsilon, delta = max(spent, key=lambda pair: pair[0])
    details = [f"δ = {delta:g}"] if delta is not None else []
    details += [f"the largest of {len(spent)} runs"] if len(spent) > 1 else []
    return [_tile("Privacy of the models", f"ε = {text(epsilon)}", details)]


def _clients(runs: Sequence[RunFigures]) -> list[dict[str, str]]:
    """Those that were flagged again and again; no tile if there are none."""
    ill = [run for run in runs if run["to_look_at"]]
    if not ill:
        return []
    found = sum(len(run["to_look_at"]) for run in ill)
    all_ = sum(len(run["clients"]) + run["clients_left_out"] for run in runs)
    detail = f"in {len(ill)} of {len(runs)} runs"
    if len(runs) == 1:
        more = f" and {found - NAMED} more" if found > NAMED else ""
        detail = f"flagged often: {', '.join(map(str, ill[0]['to_look_at'][:NAMED]))}{more}"
    return [_tile("Clients to look at", f"{found:,} of {all_:,}", [detail], "bad")]


def _rejected(runs: Sequence[RunFigures]) -> dict[str, str]:
    updates, rejected = (sum(run[key] for run in runs) for key in ("updates", "rejected"))
    tone = "bad" if rejected and rejected >= REJECTED * updates else "plain"
    skipped = sum(run["status"].count("skipped") for run in runs)
    left_out = sum(run["left_out"] for run in runs)
    details = [f"{left_out:,} left out by the filter or weighting"] if left_out else []
    details += [f"{skipped} rounds skipped"] if skipped else []
    return _tile("Updates rejected", f"{rejected:,} of {updates:,}", details, tone)


def _time(runs: Sequence[RunFigures]) -> dict[str, str]:
    total = math.fsum(run["seconds"] or 0.0 for run in runs)
    rounds = sum(len(run["rounds"]) for run in runs)
    details = [f"{len(runs)} runs"] if len(runs) > 1 else []
    details += [f"{span(total / rounds)} a round"] if rounds and total else []
    return _tile("Time", span(total), details)


def _verdict(run: RunFigures) -> str:
    if not run["rounds"] and not run["finished"]:
        return "Waiting for the first round."
    if wrong := problems(run):
        return f"Training needs a look: {'; '.join(wrong)}."
    score = _score(run)
    if tested := known(run["scores"]):
        few = _last_few(len(tested), "test")
        fact = f"{score.words} {_shown(last_mean(tested), score)} over the {few}"
    elif losses := known(run["train_loss"]):
        few = _last_few(len(losses), "round")
        fact = f"training loss {last_mean(losses):.3g} over the {few}"
    else:
        unknown = "whether training is healthy is not known"
        return f"Neither {score.words} nor loss is recorded: {unknown}."
    flagged = sum(flag is not None for flag in run["alarm"])
    so_far = "" if run["finished"] else " so far"
    trust = f"{flagged} of {len(run['rounds'])} rounds distrusted"
    if _early(run):
        return f"Too early to say whether training is healthy: {fact}, {trust}."
    return f"Training looks healthy{so_far}: {fact}, {trust}."


def _early(run: RunFigures) -> bool:
    """Whether two windows do not yet lie side by side."""
    return len(known(run["scores"]) or known(run["train_loss"])) < ENOUGH


def _means(values: Sequence[float]) -> list[float]:
    """The mean of every window."""
    size = min(LAST, len(values))
    return [fmean(values[k : k + size]) for k in range(len(values) - size + 1)]


def _points(difference: float, score: Score) -> str:
    """
    >>> _points(0.0124, Score()), _points(-0.003, Score("mae", higher=False))
    ('+1.24 points', '−0.003')
    """
    return f"{_signed(difference, score)}{' points' if score.share else ''}"


def _signed(difference: float, score: Score) -> str:
    return score.figure(difference, sign="+").replace("-", "−")


def _tile(label: str, value: str, details: Sequence[str], tone: str = "plain") -> dict[str, str]:
    return {"label": label, "value": value, "detail": "; ".join(details), "tone": tone}
