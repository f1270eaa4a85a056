"""Files that are whole or not there, whatever happens while they are written."""

import fcntl
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_NEW = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_OLD = re.compile(r"\..+\.\d+\.tmp")  # of earlier versions, which did not lock them


def write_text(path: Path, text: str) -> None:
    """Writes to a temporary file, syncs it, renames it: the file is whole or not there."""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def leftovers(folder: Path) -> list[Path]:
    """What a killed process has left; for the one who has the folder's lock."""
    names = ((path, path.name) for path in folder.glob(".*"))
    return [path for path, name in names if _NEW.fullmatch(name) or _OLD.fullmatch(name)]


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Generator[Path]:
    """A temporary file to write to; it takes the place of `path` if all went well.

    Its name cannot be guessed, and nothing may be there already: a link that somebody has laid is
    not followed. It is locked while it is written, so that the next one who writes a durable `path`
    knows which temporary files a killed process has left, and removes them.
    """
    if durable:
        _remove_abandoned(path)
    temporary, handle = _new(path)
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def sync(path: Path) -> None:
    """Makes sure that a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _new(path: Path) -> tuple[Path, int]:
    """An empty temporary file beside `path`, and the handle that holds its lock."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, handle
        os.close(handle)  # another process took it for abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files of `path` whose writer is gone."""
    start = f".{path.name}."
    for name in os.listdir(path.parent):
        if not (name.startswith(start) and _NEW.fullmatch(name)):
            continue
        with suppress(OSError):  # somebody writes it, or it is not ours
            handle = os.open(path.with_name(name), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_name(name).unlink()
            finally:
                os.close(handle)
