"""`fedglad sweep`: the grid, real processes, and that no run's end harms another."""

import fcntl
import json
import multiprocessing
import os
import pty
import shutil
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import said
from run_support import TINY, alive, cli, command, environment, outcome, start, until
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.config.schema import ConfigError, load
from fedglad.runs import Run, execute
from fedglad.runs.places.base import alone as one_process
from fedglad.runs.sweeping import Event, Task, sweep, tasks
from fedglad.simulation.engines.settings import Local, Serial
from runs.test_runs import contents, stopped

QUICK = {**TINY, "rounds": 6, "checkpoint_every": 2}
SLOW = {**QUICK, "data.name": "run_support:Slow", "data.seconds": 0.05}


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "80"})


def given(overrides: dict[str, Any]) -> list[str]:
    return [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]


def plan(out: Path, *grids: str, **more: Any) -> list[Task]:
    return tasks(
        "digits", grids, {**QUICK, **{k.replace("__", "."): v for k, v in more.items()}}, out
    )


def ends(found: list[Event]) -> list[tuple[Any, str]]:
    """(seed, how it ended), in the order of the grid."""
    done = {event.task.settings["seed"]: event.what for event in found if event.what in ENDS}
    return sorted(done.items())


ENDS = ("kept", "finished", "failed", "stopped")


# --------------------------------------------------------------------------------------- the grid


def test_every_combination_is_a_task_and_the_last_grid_changes_fastest(tmp_path: Path):
    found = plan(tmp_path, "seed=1,2", "adapter.name=none,glad")
    assert [tuple(task.settings.values()) for task in found] == [
        (1, "none"),
        (1, "glad"),
        (2, "none"),
        (2, "glad"),
    ]
    for task in found:
        assert task.config == load("digits", {**QUICK, **task.settings})[1]
        assert task.folder == tmp_path / f"digits-{task.config.hash()}"


def test_commas_in_brackets_and_quotations_do_not_separate(tmp_path: Path):
    found = tasks(
        "digits",
        ['sampler.cohorts={"0" = [1, 2], "3" = [4, 5]},{"0" = [6, 7]}'],
        {"sampler.name": "scripted"},
        tmp_path,
    )
    assert [task.settings["sampler.cohorts"] for task in found] == [
        {"0": [1, 2], "3": [4, 5]},
        {"0": [6, 7]},
    ]
    found = tasks("digits", ["adapter.groups='all', \"layer\" ,tensor"], {}, tmp_path)
    assert [task.settings["adapter.groups"] for task in found] == ["all", "layer", "tensor"]
    with pytest.raises(ConfigError, match=r"'al,l'"):
        tasks("digits", ["adapter.groups='al,l'"], {}, tmp_path)


def test_the_same_configuration_is_one_task(tmp_path: Path):
    assert len(plan(tmp_path, "seed=1,2,1")) == 2
    assert len(plan(tmp_path, "engine.name=serial,local")) == 1  # the result is the same


