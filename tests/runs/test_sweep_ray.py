"""`fedglad sweep --on ray`: the same folders as in a sweep of one machine, whatever dies."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import said
from cluster_support import Nodes
from run_support import alive, cli, outcome, start, until

from fedglad.config.schema import load
from fedglad.core import files
from fedglad.runs import Run, execute
from fedglad.runs.places import folders as travelling
from fedglad.runs.places.base import as_asked, cpus_of
from fedglad.runs.places.folders import packed, packed_meanwhile, unpack
from fedglad.runs.places.ray import OnRay, Order
from fedglad.runs.sweeping import Event, sweep, tasks
from runs.test_runs import stopped
from runs.test_sweep import ENDS, QUICK, call, folders, given, plan
from runs.test_sweep import LONG as LONG
from runs.test_sweep import alone as alone

ROOT = Path(__file__).parents[2]
GRIDS = ["--grid", "seed=1,2,3", "--grid", "adapter.name=none,glad"]


# ------------------------------------------------------------------------------ folders that travel


def test_a_run_that_has_travelled_goes_on_to_the_same_bits(tmp_path: Path):
    (task,) = plan(tmp_path, "seed=1", client__name="scaffold")
    execute("digits", task.config, out=tmp_path / "whole", keep_state=True)
    stopped(tmp_path / "there", 3, task.config)
    (tmp_path / "there" / "notes.txt").write_text("mine")
    found = pickle.loads(pickle.dumps(packed(tmp_path / "there")))
    assert not {"notes.txt", "log.txt"} & found.keys()
    assert any(name.startswith("memories/") for name in found)
    unpack(found, tmp_path / "here")
    execute("digits", task.config, out=tmp_path / "here", resume=True, keep_state=True)
    assert outcome(tmp_path / "here") == outcome(tmp_path / "whole")


def test_whatever_stops_unpacking_the_run_can_go_on(tmp_path: Path, monkeypatch: Any):
    """A folder at round 2 gets the files of the finished run, and is cut off after each of them."""
    (task,) = plan(tmp_path, "seed=1")
    execute("digits", task.config, out=tmp_path / "whole", keep_state=True)
    stopped(tmp_path / "old", 3, task.config)
    found, whole = packed(tmp_path / "whole"), outcome(tmp_path / "whole")
    real, left, count = files.replacing, 0, 0

    def cut_off(path: Path) -> Any:
        nonlocal left
        if not left:
            raise InterruptedError
        left -= 1
        return real(path)

    for count in range(len(found)):
        folder = tmp_path / f"cut{count}"
        shutil.copytree(tmp_path / "old", folder)
        left = count
        with monkeypatch.context() as patch:
            patch.setattr(travelling.files, "replacing", cut_off)
            try:
                unpack(found, folder)
            except InterruptedError:
                assert Run(folder).summary is None
            else:
                assert count >= len(found) - 2  # config.toml and labels.json were there
                break
        execute("digits", task.config, out=folder, resume=True, keep_state=True)
        assert outcome(folder) == whole
    assert count > 3
    unpack(found, tmp_path / "old")
    assert packed(tmp_path / "old") == found
    assert outcome(tmp_path / "old") == whole


def test_files_do_not_leave_their_folder(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="is no file of the run in"):
        unpack({"../other": b""}, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is no file of the run in"):
        unpack({"checkpoints/000001.json": b""}, tmp_path / "run")


def test_of_a_run_that_goes_on_there_is_what_its_checkpoint_needs(tmp_path: Path):
    (task,) = plan(tmp_path, "seed=1")
    seen: list[int] = []

    def on_round(done: Any) -> None:
        found = packed_meanwhile(task.folder)
        assert bool(found) == (done.t >= 2)  # a checkpoint every second round, made after this call
        if found:
            unpack(found, copy := tmp_path / f"copy{done.t}")
            seen.append(done.t)
            execute("digits", task.config, out=copy, resume=True)

    execute("digits", task.config, out=task.folder, on_round=on_round)
    assert seen == [2, 3, 4, 5]
    for t in seen:
        assert outcome(tmp_path / f"copy{t}") == outcome(task.folder)


@pytest.mark.parametrize(
    ("keys", "cpus", "engine"),
    [
        ({}, 1, "serial"),
        ({"engine.workers": 4}, 4, "local"),
        ({"engine.workers": 1}, 1, "serial"),
        ({"engine.client_timeout": 9}, 1, "local"),
        ({"engine.name": "batched", "engine.threads": 2}, 2, "batched"),
    ],
)
def test_a_run_takes_the_cpus_that_it_names(keys: dict[str, Any], cpus: int, engine: str):
    config = as_asked(load("digits", keys)[1])
    assert cpus_of(config) == cpus
    assert config.to_dict()["engine"]["name"] == engine


def test_what_is_no_place_is_refused(tmp_path: Path):
    for args, message in {
        ("--address", "auto"): "--address 'auto' is that of a Ray cluster: add --on ray",
        ("--on", "ray", "--address", "127.0.0.1:9"): "no Ray cluster answers at '127.0.0.1:9'",
        ("--slurm", "a=1"): "--slurm 'a=1': add --on slurm",
    }.items():
        result = call("sweep", "digits", "--grid", "seed=1", "--out", tmp_path / "runs", *args)
        assert result.exit_code == 2, result.exception
        assert message in said(result)


OWN = """
import helper_of_mine
from fedglad.clients import Plain
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Pulled(Plain):
    def correct(self, grad, w, theta, memory, sent):
        grad.add_(w - theta, alpha=helper_of_mine.PULL)
