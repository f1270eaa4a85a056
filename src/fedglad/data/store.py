"""The cache of data sets: each fetched and prepared once, then opened as memory-mapped arrays.

    CACHE/mnist/v1/       meta.json and an .npy file an array; whole, or not there
    CACHE/20news/derived/ what was made of it, such as token ids: a folder each, of the same kind
    CACHE/mnist/part/     downloads that broke, to be resumed
    CACHE/mnist/tmp.*/    what is being made; removed by the next process that has the lock
    CACHE/mnist/old.v1/   what is being replaced; put back by that process if nothing took its place
    CACHE/mnist/lock      held while something of the set is made

CACHE is `$FEDGLAD_CACHE`, or the user's cache folder.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.core import files
from fedglad.data.fetch import check_request, expanded, fetch
from fedglad.data.sources import DataError, Progress, Recipe, Work, find

VARIABLE = "FEDGLAD_CACHE"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set in the cache; `new` if it was fetched just now.

    `arrays` has the size, shape and checksum of each array, `content` the arrays themselves.
    """

    name: str
    folder: Path
    source: str
    arrays: dict[str, dict[str, Any]]
    meta: dict[str, Any] = field(repr=False)
    content: dict[str, np.ndarray] = field(repr=False, compare=False)
    new: bool = False

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(array["bytes"] for array in self.arrays.values())


def cache_folder() -> Path:
    """The folder of all sets."""
    if given := os.environ.get(VARIABLE):
        return expanded(given, VARIABLE).absolute()
    from platformdirs import user_cache_path

    return user_cache_path("fedglad", appauthor=False)


