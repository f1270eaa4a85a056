"""Own code is a part of a run's identity: edited code gives new results, and that is said."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY
from typer.testing import CliRunner

from fedglad.analysis.comparison import compare
from fedglad.cli import app
from fedglad.config import Config, load
from fedglad.core import user_code
from fedglad.runs import Run, RunError, execute, sweep, tasks
from fedglad.runs.own_code import code_of, continued, folder_of, other_code, recorded_code

MINE = """
from dataclasses import dataclass

import numpy as np

from fedglad.adapters import Adapter
from own_factors import FACTOR


@dataclass(frozen=True, kw_only=True)
class Mine(Adapter):
    def scale(self, stats, groups):
        return np.full(len(groups.labels), FACTOR)
"""
QUICK = {**TINY, "engine.name": "serial", "rounds": 2, "adapter.name": "own_rule:Mine"}
ARGS = [text for key, value in QUICK.items() for text in ("--set", f"{key}={value}")]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """A working folder with a rule of two modules; sets its factor as for a new process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_rule.py").write_text(MINE)

    def forget() -> None:
        for name in ("own_rule", "own_factors"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    def write(factor: float) -> None:
        forget()
        Path("own_factors.py").write_text(f"FACTOR = {factor}\n")

    write(0.5)
    yield write
    forget()


def configured(**more: Any) -> Config:
    return load("digits", {**QUICK, **more})[1]


def losses(folder: Path) -> list[float]:
    return [record["test_loss"] for record in Run(folder).rounds()]


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def test_edited_code_gives_new_results_in_run_and_in_sweep(edit: Callable[[float], None]):
    """Run, edit, run again, sweep again: new results, and the message; nothing is lost."""
    first = call("run", *ARGS)
    assert first.exit_code == 0, first.output
    (old,) = Path("runs").iterdir()
    assert "is finished already" in call("run", *ARGS).output
    before = losses(old)
    edit(0.9)
    again = call("run", *ARGS)
    assert again.exit_code == 0, again.output
    assert f"{old} was made with other code of own_rule:Mine, and is not used" in again.output
    (new,) = (path for path in Path("runs").iterdir() if path != old)
    assert new.name.startswith(f"{old.name}-")
    assert losses(old) == before != losses(new)
    third = call("run", *ARGS)
    assert f"finished already: {new}" in third.output
    edit(0.7)
    sweeped = call("sweep", "digits", *ARGS, "--grid", "seed=1,2", "--jobs", "1")
    assert sweeped.exit_code == 0, sweeped.output
    assert "was made with other code of own_rule:Mine" in sweeped.output
    folders = {*Path("runs").iterdir()} - {old, new}
    assert len(folders) == 2
    assert losses(old) != losses(next(path for path in folders if old.name in path.name))
    kept = call("sweep", "digits", *ARGS, "--grid", "seed=1,2")
    assert "2 of 2 runs were finished already" in kept.output
    edit(0.5)  # as it was
    assert f"finished already: {old}" in call("run", *ARGS).output


def test_the_ways_out(edit: Callable[[float], None]):
    run = execute("digits", configured(), out=Path("runs/mine"))
    before = losses(run.folder)
    edit(0.9)
    with pytest.raises(RunError, match="made with other code of own_rule:Mine: --force replaces"):
        execute("digits", configured(), out=run.folder)
    assert losses(execute("digits", configured(), out=run.folder, accept_old=True).folder) == before
    execute("digits", configured(), out=run.folder, force=True)
    assert losses(run.folder) != before
    assert recorded_code(run.folder) == code_of(configured())


def test_accept_old_and_force_are_of_the_folder_that_is_named_by_the_settings(
    edit: Callable[[float], None],
):
    old = execute("digits", configured()).folder
    before = losses(old)
    edit(0.9)
    assert call("run", *ARGS, "--accept-old").output.count("finished already") == 1
    [task] = tasks("digits", ["seed=1"], QUICK, Path("runs"), accept_old=True)
    assert [event.what for event in sweep([task])] == ["kept"]
    assert call("run", *ARGS, "--force").exit_code == 0
    assert [*Path("runs").iterdir()] == [old]
    assert losses(old) != before


def test_an_unfinished_run_is_not_gone_on_with_silently(edit: Callable[[float], None]):
    def stop(done: Any) -> None:
        raise KeyboardInterrupt

    folder = Path("run")
    config = configured(checkpoint_every=1, rounds=3)

    def second(done: Any) -> None:
        if done.t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute("digits", config, out=folder, on_round=second)
    was = recorded_code(folder)["adapter.name"]
    edit(0.9)
    config = configured(checkpoint_every=1, rounds=3)
    with pytest.raises(RunError, match="begun with other code of own_rule:Mine"):
        execute("digits", config, out=folder, resume=True)
    run = execute("digits", config, out=folder, resume=True, accept_old=True)
    both = f"{was}+{code_of(config)['adapter.name']}"
    assert recorded_code(folder) == (run.summary or {})["code"] == {"adapter.name": both}
    with pytest.raises(RunError, match="made with other code"):  # it is of neither
        execute("digits", config, out=folder)


def test_a_run_without_a_round_has_no_code_yet(edit: Callable[[float], None]):
    def fails(done: Any) -> None:
        raise KeyError

    Path("own_rule.py").write_text(MINE.replace("FACTOR)", "OOPS)"))
    with pytest.raises(NameError):
        execute("digits", configured())
    Path("own_rule.py").write_text(MINE)
    edit(0.5)
    run = execute("digits", configured(), resume=True)
    assert [*Path("runs").iterdir()] == [run.folder]
    assert recorded_code(run.folder) == code_of(configured())


def test_the_summary_names_the_version_and_the_code(edit: Callable[[float], None]):
    run = execute("digits", configured())
    summary = run.summary or {}
    assert summary["versions"]["fedglad"]
    assert summary["code"] == code_of(configured())
    assert "code" not in (execute("digits", configured(**{"adapter.name": "none"})).summary or {})


def test_the_name_and_the_hash_of_a_run_are_as_they_were(edit: Callable[[float], None]):
    name = configured().hash()
    edit(0.9)
    assert configured().hash() == name
    assert folder_of("digits", configured()) == Path(f"runs/digits-{name}")


def test_a_folder_of_before_is_accepted_with_a_note(edit: Callable[[float], None]):
    run = execute("digits", configured())
    path = run.folder / "config.toml"
    text = [line for line in path.read_text().splitlines() if not line.startswith("# c")]
    path.write_text("\n".join(text) + "\n")
    edit(0.9)
    said: list[str] = []
    execute("digits", configured(), on_lost=said.append)
    assert len(said) == 1
    assert "whether own_rule:Mine has been changed since is not known" in said[0]


def test_compare_takes_edited_code_for_another_method(edit: Callable[[float], None]):
    old = execute("digits", configured()).folder
    edit(0.9)
    new = execute("digits", configured()).folder
    labels = [group.label for group in compare([old, new]).groups]
    codes = [recorded_code(folder)["adapter.name"][:8] for folder in (old, new)]
    assert labels[0].startswith(f"adapter.code={codes[0]}")
    assert any(label.startswith(f"adapter.code={codes[1]}") for label in labels)


def test_reading_a_folder_loads_nothing(edit: Callable[[float], None]):
    run = execute("digits", configured())
    edit(0.9)
    assert recorded_code(run.folder)
    assert load(run.folder / "config.toml")[1].hash() == run.folder.name.rpartition("-")[2]
    assert "own_rule" not in sys.modules


# ------------------------------------------------------------------------------- fingerprints


def test_what_a_fingerprint_is_of(edit: Callable[[float], None], tmp_path: Path):
    def made() -> str | None:
        for name in ("own_rule", "own_factors"):
            sys.modules.pop(name, None)
        return user_code.source_fingerprint("own_rule:Mine")

    first = made()
    os.utime("own_rule.py", (1, 1))
    Path("own_rule.py").write_bytes(MINE.replace("\n", "\r\n").encode())
    assert made() == first  # neither times nor line ends
    Path("not_imported.py").write_text("X = 1\n")
    assert made() == first
    edit(0.25)
    second = made()
    assert second != first  # what it imports
    Path("own_rule.py").write_text(MINE + "# a comment\n")
    assert made() not in (first, second)


def test_it_is_the_same_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = set[str | None]()
    for name in ("here", "there"):
        package = tmp_path / name / "own_package"
        (package / "inner").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "inner" / "__init__.py").write_text("from ..net import Net\n")
        (package / "net.py").write_text("import torch, numpy, json\nclass Net: pass\n")
        monkeypatch.chdir(tmp_path / name)
        made.add(user_code.source_fingerprint("own_package.inner:Net"))
    (package / "net.py").write_text("class Net: x = 1\n")
    made.add(user_code.source_fingerprint("own_package.inner:Net"))
    assert len(made) == 2
    assert None not in made


