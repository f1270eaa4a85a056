"""The one reader of a run's folder, finished or not, damaged or not; it loads no torch.

    run = Run(folder)
    run.config, run.summary, run.rounds()  # strict: a damaged file is a RunError
    run.read()  # tolerant: a RunView, with sentences on what is missing or damaged

`run.read()` may be called again and again: of rounds.jsonl it reads only what is new.
"""

import json
import math
import os
import shutil
import sys
import tomllib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from fedglad.core import checksums
from fedglad.records import Score
from fedglad.runs.line import NOT_NEXT, ROUNDS, Chain, Groups, clean, client_id, number, parse, text
from fedglad.runs.parts import PACKED, Part, found, opened, read_lines, round_of
from fedglad.runs.scores import score_of
from fedglad.runs.twins import fits, is_entry

ROUNDS_FILE = "rounds.jsonl"
FILES = ("config.toml", ROUNDS_FILE, "summary.json")
"""One of them makes a folder a run's."""

CONTROL_FILE = "control.json"
CLIENT_SCORES = "client_scores.jsonl"
"""The scores of single clients, a line for each round in which they were tested."""

MODELS = tuple(f"{which}.safetensors" for which in ("model", "averaged", "best", "best_averaged"))
"""The models that a finished run has, as far as it has them."""

BEST = "best"
"""Where the best models up to a checkpoint lie."""

WRITTEN = ("config.toml", "labels.json", ROUNDS_FILE, CLIENT_SCORES, "summary.json", *MODELS)
WRITTEN_INTO = ("checkpoints", "memories", "rounds", BEST)
"""All that a run writes into its folder, but its log: files, and folders."""

BULK = ("tensors", "groups", "clients")
"""The fields that are most of a round's record."""

CHANGED = "config.toml was changed after the run wrote it: its checksum does not match"
NAMED = 8  # round numbers in a sentence
TAIL = 64  # bytes before the last line read, which tell whether the file is still the same


T = TypeVar("T")


class RunError(RuntimeError):
    """A run that cannot start, go on or be read; the message says what to do."""


@dataclass(frozen=True)
class Lines:
    """The lines of rounds.jsonl, or of another such file, up to the first that is damaged.

    `damaged` is the number of that line, counted from 1 in the file or part `name`, and `wrong`
    says what is wrong with it; `cut_off` says that it is the last and has no end, so that a crash,
    or a run that is writing it, explains it. `sealed` is how many of the good ones have a checksum.
    """

    records: list[Any]
    sealed: int = 0
    damaged: int | None = None
    wrong: str = ""
    cut_off: bool = False
    name: str = ROUNDS_FILE

    @property
    def damage(self) -> str:
        """A sentence on the damaged line, and on what follows it; empty if there is nothing."""
        if self.damaged is None or self.cut_off:
            return ""
        return f"{self.name} is damaged: line {self.damaged} {self.wrong}"


