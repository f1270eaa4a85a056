"""Every experiment on tiny data, to its table and its figure; export, resuming, the commands."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_support import environment, outcome, until
from typer.testing import CliRunner

from fedglad.cli import app, fetching
from fedglad.config.schema import FORMAT, Config, load
from fedglad.data.sources import DataError
from fedglad.runs import Run, RunError, execute
from fedglad.studies.paper import experiments, plots, work
from fedglad.studies.paper.cells import PaperError
from fedglad.studies.paper.results import Library, export, read
from fedglad.studies.paper.settings import DATA
from fedglad.studies.paper.tables import table
from studies.support import BAD, ROUNDS, TINY

every_experiment = pytest.mark.parametrize("name", TINY)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests put their runs, so that what two experiments share is run once."""
    return tmp_path_factory.mktemp("paper")


def play(name: str, out: Path, **how: Any) -> work.Work:
    """What `paper run` does, in this process."""
    todo = work.plan(TINY[name], Library([out]), out, **how)
    for task in todo.tasks:
        execute(task.name, task.config, out=task.folder)
    return todo


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with few runs: the controls, the bad round, γ = ∞; others read the same baseline."""
    folder = tmp_path_factory.mktemp("small")
    play("controls", folder)
    play("bad-round", folder)
    play("gamma", folder, only=["CIFAR-10 FedAvg, γ = ∞"])
    return folder


def invoke(*args: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["paper", *map(str, args)])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The commands know the tiny experiments only, and work in an empty folder."""
    for name, experiment in TINY.items():
        monkeypatch.setitem(experiments.EXPERIMENTS, name, experiment)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@every_experiment
def test_an_experiment_runs_and_gives_its_table_and_figure(name: str, out: Path, tmp_path: Path):
    todo = play(name, out, seeds=[1])
    assert not todo.absent
    library = Library([out])
    made = table(TINY[name], library)
    assert {row["cell"] for row in made.rows} == {cell.label for cell in TINY[name].cells}
    assert all(row["n"] == 1 for row in made.rows)
    values = [row["mean"] for row in made.rows]
    if name == "norm-ratio":
        assert all(0 < value < 3 for value in values)
    elif name == "similarity":
        assert all(-1 <= value <= 1 for value in values)
    elif name == "gsi-groups":
        assert len({row["group"] for row in made.rows}) == 4  # weights and biases of two layers
        assert all(row["lowest"] >= 1 for row in made.rows)
    else:
        assert all(0 < value < 100 for value in values)
    if name == "bad-round":
        assert all(row["t"] == BAD for row in made.rows)
    png = tmp_path / "figure.png"
    few = replace(TINY[name], cells=TINY[name].cells[:12])  # a panel takes a tenth of a second
    assert plots.plot(few, library, png) == []
    with Image.open(png) as picture:
        assert picture.width > 500
        assert len(picture.convert("L").getcolors() or []) > 5  # not an empty page
    assert work.plan(TINY[name], library, out, seeds=[1]).tasks == []


def test_a_table_from_results_alone_is_the_table_from_the_runs(small: Path, tmp_path: Path):
    written, notes = export([small], tmp_path)
    assert len(written) == len([*small.glob("*/summary.json")])
    assert notes == []
    fresh, kept = Library([small]), Library([tmp_path])
    for experiment in TINY.values():
        assert table(experiment, fresh).to_dict() == table(experiment, kept).to_dict()
    before = {path: path.stat().st_mtime_ns for path in written}
    assert export([small], tmp_path)[0] == written
    assert {path: path.stat().st_mtime_ns for path in written} == before
    # what is in results/ is not run again
    assert work.plan(TINY["controls"], kept, small / "new").tasks == []