"""

NODE = """
import pickle, sys
from fedglad.runs.places.ray import Runner
if __name__ == "__main__":
    runner = Runner()
    runner.begin(pickle.load(open(sys.argv[1], "rb")))
    news = []
    while not news or news[-1][0] == "round":
        news += runner.listen()
    pickle.dump((news, *runner.result(), str(runner.scratch.folder)), open(sys.argv[2], "wb"))
    runner.close()
"""


@pytest.mark.slow
def test_own_code_goes_along_to_a_machine_that_has_none(tmp_path: Path):
    """Without Ray between them: a process elsewhere that has neither the folder nor the modules."""
    driver, elsewhere = tmp_path / "driver", tmp_path / "elsewhere"
    driver.mkdir()
    elsewhere.mkdir()
    (driver / "pulled_of_mine.py").write_text(OWN)
    (driver / "helper_of_mine.py").write_text("PULL = 0.1\n")
    keys = {**QUICK, "client.name": "pulled_of_mine:Pulled"}
    script = (
        "import os, pickle\n"
        "from pathlib import Path\n"
        "from fedglad.runs import execute, tasks\n"
        "from fedglad.runs.own_code import code_of\n"
        "from fedglad.runs.places.ray import Order\n"
        "from fedglad.core import user_code\n"
        "from fedglad.data.federation import fingerprint\n"
        f"[task] = tasks('digits', ['seed=1'], {keys!r}, Path('runs'))\n"
        "execute(task.name, task.config, out=Path('whole'))\n"
        "config = task.config\n"
        "order = Order(pickle.dumps(task), user_code.own_files(config.own_names().values()),\n"
        "    code_of(config), '/no/such/folder', 'runs/x', {}, fingerprint(config.federation()))\n"
        "pickle.dump(order, open('order', 'wb'))\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=driver, check=True, timeout=120)
    order: Order = pickle.loads((driver / "order").read_bytes())
    assert order.modules.keys() == {"pulled_of_mine.py", "helper_of_mine.py"}
    shutil.move(driver, away := tmp_path / "away")
    (elsewhere / "node.py").write_text(NODE)
    command = [sys.executable, elsewhere / "node.py", away / "order", tmp_path / "result"]
    subprocess.run(command, cwd=elsewhere, check=True, timeout=120)
    news, found, log, scratch = pickle.loads((tmp_path / "result").read_bytes())
    assert news[-1] == ("finished", None, "")
    assert log == ""
    until(lambda: not Path(scratch).exists())
    unpack(found, tmp_path / "back")
    assert Run(tmp_path / "back").summary
    assert (
        packed(tmp_path / "back")["model.safetensors"]
        == packed(away / "whole")["model.safetensors"]
    )


# ------------------------------------------------------------------------------------- three nodes


def scratch() -> set[Path]:
    """Where runs train, on this machine's nodes."""
    return {*Path("/tmp").glob("fedglad-sweep-*")}