def load(
    name: str, *, folder: Path | None = None, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """The set's arrays, fetched first if they are not there: `train_x`, `train_y`, `test_x`, …

    Images are uint8 (n, channels, height, width), labels int64. The arrays are memory-mapped
    copy-on-write: opening them reads nothing but headers, processes share their pages, and what
    is written to them stays in the process. Sizes are checked; `check` reads the content.
    """
    return get(name, folder=folder, progress=progress).content


def get(
    name: str,
    *,
    folder: Path | None = None,
    via: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Entry:
    """Makes sure that a set is in the cache, from a folder or in one way alone if that is named.

    A set that is there is left as it is, unless it is damaged or `force` asks for a new copy, which
    takes its place once it is complete.
    """
    recipe, progress = find(name), progress or Progress()
    check_request(recipe, folder, via)
    target = _folder(recipe)
    if not force and (entry := _intact(name, target)):
        return entry  # without the lock, so that a cache may be read-only
    with _making(name, target.parent, progress) as made:
        if not force and (entry := _intact(name, target, progress, "getting")):
            return entry  # by another process, meanwhile
        part = target.parent / "part"
        work = Work(raw=made / "raw", downloads=part, scratch=made / "scratch", progress=progress)
        for path in (work.raw, work.downloads, work.scratch):
            path.mkdir(exist_ok=True)
        try:
            source = fetch(recipe, work, folder=folder, via=via)
            shutil.rmtree(work.scratch)
            progress.begin(f"preparing {name}", None)
            raw = {file.name: file.checksum for file in recipe.files}
            origin = {"name": recipe.name, "format": recipe.format, "source": source, "raw": raw}
            _put(made, target, recipe.prepare(work.raw), origin)
            shutil.rmtree(part)
        except OSError as error:
            if error.errno in FULL:
                shutil.rmtree(part, ignore_errors=True)
            raise
        finally:
            if part.is_dir() and not any(part.iterdir()):
                part.rmdir()
        if force:  # which asks for all of it anew
            shutil.rmtree(target.parent / "derived", ignore_errors=True)
        return replace(_entry(name, target), new=True)


def derive(
    name: str,
    what: str,
    settings: Mapping[str, Any],
    make: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    *,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Arrays that `make` makes of a set's arrays: once, then opened like those of a set.

    What was made with other settings lies beside; what was made of another content of the set, or
    is damaged, is made again.
    """
    progress = progress or Progress()
    base = get(name, progress=progress)
    contents = {array: about["sha256"] for array, about in base.arrays.items()}
    meta = {"what": what, "settings": dict(settings), "of": contents}
    target = base.folder.parent / "derived" / _label(what, settings)

    def current(progress: Progress | None = None) -> Entry | None:
        entry = _intact(name, target, progress, "making")
        return entry if entry and entry.meta | meta == entry.meta else None

    if entry := current():
        return entry.content
    with _making(name, base.folder.parent, progress) as made:
        if entry := current(progress):
            return entry.content  # by another process, meanwhile
        progress.begin(f"{what} of {name}", None)
        target.parent.mkdir(exist_ok=True)
        _put(made, target, make(base.content), meta)
        return _entry(name, target).content


def _label(what: str, settings: Mapping[str, Any]) -> str:
    """A folder's name for people, made unique by a checksum."""
    values = [key if value is True else str(value) for key, value in settings.items() if value]
    words = "-".join([what, *(value for value in values if len(value) < 40)])
    key = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', words)[:80]}-{key}"


def entry_of(name: str) -> Entry | None:
    """A set in the cache, its files' sizes checked; None if it is not there."""
    folder = _folder(find(name))
    return _entry(name, folder) if folder.is_dir() else None


def _entry(name: str, folder: Path) -> Entry:
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        arrays = meta["arrays"]
        for array, about in arrays.items():
            size = (folder / f"{array}.npy").stat().st_size
            if size != about["bytes"]:
                raise ValueError(f"{array}.npy has {size:,} bytes and not {about['bytes']:,}")
        if not arrays:
            raise ValueError("meta.json names no array")
        return Entry(
            name=name,
            folder=folder,
            source=meta.get("source", ""),
            arrays=arrays,
            meta=meta,
            content={
                array: np.asarray(np.load(folder / f"{array}.npy", mmap_mode="c"))
                for array in arrays
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{name} is damaged in the cache: {error!s} ({folder})") from None


def _intact(
    name: str, folder: Path, progress: Progress | None = None, doing: str = ""
) -> Entry | None:
    """What is in a folder of the cache, unless it is damaged, which is reported."""
    try:
        return _entry(name, folder) if folder.is_dir() else None
    except DataError as damage:
        if progress:
            progress.report(f"{damage}; {doing} it again")
        return None


def check(name: str) -> list[str]:
    """What is wrong with a set in the cache, all of its content read; nothing if it is good."""
    folder = _folder(find(name))
    if not folder.is_dir():
        return [f"{name} is not in the cache"]
    wrong: list[str] = []
    derived = sorted((folder.parent / "derived").glob("*/"))
    for place in (folder, *(path for path in derived if not path.name.startswith("old."))):
        try:
            for array, about in _entry(name, place).arrays.items():
                path, expected = place / f"{array}.npy", about["sha256"]
                if (sha256 := _sha256(path)) != expected:
                    wrong.append(f"{path} has the wrong checksum: sha256 {sha256}, was {expected}")
        except DataError as damage:
            wrong.append(str(damage))
    return wrong


@contextmanager
def _making(name: str, home: Path, progress: Progress) -> Generator[Path]:
    """Holds a set's lock, and gives a temporary folder; another process meanwhile waits.

    What a killed process has left is removed. What cannot be written is a DataError.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.report(f"{name} is being fetched by another process: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: the last one to finish is kept
                pass
            for left in home.glob("tmp.*"):
                shutil.rmtree(left)
            for old in [*home.glob("old.*"), *(home / "derived").glob("old.*")]:
                target = old.with_name(old.name.removeprefix("old."))
                if target.exists():
                    shutil.rmtree(old)
                else:  # a process was killed between the two renames of `_put`
                    old.rename(target)
            made = Path(tempfile.mkdtemp(prefix="tmp.", dir=home))
            try:
                yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        way_out = "make room, or choose" if error.errno in FULL else "choose"
        raise DataError(
            f"{name} could not be written to {home}: {error.strerror or error}. The cache "
            f"is as it was: {way_out} another folder with {VARIABLE}"
        ) from error


def _put(
    made: Path, target: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> None:
    """Writes an entry in the temporary folder `made`; then it replaces what is at `target`."""
    folder = made / "entry"
    folder.mkdir()
    versions = {"fedglad": version("fedglad"), "numpy": np.__version__}
    abouts = {name: _write(folder / f"{name}.npy", array) for name, array in arrays.items()}
    whole = {**meta, "versions": versions, "arrays": abouts}
    files.write_text(folder / "meta.json", json.dumps(whole, indent=2))
    old = target.with_name(f"old.{target.name}")
    if target.exists():
        target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    files.sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _folder(recipe: Recipe) -> Path:
    return cache_folder() / recipe.name / f"v{recipe.format}"


def _write(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Writes an array as .npy; returns what meta.json has of it."""
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        # np.save leaves the writing to C, which does not say that the disk is full.
        file.write(array.reshape(-1).view(np.uint8).data)
    files.sync(path)
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
