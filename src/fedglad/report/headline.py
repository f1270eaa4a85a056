"""The result in a few figures, the paired gain, and the verdict on the health of training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedglad.analysis.statistics import LAST, interval, last_mean, spread
from fedglad.report import RunFigures
from fedglad.report.groups import Grouped, PageGroup
from fedglad.runs.line import number
from fedglad.runs.reader import RunView

COLLAPSED = 10.0  # percentage points that the last rounds are below the best ones
RISEN = 1.0  # percentage points over the first test, by which accuracy has risen at least
ENOUGH = 20  # tests before that is asked for
GROWN = 2.0  # the loss of the last rounds over that of the best ones, where nothing is tested
SKIPPED = 0.5  # of the rounds
DISTRUSTED = 0.25  # of the rounds
REJECTED = 0.1  # of the updates
NAMED = 3  # runs in the verdict


@dataclass(frozen=True)
class Accuracy:
    """Shares, as in summary.json; None where nothing was tested.

    `tests` is how many `last10` is the mean of.
    """

    last10: float | None
    final: float | None
    tests: int = 0


@dataclass(frozen=True)
class Gain:
    """A group's result minus the baseline's, seed by seed; `upto`: a round, if not all ended."""

    values: list[float]
    interval: tuple[float, float] | None
    upto: int | None

    @property
    def mean(self) -> float:
        return fmean(self.values)


def result(view: RunView) -> Accuracy:
    """From the rounds; where a finished run lacks some, from its summary."""
    summed = _summed(view)
    return summed if summed.last10 is not None and not view.complete else _recorded(view)


def disagreement(view: RunView) -> str | None:
    """That the summary has another result than the rounds, of which none is missing."""
    summed, own = _summed(view).last10, _recorded(view).last10
    if not view.complete or summed is None or own is None or abs(summed - own) < 1e-6:
        return None
    return (
        f"summary.json has an accuracy of {100 * summed:.2f} %, its rounds have {100 * own:.2f} %: "
        "the rounds count"
    )


def gain(views: Sequence[RunView], group: PageGroup, base: PageGroup) -> Gain | None:
    """By the seeds that both have. While a run goes on, both end at the last common test."""
    values: list[float] = []
    ends: list[int] = []
    for seed in group.members:
        if seed in base.members and not group.unpaired:
            one, other = (views[part.members[seed]] for part in (group, base))
            both = (result(one).last10, result(other).last10)
            if not (one.finished and other.finished):
                *both, end = _common(one, other)
                ends += [end] if both[0] is not None else []
            if both[0] is not None and both[1] is not None:
                values.append(both[0] - both[1])
    return Gain(values, interval(values), min(ends) if ends else None) if values else None


def headline(found: Grouped, runs: Sequence[RunFigures]) -> list[dict[str, str]]:
    """The figures at the head of the page."""
    tiles: list[dict[str, str]] = []
    base = next((one for one in found.groups if one.baseline), None)
    for one in found.groups:
        tiles.append(_accuracy(found.views, one, runs, alone=base is None))
        if base and not one.baseline and (gained := gain(found.views, one, base)):
            tiles.append(_gained(gained, one, base, several=len(found.groups) > 2))
    return [*tiles, _distrusted(runs), _rejected(runs), _time(runs)]


def verdict(runs: Sequence[RunFigures]) -> str:
    """One sentence; the rules are in docs/report.md."""
    if len(runs) == 1:
        return _verdict(runs[0])
    ill = {k: found for k, run in enumerate(runs) if (found := problems(run))}
    begun = [run for run in runs if run["rounds"]]
    if not begun:
        return "No run has a round yet."
    if not ill:
        early = sum(_early(run) for run in runs)
        if early:
            few = f"{early} of them too short to judge"
            return f"Nothing is plainly wrong in any of {len(runs)} runs, {few}."
        so_far = "" if all(run["finished"] for run in runs) else " so far"
        return f"Training looks healthy{so_far} in all {len(runs)} runs."
    named = [f"{runs[k]['name']}: {'; '.join(ill[k])}" for k in list(ill)[:NAMED]]
    more = f"; and {len(ill) - NAMED} more" if len(ill) > NAMED else ""
    need = "needs" if len(ill) == 1 else "need"
    return f"{len(ill)} of {len(runs)} runs {need} a look: {'; '.join(named)}{more}."


def problems(run: RunFigures) -> list[str]:
    """What is wrong with a run, in words; nothing if it is healthy."""
    wrong: list[str] = []
    rounds, tested = len(run["rounds"]), _known(run["accuracy"])
    if not rounds:
        return ["no round can be read"] if run["finished"] else []
    if tested:
        last, best = last_mean(tested), max(_means(tested))
        if best - last > COLLAPSED:
            wrong.append(
                f"accuracy fell from {best:.1f} % to {last:.1f} % (means over {LAST} tests)"
            )
        elif len(tested) >= ENOUGH and last < tested[0] + RISEN:
            wrong.append(f"accuracy has not risen from its first {tested[0]:.1f} %")
        if run["test_loss"][_last(run["accuracy"])] is None and _known(run["test_loss"]):
            wrong.append("the test loss is no longer a finite number")
    elif losses := _known(run["train_loss"]):
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


def _summed(view: RunView) -> Accuracy:
    """The summary's."""
    summary = view.summary or {}
    last10, final = (number(summary.get(f"{x}_accuracy"), 0.0, 1.0) for x in ("last10", "final"))
    every = int(number(view.config.get("eval_every"), 1.0) or 1)
    return Accuracy(last10, final, min(LAST, math.ceil((view.planned or LAST) / every)))


