"""Whether all of a run's folder is as it was written: every file by its checksum, without torch."""

import json
import reprlib
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fedglad.core import checksums, files
from fedglad.core.memory import as_pairs, path_of, problem_of
from fedglad.runs.line import parse
from fedglad.runs.models import file_of, named
from fedglad.runs.parts import PACKED, Part, opened, stale
from fedglad.runs.reader import (
    BEST,
    BULK,
    CLIENT_SCORES,
    CONTROL_FILE,
    MODELS,
    ROUNDS_FILE,
    Lines,
    Run,
    RunError,
    objects,
    require_run,
)
from fedglad.runs.summary import disagreement

State = Literal["good", "no checksum", "damaged", "missing", "left behind"]
STATES = get_args(State)

WRONG = ("damaged", "missing")
STORES = ("memories", "memories/updates", "memories/estimator", "memories/transform")
"""What is kept of clients."""


@dataclass(frozen=True)
class CheckedFile:
    """A file of a run, and how it is; `detail` says more, where there is more to say.

    | state | meaning |
    |---|---|
    | `good` | as it was written |
    | `no checksum` | can be read, and is from before there were checksums |
    | `damaged` | cut off, changed, or not what belongs there |
    | `missing` | another file says that it must be there |
    | `left behind` | by a write that was killed; the next start removes it |
    """

    name: str
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """All files of a run's folder."""

    folder: Path
    files: tuple[CheckedFile, ...]

    @property
    def good(self) -> bool:
        """Whether nothing is damaged or missing."""
        return not any(file.state in WRONG for file in self.files)

    @property
    def verdict(self) -> str:
        """One line: how many files are in which state."""
        counts = Counter(file.state for file in self.files)
        return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        files = [asdict(file) for file in self.files]
        return {"folder": str(self.folder), "good": self.good, "files": files}


def check(folder: Path) -> Check:
    """Reads every file of a run's folder, finished or not; changes nothing.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> run = execute(*load("digits", {"rounds": 1}), out=pathlib.Path(tempfile.mkdtemp()))
    >>> check(run.folder).good  # every file is as it was written
    True
    """
    require_run(folder)
    return Check(folder, tuple(_files(Run(folder))))


def _files(run: Run) -> Iterator[CheckedFile]:
    folder = run.folder
    yield _small(folder, "config.toml")
    for name in ("labels.json", CONTROL_FILE):  # not every run has them
        if (folder / name).exists():
            yield _small(folder, name)
    states = sorted((folder / "checkpoints").glob("*.json"))
    rounds = max((int(path.stem) for path in states if path.stem.isdigit()), default=0)
    yield from _records(run, rounds)
    yield from _client_scores(run)
    if (folder / "summary.json").exists():
        yield from _summary(run)
    # Two may name the same best model.
    yield from dict.fromkeys(file for path in states for file in _checkpoint(run, path))
    places = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for left in (path for place in places for path in files.leftovers(place)):
        yield CheckedFile(str(left.relative_to(folder)), "left behind", "by a killed write")


def _small(folder: Path, name: str) -> CheckedFile:
    """A JSON or TOML file."""
    if not (folder / name).is_file():
        return CheckedFile(name, "missing")
    try:
        data = (folder / name).read_bytes()
        state = checksums.verify(data)
        if not (json if name.endswith(".json") else tomllib).loads(data.decode("utf-8")):
            raise ValueError("it is empty")
    except (ValueError, RecursionError, OSError) as error:
        return CheckedFile(name, "damaged", str(error))
    return CheckedFile(name, state, "its checksum does not match" if state == "damaged" else "")


