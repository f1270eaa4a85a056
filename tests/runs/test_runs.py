"""A run's folder: what is in it, what is refused, and that a stopped run loses nothing."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from run_support import TINY, cli, facts, outcome, start, until

from fedglad.config.schema import Config, load
from fedglad.core import checkpoint
from fedglad.data.digits import Digits
from fedglad.models.softmax import SoftmaxRegression
from fedglad.runs import Run, RunError, execute

QUICK = {**TINY, "engine.name": "serial", "rounds": 6, "checkpoint_every": 2}


def quick(**more: Any) -> Config:
    return load("digits", {**QUICK, **{k.replace("__", "."): v for k, v in more.items()}})[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What the quick run gives when nothing happens to it."""
    folder = tmp_path_factory.mktemp("runs") / "reference"
    execute("digits", quick(), out=folder)
    return outcome(folder)


def stopped(folder: Path, after: int, config: Config | None = None) -> None:
    """A run whose process is gone right after a round was recorded."""

    def on_round(found: Any) -> None:
        if found.t == after:
            os._exit(9)

    if (child := os.fork()) == 0:
        try:
            execute("digits", config or quick(), out=folder, on_round=on_round)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


# ------------------------------------------------------------------------------------- contents


def test_the_folder_holds_what_the_design_says(tmp_path: Path):
    run = execute("digits", quick(), out=tmp_path / "run")
    assert {path.name for path in run.folder.iterdir()} == {
        "config.toml",
        "labels.json",
        "rounds.jsonl",
        "summary.json",
        "model.safetensors",
        "averaged.safetensors",
        "checkpoints",
        "log.txt",
    }
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {
        "000004.json",
        "000004.safetensors",
        "000006.json",
        "000006.safetensors",
    }
    assert load(run.folder / "config.toml")[1] == quick()


def test_a_round_has_the_fields_of_the_design(tmp_path: Path):
    run = execute("digits", quick(eval_every=4), out=tmp_path / "run")
    rounds = run.rounds()
    assert [found["round"] for found in rounds] == [0, 1, 2, 3, 4, 5]
    for found in rounds:
        assert found.keys() >= {
            *("round", "status", "clients", "train_loss", "test_loss", "test_accuracy"),
            *("label_similarity", "gsi_all", "tensors", "groups", "gsi_unfiltered", "seconds"),
            "alarm",
        }
        assert found["status"] == "stepped"
        assert found["tensors"].keys() == found["groups"].keys() == {"weight", "bias"}
        assert all(t.keys() == {"sum_sq", "sum_sq2", "mean_sq"} for t in found["tensors"].values())
        assert all(g.keys() == {"gsi", "baseline", "scale"} for g in found["groups"].values())
        known = {"id", "weight", "loss", "sq_norm", "trust"}
        assert all(c.keys() - {"flags"} == known for c in found["clients"])
    tested = [found["round"] for found in rounds if found["test_accuracy"] is not None]
    assert tested == [3, 5]  # after every fourth round, and after the last


def test_the_summary_is_the_mean_of_the_last_ten(tmp_path: Path):
    run = execute("digits", quick(rounds=13), out=tmp_path / "run")
    accuracies = [found["test_accuracy"] for found in run.rounds()]
    summary = run.summary
    assert summary
    assert summary.keys() >= {
        *("last10_accuracy", "final_accuracy", "rounds", "seconds", "versions", "machine")
    }
    assert summary["last10_accuracy"] == pytest.approx(sum(accuracies[3:]) / 10, rel=1e-15)
    assert summary["final_accuracy"] == accuracies[-1]
    assert summary["rounds"] == 13
    assert summary["seconds"] > 0


def test_the_last_checkpoint_is_the_final_model(tmp_path: Path, reference: tuple[Any, ...]):
    run = execute("digits", quick(), out=tmp_path / "run")
    tensors, meta = checkpoint.read(run.folder / "checkpoints" / "000006.safetensors")
    assert meta["round"] == 6
    model = SoftmaxRegression(features=64).build()
    model.load_state_dict(
        {n.removeprefix("params/"): t for n, t in tensors.items() if n.startswith("params/")}
    )
    x, y = Digits().load_federation().test()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).double().mean().item()
    assert run.summary
    assert accuracy == pytest.approx(run.summary["final_accuracy"], abs=1e-12)
    assert outcome(run.folder) == reference


