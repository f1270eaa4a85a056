"""What a finished run keeps, and what is removed of it: never models, records or the summary."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY, outcome
from typer.testing import CliRunner

from fedglad.analysis.recording import read as read_record
from fedglad.cli import app
from fedglad.config import load
from fedglad.runs import Run, RunError, check, execute, export, prunable, prune
from fedglad.runs import pruning as place
from fedglad.runs.folder import locked
from tests.runs.test_runs import stopped

QUICK: dict[str, Any] = {**TINY, "engine.name": "serial", "rounds": 4, "checkpoint_every": 2}
SCAFFOLD = {**QUICK, "client.name": "scaffold", "client.optimizer": "sgd", "data.clients": 8}
SCAFFOLD |= {"client.clients": 8}
CHOSEN = {**SCAFFOLD, "data.validation": 0.2, "average.name": "ema", "data.partition": "iid"}
STATE = {"checkpoints", "memories", "best"}


def run_of(settings: dict[str, Any], folder: Path, **more: Any) -> Path:
    return execute("digits", load("digits", settings)[1], out=folder, **more).folder


def parts(folder: Path) -> set[str]:
    return STATE & {path.name for path in folder.iterdir()}


def rest(folder: Path) -> dict[str, bytes]:
    """All that is no state."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def call(*args: str | Path, **more: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"}, **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept its state, one that did not, and one that is not finished."""
    folder = tmp_path_factory.mktemp("made")
    run_of(CHOSEN, folder / "kept", keep_state=True)
    run_of(CHOSEN, folder / "slim")
    stopped(folder / "cut", 2, load("digits", SCAFFOLD)[1])
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


# ---------------------------------------------------------------------------- when a run finishes


def test_client_memories_go_when_a_run_is_finished_and_models_stay(runs: Path):
    assert parts(runs / "kept") == STATE
    assert parts(runs / "slim") == set()
    kept, slim = outcome(runs / "kept"), outcome(runs / "slim")
    assert kept[0] == slim[0]  # the records
    assert kept[6] == slim[6]  # the models
    assert len(slim[6]) == 4
    assert check(runs / "slim").good
    assert [(Run(runs / n).summary or {})["state_kept"] for n in ("kept", "slim")] == [True, False]


def test_a_small_state_without_memories_stays_and_a_large_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert parts(run_of(QUICK, tmp_path / "small")) == {"checkpoints"}
    assert parts(run_of(QUICK, tmp_path / "none", keep_state=False)) == set()
    monkeypatch.setattr(place, "SMALL", 1000)
    assert parts(run_of(QUICK, tmp_path / "large")) == set()
    assert parts(run_of(QUICK, tmp_path / "asked", keep_state=True)) == {"checkpoints"}


def test_memories_that_are_models_stay():
    class Client:
        tests_own = True

    assert place.keeps(Path("nowhere"), Client(), None) is True


def test_memories_that_are_models_stay_even_unasked(runs: Path):
    class Client:
        tests_own = True

    assert place.keeps(runs / "kept", Client(), False) == "models"
    path = runs / "kept" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["crc"]
    path.write_text(json.dumps({**summary, "state_kept": "models"}))
    assert prunable(runs / "kept").words == "its client memories are the clients' own models"


def test_all_that_reads_a_run_reads_one_without_its_state(runs: Path, tmp_path: Path):
    slim = runs / "slim"
    assert Run(slim).sizes() == Run(runs / "kept").sizes() == {"weight": 640, "bias": 10}
    assert read_record(slim).sizes == read_record(runs / "kept").sizes
    assert call("compare", slim).exit_code == 0
    assert call("check", slim).exit_code == 0
    assert call("report", slim, "--out", tmp_path / "page.html").exit_code == 0
    for best in (False, True):
        for averaged in (False, True):
            export(slim, tmp_path / "m.pt", best=best, averaged=averaged, force=True)
    done = call("run", "digits", "--out", slim, *_set(CHOSEN))
    assert "is finished already" in done.output


def _set(settings: dict[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]


def test_a_summary_is_written_anew_without_a_round(runs: Path):
    slim = runs / "slim"
    before = json.loads((slim / "summary.json").read_text())
    (slim / "summary.json").unlink()
    played: list[int] = []
    config = load("digits", CHOSEN)[1]
    execute("digits", config, out=slim, resume=True, on_round=lambda one: played.append(one.t))
    assert played == []
    assert json.loads((slim / "summary.json").read_text()) == before


def test_with_a_model_missing_it_is_run_again_to_the_same_bits(runs: Path):
    slim = runs / "slim"
    before = outcome(slim)
    (slim / "summary.json").unlink()
    (slim / "averaged.safetensors").unlink()
    run_of(CHOSEN, slim, resume=True)
    assert outcome(slim) == before


def test_a_removal_that_was_struck_is_finished_at_the_next_start(runs: Path):
    slim = runs / "slim"
    for part in STATE:
        shutil.copytree(runs / "kept" / part, slim / part)
    newest = max((slim / "checkpoints").glob("*.json"))
    for path in (slim / "checkpoints").glob("*.json"):
        path.unlink()
    assert check(slim).good  # no checkpoint asks for what may be gone
    assert newest
    run_of(CHOSEN, slim)
    assert parts(slim) == set()


# ---------------------------------------------------------------------------------- fedglad prune


def test_it_says_what_it_would_free_and_then_does(runs: Path):
    before = rest(runs / "kept")
    shown = call("prune", runs)
    assert shown.exit_code == 0
    assert f"{runs / 'kept'}: " in shown.output
    assert "MB of client memories" in shown.output
    assert f"{runs / 'slim'}: nothing to remove" in shown.output
    assert f"{runs / 'cut'}: not finished" in shown.output
    assert "in 1 of 3 runs" in shown.output
    assert "Nothing was removed: --yes does it." in shown.output
    assert parts(runs / "kept") == STATE
    done = call("prune", runs, "--yes")
    assert done.exit_code == 0
    assert "Removed of 1 run." in done.output
    assert parts(runs / "kept") == set()
    assert rest(runs / "kept") == before
    assert check(runs / "kept").good
    assert parts(runs / "cut") == {"checkpoints", "memories"}


def test_unfinished_runs_only_where_that_is_asked(runs: Path):
    assert prune(runs / "cut").reason == "not finished"
    records = (runs / "cut" / "rounds.jsonl").read_bytes()
    done = call("prune", runs / "cut", "--unfinished", "--yes")
    assert done.exit_code == 0, done.output
    assert parts(runs / "cut") == set()
    assert (runs / "cut" / "rounds.jsonl").read_bytes() == records
    run_of(SCAFFOLD, runs / "cut", resume=True)  # from the start
    assert len(Run(runs / "cut").rounds()) == 4


def test_a_model_that_is_in_a_checkpoint_alone_stays(runs: Path):
    """A run of an older version, or one whose file is damaged."""
    kept = runs / "kept"
    (kept / "model.safetensors").unlink()
    assert "fedglad export" in prune(kept).reason
    assert parts(kept) == STATE
    (kept / "summary.json").write_text("{")
    assert prune(kept).reason == "summary.json is damaged"
    assert parts(kept) == STATE


def test_a_run_that_is_being_written_is_let_be(runs: Path):
    with locked(runs / "kept"), pytest.raises(RunError, match="being written by another process"):
        prune(runs / "kept")
    assert parts(runs / "kept") == STATE


def test_links_are_not_followed(runs: Path, tmp_path: Path):
    elsewhere = Path(shutil.move(runs / "kept" / "memories", tmp_path / "elsewhere"))
    (runs / "kept" / "memories").symlink_to(elsewhere)
    assert "memories" not in prunable(runs / "kept").parts
    with pytest.raises(RunError, match="is a link"):
        prune(runs / "kept")
    assert any(elsewhere.rglob("*.safetensors"))


def test_as_json(runs: Path):
    shown = json.loads(call("prune", runs, "--json").stdout)
    (kept,) = (one for one in shown["runs"] if one["parts"])
    assert kept["bytes"] == shown["bytes"] == sum(kept["parts"].values()) > 0
    assert not kept["removed"]
    done = json.loads(call("prune", runs, "--json", "--yes").stdout)
    assert [one["removed"] for one in done["runs"] if one["parts"]] == [True]
