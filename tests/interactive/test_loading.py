"""`fedglad.load_runs`: data frames of runs in any state, that say what they are of."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY, environment

import fedglad
from fedglad.analysis import frames
from fedglad.config import load
from fedglad.interactive import Runs
from fedglad.runs import Run, RunError, execute

pandas = pytest.importorskip("pandas")

SETTINGS: dict[str, Any] = {
    **TINY,
    "engine.name": "serial",
    "rounds": 2,
    "data.validation": 0.1,
    "eval_clients": 3,
    "eval_clients_every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rules with two seeds each."""
    place = tmp_path_factory.mktemp("loaded")
    for name in ("none", "glad"):
        for seed in (1, 2):
            given = {**SETTINGS, "seed": seed, "adapter.name": name}
            execute(*load("digits", given), out=place / f"{name}-{seed}")
    return place


def of(frame: Any, run: Path) -> Any:
    return frame[frame["run"] == str(run)].reset_index(drop=True)


def test_rounds_are_the_records_with_what_distinguishes_the_runs(folder: Path):
    runs = fedglad.load_runs(folder)
    table = runs.rounds()
    assert len(runs) == 4
    assert len(table) == 8
    # gamma and the like are fields of glad alone: the name stands for them
    assert table.columns[:5].tolist() == ["run", "seed", "adapter.name", "round", "status"]
    assert {*zip(table["seed"], table["adapter.name"], strict=True)} == {
        (1, "none"),
        (2, "none"),
        (1, "glad"),
        (2, "glad"),
    }
    records = Run(folder / "glad-2").rounds()
    mine = of(table, folder / "glad-2")
    assert mine["round"].tolist() == [0, 1]
    for name in ("test_loss", "test_accuracy", "validation_loss", "gsi_all", "train_loss"):
        assert mine[name].tolist() == [one[name] for one in records]
    assert mine["clients"].tolist() == [3, 3]
    assert mine["rejected"].tolist() == [0, 0]
    assert mine["seconds.train"].tolist() == [one["seconds"]["train"] for one in records]
    means = [one["client_scores"]["mean"] for one in records]
    assert mine["client_scores.mean"].tolist() == means


def test_groups_and_clients_are_tidy(folder: Path):
    runs: Any = fedglad.load_runs(folder)
    groups, clients = runs.groups(), runs.clients()
    record = Run(folder / "glad-1").rounds()[1]
    mine = of(groups, folder / "glad-1")
    row = mine[(mine["round"] == 1) & (mine["group"] == "bias")].iloc[0]
    assert {key: row[key] for key in ("gsi", "baseline", "scale")} == record["groups"]["bias"]
    assert len(groups) == 4 * 2 * 2  # runs, rounds, tensors
    assert len(clients) == 4 * 2 * 3
    mine = of(clients, folder / "glad-1")
    mine = mine[mine["round"] == 1]
    assert mine["client"].tolist() == [one["id"] for one in record["clients"]]
    assert mine["weight"].sum() == pytest.approx(1)
    # paired: all runs meet the same cohorts
    cohorts = clients.groupby("run")["client"].apply(list)
    assert cohorts.map(str).nunique() == 1


def test_client_scores_have_a_row_each(folder: Path):
    table: Any = fedglad.load_runs(folder).client_scores()
    assert len(table) == 4 * 2 * 3
    mine = of(table, folder / "none-1")
    (first, _) = Run(folder / "none-1").client_scores()
    assert mine[mine["round"] == 0]["score"].tolist() == first["scores"]


def test_a_summary_is_a_row(folder: Path):
    table: Any = fedglad.load_runs(f"{folder}/*").summary()
    assert table["finished"].tolist() == [True] * 4
    assert table["score"].unique().tolist() == ["accuracy"]
    summary = Run(folder / "none-2").summary or {}
    row = of(table, folder / "none-2").iloc[0]
    for name in ("last10_accuracy", "final_accuracy", "rounds", "best_validation_accuracy"):
        assert row[name] == summary[name]
    assert row["update_bytes.down"] == summary["update_bytes"]["down"]
    means = table.groupby("adapter.name")["final_accuracy"].mean()
    assert set(means.index) == {"none", "glad"}


def test_one_run_alone_has_the_columns_too(folder: Path):
    (only,) = fedglad.load_runs(folder / "glad-1")
    assert fedglad.load_runs([only]).rounds().columns[:3].tolist() == ["run", "seed", "round"]
    assert only.rounds.columns[0] == "round"  # of the run itself: there is nothing to tell apart
    assert len(only.groups) == 4
    assert len(only.clients) == 6
    assert len(only.client_scores) == 6
    assert only.model.training is False


