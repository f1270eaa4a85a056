"""What a finished run came to: summary.json."""

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fedglad.config.schema import FORMAT
from fedglad.core.checksums import json_with_crc
from fedglad.core.files import write_text
from fedglad.runs.line import number, text
from fedglad.runs.reader import Run


def figures(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of a run, from its records alone; one that was never measured is None."""
    averaged = any("averaged_accuracy" in r for r in rounds)
    return {
        **_accuracies(rounds, "test_accuracy", ""),
        **(_accuracies(rounds, "averaged_accuracy", "averaged_") if averaged else {}),
        **_validation(rounds, ""),
        **_validation(rounds, "averaged_"),
        "rounds": len(rounds),
        "skipped": sum(r.get("status") == "skipped" for r in rounds),
        "seconds": math.fsum(s for r in rounds for s in r.get("seconds", {}).values()),
        **_clients(rounds, ""),
        **_clients(rounds, "averaged_"),
    }


def _accuracies(
    rounds: Sequence[Mapping[str, Any]], field: str, which: str
) -> dict[str, float | None]:
    measured = (r.get(field) for r in rounds)
    tested = [accuracy for accuracy in measured if accuracy is not None]
    last = tested[-10:]
    return {
        f"last10_{which}accuracy": math.fsum(last) / len(last) if last else None,
        f"final_{which}accuracy": tested[-1] if tested else None,
    }


def _validation(rounds: Sequence[Mapping[str, Any]], which: str) -> dict[str, float | None]:
    """The figures of a validation set, and the best round by it; none where there was no such set.

    The best round is the first with the highest accuracy, and counted from 0 as in rounds.jsonl.
    """
    field = f"{which}validation_accuracy"
    if (best := best_round(rounds, field)) is None:
        return {}
    named = {f"best_{which}round": best, f"best_{field}": rounds[best][field]}
    return {**_accuracies(rounds, field, f"{which}validation_"), **named}


def best_round(rounds: Sequence[Mapping[str, Any]], field: str) -> int | None:
    """The place of the first record with the highest number in a field; None if none has it.

    >>> best_round([{"a": 0.5}, {}, {"a": 0.75}, {"a": 0.75}], "a")
    2
    """
    scores = {t: r[field] for t, r in enumerate(rounds) if r.get(field) is not None}
    return max(scores, key=lambda t: scores[t], default=None)


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a finished run; a figure that was never measured is None."""
    return {
        **figures(rounds),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
            "format": FORMAT,
        },
        "machine": machine(),
    }


def _clients(rounds: Sequence[Mapping[str, Any]], which: str) -> dict[str, float | None]:
    """The scores of single clients when they were tested last; none where they never were."""
    tested = [r[f"{which}client_scores"] for r in rounds if f"{which}client_scores" in r]
    names = ("mean", "worst_decile", "std") if tested else ()
    return {f"last_{which}client_{name}": tested[-1][name] for name in names}


def write_summary(
    run: Run, models: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> None:
    """Writes summary.json of a run that is at its end; `models` are its files' checksums.

    `more` is what the records do not say: `update_bytes`, what a client receives and sends in a
    round, and `stopped`, why the run ended before its last round.
    """
    made = {**summarise(run.rounds()), **(more or {})}
    summary = {**made, **({"models": dict(models)} if models else {})}
    write_text(run.folder / "summary.json", json_with_crc(json.dumps(summary, indent=2)))


def summary_damage(summary: Mapping[str, Any]) -> str:
    """Which number a summary lacks; empty if none."""
    lacking = [name for name in figures([]) if name not in summary]
    if lacking:
        return f"it has no {lacking[0]!r}"
    wrong = [n for n in figures([]) if summary[n] is not None and number(summary[n]) is None]
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
