"""`fedglad tune`: the score by hand, real trials, and that nothing is run twice."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cli.test_cli import said
from run_support import TINY, cli, start, until
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.config.schema import ConfigError, load
from fedglad.runs import Run, execute
from fedglad.runs.sweeping import ENDS, Event
from fedglad.runs.tuning import Search, check_metric, combinations, result, score, tune

QUICK = {**TINY, "rounds": 10, "checkpoint_every": 1}
GRIDS = ["server.lr=0.5,1", "client.lr=0.05,0.1"]


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["tune", *(str(a) for a in args)], env={"COLUMNS": "80"})


def given(overrides: dict[str, Any]) -> list[str]:
    return [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]


def planned(out: Path, *grids: str, **more: Any) -> Search:
    return combinations("digits", grids or GRIDS, {**QUICK, **more}, out)


def ends(events: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(e.what, dict(e.task.settings)) for e in events if e.what in ENDS]


# ------------------------------------------------------------------------------------- arithmetic


def rounds(*losses: Any) -> list[dict[str, Any]]:
    return [{"status": "stepped", "train_loss": loss} for loss in losses]


def test_the_score_is_the_mean_training_loss():
    assert score(rounds(2.0, 1.0, 0.6)) == (pytest.approx(1.2), "")  # 3.6 / 3


@pytest.mark.parametrize("loss", [None, math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_the_worst_score(loss: Any):
    told = (math.inf, "the training loss of round 2 is not finite")
    assert score(rounds(0.1, loss, 0.1)) == told


def test_a_skipped_round_is_the_worst_score():
    skipped = {"status": "skipped", "reason": "0 of 3 updates were accepted", "train_loss": None}
    assert score([*rounds(0.1, 0.2), skipped]) == (
        math.inf,
        "1 of 3 rounds were skipped: 0 of 3 updates were accepted",
    )


# --------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("whole", "share", "short"),
    [(50, 0.2, 10), (500, 0.2, 100), (7, 0.2, 2), (1, 0.2, 1), (30, 0.1, 3), (10, 1.0, 10)],
)
def test_a_trial_has_the_first_share_of_the_rounds(
    whole: int, share: float, short: int, tmp_path: Path
):
    found = combinations("digits", GRIDS, {**QUICK, "rounds": whole}, tmp_path, share=share)
    assert (found.rounds, found.full_rounds, len(found.tasks)) == (short, whole, 4)
    for task in found.tasks:
        expected = load("digits", {**QUICK, **task.settings, "rounds": short})[1]
        assert task.config == expected
        assert task.folder == tmp_path / f"digits-{expected.hash()}"


def test_other_settings_are_other_runs_and_another_grid_shares_them(tmp_path: Path):
    def folders(*grids: str, **more: Any) -> set[Path]:
        return {task.folder for task in planned(tmp_path, *grids, **more).tasks}

    assert folders() == folders("server.lr=1,0.5", GRIDS[1]) > folders("server.lr=1", GRIDS[1])
    for more in ({"seed": 2}, {"rounds": 20}):
        assert not folders() & folders(**more)
    assert planned(tmp_path, "server.lr=1,0.5").grid == {"server.lr": [1, 0.5]}


MISTAKES = [
    ([], "tuning needs a grid: --grid server.lr=0.5,1,2"),
    (["--grid", "seed=1,2"], "'seed' cannot be tuned: the best of several would be luck"),
    (["--grid", "data.seed=1,2"], "'data.seed' cannot be tuned"),
    (["--grid", "rounds=1,2"], "'rounds' cannot be tuned"),
    (["--grid", "server.lr"], "write it as KEY=V1,V2"),
    (["--grid", "server.lr=1,-1"], "(with server.lr=-1)"),
    (["--grid", "server.lr=1", "--share", "0"], "--share 0.0: must be more than 0"),
    (["--grid", "server.lr=1", "--share", "1.5"], "--share 1.5: must be more than 0, and 1"),
    (["--grid", "server.lr=1", "--trials", "0"], "--trials"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_runs_nothing(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = call("digits", *args)
    assert done.exit_code == 2, done.exception
    assert message in said(done)
    assert not done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_line_loads_neither_optuna_nor_matplotlib():
    script = "import sys, fedglad.cli; print(*sorted({'optuna', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [])


# ------------------------------------------------------------------------------------- the trials


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_score_is_that_of_the_beginning_of_the_whole_run(tmp_path: Path, schedule: str):
    """So only the first rounds need to be run; the falling rate must not fall sooner."""
    todo = combinations(
        "digits", GRIDS[:1], {**QUICK, "server.schedule": schedule}, tmp_path, share=0.3
    )
    told = list(tune(todo, jobs=2))
    assert [what for what, _ in ends(told)] == ["finished"] * 2
    found = result(todo)
    assert [trial.status for trial in found.trials] == ["scored"] * 2
    assert all(a.score < b.score for a, b in pairwise(found.trials) if a.score and b.score)
    assert found.best == found.trials[0]
    for trial in found.trials:
        name, config = load("digits", {**QUICK, "server.schedule": schedule, **trial.settings})
        whole = execute(name, config, out=tmp_path / "whole" / config.hash())
        assert trial.score == fmean(r["train_loss"] for r in whole.rounds()[:3])
        assert len(Run(Path(trial.folder)).rounds()) == 3


def test_a_search_that_was_stopped_goes_on_with_the_rest(tmp_path: Path):
    todo, first = planned(tmp_path), list[Event]()
    with closing(tune(todo)) as events:
        for event in events:
            first.append(event)
            if len(ends(first)) == 2:
                break
    assert [settings for _, settings in ends(first)] == [t.settings for t in todo.tasks[:2]]
    again = list(tune(planned(tmp_path)))
    assert ends(again) == [
        ("kept", todo.tasks[0].settings),
        ("kept", todo.tasks[1].settings),
        ("finished", todo.tasks[2].settings),
        ("finished", todo.tasks[3].settings),
    ]
    assert ends(tune(todo)) == [("kept", task.settings) for task in todo.tasks]
    assert len(result(todo).trials) == 4


@pytest.mark.slow
def test_fewer_trials_than_combinations_are_different_ones_and_more_can_follow(tmp_path: Path):
    grids = ["server.lr=0.25,0.5,1,2", "client.lr=0.01,0.02,0.05"]
    todo = planned(tmp_path, *grids)
    told = ends(tune(todo, trials=4, jobs=2))
    assert [what for what, _ in told] == ["finished"] * 4
    assert len({json.dumps(settings) for _, settings in told}) == 4
    assert len(result(todo).trials) == len([*tmp_path.glob("digits-*/summary.json")]) == 4
    again = ends(tune(todo, trials=6, jobs=2))
    assert [what for what, _ in again] == ["kept"] * 4 + ["finished"] * 2
    assert len({json.dumps(settings) for _, settings in again}) == 6
    assert [what for what, _ in ends(tune(todo))] == ["kept"] * 6 + ["finished"] * 6
    chosen = [settings for _, settings in again]
    assert ends(tune(todo, trials=3)) == [("kept", settings) for settings in chosen[:3]]


def test_more_trials_begin_with_those_that_were_made(tmp_path: Path):
    todo = planned(tmp_path, "server.lr=0.25,0.5,1,2", "client.lr=0.01,0.02,0.05")
    assert todo.first() == todo.first(12) == todo.first(99) == todo.tasks
    assert todo.first(4) != todo.tasks[:4]
    for trials in range(1, 11):
        assert todo.first(trials + 1)[:trials] == todo.first(trials)
    assert {task.folder for task in todo.first(11)} < {task.folder for task in todo.tasks}


@pytest.mark.slow
def test_the_same_are_chosen_in_another_folder(tmp_path: Path):
    grids = ["server.lr=0.25,0.5,1,2", "client.lr=0.01,0.02,0.05"]
    both = [ends(tune(planned(tmp_path / out, *grids), trials=5)) for out in ("a", "b")]
    assert both[0] == both[1]


def test_a_run_that_is_there_already_is_scored_and_not_run(tmp_path: Path):
    todo = planned(tmp_path)
    execute("digits", todo.tasks[1].config, out=todo.tasks[1].folder)
    whats = [what for what, _ in ends(tune(todo, trials=4))]
    assert sorted(whats) == ["finished"] * 3 + ["kept"]


def test_diverged_trials_are_last_and_named(tmp_path: Path):
    args = ["digits", *given(QUICK), "--grid", "client.lr=1e9,0.05", "--out", str(tmp_path)]
    done = call(*args)
    assert done.exit_code == 0, done.exception
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    head = lines.index("score client.lr run")
    assert re.fullmatch(rf"\d\.\d{{4}} 0.05 {tmp_path}/digits-\w+", lines[head + 1])
    assert re.fullmatch(rf"diverged 1000000000.0 {tmp_path}/digits-\w+", lines[head + 2])
    reason = "2 of 2 rounds were skipped: 0 of 3 updates were accepted"
    assert f"Diverged: client.lr=1000000000.0: {reason}" in done.stdout
    assert f"client.lr=1000000000.0 diverged: {reason}" in " ".join(lines)
    assert "first 2 of 10 rounds. The runs are shortened to these" in done.stdout
    assert "Best: --set client.lr=0.05\n" in done.stdout
    assert "the best client.lr, 0.05, is the smallest of its grid: widen the grid" in done.stdout
    again = call(*args)
    assert again.stdout.startswith("2 of 2 runs were finished already.\n")
    assert again.stdout.endswith(done.stdout[done.stdout.index("\nscore") :])


def test_nothing_but_diverged_trials_is_exit_code_1(tmp_path: Path):
    args = ["digits", *given(QUICK), "--grid", "client.lr=1e9,1e10", "--out", str(tmp_path)]
    done = call(*args, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["best"] is None
    assert [trial["score"] for trial in found["trials"]] == [None, None]
    assert "no trial has a score: all diverged or failed" in said(done)


def test_json_has_everything(tmp_path: Path):
    args = ["digits", *given(QUICK), *(p for g in GRIDS for p in ("--grid", g)), "--json"]
    done = call(*args, "--out", str(tmp_path), "--jobs", "2")
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert (found["rounds"], found["full_rounds"], found["shortened"]) == (2, 10, True)
    assert found["grid"] == {"server.lr": [0.5, 1], "client.lr": [0.05, 0.1]}
    best = found["best"]
    assert best["score"] == min(trial["score"] for trial in found["trials"])
    settings = best["settings"]
    assert best["arguments"] == " ".join(f"--set {k}={v}" for k, v in settings.items())
    losses = [r["train_loss"] for r in Run(Path(best["folder"])).rounds()]
    assert best["score"] == fmean(losses)


def test_the_average_can_be_the_score(tmp_path: Path):
    args = ["digits", *given({**QUICK, "average.name": "ema"}), "--grid", "client.lr=0.001,0.1"]
    args += ["--out", str(tmp_path), "--metric", "last10_averaged_accuracy"]
    done = call(*args)
    assert done.exit_code == 0, done.exception
    found = json.loads(call(*args, "--json").stdout)
    scores = [trial["score"] for trial in found["trials"]]
    assert found["metric"] == "last10_averaged_accuracy"
    assert found["best"]["score"] == scores[0] > scores[1]  # the largest
    for trial in found["trials"]:
        averages = [r["averaged_accuracy"] for r in Run(Path(trial["folder"])).rounds()]
        assert trial["score"] == pytest.approx(fmean(averages))
    best = found["best"]["settings"]["client.lr"]
    assert f"client.lr={best}  last10_averaged_accuracy {scores[0]:.4f}" in done.stdout
    assert "The score is last10_averaged_accuracy over the first 2 of 10" in done.stdout
    assert "chosen by the test set" in done.stdout


def test_an_average_that_the_optimizer_keeps_can_be_the_score(tmp_path: Path):
    free = {**QUICK, "average.name": "none", "server.name": "schedule-free"}
    args = ["digits", *given(free), "--grid", "client.lr=0.1", "--out", str(tmp_path)]
    done = call(*args, "--metric", "final_averaged_accuracy", "--json")
    assert done.exit_code == 0, done.exception
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["score"] == Run(Path(trial["folder"])).rounds()[-1]["averaged_accuracy"]


def test_a_score_that_trials_will_not_have_runs_nothing(tmp_path: Path):
    args = ["digits", *given(QUICK), "--grid", "client.lr=0.1,0.2", "--out", str(tmp_path / "out")]
    unknown = call(*args, "--metric", "acuracy")
    assert "'acuracy' is no score: choose from train_loss, last10_accuracy," in said(unknown)
    none = ("--set", "average.name=none")
    without = call(*args, *none, "--metric", "final_averaged_accuracy")
    assert "needs an average that is tested: --set average.name=ema" in said(without)
    assert unknown.exit_code == without.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_values_of_any_kind_can_be_tuned(tmp_path: Path):
    cohorts = 'sampler.cohorts={"0" = [1, 2]},{"0" = [3, 4]}'
    todo = planned(tmp_path, cohorts, "adapter.name=none,glad", **{"sampler.name": "scripted"})
    assert len(ends(tune(todo, trials=3))) == 3
    best = result(todo).best
    assert best
    assert best.arguments.startswith('--set \'sampler.cohorts={"0": [')
    assert isinstance(best.settings["sampler.cohorts"], dict)


def test_settings_that_the_first_rounds_do_not_tell_apart_are_named(tmp_path: Path):
    # Two rounds: s = 1 in the first, and that of the second acts on the loss of the third.
    args = ["digits", *given(QUICK), "--grid", "adapter.gamma=0.02,0.05,0.1"]
    done = call(*args, "--out", tmp_path)
    assert done.exit_code == 0, done.exception
    told = "--set adapter.gamma=0.05; --set adapter.gamma=0.1: the same score"
    assert f"the first rounds do not tell it from {told}" in done.stdout


def test_the_papers_grids_have_a_name(tmp_path: Path):
    args = ["digits", *given(QUICK), "--grid", "adapter.gamma=paper", "--trials", "1", "--json"]
    done = call(*args, "--out", tmp_path)
    assert json.loads(done.stdout)["grid"] == {"adapter.gamma": [0.01, 0.02, 0.03, 0.04, 0.05]}
    done = call("digits", "--grid", "client.lr=paper", "--out", tmp_path)
    assert done.exit_code == 2
    known = "server.lr, client.mu, adapter.gamma, client.epochs"
    assert f"--grid client.lr=paper: the paper has grids of {known}" in said(done)


# -------------------------------------------------------------------------------- what goes wrong


def test_a_trial_that_fails_is_named_and_tried_again(tmp_path: Path):
    args = ["digits", *given(QUICK), "--grid", "data.clients=2,12", "--out", str(tmp_path)]
    first, again = call(*args), call(*args)
    for done in (first, again):
        assert done.exit_code == 1, done.exception
        assert "error: data.clients=2: " in said(done)
        assert "more than the 2 clients" in said(done)
        assert "Best: --set data.clients=12\n" in done.stdout
    assert "1 of 2 runs were finished already." in again.stdout


def test_the_journal_of_an_older_version_is_neither_read_nor_changed(tmp_path: Path):
    journal = tmp_path / "digits-study-0123456789.journal"
    journal.write_text("no journal\n")
    todo = planned(tmp_path)
    list(tune(todo, trials=2))
    assert [what for what, _ in ends(tune(todo))] == ["kept"] * 2 + ["finished"] * 2
    assert len(result(todo).trials) == 4
    assert journal.read_text() == "no journal\n"
    assert [path for path in tmp_path.iterdir() if path.is_file()] == [journal]


@pytest.mark.parametrize("left", [0, 1])
def test_a_finished_run_without_all_its_records_is_said(tmp_path: Path, left: int):
    args = ["digits", *given(QUICK), "--grid", "client.lr=0.05,0.1", "--out", str(tmp_path)]
    assert call(*args).exit_code == 0
    records = planned(tmp_path, "client.lr=0.05").tasks[0].folder / "rounds.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:left]) + '{"t"')
    done = call(*args)
    assert done.exit_code == 1
    assert f"client.lr=0.05: rounds.jsonl is damaged: {left} of 2 rounds can be read" in said(done)
    assert "Best: --set client.lr=0.1\n" in done.stdout


# -------------------------------------------------------------------------- real processes, kills

SLOW = {**QUICK, "data.name": "run_support:Slow", "data.seconds": 0.1}


def command_line(out: Path) -> list[str | Path]:
    grids = [p for g in ("server.lr=0.5,1,2", "client.lr=0.05,0.1") for p in ("--grid", g)]
    return ["tune", "digits", *given(SLOW), *grids, "--jobs", "2", "--out", out]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_same_command_goes_on_after_any_end(tmp_path: Path, how: signal.Signals):
    process = start(*command_line(tmp_path))
    until(lambda: len([*tmp_path.glob("*/summary.json")]) >= 2)
    (os.kill if how == signal.SIGKILL else os.killpg)(process.pid, how)
    _, told = process.communicate(timeout=60)
    assert "Traceback" not in told
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "of 6 runs are finished; stopped, all saved: go on with the same command" in told
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/summary.json")}
    assert 2 <= len(before) < 6
    done = cli(*command_line(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before
    found = json.loads(done.stdout)
    assert [trial["status"] for trial in found["trials"]] == ["scored"] * 6
    whole = cli(*command_line(tmp_path / "whole"), "--json")
    scores = [
        [(t["settings"], t["score"]) for t in x["trials"]]
        for x in (found, json.loads(whole.stdout))
    ]
    assert scores[0] == scores[1]


def test_where_clients_keep_parameters_their_training_judges(tmp_path: Path):
    more: dict[str, Any] = {"data.validation": 0.2, "client.personal": "*.bias"}
    search = planned(tmp_path, **more)
    assert planned(tmp_path, **{**more, "client.personal": ""}).metric != "train_loss"
    assert check_metric(search, None) == "train_loss"
    with pytest.raises(
        ConfigError, match=r"'final_accuracy' is of the server's.*choose train_loss"
    ):
        check_metric(search, "final_accuracy")