def test_an_exported_run_is_small_and_has_no_data_of_clients(out: Path, tmp_path: Path):
    play("controls", out, only=["MNIST FedAvg"], seeds=[1])
    config = TINY["controls"].cell("MNIST FedAvg").config(1)
    folder = out / f"digits-{config.hash()}"
    (path,) = export([folder], tmp_path)[0]
    assert path.name == f"digits-{config.hash()}.json"
    told = json.loads(path.read_text())
    assert told["hash"] == config.hash()
    assert told["config"]["seed"] == 1
    assert told["versions"]["torch"]
    assert told["machine"]
    assert told["seconds"] > 0
    rounds = Run(folder).rounds()
    columns = told["rounds"]
    assert columns["test_accuracy"] == [r["test_accuracy"] for r in rounds]
    assert columns["clients"] == [[c["id"] for c in r["clients"]] for r in rounds]
    first = rounds[0]
    for name, group in first["groups"].items():
        assert columns["groups"][name]["gsi"][0] == pytest.approx(group["gsi"], rel=1e-5)
        assert columns["groups"][name]["scale"][0] == group["scale"]
    squares = [c["sq_norm"] for c in first["clients"]]
    mean = sum(squares) / 3
    deviation = (sum((s - mean) ** 2 for s in squares) / 3) ** 0.5
    assert columns["norm_ratio"][0] == pytest.approx(deviation / mean, rel=1e-5)
    assert "sq_norm" not in path.read_text()
    assert str(out) not in path.read_text()


def test_an_unfinished_run_is_neither_counted_nor_exported(out: Path, tmp_path: Path):
    play("controls", out, only=["MNIST FedAvg"], seeds=[1])
    config = TINY["controls"].cell("MNIST FedAvg").config(1)
    cut = tmp_path / "runs" / "cut"
    shutil.copytree(out / f"digits-{config.hash()}", cut)
    (cut / "summary.json").unlink()
    assert read(cut) is None
    assert not Library([cut.parent]).has(config)
    assert export([cut], tmp_path / "results") == ([], [f"{cut} is left out: unfinished"])
    (cut / "summary.json").write_text("{")
    ((), (reason,)) = export([cut], tmp_path / "results")
    assert "cut cannot be read" in reason
    with pytest.raises(RunError, match="holds no run"):
        export([tmp_path], tmp_path / "results")


def test_the_first_rounds_of_a_run_are_those_of_a_shortened_one(out: Path, tmp_path: Path):
    play("controls", out, only=["MNIST FedAvg"], seeds=[1])
    cell = TINY["controls"].cell("MNIST FedAvg")
    cut = tmp_path / "runs" / "cut"
    shutil.copytree(out / f"digits-{cell.config(1).hash()}", cut)
    (cut / "summary.json").unlink()  # as if it were going on
    (path,), notes = export([cut], tmp_path / "results", rounds=2)
    execute("x", cell.config(1, rounds=2), out=tmp_path / "runs" / "two")
    (whole,), _ = export([tmp_path / "runs" / "two"], tmp_path / "other")
    assert (notes, path.name) == ([], whole.name)
    made, wanted = (json.loads(p.read_text()) for p in (path, whole))
    for told in (made, wanted):
        del told["seconds"], told["rounds"]["seconds"]
    assert made == wanted
    assert export([cut], tmp_path / "results", rounds=9) == (
        [],
        [f"{cut} is left out: fewer than 9 rounds"],
    )


def test_a_run_is_found_wherever_it_lies_and_with_any_exact_engine(out: Path, tmp_path: Path):
    cell = TINY["controls"].cell("MNIST FedAvg")
    config = cell.config(1)
    other = replace(config, checkpoint_every=1)
    execute("x", other, out=tmp_path / "somewhere-else")
    assert other.hash() != config.hash()
    todo = work.plan(TINY["controls"], Library([tmp_path]), out, only=[cell.label], seeds=[1])
    assert (todo.tasks, todo.there) == ([], 1)


def test_a_shortened_run_is_planned_as_such(out: Path):
    todo = work.plan(TINY["main"], Library([]), out, only=["mnist fedavg"], seeds=[7], rounds=2)
    assert [task.settings["cell"] for task in todo.tasks] == [
        "MNIST FedAvg",
        "MNIST FedAvg + FedGLAD",
    ]
    assert all(task.config.rounds == 2 for task in todo.tasks)
    assert {task.settings["shortened"] for task in todo.tasks} == {f"2 of {ROUNDS} rounds"}
    longer = work.plan(TINY["main"], Library([]), out, rounds=100)
    assert {task.config.rounds for task in longer.tasks} == {ROUNDS}
    assert not any("shortened" in task.settings for task in longer.tasks)


