"""The cache: whole or not there, one fetch for all, opened in no time, and repaired."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_support import (
    CONTENT,
    NAME,
    PLAIN,
    Server,
    Told,
    child,
    environment,
    recipe,
    register,
    snapshot,
    tar,
    until,
    web,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedglad.data import store
from fedglad.data.sources import RECIPES, DataError, File

X = np.tile(np.frombuffer(CONTENT, dtype=np.uint8), 3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(RECIPES, "tiny", recipe())  # so that it is forgotten afterwards
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({NAME: CONTENT}) as running:
        register(web(running.address))
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The set's file, for use without a server."""
    register(web("http://127.0.0.1:9/"))
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / NAME).write_bytes(CONTENT)
    return tmp_path / "from"


def is_whole(cache: Path) -> None:
    """The set is there, right, and there is nothing beside it."""
    assert store.check("tiny") == []
    assert np.array_equal(store.load("tiny")["x"], X)
    assert sorted(path.name for path in (cache / "tiny").iterdir()) == ["lock", "v1"]
    names = sorted(path.name for path in (cache / "tiny" / "v1").iterdir())
    assert names == ["meta.json", "x.npy", "y.npy"]


# ---------------------------------------------------------------------------------------- opening


def test_a_set_is_fetched_once(server: Server, cache: Path):
    first = store.get("tiny")
    assert (first.new, first.source) == (True, server.address)
    again = store.get("tiny")
    assert (again.new, again.source) == (False, server.address)
    assert np.array_equal(store.load("tiny")["x"], X)
    assert server.asked == [None]
    is_whole(cache)
    assert first.size == sum(p.stat().st_size for p in first.folder.glob("*.npy"))


def test_the_entry_tells_where_it_is_from_and_what_it_holds(server: Server, cache: Path):
    store.load("tiny")
    meta = json.loads((cache / "tiny" / "v1" / "meta.json").read_text())
    assert meta["source"] == server.address
    assert meta["raw"] == {NAME: PLAIN.checksum}
    assert set(meta["versions"]) == {"fedglad", "numpy"}
    assert meta["arrays"]["x"]["shape"] == [900_000]
    assert meta["arrays"]["y"]["dtype"] == "int64"


def test_arrays_may_be_written_to_and_the_cache_stays_as_it_is(folder: Path):
    arrays = store.load("tiny", folder=folder)
    tensor = torch.from_numpy(arrays["x"])  # warns of arrays that are read-only
    tensor.zero_()
    assert not arrays["x"].any()
    assert np.array_equal(store.load("tiny")["x"], X)
    assert store.check("tiny") == []


def test_an_open_set_outlives_its_replacement(folder: Path):
    arrays = store.load("tiny", folder=folder)
    store.get("tiny", folder=folder, force=True)
    assert np.array_equal(arrays["x"], X)


@settings(max_examples=40)
@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.int64, np.float32, np.bool_]),
        hnp.array_shapes(min_dims=1, max_dims=4, max_side=5),
    ),
    st.booleans(),
)
def test_an_array_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, transposed: bool
):
    path = tmp_path_factory.mktemp("arrays") / "a.npy"
    array = array.T if transposed else array
    told = store._write(path, array)
    read = np.load(path, mmap_mode="c")
    assert read.dtype == array.dtype
    assert read.shape == array.shape == tuple(told["shape"])
    assert read.tobytes() == array.tobytes()
    assert path.stat().st_size == told["bytes"]


