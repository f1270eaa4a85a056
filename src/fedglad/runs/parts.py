"""The lines of rounds.jsonl, of which the older ones may lie in compressed parts.

While a run writes, what rounds.jsonl holds moves now and then to a part of it:

    rounds/000000-000411.jsonl.gz  rounds/000412-000823.jsonl.gz  rounds.jsonl

named by the rounds of its first and its last line. All lines one after the other are those of one
file, and so is the chain of their checksums. The last line always stays in rounds.jsonl, so that
the chain shows if the part before it is gone.

A part counts if it ends before rounds.jsonl begins. That makes moving lines to a part, and back,
one step: the part is written first, and counts as soon as rounds.jsonl has been replaced.
"""

import gzip
import re
import shutil
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from fedglad.core import checksums, files
from fedglad.runs.line import parse

LIMIT = 16_000_000
"""Bytes of rounds.jsonl beyond which its lines move to a part."""

LONGEST = 1 << 28
"""Bytes of a line that are read at once: no file makes a reader's memory grow beyond it."""

PACKED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What is raised by a compressed file that is damaged."""

_PART = re.compile(r"([0-9]{6,12})-([0-9]{6,12})\.jsonl\.gz")


@dataclass(frozen=True)
class Part:
    """A compressed part of a file, or as the last one (`packed` is False) the file itself."""

    path: Path
    name: str  # as sentences call it: "rounds/000000-000411.jsonl.gz"
    packed: bool = True
    first: int = 0  # the rounds of its lines, as its name says
    last: int = 0
    _file: BinaryIO | None = field(default=None, compare=False)

    @cached_property
    def signature(self) -> str:
        """Another one if the file is."""
        stat = self.path.stat()
        return f"{self.name}.{stat.st_size:x}.{stat.st_mtime_ns:x}.{stat.st_ino:x}"

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """Its bytes, uncompressed, from the first one."""
        if self._file:
            self._file.seek(0)
            yield self._file
        else:
            with gzip.open(self.path) as file:
                yield cast(BinaryIO, file)

    def lines(self) -> Iterator[bytes]:
        """Each with its end, if it has one."""
        with self.open() as file:
            yield from read_lines(file)


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """From where the file stands; each with its end, if it has one."""
    return iter(lambda: file.readline(LONGEST), b"")


def parts_folder(path: Path) -> Path:
    """Where the parts of a file lie."""
    return path.with_suffix("")


def found(path: Path) -> list[Part]:
    """All compressed parts that are there, whether they count or not."""
    folder = parts_folder(path)
    try:
        named = [(_PART.fullmatch(one.name), one) for one in folder.iterdir() if one.is_file()]
    except OSError:  # there is none
        return []
    every = [
        Part(one, f"{folder.name}/{one.name}", True, int(match[1]), int(match[2]))
        for match, one in named
        if match
    ]
    return sorted(every, key=lambda part: (part.first, part.last))


@contextmanager
def opened(path: Path) -> Generator[list[Part]]:
    """The parts that count, and last the file itself, as they were at one moment.

    The file is opened before its parts are listed, and whoever moves lines replaces it: so none is
    met twice or missed, whatever a run does meanwhile.
    """
    # A pipe would keep us waiting for ever.
    with open(path, "rb") if path.is_file() else BytesIO() as file:
        every = found(path)
        first = _first_round(file) if every else None
        counted = every if first is None else [part for part in every if part.last < first]
        yield [*counted, Part(path, path.name, False, first or 0, _file=file)]


def stale(path: Path) -> list[Part]:
    """The parts that do not count: what a killed process has left."""
    with opened(path) as parts:
        return [part for part in found(path) if part not in parts]


def remove_stale(path: Path) -> None:
    """Removes what a killed process has left; for the one who has the folder's lock."""
    _remove(stale(path))
    folder = parts_folder(path)
    if folder.is_dir():
        for left in files.leftovers(folder):
            left.unlink()


def move(path: Path, first: int, last: int, begin: int) -> None:
    """Moves the lines of the rounds from `first` to `last`, all before the byte `begin`, to a part.

    For the one who writes the file, while no line of it is half written.
    """
    folder = parts_folder(path)
    folder.mkdir(exist_ok=True)
    with open(path, "rb") as file:
        with (
            files.replacing(folder / f"{first:06d}-{last:06d}.jsonl.gz") as temporary,
            open(temporary, "wb") as raw,
            gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,  # the same lines, the same file
        ):
            for line in read_lines(file):
                packed.write(line)
                if file.tell() >= begin:
                    break
        files.sync(path.parent)  # which has a new folder
        with files.replacing(path) as temporary:
            temporary.write_bytes(file.read())


def cut(path: Path, done: int) -> None:
    """Leaves the first lines alone, wherever they lie, so many of them; at any kill no less.

    Where that ends within a part, its lines move back to the file.
    """
    remove_stale(path)
    with opened(path) as parts:
        place, left = _end_of(parts, done)
        part, after = parts[place], parts[place + 1 : -1]
        if part.packed:
            files.write_text(path, "")  # first all that is behind the end, the last of it first
            _remove(after)
        with files.replacing(path) as temporary, open(temporary, "wb") as file:
            for line in islice(part.lines(), left):
                file.write(line.removesuffix(b"\n") + b"\n")
        if part.packed:
            _remove([part])


def _end_of(parts: list[Part], done: int) -> tuple[int, int]:
    """Which part has the last of so many lines, and how many of them are in it."""
    for place, part in enumerate(parts[:-1]):
        there = sum(1 for _ in islice(part.lines(), done))
        if there == done:
            return place, done
        done -= there
    return len(parts) - 1, done


def copy_lines(source: Path, target: Path) -> None:
    """The lines of a file of another folder, which has the same parts then."""
    shutil.rmtree(parts_folder(target), ignore_errors=True)
    with opened(source) as parts:
        for part in parts:
            place = parts_folder(target) / part.path.name if part.packed else target
            place.parent.mkdir(exist_ok=True)
            with files.replacing(place) as temporary:
                if part.packed:
                    shutil.copyfile(part.path, temporary)
                else:
                    with part.open() as file, open(temporary, "wb") as copied:
                        shutil.copyfileobj(file, copied)


def _remove(parts: Iterable[Part]) -> None:
    """The last first, so that at no moment one is missing between others."""
    for part in sorted(parts, key=lambda part: part.first, reverse=True):
        part.path.unlink(missing_ok=True)
        files.sync(part.path.parent)


def round_of(record: Any) -> int | None:
    """The round of a record, if it has one."""
    t = cast(dict[str, Any], record).get("round") if isinstance(record, dict) else None
    return t if isinstance(t, int) and not isinstance(t, bool) else None


def _first_round(file: BinaryIO) -> int | None:
    """That of the first line that is good."""
    for line in read_lines(file):
        if checksums.verify(line) != "damaged" and (t := round_of(parse(line))) is not None:
            return t
    return None
