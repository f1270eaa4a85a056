"""Reading what is wanted of a .gz, .xz, tar or zip.

Nothing is extracted by an archive's own paths: the members that a recipe names are read, and
written side by side. An archive that holds a path out of it, a link or a device is refused.
"""

import gzip
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from fedglad.data.sources import DataError, File

Readable = IO[bytes] | gzip.GzipFile | lzma.LZMAFile

CHUNK = 1 << 20
SINGLE: dict[str, Callable[[Path], Readable]] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, RuntimeError),  # the second by zipfile, for what it cannot read
)


def unpack(pack: File, path: Path, folder: Path, sizes: dict[str, int | None]) -> None:
    """Writes the wanted members of a pack into a folder, none longer than its known size."""
    wanted = set(pack.members or (pack.name,))
    try:
        for member, content in _members(pack, path):
            if member in wanted:
                wanted.remove(member)
                name = PurePosixPath(member).name
                with (folder / name).open("wb") as target:
                    _copy(content, target, name, sizes.get(name))
    except DAMAGED as error:
        raise DataError(f"{pack.name} is damaged or cut off: {error}") from None
    if wanted:
        raise DataError(f"{pack.name} lacks {', '.join(sorted(wanted))}")


def _members(pack: File, path: Path) -> Iterator[tuple[str, Readable]]:
    """What a pack holds: itself, or what is in it."""
    alone = SINGLE.get(Path(pack.name).suffix)
    if not pack.members:
        with path.open("rb") as file:
            yield pack.name, file
    elif alone and ".tar" not in Path(pack.name).suffixes:
        with alone(path) as content:
            yield pack.members[0], content
    else:
        yield from walk(pack.name, path)


def walk(name: str, path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in a tar or zip with their paths; all is gone through, and must be harmless."""
    if name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                _refuse(name, info.filename, plain=kind in (0, stat.S_IFREG, stat.S_IFDIR))
                if not info.is_dir():
                    with archive.open(info) as content:
                        yield info.filename, content
    else:
        with tarfile.open(path, "r|*") as archive:
            for info in archive:
                _refuse(name, info.name, plain=info.isreg() or info.isdir())
                if content := archive.extractfile(info):
                    yield info.name, content


def _refuse(name: str, member: str, *, plain: bool) -> None:
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", member):
        raise DataError(f"{name} is refused: its member {member!r} leads out of it")
    if not plain:
        raise DataError(f"{name} is refused: its member {member!r} is a link or a device")


def _copy(source: Readable, target: IO[bytes], name: str, size: int | None) -> None:
    left = size
    while chunk := source.read(CHUNK):
        if left is not None and (left := left - len(chunk)) < 0:
            raise DataError(f"{name} has more than its {size:,} bytes: another file")
        target.write(chunk)