def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("FEDGLAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder().name == "fedglad"
    monkeypatch.setenv("FEDGLAD_CACHE", "~/sets")
    assert store.cache_folder() == Path.home() / "sets"


def test_a_cache_that_cannot_be_written_can_be_read(folder: Path, cache: Path):
    store.get("tiny", folder=folder)
    (cache / "tiny" / "lock").unlink()
    (cache / "tiny" / "lock").mkdir()  # even root cannot open it for writing
    assert not store.get("tiny").new
    assert np.array_equal(store.load("tiny")["x"], X)
    with pytest.raises(DataError, match=r"could not be written to .*: Is a directory.*FEDGLAD_CA"):
        store.get("tiny", folder=folder, force=True)


# ---------------------------------------------------------------------------------------- failures

FAILURES: dict[str, Callable[[Server], Any]] = {
    "bad checksum": lambda server: server.files.update({NAME: bytes(len(CONTENT))}),
    "not there": lambda server: server.files.clear(),
    "truncated": lambda server: server.cuts.extend([0] * 9),
    "no connection": lambda server: register(web("http://127.0.0.1:9/")),
    "traversal": lambda server: (
        server.files.update({"t.tar.gz": tar((NAME, CONTENT), ("../../../../evil", b"evil"))}),
        register(web(server.address, File(name="t.tar.gz", members=(NAME,)))),
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("there", [True, False])
def test_after_a_failure_the_cache_is_as_it_was(
    server: Server, cache: Path, tmp_path: Path, failure: str, there: bool
):
    if there:
        store.get("tiny")
    before = snapshot(cache)
    FAILURES[failure](server)
    with pytest.raises(DataError, match="tiny could not be had from any source"):
        store.get("tiny", force=True)
    assert snapshot(cache) == before
    assert sorted(p.name for p in (cache / "tiny").iterdir()) == (["lock"] + ["v1"] * there)
    assert not list(tmp_path.rglob("evil"))

    with Server({NAME: CONTENT}) as good:
        register(web(good.address))
        assert store.get("tiny", force=True).new
    is_whole(cache)


def test_a_broken_download_is_all_that_is_kept(server: Server, cache: Path):
    server.cuts = [100_000, 0]
    with pytest.raises(DataError, match="kept for the next try"):
        store.get("tiny")
    assert snapshot(cache) == {f"tiny/part/{NAME}.part": CONTENT[:100_000]}
    store.get("tiny")
    assert server.sent == len(CONTENT)
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


@pytest.mark.parametrize("limit", [100_000, 500_000])  # the download fails, or the array of 900,000
@pytest.mark.parametrize("there", [True, False])
def test_without_room_the_cache_is_as_it_was(server: Server, cache: Path, limit: int, there: bool):
    if there:
        store.get("tiny")
    before = snapshot(cache)
    with room(limit), pytest.raises(DataError) as failure:
        store.get("tiny", force=True)
    assert str(failure.value) == (
        f"tiny could not be written to {cache}/tiny: File too large. The cache is as it was: make "
        "room, or choose another folder with FEDGLAD_CACHE"
    )
    assert snapshot(cache) == before
    assert store.get("tiny").new is not there
    is_whole(cache)


@pytest.mark.slow
@pytest.mark.parametrize("size", [200_000, 700_000, 1_100_000])
def test_on_a_full_disk_the_cache_is_as_it_was(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    """A real file system, in which the download does not fit, or the raw file, or the array."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        monkeypatch.setenv("FEDGLAD_CACHE", str(disk))
        with pytest.raises(DataError, match=r"No space left on device.*make room, or choose"):
            store.get("tiny")
        assert snapshot(disk) == {}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path, folder: Path, monkeypatch: Any):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"Not a directory.*: choose another folder with FEDGLAD_C"):
        store.load("tiny", folder=folder)


def test_an_unknown_name_is_answered_with_the_next_one():
    with pytest.raises(DataError, match="unknown data set 'minst': did you mean 'mnist'"):
        store.load("minst")


# ----------------------------------------------------------------------------------------- damage


def meta_of(entry: Path) -> Path:
    return entry / "meta.json"


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "an array is missing": lambda entry: (entry / "x.npy").unlink(),
    "an array is short": lambda entry: os.truncate(entry / "x.npy", 1000),
    "an array is empty": lambda entry: os.truncate(entry / "y.npy", 0),
    "no meta": lambda entry: meta_of(entry).unlink(),
    "empty meta": lambda entry: meta_of(entry).write_text(""),
    "half a meta": lambda entry: os.truncate(meta_of(entry), 100),
    "meta is no object": lambda entry: meta_of(entry).write_text("[1]"),
    "meta is no text": lambda entry: meta_of(entry).write_bytes(b"\xff\xfe\xff"),
    "meta has no arrays": lambda entry: meta_of(entry).write_text('{"source": "", "arrays": {}}'),
    "arrays are no objects": lambda entry: meta_of(entry).write_text(
        '{"source": "", "arrays": {"x": 1}}'
    ),
    "a bad header": lambda entry: write_at(entry / "x.npy", 0, b"?" * 10),
    "all is gone": lambda entry: [path.unlink() for path in entry.iterdir()],
}


def write_at(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_replaced_with_a_word(folder: Path, cache: Path, damage: str):
    store.get("tiny", folder=folder)
    DAMAGES[damage](cache / "tiny" / "v1")
    assert store.check("tiny")[0].startswith("tiny is damaged in the cache: ")
    told = Told()
    assert np.array_equal(store.load("tiny", folder=folder, progress=told)["x"], X)
    [said] = [said for said in told.said if "is damaged" in said]  # once
    assert said.startswith("tiny is damaged in the cache: ")
    assert said.endswith("; getting it again")
    is_whole(cache)


def test_a_damaged_entry_that_cannot_be_replaced_is_left(folder: Path, cache: Path, tmp_path: Path):
    store.get("tiny", folder=folder)
    (cache / "tiny" / "v1" / "y.npy").unlink()
    before = snapshot(cache)
    with pytest.raises(DataError, match="could not be had"):
        store.load("tiny", folder=tmp_path / "nowhere")
    assert snapshot(cache) == before


def test_what_is_worth_a_line_goes_to_the_log(folder: Path, cache: Path, caplog: Any):
    store.get("tiny", folder=folder)
    (cache / "tiny" / "v1" / "y.npy").unlink()
    with caplog.at_level(logging.WARNING, "fedglad"):
        store.load("tiny", folder=folder)
    assert "tiny is damaged in the cache" in caplog.text


def test_a_flipped_bit_is_found_by_check_alone(folder: Path, cache: Path):
    store.get("tiny", folder=folder)
    path = cache / "tiny" / "v1" / "x.npy"
    write_at(path, 5000, bytes([path.read_bytes()[5000] ^ 1]))
    [problem] = store.check("tiny")
    assert problem.startswith(f"{path} has the wrong checksum: sha256 ")
    assert not store.get("tiny", folder=folder).new
    assert store.get("tiny", folder=folder, force=True).new
    is_whole(cache)


def test_a_set_that_is_not_there_is_a_problem(folder: Path):
    assert store.check("tiny") == ["tiny is not in the cache"]


# ------------------------------------------------------------------------ crashes, real processes

TOUCHED: list[tuple[Any, str]] = [
    *((Path, name) for name in ("mkdir", "rename", "replace", "write_bytes")),
    *((os, name) for name in ("fsync", "rename", "unlink", "rmdir")),
    (shutil, "rmtree"),
]


@contextmanager
def dying_at(change: int) -> Generator[None]:
    """The process ends at the n-th change of the disk."""
    left = change

    def wrapped(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return original(*args, **kwargs)

        return call

    for owner, name in TOUCHED:
        setattr(owner, name, wrapped(getattr(owner, name)))
    yield


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_crash_at_any_change_of_the_disk_disturbs_nobody(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool
):
    crashed, change = True, 0
    while crashed:
        change += 1
        cache = tmp_path / f"cache{change}"
        monkeypatch.setenv("FEDGLAD_CACHE", str(cache))
        if there:
            store.get("tiny", folder=folder)
        if (pid := os.fork()) == 0:
            with dying_at(change):
                store.get("tiny", folder=folder, force=True)
            os._exit(0)
        crashed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        if store.entry_of("tiny") is not None:  # whatever is there is whole
            assert store.check("tiny") == []
        store.get("tiny", folder=folder, force=True)
        is_whole(cache)
    assert change > 15


@pytest.mark.slow
def test_a_killed_download_goes_on_where_it_was(server: Server, cache: Path):
    server.hold = 200_000
    args = child("store.get('tiny')", server.address)
    with subprocess.Popen(args, env=environment(cache)) as process:
        part = cache / "tiny" / "part" / f"{NAME}.part"
        until(lambda: part.exists() and part.stat().st_size == 200_000)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert list((cache / "tiny").glob("tmp.*"))
    assert store.entry_of("tiny") is None

    server.hold = -1
    assert store.get("tiny").new
    assert server.asked == [None, "bytes=200000-"]
    is_whole(cache)


@pytest.mark.slow
def test_two_processes_at_once_fetch_once(server: Server, cache: Path):
    server.hold = 100_000
    args = child("print(store.get('tiny', progress=d.Printed()).new)", server.address)

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(args, env=environment(cache), stdout=subprocess.PIPE, text=True)

    with start() as first:
        until(lambda: server.asked)
        with start() as second:
            assert second.stdout
            waits = "tiny is being fetched by another process: waiting for it\n"
            assert second.stdout.readline() == waits
            server.go.set()
            assert second.communicate(timeout=60)[0] == "False\n"
        assert first.communicate(timeout=60)[0] == "True\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert server.asked == [None]
    is_whole(cache)


@pytest.mark.slow
def test_if_the_first_of_two_is_killed_the_second_takes_over(server: Server, cache: Path):
    server.hold = 100_000
    args = child("print(store.get('tiny', progress=d.Printed()).new)", server.address)
    with subprocess.Popen(args, env=environment(cache)) as first:
        part = cache / "tiny" / "part" / f"{NAME}.part"
        until(lambda: part.exists() and part.stat().st_size == 100_000)
        with subprocess.Popen(
            args, env=environment(cache), stdout=subprocess.PIPE, text=True
        ) as second:
            assert second.stdout
            assert "waiting" in second.stdout.readline()
            server.hold = -1
            first.kill()
            assert second.communicate(timeout=60)[0] == "True\n"
    assert server.asked == [None, "bytes=100000-"]
    is_whole(cache)


@pytest.mark.parametrize("at", [1, 2])
def test_a_set_that_is_replaced_is_never_lost(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int
):
    """Killed before the first or the second of the two renames, or between them and the end."""
    store.get("tiny", folder=folder)
    before = {name: array.copy() for name, array in store.load("tiny").items()}
    plain, count = Path.rename, 0

    def rename(path: Path, target: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            os._exit(9)
        return plain(path, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", rename)
        store.get("tiny", folder=folder, force=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    shutil.rmtree(folder)  # there is nothing to fetch it from
    found = store.load("tiny")
    assert found.keys() == before.keys()
    assert all(np.array_equal(found[name], before[name]) for name in before)
    assert store.check("tiny") == []
    assert not list((cache / "tiny").glob("old.*"))


def test_what_was_replaced_is_removed_by_the_next(cache: Path, folder: Path):
    store.get("tiny", folder=folder)
    shutil.copytree(cache / "tiny" / "v1", cache / "tiny" / "old.v1")  # killed while it was removed
    store.get("tiny", folder=folder, force=True)
    assert sorted(path.name for path in (cache / "tiny").iterdir()) == ["lock", "v1"]
