"""`fedglad nvflare init`: what it writes, what it refuses, and that the printed command runs it."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedglad.averages import EMA
from fedglad.cli import app as cli
from fedglad.config.schema import load
from fedglad.federation.template import InitError
from fedglad.nvflare.init import SITES, command, init
from fedglad.runs import Run, execute

FILES = [
    "job/app/config/config_fed_client.json",
    "job/app/config/config_fed_server.json",
    "job/app/custom/digits_client.py",
    "job/app/custom/digits_task.py",
    "job/meta.json",
]


def test_a_whole_job_is_written(tmp_path: Path):
    folder = tmp_path / 'a "quoted" name'
    assert [str(path.relative_to(folder)) for path in init(folder)] == FILES
    server = json.loads((folder / FILES[1]).read_text("utf-8"))
    (workflow,) = server["workflows"]
    assert workflow["args"]["checkpoint_dir"] == str(folder / "out")
    for name in FILES:
        text = (folder / name).read_text("utf-8")
        json.loads(text) if name.endswith(".json") else compile(text, name, "exec")
    assert f"SITES = {SITES} " in (folder / FILES[3]).read_text("utf-8")


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").touch()
    with pytest.raises(InitError, match=r"is not empty \(it has mine\): choose a new folder"):
        init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_prints_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedglad.cli.nvflare.find_spec", lambda name: None)
    done = CliRunner().invoke(cli, ["nvflare", "init", "new"])
    assert done.exit_code == 0, done.output
    assert "pip install 'fedglad[nvflare]'" in done.output
    assert command(Path("new")) in done.output
    again = CliRunner().invoke(cli, ["nvflare", "init", "new"])
    assert again.exit_code == 2
    assert "is not empty" in again.output


@pytest.mark.slow
def test_the_printed_command_gives_the_records_of_the_simulator(python: Path, tmp_path: Path):
    init(tmp_path / "new")
    _, *words = shlex.split(command(Path("new")))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    tool = [python, "-m", "nvflare.cli", *words]
    done = subprocess.run(
        [str(word) for word in tool],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    keys = {"rounds": 10, "seed": 1, "data.clients": SITES, "sampler.clients_per_round": 3}
    config = load("digits", {**keys, "average.name": "ema", "engine.name": "serial"})[1]
    assert config.sections["average"] == EMA()
    execute("digits", config, out=tmp_path / "ours")
    theirs, ours = (Run(tmp_path / name) for name in ("new/out", "ours"))
    names = ("gsi_all", "test_accuracy", "test_loss", "averaged_accuracy", "train_loss")
    for there, here in zip(theirs.rounds(), ours.rounds(), strict=True):
        assert [c["id"] for c in there["clients"]] == [
            f"site-{c['id'] + 1}" for c in here["clients"]
        ]
        assert {name: there.get(name) for name in names} == {name: here.get(name) for name in names}