def _records(run: Run, needed: int) -> Iterator[CheckedFile]:
    """rounds.jsonl and its parts; `needed` is the round of the last checkpoint, to be in them."""
    path = run.folder / ROUNDS_FILE
    try:
        lines = run.lines(without=BULK)
        with opened(path) as parts:
            yield from _parts(parts[:-1], lines)
            for part in stale(path):
                yield CheckedFile(part.name, "left behind", f"{ROUNDS_FILE} has its rounds")
            broken = lines.damage and lines.name in [part.name for part in parts[:-1]]
            damage = _damage(parts[-1]) if broken else ""
    except OSError as error:
        yield CheckedFile(ROUNDS_FILE, "damaged", str(error))
        return
    if not path.is_file():
        begun = needed or lines.records or (run.folder / "summary.json").exists()
        yield CheckedFile(ROUNDS_FILE, "missing" if begun else "good", "no round is recorded")
    elif broken:
        detail = damage or f"what comes before it is damaged ({lines.name})"
        yield CheckedFile(ROUNDS_FILE, "damaged" if damage else "good", detail)
    else:
        yield _rounds(lines, needed)


def _parts(parts: Sequence[Part], lines: Lines) -> Iterator[CheckedFile]:
    """The compressed parts of rounds.jsonl; `lines` are read up to the first that is damaged."""
    read = True
    for part in parts:
        detail = "" if read else _damage(part)
        if lines.damage and lines.name == part.name:
            detail, read = f"line {lines.damaged} {lines.wrong}", False
        state = "damaged" if detail else "good"
        yield CheckedFile(part.name, state, detail or f"rounds: {part.first} to {part.last}")


def _damage(part: Part) -> str:
    """What is wrong with a part by itself; empty if nothing is."""
    try:
        for number, line in enumerate(part.lines(), start=1):
            if checksums.verify(line) == "damaged" or not isinstance(parse(line), dict):
                return f"line {number} has a wrong checksum, or is not JSON"
    except PACKED as error:
        return f"it cannot be unpacked ({error})"
    return ""


def _rounds(lines: Lines, needed: int) -> CheckedFile:
    """rounds.jsonl, by all lines."""
    name = ROUNDS_FILE
    records = objects(lines.records)
    numbers = [record.get("round") for record in records]
    place = next((k for k, number in enumerate(numbers) if number != k), len(lines.records))
    count = f"rounds: {len(numbers)}"
    if lines.damage:
        what = lines.damage.removeprefix(f"{name} is damaged: ")
        return CheckedFile(name, "damaged", f"{what}; {len(numbers)} rounds come before it")
    if place < len(lines.records):
        return CheckedFile(name, "damaged", f"line {place + 1} is not that of round {place}")
    if len(numbers) < needed:
        return CheckedFile(name, "damaged", f"{count}; a checkpoint is of {needed}")
    if lines.cut_off:
        count += "; a last line is half written, by a run that goes on or was killed"
    if lines.sealed < len(numbers):
        return CheckedFile(
            name, "no checksum", f"{count}; {len(numbers) - lines.sealed} without a checksum"
        )
    return CheckedFile(name, "good", count)


def _client_scores(run: Run) -> Iterator[CheckedFile]:
    """client_scores.jsonl of a run that has it, or should by its records."""
    try:
        rounds = run.iter_rounds(without=BULK)
        needed = [r["round"] for r in rounds if "client_scores" in r and "round" in r]
        if not (run.folder / CLIENT_SCORES).is_file():
            if needed:
                yield CheckedFile(CLIENT_SCORES, "missing", "rounds.jsonl names its scores")
            return
        lines = run.lines(CLIENT_SCORES)
    except OSError as error:
        yield CheckedFile(CLIENT_SCORES, "damaged", str(error))
        return
    there = [line.get("round") for line in objects(lines.records)]
    if lines.damage:
        what = lines.damage.removeprefix(f"{CLIENT_SCORES} is damaged: ")
        yield CheckedFile(CLIENT_SCORES, "damaged", what)
    elif (run.folder / "summary.json").exists() and there != needed:
        yield CheckedFile(CLIENT_SCORES, "damaged", "its rounds are others than rounds.jsonl has")
    else:
        cut = "; a last line is half written, by a run that goes on or was killed"
        detail = f"tested rounds: {len(there)}{cut if lines.cut_off else ''}"
        state: State = "good" if lines.sealed == len(there) else "no checksum"
        yield CheckedFile(CLIENT_SCORES, state, detail)


