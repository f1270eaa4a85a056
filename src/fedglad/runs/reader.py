"""A run's folder in any state: what is there is read, what is missing or damaged is said."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedglad.config.keys import no_folder
from fedglad.report.record import ROUNDS, clean, number, parse, text

FILES = ("config.toml", "rounds.jsonl", "summary.json")
"""One of them makes a folder a run's."""

NAMED = 8  # round numbers in a sentence
TAIL = 64  # bytes before the last line read, which tell whether the file is still the same


class ReportError(ValueError):
    """What no report can be made of; the message says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run as far as its folder tells it.

    | field | meaning |
    |---|---|
    | `config` | config.toml as it is, {} if it cannot be read |
    | `rounds` | the records in the order of their rounds, each once, every field of its type |
    | `summary` | summary.json, None if there is none that can be read |
    | `labels` | each client's samples of each class (client, class), None if not known |
    | `missing` | sentences on what is not there or damaged |
    """

    folder: Path
    config: Mapping[str, Any]
    rounds: tuple[dict[str, Any], ...]
    summary: Mapping[str, Any] | None
    labels: np.ndarray | None
    missing: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the folder."""
        return text(self.folder.resolve().name) or "/"

    @property
    def planned(self) -> int | None:
        """How many rounds the run was to have, where that is known."""
        found = self.config.get("rounds")
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < ROUNDS:
            found = (self.summary or {}).get("rounds")
        return int(told) if (told := number(found, 1, ROUNDS)) else None

    @property
    def complete(self) -> bool:
        """Whether the records are those of a run that came to its end."""
        return self.planned is not None and len(self.rounds) >= self.planned

    @property
    def finished(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.summary is not None or self.complete


@dataclass
class _Seen:
    """The lines of rounds.jsonl that were read so far."""

    lines: int = 0
    offset: int = 0
    tail: bytes = b""
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    damaged: list[int] = field(default_factory=list[int])
    bad: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def add(self, line: bytes) -> None:
        self.lines += 1
        if not line.strip():
            return
        found = clean(parse(line))
        if found is None:
            self.damaged.append(self.lines)
            return
        record, bad = found
        self.records.append(record)
        for name in dict.fromkeys(bad):
            self.bad.setdefault(name, []).append(record["round"])


class Reader:
    """Reads a folder again and again, of rounds.jsonl only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = _Seen()

    def read(self) -> Story:
        """The run as it is now."""
        if not os.path.isdir(self.folder):
            raise ReportError(no_folder(self.folder))
        if not is_run(self.folder):
            raise ReportError(f"{self.folder} is not a run: it has no {', no '.join(FILES)}")
        missing: list[str] = []
        config = self._config(missing)
        summary = self._summary(missing)
        rounds = self._rounds(missing, waiting=summary is None)
        labels = self._labels(missing)
        story = Story(
            folder=self.folder,
            config=config,
            rounds=tuple(rounds),
            summary=summary,
            labels=labels,
            missing=(),
        )
        return replace(story, missing=(*missing, *_state(story)))

    def version(self) -> str:
        """Another one whenever a file has changed: their sizes and times."""
        found: list[str] = []
        for name in (*FILES, "labels.json"):
            try:
                told = (self.folder / name).stat()
                found.append(f"{told.st_size:x}.{told.st_mtime_ns:x}.{told.st_ino:x}")
            except OSError:
                found.append("-")
        return "_".join(found)

    def _config(self, missing: list[str]) -> dict[str, Any]:
        data = self._bytes("config.toml", missing, "the settings and the seed are not known")
        if data is None:
            return {}
        try:
            return tomllib.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            missing.append(f"config.toml is damaged, its settings are not known: {_short(error)}")
            return {}

    def _summary(self, missing: list[str]) -> dict[str, Any] | None:
        if not os.path.lexists(self.folder / "summary.json"):
            return None
        data = self._bytes("summary.json", missing, "the result is worked out from the rounds")
        found = None if data is None else parse(data)
        if isinstance(found, dict):
            return cast(dict[str, Any], found)
        if data is not None:
            missing.append("summary.json is damaged: the result is worked out from the rounds")
        return None

    def _labels(self, missing: list[str]) -> np.ndarray | None:
        data = self._bytes("labels.json", missing, "no label distributions can be shown")
        if data is None:
            return None
        found = parse(data)
        counts = cast(dict[str, Any], found).get("counts") if isinstance(found, dict) else None
        labels = _counts(counts)
        if labels is None:
            missing.append("labels.json is damaged: no label distributions can be shown")
        return labels

    def _bytes(self, name: str, missing: list[str], so: str) -> bytes | None:
        path = self.folder / name
        try:
            if path.is_file():
                return path.read_bytes()
            missing.append(f"{_absent(path)}: {so}")
        except OSError as error:
            missing.append(f"{name} cannot be read ({error.strerror}): {so}")
        return None

    def _rounds(self, missing: list[str], *, waiting: bool) -> list[dict[str, Any]]:
        path = self.folder / "rounds.jsonl"
        rest = b""
        try:
            if path.is_file():
                rest = self._go_on(path)
            else:
                self._seen = _Seen()
                missing.append(f"{_absent(path)}: no round is recorded")
        except OSError as error:
            self._seen = _Seen()
            missing.append(f"rounds.jsonl cannot be read ({error.strerror})")
        seen = self._seen
        last = _Seen(seen.lines)  # perhaps half a line, perhaps one without its end
        last.add(rest)
        damaged = seen.damaged + last.damaged
        if last.damaged and waiting:
            damaged.pop()
            missing.append("the last line of rounds.jsonl is half written, and left out")
        if damaged:
            missing.append(f"rounds.jsonl is damaged in {_these('line', damaged)}: left out")
        for name in {**seen.bad, **last.bad}:
            rounds = [t + 1 for t in seen.bad.get(name, []) + last.bad.get(name, [])]
            where = _these("round", rounds)
            missing.append(f"{name!r} is damaged in {where}: what can be read is shown")
        return _ordered(seen.records + last.records, missing)

    def _go_on(self, path: Path) -> bytes:
        """Reads from where it stopped; the part of a line at the end is returned, and not kept.

        From the start if the file is not the one it was: a run that goes on writes it anew.
        """
        with open(path, "rb") as file:
            seen = self._seen
            if seen.offset:
                file.seek(seen.offset - len(seen.tail))
                if file.read(len(seen.tail)) != seen.tail:
                    seen = self._seen = _Seen()
                    file.seek(0)
            new = file.read()
        *lines, rest = new.split(b"\n")
        for line in lines:
            seen.add(line)
        done = len(new) - len(rest)
        seen.offset += done
        seen.tail = (seen.tail + new[:done])[-TAIL:]
        return rest


