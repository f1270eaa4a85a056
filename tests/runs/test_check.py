"""Lost and forged files of a run: each is noticed, said, and never changes a result in silence."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY, cli, outcome
from typer.testing import CliRunner

from fedglad.analysis import compare
from fedglad.analysis.recording import ReplayError
from fedglad.analysis.recording import read as read_record
from fedglad.cli import app
from fedglad.config.schema import Config, load
from fedglad.core import checkpoint, checksums
from fedglad.runs import Run, RunError, check
from fedglad.runs import execute as executed
from fedglad.studies.paper.results import export
from tests.runs.test_runs import stopped

execute = partial(executed, keep_state=True)  # memories and checkpoints are looked at

PLAIN = {**TINY, "engine.name": "serial", "rounds": 6, "checkpoint_every": 2}
SCAFFOLD = {**PLAIN, "client.name": "scaffold", "client.optimizer": "sgd"}
SCAFFOLD |= {"data.clients": 8, "client.clients": 8}
ADAFL = {**PLAIN, "sampler.name": "adafl", "weighting.name": "fedadp"}
OLD = Path(__file__).parents[1] / "e2e" / "old"


def config(settings: dict[str, Any]) -> Config:
    return load("digits", settings)[1]


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that are finished, and the same stopped after their last round but one."""
    folder = tmp_path_factory.mktemp("made")
    for name, settings in {"plain": PLAIN, "scaffold": SCAFFOLD, "adafl": ADAFL}.items():
        execute("digits", config(settings), out=folder / name)
        stopped(folder / f"{name}-cut", 5, config(settings))  # checkpoints 2 and 4
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made[name], tmp_path / name))


def states(folder: Path) -> dict[str, str]:
    return {file.name: file.state for file in check(folder).files}