def test_the_default_folder_is_named_by_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = execute("digits", quick())
    assert run.folder == Path("runs") / f"digits-{quick().hash()}"
    assert run.summary


def test_a_model_that_diverges_ends_with_records_not_with_an_error(tmp_path: Path):
    """Three layers of 1e15 overflow, so the test loss is no number; the clients' neither."""
    given = {"server.lr": 1e15, "rounds": 4, "client.epochs": 1, "engine.name": "serial"}
    run = execute("digits", load("digits", given)[1], out=tmp_path / "run")
    assert [found["round"] for found in run.rounds()] == [0, 1, 2, 3]
    assert run.summary
    assert 0 <= run.summary["final_accuracy"] <= 1


# -------------------------------------------------------------------------------------- refused


def test_a_finished_run_is_left_as_it_is(tmp_path: Path):
    folder = tmp_path / "run"
    execute("digits", quick(), out=folder)
    before = contents(folder)
    seen: list[Any] = []
    for resume in (False, True):
        run = execute("digits", quick(), out=folder, resume=resume, on_round=seen.append)
        assert run.summary
    other_engine = load("digits", {**QUICK, "engine.name": "local", "engine.workers": 2})[1]
    execute("digits", other_engine, out=folder)  # the result does not depend on it
    assert not seen
    assert contents(folder) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_another_configuration_is_refused(tmp_path: Path, resume: bool):
    folder = tmp_path / "run"
    execute("digits", quick(), out=folder)
    before = contents(folder)
    with pytest.raises(
        RunError,
        match=r"another configuration \(seed = 1, not 2\): choose another --out, or .*--force",
    ):
        execute("digits", quick(seed=2), out=folder, resume=resume)
    assert contents(folder) == before


def older(folder: Path) -> None:
    """As if the run had been made before FORMAT was raised."""
    for path in [folder / "summary.json", *(folder / "checkpoints").glob("*.json")]:
        if path.is_file():
            saved = json.loads(path.read_text())
            del saved.get("versions", saved)["format"], saved["crc"]
            path.write_text(json.dumps(saved))


def test_a_run_with_other_random_draws_is_neither_finished_nor_resumed(tmp_path: Path):
    for name, prepare in {
        "finished": lambda folder: execute("digits", quick(), out=folder),
        "unfinished": lambda folder: stopped(folder, after=3),
    }.items():
        prepare(tmp_path / name)
        older(tmp_path / name)
        with pytest.raises(RunError, match=r"another version of fedglad.*--force"):
            execute("digits", quick(), out=tmp_path / name, resume=True)
        execute("digits", quick(), out=tmp_path / name, force=True)


@dataclass(frozen=True, kw_only=True)
class Reordered(SoftmaxRegression):
    """A model whose sums were added up in another order before."""

    features: int = 64
    arithmetic: ClassVar[int] = 2


