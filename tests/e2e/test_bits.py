"""The bits of runs, as they were recorded: no change of the code's form may change one of them.

`bits.json` was written by `PYTHONPATH=tests python tests/e2e/test_bits.py`, on the first machine
it names; on the others the same code gave the same bits. They differ between types of machine and
versions of libraries, and elsewhere the tests of them are skipped. Only fields that were there at
that time are looked at, so that records may gain others. `old/` holds two runs of that time, each
cut short: what is written today must still go on from them.

Written anew only where results are meant to differ, together with `config.FORMAT`.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower.grid import LocalGrid, Normed, clients, model, numpy, record
from safetensors import safe_open
from typer.testing import CliRunner

from fedglad.adapters import Glad
from fedglad.cli import app
from fedglad.config import (
    PRESETS,  # pyright: ignore[reportPrivateImportUsage]
    Config,
    load,
)
from fedglad.flower import FedGLAD
from fedglad.optimizers import Adam
from fedglad.samplers.adafl import AdaFL

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
FILE = HERE / "bits.json"

FIELDS = (
    *("round", "status", "reason", "clients", "train_loss", "gsi_all", "gsi_unfiltered"),
    *("tensors", "groups", "test_loss", "test_accuracy", "label_similarity", "alarm"),
    *("attempts", "retried", "metrics"),
)
CLIENT, TENSOR = ("id", "weight", "loss", "sq_norm", "rejected"), ("sum_sq", "sum_sq2", "mean_sq")

HARD = {
    "client.name": "scaffold",
    "server.name": "adam",
    "server.lr": 0.01,
    "filter.name": "multi-krum",
    "sampler.clients_per_round": 7,
    "client.epochs": 1,
    "rounds": 6,
    "checkpoint_every": 3,
}
SMALL = {**HARD, "model.name": "softmax", "model.features": 64, "sampler.name": "adafl"}
ROUNDS, STOPPED = 6, 5

Told = dict[str, str]


def machine() -> str:
    """What the bits depend on beside the code."""
    told: dict[str, str] = {}
    if (path := Path("/proc/cpuinfo")).is_file():
        pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
        told = {key.strip(): value.strip() for key, _, value in pairs}
    cpu = [told.get(key, "?") for key in ("vendor_id", "cpu family", "model")]
    return f"{'/'.join(cpu)}, torch {torch.__version__}, numpy {np.__version__}"


def preset_hashes() -> Told:
    return {name: load(name)[1].hash() for name in PRESETS}


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:20]


def of_records(lines: Iterable[Mapping[str, Any]]) -> str:
    """Of a run's rounds, all but their times and fields that are younger."""

    def slim(found: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        return {key: found[key] for key in keys if key in found}

    told: list[Any] = []
    for line in lines:
        kept = slim(line, FIELDS)
        kept["clients"] = [slim(one, CLIENT) for one in line["clients"]]
        kept["tensors"] = {name: slim(one, TENSOR) for name, one in line["tensors"].items()}
        told.append(kept)
    return digest(json.dumps(one, sort_keys=True).encode() for one in told)


def of_folder(folder: Path) -> Told:
    """Of a run's records, of the tensors in its last checkpoint, and of its adapter's state."""
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    last = max((folder / "checkpoints").glob("*.safetensors"))
    with safe_open(last, "pt") as file:
        younger = ("trust/", "average/")
        names = [name for name in sorted(file.keys()) if not name.startswith(younger)]
        tensors = {name: file.get_tensor(name) for name in names}
        saved = json.loads(file.metadata()["fedglad"])
    told = [f"{n} {tuple(t.shape)} {t.dtype}".encode() for n, t in tensors.items()]
    values = [
        t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values()
    ]
    state = [saved["round"], saved["adapter"]["groups"], saved["adapter"]["state"]]
    return {
        "records": of_records(lines),
        "tensors": digest([*told, *values]),
        "state": digest([json.dumps(state).encode()]),
    }


def simulated(folder: Path, settings: Mapping[str, Any], *more: str) -> Told:
    given = [text for k, v in settings.items() for text in ("--set", f"{k}={v}")]
    done = CliRunner().invoke(
        app, ["run", "digits", *given, "--out", str(folder), "--json", "--keep-state", *more]
    )
    assert done.exit_code == 0, done.output
    return of_folder(folder)


def federated(folder: Path, rounds: int = ROUNDS, stop: int = 0) -> Told:
    """A run with Flower's interface in one process; `stop`: it dies after so many rounds."""
    grid = LocalGrid(clients(7, Normed), named=True)
    strategy = FedGLAD(
        fraction_evaluate=0.0,
        checkpoint_dir=folder,
        resume=True,
        seed=3,
        optimizer=Adam(),
        adapter=Glad(gamma=0.5),
        sampler=AdaFL(clients_per_round=4, alpha=0.1),
    )

    def evaluate(server_round: int, arrays: Any) -> Any:
        from flwr.app import MetricRecord

        if stop and server_round > stop:
            raise KeyboardInterrupt
        found = float(np.abs(numpy(arrays)["weight"]).sum())
        return MetricRecord({"accuracy": found % 1.0, "loss": found})

    strategy.start(grid, record(model(normed=True)), num_rounds=rounds, evaluate_fn=evaluate)
    return of_folder(folder)


RUNS: dict[str, Callable[[Path], Told]] = {
    "serial": lambda out: simulated(out, HARD | {"engine.name": "serial"}),
    "local": lambda out: simulated(out, HARD | {"engine.name": "local", "engine.workers": 2}),
    "batched": lambda out: simulated(out, HARD | {"engine.name": "batched"}),
    "plain": lambda out: simulated(out, {"rounds": 6, "client.epochs": 1}),
    "small": lambda out: simulated(out, SMALL),
    "flower": federated,
}
GO_ON: dict[str, Callable[[Path], Told]] = {
    "small": lambda out: simulated(out, SMALL, "--resume"),
    "flower": federated,
}


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def skip_elsewhere() -> None:
    if machine() not in (there := recorded()["machines"]):
        pytest.skip(f"the bits are known of other types of machine: {'; '.join(there)}")


def test_presets_keep_their_hashes():
    known = recorded()["presets"]
    assert {name: told for name, told in preset_hashes().items() if name in known} == known


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_keep_their_hashes(path: Path):
    found = json.loads(path.read_text())
    assert Config.of(found["config"]).hash() == path.stem.rpartition("-")[2]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_its_bits(name: str, tmp_path: Path):
    skip_elsewhere()
    assert RUNS[name](tmp_path / "run") == recorded()["runs"][name]


@pytest.mark.parametrize("name", GO_ON)
def test_a_run_of_the_first_edition_goes_on_to_the_same_bits(name: str, tmp_path: Path):
    skip_elsewhere()
    shutil.copytree(HERE / "old" / name, tmp_path / "run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert len(lines) < ROUNDS
    assert GO_ON[name](tmp_path / "run") == recorded()["runs"][name]


def write() -> None:
    """Records all of it anew, and the two runs that were cut short."""
    from contextlib import suppress

    from fedglad.runs import execute

    with tempfile.TemporaryDirectory() as there:
        runs = {name: run(Path(there) / name) for name, run in RUNS.items()}
        assert runs["serial"] == runs["local"]
    told = {"machines": [machine()], "presets": preset_hashes(), "runs": runs}
    FILE.write_text(json.dumps(told, indent=1) + "\n")
    shutil.rmtree(HERE / "old", ignore_errors=True)

    def stop(done: Any) -> None:
        if done.t + 1 == STOPPED:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        execute("digits", load("digits", SMALL)[1], out=HERE / "old" / "small", on_round=stop)
    with suppress(KeyboardInterrupt):
        federated(HERE / "old" / "flower", stop=3)
    for log in (HERE / "old").glob("*/log.txt"):
        log.unlink()


if __name__ == "__main__":
    write()