def _recorded(view: RunView) -> Accuracy:
    """The rounds'."""
    tested = list(_tests(view).values())
    if not tested:
        return Accuracy(None, None)
    return Accuracy(last_mean(tested), tested[-1], min(LAST, len(tested)))


def _tests(view: RunView) -> dict[int, float]:
    """The accuracy of each round that was tested."""
    found = ((record["round"], record["test_accuracy"]) for record in view.rounds)
    return {t: accuracy for t, accuracy in found if accuracy is not None}


def _common(one: RunView, other: RunView) -> tuple[float | None, float | None, int]:
    """Both results over the rounds in which both were tested, and the last of these, from 1."""
    mine, theirs = _tests(one), _tests(other)
    both = [t for t in mine if t in theirs]
    if not both:
        return None, None, 0
    return last_mean([mine[t] for t in both]), last_mean([theirs[t] for t in both]), both[-1] + 1


def _accuracy(
    views: Sequence[RunView], group: PageGroup, runs: Sequence[RunFigures], *, alone: bool
) -> dict[str, str]:
    """A group's result; of runs that were never tested, the training loss."""
    of = "" if alone else f": {group.label}"
    results = [result(views[k]) for k in group.runs]
    last10 = [100 * found.last10 for found in results if found.last10 is not None]
    details = [f"{len(group.runs)} seeds"] if len(group.runs) > 1 else []
    details += _progress([views[k] for k in group.runs])
    if last10:
        final = [100 * found.final for found in results if found.final is not None]
        std = spread(last10)
        value = f"{fmean(last10):.1f}{'' if std is None else f' ± {std:.1f}'} %"
        details = [f"final {fmean(final):.1f} %", *details] if final else details
        tests = max(found.tests for found in results)
        each = tests == LAST and all(_every_round(views[k]) for k in group.runs)
        return _tile(
            f"Accuracy, {_last_few(tests, 'round' if each else 'test')}{of}", value, details
        )
    all_losses = [found for k in group.runs if (found := _known(runs[k]["train_loss"]))]
    if all_losses:
        details = ["no accuracy was measured", *details]
        few = _last_few(max(map(len, all_losses)), "round")
        value = f"{fmean(last_mean(losses) for losses in all_losses):.4g}"
        return _tile(f"Training loss, {few}{of}", value, details)
    return _tile(f"Accuracy{of}", "–", ["nothing was measured", *details])


def _every_round(view: RunView) -> bool:
    """Whether the tests of the result are those of rounds in a row."""
    tested = list(_tests(view))[-LAST:]
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


def _gained(found: Gain, group: PageGroup, base: PageGroup, *, several: bool) -> dict[str, str]:
    seeds = f"{len(found.values)} seeds"
    tone = "plain"
    if found.interval:
        low, high = found.interval
        tone = "good" if low > 0 else "bad" if high < 0 else "plain"
        details = [f"95 % interval {_points(low)} to {_points(high)}", seeds]
    elif len(found.values) == 1:
        details = ["one seed: no interval"]
    else:
        details = [f"{seeds}: {', '.join(map(_points, found.values))}", "no interval below 3"]
    details += [f"up to round {found.upto}"] if found.upto else []
    who = f"{group.label}: gain" if several else "Gain"
    return _tile(f"{who} over {base.label}", f"{_points(found.mean)} points", details, tone)


def _distrusted(runs: Sequence[RunFigures]) -> dict[str, str]:
    flags = [flag for run in runs for flag in run["alarm"]]
    by = {name: flags.count(name) for name in ("one-sided", "outlier")}
    flagged = sum(by.values())
    tone = "bad" if flagged and flagged >= DISTRUSTED * len(flags) else "plain"
    details = [f"{count} {name}" for name, count in by.items()] if flagged else []
    return _tile("Rounds distrusted", f"{flagged} of {len(flags)}", details, tone)


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
    if found := problems(run):
        return f"Training needs a look: {'; '.join(found)}."
    if tested := _known(run["accuracy"]):
        few = _last_few(len(tested), "test")
        fact = f"accuracy {last_mean(tested):.1f} % over the {few}"
    elif losses := _known(run["train_loss"]):
        few = _last_few(len(losses), "round")
        fact = f"training loss {last_mean(losses):.3g} over the {few}"
    else:
        return "Neither accuracy nor loss is recorded: whether training is healthy is not known."
    flagged = sum(flag is not None for flag in run["alarm"])
    so_far = "" if run["finished"] else " so far"
    trust = f"{flagged} of {len(run['rounds'])} rounds distrusted"
    if _early(run):
        return f"Too early to say whether training is healthy: {fact}, {trust}."
    return f"Training looks healthy{so_far}: {fact}, {trust}."


def _early(run: RunFigures) -> bool:
    """Whether two windows do not yet lie side by side."""
    return len(_known(run["accuracy"]) or _known(run["train_loss"])) < ENOUGH


def _means(values: Sequence[float]) -> list[float]:
    """Over every window."""
    size = min(LAST, len(values))
    return [fmean(values[k : k + size]) for k in range(len(values) - size + 1)]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _last(values: Sequence[float | None]) -> int:
    return max(k for k, value in enumerate(values) if value is not None)


def _points(share: float) -> str:
    """
    >>> _points(0.0124), _points(-0.003)
    ('+1.24', '−0.30')
    """
    return f"{100 * share:+.2f}".replace("-", "−")


def _tile(label: str, value: str, details: Sequence[str], tone: str = "plain") -> dict[str, str]:
    return {"label": label, "value": value, "detail": "; ".join(details), "tone": tone}
