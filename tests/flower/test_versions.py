"""The newest Flower, beside the one that is installed; and one that nobody has tried."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_support import TESTS, environment

from fedglad.flower import FedGLAD, versions

from .grid import LocalGrid, clients, model, record

NEWEST = "1.42.0"


def test_a_version_that_was_not_tried_is_told_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert versions.told() == ""
    for later in ("1.43.0", "2.0"):
        monkeypatch.setattr(versions, "version", lambda name, later=later: later)
        text = f"Flower {later} is installed; fedglad was tried with 1.41 and 1.42"
        assert versions.told() == text
    strategy = FedGLAD(fraction_evaluate=0.0)
    strategy.start(LocalGrid(clients(2)), record(model()), num_rounds=1)
    assert text in caplog.text
    assert strategy.records


@pytest.mark.slow
def test_the_newest_flower(tmp_path: Path):
    target = str(tmp_path / "flwr")
    install = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([sys.executable, *install, "--target", target, f"flwr=={NEWEST}"])
    if done.returncode:
        pytest.skip(f"flwr {NEWEST} could not be installed")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([target, env["PYTHONPATH"]])
    which = [sys.executable, "-c", "from importlib.metadata import version; print(version('flwr'))"]
    assert subprocess.check_output(which, env=env, text=True).strip() == NEWEST
    # In one process; then a SuperLink and SuperNodes, with TLS.
    here = TESTS / "flower"
    names = ["numerics", "faults", "resume", "subclasses", "outages", "cohorts"]
    for marked, chosen in (("not slow", names), ("slow", ["tls"])):
        files = [str(here / f"test_{name}.py") for name in chosen]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
        done = subprocess.run([*command, *files], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:]
        assert " passed" in done.stdout
