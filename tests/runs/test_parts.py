"""rounds.jsonl of a long run: older lines lie in compressed parts, and every reader takes them."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedglad.analysis import recording
from fedglad.analysis.comparison import compare
from fedglad.config.schema import Config, load
from fedglad.report.figures import payload
from fedglad.report.watch import Live
from fedglad.runs import execute, parts
from fedglad.runs.checking import check
from fedglad.runs.folder import Records
from fedglad.runs.reader import Run
from tests.report.made import record, write
from tests.run_support import TINY

SIZE = 480  # bytes: no line of `record` is as long


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some four lines in a part."""
    monkeypatch.setattr(parts, "LIMIT", 4 * SIZE)


def long(folder: Path, rounds: int = 18, **changes: Any) -> Path:
    """A finished run, written as runs are."""
    every = [record(t, train_loss=float(t), **changes) for t in range(rounds)]
    write(folder, every, labels=[[1, 2], [3, 4]], finish=True)
    (folder / "config.toml").write_text(
        (folder / "config.toml").read_text().replace("rounds = 3", f"rounds = {rounds}")
    )
    (folder / "rounds.jsonl").write_text("")
    with Records(folder / "rounds.jsonl") as lines:
        for one in every:
            lines.write(one)
    return folder


def joined(folder: Path) -> bytes:
    """The bytes of all parts and of rounds.jsonl, by nothing of ours."""
    packed = sorted(folder.glob("rounds/*.gz"))
    return b"".join(gzip.decompress(p.read_bytes()) for p in packed) + lines_of(folder)


def lines_of(folder: Path) -> bytes:
    return (folder / "rounds.jsonl").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("rounds/*"))


def numbers(folder: Path) -> list[int]:
    return [one["round"] for one in Run(folder).rounds()]


# --------------------------------------------------------------------------------- what is written


def test_the_parts_have_the_lines_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = long(tmp_path / "whole")
    assert names(whole) == []
    monkeypatch.setattr(parts, "LIMIT", 4 * SIZE)
    packed = long(tmp_path / "packed")
    assert joined(packed) == lines_of(whole)
    # By hand: a part ends as soon as more than its bytes are there, and leaves the last line.
    sizes, expected, begin, size = [len(x) + 1 for x in lines_of(whole).splitlines()], [], 0, 0
    for t, one in enumerate(sizes):
        size += one
        if size > 4 * SIZE:
            expected.append(f"{begin:06d}-{t - 1:06d}.jsonl.gz")
            begin, size = t, one
    assert names(packed) == expected
    assert len(expected) >= 3
    again = long(tmp_path / "again")  # the same bytes, whenever and wherever they are written
    for name in expected:
        assert (again / "rounds" / name).read_bytes() == (packed / "rounds" / name).read_bytes()


def test_every_reader_says_the_same_as_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = long(tmp_path / "one" / "run")
    monkeypatch.setattr(parts, "LIMIT", 4 * SIZE)
    packed = long(tmp_path / "two" / "run")
    one, two = Run(folder), Run(packed)
    assert names(packed)
    assert two.rounds() == one.rounds()
    assert list(two.iter_rounds()) == one.rounds()
    assert two.count() == one.count() == 18
    assert [list(r) for r in two.rounds(without=("groups", "clients"))] == [
        [name for name in r if name not in ("groups", "clients")] for r in one.rounds()
    ]
    assert two.lines() == one.lines()
    assert two.read().rounds == one.read().rounds
    assert two.read().missing == one.read().missing
    assert payload([two.read()]) == payload([one.read()])
    figures = [compare([f]).to_dict()["groups"] for f in (folder, packed)]
    assert json.dumps(figures[1]).replace("/two/", "/one/") == json.dumps(figures[0])
    assert Live(packed).get(json.dumps)[1] == Live(folder).get(json.dumps)[1]


