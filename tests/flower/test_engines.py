"""The app of `fedglad flower init` on Flower's two engines: the bits of fedglad's own simulator."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedglad.config.schema import load
from fedglad.core import checkpoint
from fedglad.flower.client import score
from fedglad.flower.init import init
from fedglad.flower.template.digits_app import task
from fedglad.runs import execute
from tests.flower.deployment import NO_RAY, Federation

ROUNDS, CLIENTS, COHORT = 3, 4, 2


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder of the preset digits, with few clients and rounds."""
    _, config = load(
        "digits",
        {
            "rounds": ROUNDS,
            "data.clients": CLIENTS,
            "data.alpha": 1.0,
            "sampler.clients_per_round": COHORT,
            "average.name": "ema",
            "engine.name": "serial",
        },
    )
    return execute("digits", config, out=tmp_path_factory.mktemp("simulated") / "run").folder


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rounds.jsonl").read_text("utf-8").splitlines()
    # Not compared: the times, and what only one of the two has.
    both = ("round", "status", "clients", "train_loss", "gsi_all", "tensors", "groups")
    tested = [f"{of}_{what}" for of in ("test", "averaged") for what in ("loss", "accuracy")]
    return [{key: json.loads(line)[key] for key in (*both, *tested)} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "simulation",
    [
        pytest.param(True, id="simulation", marks=pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)),
        pytest.param(False, id="deployment"),
    ],
)
def test_flower_gives_the_bits_of_the_simulator(tmp_path: Path, simulated: Path, simulation: bool):
    init(tmp_path / "app")
    out = tmp_path / "out"
    config = {
        "num-server-rounds": ROUNDS,
        "clients-per-round": COHORT,
        "min-nodes": CLIENTS,
        "out": str(out),
    }
    with Federation(tmp_path, nodes=CLIENTS, simulation=simulation) as federation:
        done = federation.run(tmp_path / "app", config)
        said = f"{done.log}\n{federation.logs}"
    assert done.code == 0, said
    assert (out / "summary.json").is_file(), said

    assert records(out) == records(simulated)
    assert len(records(out)) == ROUNDS
    assert all("trust" in client for line in records(out) for client in line["clients"])
    scales = [group["scale"] for group in records(out)[-1]["groups"].values()]
    assert any(scale != 1 for scale in scales)  # the rule did something

    last = f"checkpoints/{ROUNDS:06d}.safetensors"
    found, _ = checkpoint.read(out / last)
    wanted, _ = checkpoint.read(simulated / last)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not found[name].equal(wanted[name])] == []

    # What is deployed: the averaged model has the accuracy that the log says.
    model = task.build_model(1)
    model.load_state_dict(load_file(out / "averaged.safetensors"))
    _, accuracy = score(model, *task.load_test())
    assert accuracy == records(out)[-1]["averaged_accuracy"]
    assert f"averaged {100 * accuracy:.2f} %" in said
    assert f"for deployment, is {out}/averaged.safetensors" in said
    newest = load_file(out / "model.safetensors")
    assert all(newest[name].equal(wanted[f"params/{name}"]) for name in newest)