def runners() -> set[int]:
    """The processes of runs on nodes, and those that train for them."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, where = (entry / "cmdline").read_bytes(), os.readlink(entry / "cwd")
            forked = b"forkserver" in command and "TMPDIR=/tmp/fedglad-sweep-" in _environment(
                entry
            )
        except OSError:
            continue
        if (b"ray::Runner" in command or forked) and where:
            found.add(int(entry.name))
    return found


def _environment(entry: Path) -> str:
    return (entry / "environ").read_text(errors="replace")


@pytest.fixture
def clean() -> Generator[None]:
    """Nothing is left, of processes nor of folders."""
    before = runners(), scratch()
    yield
    until(lambda: not any(map(alive, runners() - before[0])), 60)
    until(lambda: scratch() <= before[1], 60)


def lines(folder: Path) -> int:
    path = folder / "run" / "rounds.jsonl"
    try:
        return path.read_text().count("\n")
    except OSError:
        return 0


def readme_file(folder: Path) -> str:
    """The experiment of the README, and its sweep as a command."""
    text = (ROOT / "README.md").read_text("utf-8")
    (toml,) = re.findall(r"^```toml\n(# mine\.toml\n.*?)^```", text, re.M | re.S)
    assert " ".join(["fedglad sweep mine.toml", *GRIDS]) in text
    (folder / "mine.toml").write_text(toml)
    return toml


def table(stdout: str) -> str:
    return stdout[stdout.index("\n\n") :]


@pytest.mark.slow
def test_the_readmes_sweep_with_a_node_that_is_killed_gives_the_same_table(
    three: Nodes, tmp_path: Path, clean: None
):
    readme_file(tmp_path)
    command = ["sweep", "mine.toml", *GRIDS]
    local = cli(*command, "--out", "here", cwd=tmp_path)
    assert local.returncode == 0, local.stderr
    before = scratch()
    on_ray = ["--on", "ray", "--address", three.address, "--out", "there"]
    with start(*command, *on_ray, cwd=tmp_path) as process:
        # A node has one CPU and so one run: three that have begun are one on each.
        until(lambda: sum(lines(folder) > 2 for folder in scratch() - before) == 3, 120)
        three.kill(three.others[0])
        stdout, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "its machine died: another one goes on with it" in stdout
    assert table(stdout) == table(local.stdout)
    here, there = (sorted((tmp_path / name).iterdir()) for name in ("here", "there"))
    assert [folder.name for folder in here] == [folder.name for folder in there]
    assert len(here) == 6
    assert [*map(outcome, here)] == [*map(outcome, there)]
    again = cli(*command, *on_ray, cwd=tmp_path)
    assert again.stdout == f"6 of 6 runs were finished already.{table(stdout)}"


@pytest.mark.slow
def test_what_has_come_back_goes_on_elsewhere(
    three: Nodes, tmp_path: Path, alone: list[Any], clean: None
):
    todo = tasks("digits", ["seed=1,2,3"], LONG, tmp_path)
    told: list[Event] = []
    with closing(OnRay(three.address, copy=0.1)) as place:
        for event in sweep(todo, place=place):
            told.append(event)
            counts = [len(Run(task.folder).rounds()) for task in todo if task.folder.exists()]
            if three.others and len(counts) == 3 and min(counts) >= 4:
                for node in [*three.others]:
                    three.kill(node)
    what = {event.what for event in told} - {"waiting"}  # for the one CPU that is left
    assert what == {"started", "round", "again", "finished"}
    assert [outcome(task.folder) for task in todo] == alone
    for task in todo:
        rounds = [event.round.t for event in told if event.round and event.task == task]
        again = sum(event.what == "again" for event in told if event.task == task)
        assert {*rounds} == {*range(12)}
        assert rounds.count(0) == rounds.count(1) == 1, again  # the first ones nobody did again


@pytest.mark.slow
def test_ctrl_c_brings_every_run_back_and_the_same_command_goes_on(
    nodes: Nodes, tmp_path: Path, alone: list[Any], clean: None
):
    nodes.only(2)
    args = ["sweep", "digits", *given(LONG), "--grid", "seed=1,2,3", "--out", tmp_path]
    args += ["--on", "ray", "--address", nodes.address, "--jobs", "3"]
    before = scratch()
    process = start(*args)
    until(lambda: sum(lines(folder) > 2 for folder in scratch() - before) == 2, 120)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "0 of 3 runs are finished; stopped, all saved: go on with the same command" in err
    done = [len(Run(folder).rounds()) for folder in folders(tmp_path)]
    assert sum(0 < rounds < 12 for rounds in done) == 2  # the third waited for a CPU
    assert sum(1 for folder in folders(tmp_path) if (folder / "checkpoints").is_dir()) == 2
    last = cli(*args)
    assert last.returncode == 0, last.stderr
    assert [outcome(folder) for folder in folders(tmp_path)] == alone


@pytest.mark.slow
def test_a_killed_sweep_leaves_nothing_on_the_nodes(
    nodes: Nodes, tmp_path: Path, alone: list[Any], clean: None
):
    nodes.only(2)
    args = ["sweep", "digits", *given(LONG), "--grid", "seed=1,2,3", "--out", tmp_path]
    before = runners(), scratch()
    process = start(*args, "--on", "ray", "--address", nodes.address)
    until(lambda: sum(lines(folder) > 2 for folder in scratch() - before[1]) == 2, 120)
    process.kill()
    process.communicate()
    until(lambda: not any(map(alive, runners() - before[0])), 60)
    until(lambda: scratch() <= before[1], 60)
    last = cli(*args)
    assert last.returncode == 0, last.stderr
    assert [outcome(folder) for folder in folders(tmp_path)] == alone


# A client whose samples are not part of the data's checksum: only where it trains it does harm.
KILLS = {"data__kills": 7, "data__raises": -1, "data__clients": 9}


@pytest.mark.slow
def test_what_fails_fails_by_itself(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
):
    def made(out: str, *grids: str, **more: Any) -> Any:
        (task,) = plan(tmp_path / out, *grids, **more)
        return task

    todo = [
        made("few", "data.clients=2"),
        made("good", "seed=1"),
        made("unread", "seed=1", data__name="run_support:Unreadable"),
        made("ray", "seed=1", engine__name="ray"),
        made("dies", "seed=1", data__name="run_support:Raising", **KILLS),
        made("taken", "seed=2"),
        made("other", "seed=3", data__seed=4),
        made("broken", "seed=1"),
    ]
    execute("digits", todo[7].config, out=todo[7].folder)
    (todo[7].folder / "summary.json").write_text("{")
    (tmp_path / "taken").mkdir()
    todo[5].folder.write_text("mine")
    real = OnRay.checksum
    other: Callable[[Any, Any], str] = lambda place, config: (  # noqa: E731
        "0" * 16 if config.seed == 3 else real(place, config)
    )
    monkeypatch.setattr(OnRay, "checksum", other)
    with closing(OnRay(nodes.address)) as place:
        ends = {e.task.folder.parent.name: e for e in sweep(todo, place=place) if e.what in ENDS}
    assert ends["good"].what == "finished"
    execute("digits", todo[1].config, out=tmp_path / "alone")
    assert outcome(todo[1].folder) == outcome(tmp_path / "alone")
    reasons = {name: end.reason for name, end in ends.items() if name != "good"}
    assert {name: ends[name].what for name in reasons} == dict.fromkeys(reasons, "failed")
    assert "more than the 2 clients" in reasons["few"]
    assert "Traceback" in (todo[0].folder / "log.txt").read_text()
    assert "images.npz" in reasons["unread"]
    assert reasons["ray"].startswith("engine.name = 'ray' with --on ray: ")
    assert reasons["dies"] == "its process was killed by SIGKILL"
    assert "cannot be made: File exists" in reasons["taken"]
    assert f"{todo[7].folder}/summary.json is damaged: " in reasons["broken"]
    assert re.match(r"the data on .* are other ones than where the sweep is", reasons["other"])
