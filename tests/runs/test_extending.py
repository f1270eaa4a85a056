"""A finished run goes on for more rounds, to the bits of one that had them from the start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY, facts
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.config import Config, load
from fedglad.runs import Run, RunError, check, execute, prune
from fedglad.runs.extending import is_longer, shorter
from tests.runs.test_runs import stopped

QUICK: dict[str, Any] = {
    **TINY,
    "engine.name": "serial",
    "rounds": 3,
    "checkpoint_every": 2,
    "server.name": "adam",
}
SCAFFOLD = {"client.name": "scaffold", "client.optimizer": "sgd", "data.clients": 8}
SCAFFOLD |= {"client.clients": 8}
VALIDATED = {"data.validation": 0.2, "data.partition": "iid", "average.name": "ema"}


def config(**more: Any) -> Config:
    return load("digits", {**QUICK, **{k.replace("__", "."): v for k, v in more.items()}})[1]


def left(folder: Path) -> tuple[Any, ...]:
    """What a finished run says and gives: records, summary and models."""
    run = Run(folder)
    summary = {k: v for k, v in (run.summary or {}).items() if k not in ("seconds", "state_kept")}
    models = {
        path.name: {name: value.tolist() for name, value in load_file(path).items()}
        for path in folder.glob("*.safetensors")
    }
    return [facts(one) for one in run.rounds()], summary, models


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def settings(**more: Any) -> list[str]:
    given = {**QUICK, **{k.replace("__", "."): v for k, v in more.items()}}
    return [text for key, value in given.items() for text in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("more", [{}, SCAFFOLD, VALIDATED], ids=["adam", "scaffold", "validated"])
def test_a_longer_run_has_the_bits_of_one_from_the_start(more: dict[str, Any], tmp_path: Path):
    begun = load("digits", {**QUICK, **more})[1]
    wanted = load("digits", {**QUICK, **more, "rounds": 6})[1]
    execute("digits", wanted, out=tmp_path / "whole", keep_state=True)
    short = execute("digits", begun, out=tmp_path / "run", keep_state=True).folder
    before = left(short)
    said: list[str] = []
    execute(
        "digits",
        wanted,
        out=tmp_path / "beside",
        resume=True,
        extend=short,
        keep_state=True,
        on_lost=said.append,
    )
    assert said == [f"going on after round 3 of {short}, which stays as it is"]
    assert left(short) == before
    assert left(tmp_path / "beside") == left(tmp_path / "whole")
    played: list[int] = []
    execute(
        "digits",
        wanted,
        out=short,
        resume=True,
        keep_state=True,
        on_round=lambda done: played.append(done.t),
    )
    assert played == [3, 4, 5]
    assert left(short) == left(tmp_path / "whole")
    assert check(short).good
    assert check(tmp_path / "beside").good


def test_the_command_finds_the_shorter_run_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert call("run", *settings()).exit_code == 0
    (short,) = Path("runs").iterdir()
    longer = call("run", *settings(rounds=5), "--resume")
    assert longer.exit_code == 0, longer.output
    assert f"going on after round 3 of {short}, which stays as it is" in longer.output
    assert "round 3/5" not in longer.output
    wanted = Path(f"runs/digits-{config(rounds=5).hash()}")
    assert {*Path("runs").iterdir()} == {short, wanted}
    assert "is finished already" in call("run", *settings(rounds=5)).output
    assert "is finished already" in call("run", *settings()).output


def test_a_run_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    call("run", *settings())
    (short,) = Path("runs").iterdir()
    done = call("run", short, "--resume", "--set", "rounds=4")
    assert done.exit_code == 0, done.output
    assert len(Run(Path(f"runs/digits-{config(rounds=4).hash()}")).rounds()) == 4
    assert len(Run(short).rounds()) == 3
    call("run", *settings(), "--out", "mine")
    done = call("run", "mine", "--resume", "--set", "rounds=4")
    assert done.exit_code == 0, done.output
    assert len(Run(Path("mine")).rounds()) == 4  # it was named by hand
    assert f"finished already: {short}" in call("run", short).output


def test_a_rate_that_falls_over_all_rounds_is_refused_with_the_way_out(tmp_path: Path):
    falling = config(server__schedule="cosine")
    run = execute("digits", falling, out=tmp_path / "run")
    wanted = config(server__schedule="cosine", rounds=6)
    with pytest.raises(RunError, match=r"'cosine' falls over all rounds .* Set server.over=3"):
        execute("digits", wanted, out=run.folder, resume=True)
    assert run.summary
    # The way out: over=3 is what the run had.
    wanted = config(server__schedule="cosine", server__over=3, rounds=4)
    assert len(execute("digits", wanted, out=run.folder, resume=True).rounds()) == 4


def test_so_is_a_rate_of_the_clients_whose_way_out_must_be_one(tmp_path: Path):
    falling = config(client__rounds_schedule="linear")
    run = execute("digits", falling, out=tmp_path / "run")
    wanted = config(client__rounds_schedule="linear", rounds=6)
    # over=3 would leave rounds 3 to 5 without a rate, which clients refuse.
    sentence = (
        r"^client.rounds_schedule = 'linear' falls over .* would have had other rates\. Run all"
    )
    with pytest.raises(RunError, match=sentence):
        execute("digits", wanted, out=run.folder, resume=True)
    more = {"client__rounds_schedule": "exponential", "server__schedule": "cosine"}
    run = execute("digits", config(**more), out=tmp_path / "both")
    both = (
        r"'exponential' and server.schedule = 'cosine' fall .* Set client.over=3 and server.over=3"
    )
    with pytest.raises(RunError, match=both):
        execute("digits", config(rounds=6, **more), out=run.folder, resume=True)
    wanted = config(rounds=6, **more, client__over=3, server__over=3)
    execute("digits", wanted, out=run.folder, resume=True)
    execute("digits", wanted, out=tmp_path / "whole")
    assert left(run.folder) == left(tmp_path / "whole")


def test_what_is_another_run_stays_another_run(tmp_path: Path):
    run = execute("digits", config(), out=tmp_path / "run")
    for other in (config(rounds=2), config(rounds=6, seed=2), config(rounds=6, client__lr=0.5)):
        with pytest.raises(RunError, match="holds a run with another configuration"):
            execute("digits", other, out=run.folder, resume=True)
    with pytest.raises(RunError, match="holds this run with rounds = 3: go on with it by --resume"):
        execute("digits", config(rounds=6), out=run.folder)  # without --resume
    assert is_longer(config(), config(max_seconds=5.0))
    assert not is_longer(config(), config())


def test_a_run_that_kept_nothing_says_how_to_keep_it(tmp_path: Path):
    short = load("digits", {**QUICK, **SCAFFOLD})[1]
    longer = load("digits", {**QUICK, **SCAFFOLD, "rounds": 6})[1]
    root = tmp_path / "runs"
    run = execute("digits", short, out=root / f"digits-{short.hash()}")
    for call_ in (
        lambda: execute("digits", longer, out=run.folder, resume=True),
        lambda: execute("digits", longer, out=root / "new", resume=True, extend=run.folder),
        lambda: shorter("digits", longer, root),
    ):
        with pytest.raises(RunError, match="kept no state to go on from: --keep-state"):
            call_()
    assert run.summary


def test_a_run_that_stopped_early_goes_on_when_its_end_is_moved(tmp_path: Path):
    given = {**QUICK, **VALIDATED, "rounds": 8, "server.name": "sgd", "server.lr": 1e-9}
    short = execute("digits", load("digits", {**given, "stop_after": 2})[1], out=tmp_path / "run")
    done = len(short.rounds())
    assert done < 8
    assert (short.summary or {})["stopped"]
    wanted = load("digits", {**given, "stop_after": 0})[1]
    run = execute("digits", wanted, out=short.folder, resume=True)
    assert len(run.rounds()) == 8
    assert "stopped" not in (run.summary or {})
    execute("digits", wanted, out=tmp_path / "whole")
    assert left(run.folder) == left(tmp_path / "whole")


def test_a_test_because_of_the_end_is_gone_back_over(tmp_path: Path):
    """Round 5 of 5 is tested, round 5 of 8 by eval_every = 2 is not: it starts after round 4."""
    whole = execute("digits", config(rounds=8, eval_every=2), out=tmp_path / "whole").folder
    run = execute("digits", config(rounds=5, eval_every=2), out=tmp_path / "run").folder
    played: list[int] = []
    wanted = config(rounds=8, eval_every=2)
    execute("digits", wanted, out=run, resume=True, on_round=lambda done: played.append(done.t))
    assert played == [4, 5, 6, 7]
    assert left(run) == left(whole)


def test_where_that_cannot_be_it_is_said(tmp_path: Path):
    run = execute("digits", config(eval_every=2, checkpoint_every=9), out=tmp_path / "run").folder
    said: list[str] = []
    wanted = config(rounds=6, eval_every=2, checkpoint_every=9)
    execute("digits", wanted, out=run, resume=True, on_lost=said.append)
    assert said == [
        "going on after round 3 (round 3 was tested as the last one, and its record says so)"
    ]


def test_the_longest_is_taken_and_an_unfinished_one_too(tmp_path: Path):
    root = tmp_path / "runs"
    for rounds in (2, 4):
        made = config(rounds=rounds)
        execute("digits", made, out=root / f"digits-{made.hash()}")
    other = config(rounds=9, seed=2)
    execute("digits", other, out=root / f"digits-{other.hash()}")
    wanted = config(rounds=10)
    assert shorter("digits", wanted, root) == root / f"digits-{config(rounds=4).hash()}"
    cut = config(rounds=8)
    stopped(root / f"digits-{cut.hash()}", 6, cut)  # it was saved after round 6
    assert shorter("digits", wanted, root) == root / f"digits-{cut.hash()}"
    assert shorter("digits", config(rounds=10, seed=3), root) is None


def test_a_folder_that_was_struck_between_is_still_good(tmp_path: Path):
    """Killed after the summary is gone, and before the settings are new: either call goes on."""
    whole = execute("digits", config(rounds=5), out=tmp_path / "whole").folder
    run = execute("digits", config(), out=tmp_path / "run").folder
    (run / "summary.json").unlink()
    shutil.copytree(run, tmp_path / "again")
    execute("digits", config(rounds=5), out=run, resume=True)
    assert left(run) == left(whole)
    assert execute("digits", config(), out=tmp_path / "again", resume=True).summary


def test_a_copy_that_was_struck_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    short = execute("digits", config()).folder
    folder = Path(f"runs/digits-{config(rounds=5).hash()}")
    folder.mkdir()
    text = (short / "config.toml").read_text().replace("rounds = 3", "rounds = 5")
    (folder / "config.toml").write_text(text.partition("# crc")[0])
    (folder / "rounds.jsonl").write_text((short / "rounds.jsonl").read_text()[:500])
    played: list[int] = []
    wanted = config(rounds=5)
    execute("digits", wanted, resume=True, on_round=lambda done: played.append(done.t))
    assert played == [3, 4]
    execute("digits", wanted, out=tmp_path / "whole")
    assert left(folder) == left(tmp_path / "whole")


def test_a_pruned_run_can_be_run_anew(tmp_path: Path):
    run = execute("digits", config(), out=tmp_path / "run")
    prune(run.folder)
    with pytest.raises(RunError, match="or with --force"):
        execute("digits", config(rounds=4), out=run.folder, resume=True)
    execute("digits", config(rounds=4), out=run.folder, force=True)
    assert json.loads((run.folder / "summary.json").read_text())["rounds"] == 4
