"""What a data set is made of, and where its files are to be had: one file a set.

A set is a `Recipe`: its official raw files, each with its checksum; the places that have them, in
the order in which they are asked; and `prepare`, which makes arrays of the raw files. Whatever the
place, only files with the official checksums are prepared. `fedglad.data.fetch` has the means to
get the files, `fedglad.data.store` the cache. Word vectors and encoders come in the same way.
"""

import difflib
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

RECIPES = {
    "mnist": "fedglad.data.sources.mnist:RECIPE",
    "cifar10": "fedglad.data.sources.cifar10:RECIPE",
    "20news": "fedglad.data.sources.twentynews:RECIPE",
    "agnews": "fedglad.data.sources.agnews:RECIPE",
    "agnews-76k": "fedglad.data.sources.agnews:PART",
    "glove-6b-50d": "fedglad.data.sources.glove:GLOVE_50",
    "glove-6b-100d": "fedglad.data.sources.glove:GLOVE_100",
    "glove-6b-100d-341k": "fedglad.data.sources.glove:GLOVE_100_PART",
    "glove-6b-300d": "fedglad.data.sources.glove:GLOVE_300",
    "minilm": "fedglad.data.sources.minilm:RECIPE",
}


class DataError(ValueError):
    """A data set that cannot be had or stored; the message says why and what to do."""


class Progress(Protocol):
    """Who is told how it goes."""

    def begin(self, what: str, total: int | None) -> None:
        """Something starts that takes `total` bytes, if that is known."""
        ...

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        ...

    def say(self, text: str) -> None:
        """Something worth a line: a source that failed, another process that is waited for."""
        ...


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that is known by its checksum, "md5:…" or "sha256:…"; empty if none is published.

    A raw file without one is taken from packs alone that are verified, then converted.
    """

    name: str
    checksum: str = ""
    size: int | None = None
    other_names: tuple[str, ...] = ()

    def problem(self, path: Path) -> str:
        """Why the file at `path` is not this one; empty if it is."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            return f"{self.name} has {size:,} bytes and not {self.size:,}: cut off, or another file"
        if self.checksum:
            kind, _, expected = self.checksum.partition(":")
            with path.open("rb") as file:
                # Some machines forbid md5 but for uses like this one: the sums are the publishers'.
                made = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
            found = made.hexdigest()
            if found != expected:
                return (
                    f"{self.name} has the wrong checksum: {kind} {found}, expected {expected}; "
                    "damaged, or another file"
                )
        return ""


@dataclass(frozen=True, kw_only=True)
class Pack(File):
    """A file as a place offers it: a raw file as it is, or a .gz, .xz, tar or zip that holds some.

    `members` says which members are wanted, by their full path in the archive, and how they are
    called outside; a .gz or .xz has one, by any path. `convert` makes the raw files from them, in
    the folder where they lie: such a pack needs a checksum, as it is decoded before its content
    can be verified.
    """

    members: Mapping[str, str] = field(default_factory=dict[str, str])
    convert: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        if self.convert and not self.checksum:
            raise ValueError(f"{self.name} is decoded, so it needs a checksum")


class Place(Protocol):
    """Where packs are to be had; `fedglad.data.fetch` has the kinds."""

    kind: ClassVar[str]
    """What `--via` calls it."""

    @property
    def label(self) -> str:
        """What people read of it."""
        ...

    @property
    def by_hand(self) -> str:
        """How a person gets the packs where there is a network."""
        ...

    @property
    def packs(self) -> tuple[Pack, ...]:
        """Which together hold all the raw files."""
        ...

    def pull(self, pack: Pack, downloads: Path, scratch: Path, progress: Progress) -> Path:
        """The pack's file. What is in `downloads` is kept for the next try, `scratch` is not."""
        ...


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
    module, _, attribute = RECIPES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


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
