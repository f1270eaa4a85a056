"""The names under which a run's numbers go into every tracker."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any

from fedglad.config.keys import flat
from fedglad.report.groups import written
from fedglad.runs.line import number
from fedglad.runs.scores import FIELD

NAMES: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""What each name means. `<…>` stands for a name of the run's own, made safe by `Names`."""

LONGEST = 200  # characters of a run's own name; MLflow takes 250 in all


@dataclass(frozen=True)
class Row:
    """One round for a tracker."""

    step: int  # rounds are counted from 1
    seconds: float  # since the run began, by its own clock
    scalars: dict[str, float]


@dataclass(frozen=True)
class Start:
    """What a tracker is given first."""

    out: Path  # the folder of its files, which is there
    name: str  # of the run
    id: str  # the same for the same run
    started: float  # seconds since 1970
    config: dict[str, str | float | bool]


class Names:
    """The run's own names in letters that every tracker takes; different ones stay different.

    Letters, digits, `_`, `-` and `.` stay, all else becomes `_`. A name that is taken gets a
    number: a group called `all` is `gsi/all-2`, as `gsi/all` is the GSI over all parameters.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], str] = {}
        self._taken = {name.lower() for name in NAMES}  # some stores do not tell case apart

    def __call__(self, under: str, given: str) -> str:
        if (under, given) not in self._made:
            safe = re.sub(r"[^A-Za-z0-9_.-]", "_", given)[:LONGEST]
            base = f"{under}/{safe if safe.strip('.') else '_' * max(1, len(safe))}"
            numbered = chain([base], (f"{base}-{k}" for k in count(2)))
            name = next(n for n in numbered if n.lower() not in self._taken)
            self._taken.add(name.lower())
            self._made[under, given] = name
        return self._made[under, given]


def scalars(
    record: Mapping[str, Any], names: Names, *, usual: float | None, flag: str | None
) -> dict[str, float]:
    """The numbers of a round that are known; `usual` is what its GSI was compared with."""
    factors = [group["scale"] for group in record["groups"].values()]
    values: dict[str, float | None] = {
        **{_metric(found): record[field] for field in record if (found := FIELD.fullmatch(field))},
        **_of_clients(record),
        "train/loss": record["train_loss"],
        "gsi/all": record["gsi_all"],
        "gsi/unfiltered": record["gsi_unfiltered"],
        "gsi/usual": usual,
        "alarm/one-sided": flag == "one-sided",
        "alarm/outlier": flag == "outlier",
        "factor/mean": fmean(factors) if factors else None,
        "factor/least": min(factors, default=None),
        "factor/most": max(factors, default=None),
        "cohort/size": len(record["clients"]),
        "cohort/rejected": sum("rejected" in client for client in record["clients"]),
        "round/skipped": record["status"] == "skipped",
        "label_similarity": record["label_similarity"],
        "privacy/epsilon": record.get("epsilon"),
        **{f"bytes/{way}": size for way, size in record.get("bytes", {}).items()},
    }
    for name, group in record["groups"].items():
        values[names("gsi", name)] = group["gsi"]
        values[names("factor", name)] = group["scale"]
    for name, seconds in record["seconds"].items():
        values[names("seconds", name)] = seconds
    return {name: float(value) for name, value in values.items() if value is not None}


def _metric(field: re.Match[str]) -> str:
    """The name of a metric, which its record has made safe: `test/perplexity`."""
    return f"{field[1]}/{field[2]}"


def _of_clients(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of single clients' scores, in a round in which they were tested."""
    scores = record.get("client_scores") or {}
    return {f"clients/{name}": scores.get(name) for name in ("mean", "worst_decile", "std")}


def summary_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of summary.json."""
    names = Names()
    return {
        names("summary", key): value
        for key, raw in summary.items()
        if (value := number(raw)) is not None
    }


def hyperparameters(config: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """config.toml as {"server.lr": 1.0}; a list, or a table inside a section, is written out."""
    names = Names()
    parameters: dict[str, str | float | bool] = {}
    for key, value in flat(config).items():
        plain = isinstance(value, str | bool) or number(value) is not None
        parameters[names("", key).removeprefix("/")] = value if plain else written(value)
    return parameters