def test_what_can_be_given(folder: Path, monkeypatch: pytest.MonkeyPatch):
    one, two = folder / "none-1", folder / "none-2"
    assert len(fedglad.load_runs([one, two, one])) == 3  # as asked for
    assert [run.folder for run in fedglad.load_runs(f"{folder}/glad-*")] == [
        folder / "glad-1",
        folder / "glad-2",
    ]
    monkeypatch.chdir(folder)
    (folder / "report.html").write_text("", encoding="utf-8")
    assert len(fedglad.load_runs("*")) == 4  # what is no run is no match
    loaded = fedglad.load_runs("*")
    assert isinstance(loaded[:2], Runs)
    assert len(loaded.where(lambda run: run.config["seed"] == 2)) == 2
    for given, said in {
        "nowhere/*": "'nowhere/\\*' matches no run",
        "nowhere": "there is no folder nowhere",
        "report.html": "is a file: give the folder of a run",
    }.items():
        with pytest.raises(RunError, match=said):
            fedglad.load_runs(given)


def test_a_page_of_several(folder: Path, tmp_path: Path):
    page = fedglad.load_runs(folder).report(tmp_path / "page.html")
    assert "adapter.name=glad" in page.read_text("utf-8")


def test_settings_that_are_lists_can_be_grouped_by(tmp_path: Path):
    for k, betas in enumerate(([0.5, 0.9], [0.9, 0.99])):
        given = {**SETTINGS, "rounds": 1, "server.name": "adam", "server.betas": betas}
        execute(*load("digits", given), out=tmp_path / f"{k}")
    table: Any = fedglad.load_runs(tmp_path).summary()
    assert table.groupby("server.betas").size().to_dict() == {"[0.5, 0.9]": 1, "[0.9, 0.99]": 1}


def test_what_is_damaged_or_unfinished_is_there_as_far_as_it_is_whole(tmp_path: Path):
    for seed, name in enumerate(("cut", "bad")):
        given = {**SETTINGS, "seed": seed, "rounds": 3, "checkpoint_every": 1}
        execute(*load("digits", given), out=tmp_path / name)
    lines = (tmp_path / "cut/rounds.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut/rounds.jsonl").write_bytes(b"".join(lines[:2]))
    (tmp_path / "cut/summary.json").unlink()
    damaged = bytearray((tmp_path / "bad/rounds.jsonl").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "bad/rounds.jsonl").write_bytes(damaged)
    with pytest.warns(UserWarning) as warned:  # noqa: PT030 - what it says is below
        runs = fedglad.load_runs([tmp_path / "cut", tmp_path / "bad"])
    said = [str(one.message) for one in warned]
    assert any("cut: the run is not finished, rounds recorded: 2 of 3" in one for one in said)
    assert any("bad: rounds.jsonl is damaged in line 2: left out" in one for one in said)
    assert of(runs.rounds(), tmp_path / "cut")["round"].tolist() == [0, 1]
    assert of(runs.rounds(), tmp_path / "bad")["round"].tolist() == [0, 2]
    table: Any = runs.summary()
    cut = of(table, tmp_path / "cut").iloc[0]
    assert not cut["finished"]
    assert cut["rounds"] == 2
    assert math.isfinite(cut["final_accuracy"])
    with pytest.warns(UserWarning, match="rounds.jsonl has 2 rounds|going on after round 2"):
        runs[0].resume()
    assert runs.summary()["finished"].tolist() == [True, True]


def test_without_pandas_a_sentence_says_how_to_get_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pandas", None)
    runs = fedglad.load_runs(folder)
    assert runs[0].finished  # all but data frames
    with pytest.raises(ImportError, match=r"need pandas: pip install 'fedglad\[frames\]'"):
        runs.rounds()


def test_columns_are_there_without_rounds(tmp_path: Path):
    (tmp_path / "config.toml").write_text("rounds = 3", encoding="utf-8")
    view = Run(tmp_path).read()
    for table in (frames.rounds, frames.groups, frames.clients, frames.client_scores):
        made = table([view])
        assert len(made) == 0
        assert made.columns[:3].tolist() == ["run", "seed", "round"]


def test_reading_runs_loads_no_torch(folder: Path):
    script = f"""
import sys, fedglad
runs = fedglad.load_runs({str(folder)!r})
for table in (runs.rounds(), runs.groups(), runs.clients(), runs.summary(), runs[0].rounds):
    assert len(table)
print(runs[0], "torch" in sys.modules, "pandas" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False True\n")
