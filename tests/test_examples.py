"""What users copy must run: the demo as a program, the code on the NumPy page as it is printed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/numpy.md").read_text("utf-8"), re.M | re.S
)


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples/digits.py"), *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def test_demo_reports_and_draws_from_a_folder_with_a_space(tmp_path: Path):
    cwd = tmp_path / "my folder"
    cwd.mkdir()
    done = demo("--seeds", "2", "--rounds", "4", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert (cwd / "out/digits.png").read_bytes().startswith(b"\x89PNG")
    for part in (
        r"seed 2  FedGLAD  last 4 rounds +\d+\.\d %",
        r"mean( +[+-]?\d+\.\d){5}",
        r"FedGLAD minus FedAvg: [+-]\d+\.\d ± \d+\.\d points \(95 %, 2 paired seeds\): \w+",
        r"Round 2, forced",
        r"Plot: out/digits\.png",
    ):
        assert re.search(part, done.stdout), part
    assert "\x1b" not in done.stdout  # no colours, no cursor movements outside a terminal


def test_demo_claims_nothing_from_one_seed(tmp_path: Path):
    done = demo("--seeds", "1", "--rounds", "4", "--out", "plots [1]/a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "one seed cannot tell it from noise" in done.stdout
    assert "Plot: plots [1]/a/digits.png" in done.stdout
    assert (tmp_path / "plots [1]/a/digits.png").exists()


def test_demo_refuses_what_it_cannot_run(tmp_path: Path):
    done = demo("--rounds", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "--rounds of at least 4" in done.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=["numpy", "nested"])
def test_code_on_the_numpy_page_learns(block: str):
    scope: dict[str, Any] = {}
    exec(block, scope)
    losses, record = scope["losses"], scope["record"]
    assert losses[-1] < 0.5 * losses[0]
    assert not record.rejected


def test_code_on_the_run_page_runs(capsys: pytest.CaptureFixture[str]):
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/run.md").read_text("utf-8"), re.M | re.S
    )
    exec(block, {})
    assert re.fullmatch(r"(\d 0\.\d+ \d\.\d+\n){3}", capsys.readouterr().out)
