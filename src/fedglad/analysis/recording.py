"""A run's record as an adapter saw it: the statistics of every round that stepped.

All but three things are in rounds.jsonl to the bit. The number N of clients comes from labels.json,
config.toml or a checkpoint; tensors' sizes from a checkpoint or the model; the weights of a round
of reported norms, where the server knows only their sums, are worked out again from the shares.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedglad.adapters import Adapter, Groups
from fedglad.config.schema import REGISTRIES, load
from fedglad.core import checkpoint
from fedglad.core.layout import split
from fedglad.records import Round, Statistics
from fedglad.runs.folder import parse
from fedglad.server.from_sums import weights_of

SAMPLES = 10**6  # up to so many of the first client, ratios of numbers of samples are found again
FLOWER = "fedglad.flower.settings:Nodes"

Told = dict[str, dict[str, float | None]]
"""{group: {gsi, baseline, scale}}, as in rounds.jsonl."""


class ReplayError(ValueError):
    """What cannot be replayed; the message says why and what can be done."""


@dataclass(frozen=True)
class Line:
    """A round that stepped: what the adapter saw, and what it answered."""

    round: int
    stats: Statistics
    groups: Told


@dataclass(frozen=True)
class Recording:
    """The rounds of a run that stepped, ready for `replay`; `config` is its file as plain TOML."""

    lines: tuple[Line, ...]
    skipped: int = 0
    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

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
            found = _saved_sizes(self.folder) or _built_sizes(self.folder)
        except Exception as error:  # a model may be anybody's, and fetch its weights
            raise ReplayError(
                f"{needed}: there is no checkpoint that can be read, and the model cannot be "
                f"built: {error}"
            ) from error
        if list(found) != self.tensors:
            raise ReplayError(
                f"{needed}, and the model of config.toml has other tensors than the record"
            )
        return found

    def group(self, adapter: Adapter) -> Groups:
        """The groups that the adapter makes of the recorded tensors."""
        if adapter.groups == "tensor" and adapter.min_group > 1:
            return adapter.group(self.sizes)
        return adapter.group(dict.fromkeys(self.tensors, 1))  # all others go by names alone


def read(folder: str | PathLike[str], *, population: int | None = None) -> Recording:
    """The record in a run's folder, finished or not.

    `population` is the number of clients there are, for a run that does not tell.
    """
    folder = Path(folder)
    if not (folder / "rounds.jsonl").is_file():
        there = "it has no rounds.jsonl" if folder.is_dir() else "there is no such folder"
        raise ReplayError(f"{folder} holds no run that can be replayed: {there}")
    config, notes = read_config(folder), list[str]()
    if config is None:
        notes.append(
            "without config.toml it is not known whether the clients reported norms alone: if they "
            "did, the last digits of a factor may differ"
        )
    try:
        text = (folder / "rounds.jsonl").read_text("utf-8", errors="replace")
    except OSError as error:
        raise ReplayError(f"{folder}/rounds.jsonl cannot be read: {error.strerror}") from None
    found, lines = parse(text), len(text.splitlines())
    if len(found) + 1 == lines and not text.endswith("\n"):
        notes.append(f"the last line of rounds.jsonl is cut off: {len(found)} rounds are there")
    elif len(found) < lines:
        raise ReplayError(
            f"{folder}/rounds.jsonl is damaged: line {len(found) + 1} is not JSON. A simulated run "
            "can be run again; what comes before that line can be copied to another folder"
        )
    known = _population(folder, config or {})
    if population and known and population != known:
        raise ReplayError(f"the run tells of {known} clients, not {population}: leave it out")
    known = known or population
    sums = section(config or {}, "engine").get("report") == "norms"
    return _recording(
        [_line(told, k, known, sums=sums) for k, told in enumerate(found)],
        folder=folder,
        config=config,
        notes=tuple(notes),
    )


def of_rounds(
    rounds: Iterable[Round | Mapping[str, Any]], *, population: int | None = None
) -> Recording:
    """Rounds as `simulate` yields them, or lines of rounds.jsonl."""
    lines: list[Line | None] = []
    for k, found in enumerate(rounds):
        told = found.to_dict() if isinstance(found, Round) else found
        stats = found.record.statistics if isinstance(found, Round) else None
        known = population or (stats.N if stats else None)
        lines.append(_line(told, k, known, sums=False))
    return _recording(lines)


def read_config(folder: Path) -> dict[str, Any] | None:
    """config.toml as plain TOML, so that no class of it has to be here; None if there is none."""
    try:
        return tomllib.loads((folder / "config.toml").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ReplayError(f"{folder}/config.toml cannot be read: {error}") from None


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One section of the file, {} if it has none."""
    found = config.get(name, {})
    return dict(found) if isinstance(found, Mapping) else {}


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


