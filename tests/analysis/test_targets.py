"""Rounds and bytes to a target, by hand and of a run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY

from fedglad.analysis.targets import Reached, rounds_to
from fedglad.config.schema import load
from fedglad.records import Score
from fedglad.runs import execute

SENT = {"id": 1, "loss": 0.5, "sq_norm": 2.0}
REFUSED = {"id": 2, "loss": 0.5, "sq_norm": 9e9, "rejected": "norm 9e+09 is above ..."}
FAILED = {"id": 3, "weight": 0.0, "loss": None, "sq_norm": None, "rejected": "timed out"}
RECORDS: list[dict[str, Any]] = [
    {"clients": [SENT, SENT, FAILED], "test_accuracy": 0.5, "test_loss": 2.0},
    {"clients": [SENT, REFUSED], "test_accuracy": None, "test_loss": None},
    {"clients": [SENT], "test_accuracy": 0.75, "test_loss": 1.0, "averaged_accuracy": 0.8},
    {"clients": [SENT], "test_accuracy": 0.625, "test_loss": 0.5, "averaged_accuracy": 0.9},
]
BYTES = {"down": 100, "up": 10}


@pytest.mark.parametrize(
    ("score", "target", "wanted"),
    [
        # Rounds 1 to 3: 3 + 2 + 1 clients were sent the model, 2 + 2 + 1 updates came.
        (Score(), 0.7, Reached(3, 0.75, 600, 50)),
        (Score(), 0.75, Reached(3, 0.75, 600, 50)),  # as good as the target
        (Score(), 0.5, Reached(1, 0.5, 300, 20)),
        (Score(), 0.8, None),
        (Score("loss", higher=False), 1.5, Reached(3, 1.0, 600, 50)),
        (Score("loss", higher=False), 0.5, Reached(4, 0.5, 700, 60)),
        (Score("loss", higher=False), 0.4, None),
        (Score("f1"), 0.1, None),
    ],
)
def test_the_first_tested_round_that_is_good_enough(
    score: Score, target: float, wanted: Reached | None
):
    assert rounds_to(RECORDS, score, target, update_bytes=BYTES) == wanted


def test_the_average_has_rounds_of_its_own_and_bytes_may_be_unknown():
    found = rounds_to(RECORDS, Score(), 0.85, which="averaged")
    assert found == Reached(4, 0.9)
    assert Reached(4, 0.9).bytes is None
    assert Reached(4, 0.9, 700, 60).bytes == 760


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        ("plain", 2600, 2600),  # 64 · 10 + 10 parameters of 4 bytes
        ("scaffold", 5200, 5200),  # θ and c; Δ and c_k⁺ − c_k
        ("fednova", 2600, 2600),  # its server half asks for nothing more
    ],
)
def test_what_a_client_of_a_run_receives_and_sends(method: str, down: int, up: int, tmp_path: Path):
    settings = {**TINY, "engine.name": "serial", "rounds": 2, "client.name": method}
    settings |= {"client.optimizer": "sgd", "client.clip_norm": 0.0}
    run = execute("digits", load("digits", settings)[1], out=tmp_path / "run")
    assert run.summary
    assert run.summary["update_bytes"] == {"down": down, "up": up}
    found = rounds_to(run.rounds(), Score(), 0.0, update_bytes=run.summary["update_bytes"])
    assert found
    assert (found.round, found.sent, found.received) == (1, 3 * down, 3 * up)


def test_buffers_travel_too(tmp_path: Path):
    settings = {**TINY, "engine.name": "serial", "rounds": 1, "model.name": "run_support:Normed"}
    settings.pop("model.features")
    run = execute("digits", load("digits", settings)[1], out=tmp_path / "run")
    # conv 6·9 + 6, norm 6 + 6, dense 216·10 + 10 parameters of 4 bytes; the means and variances
    # of 6 channels, and a count of 8 bytes.
    vector, buffers = 4 * (60 + 12 + 2170), 4 * 12 + 8
    assert run.summary
    assert run.summary["update_bytes"] == {"down": vector + buffers, "up": vector + buffers}


def test_it_loads_no_torch():
    code = "import sys, fedglad.analysis.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
