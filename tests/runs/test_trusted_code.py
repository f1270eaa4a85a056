"""What runs code and what does not: names in somebody's folder, modules in the working folder."""

import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from run_support import TINY
from typer.testing import CliRunner

from fedglad.analysis import replay
from fedglad.analysis.replaying import rule
from fedglad.cli import app
from fedglad.config import Config, ConfigError, load, simulate
from fedglad.config.schema import REGISTRIES, Unloaded
from fedglad.core import user_code
from fedglad.report.figures import payload
from fedglad.runs import Run, RunError, execute, tasks
from fedglad.runs.control import built_sizes
from fedglad.studies.paper.results import Library, export

KEYS = [*(f"{section}.name" for section in REGISTRIES), "data.partition"]

HOSTILE = "from pathlib import Path\nPath({mark!r}).touch()\n"

MODEL = """
from pathlib import Path
from torch import nn

with Path({mark!r}).open("a") as file:
    file.write("loaded\\n")

def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
"""


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, without own code."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = load("digits", {**TINY, "rounds": 2, "engine.name": "serial"})[1]
    execute("digits", config, out=folder)
    return folder


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Is there once `evilmod`, which can be imported from everywhere, has been."""
    mark = tmp_path / "was-loaded"
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "evilmod.py").write_text(HOSTILE.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    yield mark
    assert not mark.exists()
    assert "evilmod" not in sys.modules


def theirs(finished: Path, to: Path, key: str) -> Path:
    """A copy of the run whose config.toml names `evilmod`."""
    shutil.copytree(finished, to)
    section, _, name = key.partition(".")
    path = to / "config.toml"
    head, start, rest = path.read_text().partition(f"[{section}]\n")
    changed, count = re.subn(rf'(?m)^{name} = "[^"]*"', f'{name} = "evilmod:X"', rest, count=1)
    assert count == 1
    path.write_text(head + start + changed)
    return to


# -------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("key", KEYS)
def test_reading_somebodys_folder_loads_nothing_that_it_names(
    finished: Path, tmp_path: Path, mark: Path, key: str
):
    folder = theirs(finished, tmp_path / "runs" / "theirs", key)
    shutil.copytree(finished, tmp_path / "runs" / "other")
    compared = call("compare", tmp_path / "runs", "--json")
    assert compared.exit_code == 0, compared.output
    if key != "engine.name":  # an engine is part of a label only if it gives other bits
        assert f"{key}=evilmod:X" in compared.output
    shown = call("config", folder / "config.toml")
    assert shown.exit_code == 0, shown.output
    assert '= "evilmod:X"' in shown.stdout
    assert "# Code that was not loaded: the settings are as they were written." in shown.stdout
    for args in (
        ("report", folder, "--out", tmp_path / "page.html"),
        ("track", folder, "--to", "tensorboard", "--out", tmp_path / "tracked"),
        ("paper", "table", "draws", "--out", folder.parent, "--results", tmp_path),
        ("paper", "list", "--out", folder.parent, "--results", tmp_path),
        ("paper", "export", folder, "--to", tmp_path / "results"),
        ("list", "adapters"),
    ):
        done = call(*args)
        assert done.exit_code == 0, (args, done.output, done.exception)
    (exported,) = (tmp_path / "results").glob("*.json")
    assert '"evilmod:X"' in exported.read_text()
    library = Library([folder.parent, tmp_path / "results"])
    assert (library.broken, len(library.all())) == ([], 2)
    assert payload([Run(folder).read()], live=True)["runs"][0]["config"][key] == "evilmod:X"


@pytest.mark.parametrize("key", KEYS)
def test_what_is_run_beside_a_folder_loads_nothing_that_it_names(
    finished: Path, tmp_path: Path, mark: Path, key: str
):
    folder = theirs(finished, tmp_path / "theirs", key)
    for more in ((), ("--resume",)):
        done = call("run", "digits", "--out", folder, *more)
        assert done.exit_code == 2
        assert "holds a run with another configuration" in said(done)
    config = load("digits")[1]
    (task,) = tasks("digits", ["seed=1"], {}, tmp_path)
    folder.rename(task.folder)
    assert not task.finished
    with pytest.raises(RunError, match="another configuration"):
        execute("digits", config, out=task.folder, resume=True)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "verb", [("run",), ("sweep", "--grid", "seed=1,2"), ("tune", "--grid", "client.lr=1,2")]
)
def test_running_somebodys_folder_asks_first(
    finished: Path, tmp_path: Path, mark: Path, key: str, verb: tuple[str, ...]
):
    folder = theirs(finished, tmp_path / "theirs", key)
    done = call(verb[0], folder / "config.toml", *verb[1:], "--out", tmp_path / "out")
    assert done.exit_code == 2
    place = tmp_path / "installed" / "evilmod.py"
    assert f"{key}='evilmod:X'({place})" in "".join(done.output.split())
    assert "--trust-code" in done.output
    assert not (tmp_path / "out").exists()


def test_python_asks_first_too(finished: Path, tmp_path: Path, mark: Path):
    folder = theirs(finished, tmp_path / "theirs", "model.name")
    config = load(folder / "config.toml")[1]
    assert isinstance(config.sections["model"], Unloaded)
    with pytest.raises(RunError, match=r"model.name = 'evilmod:X' .*evilmod.py.*trust_code=True"):
        execute("theirs", config, out=folder, resume=True)
    for run in (
        lambda: next(simulate(folder / "config.toml")),
        lambda: next(simulate(config, {"rounds": 3})),
        lambda: built_sizes(config),
        lambda: Config.of(*config.__reduce__()[1]).plan(),  # as another process gets it
    ):
        with pytest.raises(ConfigError, match=r"model.name = 'evilmod:X' is code that"):
            run()


def test_another_name_on_top_of_theirs_loads_only_that(finished: Path, tmp_path: Path, mark: Path):
    for key, name in {"client.name": "plain", "model.name": "softmax"}.items():
        folder = theirs(finished, tmp_path / key, key)
        config = load(folder / "config.toml", {key: name})[1]
        assert config.own_names(loaded=False) == {}


def test_settings_of_code_that_is_not_loaded_may_be_anything(tmp_path: Path, mark: Path):
    path = tmp_path / "config.toml"
    path.write_text('[model]\nname = "evilmod:X"\nday = 2020-01-01\nsteps = [inf, {a = 1}]\n')
    config = load(path)[1]
    assert config.to_dict()["model"]["day"] == "2020-01-01"
    again = tmp_path / "again" / "config.toml"
    again.parent.mkdir()
    again.write_text(config.to_toml())
    assert load(again)[1].hash() == config.hash()


def test_a_library_function_is_not_run_for_a_folder_either(tmp_path: Path):
    """`fedglad.core.files:write_text` as a model would write wherever the folder's author wants."""
    path = tmp_path / "config.toml"
    target = tmp_path / "written"
    name = "fedglad.core.files:write_text"
    path.write_text(f'[model]\nname = "{name}"\npath = "{target}"\ntext = "x"\n')
    done = call("run", path, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert f"model.name='{name}'" in re.sub(r"\s", "", done.output)
    assert not target.exists()


@pytest.mark.parametrize("value", ["evilmod:X", "evilmod.X"])
def test_groups_are_no_names_of_code(finished: Path, tmp_path: Path, mark: Path, value: str):
    shutil.copytree(finished, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.toml"
    text = path.read_text()
    assert 'groups = "tensor"' in text
    path.write_text(text.replace('groups = "tensor"', f'groups = "{value}"'))
    assert call("config", path).exit_code == 2
    assert call("replay", tmp_path / "theirs").exit_code == 2
    assert call("compare", tmp_path / "theirs").exit_code == 0


def test_an_export_stays_in_its_folder_whatever_the_data_is_called(finished: Path, tmp_path: Path):
    folder = theirs(finished, tmp_path / "theirs", "data.name")
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("evilmod:X", f"../{'x' * 300}:X"))
    written, notes = export([folder], tmp_path / "results")
    assert notes == []
    assert [file.parent for file in written] == [tmp_path / "results"]


# --------------------------------------------------------------------------------------- replay


def test_an_own_rule_is_replayed_if_the_user_names_it(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mark = tmp_path / "was-loaded"
    (tmp_path / "own_rule_x.py").write_text(
        HOSTILE.format(mark=str(mark))
        + "from dataclasses import dataclass\nfrom fedglad.adapters import Glad\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Rule(Glad):\n    'A copy.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = theirs(finished, tmp_path / "theirs", "adapter.name")
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("evilmod:X", "own_rule_x:Rule"))
    for args in ((), ("--set", "adapter.gamma=0.1")):
        refused = call("replay", folder, *args)
        assert refused.exit_code == 2
        assert "If you trust it, name it: --set adapter.name=own_rule_x:Rule" in said(refused)
    other = call("replay", folder, "--set", "adapter.name=none")
    assert other.exit_code == 0, other.output
    assert "its own rule is not known here" in other.output
    with pytest.raises(ConfigError, match="reading a run loads none"):
        rule(Run(folder).config, {})
    assert not mark.exists()
    done = call("replay", folder, "--set", "adapter.name=own_rule_x:Rule")
    assert done.exit_code == 0, done.output
    assert "Checked: its own settings give exactly the recorded factors." in said(done)
    assert mark.exists()
    named = rule(Run(folder).config, {"adapter.name": "own_rule_x:Rule"})
    assert replay(folder, named).exact


# ---------------------------------------------------------------------------------------- trust


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `trusted_net.py`, of a user who has trusted nothing yet."""
    monkeypatch.setenv("FEDGLAD_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    monkeypatch.setattr(user_code, "_folders", [])
    monkeypatch.delitem(sys.modules, "trusted_net", raising=False)
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "trusted_net.py").write_text(MODEL.format(mark=str(tmp_path / "loaded")))
    monkeypatch.chdir(folder)
    return folder


def times_loaded(here: Path) -> int:
    mark = here.parent / "loaded"
    return len(mark.read_text().splitlines()) if mark.exists() else 0


def forget_module() -> None:
    """As in a new process."""
    sys.modules.pop("trusted_net", None)


class Stop(Exception):
    """Ends a run after its first round, which is saved."""


def stop(_: Any) -> None:
    raise Stop


OWN: dict[str, Any] = {
    "model.name": "trusted_net:net",
    "model.width": 5,
    "rounds": 2,
    "client.epochs": 1,
    "sampler.clients_per_round": 3,
    "checkpoint_every": 1,
    "engine.name": "serial",
}


def begin(out: Path) -> None:
    with pytest.raises(Stop):
        execute("own", load("digits", OWN)[1], out=out, on_round=stop)
    forget_module()


def go_on(out: Path, *more: str) -> Result:
    done = call("run", out / "config.toml", "--out", out, "--resume", *more)
    forget_module()
    return done


def test_who_has_begun_a_run_goes_on_without_a_question(here: Path):
    begin(Path("run"))
    assert times_loaded(here) == 1
    done = go_on(Path("run"))
    assert done.exit_code == 0, done.output
    assert Run(Path("run")).summary
    assert times_loaded(here) == 2


def test_the_question_is_asked_once_and_again_when_the_code_changes(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    begin(Path("run"))
    monkeypatch.setenv("FEDGLAD_STATE", str(here.parent / "state of another user"))
    asked = go_on(Path("run"))
    assert asked.exit_code == 2
    assert "--trust-code" in asked.output
    assert "trusted before" not in asked.output
    assert times_loaded(here) == 1
    assert go_on(Path("run"), "--trust-code").exit_code == 0
    assert go_on(Path("run")).exit_code == 0
    before = times_loaded(here)
    with Path("trusted_net.py").open("a") as file:
        file.write("# another line\n")
    asked = go_on(Path("run"))
    assert asked.exit_code == 2
    assert "it is not what you have trusted before" in said(asked)
    assert times_loaded(here) == before
    asked = go_on(Path("run"), "--trust-code")  # and the run was made with the old code
    assert "other code of trusted_net" in said(asked)
    assert go_on(Path("run"), "--trust-code", "--accept-old").exit_code == 0
    assert go_on(Path("run"), "--accept-old").exit_code == 0


def test_trust_is_in_one_folder_and_in_these_settings(here: Path):
    begin(Path("run"))
    shutil.copytree("run", "copy")
    assert go_on(Path("copy")).exit_code == 2
    path = Path("run/config.toml")
    path.write_text(path.read_text().replace("width = 5", "width = 6"))
    assert go_on(Path("run")).exit_code == 2
    assert times_loaded(here) == 1


def test_a_folder_cannot_trust_itself(here: Path, monkeypatch: pytest.MonkeyPatch):
    begin(Path("run"))
    monkeypatch.setenv("FEDGLAD_STATE", str(here.parent / "new"))
    shutil.copytree(here.parent / "state", Path("run/state"))
    assert go_on(Path("run")).exit_code == 2
    (note,) = (here.parent / "state").rglob("*.json")
    assert json.loads(note.read_text())["folder"] == str(here / "run")


def test_python_trusts_by_an_argument(here: Path, monkeypatch: pytest.MonkeyPatch):
    begin(Path("run"))
    monkeypatch.setenv("FEDGLAD_STATE", str(here.parent / "new"))
    theirs = load("run/config.toml")[1]
    with pytest.raises(RunError, match="trust_code=True"):
        execute("own", theirs, out=Path("run"), resume=True)
    assert times_loaded(here) == 1
    done = execute("own", theirs, out=Path("run"), resume=True, trust_code=True)
    assert done.summary
    assert load("run/config.toml", trust_code=True)[1].hash() == load("digits", OWN)[1].hash()


def test_what_a_user_types_or_writes_is_not_asked_about(here: Path):
    begin(Path("run"))
    shutil.rmtree(here.parent / "state")
    keys = [part for key, value in OWN.items() for part in ("--set", f"{key}={value}")]
    done = call("run", "digits", *keys, "--out", "run", "--resume")
    assert done.exit_code == 0, done.output
    shutil.copy("run/config.toml", "my.toml")
    forget_module()
    done = call("run", "my.toml", "--out", "mine")
    assert done.exit_code == 0, done.output
    assert call("run", "my.toml", "--out", "run").exit_code == 0  # the same configuration
    forget_module()
    swept = load("mine/config.toml", {"model.name": "trusted_net:net"})[1]
    assert swept.own_names(loaded=False) == {}


def test_settings_on_top_do_not_change_what_is_trusted(here: Path):
    begin(Path("run"))
    done = call("run", "run/config.toml", "--set", "model.width=3", "--out", "wider")
    assert done.exit_code == 0, done.output
    assert "width = 3" in Path("wider/config.toml").read_text()
    grid = tasks("run/config.toml", ["model.width=6,7"], {}, Path("out"))
    assert [task.config.sections["model"].width for task in grid] == [6, 7]


def test_a_state_folder_that_cannot_be_written_stops_no_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    Path("file").touch()
    monkeypatch.setenv("FEDGLAD_STATE", str(here / "file" / "state"))
    assert execute("own", load("digits", OWN)[1], out=Path("run")).summary
    assert "is trusted could not be noted" in Path("run/log.txt").read_text()


# --------------------------------------------------------------------------------- fingerprints


def test_a_fingerprint_is_of_the_module_and_its_packages(here: Path):
    Path("pack/inner").mkdir(parents=True)
    Path("pack/__init__.py").write_text("raise SystemExit('was loaded')\n")
    Path("pack/inner/deep.py").write_text("x = 1\n")  # in a folder without __init__.py
    name = "pack.inner.deep:x"
    assert user_code.files(name) == [
        str(here / "pack/__init__.py"),
        str(here / "pack/inner/deep.py"),
    ]
    seen = [user_code.fingerprint(name)]
    for file in user_code.files(name):
        with open(file, "a") as text:
            text.write("# more\n")
        seen.append(user_code.fingerprint(name))
    assert None not in seen
    assert len(set(seen)) == 3
    assert "pack" not in sys.modules


def test_what_is_not_there_has_no_fingerprint(here: Path):
    assert [
        user_code.fingerprint(name) for name in ("nowhere:x", "json.nowhere:x", ":x", "a..b:x")
    ] == ([None] * 4)
    assert user_code.fingerprint("json.decoder:JSONDecoder")
    assert user_code.fingerprint("sys:exit")  # built in


def test_bytecode_beside_the_source_is_not_believed(here: Path):
    """A file in __pycache__ that says of itself that it need not be checked is Python's to run."""
    for package in ("", "inside/"):
        Path(package or ".").mkdir(exist_ok=True)
        Path(f"{package}__init__.py").touch()
        source, hostile = Path(f"{package}forged_x.py"), here.parent / "hostile.py"
        source.write_text("value = 'source'\n")
        hostile.write_text("value = 'bytecode'\n")
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        cached = Path(package, "__pycache__", f"forged_x.{sys.implementation.cache_tag}.pyc")
        py_compile.compile(str(hostile), str(cached), invalidation_mode=mode)
    assert user_code.load("forged_x:value") == "source"
    assert user_code.load("inside.forged_x:value") == "source"


# ------------------------------------------------------------------------------- working folder

SCRIPT = "from fedglad.cli import app\nif __name__ == '__main__':\n    app()\n"


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A working folder full of modules that other people's libraries have names of."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in ("matplotlib", "numpy", "json", "torch", "pydantic", "socket", "rich", "pip"):
        (folder / f"{name}.py").write_text(
            f"import os\nos.close(os.open({str(folder / 'trapped')!r}, os.O_CREAT))\n"
        )
    return folder


def command(how: str, folder: Path) -> list[str]:
    """As the installed command starts, whose first place on sys.path is its own folder."""
    if how == "python -m":
        return [sys.executable, "-m", "fedglad"]
    script = folder.parent / "bin" / "fedglad"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    return [sys.executable, str(script)]


def in_folder(
    how: str, folder: Path, *args: str | Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [*command(how, folder), *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
    )
    assert not (folder / "trapped").exists(), done.stderr
    return done


@pytest.mark.parametrize("how", ["the command", "python -m"])
def test_modules_in_the_working_folder_are_not_taken_for_installed_ones(
    finished: Path, trap: Path, how: str
):
    done = in_folder(
        how, trap, "report", finished, "--plots", trap / "plots", "--out", trap / "page.html"
    )
    assert done.returncode == 0, done.stderr
    assert list((trap / "plots").glob("*.png"))
    words = {"COMP_WORDS": "fedglad run di", "COMP_CWORD": "2"}
    done = in_folder(how, trap, _FEDGLAD_COMPLETE="complete_bash", **words)
    assert done.stdout.split() == ["digits"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the command", "python -m"])
def test_runs_and_sweeps_look_for_own_code_behind_what_is_installed(trap: Path, how: str):
    (trap / "trusted_net.py").write_text(
        MODEL.format(mark=str(trap / "loaded")).replace("Path\n", "Path\nimport helper_net\n", 1)
    )
    (trap / "helper_net.py").write_text("import numpy, json\n")
    settings = {**OWN, "engine.name": "local", "engine.workers": 2}
    keys = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = in_folder(how, trap, "run", "digits", *keys, "--out", "run")
    assert done.returncode == 0, done.stderr
    done = in_folder(how, trap, "sweep", "digits", *keys, "--grid", "seed=1,2", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert (trap / "loaded").read_text().count("loaded") >= 3
