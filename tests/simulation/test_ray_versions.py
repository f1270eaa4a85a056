"""The engine ray with a newer Ray than the one that Flower brings along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_support import TESTS, environment

NEWEST = "2.60.0"

pytestmark = pytest.mark.slow


def test_the_newest_ray_gives_the_same_bits(tmp_path: Path):
    target = str(tmp_path / "ray")
    install = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([sys.executable, *install, "--target", target, f"ray=={NEWEST}"])
    if done.returncode:
        pytest.skip(f"ray {NEWEST} could not be installed")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([target, env["PYTHONPATH"]])
    which = [sys.executable, "-c", "import ray; print(ray.__version__)"]
    assert subprocess.check_output(which, env=env, text=True).strip() == NEWEST
    chosen = "one_node or killed_change"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    tests = TESTS / "simulation" / "test_ray.py"
    done = subprocess.run([*command, str(tests)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "4 passed" in done.stdout