def _summary(run: Run) -> Iterator[CheckedFile]:
    """summary.json, by its checksum and by the records, and the models that it names."""
    checked = _small(run.folder, "summary.json")
    if checked.state == "damaged":
        yield checked
        return
    models: dict[str, str] = {}
    try:
        summary = run.summary or {}
        wrong = disagreement(summary, run.rounds(without=BULK))
        models = _models(summary)
    except (RunError, OSError, ValueError, TypeError) as error:
        wrong = str(error)
    if wrong:
        yield CheckedFile("summary.json", "damaged", wrong)
    else:
        none = "" if models else "it names no model: fedglad export takes a checkpoint's"
        yield CheckedFile("summary.json", checked.state, none)
    for name, crc in models.items():
        yield _tensors(run.folder, name, crc, "summary.json")


def _models(summary: Mapping[str, Any]) -> dict[str, str]:
    """The checksums of the models that a summary names; raises for what cannot be one."""
    named = dict(summary.get("models", {}))
    if not all(name in MODELS and isinstance(crc, str) for name, crc in named.items()):
        raise ValueError(f"its models are {reprlib.repr(named)}")
    return named


def _tensors(folder: Path, name: str, crc: str | None, named_by: str) -> CheckedFile:
    """A file of tensors; `crc` is the checksum that another file names it by."""
    try:
        found = checksums.verify_tensors(folder / name)[1]
    except FileNotFoundError:
        return CheckedFile(name, "missing", f"{named_by} names it" if crc else "")
    except (ValueError, OSError) as error:
        return CheckedFile(name, "damaged", str(error))
    if crc not in (None, found):
        return CheckedFile(name, "damaged", f"it is not that of {named_by}")
    return CheckedFile(name, "good")


def _checkpoint(run: Run, path: Path) -> Iterator[CheckedFile]:
    """A checkpoint's small file, its tensors, and the memories that it needs."""
    name = str(path.relative_to(run.folder))
    small = _small(run.folder, name)
    saved: dict[str, Any] = {}
    if small.state != "damaged":
        try:
            saved = json.loads(path.read_text("utf-8"))
            if saved["round"] != int(path.stem):
                detail = f"it is that of round {saved['round']}"
                small = CheckedFile(name, "damaged", detail)
        except (ValueError, OSError, LookupError, TypeError) as error:
            small, saved = CheckedFile(name, "damaged", repr(error)), {}
    yield small
    tensors = path.with_suffix(".safetensors")
    name = str(tensors.relative_to(run.folder))
    yield _tensors(run.folder, name, saved.get("tensors"), "its .json file")
    try:
        best = named(saved.get("best", {}))
    except (ValueError, LookupError, TypeError) as error:
        yield CheckedFile(str(path.relative_to(run.folder)), "damaged", str(error))
        best = {}
    for which, (done, crc) in best.items():
        yield _tensors(run.folder, f"{BEST}/{file_of(which, done)}", crc, f"checkpoint {path.stem}")
    yield from _memories(run, path.stem, saved.get("memories", {}))


def _memories(run: Run, checkpoint: str, stores: Any) -> Iterator[CheckedFile]:
    """Each memory that is not good, and how many are."""
    try:
        needed = {place: as_pairs(stores[place]) for place in STORES if place in stores}
    except (ValueError, TypeError, AttributeError) as error:
        yield CheckedFile(f"checkpoints/{checkpoint}.json", "damaged", f"its memories: {error}")
        return
    for place, pairs in needed.items():
        good = 0
        for client, version in pairs:
            path = path_of(run.folder / place, client, version)
            problem = problem_of(path, client, version)
            good += not problem
            if problem:
                state, _, detail = problem.partition(": ")
                known: State = "missing" if state == "missing" else "damaged"
                detail = detail or f"checkpoint {checkpoint} needs it"
                yield CheckedFile(f"{place}/{path.parent.name}/{path.name}", known, detail)
        if good:
            yield CheckedFile(f"{place} of checkpoint {checkpoint}", "good", f"memories: {good}")
