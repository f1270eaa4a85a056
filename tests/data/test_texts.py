"""The text sets as simulations meet them: their settings, their ids, and the real texts."""

import math
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_support as small
import torch
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.data import encoders, store, texts, tokens
from fedglad.data.sources import DataError, parted
from fedglad.data.texts import SETS, AGNews, AGNews76k, TwentyNews


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.register(monkeypatch, tmp_path)
    monkeypatch.setattr(TwentyNews, "samples", 4)
    return tmp_path / "cache"


@pytest.mark.parametrize("cls", SETS.values())
def test_settings_are_those_of_every_partitioned_set(cls: type[texts.Texts]):
    found = cls()
    assert (found.clients, found.partition, found.alpha, found.seed) == (100, "label-skew", 0.1, 0)
    assert (found.tokenizer, found.length) == ("minilm", 128)
    with pytest.raises(ValueError, match=r"\(length=2\): must be 3 or more"):
        cls(length=2)
    with pytest.raises(ValueError, match=r"\(tokenizer=''\): name one, such as minilm"):
        cls(tokenizer="")
    with pytest.raises(ValueError, match="did you mean 'dirichlet'"):
        cls(partition="dirichlt")
    assert found.samples is not None
    with pytest.raises(ValueError, match="one training sample each"):
        cls(clients=found.samples + 1)


def test_a_part_has_a_name_of_its_own():
    assert {name: cls.source for name, cls in SETS.items()} == {name: name for name in SETS}
    assert (AGNews.source, AGNews.samples) == ("agnews", 120_000)
    assert (AGNews76k.source, AGNews76k.samples) == ("agnews-76k", 76_306)


def test_what_a_set_needs_in_the_cache():
    assert TwentyNews().needs == ("20news", "minilm")
    assert AGNews76k(tokenizer="words").needs == ("agnews-76k",)
    assert AGNews(tokenizer="distilbert-base-uncased").needs == ("agnews",)


@pytest.mark.parametrize("tokenizer", ["minilm", "words"])
def test_a_federation_of_ids(cache: Path, tokenizer: str):
    settings = TwentyNews(tokenizer=tokenizer, length=8, clients=2, partition="iid")
    data = settings.load_federation()
    arrays = settings.arrays()
    assert (data.clients, data.classes) == (2, 2)
    x, y = data.test()
    assert x.shape == (3, 8)
    assert (x.dtype, y.dtype) == (torch.int32, torch.int64)
    assert np.array_equal(x.numpy(), arrays["test_x"])
    owned = torch.cat([data.client(k)[0] for k in range(2)])
    assert sorted(owned.tolist()) == sorted(arrays["train_x"].tolist())
    assert data.prepare(x, training=True) is x


def test_strip_is_told_from_as_distributed(cache: Path):
    settings = TwentyNews(tokenizer="words", length=8, clients=2)
    kept, bare = (replace(settings, strip=strip).arrays() for strip in (False, True))
    assert kept["train_length"].tolist() != bare["train_length"].tolist()
    assert texts.vocabulary("20news") == ["goal", "orbit", "ann"]
    assert texts.vocabulary("20news", strip=True) == ["orbit"]
    with pytest.raises(DataError, match="'mnist' has no words: choose from 20news, agnews, agnew"):
        texts.vocabulary("mnist")


def test_the_second_opening_tokenises_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = TwentyNews(length=8, clients=2).arrays()

    def never(*args: Any) -> Any:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(encoders, "tokenise", never)
    monkeypatch.setattr(tokens, "parted", never)
    monkeypatch.delenv("FEDGLAD_DATA")
    again = TwentyNews(length=8, clients=2).arrays()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert isinstance(again["train_x"].base, np.memmap)


