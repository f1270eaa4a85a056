"""Runs as pandas data frames: one row a round, a group of tensors, a client, or a run.

Their columns are the fields of the records; a field with parts has a column for each,
`seconds.train`. Before them stand the run's folder, its seed, and the settings in which the runs
differ, with dotted keys. pandas is loaded here alone, and only when a frame is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fedglad.analysis.grouping import differing, settings_of
from fedglad.config.keys import shown
from fedglad.runs.reader import Run, RunView
from fedglad.runs.scores import score_of
from fedglad.runs.summary import figures

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame  # pyright: ignore[reportMissingTypeStubs]

Row = dict[str, Any]

APART = ("tensors", "groups", "clients", "score", "versions", "models")
"""Fields that are tables of their own, or say nothing of a round or of a result."""

ROUNDS = ("round", "status", "clients", "rejected")
GROUPS = ("round", "group", "gsi", "baseline", "scale")
CLIENTS = ("round", "client", "weight", "loss", "sq_norm", "trust", "flags", "rejected")
SCORES = ("round", "client", "model", "score", "averaged_score")
"""Columns that are there in any case, in this order."""


def rounds(views: Sequence[RunView], *, named: bool = True) -> DataFrame:
    """A row for each round: scores, losses, GSI, seconds, how many clients, how many rejected."""

    def rows(view: RunView) -> Iterator[Row]:
        for record in view.rounds:
            clients = record["clients"]
            counts = {"clients": len(clients), "rejected": sum("rejected" in c for c in clients)}
            yield {"round": record["round"], "status": record["status"]} | counts | flat(record)

    return _frame(views, rows, ROUNDS, named)


def groups(views: Sequence[RunView], *, named: bool = True) -> DataFrame:
    """A row for each round and group of tensors: GSI, what it was compared with, the factor."""

    def rows(view: RunView) -> Iterator[Row]:
        for record in view.rounds:
            for name, values in record["groups"].items():
                yield {"round": record["round"], "group": name, **values}

    return _frame(views, rows, GROUPS, named)


def clients(views: Sequence[RunView], *, named: bool = True) -> DataFrame:
    """A row for each round and client of its cohort: weight, loss, norm, trust, why rejected."""

    def rows(view: RunView) -> Iterator[Row]:
        for record in view.rounds:
            for entry in record["clients"]:
                rest = {name: value for name, value in entry.items() if name not in ("id", "flags")}
                who = {"round": record["round"], "client": entry["id"]}
                yield {**who, **rest, "flags": ", ".join(entry.get("flags", []))}

    return _frame(views, rows, CLIENTS, named)


def client_scores(views: Sequence[RunView], *, named: bool = True) -> DataFrame:
    """A row for each round and client that was tested on its own held-out samples.

    `model` says with whose: "server", or "personal" for the client's own.
    """

    def rows(view: RunView) -> Iterator[Row]:
        tested = {record["round"]: record.get("client_scores", {}) for record in view.rounds}
        for line in Run(view.folder).client_scores():
            columns = zip(
                ("client", *SCORES[3:]), ("ids", "scores", "averaged_scores"), strict=True
            )
            parts = {column: line[field] for column, field in columns if field in line}
            t = line.get("round")
            which = {"round": t, "model": tested.get(t, {}).get("model", "server")}
            for values in zip(*parts.values(), strict=True):
                yield which | dict(zip(parts, values, strict=True))

    return _frame(views, rows, SCORES, named)


def summary(views: Sequence[RunView], *, named: bool = True) -> DataFrame:
    """A row for each run: whether it is finished, and its result, as far as it came."""

    def rows(view: RunView) -> Iterator[Row]:
        result = view.summary or figures(view.rounds, view.score)
        score = {"score": score_of(view.rounds, view.summary).name}
        yield {"finished": view.summary is not None} | score | flat(result)

    return _frame(views, rows, ("finished", "score"), named)


def flat(record: Mapping[str, Any]) -> Row:
    """The plain values of a record, and those of its parts.

    >>> flat({"round": 3, "seconds": {"train": 0.5}, "clients": [{}]})
    {'round': 3, 'seconds.train': 0.5}
    """
    row: Row = {}
    for name, value in record.items():
        if name in APART:
            continue
        if isinstance(value, Mapping):
            parts = cast("Mapping[str, Any]", value).items()
            row |= {f"{name}.{part}": inner for part, inner in parts if _is_plain(inner)}
        elif _is_plain(value):
            row[name] = value
    return row


def names_of(views: Sequence[RunView]) -> list[Row]:
    """What stands before a run's columns: its folder, its seed, and what only it has."""
    settings = [settings_of(view.config, view.summary) if view.config else None for view in views]
    seeds = [one.pop("seed", None) if one else None for one in settings]
    kept = {key for config in differing(settings) for key in config}
    return [
        {"run": str(view.folder), "seed": seed}
        | {key: _cell(one.get(key)) for one in [one or {}] for key in _in_order(kept)}
        for view, seed, one in zip(views, seeds, settings, strict=True)
    ]


def _in_order(keys: Iterable[str]) -> list[str]:
    """Dotted keys as a configuration has them: by section, the name first."""
    return sorted(keys, key=lambda key: (key.partition(".")[0], not key.endswith(".name"), key))


def _frame(views: Sequence[RunView], rows: Any, columns: Sequence[str], named: bool) -> DataFrame:
    names = names_of(views) if named else [dict[str, Any]() for _ in views]
    table = [name | row for name, view in zip(names, views, strict=True) for row in rows(view)]
    known = [*(names[0] if names else ()), *columns, *(key for row in table for key in row)]
    return pandas().DataFrame(table, columns=[*dict.fromkeys(known)])


def pandas() -> Any:
    """The library; ImportError says how to get it."""
    try:
        import pandas  # pyright: ignore[reportMissingTypeStubs]
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise ImportError(
            "data frames need pandas: pip install 'fedglad[frames]', or pip install pandas"
        ) from None
    return pandas


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _cell(value: Any) -> Any:
    """A setting; of a list or a table its text, by which rows can be grouped."""
    return shown(value) if isinstance(value, list | Mapping) else value