def test_a_reader_goes_on_across_a_move(tmp_path: Path, limit: None):
    folder = write(tmp_path, [])
    reader, before, versions = Run(folder), (), set[str]()
    with Records(folder / "rounds.jsonl") as lines:
        for t in range(18):
            lines.write(record(t))
            versions.add(reader.version())
            view = reader.read()
            assert view.missing == Run(folder).read().missing
            assert [one["round"] for one in view.rounds] == list(range(t + 1))
            # What was read is not parsed again.
            assert all(new is old for new, old in zip(view.rounds, before, strict=False))
            before = view.rounds
    assert len(names(folder)) >= 3
    assert len(versions) == 18


def test_a_reader_that_was_away_for_several_parts(tmp_path: Path, limit: None):
    folder = write(tmp_path, [])
    reader = Run(folder)
    with Records(folder / "rounds.jsonl") as lines:
        for t in range(3):
            lines.write(record(t))
        first = reader.read().rounds
        for t in range(3, 18):
            lines.write(record(t))
    last = reader.read()
    assert [one["round"] for one in last.rounds] == list(range(18))
    assert last.rounds[2] is first[2]
    assert last.missing == Run(folder).read().missing


def test_other_files_and_rounds_that_do_not_ascend_stay_in_one_file(tmp_path: Path, limit: None):
    for name, rounds in {"client_scores.jsonl": range(18), "rounds.jsonl": [0] * 18}.items():
        with Records(tmp_path / name) as lines:
            for t in rounds:
                lines.write(record(t))
        assert len((tmp_path / name).read_bytes().splitlines()) == 18
    assert names(tmp_path) == []


def test_clear_removes_the_parts(tmp_path: Path, limit: None):
    folder = long(tmp_path)
    assert names(folder)
    Run(folder).clear()
    assert not (folder / "rounds").exists()


# ------------------------------------------------------------------------------------------ damage


def test_a_missing_part_is_said(tmp_path: Path, limit: None):
    folder = long(tmp_path)
    *_, last = names(folder)
    first, end = (int(number) for number in re.findall(r"[0-9]{6}", last))
    (folder / "rounds" / last).unlink()
    gone = f"rounds {first + 1} to {end + 1}"
    lines = Run(folder).lines()
    assert len(lines.records) == first
    assert lines.damage == (
        "rounds.jsonl is damaged: line 1 does not follow the line before it: "
        f"{gone} before it are gone"
    )
    missing = Run(folder).read().missing
    assert f"{gone} not recorded, or damaged" in missing
    assert [one["round"] for one in Run(folder).read().rounds] == [
        t for t in range(18) if not first <= t <= end
    ]
    assert not check(folder).good
    assert any(lines.damage in note for note in compare([folder]).notes)
    with pytest.raises(recording.ReplayError, match="does not follow"):
        recording.read(folder)


@pytest.mark.parametrize("place", [0, 1])
def test_a_missing_part_between_others_is_said(tmp_path: Path, limit: None, place: int):
    folder = long(tmp_path)
    gone, following = names(folder)[place : place + 2]
    (folder / "rounds" / gone).unlink()
    damage = Run(folder).lines().damage
    assert damage.startswith(f"rounds/{following} is damaged: line 1 does not follow")
    missing = " ".join(Run(folder).read().missing)
    assert f"rounds/{following} is damaged before line 1" in missing
    assert "not recorded, or damaged" in missing
    wrong = [file.name for file in check(folder).files if file.state == "damaged"]
    assert f"rounds/{following}" in wrong


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