def read(folder: Path) -> Story:
    """A run's folder as it is now; ReportError if it is none."""
    return Reader(folder).read()


def is_run(folder: Path) -> bool:
    """Whether a folder has anything of a run in it."""
    return any(os.path.lexists(folder / name) for name in FILES)


def expand(paths: Iterable[Path]) -> list[Path]:
    """The runs' own folders; of a folder of runs, those in it in the order of their start."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not os.path.isdir(path):
            raise ReportError(no_folder(path))
        inside = [path] if is_run(path) else _runs_in(path)
        if not inside:
            raise ReportError(
                f"{path} is not a run, nor a folder of runs: there is no {', no '.join(FILES)} in "
                "it or one level below"
            )
        found |= {run.resolve(): run for run in inside if run.resolve() not in found}
    return list(found.values())


def _runs_in(path: Path) -> list[Path]:
    def started(run: Path) -> tuple[float, str]:
        times = [(run / name).lstat().st_mtime for name in FILES if (run / name).exists()]
        return (min(times, default=0.0), run.name)

    try:
        return sorted((p for p in path.iterdir() if p.is_dir() and is_run(p)), key=started)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None


def _ordered(records: Iterable[dict[str, Any]], missing: list[str]) -> list[dict[str, Any]]:
    """Each round once, the last that was written; doubles and gaps are said."""
    rounds: dict[int, dict[str, Any]] = {}
    doubled: dict[int, None] = {}
    for record in records:
        if record["round"] in rounds:
            doubled[record["round"]] = None
        rounds[record["round"]] = record
    if doubled:
        where = _these("round", [t + 1 for t in sorted(doubled)])
        verb = "are" if len(doubled) > 1 else "is"
        missing.append(f"{where} {verb} recorded more than once: the last record counts")
    order = sorted(rounds)
    gaps = [(a + 1, b - 1) for a, b in zip([-1, *order], order, strict=False) if b > a + 1]
    if gaps:
        # Counted from 1; a gap may be of any size.
        named = [f"{a + 1}" if a == b else f"{a + 1} to {b + 1}" for a, b in gaps[:NAMED]]
        many = sum(b - a + 1 for a, b in gaps)
        more = f" and {len(gaps) - NAMED} more gaps" if len(gaps) > NAMED else ""
        word = "round" if many == 1 else "rounds"
        missing.append(f"{word} {', '.join(named)}{more} not recorded, or damaged")
    return [rounds[t] for t in order]


def _state(story: Story) -> list[str]:
    """How far the run is, if it is not at its end; and a summary that says something else."""
    done, planned = len(story.rounds), story.planned
    if story.summary is None:
        if story.complete:
            damaged = os.path.lexists(story.folder / "summary.json")  # which was said
            return [] if damaged else ["there is no summary.json: the result is that of the rounds"]
        of = f" of {planned}" if planned else ""
        return [f"the run is not finished, rounds recorded: {done}{of}"]
    told = story.summary.get("rounds")
    if told != done:
        return [f"summary.json is of {_shown(told)} rounds, {done} can be read: it counts"]
    return []


def _counts(raw: Any) -> np.ndarray | None:
    """A table of counts, or None for anything else."""
    if not isinstance(raw, list):
        return None
    try:
        found = np.array(raw, dtype=float)
    except (ValueError, TypeError, OverflowError):
        return None
    usable = found.ndim == 2 and found.size > 0 and bool(np.isfinite(found).all())
    return found if usable and found.min() >= 0 and found.max() < 1e15 else None


def _these(what: str, numbers: list[int]) -> str:
    """
    >>> _these("line", [3]), _these("round", [1, 2, 5])
    ('line 3', 'rounds 1, 2, 5')
    """
    shown = ", ".join(map(str, numbers[:NAMED]))
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _absent(path: Path) -> str:
    there = os.path.lexists(path)
    return f"{path.name} is not a file" if there else f"there is no {path.name}"


def _shown(value: Any) -> str:
    return text(json.dumps(value)[:40]) if isinstance(value, int | float | str) else "no number of"


def _short(error: Exception) -> str:
    return text(str(error) or type(error).__name__, 120)
