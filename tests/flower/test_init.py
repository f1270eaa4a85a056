"""`fedglad flower init`: what it writes, what it refuses, and that `flwr run` runs it."""

import inspect
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from typer.testing import CliRunner

from fedglad import Server
from fedglad.averages import EMA
from fedglad.cli import app as cli
from fedglad.config.schema import load
from fedglad.flower import FedGLAD, Monitor
from fedglad.flower.init import InitError, commands, init
from fedglad.flower.template.digits_app import task
from fedglad.runs import Run, execute
from fedglad.runs.models import write_models
from tests.flower.deployment import NO_RAY, environment, free_ports, kill_all

ROOT = Path(__file__).parents[2]


def test_an_app_is_written_with_its_own_names(tmp_path: Path):
    folder = tmp_path / "My hospital"
    written = init(folder)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    modules = ("__init__", "client_app", "server_app", "task")
    assert files == sorted([*(f"my_hospital_app/{m}.py" for m in modules), "pyproject.toml"])
    assert sorted(written) == sorted(folder / name for name in files)
    for path in written:
        text = path.read_text("utf-8")
        assert "digits_app" not in text
        assert "digits-app" not in text
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    found = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    assert found["project"]["name"] == "my-hospital-app"
    assert found["tool"]["flwr"]["app"]["config"]["out"] == str(folder / "out" / "{run}")
    assert found["project"]["dependencies"] == []  # else Flower would install them for every run


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("app", "fedglad-app"),
        ("my-app", "my-app"),
        ("torch", "torch-app"),
        ("2nd try", "nd-try-app"),
        ("42", "fedglad-app"),
        ('a "quoted" \\ name', "a-quoted-name-app"),
        ("x" * 60, "x" * 28 + "-app"),
    ],
)
def test_flower_accepts_the_app_whatever_the_folder_is_called(
    tmp_path: Path, folder: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    for module in [one for one in sys.modules if one.startswith("fedglad_app")]:
        monkeypatch.delitem(sys.modules, module)  # of an app in a folder that is gone
    init(tmp_path / folder)
    config, warnings = load_and_validate(tmp_path / folder / "pyproject.toml")
    assert warnings == []
    assert config["project"]["name"] == name
    assert config["tool"]["flwr"]["app"]["config"]["out"] == str(tmp_path / folder / "out/{run}")
    assert build_fab_from_disk(tmp_path / folder)


def test_an_empty_folder_will_do_also_the_one_we_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = CliRunner().invoke(cli, ["flower", "init", "."])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "here/here_app/task.py").is_file()


def test_the_command_names_the_files_and_prints_two_commands(tmp_path: Path):
    folder = tmp_path / "an app"
    done = CliRunner().invoke(cli, ["flower", "init", str(folder)])
    assert done.exit_code == 0, done.output
    *files, own, title, first, second = done.output.splitlines()
    assert [Path(line) for line in files] == sorted(p for p in folder.rglob("*") if p.is_file())
    assert own == f"Your model and data go into {folder}/an_app/task.py."
    assert title == f"Run it as it is; its records come to {folder}/out:"
    assert (first.strip(), second.strip()) == commands(folder)
    assert shlex.split(second)[:3] == ["flwr", "run", str(folder)]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, hidden: bool):
    there = tmp_path / (".git" if hidden else "mine.txt")
    there.write_text("mine")
    done = CliRunner().invoke(cli, ["flower", "init", str(tmp_path)])
    assert done.exit_code == 2
    assert f"is not empty (it has {there.name}): choose a new folder" in done.output
    assert list(tmp_path.iterdir()) == [there]


def test_a_file_and_a_place_that_cannot_be_written_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InitError, match="file is a file: choose a new folder"):
        init(tmp_path / "file")
    with pytest.raises(InitError, match=r"cannot be written: Not a directory"):
        init(tmp_path / "file" / "app")


def test_the_command_line_does_not_load_flower():
    script = "import sys, fedglad.cli; print(*{'flwr', 'ray'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == []
    assert done.returncode == 0, done.stderr


def test_the_template_is_part_of_the_package():
    template = resources.files("fedglad.flower") / "template"
    assert (template / "pyproject.toml").is_file()
    assert (template / "digits_app" / "task.py").is_file()


