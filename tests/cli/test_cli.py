"""The command line: what it prints, to whom, and with which exit code."""

import json
import os
import pty
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_support import Unreadable, cli, command, environment
from torch import Tensor
from typer.main import get_command
from typer.testing import CliRunner

from fedglad import schedules
from fedglad.adapters import Glad
from fedglad.cli import app
from fedglad.cli.progress import clipped, round_line
from fedglad.config.schema import PRESETS, REGISTRIES, load
from fedglad.data import partition
from fedglad.records import Record, Round, Statistics
from fedglad.runs import Run
from fedglad.simulation.engines.base import Worker
from fedglad.studies.paper.experiments import EXPERIMENTS

QUICK = [
    *("--set", "model.name=softmax", "--set", "model.features=64", "--set", "client.epochs=1"),
    *("--set", "engine.name=serial", "--set", "rounds=4"),
]


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def said(result: Any) -> str:
    """The error as one line, however it was wrapped."""
    return " ".join(result.stderr.split())


# ------------------------------------------------------------------------------------------- run


def test_a_run_prints_plain_lines_and_its_result(tmp_path: Path):
    result = call("run", "digits", *QUICK, "--out", tmp_path / "run")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [f"round {k}/4" for k in (1, 2, 3, 4)]
    for line in lines[:4]:
        assert re.fullmatch(
            r"round \d/4  accuracy +[\d.]+ %, averaged +[\d.]+ %  loss [\d.]+"
            r"  GSI [\d.]+  clipped [012]/2  [\d.]+ clients/s",
            line,
        )
    assert "Accuracy over its 4 rounds" in result.stdout
    assert "\x1b" not in result.stdout
    assert not result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"final {100 * summary['final_accuracy']:.2f} %" in result.stdout
    assert lines[-1] == f"See it: fedglad report {tmp_path / 'run'}"
    assert "clients to look at" not in result.stdout