def test_code_that_was_edited_after_it_was_loaded_is_not_run_under_a_new_name(
    edit: Callable[[float], None],
):
    config = configured()
    assert code_of(config)
    Path("own_factors.py").write_text("FACTOR = 0.125\n")
    with pytest.raises(RunError, match="own_factors was changed after this process had loaded it"):
        execute("digits", config)
    importlib.reload(sys.modules["own_factors"])
    importlib.reload(sys.modules["own_rule"])
    assert code_of(config)


def test_a_library_has_no_more_than_its_own_file():
    first = user_code.source_fingerprint("torch.nn:Linear")
    assert first
    assert first == user_code.source_fingerprint("torch.nn:Conv2d")


def test_unknown_names_have_none():
    assert user_code.source_fingerprint("no_such_module:Thing") is None
    assert continued({}, {"adapter.name": "1f"}) == {}
    assert continued({"a": "1f+e2"}, {"a": "e2"}) == {"a": "1f+e2"}
    assert not other_code(Path("nowhere"), load("digits")[1])


def test_a_notebook_like_json_is_no_code(tmp_path: Path):
    """A folder whose config.toml is damaged says nothing of code."""
    (tmp_path / "rounds.jsonl").write_text(json.dumps({}) + "\n")
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe# code of adapter.name: zz\n")
    assert recorded_code(tmp_path) == {}
