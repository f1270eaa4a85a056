"""The commands of docs/run.md on the life of a run, as they are printed there."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from run_support import start
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.runs import Run, parts
from tests.runs.test_own_code import MINE

PAGE = (Path(__file__).parents[2] / "docs/run.md").read_text("utf-8")
LIFE = PAGE.partition("\n## The life of a run\n")[2].partition("\n## ")[0]
CHAPTERS = re.split(r"^### ", LIFE, flags=re.M)[1:]
COMMANDS = {
    chapter.splitlines()[0]: re.findall(r"^    fedglad (.*?)(?: +#.*)?$", chapter, re.M)
    for chapter in CHAPTERS
}


def say(line: str, *more: str) -> str:
    done = CliRunner().invoke(app, [*line.split(), *more], env={"COLUMNS": "200"})
    assert done.exit_code == 0, (line, done.output)
    return done.output


def test_the_page_has_these_chapters_with_their_commands():
    assert {name: len(commands) for name, commands in COMMANDS.items()} == {
        "More rounds": 4,
        "What a finished run keeps": 2,
        "Long runs": 3,
        "A warm start": 2,
        "Testing without training": 3,
        "Code that was edited": 4,
    }


def test_the_chapter_on_long_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "LIMIT", 5000)
    quick = ("--set", "engine.name=serial", "--set", "client.epochs=1", "--set", "rounds=8")
    often = (*quick, "--set", "model.name=softmax", "--set", "model.features=64")
    runs: list[Path] = []
    for line, stay in zip(COMMANDS["Long runs"], (5, 2, 2), strict=True):
        runs.append(Path(f"runs/{len(runs)}"))
        say(line, *often, "--set", "checkpoint_every=1", "--out", str(runs[-1]))
        saved = len(list(runs[-1].glob("checkpoints/*.json")))
        assert saved in (stay, stay + 1)  # the best may be one of the last
    shutil.move(runs[0], "runs/mine")
    assert list(Path("runs/mine/rounds").iterdir())
    (snippet,) = re.findall(r"```python\n(.*?)```", LIFE.partition("### Long runs")[2], re.S)[:1]
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["losses"] == [one["train_loss"] for one in Run(Path("runs/mine")).rounds()]
    whole = subprocess.run(
        "zcat rounds/*.gz | cat - rounds.jsonl", shell=True, cwd="runs/mine", capture_output=True
    )
    assert len(whole.stdout.splitlines()) == len(names["losses"]) == 8


def test_all_of_them_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    quick = ("--set", "engine.name=serial", "--set", "client.epochs=1")
    six, ten, long, longer = COMMANDS["More rounds"]
    say(six, *quick)
    said = say(ten, *quick)
    assert "going on after round 6" in said
    say(long, *quick)
    assert "going on after round 6" in say(longer)
    assert len(Run(Path("runs/long")).rounds()) == 10
    shown, done = COMMANDS["What a finished run keeps"]
    assert "MB of checkpoints" in say(shown)
    assert Path("runs/long/checkpoints").is_dir()
    assert "Removed of 3 runs" in say(done)
    assert not Path("runs/long/checkpoints").exists()
    for line in COMMANDS["A warm start"]:
        say(line, *quick)
    for line in COMMANDS["Testing without training"]:
        assert "accuracy" in say(line)


@pytest.mark.slow
def test_the_commands_on_edited_code(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        MINE.replace("from own_factors import FACTOR\n", "FACTOR = 0.5\n").replace("Mine(", "Rule(")
    )
    first, again, force, accept = COMMANDS["Code that was edited"]
    quick = ["--set", "rounds=1", "--set", "client.epochs=1", "--set", "engine.name=serial"]

    def tell(line: str) -> str:
        with start(*line.split(), *quick, cwd=tmp_path) as process:
            out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return out + errors

    tell(first)
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("0.5", "0.9"))
    assert "was made with other code of mine:Rule" in tell(again)
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert "finished already" in tell(accept)
    assert "finished already" not in tell(force)
