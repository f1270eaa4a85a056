"""What fedglad 0.1 left behind goes on with today's version, to the bits that 0.1 came to."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedglad.config import load
from fedglad.flower import FedGLAD
from fedglad.optimizers import Momentum
from fedglad.runs import Run, execute
from fedglad.runs.checking import check
from tests.flower.grid import LocalGrid, clients, model, record

KEPT = Path(__file__).parents[1] / "kept" / "0.1"
EXPECTED = json.loads((KEPT / "expected.json").read_text())


def sums(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {n: hashlib.sha256(x.tobytes()).hexdigest()[:16] for n, x in sorted(arrays.items())}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEPT / request.param, tmp_path / request.param))


@pytest.mark.parametrize("folder", ["simulated"], indirect=True)
def test_a_simulated_run_goes_on(folder: Path):
    before = Run(folder).rounds()[:4]
    name, config = load(str(folder / "config.toml"))
    lost: list[str] = []
    run = execute(name, config, out=folder, resume=True, on_lost=lost.append)
    assert not lost
    assert sums(load_file(folder / "model.safetensors")) == EXPECTED["simulated"]
    assert len(run.rounds()) == 8
    assert run.rounds()[:4] == before
    assert run.summary
    assert not [file for file in check(folder).files if file.state == "damaged"]


@pytest.mark.parametrize("folder", ["flower"], indirect=True)
def test_a_run_of_flower_goes_on(folder: Path):
    before = Run(folder).rounds()
    strategy = FedGLAD(
        fraction_evaluate=0.0,
        optimizer=Momentum(lr=0.5),
        checkpoint_dir=folder,
        resume=True,
        seed=3,
    )
    strategy.start(LocalGrid(clients(4), salt=1), record(model()), num_rounds=6)
    assert sums(load_file(folder / "model.safetensors")) == EXPECTED["flower"]
    assert Run(folder).rounds()[:3] == before
    assert len(strategy.records) == 6


@pytest.mark.parametrize("folder", ["simulated", "flower"], indirect=True)
def test_it_is_read(folder: Path):
    view = Run(folder).read()
    assert len(view.rounds) in (3, 5)
    assert not [text for text in view.missing if "damaged" in text]
