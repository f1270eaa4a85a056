"""A run's record as an adapter saw it: the statistics of every round that stepped.

All of it is in rounds.jsonl to the bit. Older records lack two things: the number N of clients,
which then comes from labels.json, config.toml or a checkpoint, and Σw² of a round of reported
norms, which is worked out again from the shares. Tensors' sizes are in a checkpoint, or the model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.adapters import Adapter, Groups
from fedglad.config.schema import REGISTRIES, load
from fedglad.records import Round, Statistics, weights_of
from fedglad.runs.control import built_sizes
from fedglad.runs.reader import CHANGED, Run, RunError

SAMPLES = 10**6  # up to so many of the first client, ratios of numbers of samples come back whole
FEDERATIONS = ("fedglad.flower.settings:Nodes", "fedglad.nvflare.settings:Sites")

GroupValues = dict[str, dict[str, float | None]]
"""{group: {gsi, baseline, scale}}, as in rounds.jsonl."""


class ReplayError(ValueError):
    """What cannot be replayed; the message says why and what can be done."""


@dataclass(frozen=True)
class Line:
    """A round that stepped: what the adapter saw, and what it answered."""

    round: int
    stats: Statistics
    groups: GroupValues


@dataclass(frozen=True)
class Recording:
    """The rounds of a run that stepped, ready for `replay`; `config` is its file as plain TOML."""

    lines: tuple[Line, ...]
    skipped: int = 0
    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    population_may_grow: bool = False  # N is that of the end, and clients may have come later

    @property
    def tensors(self) -> list[str]:
        """Their names in the model's order."""
        return list(self.lines[0].stats.sum_sq)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Each tensor's number of elements: from a checkpoint, else from the model itself."""
        needed = "min_group needs the tensors' sizes"
        if self.folder is None:
            raise ReplayError(f"{needed}, which only a run's folder tells")
        try:
            sizes = Run(self.folder).sizes() or built_sizes(load(self.folder / "config.toml")[1])
        except Exception as error:  # a model may be anybody's, and fetch its weights
            raise ReplayError(
                f"{needed}: there is no checkpoint that can be read, and the model cannot be "
                f"built: {error}"
            ) from error
        if list(sizes) != self.tensors:
            raise ReplayError(
                f"{needed}, and the model of config.toml has other tensors than the record"
            )
        return sizes

    def group(self, adapter: Adapter) -> Groups:
        """The groups that the adapter makes of the recorded tensors."""
        if adapter.groups == "tensor" and adapter.min_group > 1:
            return adapter.group(self.sizes)
        return adapter.group(dict.fromkeys(self.tensors, 1))  # all others go by names alone


def read(folder: str | PathLike[str], *, population: int | None = None) -> Recording:
    """The record in a run's folder, finished or not.

    `population` is the number of clients there are, for a run that has not recorded it.
    """
    run = Run(Path(folder))
    if not (run.folder / "rounds.jsonl").is_file():
        there = "it has no rounds.jsonl" if run.folder.is_dir() else "there is no such folder"
        raise ReplayError(f"{run.folder} holds no run that can be replayed: {there}")
    try:
        config, lines = run.config, run.lines()
    except RunError as error:
        raise ReplayError(str(error)) from None
    except OSError as error:
        raise ReplayError(f"{run.folder}/rounds.jsonl cannot be read: {error.strerror}") from None
    records, notes = lines.records, list[str]()
    objects = [record for record in records if isinstance(record, dict)]
    if config is None and not any(record.get("weight_sq") for record in objects):
        notes.append(
            "without config.toml it is not known whether the clients reported norms alone: if they "
            "did, the last digits of a factor may differ"
        )
    if run.config_changed:
        notes.append(CHANGED)
    if lines.cut_off:
        notes.append(f"the last line of rounds.jsonl is cut off: {len(records)} rounds are there")
    elif lines.damaged:
        raise ReplayError(
            f"{run.folder}/{lines.damage}. A simulated run can be run again; what comes before "
            "that line can be copied to another folder"
        )
    recorded = {n for record in objects if isinstance(n := record.get("population"), int)}
    known = max(recorded, default=None) or _population(run, config or {})
    if population and known and (recorded or {known}) != {population}:
        raise ReplayError(f"the run tells of {known} clients, not {population}: leave it out")
    sums = section(config or {}, "engine").get("report") == "norms"
    return _recording(
        [_line(one, k, None, known or population, sums=sums) for k, one in enumerate(records)],
        folder=run.folder,
        config=config,
        notes=tuple(notes),
        population_may_grow=not recorded
        and section(config or {}, "data").get("name") in FEDERATIONS,
    )