DAMAGES = {
    "flipped": flipped,
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "other": lambda data: b"no such file",
    "repacked": lambda data: gzip.compress(gzip.decompress(data).replace(b"0.75", b"0.25")),
    "shorter": lambda data: gzip.compress(b"\n".join(gzip.decompress(data).split(b"\n")[:-3])),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_part_is_said_and_costs_no_other(tmp_path: Path, limit: None, how: str):
    folder = long(tmp_path)
    name = names(folder)[1]
    first, end = (int(number) for number in re.findall(r"[0-9]{6}", name))
    path = folder / "rounds" / name
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    lines = Run(folder).lines()
    assert first <= len(lines.records) <= end
    assert "is damaged: line" in lines.damage
    view = Run(folder).read()
    there = {one["round"] for one in view.rounds}
    assert set(range(18)) - there <= set(range(first, end + 1))
    assert any("damaged" in said and "rounds/" in said for said in view.missing)
    if len(there) < 18:
        assert any("not recorded, or damaged" in said for said in view.missing)
    checked = check(folder)
    wrong = {file.name for file in checked.files if file.state == "damaged"} - {"summary.json"}
    assert wrong
    assert wrong <= {f"rounds/{one}" for one in names(folder)[1:3]}
    payload([view])  # the report is made of what is there


def test_a_damaged_first_line_of_rounds_jsonl_hides_no_part(tmp_path: Path, limit: None):
    folder = long(tmp_path)
    lines = lines_of(folder).split(b"\n")
    (folder / "rounds.jsonl").write_bytes(b"\n".join([b"{noise", *lines[1:]]))
    first = json.loads(lines[0])["round"]
    assert numbers(folder) == list(range(first))
    view = Run(folder).read()
    assert [one["round"] for one in view.rounds] == [t for t in range(18) if t != first]
    assert "rounds.jsonl is damaged in line 1: left out" in view.missing


def test_without_rounds_jsonl_the_parts_are_read_and_it_is_said(tmp_path: Path, limit: None):
    folder = long(tmp_path)
    first = json.loads(lines_of(folder).split(b"\n")[0])["round"]
    (folder / "rounds.jsonl").unlink()
    view = Run(folder).read()
    assert len(view.rounds) == first
    assert "there is no rounds.jsonl: its rounds are not known" in view.missing
    assert ("rounds.jsonl", "missing") in [(file.name, file.state) for file in check(folder).files]
    assert Live(folder).metrics()


# ------------------------------------------------------------------------------- kills at any point

TOUCHED = ("open", "os.mkdir", "os.rename", "os.remove")
WRITES = os.O_WRONLY | os.O_RDWR


def snapshots(folder: Path, act: Any) -> Iterator[Path]:
    """The folder as a kill before each change of the disk, and after the last, leaves it."""
    at, crashed = 0, True
    while crashed:
        at += 1
        copy = folder.with_name(f"{folder.name}-{at}")
        subprocess.run(["cp", "-r", folder, copy], check=True)
        crashed = forked(at, lambda copy=copy: act(copy))
        yield copy


def forked(at: int, act: Any) -> bool:
    """Whether a child was killed before its `at`-th change of the disk."""
    if (child := os.fork()) == 0:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event == "open" and not (isinstance(args[2], int) and args[2] & WRITES):
                return
            if event in TOUCHED:
                count += 1
                if count == at:
                    os._exit(9)

        try:
            sys.addaudithook(hook)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_kill_at_any_point_of_a_move_loses_and_doubles_nothing(tmp_path: Path, limit: None):
    folder = long(tmp_path / "run", 4 * 3)
    with Records(folder / "rounds.jsonl") as lines:
        before, many = 12, len(names(folder))
        kept = folder
        while len(names(folder)) == many:  # up to the line that makes the next part
            kept = folder.with_name(f"kept{before}")
            subprocess.run(["cp", "-r", folder, kept], check=True)
            lines.write(record(before))
            before += 1
    before -= 1

    def act(copy: Path) -> None:
        with Records(copy / "rounds.jsonl") as lines:
            lines.write(record(before))

    count = 0
    for copy in snapshots(kept, act):
        count += 1
        there = numbers(copy)
        assert there in (list(range(before)), list(range(before + 1)))
        view = Run(copy).read()
        assert [one["round"] for one in view.rounds] == there
        assert not any("damaged" in said or "more than once" in said for said in view.missing)
        (copy / "summary.json").unlink()
        assert check(copy).good
        with Records(copy / "rounds.jsonl") as lines:  # the run goes on
            for t in range(len(there), before + 4):
                lines.write(record(t))
        assert numbers(copy) == list(range(before + 4))
        assert not parts.stale(copy / "rounds.jsonl")
        assert joined(copy).count(b"\n") == before + 4
    assert count >= 6


@pytest.mark.parametrize("done", [0, 1, 3, 4, 9, 13, 17, 18])
def test_a_kill_at_any_point_of_a_cut_leaves_its_lines(tmp_path: Path, limit: None, done: int):
    folder = long(tmp_path / "run")
    expected = b"".join(joined(folder).splitlines(keepends=True)[:done])
    count = 0
    for copy in snapshots(folder, lambda copy: parts.cut(copy / "rounds.jsonl", done)):
        count += 1
        there = numbers(copy)
        assert there == list(range(len(there)))
        assert len(there) >= done
        parts.cut(copy / "rounds.jsonl", done)  # the run is started again
        assert joined(copy) == expected
        assert numbers(copy) == list(range(done))
        assert not parts.stale(copy / "rounds.jsonl")
        with Records(copy / "rounds.jsonl") as lines:
            for t in range(done, 18):
                lines.write(record(t, train_loss=float(t)))
        assert joined(copy) == joined(folder)
    assert count >= 3


# ------------------------------------------------------------------------------- a run as a whole


def quick(**more: Any) -> Config:
    return load("digits", {**TINY, "rounds": 12, "checkpoint_every": 2, **more})[1]


def without_seconds(folder: Path) -> list[dict[str, Any]]:
    dropped = ("seconds",)
    return [{k: v for k, v in one.items() if k not in dropped} for one in Run(folder).rounds()]


class Stop(Exception):
    pass


def stop_after(rounds: int) -> Any:
    def on_round(played: Any) -> None:
        if played.t + 1 == rounds:
            raise Stop

    return on_round


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    execute("digits", quick(), out=folder)
    assert names(folder) == []
    return without_seconds(folder)


def test_a_run_stopped_resumed_and_its_last_checkpoint_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[dict[str, Any]]
):
    monkeypatch.setattr(parts, "LIMIT", 3000)  # two lines or three
    with pytest.raises(Stop):
        execute("digits", quick(), out=tmp_path, on_round=stop_after(9))
    assert len(names(tmp_path)) >= 2
    newest = sorted((tmp_path / "checkpoints").glob("*.json"))[-1]
    newest.write_text("{}")  # back to the one before, whose round is in a part
    lost: list[str] = []
    execute("digits", quick(), out=tmp_path, resume=True, on_lost=lost.append)
    assert lost
    assert without_seconds(tmp_path) == uninterrupted
    assert check(tmp_path).good
    summary = Run(tmp_path).summary
    assert summary is not None
    assert summary["rounds"] == 12


