"""What is made of a set, such as token ids: once, whole or not there, and made again if need be."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_support as small
from data_support import Told, environment, snapshot
from test_store import dying_at

from fedglad.data import store
from fedglad.data.sources import RECIPES, DataError

SETTINGS = {"tokenizer": "bert/base uncased", "length": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.register(monkeypatch, tmp_path)
    store.get("20news")
    return tmp_path / "cache"


class Make:
    """Doubles the labels, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"double": 2 * arrays["train_y"], "many": np.tile(arrays["train_text"], 500)}


def derive(make: Any, told: Told | None = None, **settings: Any) -> dict[str, np.ndarray]:
    return store.derive("20news", "tokens", SETTINGS | settings, make, progress=told)


def folder(cache: Path) -> Path:
    [found] = (cache / "20news" / "derived").iterdir()
    return found


def is_whole(cache: Path) -> None:
    """What was made is there and right, and there is nothing beside it."""
    assert store.check("20news") == []
    names = sorted(path.name for path in (cache / "20news").iterdir())
    assert names == ["derived", "lock", "v1"]
    names = sorted(path.name for path in folder(cache).iterdir())
    assert names == ["double.npy", "many.npy", "meta.json"]


def test_it_is_made_once_for_each_settings(cache: Path):
    make, told = Make(), Told()
    assert derive(make, told)["double"].tolist() == [0, 0, 2, 2]
    assert told.begun == [("tokens of 20news", None)]
    is_whole(cache)
    assert folder(cache).name.startswith("tokens-bert-base-uncased-8-")
    assert derive(make)["double"].tolist() == [0, 0, 2, 2]
    assert make.calls == 1
    derive(make, length=9)
    assert make.calls == 2
    derive(make, tokenizer="bert-base-uncased")  # the same letters in the folder's name
    assert make.calls == 3
    assert len(list((cache / "20news" / "derived").iterdir())) == 3


def test_it_is_opened_without_the_lock_and_reads_no_content(cache: Path):
    derive(Make())
    (cache / "20news" / "lock").unlink()
    (cache / "20news" / "lock").mkdir()  # even root cannot open it for writing
    for path in folder(cache).glob("*.npy"):  # memory-mapped: only headers and sizes are looked at
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(200)
            file.truncate(size)
    found = derive(None)
    assert not found["many"][200:].any()
    with pytest.raises(DataError, match=r"could not be written to .*: Is a directory"):
        derive(Make(), length=9)


def test_it_may_be_written_to_and_the_cache_stays_as_it_is():
    derive(Make())["double"][:] = 7
    assert derive(None)["double"].tolist() == [0, 0, 2, 2]


def test_another_content_of_the_set_makes_it_anew(cache: Path, monkeypatch: pytest.MonkeyPatch):
    make = Make()
    derive(make)
    posts = {**small.POSTS, "20news-bydate-train/sci.space/6": "another"}
    content = small.archive(posts)
    (cache.parent / "data" / "20news-bydate.tar.gz").write_bytes(content)
    changed = small.signed(RECIPES["20news"], {"20news-bydate.tar.gz": content})
    monkeypatch.setitem(RECIPES, "20news", changed)
    shutil.rmtree(cache / "20news" / "v1")
    assert len(derive(make)["many"]) == 500 * len(store.load("20news")["train_text"])
    assert make.calls == 2
    is_whole(cache)


def test_get_with_force_takes_it_away(cache: Path):
    derive(Make())
    store.get("20news", force=True)
    assert not (cache / "20news" / "derived").exists()


@pytest.mark.parametrize("damage", ["short", "missing", "no meta"])
def test_what_is_damaged_is_made_again_with_a_word(cache: Path, damage: str):
    make, told = Make(), Told()
    derive(make)
    place = folder(cache)
    if damage == "short":
        os.truncate(place / "many.npy", 300)
    else:
        (place / ("meta.json" if damage == "no meta" else "double.npy")).unlink()
    assert store.check("20news")[0].startswith("20news is damaged in the cache: ")
    derive(make, told)
    assert make.calls == 2
    [said] = told.said
    assert said.endswith("; making it again")
    is_whole(cache)


def test_a_flipped_bit_is_found_by_check(cache: Path):
    derive(Make())
    path = folder(cache) / "double.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    [problem] = store.check("20news")
    assert problem.startswith(f"{path} has the wrong checksum")


def test_after_a_failure_the_cache_is_as_it_was(cache: Path):
    before = snapshot(cache)

    def fail(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise DataError("no tokenizer")

    with pytest.raises(DataError, match="no tokenizer"):
        derive(fail)
    assert snapshot(cache) == before
    derive(Make())
    is_whole(cache)


@contextmanager
def room(limit: int) -> Generator[None]:
    """No file can grow beyond so many bytes, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_the_cache_is_as_it_was(cache: Path):
    before = snapshot(cache)
    with room(50_000), pytest.raises(DataError, match=r"File too large.*: make room, or choose"):
        derive(Make())
    assert snapshot(cache) == before
    derive(Make())
    is_whole(cache)


def killed(make: Any) -> int:
    """The exit code of a process that makes it."""
    if (pid := os.fork()) == 0:
        try:
            derive(make)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_while_it_is_made(cache: Path):
    assert killed(lambda arrays: os._exit(9)) == 9
    assert list((cache / "20news").glob("tmp.*"))
    assert store.check("20news") == []
    derive(Make())
    is_whole(cache)


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_crash_at_any_change_of_the_disk_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
):
    crashed, change = True, 0
    while crashed:
        change += 1
        cache = tmp_path / f"cache{change}"
        monkeypatch.setenv("FEDGLAD_CACHE", str(cache))
        store.get("20news")
        if there:  # but damaged: it is to be replaced
            derive(Make())
            os.truncate(folder(cache) / "many.npy", 300)
        if (pid := os.fork()) == 0:
            with dying_at(change):
                derive(Make(), Told())
            os._exit(0)
        crashed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert derive(Make(), Told())["double"].tolist() == [0, 0, 2, 2]
        if list((cache / "20news").glob("tmp.*")):  # it had been there: the next lock clears up
            derive(Make(), length=9)
            shutil.rmtree(next((cache / "20news" / "derived").glob("tokens-*-9-*")))
        is_whole(cache)
    assert change > 8


@pytest.mark.slow
def test_of_two_processes_at_once_one_makes_it(cache: Path, tmp_path: Path):
    """The second says that it waits, and finds what the first has made."""
    script = f"""
import time
from pathlib import Path
from data_support import Printed
from fedglad.data import store
def make(arrays):
    print("making", flush=True)
    while not Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    return {{"double": 2 * arrays["train_y"]}}
found = store.derive("20news", "tokens", {{"a": 1}}, make, progress=Printed())
print(found["double"].tolist(), flush=True)
"""

    def start() -> "subprocess.Popen[str]":
        args = [sys.executable, "-c", script]
        return subprocess.Popen(args, env=environment(cache), stdout=subprocess.PIPE, text=True)

    with start() as first:
        assert first.stdout
        assert first.stdout.readline() == "making\n"
        with start() as second:
            assert second.stdout
            assert "another process: waiting for it" in second.stdout.readline()
            (tmp_path / "go").touch()
            assert second.communicate(timeout=60)[0] == "[0, 0, 2, 2]\n"
        assert first.communicate(timeout=60)[0] == "[0, 0, 2, 2]\n"
    assert (first.returncode, second.returncode) == (0, 0)