class _Pass:
    """One pass over the lines of a file and of its parts, up to the first that is damaged.

    `end` is then the same as `Lines` without records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = Lines([], name=path.name)

    def __iter__(self) -> Iterator[Any]:
        chain = Chain()
        held: list[Any] = []  # the last record waits for what the next line says of it
        last: Part | None = None
        before = self.path.name, 0
        with opened(self.path) as parts:
            for part, number, line, wrong in _numbered(parts):
                where, trusted = (part.name, number), chain.last_sealed
                record = None
                if not wrong:
                    record, wrong = chain.read(line.removesuffix(b"\n"))
                cut_off = bool(wrong) and not part.packed and not line.endswith(b"\n")
                expected = last.last + 1 if last else 0
                if part is not last and (lost := _lost(part, record, expected, wrong, chain)):
                    wrong = f"{NOT_NEXT}: {lost}"
                elif wrong == NOT_NEXT and not trusted:  # it is the line before that was changed
                    held, where, cut_off = [], before, False
                    wrong = "is not the one that the next line was written after"
                if wrong:
                    name, number = where
                    self.end = Lines([], chain.sealed, number, wrong, cut_off, name)
                    break
                yield from held
                held, before, last = [record], where, part
            else:
                self.end = Lines([], chain.sealed, name=self.path.name)
        yield from held


def _numbered(parts: Iterable[Part]) -> Iterator[tuple[Part, int, bytes, str]]:
    """Each line with its part and its number there; as the last one, that it cannot be read."""
    for part in parts:
        number = 0
        try:
            for number, line in enumerate(part.lines(), start=1):
                yield part, number, line, ""
        except PACKED as error:
            yield part, number + 1, b"", f"cannot be unpacked ({text(str(error), 80)})"
            return


def _lost(part: Part, record: Any, expected: int, wrong: str, chain: Chain) -> str:
    """Which rounds are missing before the first line of a part; empty if it does not say so."""
    first = part.first if part.packed else round_of(record) or 0
    unchained = not wrong and not chain.last_sealed and expected > 0
    if first <= expected or not (wrong == NOT_NEXT or unchained):
        return ""
    return (
        f"{_rounds(expected + 1, first)} before it {'are' if first > expected + 1 else 'is'} gone"
    )


def _rounds(first: int, last: int) -> str:
    """
    >>> _rounds(11, 20), _rounds(3, 3)
    ('rounds 11 to 20', 'round 3')
    """
    return f"rounds {first} to {last}" if last > first else f"round {first}"


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as far as its folder can be read, at one moment."""

    folder: Path
    config: Mapping[str, Any]  # config.toml as it is, {} if it cannot be read
    rounds: tuple[dict[str, Any], ...]  # in their order, each once, every field of its type
    summary: Mapping[str, Any] | None  # None if there is none that can be read
    labels: np.ndarray | None  # each client's samples of each class (client, class), if known
    missing: tuple[str, ...]  # sentences on what is not there or damaged
    # The score of every single client that was tested, when that was done last.
    client_scores: Mapping[int | str, float] = field(default_factory=dict[int | str, float])

    @property
    def name(self) -> str:
        """The folder's name."""
        return text(self.folder.resolve().name) or "/"

    @property
    def score(self) -> Score:
        """The metric that its task is judged by."""
        return score_of(self.rounds, self.summary)

    @property
    def planned(self) -> int | None:
        """How many rounds the run was to have, where that is known."""
        rounds = self.config.get("rounds")
        if (self.summary or {}).get("stopped"):  # before the last of them
            rounds = None
        if not isinstance(rounds, int) or isinstance(rounds, bool) or not 0 < rounds < ROUNDS:
            rounds = (self.summary or {}).get("rounds")
        return int(whole) if (whole := number(rounds, 1, ROUNDS)) else None

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
    """The lines of rounds.jsonl and of its parts that were read so far.

    Lines are counted over all parts; `offset` is in the part that is read, and `starts` has the
    number of lines before each part up to it.
    """

    lines: int = 0
    offset: int = 0
    tail: bytes = b""
    starts: list[int] = field(default_factory=lambda: [0])
    before: list[str] = field(default_factory=list[str])  # signatures of parts that are read
    torn: dict[int, str] = field(default_factory=dict[int, str])  # parts of which the rest is lost
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    damaged: list[int] = field(default_factory=list[int])
    not_next: list[int] = field(default_factory=list[int])
    chain: Chain = field(default_factory=Chain)
    bad: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def forget(self) -> None:
        vars(self).update(vars(_Seen()))

    def by_part(
        self, lines: Iterable[int], names: Sequence[str]
    ) -> Iterator[tuple[str, list[int]]]:
        """The numbers of lines as they are counted within each part, by its name."""
        numbers: dict[int, list[int]] = {}
        for line in lines:
            place = bisect_left(self.starts, line) - 1
            numbers.setdefault(place, []).append(line - self.starts[place])
        return ((names[place], found) for place, found in sorted(numbers.items()))

    def goes_on(self, parts: Sequence[Part]) -> bool:
        """Whether all that was read is still there; steps over a part to which it has moved."""
        done = len(self.before)
        if len(parts) <= done or self.before != [part.signature for part in parts[:done]]:
            return False
        if not self.offset:
            return True
        with parts[done].open() as file:
            try:
                size = file.seek(0, os.SEEK_END)
                if parts[done].packed and size < self.offset:
                    # All lines but the last have moved there since, and what comes next has that.
                    self.next(parts[done].signature, lines=1, offset=self.offset - size)
                    return self.goes_on(parts)
                file.seek(self.offset - len(self.tail))
                return file.read(len(self.tail)) == self.tail
            except PACKED:
                return False

    def read(self, part: Part) -> bytes:
        """What is new in a part; half a line at its end is returned, and not kept."""
        with part.open() as file:
            file.seek(self.offset)
            for line in read_lines(file):
                if not line.endswith(b"\n"):
                    return line
                self.add(line[:-1])
                self.offset += len(line)
                self.tail = (self.tail + line)[-TAIL:] if len(line) < TAIL else line[-TAIL:]
        return b""

    def next(self, signature: str, *, lines: int = 0, offset: int = 0) -> None:
        """Goes on with the next part, of which so many lines and bytes are known already."""
        self.before.append(signature)
        self.starts.append(self.lines - lines)
        self.offset, self.tail = offset, self.tail[-offset:] if offset else b""

    def add(self, line: bytes) -> None:
        self.lines += 1
        if not line.strip():
            return
        held, wrong = self.chain.read(line)
        checked = clean(held)
        if checked is None or wrong not in ("", NOT_NEXT):
            self.damaged.append(self.lines)
            return
        if wrong:
            self.not_next.append(self.lines)
        record, bad = checked
        record["groups"] = Groups(record["groups"])
        self.records.append(record)
        for name in dict.fromkeys(bad):
            self.bad.setdefault(name, []).append(record["round"])