def of_rounds(
    rounds: Iterable[Round | Mapping[str, Any]], *, population: int | None = None
) -> Recording:
    """Rounds as `simulate` yields them, or lines of rounds.jsonl."""
    records = [one.to_dict() if isinstance(one, Round) else one for one in rounds]
    return _recording([_line(one, k, population, None) for k, one in enumerate(records)])


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One section of the file, {} if it has none."""
    given = config.get(name, {})
    return dict(given) if isinstance(given, Mapping) else {}


def _recording(lines: Sequence[Line | None], **more: Any) -> Recording:
    stepped = tuple(line for line in lines if line)
    if not stepped:
        what = "no round is recorded yet" if not lines else "all rounds were skipped"
        raise ReplayError(f"there are no factors to replay: {what}")
    first = stepped[0]
    for before, line in pairwise(stepped):
        if line.round <= before.round:
            raise ReplayError(f"round {line.round + 1} follows round {before.round + 1}")
    for line in stepped:
        if list(line.stats.sum_sq) != list(first.stats.sum_sq) or [*line.groups] != [*first.groups]:
            raise ReplayError(
                f"round {line.round + 1} has other tensors or groups than round {first.round + 1}: "
                "these are rounds of several runs"
            )
    return Recording(stepped, len(lines) - len(stepped), **more)


def _line(
    record: Any, place: int, given: int | None, otherwise: int | None, *, sums: bool = False
) -> Line | None:
    """What is recorded of a round; None of one that was skipped.

    N is the number that is given, else the recorded one, else that of the whole run.
    """
    where = f"round {place + 1}"
    try:
        if record["round"] != place:
            # A Monitor leaves out rounds that it could not measure.
            where = f"round {_whole(record['round']) + 1}"
        if record["status"] == "skipped":
            return None
        if not (tensors := record["tensors"]):
            raise ReplayError(
                f"{where} has no tensors: a run without recorded statistics cannot be replayed"
            )
        shares = [_number(c["weight"] or 0.0) for c in record["clients"] if "rejected" not in c]
        if not shares or min(shares) <= 0:
            raise ReplayError(f"{where} names no clients with their weights: it was given as sums")
        sum_sq, sum_sq2, mean_sq = (
            {name: _number(parts[part]) for name, parts in tensors.items()}
            for part in ("sum_sq", "sum_sq2", "mean_sq")
        )
        groups: GroupValues = {
            name: {
                "gsi": _number(group["gsi"]),
                "baseline": None if group["baseline"] is None else _number(group["baseline"]),
                "scale": _number(group["scale"]),
            }
            for name, group in record["groups"].items()
        }
        number = _whole(record["round"])
        recorded = record.get("population")
        population = given or (otherwise if recorded is None else _whole(recorded))
        if (weight_sq := record.get("weight_sq")) is not None:
            weights = weights_of(len(shares), _number(weight_sq))
        else:
            weights = _sum_weights(shares) if sums else tuple(shares)
    except KeyError as error:
        raise ReplayError(f"{where} of the record is damaged: it has no {error}") from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise ReplayError(f"{where} of the record is damaged: {error}") from None
    if not groups:
        raise ReplayError(f"{where} of the record is damaged: it has no groups")
    if population and population < len(shares):
        raise ReplayError(f"{where} has {len(shares)} clients: there are more than {population}")
    return Line(number, Statistics(sum_sq, sum_sq2, mean_sq, weights, N=population), groups)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"its number is {value!r}")
    return value


# --------------------------------------------------------------------------------- older records


def _sum_weights(shares: Sequence[float]) -> tuple[float, ...]:
    """The weights that `step_sums` gave the adapter, for sums that a `Collector` made.

    The shares are the relative weights w_k/w_0 times one number, the first share. Divided by it,
    they come back but for a last bit; a ratio of numbers of samples comes back whole.
    """
    first = shares[0]

    def relative(share: float) -> float:
        ratio = float(Fraction(share / first).limit_denominator(SAMPLES))
        return ratio if ratio * first == share else share / first

    given = np.array([relative(share) for share in shares])
    return weights_of(len(given), float(given @ given) / math.fsum(given) ** 2)


def _is_elsewhere(data: Mapping[str, Any]) -> bool:
    """Whether the clients are those of a federation."""
    return data.get("name") in FEDERATIONS


def _population(run: Run, config: Mapping[str, Any]) -> int | None:
    """The number of clients there are, if the folder has it."""
    data = section(config, "data")
    # Of a federation as of the last checkpoint: clients may have come meanwhile.
    if (known := run.clients()) or _is_elsewhere(data):
        return known
    if data.get("name") not in REGISTRIES["data"] or data.get("partition") == "natural":
        return None  # which have a number of their own
    return clients if isinstance(clients := data.get("clients"), int) else None
