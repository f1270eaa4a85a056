"""The cache of data sets: each fetched and prepared once, then opened as memory-mapped arrays.

    CACHE/mnist/v1/       meta.json and an .npy file an array; whole, or not there
    CACHE/20news/derived/ what was made of it, such as token ids: a folder each, of the same kind
    CACHE/mnist/part/     downloads that broke, to go on with
    CACHE/mnist/tmp.*/    what is being made; removed by the next one who has the lock
    CACHE/mnist/lock      held while something of the set is made

CACHE is `$FEDGLAD_CACHE`, or the user's cache folder.
"""

import errno
import fcntl
import hashlib
import json
import logging
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

from fedglad.data.fetch import Work, check_wish, expanded, fetch
from fedglad.data.sources import DataError, Progress, Recipe, find

VARIABLE = "FEDGLAD_CACHE"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set in the cache; `new` if it was fetched just now."""

    name: str
    folder: Path
    source: str
    arrays: dict[str, dict[str, Any]]
    meta: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    new: bool = False

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(array["bytes"] for array in self.arrays.values())


class Quiet:
    """Progress for nobody: what is worth a line goes to the log."""

    def begin(self, what: str, total: int | None) -> None:
        """Not shown."""

    def advance(self, count: int) -> None:
        """Not shown."""

    def say(self, text: str) -> None:
        """To the log."""
        logging.getLogger("fedglad").warning("%s", text)


def cache_folder() -> Path:
    """Where all sets lie."""
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
    progress = progress or Quiet()
    if (entry := _whole(name)) is not None:
        try:
            return _open(entry)
        except DataError as damage:
            progress.say(f"{damage}; getting it again")
            return _open(get(name, folder=folder, force=True, progress=progress))
    return _open(get(name, folder=folder, progress=progress))


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
    recipe = find(name)
    check_wish(recipe, folder, via)
    return _get(recipe, folder, via, progress or Quiet(), force=force)


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
    progress = progress or Quiet()
    base = get(name, progress=progress)
    meta = {"what": what, "settings": dict(settings), "of": _contents(base)}
    home = _folder(find(name)).parent
    folder = home / "derived" / _label(what, settings)

    def there(*, say: bool = False) -> dict[str, np.ndarray] | None:
        """What is there, if it is whole, and of this content."""
        try:
            found = _entry(name, folder) if folder.is_dir() else None
            same = found and all(found.meta.get(key) == value for key, value in meta.items())
            return _open(found) if found and same else None
        except DataError as damage:
            if say:
                progress.say(f"{damage}; making it again")
            return None

    if (arrays := there()) is not None:
        return arrays
    given = load(name, progress=progress)
    with _making(name, home, progress):
        if (arrays := there(say=True)) is not None:
            return arrays  # by another process, meanwhile
        made = Path(tempfile.mkdtemp(prefix="tmp.", dir=home))
        try:
            progress.begin(f"{what} of {name}", None)
            (made / "entry").mkdir()
            _fill(made / "entry", make(given), meta)
            folder.parent.mkdir(exist_ok=True)
            _put(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return _open(_entry(name, folder))


def _contents(entry: Entry) -> dict[str, str]:
    return {array: told["sha256"] for array, told in entry.arrays.items()}


def _label(what: str, settings: Mapping[str, Any]) -> str:
    """A folder's name for people, made unique by a checksum."""
    told = {key: key if value is True else str(value) for key, value in settings.items() if value}
    words = [what, *(value for value in told.values() if len(value) < 40)]
    key = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))[:80], key])


def entry_of(name: str) -> Entry | None:
    """A set in the cache, its files' sizes checked; None if it is not there."""
    folder = _folder(find(name))
    return _entry(name, folder) if folder.is_dir() else None


def _entry(name: str, folder: Path) -> Entry:
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        entry = Entry(
            name=name,
            folder=folder,
            source=meta.get("source", ""),
            arrays=meta["arrays"],
            meta=meta,
        )
        for array, told in entry.arrays.items():
            size = (folder / f"{array}.npy").stat().st_size
            if size != told["bytes"]:
                raise ValueError(f"{array}.npy has {size:,} bytes and not {told['bytes']:,}")
        if not entry.arrays:
            raise ValueError("meta.json names no array")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{name} is damaged in the cache: {error!s} ({folder})") from None
    return entry


def check(name: str) -> list[str]:
    """What is wrong with a set in the cache, all of its content read; nothing if it is good."""
    folder = _folder(find(name))
    if not folder.is_dir():
        return [f"{name} is not in the cache"]
    derived = sorted((folder.parent / "derived").glob("*/"))
    return [problem for place in (folder, *derived) for problem in _check(name, place)]