def test_a_run_with_an_average_says_both_numbers(tmp_path: Path):
    args = ("run", "digits", *QUICK, "--set", "average.name=ema", "--out", tmp_path / "run")
    result = call(*args)
    assert result.exit_code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rounds = [json.loads(x) for x in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    lines = result.stdout.splitlines()
    for line, done in zip(lines, rounds, strict=False):
        raw, averaged = (100 * done[f"{which}_accuracy"] for which in ("test", "averaged"))
        assert f"  accuracy {raw:5.1f} %, averaged {averaged:5.1f} %  loss " in line
    last10, final = (
        f"{100 * summary[f'{k}_accuracy']:.2f} % "
        f"(averaged {100 * summary[f'{k}_averaged_accuracy']:.2f} %)"
        for k in ("last10", "final")
    )
    assert f"Accuracy over its 4 rounds {last10}, final {final}, 4 rounds in" in lines[4]
    found = json.loads(call(*args, "--json").stdout)
    assert found["final_averaged_accuracy"] == rounds[-1]["averaged_accuracy"]
    assert found["final_accuracy"] == rounds[-1]["test_accuracy"]


def test_a_sweep_says_both_numbers_of_a_run(tmp_path: Path):
    grid = ("--grid", "average.name=none,ema", "--jobs", "1", "--out", tmp_path)
    lines = call("sweep", "digits", *QUICK, *grid).stdout.splitlines()
    plain, both = (line for line in lines if "  accuracy " in line)
    assert re.fullmatch(r"1/2  average.name=none  accuracy [\d.]+ %, final [\d.]+ %", plain)
    number = r"[\d.]+ % \(averaged [\d.]+ %\)"
    assert re.fullmatch(rf"2/2  average.name=ema  accuracy {number}, final {number}", both)


def test_clients_that_were_flagged_again_and_again_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    honest = Worker.train

    def hostile(worker: Worker, call: Any, client: int, out: Tensor, *more: Any) -> Any:
        report = honest(worker, call, client, out, *more)
        if client == 2:
            out.mul_(-5)
        return report

    monkeypatch.setattr(Worker, "train", hostile)
    few = ("--set", "data.clients=8", "--set", "sampler.clients_per_round=8")
    few = (*few, "--set", "data.partition=iid")
    args = ("run", "digits", *QUICK, *few, "--out", tmp_path / "run")
    result = call(*args)
    assert result.exit_code == 0
    *_, worst, see = result.stdout.splitlines()
    assert worst == "clients to look at: 2 (boosted in 4, opposed in 4 of 4 rounds)"
    assert see == f"See it: fedglad report {tmp_path / 'run'}"
    assert call(*args).stdout.splitlines()[-2] == worst  # finished already
    assert json.loads(call(*args, "--json").stdout)["rounds"] == 4


def test_a_long_run_prints_ten_lines(tmp_path: Path):
    result = call("run", "digits", *QUICK, "--set", "rounds=35", "--out", tmp_path / "run")
    lines = [line for line in result.stdout.splitlines() if line.startswith("round ")]
    marked = [line for line in lines if line.split()[2] == "!"]
    told = {line: int(line.split()[1].removesuffix("/35")) for line in lines}
    assert set(told.values()) == {*range(3, 36, 3), *(told[line] for line in marked)}


def test_a_finished_run_says_so(tmp_path: Path):
    first = call("run", "digits", *QUICK, "--out", tmp_path / "run")
    again = call("run", "digits", *QUICK, "--out", tmp_path / "run")
    assert again.exit_code == 0
    assert "This run is finished already" in again.stdout
    told = first.stdout.splitlines()[4:]
    assert len(told) >= 3
    assert again.stdout.splitlines()[-len(told) :] == told


def test_json_is_all_there_is_on_stdout(tmp_path: Path):
    for _ in range(2):  # new, and finished already
        result = call("run", "digits", *QUICK, "--out", tmp_path / "run", "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["folder"] == str(tmp_path / "run")
        assert found["rounds"] == 4
        assert found.keys() >= {"last10_accuracy", "final_accuracy", "seconds", "versions"}


def test_the_default_is_digits_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert call("run", *QUICK).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"digits-[0-9a-f]{10}", folder.name)


def test_a_file_is_run_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trial.toml"
    path.write_text('rounds = 2\n[model]\nname = "softmax"\nfeatures = 64\n[engine]\nname="serial"')
    assert call("run", path).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("trial-")


def test_force_resume_and_refusals_have_exit_codes(tmp_path: Path):
    out = ["--out", tmp_path / "run"]
    assert call("run", "digits", *QUICK, *out).exit_code == 0
    refused = call("run", "digits", *QUICK, "--set", "seed=2", *out)
    assert refused.exit_code == 2
    assert "another configuration" in said(refused)
    assert call("run", "digits", *QUICK, "--set", "seed=2", "--force", *out).exit_code == 0
    (tmp_path / "run" / "summary.json").unlink()
    unfinished = call("run", "digits", *QUICK, "--set", "seed=2", *out)
    assert unfinished.exit_code == 2
    assert "--resume" in said(unfinished)
    assert call("run", "digits", *QUICK, "--set", "seed=2", "--resume", *out).exit_code == 0


MISTAKES = [
    (["run", "digit"], "unknown preset 'digit': did you mean 'digits'?"),
    (["run", "absent.toml"], "there is no file absent.toml"),
    (["run", "digits", "--set", "rounds"], "write it as KEY=VALUE"),
    (
        ["run", "digits", "--set", "client.lrr=1"],
        "unknown key 'client.lrr': did you mean 'client.lr'",
    ),
    (["run", "digits", "--set", "rounds=x"], "rounds = 'x': must be a whole number"),
    (["run", "digits", "--set", "adapter.name=gladd"], "did you mean 'glad'?"),
    (["run", "digits", "--set", "sampler.clients_per_round=51"], "more than the 50 clients"),
    (["run", "digits", "--set", "filter.name=krum"], "leaves one update"),
    (["run", "digits", "--set", "model.name=:X"], "cannot be loaded"),
    (["run", "digits", "--set", "model.name=mlp"], "multiplied (1x64 and 784x200); set model.feat"),
    (["run", "digits", "--set", "data.name=synthetic"], "inputs of shape (60,): "),
    (["config", "digit"], "unknown preset 'digit': did you mean 'digits'?"),
    (["config", "digits", "--set", "rounds=x"], "must be a whole number"),
    (["config", "digits", "--set", "model.name=:X"], "cannot be loaded"),
    (["list", "adapter"], "unknown list 'adapter'"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = call(*args)
    assert result.exit_code == 2, result.exception
    assert message in said(result)
    assert "Traceback" not in result.stderr
    assert not result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "config"])
def test_a_file_that_is_not_text(verb: str, tmp_path: Path):
    path = tmp_path / "noise.toml"
    path.write_bytes(b"\xff\xfe\x00")
    result = call(verb, path)
    assert result.exit_code == 2, result.exception
    assert "noise.toml" in said(result).replace(" ", "")


def test_an_out_that_is_a_file(tmp_path: Path):
    (tmp_path / "taken").write_text("mine")
    result = call("run", "digits", *QUICK, "--out", tmp_path / "taken")
    assert result.exit_code == 2, result.exception
    assert f"the folder {tmp_path / 'taken'} cannot be made: File exists" in said(result)
    assert "saved" not in said(result)
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_out_that_cannot_be_made():
    result = call("run", "digits", *QUICK, "--out", "/proc/nowhere/run")
    assert result.exit_code == 2, result.exception
    assert "the folder /proc/nowhere/run cannot be made: No such file" in said(result)
    assert "saved" not in said(result)


def test_an_out_that_cannot_be_written():
    result = call("run", "digits", *QUICK, "--out", "/proc/self")
    assert result.exit_code == 2, result.exception
    assert "/proc/self cannot be written: " in said(result)
    assert "saved" not in said(result)


@pytest.mark.parametrize("option", [[], ["--resume"]])
def test_a_damaged_summary_is_named_with_the_way_out(tmp_path: Path, option: list[str]):
    args = ["run", "digits", *QUICK, "--out", str(tmp_path / "run")]
    assert call(*args).exit_code == 0
    summary = tmp_path / "run" / "summary.json"
    before = json.loads(summary.read_text())
    for text in ("{", "", "null", "[1]"):
        summary.write_text(text)
        result = call(*args, *option)
        assert result.exit_code == 2, result.exception
        assert f"{summary} is damaged: " in said(result)
        assert "Remove that file and go on with --resume" in said(result)
    summary.unlink()
    assert call(*args, "--resume").exit_code == 0
    assert json.loads(summary.read_text()) == before


def test_a_run_of_which_every_round_was_skipped_is_no_success(tmp_path: Path):
    args = ["run", "digits", *QUICK, "--set", "client.lr=1e9", "--out", str(tmp_path / "run")]
    for option in ([], [], ["--json"]):  # new, finished already, for programs
        result = call(*args, *option)
        assert result.exit_code == 1, result.exception
        assert said(result).startswith("warning: 4 of 4 rounds were skipped: 0 of 5 updates were")
    assert json.loads(result.stdout)["skipped"] == 4


@pytest.mark.parametrize(("skipped", "warned"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_warning_if_half_of_the_rounds_were_skipped(tmp_path: Path, skipped: int, warned: bool):
    args = ["run", "digits", *QUICK, "--out", str(tmp_path / "run")]
    assert call(*args).exit_code == 0
    summary = tmp_path / "run" / "summary.json"
    written = Run(tmp_path / "run").summary or {}
    summary.write_text(json.dumps({**written, "skipped": skipped}))
    told = Run(tmp_path / "run").rounds()
    for k, found in enumerate(told[:skipped]):
        found |= {"status": "skipped", "reason": f"reason {k}"}
    text = "".join(f"{json.dumps(found)}\n" for found in told)
    (tmp_path / "run" / "rounds.jsonl").write_text(text)
    result = call(*args)
    assert result.exit_code == 0
    wanted = f"warning: {skipped} of 4 rounds were skipped: reason {skipped - 1}" if warned else ""
    assert said(result) == wanted


def test_a_data_set_that_cannot_be_read_is_not_called_a_full_disk(tmp_path: Path):
    """The folder is fine then, and making room does not help."""
    result = call(
        *("run", "digits", *QUICK, "--set", f"data.name={Unreadable.__module__}:Unreadable"),
        *("--out", tmp_path / "run"),
    )
    assert result.exit_code != 0
    text = said(result) + str(result.exception)
    assert "images.npz" in text
    assert "make room" not in text


def test_a_message_is_not_broken_in_the_middle_of_a_path(tmp_path: Path):
    out = tmp_path / "a folder with a long name" / ("x" * 60)
    assert call("run", "digits", *QUICK, "--out", out).exit_code == 0
    result = call("run", "digits", *QUICK, "--set", "seed=2", "--out", out)
    assert str(out) in result.stderr


# ---------------------------------------------------------------------------- config, list, version


@pytest.mark.parametrize("preset", PRESETS)
def test_config_prints_the_complete_file(preset: str):
    result = call("config", preset)
    assert result.exit_code == 0
    tomllib.loads(result.stdout)
    assert result.stdout == load(preset)[1].to_toml()


def test_config_takes_changes_and_its_output_can_be_run(tmp_path: Path):
    printed = call("config", "digits", *QUICK).stdout
    path = tmp_path / "mine.toml"
    path.write_text(printed)
    assert call("config", path).stdout == printed
    assert call("run", path, "--out", tmp_path / "run").exit_code == 0


LISTS = {
    "presets": PRESETS,
    "datasets": REGISTRIES["data"],
    "partitions": partition.REGISTRY,
    "models": REGISTRIES["model"],
    "tasks": REGISTRIES["task"],
    "clients": REGISTRIES["client"],
    "samplers": REGISTRIES["sampler"],
    "transforms": REGISTRIES["transform"],
    "optimizers": REGISTRIES["server"],
    "schedules": schedules.REGISTRY,
    "adapters": REGISTRIES["adapter"],
    "filters": REGISTRIES["filter"],
    "weights": REGISTRIES["weighting"],
    "estimators": REGISTRIES["estimator"],
    "averages": REGISTRIES["average"],
    "privacy": REGISTRIES["privacy"],
    "engines": REGISTRIES["engine"],
    "experiments": EXPERIMENTS,
}


@pytest.mark.parametrize("kind", LISTS)
def test_list_has_every_name_with_a_line(kind: str):
    result = call("list", kind)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(LISTS[kind])
    assert all(len(line.split()) > 1 for line in lines)
    found = json.loads(call("list", kind, "--json").stdout)
    assert list(found) == list(LISTS[kind])


def test_list_engines_says_which_are_exact_and_what_keeps_their_sums_away():
    found = json.loads(call("list", "engines", "--json").stdout)
    assert {name: (one["exact"], one["sums"]) for name, one in found.items()} == {
        "serial": (True, False),
        "local": (True, False),
        "ray": (True, True),
        "batched": (False, False),
    }
    single = found["ray"]["single_updates"]
    # These look at each client's update; those that weigh the cohort's sums are not among them.
    assert {"krum", "median", "distrust"} <= set(single["filter"])
    assert {"varp", "stale", "mifa", "strat"} == set(single["estimator"])
    assert "adafl" in single["sampler"]
    assert "uniform" not in single["sampler"]
    assert "norm-clip" not in single["filter"]


def test_a_preset_is_told_in_a_line():
    found = json.loads(call("list", "presets", "--json").stdout)
    assert found == {name: preset.about for name, preset in PRESETS.items()}
    assert all(20 < len(text) < 90 for text in found.values())


def test_list_models_knows_their_sizes():
    assert "1199882" in re.sub("[,_ ]", "", call("list", "models", "--json").stdout)


def test_version():
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout == f"fedglad {version('fedglad')}\n"


def test_help_names_every_verb():
    result = call("--help")
    assert result.exit_code == 0
    for verb in ("run", "config", "list", "sweep", "compare", "data"):
        assert verb in result.stdout
    assert call().exit_code in (0, 2)
    assert call("frobnicate").exit_code == 2


COMPLETED = [
    ("run digi", ["digits"]),
    ("config ", [*PRESETS, "deep/", "mine.toml"]),
    ("sweep ./m", ["./mine.toml"]),
    ("run deep/", ["deep/other.toml"]),
    ("list ad", ["adapters"]),
    ("list ", [*LISTS]),
    ("co", ["config", "compare"]),
    ("data ", ["list", "get", "check", "show"]),
    ("data show cif", ["cifar10"]),
    ("sweep digits --gr", ["--grid"]),
]


@pytest.mark.parametrize(("typed", "offered"), COMPLETED)
def test_the_shell_completes(
    typed: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    for name in ("mine.toml", "notes.md", "deep/other.toml"):
        (tmp_path / name).touch()
    words = f"fedglad {typed}"
    asked = {"_FEDGLAD_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env = {**asked, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="fedglad", env=env)
    assert result.exit_code == 0, result.exception
    assert result.stdout.split() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_can_be_shown(shell: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr("typer.testing._get_command", get_command)  # that depends on it
    result = CliRunner().invoke(app, ["--show-completion", shell], prog_name="fedglad")
    assert result.exit_code == 0, result.stderr
    assert "_FEDGLAD_COMPLETE=complete_" in result.stdout


# --------------------------------------------------------------------------------- a round's line


def glad_round(gsi: list[float], t: int, before: list[float], gamma: float = 0.1) -> Record:
    """What Glad says of groups with these indicators; a negative one stands for no updates."""
    names = [f"g{k}" for k in range(len(gsi))]
    square = {n: max(g, 0.0) ** 2 for n, g in zip(names, gsi, strict=True)}
    stats = Statistics(square, square, dict.fromkeys(names, 1.0), (0.5, 0.5))
    adapter = Glad(gamma=gamma)
    groups = adapter.group(dict.fromkeys(names, 1))
    factors, _ = adapter.adapt(stats, groups, {"baseline": np.array(before)}, t)
    told = [
        dict(zip(names, x.tolist(), strict=True))
        for x in (factors.gsi, factors.baseline, factors.scale)
    ]
    return Record("stepped", gsi=told[0], baseline=told[1], scale=told[2])


def test_clipped_groups_are_those_at_a_bound():
    # γ = .1, t = 2: bounds .8 and 1.2. GSI/B = 1.1, .9 inside; 2 and .5 outside.
    assert clipped(glad_round([1.1, 1.8, 4.0, 1.0], 2, [1.0, 2.0, 2.0, 2.0])) == 2
    assert clipped(glad_round([1.2], 2, [1.0], gamma=0.05)) == 1
    assert clipped(glad_round([2.0, 3.0], 0, [0.0, 0.0])) == 0  # the first round: B is GSI
    assert clipped(glad_round([-1.0, 3.0], 2, [2.0, 3.0])) == 0  # no updates: s = 1 is no bound
    assert clipped(glad_round([5000.0], 2, [2.0])) == 1  # updates that cancel get 1 + γt
    assert clipped(glad_round([9.0, 1.0], 5, [1.0, 9.0], gamma=0.0)) == 0  # no adaptation
    assert clipped(glad_round([9.0], 5, [1.0], gamma=float("inf"))) == 0  # no bounds


def test_a_line_speaks_of_clipping_only_where_there_is_a_baseline():
    record = Record("stepped", gsi={"a": 2.0}, scale={"a": 2.0}, gsi_all=2.0)  # FedExP
    line = round_line(Round(4, (1, 2, 3), record, seconds={"train": 0.1}), 9)
    assert line == "round 5/9  GSI 2.00  30 clients/s"
    line = round_line(Round(4, (1,), glad_round([4.0], 2, [2.0]), seconds={"train": 0.1}), 9)
    assert line == "round 5/9  clipped 1/1  10 clients/s"


# ------------------------------------------------------------------------------- real processes


@pytest.mark.slow
def test_a_pipe_gets_plain_lines(tmp_path: Path):
    done = cli("run", "digits", "--set", "rounds=5", "--out", tmp_path / "run")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("round ")]) == 5


@pytest.mark.slow
def test_a_terminal_gets_live_progress(tmp_path: Path):
    ours, theirs = pty.openpty()
    args = command("run", "digits", "--set", "rounds=5", "--out", tmp_path / "run")
    env = {**environment(), "TERM": "xterm-256color"}
    with subprocess.Popen(args, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how a terminal says that it is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    shown = b"".join(parts).decode()
    assert process.returncode == 0
    assert "\x1b[" in shown
    assert "Accuracy over its 5 rounds" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path):
    line = " ".join(f"'{a}'" for a in command("run", "digits", *QUICK, "--out", tmp_path / "run"))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -n 1"], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.startswith("round 1/4")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_own_module_in_the_current_folder_is_found(tmp_path: Path):
    """With the installed command, whose sys.path starts elsewhere."""
    installed = Path(command()[0]).parent / "fedglad"
    if not installed.exists():
        pytest.skip(f"there is no {installed}: install anew")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedglad.models.softmax import SoftmaxRegression\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Own(SoftmaxRegression):\n"
        "    features: int = 64\n"
    )
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [installed, "run", "digits", "--set", "model.name=mine:Own", "--set", "rounds=2"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