def states(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    found = sorted((folder / "checkpoints").glob("*.json"))
    return [(path, json.loads(path.read_text())) for path in found]


def test_a_run_whose_models_sums_were_added_up_otherwise_is_not_resumed(tmp_path: Path):
    config = quick(model__name="runs.test_runs:Reordered")
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "run", 3, config)
    assert all(state["arithmetic"] == 2 for _, state in states(tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    execute("digits", config, out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    for path, state in states(tmp_path / "older"):
        del state["arithmetic"], state["crc"]  # as it was before there was a second way
        path.write_text(json.dumps(state))
    before = contents(tmp_path / "older")
    told = r"another version of fedglad.*another order.*that version, choose another --out.*--force"
    with pytest.raises(RunError, match=told):
        execute("digits", config, out=tmp_path / "older", resume=True)
    after = contents(tmp_path / "older")
    assert {k: v for k, v in after.items() if k != "log.txt"} == {
        k: v for k, v in before.items() if k != "log.txt"
    }
    execute("digits", config, out=tmp_path / "older", force=True)
    assert outcome(tmp_path / "older") == outcome(tmp_path / "whole")


def test_a_finished_run_stays_however_its_models_sums_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = quick(model__name="runs.test_runs:Reordered")
    run = execute("digits", config, out=tmp_path / "run")
    monkeypatch.setattr(Reordered, "arithmetic", 3)
    assert quick(model__name="runs.test_runs:Reordered").hash() == config.hash()
    before = contents(run.folder)
    assert execute("digits", config, out=run.folder).summary == run.summary
    assert contents(run.folder) == before


def test_most_models_were_never_computed_otherwise(tmp_path: Path):
    run = execute("digits", quick(), out=tmp_path / "run")
    assert [set(state) for _, state in states(run.folder)] == 2 * [
        {"format", "round", "sampler", "alarm", "transport", "tensors", "crc"}
    ]


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path):
    folder = tmp_path / "run"
    stopped(folder, after=3)
    before = contents(folder)
    with pytest.raises(RunError, match=r"unfinished run: go on with --resume, or .*--force"):
        execute("digits", quick(), out=folder)
    assert contents(folder) == before


@pytest.mark.parametrize("seed", [1, 2])
def test_force_replaces_only_our_files(tmp_path: Path, seed: int):
    folder = tmp_path / "run"
    execute("digits", quick(seed=seed), out=folder)
    (folder / "notes.md").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.png").write_text("mine too")
    run = execute("digits", quick(rounds=2), out=folder, force=True)
    assert len(run.rounds()) == 2
    assert [p.stem for p in (folder / "checkpoints").glob("*.json")] == ["000002"]
    assert (folder / "notes.md").read_text() == "mine"
    assert (folder / "plots" / "a.png").read_text() == "mine too"


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"force": True}])
def test_a_folder_that_another_process_is_writing_is_refused(
    tmp_path: Path, options: dict[str, Any], reference: tuple[Any, ...]
):
    folder = tmp_path / "run"
    seen: list[str] = []

    def on_round(found: Any) -> None:
        if found.t != 3:
            return
        before = contents(folder)
        with pytest.raises(RunError, match=r"run is being written by another process: wait for it"):
            execute("digits", quick(), out=folder, **options)
        assert contents(folder) == before
        seen.append("refused")

    execute("digits", quick(), out=folder, on_round=on_round)
    assert seen == ["refused"]
    assert outcome(folder) == reference
    execute("digits", quick(), out=folder, **options)  # nobody has it now


def test_the_log_that_force_empties_stays_locked(tmp_path: Path):
    folder = tmp_path / "run"
    execute("digits", quick(), out=folder)
    log = folder / "log.txt"
    log.write_text("old")
    before = log.stat().st_ino
    execute("digits", quick(), out=folder, force=True)
    assert (log.read_text(), log.stat().st_ino) == ("", before)


def test_force_leaves_the_old_run_when_the_new_one_cannot_start(tmp_path: Path):
    folder = tmp_path / "run"
    execute("digits", quick(), out=folder)
    before = contents(folder)
    with pytest.raises(ValueError, match="more than the 50 clients"):
        execute("digits", quick(sampler__clients_per_round=51), out=folder, force=True)
    assert contents(folder) == before


def test_a_run_that_cannot_start_leaves_nothing_to_resume(tmp_path: Path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="more than the 50 clients"):
        execute("digits", quick(sampler__clients_per_round=51), out=folder)
    assert execute("digits", quick(), out=folder).summary  # the same folder, now with a good one


def test_a_foreign_folder_is_used_without_harm(tmp_path: Path):
    (tmp_path / "data.csv").write_text("1,2")
    assert execute("digits", quick(), out=tmp_path).summary
    assert (tmp_path / "data.csv").read_text() == "1,2"


# -------------------------------------------------------------------------------------- resumed