@dataclass(frozen=True)
class Run:
    """A folder that holds a run, or will; all that is known of it is read here.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> written = (folder / "config.toml").write_text("rounds = 3")
    >>> Run(folder).config, Run(folder).rounds(), Run(folder).summary  # before its first round
    ({'rounds': 3}, [], None)
    """

    folder: Path
    _seen: _Seen = field(init=False, repr=False, compare=False, default_factory=_Seen)

    # -------------------------------------------------------------------------------- strict

    @property
    def config(self) -> dict[str, Any] | None:
        """config.toml as plain TOML, so that no class of it has to be here; None if not there."""
        try:
            config = tomllib.loads((self.folder / "config.toml").read_text("utf-8"))
            if not config:
                raise ValueError("it is empty")
            return config
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError, OSError) as error:
            raise RunError(f"{self.folder}/config.toml cannot be read: {error}") from None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, once the run is finished."""
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        try:
            data = path.read_bytes()
            summary = json.loads(data.decode("utf-8"))
            if not isinstance(summary, dict):
                raise ValueError(f"{summary!r} is no summary")
            if checksums.verify(data) == "damaged":
                raise ValueError("its checksum does not match")
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{path} is damaged: {error}. Remove that file and go on with --resume, which "
                "writes it anew"
            ) from None
        summary = cast(dict[str, Any], summary)
        summary.pop("crc", None)
        return summary

    def lines(self, name: str = ROUNDS_FILE, *, without: Collection[str] = ()) -> Lines:
        """The lines of rounds.jsonl in one reading, and where they end; none if it is not there.

        Fields that are left out take no memory: `tensors`, `groups` and `clients` are most of it.
        """
        reading = _Pass(self.folder / name)
        records = [_slim(record, without) for record in reading]
        return replace(reading.end, records=records)

    def client_scores(self) -> list[dict[str, Any]]:
        """The scores of single clients by round: `round`, `ids`, `scores`, `averaged_scores`."""
        return objects(self.lines(CLIENT_SCORES).records)

    def rounds(self, *, without: Collection[str] = ()) -> list[dict[str, Any]]:
        """The rounds recorded so far, up to a line that is damaged or was cut off by a crash.

        Fields that are left out take no memory: `tensors`, `groups` and `clients` are most of it.
        """
        return list(self.iter_rounds(without=without))

    def count(self) -> int:
        """How many rounds are recorded."""
        return sum(1 for _ in self.iter_rounds())

    def iter_rounds(self, *, without: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """The same one after the other, for who needs each of them once."""
        for record in _Pass(self.folder / ROUNDS_FILE):
            if not isinstance(record, dict):
                return
            yield _slim(cast(dict[str, Any], record), without)

    @property
    def score(self) -> Score:
        """The metric that its task is judged by; accuracy, where nothing else is recorded."""
        return score_of(self.iter_rounds(without=BULK), self.summary)

    @property
    def config_changed(self) -> bool:
        """Whether config.toml is another one than the run wrote, by its checksum."""
        try:
            return checksums.verify((self.folder / "config.toml").read_bytes()) == "damaged"
        except OSError:
            return False

    @property
    def skipped(self) -> str:
        """That at least half of the rounds were skipped, and why the last one; empty if not."""
        return skipped_of(self.summary or {}, self.rounds(without=BULK))

    def controls(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The entries of control.json that are true of a run with this configuration."""
        return [one for one in self.control_of() if fits(one, config)]

    def control_of(self) -> list[dict[str, Any]]:
        """The entries of control.json; none of a damaged one, which a sweep writes anew."""
        return list(filter(is_entry, _inside(self.folder / CONTROL_FILE, "control_of") or []))

    def clients(self) -> int | None:
        """How many clients labels.json has, or the newest checkpoint of a federation."""
        if counts := _inside(self.folder / "labels.json", "counts"):
            return len(counts)
        paths = sorted((self.folder / "checkpoints").glob("*.json"), reverse=True)
        parts = ("transport", "sampler")  # the second in checkpoints of the first edition
        names = (_inside(path, part, "nodes", "names") for path in paths for part in parts)
        return next((len(known) for known in names if known), None)

    def sizes(self) -> dict[str, int] | None:
        """Each parameter tensor's number of elements, by the newest checkpoint or the summary."""
        from safetensors import SafetensorError, safe_open

        for path in sorted((self.folder / "checkpoints").glob("*.safetensors"), reverse=True):
            try:
                with safe_open(path, "np") as file:  # no tensor is read
                    layout = json.loads(file.metadata()["fedglad"])["layout"]
                return {
                    name: math.prod(shape) for name, shape, _, kind in layout if kind != "buffer"
                }
            except (SafetensorError, ValueError, OSError, KeyError, TypeError):
                continue
        sizes = (self.summary or {}).get("sizes")  # of a run that kept no state
        known = isinstance(sizes, dict) and all(isinstance(size, int) for size in sizes.values())
        return cast(dict[str, int], sizes) if sizes and known else None

    def clear(self) -> None:
        """Removes what a run writes, and nothing else; the log, which may be locked, is emptied."""
        if (self.folder / "log.txt").is_file():
            os.truncate(self.folder / "log.txt", 0)
        for name in WRITTEN:
            (self.folder / name).unlink(missing_ok=True)
        for name in WRITTEN_INTO:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    # ------------------------------------------------------------------------------ tolerant

    def read(self) -> RunView:
        """The run as it is now, in any state; RunError if the folder is none of a run."""
        require_run(self.folder)
        missing: list[str] = []
        config = self._config(missing)
        summary = None
        if os.path.lexists(self.folder / "summary.json"):
            so = "the result is worked out from the rounds"
            summary = self._part("summary.json", _object, missing, so)
        rounds = self._rounds(missing, waiting=summary is None)
        labels = self._part("labels.json", _counts, missing, "no label distributions can be shown")
        view = RunView(
            folder=self.folder,
            config=config,
            rounds=tuple(rounds),
            summary=summary,
            labels=labels,
            missing=(),
            client_scores=self._last_client_scores(missing, waiting=summary is None),
        )
        return replace(view, missing=(*missing, *_state(view)))

    def version(self) -> str:
        """Another one whenever a file has changed: their sizes and times."""
        parts: list[str] = []
        for name in (*FILES, CLIENT_SCORES, "labels.json"):
            try:
                stat = (self.folder / name).stat()
                parts.append(f"{stat.st_size:x}.{stat.st_mtime_ns:x}.{stat.st_ino:x}")
            except OSError:
                parts.append("-")
        parts += [f"{part.first:x}.{part.last:x}" for part in found(self.folder / ROUNDS_FILE)]
        return "_".join(parts)

    def _config(self, missing: list[str]) -> dict[str, Any]:
        so = "the settings and the seed are not known"
        data = self._part("config.toml", bytes, missing, so) or b""
        try:
            config = tomllib.loads(data.decode("utf-8"))
            if checksums.verify(data) == "damaged":
                missing.append(CHANGED)
            return config
        except (ValueError, RecursionError) as error:
            why = text(str(error) or type(error).__name__, 120)
            missing.append(f"config.toml is damaged, its settings are not known: {why}")
            return {}

    def _part(
        self, name: str, content: Callable[[bytes], T | None], missing: list[str], so: str
    ) -> T | None:
        path = self.folder / name
        held = None
        try:
            if not path.is_file():
                missing.append(f"{_absent(path)}: {so}")
                return None
            data = path.read_bytes()
            held = content(data)
            if checksums.verify(data) == "damaged" and content is not bytes:
                held = None
            if held is None:
                missing.append(f"{name} is damaged: {so}")
        except OSError as error:
            missing.append(f"{name} cannot be read ({error.strerror}): {so}")
        return held

    def _rounds(self, missing: list[str], *, waiting: bool) -> list[dict[str, Any]]:
        path = self.folder / ROUNDS_FILE
        rest, names = b"", [ROUNDS_FILE]
        try:
            rest, names = self._go_on(path)
            if not path.is_file():
                none = "no round is recorded" if len(names) == 1 else "its rounds are not known"
                missing.append(f"{_absent(path)}: {none}")
        except OSError as error:
            self._seen.forget()
            missing.append(f"rounds.jsonl cannot be read ({error.strerror})")
        seen = self._seen
        # Perhaps half a line, perhaps one without its end.
        last = _Seen(seen.lines, chain=replace(seen.chain))
        last.add(rest)
        damaged = seen.damaged + last.damaged
        if last.damaged and waiting:
            damaged.pop()
            missing.append("the last line of rounds.jsonl is half written, and left out")
        for place, why in seen.torn.items():
            many = seen.starts[place + 1] - seen.starts[place]
            after = f"after line {many}, the rest" if many else "from its start on, it"
            missing.append(f"{names[place]} is damaged {after} is left out: {why}")
        for name, numbers in seen.by_part(damaged, names):
            missing.append(f"{name} is damaged in {_these('line', numbers)}: left out")
        for name, numbers in seen.by_part(seen.not_next + last.not_next, names):
            missing.append(
                f"{name} is damaged before {_these('line', numbers)}: lines were removed, "
                "changed or moved"
            )
        for name in {**seen.bad, **last.bad}:
            rounds = [t + 1 for t in seen.bad.get(name, []) + last.bad.get(name, [])]
            where = _these("round", rounds)
            missing.append(f"{name!r} is damaged in {where}: what can be read is shown")
        return _ordered(seen.records + last.records, missing)

    def _last_client_scores(self, missing: list[str], *, waiting: bool) -> dict[int | str, float]:
        """Those of the last line that can be read; every line has the same clients."""
        path = self.folder / CLIENT_SCORES
        try:
            lines = path.read_bytes().strip().rsplit(b"\n", 2)[-2:] if path.is_file() else []
        except OSError as error:
            missing.append(f"{CLIENT_SCORES} cannot be read ({error.strerror})")
            return {}
        read = [
            None if checksums.verify(line) == "damaged" else _scores_by_client(parse(line))
            for line in reversed(lines)
        ]
        known = [scores for scores in read if scores is not None]
        half_written = waiting and (known or len(read) < 2)
        if read and read[0] is None and not half_written:
            missing.append(f"{CLIENT_SCORES} is damaged at its end: older scores are shown, if any")
        return known[0] if known else {}

    def _go_on(self, path: Path) -> tuple[bytes, list[str]]:
        """Reads from where it stopped; the part of a line at the end is returned, and not kept.

        From the start if a file is not the one it was: a run that goes on writes it anew. Beside
        it the names of all parts.
        """
        seen, rest = self._seen, b""
        with opened(path) as parts:
            if not seen.goes_on(parts):
                seen.forget()
            for part in parts[len(seen.before) :]:
                try:
                    rest = seen.read(part)
                except (*PACKED, OSError) as error:
                    if not part.packed:
                        raise
                    why = getattr(error, "strerror", None) or str(error)
                    seen.torn[len(seen.before)] = text(why, 80)
                    seen.chain.before, rest = None, b""
                if part.packed:
                    if rest:
                        seen.add(rest)
                    seen.next(part.signature)
            return rest, [part.name for part in parts]


