"""Token ids: against transformers, by hand, and made once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_support as small

from fedglad.data import encoders, store, tokens
from fedglad.data.sources import DataError, parted

TEXTS = [
    "The puck, the GOAL; a goal. Pucks!",
    "orbits of the Moon: 7 caf\u00e9s, ice\tice   edu\n\nann@ice.edu",
    "",
    "\u6c37 \u0000 \ufffd x" + "y" * 200,
    "the " * 50,
]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    return small.register(monkeypatch, tmp_path)


def test_ids_by_hand():
    rows, pad = encoders.tokenise("minilm", ["The pucks orbit", "zebra"], 8)
    # [CLS] the puck ##s orb ##it [SEP] = 2 5 6 19 8 9 3; [CLS] [UNK] [SEP] = 2 1 3
    assert [*rows] == [[2, 5, 6, 19, 8, 9, 3], [2, 1, 3]]
    assert pad == 0
    rows, _ = encoders.tokenise("minilm", ["The pucks orbit"], 5)
    assert [*rows] == [[2, 5, 6, 19, 3]]  # cut before the end that frames it


@pytest.mark.parametrize("length", [3, 8, 40])
def test_ids_are_those_of_transformers(data: Path, length: int):
    from transformers import BertTokenizer

    vocabulary = {word: k for k, word in enumerate(small.VOCABULARY)}
    theirs: Any = BertTokenizer(vocab=vocabulary, do_lower_case=True)
    expected = theirs(TEXTS, truncation=True, max_length=length)["input_ids"]
    rows, _ = encoders.tokenise("minilm", TEXTS, length)
    assert [*rows] == expected


def test_a_folder_with_a_tokenizer_is_a_source(tmp_path: Path):
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "tokenizer.json").write_text(small.tokenizer_json())
    told = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}
    (saved / "tokenizer_config.json").write_text(json.dumps(told))
    mine, _ = encoders.tokenise("minilm", TEXTS, 12)
    theirs, pad = encoders.tokenise(str(saved), TEXTS, 12)
    assert [*theirs] == [*mine]
    assert pad == 0
    before = encoders.identity(str(saved))
    (saved / "tokenizer_config.json").write_text(json.dumps(told | {"do_lower_case": False}))
    assert encoders.identity(str(saved)) != before


def test_a_source_that_is_none_is_told(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"no tokenizer 'no/such': .*without a hub there are the presets"
    ):
        encoders.tokenise("no/such", TEXTS, 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no tokenizer: none of tokenizer.json, "):
        encoders.identity(str(tmp_path / "empty"))


def test_texts_are_tokenised_in_chunks_without_a_seam(monkeypatch: pytest.MonkeyPatch):
    whole = [*encoders.tokenise("minilm", TEXTS, 12)[0]]
    monkeypatch.setattr(encoders, "CHUNK", 2)
    assert [*encoders.tokenise("minilm", TEXTS, 12)[0]] == whole


def test_arrays_are_ids_lengths_and_labels():
    found = tokens.load("20news", tokenizer="minilm", length=16)
    raw = store.load("20news")
    for part in ("train", "test"):
        texts = parted(raw[f"{part}_text"], raw[f"{part}_at"])
        rows = [*encoders.tokenise("minilm", texts, 16)[0]]
        assert found[f"{part}_length"].tolist() == [len(row) for row in rows]
        assert found[f"{part}_x"].tolist() == [row + [0] * (16 - len(row)) for row in rows]
        assert np.array_equal(found[f"{part}_y"], raw[f"{part}_y"])
        assert found[f"{part}_x"].dtype == found[f"{part}_length"].dtype == np.int32
        assert found[f"{part}_y"].dtype == np.int64


def test_words_by_hand(monkeypatch: pytest.MonkeyPatch):
    # Of the training posts' bodies and headers: from, ann, ice, edu, subject 4 each; goal 3 in the
    # subjects, 2 in 99, 2 in 100: 7; puck 2 in 99, 1 in 100, 1 in 6: 4; orbit 1 in a subject, 2 in
    # 5, 4 in 6: 7; "from" is a stop word; ann once more, in the signature: 5; the others once.
    assert tokens.vocabulary("20news") == ["goal", "orbit", "ann"]
    found = tokens.load("20news", tokenizer="words", length=4)
    assert found["test_x"].tolist() == [[3, 0, 0, 0], [0, 0, 0, 0], [3, 2, 2, 1]]
    assert found["test_length"].tolist() == [1, 0, 4]  # of the last: ann orbit orbit goal … orbit


def test_stripped_posts_have_words_of_their_own():
    # Without headers, quotes and signatures: goal 2, orbit 6.
    assert tokens.vocabulary("20news", strip=True) == ["orbit"]
    found = tokens.load("20news", tokenizer="words", length=4, strip=True)
    assert found["test_x"].tolist() == [[0] * 4, [0] * 4, [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("post", "expected"),
    [
        ("From: a\n\nBody.", "Body."),
        ("From: a\n\nBody.\n\n-- \nAnn\n", "Body.\n"),  # the line of hyphens is the last such line
        ("From: a\n\nOne.\n\nTwo.", "One."),  # a last paragraph is taken for a signature
        ("From: a\n\nIn article <1> b@c writes:\n> x\n| y\nz", "z"),
        ("From: a\n\nHe said: no\nyes > no", "yes > no"),
        ("no blank line", ""),
        ("From: a\n\n\n\n", "\n\n"),
    ],
)
def test_headers_signatures_and_quotes_are_taken_off(post: str, expected: str):
    assert tokens.stripped(post) == expected


def test_after_tokenising_a_forked_process_is_not_warned(monkeypatch: pytest.MonkeyPatch):
    import os

    assert "TOKENIZERS_PARALLELISM" not in os.environ
    tokens.load("20news", tokenizer="minilm", length=8)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokens.load("20news", tokenizer="minilm", length=9)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"  # as the user has it