@pytest.mark.parametrize("after", range(6))
def test_a_run_stopped_after_any_round_goes_on_to_the_same_result(
    tmp_path: Path, reference: tuple[Any, ...], after: int
):
    stopped(tmp_path / "run", after)
    seen: list[int] = []
    run = execute(
        "digits", quick(), out=tmp_path / "run", resume=True, on_round=lambda f: seen.append(f.t)
    )
    # The checkpoint that `after` would have triggered was not written yet.
    assert seen == list(range(after // 2 * 2, 6))
    assert outcome(run.folder) == reference


STATEFUL = {
    "adam+glad": {"server.name": "adam", "adapter.gamma": 0.5},
    "yogi+fedexp": {"server.name": "yogi", "adapter.name": "fedexp"},
    "momentum+fedadp": {"server.name": "momentum", "weighting.name": "fedadp"},
    "scripted": {"sampler.name": "scripted", "sampler.cohorts": {"3": [7, 1]}},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_everything_that_has_state_is_resumed(tmp_path: Path, name: str):
    config = load("digits", {**QUICK, **STATEFUL[name]})[1]
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", 4, config)
    execute("digits", config, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_run_can_go_on_with_another_engine(tmp_path: Path, reference: tuple[Any, ...]):
    stopped(tmp_path / "run", 3)
    local = load("digits", {**QUICK, "engine.name": "local", "engine.workers": 2})[1]
    execute("digits", local, out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == reference


def test_resume_of_nothing_starts(tmp_path: Path, reference: tuple[Any, ...]):
    execute("digits", quick(), out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == reference


@pytest.mark.parametrize("tail", ['{"round": 4, "stat', '{"round": 4}\n{"ro', "\n", "\x00\x00"])
def test_a_half_written_last_line_of_the_records_is_dropped(
    tmp_path: Path, reference: tuple[Any, ...], tail: str
):
    stopped(tmp_path / "run", 4)
    with open(tmp_path / "run" / "rounds.jsonl", "r+") as records:
        lines = records.read().splitlines(keepends=True)
        records.seek(0)
        records.truncate()
        records.write("".join(lines[:4]) + tail)
    assert [f["round"] for f in Run(tmp_path / "run").rounds()][:4] == [0, 1, 2, 3]
    execute("digits", quick(), out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == reference


def test_a_last_line_of_noise_is_dropped(tmp_path: Path, reference: tuple[Any, ...]):
    stopped(tmp_path / "run", 4)
    with open(tmp_path / "run" / "rounds.jsonl", "ab") as records:
        records.write(b"\xc3\x00\xff")  # a disk's answer to a power cut
    execute("digits", quick(), out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == reference


def test_records_that_lack_rounds_are_an_error_that_says_so(tmp_path: Path):
    stopped(tmp_path / "run", 4)
    (tmp_path / "run" / "rounds.jsonl").write_text("")
    with pytest.raises(
        RunError, match=r"lacks rounds: choose another --out, or replace the run with --force"
    ):
        execute("digits", quick(), out=tmp_path / "run", resume=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


def flipped(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-50] ^= 0x40
    path.write_bytes(whole)


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(200))


def braces(path: Path) -> None:
    path.write_text("{}")


def null(path: Path) -> None:
    path.write_text("null")


DAMAGE = [
    *((".safetensors", damage) for damage in (cut, empty, gone, flipped, garbage, braces)),
    *((".json", damage) for damage in (empty, gone, garbage, braces, null)),
]


@pytest.mark.parametrize(("suffix", "damage"), DAMAGE)
def test_a_damaged_last_checkpoint_is_reported_and_the_one_before_used(
    tmp_path: Path, reference: tuple[Any, ...], suffix: str, damage: Callable[[Path], None]
):
    folder = tmp_path / "run"
    stopped(folder, 5)  # checkpoints 2 and 4
    damage(folder / "checkpoints" / f"000004{suffix}")
    seen: list[int] = []
    execute("digits", quick(), out=folder, resume=True, on_round=lambda f: seen.append(f.t))
    assert seen == [2, 3, 4, 5]
    assert outcome(folder) == reference
    if (suffix, damage) != (".json", gone):  # without it there is no checkpoint to speak of
        assert "000004" in (folder / "log.txt").read_text()


def test_no_single_flipped_bit_of_a_checkpoint_changes_the_result(
    tmp_path: Path, reference: tuple[Any, ...]
):
    """Bits in the header too: it has the round, the baseline and the guard's medians."""
    folder = tmp_path / "run"
    stopped(folder, 5)
    copy = tmp_path / "copy"
    path = copy / "checkpoints" / "000004.safetensors"
    shutil.copytree(folder, copy)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    rng = random.Random(7)
    wrong: list[tuple[int, str]] = []
    for place in [*rng.sample(range(8 + length), 30), *rng.sample(range(len(whole)), 10)]:
        shutil.rmtree(copy)
        shutil.copytree(folder, copy)
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            execute("digits", quick(), out=copy, resume=True)
            if outcome(copy) != reference:
                wrong.append((place, "another result"))
        except Exception as error:
            wrong.append((place, repr(error)))
    assert not wrong, f"{len(wrong)} of 40: {wrong[:5]}, the header ends at {8 + length}"


def test_all_checkpoints_damaged_starts_from_the_first_round(
    tmp_path: Path, reference: tuple[Any, ...]
):
    folder = tmp_path / "run"
    stopped(folder, 5)
    for path in (folder / "checkpoints").glob("*.safetensors"):
        cut(path)
    execute("digits", quick(), out=folder, resume=True)
    assert outcome(folder) == reference


def test_what_a_kill_in_the_middle_of_writing_left_is_cleared_away(
    tmp_path: Path, reference: tuple[Any, ...]
):
    """Else every kill during a save of a large model costs its size on the disk, for ever."""
    folder = tmp_path / "run"
    stopped(folder, 4)
    (folder / "checkpoints" / ".000004.safetensors.999999.tmp").write_bytes(b"half")
    (folder / ".rounds.jsonl.999999.tmp").write_text("half")
    (folder / "checkpoints" / "000003.safetensors").write_bytes(b"its .json was never written")
    execute("digits", quick(), out=folder, resume=True)
    assert outcome(folder) == reference
    assert not list(folder.rglob(".*.tmp"))
    assert len(list((folder / "checkpoints").iterdir())) == 4


# ------------------------------------------------------------------ crashes and a full disk, exact

TOUCHED = [(Path, "write_text"), (Path, "replace"), (Path, "unlink"), (os, "fsync")]


class Trap:
    """Counts every change of the disk, and does something at the n-th."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        self.count, self.at, self.act = 0, at, act

    def __enter__(self) -> "Trap":
        self.originals = [(owner, name, getattr(owner, name)) for owner, name in TOUCHED]
        for owner, name, original in self.originals:
            setattr(owner, name, self._wrapped(original))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self.originals:
            setattr(owner, name, original)

    def _wrapped(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.act()
            return original(*args, **kwargs)

        return call


CHANGES = 58  # a quick run touches the disk some 56 times in these ways


@pytest.mark.parametrize("part", range(4))
def test_a_crash_at_any_change_of_the_disk_loses_nothing(
    tmp_path: Path, reference: tuple[Any, ...], part: int
):
    reached = 0
    for at in range(1 + part, CHANGES, 4):
        folder = tmp_path / str(at)
        if (child := os.fork()) == 0:
            with Trap(at, lambda: os._exit(9)):
                execute("digits", quick(), out=folder)
            os._exit(0)
        crashed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        reached += crashed
        execute("digits", quick(), out=folder, resume=True)
        assert outcome(folder) == reference, f"after a crash at change {at}"
    assert reached > 5


@pytest.mark.parametrize("part", range(2))
def test_a_disk_that_fails_at_any_change_stops_the_run_cleanly(
    tmp_path: Path, reference: tuple[Any, ...], part: int
):
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    messages: list[str] = []
    for at in range(1 + part, CHANGES, 3):
        folder = tmp_path / str(at)
        try:
            with Trap(at, full):
                execute("digits", quick(), out=folder)
        except RunError as error:
            messages.append(str(error))
        execute("digits", quick(), out=folder, resume=True)
        assert outcome(folder) == reference, f"after a full disk at change {at}"
    assert len(messages) > 5
    assert all("No space left on device" in said and "--resume" in said for said in messages)


# -------------------------------------------------------------------------- real processes, kills

PROCESS = [
    *("run", "digits", "--set", "rounds=120", "--set", "checkpoint_every=2"),
    *("--set", "engine.workers=2", "--set", "client.epochs=3"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert cli(*PROCESS, "--out", folder).returncode == 0
    return outcome(folder)


@pytest.mark.slow
def test_killed_at_ten_random_moments_and_resumed_equals_the_uninterrupted_run(
    tmp_path: Path, uninterrupted: tuple[Any, ...]
):
    rng = random.Random(3)
    folder = tmp_path / "run"
    records = folder / "rounds.jsonl"

    def written() -> int:
        return records.stat().st_mtime_ns if records.exists() else 0

    kills = 0
    for turn in range(10):
        before = written()
        process = start(*PROCESS, "--out", folder, "--resume")
        if turn % 3 == 0:  # sometimes while it starts, mostly while it trains and saves
            time.sleep(rng.uniform(0, 1.5))
        else:
            until(lambda before=before: written() != before)
            time.sleep(rng.uniform(0, 0.4))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills == 10, "the run was over before it could be killed ten times: make it longer"
    assert Run(folder).summary is None
    finished = cli(*PROCESS, "--out", folder, "--resume")
    assert finished.returncode == 0, finished.stderr
    assert outcome(folder) == uninterrupted


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Ctrl-C: the terminal sends it to the whole group, the workers too."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(
    tmp_path: Path, uninterrupted: tuple[Any, ...]
):
    folder = tmp_path / "run"
    process = start(*PROCESS, "--set", "checkpoint_every=2", "--out", folder)
    until(lambda: len(Run(folder).rounds()) >= 3)
    interrupt(process)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "--resume" in said
    rounds = len(Run(folder).rounds())
    assert (folder / "checkpoints" / f"{rounds:06d}.json").is_file()
    assert f"stopped after {rounds} of 120 rounds" in " ".join(said.split())
    assert cli(*PROCESS, "--out", folder, "--resume").returncode == 0
    assert outcome(folder) == uninterrupted


SLOW = [
    *("run", "digits", "--set", "data.name=run_support:Slow", "--set", "rounds=2"),
    *("--set", "checkpoint_every=1", "--set", "engine.workers=2"),
]


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_loses_only_that_round(tmp_path: Path):
    folder = tmp_path / "run"
    # Six clients of 1 s each for two workers: a round takes 3 s.
    slow = [*SLOW, "--set", "data.seconds=1", "--set", "sampler.clients_per_round=6"]
    process = start(*slow, "--out", folder)
    until(lambda: (folder / "checkpoints" / "000001.json").exists())  # the first round is over
    interrupt(process)
    time.sleep(0.3)
    assert process.poll() is None  # it waits for the round
    interrupt(process)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "--resume" in said
    assert len(Run(folder).rounds()) == 1  # and not 2, as if it had waited
    assert [p.name for p in (folder / "checkpoints").glob("*.json")] == ["000001.json"]
    assert cli(*slow, "--out", folder, "--resume").returncode == 0
    assert cli(*slow, "--out", tmp_path / "whole").returncode == 0
    assert outcome(folder) == outcome(tmp_path / "whole")


ENDLESS = [*SLOW, "--set", "rounds=10000", "--set", "sampler.clients_per_round=4"]


def is_refused(code: int | None, said: str) -> bool:
    return code == 2 and "is being written by another process" in " ".join(said.split())


def stops_in_good_order(process: "subprocess.Popen[str]", folder: Path) -> bool:
    interrupt(process)
    process.communicate(timeout=60)
    found = [played["round"] for played in Run(folder).rounds()]
    return process.returncode == 130 and found == list(range(len(found)))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--resume", "--force"])
def test_of_two_processes_at_one_folder_one_is_refused(tmp_path: Path, option: str):
    folder = tmp_path / "run"
    first = start(*ENDLESS, "--out", folder, "--resume")
    until(lambda: Run(folder).rounds())
    second = cli(*ENDLESS, "--out", folder, option)
    assert is_refused(second.returncode, second.stderr), second.stderr
    assert stops_in_good_order(first, folder)


@pytest.mark.slow
def test_of_two_processes_that_start_together_one_runs(tmp_path: Path):
    folder = tmp_path / "run"
    both = [start(*ENDLESS, "--out", folder, "--resume") for _ in range(2)]
    until(lambda: any(process.poll() is not None for process in both))
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    assert is_refused(loser.returncode, loser.communicate()[1])
    until(lambda: Run(folder).rounds())
    assert stops_in_good_order(winner, folder)


@pytest.mark.slow
def test_ctrl_c_in_the_last_round_lets_the_run_finish(tmp_path: Path):
    folder = tmp_path / "run"
    process = start(*SLOW, "--set", "sampler.clients_per_round=4", "--out", folder)
    until(lambda: (folder / "checkpoints" / "000001.json").exists())  # the first round is over
    interrupt(process)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert Run(folder).summary


@pytest.mark.slow
def test_ctrl_c_while_it_starts_ends_without_a_traceback(tmp_path: Path):
    """Once our own code runs, that is: while Python imports torch, Python speaks."""
    process = start(*PROCESS, "--out", tmp_path / "run")
    until(lambda: (tmp_path / "run").exists())
    interrupt(process)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said


FULL = [
    *("run", "digits", "--set", "rounds=30", "--set", "checkpoint_every=2"),
    *("--set", "client.epochs=1"),
    *("--set", "trust.name=none", "--set", "average.name=none"),  # checkpoints stay small
]


def check_full(folder: Path, stopped: "subprocess.CompletedProcess[str]", copy: Path) -> None:
    """A clean stop, and the run goes on where there is room."""
    said = " ".join(stopped.stderr.split())
    assert stopped.returncode == 2, said
    assert "Traceback" not in stopped.stderr
    assert "could not be written" in said
    assert "--resume" in said
    shutil.copytree(folder, copy)
    last = max((copy / "checkpoints").glob("*.json"))
    checkpoint.read(last.with_suffix(".safetensors"))  # intact
    assert not list(copy.rglob(".*.tmp"))
    finished = cli(*FULL, "--out", copy, "--resume")
    assert finished.returncode == 0, finished.stderr


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("runs") / "roomy"
    assert cli(*FULL, "--out", folder).returncode == 0
    return outcome(folder)


@pytest.mark.slow
def test_records_too_large_to_write_stop_the_run_cleanly(tmp_path: Path, roomy: tuple[Any, ...]):
    # A checkpoint has 46 kB, a record 2.5 kB: at 60 kB the records are cut after some 24 rounds.
    limit = 60_000
    folder = tmp_path / "run"
    stopped = cli(
        *(*FULL, "--set", "engine.name=serial", "--out", folder),  # shared memory is a file too
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert 10 < len(Run(folder).rounds()) < 30
    check_full(folder, stopped, tmp_path / "copy")
    assert outcome(tmp_path / "copy") == roomy


@pytest.mark.slow
@pytest.mark.parametrize("room", [110_000, 140_000, 160_000])
def test_a_full_disk_stops_the_run_cleanly(tmp_path: Path, roomy: tuple[Any, ...], room: int):
    """A real file system: with so little room it is a checkpoint, or a record, that fails."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        stopped = cli(*FULL, "--out", disk / "run")
        assert 1 < len(Run(disk / "run").rounds()) < 30
        check_full(disk / "run", stopped, tmp_path / "copy")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert outcome(tmp_path / "copy") == roomy


@pytest.mark.slow
def test_a_failing_client_leaves_its_traceback_in_the_log(tmp_path: Path):
    folder = tmp_path / "run"
    done = cli(
        *("run", "digits", "--set", "rounds=3", "--set", "data.name=run_support:Raising"),
        *("--set", "data.kills=5", "--set", "sampler.clients_per_round=12", "--out", folder),
        *("--set", "engine.workers=2", "--set", "engine.client_timeout=60"),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for found in Run(folder).rounds():
        why = {c["id"]: c["rejected"] for c in found["clients"] if "rejected" in c}
        assert why == {
            3: "KeyError: 'the file of this client is missing'",
            5: "its worker died 3 times",
        }
    log = (folder / "log.txt").read_text()
    assert log.count("Traceback (most recent call last)") == 3
    assert "client 3 failed" in log
    assert "in before" in log  # the line of the user's own code
    assert "client 5 left out: its worker died 3 times" in log
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3


def test_facts_leave_out_times_alone():
    assert facts({"round": 1, "seconds": {"train": 1}}) == {"round": 1}


def test_resuming_leaves_foreign_files_alone(tmp_path: Path):
    out = tmp_path / "run"
    config = load("digits", {**TINY, "rounds": 2})[1]
    (out / "checkpoints").mkdir(parents=True)
    (out / ".tmp").mkdir()
    mine = [out / ".tmp-notes", out / ".tmp" / "mine", out / "checkpoints" / ".notes.tmp"]
    for path in mine:
        path.write_text("mine")
    half = out / "checkpoints" / ".000001.safetensors.4711.tmp"  # a killed run's
    half.write_text("half")
    execute("digits", config, out=out)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert not half.exists()
