"""Verbs that train nothing load no torch, and the version is there at once."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from run_support import TINY

from fedglad.config import load
from fedglad.runs import execute

LOADED = """
import sys
sys.argv[0] = "fedglad"
from fedglad.cli import app
try:
    app(prog_name="fedglad")
finally:
    heavy = {"torch", "transformers", "flwr", "matplotlib", "numpy", "pydantic"}
    sys.stderr.write(f"LOADED {' '.join(sorted(heavy & sys.modules.keys()))}\\n")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        config = load("digits", {**TINY, "rounds": 2, "seed": seed, "engine.name": "serial"})[1]
        execute("digits", config, out=folder / f"seed{seed}")
    return folder


def loaded(*args: str | Path, **environment: str) -> tuple[str, set[str]]:
    """What a command prints, and which heavy libraries it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("LOADED"))
    return done.stdout, set(line.split()[1:])


@pytest.mark.parametrize(
    "args", [("--version",), ("--help",), ("list", "presets"), ("run", "--help")]
)
def test_what_says_what_there_is_loads_nothing_heavy(args: tuple[str, ...]):
    text, heavy = loaded(*args)
    assert text
    assert heavy == set()


@pytest.mark.parametrize(
    "args",
    [
        ("config", "mnist"),
        ("config", "20news-bilstm", "--set", "client.name=scaffold"),
        ("config", "cifar10", "--set", "sampler.name=clustered", "--set", "engine.name=batched"),
        ("list", "adapters"),
        ("list", "samplers"),
        ("paper", "table", "draws", "--json"),
    ],
)
def test_settings_and_tables_load_no_torch(args: tuple[str, ...]):
    text, heavy = loaded(*args)
    assert text
    assert "torch" not in heavy


@pytest.mark.parametrize(
    "args",
    [
        ("compare", "RUNS"),
        ("compare", "RUNS", "--where", "seed=1,2", "--by", "data.alpha", "--format", "latex"),
        ("check", "RUNS"),
        ("report", "RUNS", "--out", "RUNS/report.html"),
        ("track", "RUNS", "--to", "tensorboard", "--out", "RUNS/tracked"),
    ],
)
def test_reading_runs_loads_no_torch(args: tuple[str, ...], runs: Path):
    text, heavy = loaded(*(arg.replace("RUNS", str(runs)) for arg in args))
    assert text
    assert "torch" not in heavy


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("fedglad run di", "digits"),
        ("fedglad list ad", "adapters"),
        ("fedglad data get mn", "mnist"),
        ("fedglad paper table contr", "controls"),
    ],
)
def test_completion_loads_no_torch(words: str, wanted: str):
    place = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    text, heavy = loaded(_FEDGLAD_COMPLETE="complete_bash", **place)
    assert text.split() == [wanted]
    assert "torch" not in heavy


def test_the_live_page_loads_no_torch(runs: Path):
    command = [sys.executable, "-u", "-m", "fedglad", "watch", str(runs / "seed1")]
    with subprocess.Popen(
        [*command, "--no-browser", "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            address = process.stdout.readline().split()[0]
            with urllib.request.urlopen(address) as page:
                assert b"seed1" in page.read()
            libraries = Path(f"/proc/{process.pid}/maps").read_text()
            assert "numpy" in libraries  # else nothing is seen in it
            assert "libtorch" not in libraries
        finally:
            process.terminate()


def test_a_run_is_seen_to_load_torch(tmp_path: Path):
    """The other way round: what is looked for can be found."""
    tiny = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    serial = ["--set", "rounds=1", "--set", "engine.name=serial"]
    _, heavy = loaded("run", "digits", *tiny, *serial, "--out", tmp_path / "run")
    assert "torch" in heavy
