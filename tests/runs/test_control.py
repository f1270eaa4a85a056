"""`fedglad sweep --control`: which runs follow a rule's, what is written of them, and the table."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_cli import said
from run_support import TINY, cli, outcome, start, until

from fedglad.config.schema import REGISTRIES, load
from fedglad.runs import Run
from fedglad.runs.control import AVERAGE, Controls, control, controlled, mark, mean_factor, twin
from fedglad.runs.sweeping import Event, Task, sweep, tasks
from runs.test_runs import contents, stopped
from runs.test_sweep import ENDS, LONG, QUICK, call, given, plan

FEW = (0.5, 2.0)


def finish(todo: list[Task], **how: Any) -> list[Event]:
    """The ends of a controlled sweep with few constants."""
    how = {"jobs": 2, "factors": FEW, **how}
    return [event for event in controlled(todo, **how) if event.what in ENDS]


def kinds(ends: list[Event]) -> list[str]:
    return sorted(event.task.kind if event.task.rule else "run" for event in ends)


def rounds_of(folder: Path, *scales: dict[str, float] | None) -> None:
    """Records with these factors by group; None: a round that was skipped."""
    lines = [
        {"round": t, "status": "stepped", "groups": {g: {"scale": x} for g, x in told.items()}}
        if told
        else {"round": t, "status": "skipped", "groups": {}}
        for t, told in enumerate(scales)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# --------------------------------------------------------------------------------- the mean factor


def test_the_mean_factor_is_that_of_a_parameter(tmp_path: Path):
    (task,) = plan(tmp_path, "seed=1")
    sizes = {
        name: p.numel() for name, p in task.config.sections["model"].build().named_parameters()
    }
    weight, bias = sizes
    assert list(sizes.values()) == [640, 10]
    rounds_of(tmp_path, {weight: 0.5, bias: 1.5}, None, {weight: 1.0, bias: 1.0})
    # (640 · .5 + 10 · 1.5) / 650 = 335/650 = .515385; with the last round's 1: half of 1.515385
    assert mean_factor(tmp_path, task.config) == pytest.approx((335 / 650 + 1) / 2)
    (whole,) = plan(tmp_path, "adapter.groups=all")
    rounds_of(tmp_path, {"all": 0.5}, {"all": 0.6})
    assert mean_factor(tmp_path, whole.config) == pytest.approx(0.55)
    rounds_of(tmp_path, None, None)
    with pytest.raises(ValueError, match="no round of its rule stepped"):
        mean_factor(tmp_path, task.config)


def test_a_control_is_the_run_at_the_rules_own_mean_factor(tmp_path: Path):
    found = plan(tmp_path, "seed=1", "adapter.name=none,fixed,glad,fedexp")
    state = torch.get_rng_state()
    told = finish(found)
    assert torch.get_rng_state().equal(state)
    # The rules share the linear decay and the trials; the best constants of one seed are trials.
    assert kinds(told) == ["linear", *["mean"] * 2, *["run"] * 4, *["trial"] * 2]
    assert {event.what for event in told} == {"finished"}
    own = {event.task.label: event.task for event in told if event.task.kind == "mean"}
    glad = own["seed=1 control of adapter.name=glad"]
    assert "seed=1 control of adapter.name=fedexp" in own
    assert glad.rule == found[2]
    factor = mean_factor(found[2].folder, found[2].config)
    assert factor != 1
    (alone,) = plan(tmp_path / "alone", f"adapter.value={factor!r}", adapter__name="fixed")
    assert glad.folder == tmp_path / alone.folder.name
    assert list(sweep([alone]))[-1].what == "finished"
    assert outcome(alone.folder) == outcome(glad.folder)
    assert all(
        group["scale"] == factor
        for r in Run(glad.folder).rounds()
        for group in r["groups"].values()
    )


def test_the_control_of_a_rule_that_does_nothing_is_no_rule(tmp_path: Path):
    (rule,) = plan(tmp_path, "seed=1", adapter__gamma=0)
    # Its mean factor, 1, is one of the constants that are tried: one run is both.
    told = finish([rule], factors=(1, 2))
    assert kinds(told) == ["linear", "mean", "run", "trial"]
    own = control(rule)
    assert own.config.sections["adapter"].value == 1
    assert {"mean", "trial"} <= {one.get("kind", "mean") for one in Run(own.folder).control_of()}
    (none,) = plan(tmp_path, "seed=1", adapter__name="none")
    assert list(sweep([none]))[-1].what == "finished"
    accuracies = [[r["test_accuracy"] for r in Run(t.folder).rounds()] for t in (own, none, rule)]
    assert accuracies[0] == accuracies[1] == accuracies[2]


# ------------------------------------------------------------------------------- the other kinds


def test_the_linear_twin_is_the_run_whose_rate_falls_and_has_no_rule(tmp_path: Path):
    (rule,) = plan(tmp_path, "adapter.gamma=0.1", server__schedule="cosine", server__lr=0.5)
    made = twin(rule, "linear")
    wanted = {"adapter.name": "none", "server.schedule": "linear", "server.lr": 0.5}
    assert made.config == load("digits", {**QUICK, **wanted})[1]
    assert made.label == "linear decay"
    assert made.settings == {"adapter.name": "none", "server.schedule": "linear"}
    (constant,) = plan(tmp_path, "seed=1", server__lr=0.5)
    assert twin(constant, "linear").folder == made.folder  # both rules share it


def test_the_constant_is_chosen_on_the_first_seed_and_kept_for_the_others(tmp_path: Path):
    todo = plan(tmp_path, "seed=2,1,3")
    told = finish(todo, factors=(0.5, 1, 2))
    tried = {e.task.settings["adapter.value"]: e.task for e in told if e.task.kind == "trial"}
    assert {task.config.seed for task in tried.values()} == {2}
    assert sorted(tried) == [0.5, 1, 2]
    for kind, name in (("tuned", ""), ("tuned-averaged", "averaged_")):
        by = f"last10_{name}accuracy"
        results = {x: (Run(task.folder).summary or {})[by] for x, task in tried.items()}
        best = max(results, key=lambda x: (results[x], x == 1))
        entry = {
            "kind": kind,
            "factor": best,
            "by": by,
            "among": [0.5, 1, 2],
            "on": [{"seed": 2, "data.seed": 0}],
        }
        for rule in todo:
            assert entry in Run(twin(rule, kind, best).folder).control_of()
            assert Run(twin(rule, kind, best).folder).summary


def test_of_equal_constants_the_one_nearest_to_one_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fedglad.runs.control._value", lambda *_: (0.5, "last10_accuracy"))
    (rule,) = plan(tmp_path, "seed=1", rounds=1)
    finish([rule], factors=(0.5, 1.5, 3))  # |ln .5| = .69, |ln 1.5| = .41, |ln 3| = 1.1
    chosen = Run(twin(rule, "tuned", 1.5).folder).control_of()
    assert [one["kind"] for one in chosen] == ["trial", "tuned", "tuned-averaged"]


def test_validation_data_choose_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (rule,) = plan(tmp_path, "seed=1", rounds=1)
    better = {0.5: 0.9, 2.0: 0.1}
    summary = Run.summary.fget
    assert summary

    def with_validation(run: Run) -> Any:
        config, known = run.config or {}, summary(run)
        chosen = better.get(config.get("adapter", {}).get("value"))
        return known and {**known, "last10_validation_accuracy": chosen}

    monkeypatch.setattr(Run, "summary", property(with_validation))
    finish([rule])
    entries = Run(twin(rule, "tuned", 0.5).folder).control_of()
    assert ("tuned", "last10_validation_accuracy") in [(e["kind"], e.get("by")) for e in entries]


def test_without_an_average_there_is_no_constant_for_it(tmp_path: Path):
    todo = plan(tmp_path, "seed=1,2", average__name="none")
    assert kinds(finish(todo)) == [
        *["linear"] * 2,
        *["mean"] * 2,
        *["run"] * 2,
        *["trial"] * 2,
        "tuned",
    ]


def test_rules_that_differ_elsewhere_share_nothing(tmp_path: Path):
    todo = plan(tmp_path, "client.lr=0.05,0.1", rounds=2)
    told = finish(todo)
    assert kinds(told) == [*["linear"] * 2, *["mean"] * 2, *["run"] * 2, *["trial"] * 4]
    assert {e.task.label for e in told if e.task.kind == "linear"} == {
        "client.lr=0.05 linear decay",
        "client.lr=0.1 linear decay",
    }


@pytest.mark.skipif("estimator" not in REGISTRIES, reason="there are no estimators")
def test_a_repaired_mean_is_a_rule_whose_constants_are_without_it(tmp_path: Path):
    settings = {"adapter__name": "none", "estimator__name": "varp"}
    (rule,) = plan(tmp_path, "seed=1", **settings)
    (plain,) = plan(tmp_path, "seed=1", adapter__name="none", server__schedule="linear")
    assert twin(rule, "linear").folder == plain.folder
    assert kinds(finish([rule])) == ["linear", "run", "trial", "trial"]  # it has no mean factor


# --------------------------------------------------------------------- kept, resumed, run once


def test_controls_are_run_once_and_go_on(tmp_path: Path):
    found = plan(tmp_path, "seed=1,2")
    told = finish(found)
    assert {event.what for event in told} == {"finished"}
    before = {task.folder: contents(task.folder) for e in told if (task := e.task)}
    assert len(before) == len(told)
    again = finish(found)
    assert [event.what for event in again] == ["kept"] * len(told)
    assert {folder: contents(folder) for folder in before} == before
    own = control(found[1])
    shutil.rmtree(own.folder)
    stopped(own.folder, 3, own.config)
    again = list(controlled(found, factors=FEW))
    assert [event.what for event in again].count("kept") == len(told) - 1
    assert [event.round.t for event in again if event.round] == [2, 3, 4, 5]
    assert outcome(own.folder)[0] == [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "after", "crc")}
        for line in (before[own.folder]["rounds.jsonl"]).splitlines()
    ]


def test_the_number_of_runs_is_known_and_only_falls(tmp_path: Path):
    todo = plan(tmp_path, "seed=1,2,3", "adapter.name=none,glad", rounds=2)
    controls = Controls(todo, FEW)
    # 6 of the grid, 3 means, 3 linear, 2 trials, and for two seeds at most two constants each
    seen = [controls.runs]
    ends = 0
    for event in sweep(todo, jobs=2, then=controls.then):
        ends += event.what in ENDS
        seen.append(controls.runs)
    assert seen[0] == 6 + 3 + 3 + 2 + 4
    assert seen == sorted(seen, reverse=True)
    assert ends == seen[-1]


def test_a_run_that_was_asked_for_stays_a_run(tmp_path: Path):
    todo = plan(tmp_path, "seed=1", "adapter.name=fixed,glad", rounds=2)  # fixed: the factor 1
    told = finish(todo, jobs=1, factors=(1,))
    assert kinds(told) == ["linear", "mean", "run", "run"]
    rows = call("compare", tmp_path).stdout.splitlines()
    for label in ("adapter.name=fixed", "tuned constant 1"):
        assert any(row.startswith(f"{label}  ") for row in rows)


def test_a_note_has_every_seed_on_which_a_constant_was_chosen(tmp_path: Path):
    first = {"kind": "tuned", "factor": 2.0, "by": "x", "among": [1, 2], "on": [{"seed": 1}]}
    mark(tmp_path, {"kind": "trial", "factor": 2.0, "asked": True})
    mark(tmp_path, first)
    mark(tmp_path, {"kind": "trial", "factor": 2.0})
    mark(tmp_path, {**first, "on": [{"seed": 2}]})
    mark(tmp_path, first)
    assert Run(tmp_path).control_of() == [
        {"kind": "trial", "factor": 2.0, "asked": True},
        {**first, "on": [{"seed": 1}, {"seed": 2}]},
    ]


# --------------------------------------------------------------------------------- the command


def sweep_args(out: Path, **settings: Any) -> list[str]:
    overrides = {**QUICK, "rounds": 2, **{k.replace("__", "."): v for k, v in settings.items()}}
    return [
        "sweep",
        "digits",
        *given(overrides),
        "--out",
        str(out),
        "--control",
        "--factors",
        ".5,2",
    ]


def test_a_rule_that_fails_or_never_steps_has_no_control(tmp_path: Path):
    args = sweep_args(tmp_path)
    result = call(*args, "--grid", "data.clients=2")
    assert result.exit_code == 1
    assert result.stdout.startswith("1/1  data.clients=2  ")
    result = call(*args, "--grid", "client.lr=1e9,0.1")
    assert result.exit_code == 1, result.exception
    assert (
        "error: client.lr=1000000000.0 control of adapter.name=glad: no round of its rule stepped, "
        "so there is no mean factor" in said(result)
    )
    assert "  client.lr=0.1 control of adapter.name=glad  accuracy " in result.stdout
    assert "  client.lr=0.1 trial constant 0.5  accuracy " in result.stdout


def test_a_twin_that_the_configuration_refuses_fails_alone(tmp_path: Path):
    result = call(*sweep_args(tmp_path, client__name="feddyn"), "--grid", "seed=1")
    assert result.exit_code == 1
    assert "error: seed=1 linear decay: " in said(result)
    assert "server.schedule=constant" in said(result)
    assert "  seed=1 control of adapter.name=glad  accuracy " in result.stdout


def test_controls_of_nothing_are_warned_of(tmp_path: Path):
    result = call(*sweep_args(tmp_path), "--grid", "adapter.name=none,fixed")
    assert result.exit_code == 0
    assert "warning: --control adds nothing: no run has an adaptive rule" in said(result)
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("factors", ["", "0.5,x", "0,1", "-1", "nan", "inf"])
def test_factors_that_are_none_are_refused(tmp_path: Path, factors: str):
    out = tmp_path / "runs"
    args = [*sweep_args(out)[:-1], factors]
    result = call(*args, "--grid", "seed=1")
    assert result.exit_code == 2
    assert "factors" in said(result)
    assert not out.exists()


def test_an_average_is_kept_unless_the_configuration_says_otherwise(tmp_path: Path):
    mine = tmp_path / "mine.toml"
    mine.write_text("rounds = 1\n")

    def average(text: str = "", *grids: str, **overrides: str) -> set[str]:
        mine.write_text(f"rounds = 1\n{text}")
        found = tasks(mine, [*grids, "seed=1"], {**TINY, **overrides}, tmp_path, defaults=AVERAGE)
        return {task.config.to_dict()["average"]["name"] for task in found}

    assert average() == {"ema"}
    assert average('[average]\nname = "none"\n') == {"none"}
    assert average('[average]\nname = "poly"\n') == {"poly"}
    assert average("", "average.name=none,window") == {"none", "window"}
    assert average("", **{"average.name": "none"}) == {"none"}
    assert load(mine)[1].to_dict()["average"]["name"] == "none"  # without --control


def test_the_command_with_controls(tmp_path: Path):
    args = [
        *sweep_args(tmp_path, rounds=4),
        "--grid",
        "seed=1,2",
        "--grid",
        "adapter.name=none,glad",
    ]
    first = call(*args)
    assert first.exit_code == 0, first.exception
    lines = first.stdout.splitlines()[: first.stdout.splitlines().index("")]
    assert lines[-1].split()[0] == f"{len(lines)}/{len(lines)}"
    again = call(*args, "--json")
    assert again.exit_code == 0
    found = json.loads(again.stdout)
    assert {run["status"] for run in found["runs"]} == {"kept"}
    assert len(found["runs"]) == len(lines)
    none, glad = found["runs"][:2]
    assert (none["settings"], glad["settings"]) == (
        {"seed": 1, "adapter.name": "none"},
        {"seed": 1, "adapter.name": "glad"},
    )
    own = next(run for run in found["runs"] if run.get("control") == "mean")
    assert own["label"] == "seed=1 control of adapter.name=glad"
    assert own["control_of"] == glad["folder"]
    assert own["settings"]["adapter.name"] == "fixed"
    groups = {group["label"]: group for group in found["comparison"]["groups"]}
    rule, mean = groups["adapter.name=glad"], groups["control of adapter.name=glad"]
    assert mean["factors"][0] == own["settings"]["adapter.value"]
    pairs = zip(rule["values"], mean["values"], strict=True)
    assert rule["over_control"]["values"] == [a - b for a, b in pairs]
    tuned, linear = (
        next(name for name in groups if name.startswith("tuned constant ")),
        "linear decay",
    )
    assert [*rule["over_controls"]] == [mean["label"], tuned, linear]
    assert rule["over_controls"][tuned]["seeds"] == [{"seed": 2, "data.seed": 0}]
    averaged = groups["adapter.name=glad · averaged"]["over_controls"]
    assert [name.endswith(" · averaged") for name in averaged] == [True] * 3
    text = call("compare", tmp_path).stdout
    assert "Rule − control in percentage points:" in text
    said_of = " ".join(text.split())
    assert f"{tuned}: the best of 0.5, 2 by last10_accuracy, on the test data, of seed=1" in said_of
    assert "its differences leave that seed out" in said_of


@pytest.mark.slow
def test_ctrl_c_saves_controls_too_and_the_same_command_goes_on(tmp_path: Path):
    overrides = {**LONG, "data.seconds": 0.02, "rounds": 6}
    args = ["sweep", "digits", *given(overrides), "--grid", "seed=1,2", "--jobs", "2"]
    args += ["--control", "--factors", "0.5,2", "--out"]
    process = start(*args, tmp_path / "cut")
    there = (tmp_path / "cut").glob
    until(lambda: len([*there("*/summary.json")]) >= 3, seconds=120)  # among them a control
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with the same command" in told
    for out in ("cut", "whole"):
        done = cli(*args, tmp_path / out)
        assert done.returncode == 0, done.stderr
    cut, whole = (
        {folder.name: (outcome(folder), Run(folder).control_of()) for folder in place.iterdir()}
        for place in (tmp_path / "cut", tmp_path / "whole")
    )
    assert cut == whole
