"""What a finished run came to: summary.json."""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, cast

from fedglad.config.schema import FORMAT
from fedglad.core.checksums import json_with_crc
from fedglad.core.files import write_text
from fedglad.records import ACCURACY, READOUTS, Score
from fedglad.runs.line import number, text
from fedglad.runs.reader import BULK, Run
from fedglad.runs.scores import Number, metrics_in, score_of

LAST = 10  # tests that a result is the mean of


def figures(rounds: Sequence[Mapping[str, Any]], score: Score | None = None) -> dict[str, Any]:
    """The numbers of a run, from its records alone; one that was never measured is None.

    The score is that of the records, unless it is given.
    """
    score = score or score_of(rounds)
    metrics = metrics_in(rounds, score)
    numbers: dict[str, Any] = {}
    for readout in READOUTS:
        for metric in metrics:
            numbers |= _means(rounds, readout, metric, always=metric == score.name)
        if readout.endswith("validation"):
            numbers |= _best(rounds, readout, score)
    return {
        **numbers,
        "rounds": len(rounds),
        "skipped": sum(r.get("status") == "skipped" for r in rounds),
        "seconds": math.fsum(s for r in rounds for s in r.get("seconds", {}).values()),
        **_clients(rounds, ""),
        **_clients(rounds, "averaged_"),
    }


def _means(
    rounds: Sequence[Mapping[str, Any]], readout: str, metric: str, *, always: bool
) -> dict[str, float | None]:
    """Over the last tests, and in the last one; nothing where the metric is of no readout.

    `always`: the score of the test set is there, measured or not, and the average's if asked for.
    """
    last10, final = (Number(when, readout, metric) for when in ("last10", "final"))
    tested = [v for r in rounds if (v := number(r.get(last10.field))) is not None]
    named = readout == "test" or (readout == "averaged" and any(last10.field in r for r in rounds))
    if not tested and not (always and named):
        return {}
    last = tested[-LAST:]
    return {
        last10.name: math.fsum(last) / len(last) if last else None,
        final.name: tested[-1] if tested else None,
    }


def _best(
    rounds: Sequence[Mapping[str, Any]], readout: str, score: Score
) -> dict[str, float | None]:
    """The best round by a validation set; nothing where there was no such set.

    It is the first with the best score, and counted from 0 as in rounds.jsonl.
    """
    best = Number("best", readout, score.name)
    if (place := best_round(rounds, best.field, score)) is None:
        return {}
    which = readout.removesuffix("validation")
    return {f"best_{which}round": place, best.name: rounds[place][best.field]}


def best_round(
    rounds: Sequence[Mapping[str, Any]], field: str, score: Score = ACCURACY
) -> int | None:
    """The place of the first record with the best number in a field; None if none has it.

    >>> best_round([{"a": 0.5}, {}, {"a": 0.75}, {"a": 0.75}], "a")
    2
    """
    scores = {t: v for t, r in enumerate(rounds) if (v := number(r.get(field))) is not None}
    return max(scores, key=lambda t: score.sign * scores[t], default=None)


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a finished run; a figure that was never measured is None."""
    score = score_of(rounds)
    spent = [e for r in rounds if (e := number(r.get("epsilon"), 0.0)) is not None]
    return {
        **figures(rounds),
        **({"last_client_model": "personal"} if has_own_models(rounds) else {}),
        **({"score": score.to_dict()} if score != ACCURACY else {}),
        **({"epsilon": spent[-1]} if spent else {}),
        **({"warning": warning} if (warning := warning_of(rounds)) else {}),
        "versions": {"python": platform.python_version(), **_versions(), "format": FORMAT},
        "machine": machine(),
    }


def warning_of(rounds: Sequence[Mapping[str, Any]]) -> str:
    """That training ran away, and in which round it was first seen; empty if it did not.

    >>> warning_of([{"round": 0}, {"round": 1, "warning": "the test loss is 1e+09"}])
    'round 2: the test loss is 1e+09'
    """
    said = (f"round {r['round'] + 1}: {r['warning']}" for r in rounds if r.get("warning"))
    return next(said, "")


def has_own_models(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it was with models of their own that single clients were tested last.

    >>> has_own_models([{"client_scores": {"mean": 0.5, "model": "personal"}}, {}])
    True
    """
    tested = [r["client_scores"] for r in rounds if r.get("client_scores")]
    return bool(tested) and tested[-1].get("model") == "personal"


@cache
def _versions() -> Mapping[str, str]:
    return {name: version(name) for name in ("fedglad", "torch", "numpy")}


def _clients(rounds: Sequence[Mapping[str, Any]], which: str) -> dict[str, float | None]:
    """The scores of single clients when they were tested last; none where they never were."""
    tested = [s for r in rounds if isinstance(s := r.get(f"{which}client_scores"), Mapping)]
    last = cast("Mapping[str, Any]", tested[-1]) if tested else {}
    names = ("mean", "worst_decile", "std") if tested else ()
    return {f"last_{which}client_{name}": number(last.get(name)) for name in names}


def write_summary(
    run: Run, models: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> None:
    """Writes summary.json of a run that is at its end; `models` are its files' checksums.

    `more` is what the records do not say: `update_bytes`, what a client receives and sends in a
    round, `stopped`, why the run ended before its last round, `code`, the fingerprints of own code,
    and whether the run's state was kept.
    """
    made = {**summarise(run.rounds(without=BULK)), **(more or {})}
    summary = {**made, **({"models": dict(models)} if models else {})}
    write_text(run.folder / "summary.json", json_with_crc(json.dumps(summary, indent=2)))


def summary_damage(summary: Mapping[str, Any]) -> str:
    """Which number a summary lacks; empty if none."""
    needed = figures([], score_of([], summary))
    lacking = [name for name in needed if name not in summary]
    if lacking:
        return f"it has no {lacking[0]!r}"
    wrong = [n for n in needed if summary[n] is not None and number(summary[n]) is None]
    return f"its {wrong[0]!r} is no number" if wrong else ""


def disagreement(summary: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    """Where a summary has another number than the records give; empty if nowhere."""
    for name, made in figures(rounds).items():
        said = summary.get(name)
        if said is None and made is None:
            continue
        given, theirs = number(said), number(made)
        if given is None or theirs is None or abs(given - theirs) > 1e-6 * max(1.0, abs(theirs)):
            return f"summary.json has {name} {text(json.dumps(said), 40)}, its rounds give {made}"
    return ""


def machine() -> str:
    """What kind of machine this is."""
    return f"{platform.machine()}, {os.cpu_count()} cores"