def test_data_show_gets_what_is_needed_and_says_so(cache: Path):
    args = ["data", "show", "20news", "--clients", "2", "--partition", "iid", "--no-png"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "2 clients × 2 classes, 2 samples each" in result.stdout
    said = result.stderr.splitlines()
    assert said[-1] == "20news: tokens of 20news"
    assert "minilm: preparing minilm" in said
    assert not CliRunner().invoke(app, args).stderr


def test_data_show_of_what_is_no_data_set(cache: Path):
    result = CliRunner().invoke(app, ["data", "show", "glove-6b-50d"])
    assert result.exit_code == 2
    assert "unknown data 'glove-6b-50d'" in result.stderr


# ------------------------------------------------------------------------------------ for real

needs_folder = pytest.mark.skipif(
    not os.environ.get("FEDGLAD_DATA"), reason="FEDGLAD_DATA names no folder with the texts"
)


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    shutil.rmtree(tmp_path / "cache")


def posts(part: str) -> tuple[list[str], np.ndarray]:
    arrays = store.load("20news")
    return parted(arrays[f"{part}_text"], arrays[f"{part}_at"]), arrays[f"{part}_y"]


def features(post: str) -> Counter[str]:
    """scikit-learn's default: words of two characters or more."""
    return Counter(re.findall(r"\b\w\w+\b", post.lower()))


@pytest.mark.slow
@needs_folder
def test_posts_are_those_that_scikit_learn_documents(real: None):
    train, _ = posts("train")
    # "Dimensionality 130107" of fetch_20newsgroups_vectorized
    assert len(set().union(*(features(post) for post in train))) == 130_107
    # With headers, footers and quotes removed: "11314 documents - 13.782MB (training set)",
    # "7532 documents - 8.262MB (test set)"
    for part, megabytes in (("train", 13.782), ("test", 8.262)):
        sizes = [len(tokens.stripped(post).encode()) for post in posts(part)[0]]
        assert round(sum(sizes) / 1e6, 3) == megabytes


@pytest.mark.slow
@needs_folder
def test_naive_bayes_scores_what_scikit_learn_documents(real: None):
    """TfidfVectorizer and MultinomialNB(alpha=0.01) on four groups: macro F1 0.88213592…"""
    groups = [0, 1, 14, 19]  # alt.atheism, comp.graphics, sci.space, talk.religion.misc
    (train, train_y), (test, test_y) = (chosen(part, groups) for part in ("train", "test"))
    df = Counter(word for counts in train for word in counts)
    index = {word: k for k, word in enumerate(df)}
    assert (len(train), len(index)) == (2034, 34_118)  # as documented
    idf = np.array([math.log((1 + len(train)) / (1 + n)) + 1 for n in df.values()])

    def weights(counts: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
        known = {index[word]: n for word, n in counts.items() if word in index}
        columns = np.fromiter(known, dtype=np.int64)
        values = np.fromiter(known.values(), dtype=np.float64) * idf[columns]
        return columns, values / (np.linalg.norm(values) or 1)

    sums = np.full((4, len(index)), 0.01)
    for counts, label in zip(train, train_y, strict=True):
        columns, values = weights(counts)
        sums[label, columns] += values
    likelihood = np.log(sums / sums.sum(axis=1, keepdims=True))
    prior = np.log(np.bincount(train_y) / len(train_y))
    found = [prior + likelihood[:, c] @ v for c, v in map(weights, test)]
    guess = np.argmax(found, axis=1)
    f1 = [
        2 * ((guess == k) & (test_y == k)).sum() / ((guess == k).sum() + (test_y == k).sum())
        for k in range(4)
    ]
    assert np.mean(f1) == pytest.approx(0.88213592402729568, abs=1e-8)


def chosen(part: str, groups: list[int]) -> tuple[list[Counter[str]], np.ndarray]:
    texts_, labels = posts(part)
    kept = np.flatnonzero(np.isin(labels, groups))
    return [features(texts_[k]) for k in kept], np.searchsorted(groups, labels[kept])


@pytest.mark.slow
@needs_folder
def test_real_texts_have_the_ids_of_transformers_token_for_token(real: None):
    from transformers import BertTokenizer

    vocab = store.load("minilm")["vocab.txt"].tobytes().decode().splitlines()
    theirs: Any = BertTokenizer(vocab={word: k for k, word in enumerate(vocab)}, do_lower_case=True)
    sample = [*posts("train")[0][::23], *posts("test")[0][::37]]
    arrays = store.load("agnews-76k")
    sample += parted(arrays["test_text"], arrays["test_at"])[::15]
    assert len(sample) > 1000
    rows, pad = encoders.tokenise("minilm", sample, 128)
    assert [*rows] == theirs(sample, truncation=True, max_length=128)["input_ids"]
    assert pad == theirs.pad_token_id == 0


@pytest.mark.slow
@needs_folder
def test_20_newsgroups_as_a_federation(real: None):
    data = TwentyNews(tokenizer="words").load_federation()
    sizes = [data.size(k) for k in range(100)]
    assert sizes == [113] * 99 + [127]  # as in the paper's runs
    assert data.classes == 20
    known = texts.vocabulary("20news")
    assert int(data.x.max()) == len(known)
    lengths = TwentyNews(tokenizer="words").arrays()["train_length"]
    assert np.array_equal((data.x != 0).sum(dim=1).numpy(), lengths)
