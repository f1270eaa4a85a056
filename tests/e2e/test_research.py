"""docs/research.md: from an idea to a table, every command and program of it in its order."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_support import environment, start

PAGE = (Path(__file__).parents[2] / "docs/research.md").read_text("utf-8")
COMMANDS = re.findall(r"^    fedglad (.*)$", PAGE, re.M)
IDEA, FRAMES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
QUICK = ["--set", "rounds=3", "--set", "client.epochs=1"]


def test_the_table_on_the_page_is_that_of_the_comparison_on_it():
    shown = re.findall(r"^  adapter\S+ +3 +([\d.]+ ± [\d.]+) ", PAGE, re.M)
    rows = [line for line in PAGE.splitlines() if line.endswith(r" \\") and r"\pm" in line]
    blocks = [[re.findall(r"[\d.]+", cell) for cell in row.split("&")[1:]] for row in rows]
    in_latex = [" ± ".join(row[column]) for column in (0, 1) for row in blocks]
    assert len(shown) == 8
    assert in_latex == shown


@pytest.mark.slow
def test_from_an_idea_to_a_table(tmp_path: Path):
    idea = tmp_path / "idea.py"
    idea.write_text(IDEA)
    said: dict[str, str] = {}
    folder = ""
    for line in COMMANDS:
        verb, *words = line.split()
        if again := line in said:  # after an edit
            idea.write_text(idea.read_text().replace("** -self.power", "** -self.power / 1.5"))
        words = [folder if word.startswith("runs/digits-") else word for word in words]
        words = [word.replace("rounds=90", "rounds=5") for word in words]
        quick = QUICK if verb in ("run", "sweep", "tune") else []
        with start(
            verb, *words, *(quick[2:] if "--resume" in words else quick), cwd=tmp_path
        ) as it:
            out, errors = it.communicate(timeout=300)
        assert it.returncode == 0, (line, out, errors)
        assert ("was made with other code of idea:Damped" in errors) == again, errors
        folder = folder or re.findall(r"runs/digits-\w+", out)[0]
        said[line] = out + errors

    def told(words: str) -> str:
        return next(text for line, text in said.items() if words in line)

    assert "adapter.code=" in told("compare runs")
    assert "Best: --set adapter.power=" in told("tune")
    assert told("compare study --no-averaged").count("idea:Damped  3") == 2  # a row in each block
    assert (tmp_path / "table.tex").read_text().count("$ \\\\") == 4
    assert "MB to it" in told("--target 80%")
    assert len((tmp_path / "study.csv").read_text().splitlines()) == 1 + 2 * 4 * 2
    assert "going on after round 3" in told("--resume")
    assert len(list(tmp_path.glob("study/*/summary.json"))) == 24
    assert not list(tmp_path.glob("study/*/checkpoints"))
    assert (tmp_path / "study.html").stat().st_size > 100_000
    program = f"{FRAMES}\nassert last.shape == (4, 2), last\nassert len(gsi) == 4 * 3, gsi\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
