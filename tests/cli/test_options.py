"""Options that several verbs share: what --quiet leaves, what TAB completes, what names --force."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_support import TINY
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.cli.options import complete_key
from fedglad.config import load
from fedglad.report.figures import payload
from fedglad.report.trackers import mlflow
from fedglad.runs import Run, execute

QUICK = {**TINY, "engine.name": "serial", "rounds": 2}
ARGS = [text for key, value in QUICK.items() for text in ("--set", f"{key}={value}")]


def call(*args: str | Path, **env: str) -> Any:
    runner, words = CliRunner(), [str(arg) for arg in args]
    return runner.invoke(app, words, env={"COLUMNS": "200", **env}, prog_name="fedglad")


def completed(words: str) -> list[str]:
    place = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    said = call(_FEDGLAD_COMPLETE="complete_bash", **place)
    return said.stdout.split()


def test_quiet_prints_nothing_but_warnings_and_errors(tmp_path: Path):
    done = call("run", *ARGS, "--out", tmp_path / "run", "--quiet")
    assert (done.exit_code, done.output) == (0, "")
    assert Run(tmp_path / "run").summary
    done = call("sweep", "digits", *ARGS, "--grid", "seed=1", "--out", tmp_path, "--quiet")
    assert (done.exit_code, done.output) == (0, "")
    wrong = call("run", *ARGS, "--out", tmp_path / "run", "--set", "seed=9", "--quiet")
    assert wrong.exit_code == 2
    assert wrong.output.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("fedglad run --set server.l", ["server.lr="]),
        ("fedglad run mnist --set sampler.clients_", ["sampler.clients_per_round="]),
        ("fedglad sweep mnist --grid data.al", ["data.alpha="]),
        ("fedglad run --set model.we", ["model.weights="]),
        ("fedglad run --set data.val", ["data.validation="]),
        ("fedglad run --set checkp", ["checkpoint_every="]),
    ],
)
def test_tab_completes_the_keys(words: str, wanted: list[str]):
    assert completed(words) == wanted


def test_tab_completes_the_names_of_methods():
    context: Any = SimpleNamespace(params={"source": "digits"})
    assert complete_key(context, "adapter.name=gl") == ["adapter.name=glad"]
    assert complete_key(context, "adapter.gamma=") == []
    context.params = {"source": "no such preset"}
    assert "server.lr=" in complete_key(context, "server.")


@pytest.mark.parametrize("text", ["rounds = = 3", "\x00", "[data]\nname = 'digits'\nwhat = 1\n"])
def test_a_damaged_config_names_force(text: str, tmp_path: Path):
    folder = execute("digits", load("digits", QUICK)[1], out=tmp_path / "run").folder
    (folder / "config.toml").write_text(text)
    done = call("run", *ARGS, "--out", folder)
    assert done.exit_code == 2
    assert "config.toml is damaged" in done.output
    assert "--force" in done.output
    assert call("run", *ARGS, "--out", folder, "--force").exit_code == 0


def test_training_that_runs_away_is_in_terminal_summary_and_report(tmp_path: Path):
    more = ["--set", "client.lr=1e4", "--set", "client.clip_norm=0", "--set", "adapter.name=none"]
    done = call("run", *ARGS, *more, "--out", tmp_path / "run")
    assert "training runs away" in done.output
    run = Run(tmp_path / "run")
    warning = (run.summary or {})["warning"]
    assert warning.startswith("round 1: the test loss is")
    assert [("warning" in record) for record in run.rounds()] == [True, False]
    assert "training runs away" in str(payload([run.read()]))
    assert warning in call("run", *ARGS, *more, "--out", tmp_path / "run").output  # again


def test_the_command_that_shows_mlflow_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    made: Any = object.__new__(mlflow.MLflow)
    made._file = Path("out/mlflow.db")
    ui = "mlflow ui --backend-store-uri sqlite:///out/mlflow.db"
    monkeypatch.setattr(mlflow, "find_spec", lambda name: None)
    assert made.command == f"pip install mlflow && {ui}"
    monkeypatch.setattr(mlflow, "find_spec", lambda name: name)
    assert made.command == ui