def _line(told: Any, place: int, population: int | None, *, sums: bool) -> Line | None:
    """What is recorded of a round; None of one that was skipped."""
    where = f"round {place + 1}"
    try:
        if told["round"] != place:
            # A Monitor leaves out rounds that it could not measure.
            where = f"round {_whole(told['round']) + 1}"
        if told["status"] == "skipped":
            return None
        if not (tensors := told["tensors"]):
            raise ReplayError(
                f"{where} has no tensors: a run without recorded statistics cannot be replayed"
            )
        shares = [_number(c["weight"]) for c in told["clients"] if "rejected" not in c]
        if not shares or min(shares) <= 0:
            raise ReplayError(f"{where} names no clients with their weights: it was given as sums")
        sum_sq, sum_sq2, mean_sq = (
            {name: _number(found[part]) for name, found in tensors.items()}
            for part in ("sum_sq", "sum_sq2", "mean_sq")
        )
        groups: Told = {
            name: {
                "gsi": _number(found["gsi"]),
                "baseline": None if found["baseline"] is None else _number(found["baseline"]),
                "scale": _number(found["scale"]),
            }
            for name, found in told["groups"].items()
        }
        number = _whole(told["round"])
    except KeyError as error:
        raise ReplayError(f"{where} of the record is damaged: it has no {error}") from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise ReplayError(f"{where} of the record is damaged: {error}") from None
    if not groups:
        raise ReplayError(f"{where} of the record is damaged: it has no groups")
    if population and population < len(shares):
        raise ReplayError(f"{where} has {len(shares)} clients: there are more than {population}")
    weights = tuple(_sum_weights(shares) if sums else shares)
    return Line(number, Statistics(sum_sq, sum_sq2, mean_sq, weights, N=population), groups)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"its number is {value!r}")
    return value


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


def _population(folder: Path, config: Mapping[str, Any]) -> int | None:
    """The number of clients there are, where the folder tells."""
    data = section(config, "data")
    if data.get("name") == FLOWER:  # as of the last checkpoint: clients may have come meanwhile
        for path in sorted((folder / "checkpoints").glob("*.json"), reverse=True):
            if names := _read_json(path, "sampler", "nodes", "names"):
                return len(names)
        return None
    if counts := _read_json(folder / "labels.json", "counts"):
        return len(counts)
    if data.get("name") not in REGISTRIES["data"] or data.get("partition") == "natural":
        return None  # which have a number of their own
    return clients if isinstance(clients := data.get("clients"), int) else None


def _read_json(path: Path, *keys: str) -> list[Any] | None:
    """A list inside a file; None if it is not there."""
    try:
        found: Any = json.loads(path.read_text("utf-8"))
        for key in keys:
            found = found[key]
    except (ValueError, OSError, KeyError, TypeError):
        return None
    return found if isinstance(found, list) else None


def _saved_sizes(folder: Path) -> dict[str, int] | None:
    for path in sorted((folder / "checkpoints").glob("*.safetensors"), reverse=True):
        try:
            layout = checkpoint.read(path)[1]["layout"]
        except (checkpoint.CheckpointError, OSError, KeyError):
            continue
        return {name: math.prod(shape) for name, shape, _, kind in layout if kind != "buffer"}
    return None


def _built_sizes(folder: Path) -> dict[str, int]:
    with torch.random.fork_rng(devices=[]):
        layout = split(load(folder / "config.toml")[1].sections["model"].build())[0]
    return dict(zip(layout.names, layout.numels, strict=True))
