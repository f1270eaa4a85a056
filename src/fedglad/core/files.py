"""Files that are whole or not there, whatever happens while they are written."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes to a temporary file, syncs it, renames it: the file is whole or not there."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def leftovers(folder: Path) -> list[Path]:
    """What a process that was killed while it wrote here has left."""
    return [path for path in folder.glob(".*") if _TEMPORARY.fullmatch(path.name)]


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Generator[Path]:
    """A temporary file to write to; it takes the place of `path` if all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes sure that a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