def _scores_by_client(raw: Any) -> dict[int | str, float] | None:
    """Of one line of client_scores.jsonl; None for what is none."""
    given = cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
    ids, scores = given.get("ids"), given.get("scores")
    if not isinstance(ids, list) or not isinstance(scores, list):
        return None
    ids, scores = cast(list[Any], ids), cast(list[Any], scores)
    if len(ids) != len(scores):
        return None
    pairs = zip(map(client_id, ids), map(number, scores), strict=True)
    return {one: score for one, score in pairs if one is not None and score is not None}


# ---------------------------------------------------------------------------- which are there


def skipped_of(summary: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    """The same as `Run.skipped`."""
    skipped, many = number(summary.get("skipped")) or 0, number(summary.get("rounds")) or 0
    if not skipped or 2 * skipped < many:
        return ""
    reasons = [one.get("reason") for one in rounds if one.get("status") == "skipped"]
    why = reasons[-1] if reasons else "unknown"
    return f"{skipped:.0f} of {many:.0f} rounds were skipped: {why}"


def objects(records: list[Any]) -> list[dict[str, Any]]:
    """The records up to the first that is none."""
    others = (k for k, record in enumerate(records) if not isinstance(record, dict))
    return records[: next(others, len(records))]


def _slim(record: Any, without: Collection[str] = ()) -> Any:
    """A record without some of its fields, and with one copy of the names that all have."""
    if isinstance(record, dict):
        record = cast(dict[str, Any], record)
        for name in without:
            record.pop(name, None)
        for name in ("tensors", "groups"):
            if isinstance(rows := record.get(name), dict):
                record[name] = {sys.intern(key): row for key, row in rows.items()}
    return record


def is_run(folder: Path, files: Sequence[str] = FILES) -> bool:
    """Whether a folder has anything of a run in it."""
    return any(os.path.lexists(folder / name) for name in files)


def require_run(folder: Path) -> None:
    """Raises RunError for what is no folder, or has nothing of a run in it."""
    if not os.path.isdir(folder):
        raise RunError(no_folder(folder))
    if not is_run(folder):
        raise RunError(f"{folder} is not a run: it has no {', no '.join(FILES)}")


def run_folders(paths: Iterable[Path], files: Sequence[str] = FILES) -> list[Path]:
    """The runs' own folders; of a folder of runs, those in it in the order of their start.

    One of `files` makes a folder a run's. Each run comes once, however often it is named.
    """
    runs: dict[Path, Path] = {}
    for path in paths:
        if not os.path.isdir(path):
            raise RunError(no_folder(path))
        inside = [path] if is_run(path, files) else _runs_in(path, files)
        if not inside:
            raise RunError(
                f"{path} holds no run: there is no {', no '.join(files)} in it or one level below"
            )
        for run in inside:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def no_folder(path: Path) -> str:
    """What is wrong with a path that should be a run's folder and is none."""
    if path.is_file():
        return f"{path} is a file: give the folder of a run, or of runs"
    return f"there is no folder {path}"


def _runs_in(path: Path, files: Sequence[str]) -> list[Path]:
    def started(run: Path) -> tuple[int, str]:
        # config.toml is written once, at the start; what else is there may be older or newer.
        for name in FILES:
            try:
                return (run / name).stat().st_mtime_ns, run.name
            except OSError:
                continue
        return 0, run.name

    try:
        return sorted((p for p in path.iterdir() if p.is_dir() and is_run(p, files)), key=started)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


# ------------------------------------------------------------------------------------- details


def _inside(path: Path, *keys: str) -> list[Any] | None:
    """A list inside a JSON file; None if it is not there."""
    try:
        data = path.read_bytes()
        if checksums.verify(data) == "damaged":
            return None
        value: Any = json.loads(data.decode("utf-8"))
        for key in keys:
            value = value[key]
    except (ValueError, RecursionError, OSError, KeyError, TypeError):
        return None
    return cast(list[Any], value) if isinstance(value, list) else None


def _ordered(records: Sequence[dict[str, Any]], missing: list[str]) -> list[dict[str, Any]]:
    """Each round once, the last that was written; doubles and gaps are noted as missing."""
    rounds = {record["round"]: record for record in records}
    times = Counter(record["round"] for record in records)
    if doubled := [t + 1 for t in sorted(times) if times[t] > 1]:
        where = _these("round", doubled)
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


def _state(view: RunView) -> list[str]:
    """How far the run is, if it is not at its end; and a summary of another number of rounds."""
    done, planned = len(view.rounds), view.planned
    if view.summary is None:
        if view.complete:
            damaged = os.path.lexists(view.folder / "summary.json")  # which is noted
            return [] if damaged else ["there is no summary.json: the result is that of the rounds"]
        of = f" of {planned}" if planned else ""
        return [f"the run is not finished, rounds recorded: {done}{of}"]
    rounds = view.summary.get("rounds")
    if rounds == done:
        return []
    plain = isinstance(rounds, int | float | str)
    shown = text(json.dumps(rounds)[:40]) if plain else "no number of"
    return [f"summary.json is of {shown} rounds, {done} can be read: it counts"]


def _object(data: bytes) -> dict[str, Any] | None:
    held = parse(data)
    if not isinstance(held, dict):
        return None
    held = cast(dict[str, Any], held)
    held.pop("crc", None)
    return held


def _counts(data: bytes) -> np.ndarray | None:
    """The table of labels.json, or None for anything else."""
    try:
        counts = np.array(parse(data)["counts"], dtype=float)
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    usable = counts.ndim == 2 and counts.size > 0 and bool(np.isfinite(counts).all())
    return counts if usable and counts.min() >= 0 and counts.max() < 1e15 else None


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