def test_what_cannot_be_meant_is_refused(out: Path):
    with pytest.raises(PaperError, match="--rounds 39: bad-round shows what happens in round 40"):
        work.plan(experiments.find("bad-round"), Library([]), out, rounds=39)
    with pytest.raises(PaperError, match="'mnits' matches no cell of main: CIFAR-10 FedAvg;"):
        work.plan(TINY["main"], Library([]), out, only=["mnits"])
    with pytest.raises(PaperError, match="no run of main is finished: fedglad paper run main"):
        plots.plot(TINY["main"], Library([]), out / "x.png")


def test_cost_by_hand():
    # MNIST: 10 clients × 5 epochs × 9 batches of 64 = 28,800 a round, and 10,000/3 tested
    config = experiments.find("main").cell("MNIST FedAvg").config(1)
    assert work.samples("mnist", config) == pytest.approx(50 * (28_800 + 10_000 / 3))
    # centralised: one client with 937 batches of 64, one epoch a round, 20 rounds
    config = experiments.find("centralised").cell("MNIST centralised").config(1)
    assert work.samples("mnist", config) == pytest.approx(20 * (937 * 64 + 10_000 / 3))


HERE = f"{platform.machine()}, {os.cpu_count()} cores"


def finished(
    folder: Path, config: Config, seconds: float, engine: str = "serial", machine: str = HERE
) -> None:
    """An exported run that took so long."""
    folder.mkdir(exist_ok=True)
    seed = 1 + len([*folder.glob("*")])
    tree = config.to_dict() | {"engine": {"name": engine}, "seed": seed}
    told = {"config": tree, "seconds": seconds, "machine": machine, "rounds": {}}
    (folder / f"{seed}.json").write_text(json.dumps({**told, "versions": {"format": FORMAT}}))


def test_the_speed_is_that_of_finished_runs(tmp_path: Path):
    controls = experiments.find("controls")
    config = controls.cell("MNIST FedAvg").config(1, rounds=2)
    finished(tmp_path, config, 50)
    finished(tmp_path, config, 1, engine="local")
    finished(tmp_path, config, 1, machine="?")
    library = Library([tmp_path])
    speeds = work.Speeds(library)
    # of three runs one was made here, alone in its process: 2·(28,800 + 3,333) samples in 50 s
    assert speeds.of("mnist", config) == pytest.approx(2 * (28_800 + 10_000 / 3) / 50)
    found = work.status(controls, library, speeds)
    assert (found.done, found.shortened) == (0, 3)
    assert found.hours == pytest.approx(12 * 50 / 2 * 50 / 3600)  # each 25 times as long
    assert found.basis == [
        f"cnn on MNIST: 1,285 samples/s on a core, from 1 finished run on {HERE}"
    ]


def test_what_no_run_has_measured_is_told(tmp_path: Path):
    main = experiments.find("main")
    for label in ("MNIST FedAvg", "CIFAR-10 FedAvg"):
        cell = main.cell(label)
        config = cell.config(1, rounds=3)
        finished(tmp_path, config, work.samples(cell.data, config) / 500)
    library = Library([tmp_path])
    found = work.status(main, library, work.Speeds(library))
    assert found.unmeasured == 48  # of 96: those on 20NewsGroups and AGNews
    # MNIST: 24 runs of 1.607 M samples; CIFAR-10: 24 of 500·(22,400 + 10,000/3)
    cifar = 500 * (22_400 + 10_000 / 3)
    mnist = 50 * (28_800 + 10_000 / 3)
    assert found.hours == pytest.approx(24 * (mnist + cifar) / 500 / 3600)
    told = f"encoder distilbert-base-uncased on AGNews: no run is finished on {HERE}"
    assert told in found.basis
    nothing = work.status(main, Library([]), work.Speeds(Library([])))
    assert (nothing.hours, nothing.hours_left, nothing.unmeasured) == (None, None, 96)


# ------------------------------------------------------------------------------------ commands