def _check(name: str, folder: Path) -> list[str]:
    try:
        entry = _entry(name, folder)
        _open(entry)
    except DataError as damage:
        return [str(damage)]
    wrong: list[str] = []
    for array, told in entry.arrays.items():
        path = entry.folder / f"{array}.npy"
        found = _sha256(path)
        if found != told["sha256"]:
            wrong.append(f"{path} has the wrong checksum: sha256 {found}, was {told['sha256']}")
    return wrong


def _open(entry: Entry) -> dict[str, np.ndarray]:
    try:
        return {
            array: np.asarray(np.load(entry.folder / f"{array}.npy", mmap_mode="c"))
            for array in entry.arrays
        }
    except (OSError, ValueError) as error:
        raise DataError(f"{entry.name} is damaged in the cache: {error} ({entry.folder})") from None


def _get(
    recipe: Recipe, folder: Path | None, via: str | None, progress: Progress, *, force: bool
) -> Entry:
    home = _folder(recipe).parent
    if not force and (entry := _whole(recipe.name)) is not None:
        return entry  # without the lock, so that a cache may be read-only
    with _making(recipe.name, home, progress):
        if not force and (entry := _whole(recipe.name, progress)) is not None:
            return entry  # by another process, meanwhile
        _make(recipe, home, folder, via, progress)
        if force:  # which asks for all of it anew
            shutil.rmtree(home / "derived", ignore_errors=True)
        entry = entry_of(recipe.name)
        assert entry is not None
        return replace(entry, new=True)


@contextmanager
def _making(name: str, home: Path, progress: Progress) -> Generator[None]:
    """Holds the lock, what a killed process has left cleared away; says what cannot be written."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _lock(home / "lock", name, progress):
            for left in home.glob("tmp.*"):
                shutil.rmtree(left)
            yield
    except OSError as error:
        way_out = "make room, or choose" if error.errno in FULL else "choose"
        raise DataError(
            f"{name} could not be written to {home}: {error.strerror or error}. The cache "
            f"is as it was: {way_out} another folder with {VARIABLE}"
        ) from error


def _whole(name: str, progress: Progress | None = None) -> Entry | None:
    """A set in the cache, unless it is damaged, which is said."""
    try:
        return entry_of(name)
    except DataError as damage:
        if progress:
            progress.say(f"{damage}; getting it again")
        return None


def _make(
    recipe: Recipe, home: Path, folder: Path | None, via: str | None, progress: Progress
) -> None:
    """Fetches and prepares a set in a temporary folder, of which a part then becomes the entry."""
    made, part = Path(tempfile.mkdtemp(prefix="tmp.", dir=home)), home / "part"
    try:
        work = Work(raw=made / "raw", downloads=part, scratch=made / "scratch", progress=progress)
        for path in (work.raw, work.downloads, work.scratch, made / "entry"):
            path.mkdir(exist_ok=True)
        source = fetch(recipe, work, folder=folder, via=via)
        shutil.rmtree(work.scratch)
        progress.begin(f"preparing {recipe.name}", None)
        _fill(made / "entry", recipe.prepare(work.raw), _told(recipe, source))
        _put(made, _folder(recipe))
        shutil.rmtree(part)
    except OSError as error:
        if error.errno in FULL:
            shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if part.is_dir() and not any(part.iterdir()):
            part.rmdir()


def _told(recipe: Recipe, source: str) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "format": recipe.format,
        "source": source,
        "raw": {file.name: file.checksum for file in recipe.files},
    }


def _fill(folder: Path, arrays: Mapping[str, np.ndarray], told: Mapping[str, Any]) -> None:
    """Writes an entry."""
    meta = {
        **told,
        "versions": {"fedglad": version("fedglad"), "numpy": np.__version__},
        "arrays": {name: _write(folder / f"{name}.npy", array) for name, array in arrays.items()},
    }
    with (folder / "meta.json").open("w") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _put(made: Path, target: Path) -> None:
    """An entry that was made takes its place, and what was there goes."""
    if target.exists():
        target.rename(made / "old")
    (made / "entry").rename(target)
    _sync(target.parent)


def _folder(recipe: Recipe) -> Path:
    return cache_folder() / recipe.name / f"v{recipe.format}"


def _write(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Writes an array as .npy; returns what is told of it."""
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        # np.save leaves the writing to C, which does not say that the disk is full.
        file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(path: Path, name: str, progress: Progress) -> Generator[None]:
    """One process at a time; another one that comes meanwhile waits."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"{name} is being fetched by another process: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: the last one to finish is kept
            pass
        yield
