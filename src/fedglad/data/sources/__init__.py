"""What a data set is made of, and where its files are to be had: one file a set.

A set is a `Recipe`: its official raw files, each with its checksum; the places that have them, in
the order in which they are asked; and `prepare`, which makes arrays of the raw files. Whatever the
place, only files with the official checksums are prepared. `fedglad.data.fetch` has the means to
get the files, `fedglad.data.store` the cache. Word vectors and encoders are fetched so too.
"""

import difflib
import hashlib
import importlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

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

    | field | meaning |
    |---|---|
    | `checksum` | "md5:…" or "sha256:…"; empty if none is published |
    | `members` | of an archive: the wanted members by their full paths, and their names outside; |
    | | a .gz or .xz has one, by any path |
    | `convert` | makes the raw files of the members, in the folder where they lie |

    A file that is converted needs a checksum, as it is decoded before its content can be verified.
    A raw file without one is taken only from such files.
    """

    name: str
    checksum: str = ""
    size: int | None = None
    other_names: tuple[str, ...] = ()
    members: Mapping[str, str] = field(default_factory=dict[str, str])
    convert: Callable[[Path], None] | None = None

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
class Place(ABC):
    """Where files are to be had that together hold all the raw files."""

    kind: ClassVar[str]
    """What `--via` calls it."""

    packs: tuple[File, ...]

    @property
    @abstractmethod
    def label(self) -> str:
        """Its name in messages."""

    @property
    @abstractmethod
    def by_hand(self) -> str:
        """How a person gets the packs where there is a network."""

    @abstractmethod
    def pull(self, pack: File, work: Work) -> Path:
        """Gets one of the packs: into `work.downloads`, to be resumed, or `work.scratch`."""


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


def text_arrays(
    part: str, texts: Iterable[str | bytes], labels: Iterable[int]
) -> dict[str, np.ndarray]:
    """The arrays that a text set has for "train" or "test": bytes, bounds and labels."""
    content, at = joined(texts)
    labels = np.array(list(labels), dtype=np.int64)
    return {f"{part}_text": content, f"{part}_at": at, f"{part}_y": labels}


def of_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays in an .npz file."""
    with np.load(path) as arrays:
        return dict(arrays)
