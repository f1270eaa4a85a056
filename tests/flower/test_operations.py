"""docs/operations.md, done: a backup goes on in another folder, by the page's commands."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from fedglad.flower.init import init
from fedglad.runs import Run
from tests.flower.deployment import Federation, environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
SETTINGS = {"clients-per-round": 2, "min-nodes": 2}


def commands(chapter: str) -> list[str]:
    """The lines that a chapter says to type."""
    text = re.search(rf"^## {chapter}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert text
    return [line.strip() for line in text[1].splitlines() if line.startswith("    ")]


def test_prometheus_takes_the_rules():
    rules = yaml.safe_load((ROOT / "examples" / "alerts.yaml").read_text("utf-8"))
    assert {rule["alert"] for group in rules["groups"] for rule in group["rules"]} >= {"NoRound"}
    if tool := shutil.which("promtool"):
        path = str(ROOT / "examples" / "alerts.yaml")
        subprocess.run([tool, "check", "rules", path], check=True, capture_output=True)


@pytest.mark.slow
def test_a_backup_goes_on_in_another_folder(tmp_path: Path):
    srv, restored = tmp_path / "srv", tmp_path / "restored"
    (srv / "keys").mkdir(parents=True)
    (srv / "superlink.db").touch()
    app = tmp_path / "app"
    init(app)
    with Federation(tmp_path, nodes=2) as federation:
        out = f"{srv}/out/{{run}}"
        begun = federation.run(app, {**SETTINGS, "num-server-rounds": 2, "out": out})
        assert begun.code == 0, begun.log

        def typed(line: str) -> str:
            for there, here in {"/srv/fedglad": srv, "/srv/restored": restored}.items():
                line = line.replace(there, str(here))
            return line

        (backup,) = commands("Backup")
        *restore, go_on = commands("Restore")
        for line in (backup, *restore):
            done = subprocess.run(
                shlex.split(typed(line)),
                cwd=tmp_path,
                env=environment(federation.home),
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        shutil.rmtree(srv / "out")
        text = shlex.split(typed(go_on))[-1]
        pairs = dict(pair.split("=", 1) for pair in shlex.split(text))
        assert pairs == {"out": str(restored / "out" / "1"), "resume": "true"}
        given = {"out": pairs["out"], "resume": True, **SETTINGS, "num-server-rounds": 4}
        resumed = federation.run(app, given)
        assert resumed.code == 0, resumed.log
        out = str(tmp_path / "whole")
        whole = federation.run(app, {**SETTINGS, "num-server-rounds": 4, "out": out})
        assert whole.code == 0, whole.log
    assert len(Run(restored / "out" / "1").rounds()) == 4
    models = [load_file(folder / "model.safetensors") for folder in (Path(pairs["out"]), Path(out))]
    assert all((models[0][name] == value).all() for name, value in models[1].items())