MISTAKES = [
    ([], "a sweep needs a grid: --grid seed=1,2,3"),
    (["--grid", "seed"], "write it as KEY=V1,V2"),
    (["--grid", "seed="], "write it as KEY=V1,V2"),
    (["--grid", "=1"], "write it as KEY=V1,V2"),
    (["--grid", "seed=1,,2"], "write it as KEY=V1,V2"),
    (["--grid", "seed=1", "--grid", "seed=2"], "'seed' is there twice"),
    (["--grid", "seed=1,2", "--set", "seed=3"], "'seed' is both set and in a grid"),
    (["--grid", "sed=1"], "unknown key 'sed': did you mean 'seed'?"),
    (["--grid", "seed=1,x"], "seed = 'x': must be a whole number (with seed=x)"),
    (["--grid", "adapter.name=none,gladd"], "did you mean 'glad'?"),
    (
        ["--grid", "adapter.name=glad,none", "--set", "adapter.gamma=0.1"],
        "unknown key 'adapter.gamma': choose from groups, min_group, name (with adapter.name=none)",
    ),
    (["--grid", "seed=1", "--jobs", "0"], "--jobs"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_anywhere_in_the_grid_runs_nothing(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = call("sweep", "digits", *args)
    assert result.exit_code == 2, result.exception
    assert message in said(result)
    assert not result.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_preset_and_an_out_that_cannot_be(tmp_path: Path):
    assert "did you mean 'digits'?" in said(call("sweep", "digit", "--grid", "seed=1"))
    (tmp_path / "taken").write_text("mine")
    result = call("sweep", "digits", "--grid", "seed=1", "--out", tmp_path / "taken")
    assert result.exit_code == 2
    assert f"the folder {tmp_path / 'taken'} cannot be made: File exists" in said(result)


def test_jobs_have_one_process_each():
    def engine(**settings: Any) -> Any:
        keys = {f"engine.{key}": value for key, value in settings.items()}
        return one_process(load("digits", keys)[1]).sections["engine"]

    assert engine() == Serial()
    assert engine(workers=4) == Serial()
    assert engine(name="serial") == Serial()
    assert engine(workers=4, client_timeout=9) == Local(workers=1, client_timeout=9)


# ---------------------------------------------------------------------------------- what is run


def test_a_sweep_gives_the_same_bits_as_each_run_alone(tmp_path: Path):
    found = plan(tmp_path / "sweep", "seed=1,2", "adapter.name=none,glad", engine__workers=2)
    told = list(sweep(found, jobs=2))
    assert [event.what for event in told].count("finished") == 4
    for task in found:
        rounds = [e.round for e in told if e.round and e.task == task]
        assert [done.t for done in rounds] == [0, 1, 2, 3, 4, 5]
        execute("digits", task.config, out=tmp_path / "alone" / task.folder.name)
        assert outcome(task.folder) == outcome(tmp_path / "alone" / task.folder.name)
        assert load(task.folder / "config.toml")[1].hash() == task.config.hash()
        assert (task.folder / "log.txt").read_text() == ""


def test_no_more_than_jobs_at_a_time_and_in_order(tmp_path: Path):
    running: set[int] = set()
    most, started = 0, list[int]()
    for event in sweep(plan(tmp_path, "seed=1,2,3,4,5", rounds=2), jobs=2):
        seed = event.task.settings["seed"]
        if event.what == "started":
            running.add(seed)
            started.append(seed)
        elif event.what in ENDS:
            running.remove(seed)
        most = max(most, len(running))
    assert (most, started) == (2, [1, 2, 3, 4, 5])


def test_what_run_has_finished_is_kept_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert call("run", "digits", *given(QUICK), "--set", "seed=2").exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    before = contents(folder)
    told = list(sweep(plan(Path("runs"), "seed=1,2")))
    assert ends(told) == [(1, "finished"), (2, "kept")]
    assert [event.task.settings["seed"] for event in told if event.what == "started"] == [1]
    assert contents(folder) == before
    again = call("run", "digits", *given(QUICK), "--set", "seed=1")
    assert "This run is finished already" in again.stdout
    assert ends(list(sweep(plan(Path("runs"), "seed=1,2")))) == [(1, "kept"), (2, "kept")]


def test_an_unfinished_run_goes_on_from_its_checkpoint(tmp_path: Path):
    (task,) = plan(tmp_path, "seed=3")
    execute("digits", task.config, out=tmp_path / "whole")
    stopped(task.folder, 3, task.config)
    told = list(sweep([task]))
    assert [event.round.t for event in told if event.round] == [2, 3, 4, 5]
    assert outcome(task.folder) == outcome(tmp_path / "whole")


# -------------------------------------------------------------------------------- what goes wrong


def test_a_run_that_cannot_start_stops_no_other(tmp_path: Path):
    grid = "data.clients=12,2,13"
    told = [event for event in sweep(plan(tmp_path, grid)) if event.what in ENDS]
    assert [event.what for event in told] == ["finished", "failed", "finished"]
    assert "more than the 2 clients" in told[1].reason
    log = (told[1].task.folder / "log.txt").read_text()
    assert "Traceback" in log
    assert "more than the 2 clients" in log


def test_a_failure_of_the_users_own_code_is_named(tmp_path: Path):
    (task,) = plan(tmp_path, "seed=1", data__name="run_support:Unreadable")
    end = list(sweep([task]))[-1]
    assert end.what == "failed"
    assert "images.npz" in end.reason
    assert "load_federation" in (task.folder / "log.txt").read_text()


def test_a_broken_or_foreign_folder_fails_alone(tmp_path: Path):
    broken, foreign, good = plan(tmp_path, "seed=1,2,3")
    for task in (broken, foreign):
        execute("digits", task.config, out=task.folder)
    (broken.folder / "summary.json").write_text("{")
    (foreign.folder / "config.toml").write_text(good.config.to_toml())
    before = contents(foreign.folder)
    told = [event for event in sweep([broken, foreign, good], jobs=3) if event.what in ENDS]
    assert ends(told) == [(1, "failed"), (2, "failed"), (3, "finished")]
    reasons = {event.task.settings["seed"]: event.reason for event in told}
    assert "summary.json is damaged: " in reasons[1]
    assert "another configuration" in reasons[2]
    after = contents(foreign.folder)
    assert {k: v for k, v in after.items() if k != "log.txt"} == {
        k: v for k, v in before.items() if k != "log.txt"
    }


def test_a_folder_that_cannot_be_written_fails_alone(tmp_path: Path):
    bad, good = plan(tmp_path, "seed=1,2")
    bad.folder.write_text("mine")
    told = [event for event in sweep([bad, good]) if event.what in ENDS]
    assert ends(told) == [(1, "failed"), (2, "finished")]
    assert told[0].reason.startswith("its folder cannot be written: ")
    assert bad.folder.read_text() == "mine"


def test_a_job_that_is_killed_fails_and_goes_on_the_next_time(tmp_path: Path):
    found = tasks("digits", ["seed=1,2"], SLOW, tmp_path)
    told: list[Event] = []
    for event in sweep(found):
        told.append(event)
        if event.round and (event.task.settings["seed"], event.round.t) == (1, 3):
            (job,) = multiprocessing.active_children()
            job.kill()
    assert ends(told) == [(1, "failed"), (2, "finished")]
    assert "its process was killed by SIGKILL" in [event.reason for event in told]
    again = list(sweep(found))
    assert ends(again) == [(1, "finished"), (2, "kept")]
    assert next(e.round.t for e in again if e.round) in (2, 4)
    execute("digits", found[0].config, out=tmp_path / "whole")
    assert outcome(found[0].folder) == outcome(tmp_path / "whole")


def test_a_sweep_that_is_given_up_leaves_no_process(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    with closing(sweep(tasks("digits", ["seed=1,2,3"], SLOW, tmp_path), jobs=2)) as events:
        for event in events:
            if event.round:
                assert len(multiprocessing.active_children()) == 2
                break
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_another_sweep_is_at_is_waited_for(tmp_path: Path):
    (task,) = plan(tmp_path, "seed=1")
    task.folder.mkdir()
    execute("digits", task.config, out=tmp_path / "other")
    with open(task.folder / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        events = sweep([task])
        assert [next(events).what, next(events).what] == ["started", "waiting"]
        shutil.copytree(tmp_path / "other", task.folder, dirs_exist_ok=True)
        before = contents(task.folder)
    assert [event.what for event in events] == ["finished"]  # by the other one
    assert contents(task.folder) == before


# ------------------------------------------------------------------------------- the command line


def test_the_command_ends_with_the_table(tmp_path: Path):
    args = ["sweep", "digits", *given(QUICK), "--grid", "seed=1,2,3"]
    args += ["--grid", "adapter.name=none,glad", "--jobs", "2", "--out", str(tmp_path)]
    result = call(*args)
    assert result.exit_code == 0, result.exception
    assert not result.stderr
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == [f"{k}/6" for k in range(1, 7)]
    assert all(" adapter.name=" in line and " %), final " in line for line in lines[:6])
    folders = [task.folder for task in plan(tmp_path, "seed=1,2,3", "adapter.name=none,glad")]
    table = call("compare", *folders).stdout
    assert result.stdout.endswith(f"\n\n{table}")
    assert [line.split()[:2] for line in table.splitlines()[1:5]] == [
        ["adapter.name=none", "3"],
        ["adapter.name=none", "·"],
        ["adapter.name=glad", "3"],
        ["adapter.name=glad", "·"],
    ]
    again = call(*args)
    assert again.exit_code == 0
    assert again.stdout == f"6 of 6 runs were finished already.\n\n{table}"


def test_what_is_kept_is_said_first_and_skipped_rounds_are_told(tmp_path: Path):
    args = ["sweep", "digits", *given({**QUICK, "rounds": 2}), "--out", str(tmp_path)]
    assert call(*args, "--grid", "client.lr=0.1").exit_code == 0
    result = call(*args, "--grid", "client.lr=1e9,0.1")
    assert result.exit_code == 0, result.exception
    first, second = result.stdout.splitlines()[:2]
    assert first == "1 of 2 runs were finished already."
    assert second.startswith("2/2  client.lr=1000000000.0  accuracy ")
    assert " %); 2 of 2 rounds were skipped: 0 of 3 updates were accepted" in second
    assert "Note: " in result.stdout


def test_json_is_all_there_is_and_a_failure_is_exit_code_1(tmp_path: Path):
    args = ["sweep", "digits", *given({**QUICK, "rounds": 2}), "--out", str(tmp_path)]
    result = call(*args, "--grid", "data.clients=12,2", "--json")
    assert result.exit_code == 1, result.exception
    found = json.loads(result.stdout)
    good, bad = found["runs"]
    assert good == {
        "folder": str(tmp_path / Path(good["folder"]).name),
        "settings": {"data.clients": 12},
        "status": "finished",
    }
    assert bad["status"] == "failed"
    assert "more than the 2 clients" in bad["reason"]
    assert "Traceback" in Path(bad["log"]).read_text()
    summary = Run(Path(good["folder"])).summary
    assert summary
    assert found["comparison"]["groups"][0]["values"] == [summary["last10_accuracy"]]
    assert f"error: data.clients=2: {bad['reason']} (log: {bad['log']})" in said(result)


def test_a_sweep_of_which_nothing_finished_has_no_table(tmp_path: Path):
    args = ["sweep", "digits", "--grid", "sampler.clients_per_round=51,52", "--out", tmp_path]
    result = call(*args)
    assert result.exit_code == 1
    assert said(result).count("error: sampler.clients_per_round=5") == 2
    assert json.loads(call(*args, "--json").stdout)["comparison"] is None


# -------------------------------------------------------------------------- real processes, kills


def session(leader: int) -> list[int]:
    """The living processes of a session: the sweep, its fork server and its jobs."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


LONG = {**QUICK, "rounds": 12, "data.name": "run_support:Slow", "data.seconds": 0.1}


def command_line(out: Path) -> list[str | Path]:
    return ["sweep", "digits", *given(LONG), "--grid", "seed=1,2,3", "--jobs", "2", "--out", out]


def folders(out: Path) -> list[Path]:
    return [task.folder for task in tasks("digits", ["seed=1,2,3"], LONG, out)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each run of the long sweep gives by itself."""
    out = tmp_path_factory.mktemp("alone")
    found = tasks("digits", ["seed=1,2,3"], LONG, out)
    return [outcome(execute("digits", task.config, out=task.folder).folder) for task in found]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["group", "parent"])
def test_ctrl_c_saves_every_run_and_the_same_command_goes_on(
    tmp_path: Path, alone: list[Any], whom: str
):
    process = start(*command_line(tmp_path))
    first, second, third = folders(tmp_path)
    until(lambda: len(Run(first).rounds()) >= 3 and Run(second).rounds())
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert "0 of 3 runs are finished; stopped, all saved: go on with the same command" in told
    for folder in (first, second):
        rounds = len(Run(folder).rounds())
        assert 0 < rounds < 12
        assert (folder / "checkpoints" / f"{rounds:06d}.json").is_file()
    assert not third.exists()
    until(lambda: session(process.pid) == [])
    done = cli(*command_line(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [outcome(folder) for folder in folders(tmp_path)] == alone


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path):
    slow = {**LONG, "data.seconds": 5}  # three clients: a round of 15 s
    process = start("sweep", "digits", *given(slow), "--grid", "seed=1,2", "--out", tmp_path)
    until(lambda: len([*tmp_path.glob("*/config.toml")]) == 2)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it waits for the round
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 130
    assert "stopped at once" in told
    assert "Traceback" not in told
    until(lambda: session(process.pid) == [])


@pytest.mark.slow
def test_ctrl_c_while_the_first_job_starts(tmp_path: Path):
    """The fork server is still importing torch then."""
    process = start(*command_line(tmp_path / "runs"))
    until((tmp_path / "runs").exists)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert "go on with the same command" in told


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_orphans_and_loses_nothing(tmp_path: Path, alone: list[Any]):
    process = start(*command_line(tmp_path))
    first, second, _ = folders(tmp_path)
    until(lambda: len(Run(first).rounds()) >= 3 and Run(second).rounds())
    assert len(session(process.pid)) >= 4  # itself, the fork server, two jobs
    process.kill()
    process.communicate()
    until(lambda: session(process.pid) == [], seconds=10)
    done = cli(*command_line(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [outcome(folder) for folder in folders(tmp_path)] == alone


@pytest.mark.slow
def test_the_jobs_of_a_killed_sweep_end_in_the_middle_of_a_round(tmp_path: Path):
    slow = {**LONG, "data.seconds": 3}
    process = start("sweep", "digits", *given(slow), "--grid", "seed=1,2", "--out", tmp_path)
    until(lambda: len([*tmp_path.glob("*/config.toml")]) == 2)
    time.sleep(0.3)
    process.kill()
    process.wait()  # not communicate(), which waits for all that have its pipes
    until(lambda: session(process.pid) == [], seconds=2)
    process.communicate()


@pytest.mark.slow
def test_two_sweeps_at_once_run_everything_once(tmp_path: Path, alone: list[Any]):
    both = [start(*command_line(tmp_path)) for _ in range(2)]
    for process in both:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
    assert [outcome(folder) for folder in folders(tmp_path)] == alone
    for folder in folders(tmp_path):
        assert [found["round"] for found in Run(folder).rounds()] == list(range(12))


@pytest.mark.slow
def test_a_run_that_a_sweep_is_at_is_refused(tmp_path: Path):
    slow = {**LONG, "data.seconds": 0.8}  # three clients: a round of 2.4 s
    process = start("sweep", "digits", *given(slow), "--grid", "seed=1", "--out", tmp_path)
    (task,) = tasks("digits", ["seed=1"], slow, tmp_path)
    until(lambda: Run(task.folder).rounds())
    run = ["run", "digits", *given(slow), "--out", task.folder]
    others = [start(*run, *option) for option in ([], ["--resume"], ["--force"])]
    for other in others:
        _, told = other.communicate(timeout=60)
        assert other.returncode == 2
        assert "is being written by another process" in " ".join(told.split())
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    rounds = len(Run(task.folder).rounds())
    assert (task.folder / "checkpoints" / f"{rounds:06d}.json").is_file()


@pytest.mark.slow
def test_a_terminal_gets_a_live_line_for_each_job(tmp_path: Path):
    ours, theirs = pty.openpty()
    env = {**environment(), "TERM": "xterm-256color", "COLUMNS": "160"}
    args = command(*command_line(tmp_path))
    with subprocess.Popen(args, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how a terminal says that it is closed
                break
            parts.append(part)
    os.close(ours)
    shown = b"".join(parts).decode()
    assert process.returncode == 0
    for text in (
        "seed=1  round ",
        "seed=2  round ",
        "2 of 3 runs",
        "clients/s",
        "clipped ",
        "0:00",
    ):
        assert text in shown
    assert "all runs" in shown
    assert "Traceback" not in shown
