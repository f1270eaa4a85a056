"""The path the README tells a newcomer, walked with the installed `fedglad`.

The blocks of its section "Your first experiments" are taken as they are printed, in their order:
`toml` is written to the file that its first line names, the lines of `sh` are run, and what `text`
shows must have been printed by then, up to its numbers.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedglad.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
SECTION = README.partition("\n## Your first experiments\n")[2].partition("\n## ")[0]
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", SECTION, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
BIN = Path(sys.executable).parent


def shape(line: str) -> str:
    """A line without what differs from run to run."""
    line = re.sub(r"-[0-9a-f]{10}\b", "-HASH", line)
    return " ".join(re.sub(r"[+-]?\d+(\.\d+)?", "#", line).split())


def test_the_readme_tells_the_whole_path():
    told = iter(COMMANDS)
    path = ("run", "run --set adapter.name=none", "compare runs", "run mine.toml", "sweep mine")
    for step in path:  # in this order: each search goes on where the last one ended
        assert any(command.startswith(f"fedglad {step}") for command in told), step
    assert ". .venv/bin/activate" in SECTION


@pytest.mark.slow
def test_the_readme_path_can_be_walked(tmp_path: Path):
    if not (BIN / "fedglad").exists():
        pytest.skip(f"there is no fedglad in {BIN}: install anew")
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    env.pop("PYTHONPATH", None)
    printed: set[str] = set()
    shown = 0
    for kind, text in BLOCKS:
        if kind == "toml":
            name = text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif kind == "sh":
            for line in text.splitlines():
                done = subprocess.run(
                    ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{line}\n{done.stderr}"
                assert not done.stderr, line
                printed |= {shape(found) for found in done.stdout.splitlines()}
        else:
            assert kind == "text"
            missing = [line for line in text.splitlines() if shape(line) not in printed]
            assert not missing, "\n".join(missing)
            shown += 1
    assert shown >= 3
    assert len(list((tmp_path / "runs").iterdir())) == 8  # two, and six of the sweep


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("run", "A preset or a TOML file."),
        ("config", "A preset or a TOML file."),
        ("sweep", "A preset or a TOML file."),
        ("compare", "Runs' folders, or folders of them."),
        ("list", "presets, datasets, partitions"),
    ],
)
def test_help_explains_the_arguments(command: str, text: str):
    """Typer before 0.21 loses these texts with click 8.5 and later."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert text in result.stdout


def test_a_misspelt_command_is_answered_once():
    """Typer before 0.21 says so twice with click 8.4 and later."""
    result = CliRunner().invoke(app, ["runn"], env={"COLUMNS": "100"})
    assert result.exit_code == 2
    assert result.stderr.count("Did you mean") == 1
    assert "'run'" in result.stderr


@pytest.mark.parametrize("page", ["README.md", *sorted(p.name for p in ROOT.glob("docs/*.md"))])
def test_links_to_files_lead_somewhere(page: str):
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text("utf-8"))
    assert not [link for link in links if not (path.parent / link).exists()]


def test_the_readme_links_every_page():
    pages = [f"docs/{p.name}" for p in ROOT.glob("docs/*.md")]
    assert not [page for page in pages if f"({page})" not in README]