def test_a_run_of_which_no_checkpoint_is_whole_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[dict[str, Any]]
):
    monkeypatch.setattr(parts, "LIMIT", 3000)
    with pytest.raises(Stop):
        execute("digits", quick(), out=tmp_path, on_round=stop_after(9))
    for path in (tmp_path / "checkpoints").glob("*.json"):
        path.write_text("{}")
    execute("digits", quick(), out=tmp_path, resume=True)
    assert without_seconds(tmp_path) == uninterrupted
    assert check(tmp_path).good


def test_a_longer_run_begins_from_the_parts_of_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[dict[str, Any]]
):
    monkeypatch.setattr(parts, "LIMIT", 3000)
    short, longer = tmp_path / "short", tmp_path / "long"
    execute("digits", quick(rounds=9), out=short)
    before = joined(short)
    execute("digits", quick(), out=longer, resume=True, extend=short)
    assert without_seconds(longer) == uninterrupted
    assert joined(short) == before
    assert joined(longer).startswith(before)


def test_a_missing_part_of_a_run_that_goes_on_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "LIMIT", 3000)
    with pytest.raises(Stop):
        execute("digits", quick(), out=tmp_path, on_round=stop_after(9))
    (tmp_path / "rounds" / names(tmp_path)[0]).unlink()
    with pytest.raises(RuntimeError, match=r"rounds 1 to \d+ before it are gone, so it lacks"):
        execute("digits", quick(), out=tmp_path, resume=True)