def test_the_list_says_what_is_done(out: Path, tiny: Path):
    play("controls", out, only=["MNIST FedAvg"], seeds=[1])
    cell = TINY["controls"].cells[0].config(1)
    shutil.copytree(out / f"digits-{cell.hash()}", tiny / "x" / "y")
    for name in DATA:  # digits stand for it, with their model
        _, config = load(name, {"rounds": 2})
        sections = {**config.sections, "model": cell.sections["model"]}
        config = replace(config, sections=sections)
        finished(tiny / "kept", config, work.samples(name, config) / 1000)
    told = json.loads(invoke("list", "--json", "--out", "x", "--results", "kept"))
    assert list(told) == list(experiments.EXPERIMENTS)
    assert told["controls"]["cells"] == 4
    assert told["controls"]["runs"] == 12
    assert (told["controls"]["done"], told["controls"]["shortened"]) == (1, 0)
    left = told["controls"]["hours_left"] / told["controls"]["hours"]
    assert left == pytest.approx(11 / 12)
    assert told["main"]["absent"] == 0  # digits stand for the texts
    text = invoke("list", "--out", "x", "--results", "kept")
    assert all(name in text for name in experiments.EXPERIMENTS)
    assert f"1,000 samples/s on a core, from 1 finished run on {HERE}" in text
    assert ">" not in text


def test_the_list_has_no_hours_without_finished_runs(tiny: Path):
    told = json.loads(invoke("list", "--json", "--results", "kept"))
    assert {row["hours"] for row in told.values()} == {None}
    assert {row["hours_left"] for row in told.values()} == {None}
    text = invoke("list", "--results", "kept")
    (line,) = (line for line in text.splitlines() if line.startswith("controls "))
    assert re.search(r" 4 +12 +0 +- +- ", line)
    assert "mlp on MNIST: no run is finished on" in text


def test_the_real_list_names_what_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = experiments.find("main").cell("MNIST FedAvg").config(1, rounds=3)
    finished(tmp_path / "results", config, work.samples("mnist", config) / 500)
    told = json.loads(invoke("list", "--json"))
    # 16 cells on MNIST and CIFAR-10; with 500 samples/s an MNIST run has 1.607 M of them: .893 h
    assert told["controls"]["hours"] == pytest.approx(12 * 50 * (28_800 + 10_000 / 3) / 500 / 3600)
    if told["bilstm"]["absent"]:
        assert told["bilstm"]["hours"] is None
        assert "not in this version" in invoke("list")
        assert "data set not in this version" in invoke("table", "bilstm")


def test_tables_in_every_format(small: Path, tiny: Path):
    text = invoke("table", "controls", "--out", small)
    assert "MNIST FedAvg + FedGLAD" in text
    assert "79.71 ± 0.49" in text
    assert "worst, 2nd" in text
    assert invoke("table", "controls", "--out", small, "--format", "markdown").count("\n|") == 6
    assert invoke("table", "controls", "--out", small, "--format", "csv").startswith("cell,label,")
    assert r"\begin{tabular}" in invoke("table", "controls", "--out", small, "--format", "latex")
    told = json.loads(invoke("table", "controls", "--out", small, "--json"))
    assert [row["n"] for row in told["rows"]] == [3, 3, 3, 3]
    assert told["rows"][1]["interval"]


def test_export_plot_and_table_from_the_command_line(small: Path, tiny: Path):
    for cell in TINY["bad-round"].cells:
        name = f"digits-{cell.config(1).hash()}"
        shutil.copytree(small / name, Path("runs") / "paper" / name)
    assert invoke("export").count("results/digits-") == 2
    shutil.rmtree("runs")
    assert "Picture: paper-bad-round.png" in invoke("plot", "bad-round")
    assert Path("paper-bad-round.png").stat().st_size > 10_000
    assert "not run" not in invoke("table", "bad-round")
    for path in Path("results").glob("*.json"):
        path.write_text("{")
    done = CliRunner().invoke(app, ["paper", "table", "bad-round"])
    assert "cannot be read" in done.stderr
    assert "not run" in done.stdout