def test_the_page_on_flower_prints_what_the_command_prints_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = (ROOT / "docs/flower.md").read_text("utf-8")
    assert "\n".join(f"    {line}" for line in commands(Path("/path/to/hospitals"))) in page
    own, subclass, watched, deployed = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    scope: dict[str, Any] = {}
    exec(own, scope)
    exec(subclass, scope)
    assert issubclass(scope["Ours"], FedGLAD)
    assert isinstance(scope["strategy"], FedGLAD)
    exec(watched, scope)
    assert isinstance(scope["strategy"], Monitor)
    model = task.build_model(1)
    (tmp_path / "out/1").mkdir(parents=True)
    write_models(tmp_path / "out/1", Server(model, average=EMA()), 0, "")
    monkeypatch.chdir(tmp_path)
    scope = {"build_model": lambda: task.build_model(2)}
    exec(deployed, scope)
    taken = scope["model"].state_dict()
    assert all(taken[name].equal(value) for name, value in model.state_dict().items())
    defaults = {n: p.default for n, p in inspect.signature(FedGLAD).parameters.items()}
    first, told = page.partition("## Options")[2].partition("| option |")[::2]
    assert re.findall(r"`(\w+)`", first) == list(defaults)[:10]
    rows = re.findall(r"^\| (`.*?) \|", told.partition("\n## ")[0], re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*list(defaults)[10:]}


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)
def test_flwr_run_just_works_in_a_new_app(tmp_path: Path):
    """With Flower's two nodes, after Ctrl-C, after an edit, with the printed commands' fifty.

    Another app whose package has the same name is refused: Flower would take the first one's code.
    """
    home, app = tmp_path / "home", tmp_path / "an app"
    home.mkdir()
    env = environment(home / ".flwr") | {
        "HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_ports(1)[0]),
    }
    # What a user has not set, either: no dependencies are installed because the app names none.
    del env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"]
    del env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
    try:
        printed = _sh(f"fedglad flower init {shlex.quote(str(app))}", env, tmp_path)
        assert printed.returncode == 0, printed.stderr
        size, run = re.findall(r"^    (.*)$", printed.stdout, re.M)

        five = "flwr run . --stream --run-config num-server-rounds=5"
        _interrupted(five, env, app)
        begin = time.monotonic()
        second = _sh(five, env, app)
        said = second.stdout + second.stderr
        assert second.returncode == 0, said
        assert "5 of 5 rounds trained" in said
        assert "Traceback" not in said
        assert "it is all of them. More simulated ones: flwr federation simulation-config" in said
        assert time.monotonic() - begin < 200  # half a minute on a machine of its own
        assert Run(app / "out/2").rounds()[-1]["test_accuracy"] > 0.9

        task_py = next(app.glob("*/task.py"))
        task_py.write_text(task_py.read_text("utf-8") + "\n# edited\n", "utf-8")
        done = _sh(f"set -e\n{size}\n{run}", env, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

        other = tmp_path / "other" / "an app"
        init(other)
        refused = _sh("flwr run . --stream", env, other)
        assert "Flower's workers would import" in refused.stdout
        assert "task.py changed" in refused.stdout
    finally:
        kill_all(home / ".flwr")

    assert {path.name for path in (app / "out").iterdir()} == {"1", "2", "3"}
    assert (app / "out/3/summary.json").is_file(), done.stdout + done.stderr
    assert "[ROUND 15/15]" in (app / "out/3/log.txt").read_text("utf-8")
    settings = {"rounds": 15, "data.alpha": 1.0, "engine.name": "serial", "average.name": "ema"}
    _, config = load("digits", settings)
    simulated = execute("digits", config, out=tmp_path / "simulated")
    ours, theirs = Run(app / "out/3").rounds(), simulated.rounds()
    for field in ("test_accuracy", "averaged_accuracy", "gsi_all"):
        assert [r[field] for r in ours] == [r[field] for r in theirs]
    assert f"averaged {100 * ours[-1]['averaged_accuracy']:.2f} %" in done.stdout
    assert ours[-1]["averaged_accuracy"] > 0.8  # worth showing


def _interrupted(command: str, env: dict[str, str], cwd: Path) -> None:
    """Ctrl-C once the first round is over: only the log ends by it."""
    running = subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout
    with running.stdout as lines:
        said = list(itertools.takewhile(lambda line: "[ROUND 2/5]" not in line, lines))
        running.send_signal(signal.SIGINT)
        lines.read()
    running.wait(30)
    assert any("flwr stop" in line for line in said), said


def _sh(script: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    assert os.path.isabs(env["PATH"].partition(os.pathsep)[0])
    return subprocess.run(
        ["sh", "-c", script], env=env, cwd=cwd, capture_output=True, text=True, timeout=240
    )