def resumed(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Goes on with a run; returns what was said to be lost."""
    lost: list[str] = []
    execute("digits", config(settings), out=folder, resume=True, on_lost=lost.append)
    return lost


# --------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("name", ["plain", "scaffold", "plain-cut", "scaffold-cut"])
def test_a_run_that_nobody_touched_is_good(made: dict[str, Path], name: str):
    assert set(states(made[name]).values()) == {"good"}
    assert check(made[name]).good


def test_every_file_of_a_run_is_checked(made: dict[str, Path]):
    names = states(made["scaffold"])
    files = {str(p.relative_to(made["scaffold"])) for p in made["scaffold"].rglob("*.*")}
    small = {name for name in files if not name.startswith(("memories", "log.txt"))}
    assert small <= names.keys()
    assert {"memories of checkpoint 000004", "memories of checkpoint 000006"} <= names.keys()


@pytest.mark.parametrize("name", ["small", "flower"])
def test_a_run_from_before_there_were_checksums_is_read_and_said_to_be(name: str):
    found = states(OLD / name)
    assert found["rounds.jsonl"] == found["config.toml"] == "no checksum"
    assert "damaged" not in found.values()
    assert call("check", OLD / name).exit_code == 0


def test_lines_of_old_and_new_versions_stand_in_one_file(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("plain-cut")
    path = folder / "rounds.jsonl"
    records = Run(folder).rounds()
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert resumed(folder, PLAIN) == []
    assert outcome(folder) == outcome(made["plain"])
    assert states(folder)["rounds.jsonl"] == "no checksum"  # of the first four
    lines = path.read_text().splitlines(keepends=True)
    assert ["crc" in line for line in lines] == [False] * 4 + [True] * 2
    path.write_text("".join([lines[0], lines[1], lines[2], lines[3].replace('": 0.', '": 1.', 1)]))
    assert states(folder)["rounds.jsonl"] == "damaged"  # rounds are missing
    path.write_text("".join([*lines[:3], lines[3].replace('": 0.', '": 1.', 1), *lines[4:]]))
    (one,) = [file for file in check(folder).files if file.name == "rounds.jsonl"]
    assert (one.state, one.detail[:18]) == ("damaged", "line 4 is not the ")


# ------------------------------------------------------------------------------ rounds.jsonl


def number_changed(lines: list[str], rng: random.Random) -> list[str]:
    k = rng.randrange(4)
    at = rng.choice([i for i, c in enumerate(lines[k]) if c.isdigit()])
    other = str((int(lines[k][at]) + 1 + rng.randrange(9)) % 10)
    return [*lines[:k], lines[k][:at] + other + lines[k][at + 1 :], *lines[k + 1 :]]


def taken_out(lines: list[str], rng: random.Random) -> list[str]:
    k = rng.randrange(4)
    return [*lines[:k], *lines[k + 1 :]]


def swapped(lines: list[str], rng: random.Random) -> list[str]:
    k = rng.randrange(3)
    return [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]


def doubled(lines: list[str], rng: random.Random) -> list[str]:
    k = rng.randrange(4)
    return [*lines[: k + 1], *lines[k:]]


def cut(lines: list[str], rng: random.Random) -> list[str]:
    k = rng.randrange(4)
    return [*lines[:k], lines[k][: rng.randrange(len(lines[k]) - 1)] + "\n", *lines[k + 1 :]]


def without_its_checksum(lines: list[str], rng: random.Random) -> list[str]:
    k = rng.randrange(4)
    record = {**json.loads(lines[k]), "train_loss": 0.5}
    del record["crc"]
    return [*lines[:k], json.dumps(record) + "\n", *lines[k + 1 :]]


EDITS = [number_changed, taken_out, swapped, doubled, cut, without_its_checksum]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("seed", range(4))
def test_a_changed_line_is_noticed_by_all_who_read_it(
    copy: Callable[[str], Path], made: dict[str, Path], edit: Any, seed: int
):
    folder, unfinished = copy("plain"), copy("plain-cut")
    for one in (folder, unfinished):
        path = one / "rounds.jsonl"
        lines = edit(path.read_text().splitlines(keepends=True), random.Random(seed))
        path.write_text("".join(lines))
    assert states(folder)["rounds.jsonl"] == "damaged"
    (note,) = compare([folder]).notes
    assert "rounds.jsonl is damaged: line " in note
    assert compare([folder]).groups[0].mean == compare([made["plain"]]).groups[0].mean
    assert compare([folder]).groups[0].curves is None
    assert any("rounds.jsonl is damaged" in text for text in Run(folder).read().missing)
    with pytest.raises(ReplayError, match=r"rounds\.jsonl is damaged: line "):
        read_record(folder)
    try:  # back to checkpoint 2 if the first two lines are whole
        lost = resumed(unfinished, PLAIN)
    except RunError as error:
        assert "rounds.jsonl is damaged" in str(error)  # noqa: PT017 - either way is fine
        assert "--force" in str(error)  # noqa: PT017
    else:
        if lost or edit is not doubled:  # the fourth line twice costs no round
            assert "checkpoint 000004.json is not usable: rounds.jsonl is damaged: li" in lost[0]
            assert lost[1] == "going on after round 2"
        assert outcome(unfinished) == outcome(made["plain"])


def test_lines_that_are_missing_at_the_end_are_noticed(copy: Callable[[str], Path]):
    folder = copy("plain")
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:5]))
    assert states(folder)["rounds.jsonl"] == "damaged"
    assert states(folder)["summary.json"] == "damaged"  # it is of 6 rounds


# ------------------------------------------------------------------------------ checkpoints


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], crc: str = "right") -> None:
    """Changes checkpoint 4; whoever deceives can also write the right checksum."""
    path = folder / "checkpoints" / "000004.json"
    saved = json.loads(path.read_text())
    old = saved.pop("crc")
    change(saved)
    text = json.dumps({**saved, "crc": old} if crc == "old" else saved)
    path.write_text(checksums.json_with_crc(text) if crc == "right" else text)


def test_another_round_in_a_checkpoint_is_not_believed(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    for crc in ("old", "none", "right"):
        folder = copy("plain-cut")
        rewrite(folder, lambda saved: saved.update(round=3), crc)
        assert states(folder)["checkpoints/000004.json"] == "damaged"
        lost = resumed(folder, PLAIN)
        assert lost[0].startswith("checkpoint 000004.json is not usable: it")
        assert lost[1] == "going on after round 2"
        assert outcome(folder) == outcome(made["plain"])
        shutil.rmtree(folder)


def test_the_tensors_of_another_checkpoint_are_not_taken(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("plain-cut")
    files = folder / "checkpoints"
    shutil.copy(files / "000002.safetensors", files / "000004.safetensors")
    assert states(folder)["checkpoints/000004.safetensors"] == "damaged"
    assert "are those of another checkpoint" in resumed(folder, PLAIN)[0]
    assert outcome(folder) == outcome(made["plain"])


def newest(folder: Path) -> list[Path]:
    """The memories that checkpoint 4 needs and checkpoint 2 does not."""
    paths = (folder / "memories").rglob("*.safetensors")
    return sorted(path for path in paths if path.name.split(".")[1] in "34")


def gone(path: Path) -> None:
    path.unlink()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def somebody_elses(path: Path) -> None:
    other = next(one for one in newest(path.parents[2]) if one != path)
    shutil.copy(other, path)


@pytest.mark.parametrize("damage", [gone, flipped, empty, somebody_elses])
def test_a_memory_that_is_lost_is_said_and_changes_no_result(
    copy: Callable[[str], Path], made: dict[str, Path], damage: Any
):
    for k in range(len(newest(made["scaffold-cut"]))):
        folder = copy("scaffold-cut")
        path = newest(folder)[k]
        damage(path)
        name = str(path.relative_to(folder))
        assert states(folder)[name] == ("missing" if damage is gone else "damaged")
        lost = resumed(folder, SCAFFOLD)
        client = path.name.split(".")[0]
        assert f"the memory of client {client} is" in lost[0]
        assert lost[1] == "going on after round 2"
        assert outcome(folder) == outcome(made["scaffold"])
        shutil.rmtree(folder)


def test_a_memory_that_no_checkpoint_names_is_not_used(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("scaffold-cut")
    saved = json.loads((folder / "checkpoints" / "000004.json").read_text())["memories"]
    pairs = [(k, int(version)) for version, some in saved["memories"].items() for k in some]
    client, version = min(pairs, key=lambda pair: pair[1])
    shelf = folder / "memories" / "000000"
    tensors, _ = checkpoint.read(newest(folder)[0])
    for more in range(version + 1, 5):  # as if it had taken part later
        path = shelf / f"{client}.{more}.safetensors"
        checkpoint.write(path, tensors, {"client": client, "after": more})
    assert version < 4
    resumed(folder, SCAFFOLD)
    assert outcome(folder) == outcome(made["scaffold"])


def test_what_all_checkpoints_need_is_lost_and_the_run_starts_again(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("scaffold-cut")
    for path in (folder / "memories").rglob("*.safetensors"):
        path.unlink()
    lost = resumed(folder, SCAFFOLD)
    assert lost[-1] == "going on from the start"
    assert outcome(folder) == outcome(made["scaffold"])


def test_checkpoints_that_are_not_usable_do_not_push_out_new_ones(copy: Callable[[str], Path]):
    """Else a run that starts again and is killed again would have nothing to go on from."""
    folder = copy("plain-cut")
    for path in (folder / "checkpoints").glob("*.safetensors"):
        empty(path)
    stop = lambda done: (_ for _ in ()).throw(KeyboardInterrupt) if done.t == 3 else None  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        execute("digits", config(PLAIN), out=folder, resume=True, on_round=stop)
    assert [path.name for path in (folder / "checkpoints").glob("*.json")] == ["000002.json"]
    assert resumed(folder, PLAIN) == []


CRAFTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no sampler": lambda saved: saved.pop("sampler"),
    "a list of samplers": lambda saved: saved.update(sampler=[1]),
    "no alarm's transport": lambda saved: saved.pop("transport"),
    "a text": lambda saved: saved.update(round="4"),
    "half a round": lambda saved: saved.update(round=4.5),
    "memories of nobody": lambda saved: saved.update(memories=3),
    "clients without numbers": lambda saved: saved.update(memories={"memories": {"x": "y"}}),
    "a memory of round 10⁹⁹": lambda saved: saved.update(memories={"memories": {"9" * 99: [1]}}),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_checkpoint_is_not_usable_and_no_traceback(
    copy: Callable[[str], Path], made: dict[str, Path], name: str
):
    folder = copy("scaffold-cut")
    rewrite(folder, CRAFTED[name])
    assert "checkpoint 000004.json is not usable" in resumed(folder, SCAFFOLD)[0]
    assert outcome(folder) == outcome(made["scaffold"])
    check(folder)


def crafted(folder: Path, where: tuple[str, ...], value: Any) -> None:
    """Puts a value into checkpoint 4, with checksums that are right; "*" is the first key."""
    path = folder / "checkpoints" / "000004.safetensors"
    tensors, meta = checkpoint.read(path)

    def change(saved: dict[str, Any]) -> None:
        part = saved if where[0] in saved else meta
        for key in where[:-1]:
            part = part[key]
        part[next(iter(part)) if where[-1] == "*" else where[-1]] = value
        checkpoint.write(path, tensors, meta)
        saved["tensors"] = checkpoint.checksum(path)

    rewrite(folder, change)


NONSENSE = [None, "x", [None], {"x": {}}, -1, math.nan, math.inf, 10**400]


@pytest.mark.parametrize(
    "where",
    [
        ("sampler", "relative"),
        ("sampler", "relative", "*"),
        ("alarm",),
        ("alarm", "seen"),
        ("alarm", "mean"),
        ("round",),
        ("gate", "norm"),
        ("gate", "weight"),
        ("weighting", "state"),
        ("weighting", "state", "*"),
    ],
    ids=".".join,
)
def test_nonsense_in_a_state_with_the_right_checksum_is_not_used(
    copy: Callable[[str], Path], made: dict[str, Path], where: tuple[str, ...]
):
    for value in NONSENSE:
        folder = copy("adafl-cut")
        crafted(folder, where, value)
        lost = resumed(folder, ADAFL)
        assert lost[0].startswith("checkpoint 000004.json is not usable: ")
        assert lost[1] == "going on after round 2"
        assert outcome(folder) == outcome(made["adafl"])
        shutil.rmtree(folder)


def test_a_run_that_starts_again_has_nothing_of_a_checkpoint_that_was_half_good(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    """The server's part can be read, the sampler's cannot, or the other way round."""
    for where in (("sampler", "relative"), ("gate", "norm")):
        folder = copy("adafl-cut")
        crafted(folder, where, "x")
        (folder / "checkpoints" / "000002.json").unlink()
        assert resumed(folder, ADAFL)[-1] == "going on from the start"
        assert outcome(folder) == outcome(made["adafl"])
        shutil.rmtree(folder)


# ------------------------------------------------------------------- summaries and settings


def forged(folder: Path, *, old: bool) -> None:
    path = folder / "summary.json"
    summary = {**json.loads(path.read_text()), "last10_accuracy": 0.999}
    if old:
        del summary["crc"]
    path.write_text(json.dumps(summary))


def test_compare_does_not_believe_a_forged_summary(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("plain")
    forged(folder, old=True)
    found, true = compare([folder]), compare([made["plain"]])
    assert found.groups[0].mean == true.groups[0].mean
    assert true.notes == []
    (note,) = found.notes
    assert "summary.json has last10_accuracy 0.999, its rounds give 0." in note
    assert note.endswith("the rounds count")
    assert states(folder)["summary.json"] == "damaged"


@pytest.mark.parametrize("left", [5, 0])
def test_compare_says_if_a_forged_summary_has_not_all_rounds_to_be_held_against(
    copy: Callable[[str], Path], left: int
):
    folder = copy("plain")
    forged(folder, old=True)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:left]))
    if not left:
        (folder / "rounds.jsonl").unlink()
    said = f"{folder}: rounds.jsonl has {left} of 6 rounds, and the summary counts"
    assert compare([folder]).notes == [said]


@pytest.mark.parametrize("summary", ['{"final_accuracy": 0.5}', '{"versions": 7}', "{}"])
def test_a_summary_that_lacks_a_number_is_not_exported_and_no_traceback(
    copy: Callable[[str], Path], tmp_path: Path, summary: str
):
    folder = copy("plain")
    (folder / "summary.json").write_text(summary)
    written, notes = export([folder], tmp_path)
    assert written == []
    assert "summary.json is damaged: it has no 'last10_accuracy'" in notes[0]


DEEP = f"rounds = {'[' * 5000}{']' * 5000}".encode()


@pytest.mark.parametrize("content", [b"\xff\xfe", DEEP, b"rounds = "], ids=["bytes", "deep", "cut"])
def test_settings_that_cannot_be_read_are_damaged_and_no_traceback(
    copy: Callable[[str], Path], content: bytes
):
    folder = copy("plain")
    (folder / "config.toml").write_bytes(content)
    assert states(folder)["config.toml"] == "damaged"
    for verb in (("compare", folder), ("replay", folder), ("run", folder / "config.toml")):
        done = call(*verb)
        assert done.exit_code == 2, (verb, done.exception)


def test_what_steers_a_terminal_is_only_shown(copy: Callable[[str], Path], made: dict[str, Path]):
    folder = copy("plain")
    path = folder / "config.toml"
    path.write_text(path.read_text().replace('name = "none"', r'name = "\u001b]0;x\u0007"', 1))
    done = call("compare", folder, made["plain"])
    assert done.exit_code == 0
    assert not {"\x1b", "\x07"} & set(done.output)
    assert r"\x1b]0;x\x07" in done.output


@pytest.mark.parametrize("name", ["log.txt", "checkpoints", "memories"])
@pytest.mark.parametrize("option", ["--resume", "--force"])
def test_a_run_follows_no_link_out_of_its_folder(
    copy: Callable[[str], Path], tmp_path: Path, name: str, option: str
):
    folder, mine = copy("plain"), tmp_path / "mine"
    (folder / "summary.json").unlink()
    mine.mkdir()
    (mine / "model.safetensors").write_text("mine")
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(mine / "model.safetensors" if name == "log.txt" else mine)
    done = call("run", "digits", *sets(PLAIN), "--out", folder, option)
    assert done.exit_code == 2, done.exception
    assert "is a link" in " ".join(done.stderr.split())
    assert (mine / "model.safetensors").read_text() == "mine"


def test_a_summary_that_was_changed_is_damaged(copy: Callable[[str], Path]):
    folder = copy("plain")
    forged(folder, old=False)
    assert states(folder)["summary.json"] == "damaged"
    for verb in (["compare", folder], ["run", "digits", *sets(PLAIN), "--out", folder]):
        done = call(*verb)
        assert done.exit_code == 2
        assert "its checksum does not match. Remove that file and go on with" in done.stderr


def sets(settings: dict[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("key", ["last10_accuracy", "final_accuracy", "rounds", "seconds"])
@pytest.mark.parametrize("value", [None, "much"])
def test_a_finished_run_whose_summary_lacks_a_number_is_a_message(
    copy: Callable[[str], Path], key: str, value: str | None
):
    folder = copy("plain")
    summary = Run(folder).summary or {}
    summary.pop(key)
    if value:
        summary[key] = value
    (folder / "summary.json").write_text(json.dumps(summary))
    done = call("run", "digits", *sets(PLAIN), "--out", folder)
    assert done.exit_code == 2, done.exception
    said = f"it has no '{key}'" if value is None else f"its '{key}' is no number"
    assert f"summary.json is damaged: {said}. Remove that file and go on with --resume" in " ".join(
        done.stderr.split()
    )


def test_settings_that_were_changed_are_said(copy: Callable[[str], Path]):
    folder = copy("plain")
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("gamma = 0.02", "gamma = 0.03"))
    assert states(folder)["config.toml"] == "damaged"
    told = "config.toml was changed after the run wrote it: its checksum does not match"
    assert told in compare([folder]).notes[0]
    assert told in Run(folder).read().missing
    assert told in read_record(folder).notes


# -------------------------------------------------------------------------- the command line


def test_the_command_says_each_file_and_ends_with_1_if_one_is_damaged(
    copy: Callable[[str], Path],
):
    folder = copy("scaffold")
    good = call("check", folder)
    assert good.exit_code == 0
    assert "good         rounds.jsonl  (rounds: 6)" in good.stdout
    path = sorted((folder / "memories").rglob("*.safetensors"))[-1]
    path.unlink()
    bad = call("check", folder)
    assert bad.exit_code == 1
    assert f"missing      {path.relative_to(folder)}" in bad.stdout
    (found,) = json.loads(call("check", folder, "--json").stdout)
    assert (found["folder"], found["good"]) == (str(folder), False)
    assert {"missing", "good"} == {file["state"] for file in found["files"]}


def test_what_a_killed_write_left_is_said(copy: Callable[[str], Path]):
    folder = copy("plain")
    (folder / ".summary.json.0123456789abcdef.tmp").write_text("half")
    done = call("check", folder)
    assert done.exit_code == 0
    assert "left behind  .summary.json.0123456789abcdef.tmp" in done.stdout


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path: Path):
    for path in (tmp_path, tmp_path / "absent"):
        done = call("check", path)
        assert (done.exit_code, done.stderr[:6]) == (2, "error:")


def test_pipes_in_place_of_files_do_not_stop_it(copy: Callable[[str], Path]):
    folder = copy("plain")
    for name in ("config.toml", "rounds.jsonl", "checkpoints/000006.safetensors"):
        (folder / name).unlink()
        os.mkfifo(folder / name)  # reading it would wait for ever
    found = states(folder)
    for name in ("config.toml", "rounds.jsonl", "checkpoints/000006.safetensors"):
        assert found[name] == "missing"
        (folder / name).unlink()


@pytest.mark.slow
def test_resume_says_in_the_terminal_what_is_lost(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("scaffold-cut")
    newest(folder)[0].unlink()
    done = cli("run", "digits", *sets(SCAFFOLD), "--out", folder, "--resume", "--keep-state")
    assert done.returncode == 0, done.stderr
    assert "warning: checkpoint 000004.json is not usable: the memory of client" in done.stderr
    assert "going on after round 2" in done.stderr
    assert "checkpoint 000004.json is not usable" in (folder / "log.txt").read_text()
    assert outcome(folder) == outcome(made["scaffold"])