def test_mistakes_are_told_in_a_sentence(tiny: Path):
    assert "did you mean 'main'" in invoke("run", "mian", code=2)
    assert "--seeds 'a': write whole numbers" in invoke("run", "main", "--seeds", "a", code=2)
    twice = invoke("run", "main", "--seeds", "1", "--seeds", "2,b", code=2)
    assert "--seeds '1,2,b': write" in twice  # the first is not forgotten
    assert "unknown format 'html'" in invoke("table", "main", "--format", "html", code=2)
    assert "no run of main is finished" in invoke("plot", "main", code=2)
    assert "there is no folder" in invoke("export", "nowhere", code=2)
    assert "matches no cell" in invoke("run", "main", "--only", "x", code=2)


def test_data_out_of_reach_stops_only_the_cells_that_need_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []

    def bring(config: Any) -> None:
        asked.append(config.to_dict()["model"])
        if list(asked[-1]["hidden"]) == [4]:
            raise DataError("no connection")

    *others, pooled, smaller = TINY["controls"].cells
    pooled = replace(pooled, overrides={**pooled.overrides, "model.hidden": [4]})
    changed = replace(TINY["controls"], cells=(*others, pooled, smaller))
    monkeypatch.setattr(fetching, "fetch_for", bring)
    monkeypatch.setitem(experiments.EXPERIMENTS, "controls", changed)
    told = invoke("run", "controls", "--jobs", "1", code=1)
    assert len(asked) == 2  # each kind of data and model once
    assert told.count("no connection") == 1
    assert "cell=MNIST FedAvg + pooled seed=1 and 2 more runs cannot be run: no conn" in told
    assert len([*Path("runs/paper").glob("*/summary.json")]) == 9


# -------------------------------------------------------------------------- real processes, kills

SCRIPT = """
import sys
from fedglad.cli import fetching
from fedglad.cli import app
from fedglad.config.schema import FORMAT, Config, load
from fedglad.data.sources import DataError
from fedglad.studies.paper import experiments
from studies.support import shrunk

if __name__ == "__main__":  # the jobs' processes import this file
    slow = {"data.name": "run_support:Slow", "data.seconds": 0.05, "data.clients": 12}
    slow |= {"rounds": 12, "checkpoint_every": 3}
    found = shrunk(experiments.find("controls"), **slow)
    cells = []
    for cell in found.cells:
        own = {k: v for k, v in cell.overrides.items() if k != "data.alpha"}
        cells.append(type(cell)(**{**vars(cell), "overrides": own}))
    experiments.EXPERIMENTS["controls"] = type(found)(**{**vars(found), "cells": tuple(cells)})
    app(sys.argv[1:])
"""


def command(script: Path, *args: str | Path) -> list[str]:
    return [sys.executable, str(script), "paper", *map(str, args)]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path):
    script = tmp_path / "tiny_paper.py"
    script.write_text(SCRIPT)
    how = ("run", "controls", "--seeds", "1", "--jobs", "2")
    options: dict[str, Any] = {"env": environment(), "text": True, "cwd": tmp_path}
    whole = subprocess.run(
        command(script, *how, "--out", "whole"), capture_output=True, timeout=300, **options
    )
    assert whole.returncode == 0, whole.stderr
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        command(script, *how, "--out", "cut"), start_new_session=True, **pipes, **options
    )
    cut = tmp_path / "cut"
    try:
        until(lambda: [f for f in cut.glob("*") if len(Run(f).rounds()) >= 4])
    finally:
        process.kill()
        process.communicate()
    assert not all(Run(folder).summary for folder in cut.glob("*"))
    again = subprocess.run(
        command(script, *how, "--out", "cut"), capture_output=True, timeout=300, **options
    )
    assert again.returncode == 0, again.stderr
    names = sorted(path.name for path in (tmp_path / "whole").glob("*"))
    assert len(names) == 4
    assert names == sorted(path.name for path in cut.glob("*"))
    for name in names:
        assert outcome(tmp_path / "whole" / name) == outcome(cut / name)
    third = subprocess.run(
        command(script, *how, "--out", "cut"), capture_output=True, timeout=300, **options
    )
    assert "4 runs are there already" in third.stdout
