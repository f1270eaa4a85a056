"""NVFlare's simulator with FedGLAD as the controller of a job, its sites as processes."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedglad import Glad
from fedglad.averages import EMA
from fedglad.optimizers import Adam
from fedglad.runs import Run

from .custom.net import Net, Test
from .simulator import CUSTOM, Job, Simulation, wait_for
from .sites_support import by_hand, same

pytestmark = pytest.mark.slow

PERSISTOR = "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor"
TORCH = {"path": PERSISTOR, "args": {"model": {"path": "net.Net", "args": {}}}}
SELECTOR = {
    "id": "selector",
    "path": "nvflare.app_common.widgets.intime_model_selector.IntimeModelSelector",
    "args": {"key_metric": "accuracy"},
}
NUMPY = {
    "path": "nvflare.app_common.np.np_model_persistor.NPModelPersistor",
    "args": {"model": [[1.0, 2.0], [3.0, 4.0]]},
}
ADAM = {"path": "fedglad.optimizers.Adam", "args": {"lr": 0.05}}
EVERYTHING: dict[str, Any] = {
    "num_clients": 3,
    "num_rounds": 10,
    "seed": 4,
    "optimizer": ADAM,
    "average": {"path": "fedglad.averages.EMA", "args": {}},
    "evaluate": {"path": "net.Test", "args": {}},
}


@dataclass
class Played:
    """A run that has ended, and what it left."""

    folder: Path
    output: str
    workspace: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        return Run(self.folder).rounds()

    def model(self, name: str = "model") -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


def play(
    python: Path, place: Path, controller: dict[str, Any], *, sites: int, **job: Any
) -> Played:
    out = place / "out"
    controller = {**controller, "checkpoint_dir": str(out)}
    made = Job(place / "job", controller, **job)
    done = Simulation(python, made.write(), sites, place / "workspace").wait()
    assert done.code == 0, done.output[-3000:]
    return Played(out, done.output, done.workspace)


@pytest.fixture(scope="module")
def whole(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Ten rounds of PyTorch's full weights that nothing disturbs."""
    place = tmp_path_factory.mktemp("whole")
    return play(python, place, EVERYTHING, sites=4, persistor=TORCH, others=[SELECTOR])


def test_ten_rounds_make_the_model_of_a_plain_server(whole: Played):
    records = whole.records
    assert [r["status"] for r in records] == ["stepped"] * 10
    initial = {name: value.numpy() for name, value in Net().state_dict().items()}
    settings: dict[str, Any] = {"optimizer": Adam(lr=0.05), "adapter": Glad(), "average": EMA()}
    assert same(whole.model(), by_hand(initial, records, **settings))
    assert {c["id"] for r in records for c in r["clients"]} == {f"site-{k}" for k in range(1, 5)}
    assert {len(r["clients"]) for r in records} == {3}
    assert all(r["metrics"]["train"]["accuracy"] == 0.5 for r in records)
    tested = Test()(10, whole.model()), Test()(10, whole.model("averaged"))
    assert records[-1]["test_accuracy"] == tested[0]["accuracy"]
    assert records[-1]["averaged_accuracy"] == tested[1]["accuracy"]
    assert records[0]["metrics"]["initial"] == Test()(0, initial)
    assert "10 of 10 rounds trained" in whole.output  # in the log that the user sees


def test_the_persistor_has_the_newest_model(whole: Played):
    (path,) = whole.workspace.rglob("FL_global_model.pt")
    saved = torch.load(path, weights_only=True)
    assert same(saved["model"], whole.model())


def test_nvflares_selector_keeps_the_model_that_was_best(whole: Played):
    # All sites say in every round that what they got has accuracy 0.5, so the first one that the
    # selector looks at stays: that of the second round, which has been stepped once.
    (path,) = whole.workspace.rglob("best_FL_global_model.pt")
    initial = {name: value.numpy() for name, value in Net().state_dict().items()}
    once = by_hand(initial, whole.records[:1], optimizer=Adam(lr=0.05), adapter=Glad())
    assert same(torch.load(path, weights_only=True)["model"], once)


def test_what_reads_a_runs_folder_reads_this_one(whole: Played):
    for verb in ("compare", "report", "check"):
        command = [sys.executable, "-m", "fedglad", verb, str(whole.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{verb}: {done.stderr}"
    assert (whole.folder / "report.html").is_file()


def test_killed_and_started_again_it_has_the_same_bits(whole: Played, python: Path, tmp_path: Path):
    controller = {**EVERYTHING, "checkpoint_dir": str(tmp_path / "out")}
    job = Job(tmp_path / "job", controller, persistor=TORCH)
    first = Simulation(python, job.write(), 4, tmp_path / "first")
    wait_for(tmp_path / "out" / "rounds.jsonl", 4)
    first.kill()
    there = len(Run(tmp_path / "out").rounds())
    assert 4 <= there < 10
    done = play(python, tmp_path, EVERYTHING, sites=4, persistor=TORCH)
    assert "Going on after round" in done.output
    for name in ("model", "averaged"):
        files = [played.folder / f"{name}.safetensors" for played in (whole, done)]
        assert files[0].read_bytes() == files[1].read_bytes()
    facts = [
        json.dumps([{k: v for k, v in one.items() if k != "seconds"} for one in played.records])
        for played in (whole, done)
    ]
    assert facts[0] == facts[1]


def test_differences_of_numpy_arrays(python: Path, tmp_path: Path):
    settings = {"num_rounds": 3, "optimizer": ADAM}
    done = play(python, tmp_path, settings, sites=3, persistor=NUMPY, executor={"diff": True})
    initial = {"numpy_key": np.array([[1, 2], [3, 4]], dtype=np.float32)}
    expected = by_hand(initial, done.records, optimizer=Adam(lr=0.05), adapter=Glad())
    assert torch.allclose(done.model()["numpy_key"], expected["numpy_key"], atol=1e-5)
    (path,) = done.workspace.rglob("server.npy")
    assert same({"w": np.load(path)}, {"w": done.model()["numpy_key"]})


JOB = """
from fedglad.averages import EMA
from fedglad.nvflare import FedGLAD
from fedglad.optimizers import Adam
from net import Net
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.api import FedJob
from sites import Site

job = FedJob(name="job", min_clients=1)
adam = Adam(lr=0.05, betas=(0.8, 0.95))
job.to_server(FedGLAD(num_rounds=2, optimizer=adam, average=EMA(), checkpoint_dir={out!r}))
job.to_server(PTModel(Net()))
job.to_clients(Site(diff=True))
job.export_job({place!r})
"""


def test_a_job_that_was_made_in_python(python: Path, tmp_path: Path):
    out = tmp_path / "out"
    text = JOB.format(out=str(out), place=str(tmp_path))
    done = subprocess.run(
        [python, "-c", text], cwd=CUSTOM, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    played = Simulation(python, tmp_path / "job", 2, tmp_path / "workspace").wait()
    assert played.code == 0, played.output[-3000:]
    records = Run(out).rounds()
    initial = {name: value.numpy() for name, value in Net().state_dict().items()}
    adam = Adam(lr=0.05, betas=(0.8, 0.95))
    expected = by_hand(initial, records, optimizer=adam, adapter=Glad(), average=EMA())
    for name, value in load_file(out / "model.safetensors").items():  # differences are rounded
        assert torch.allclose(value, expected[name], atol=1e-5)


FAULTS = {
    "site-4": ("nan", "holds NaN or inf"),
    "site-5": ("huge", "norm"),
    "site-6": ("broadcast", "has shape (1, 4), not (3, 4)"),
    "site-7": ("missing", "has no tensor 'layers.0.weight'"),
    "site-8": ("extra", "has an extra tensor 'another'"),
    "site-9": ("integers", "is torch.int64, not floating point"),
    "site-10": ("negative", "is -3, not a positive finite number"),
    "site-11": ("no_number", "is many, not a positive finite number"),
    "site-12": ("raises", "the client failed: EXECUTION_"),
    "site-13": ("no_model", "its reply is no FLModel"),
    "site-14": ("hangs", "no reply within 20 s"),
    "site-15": ("dies", "no reply within 20 s"),
}


def test_each_kind_of_faulty_site_is_left_out_with_its_reason(python: Path, tmp_path: Path):
    done = play(
        python,
        tmp_path,
        {"num_rounds": 2, "round_timeout": 20},
        sites=15,
        persistor=TORCH,
        executor={"faults": {site: fault for site, (fault, _) in FAULTS.items()}},
    )
    last = done.records[-1]  # by then all have started
    assert last["status"] == "stepped"
    reasons = {c["id"]: c.get("rejected") for c in last["clients"]}
    for site, (fault, expected) in FAULTS.items():
        assert expected in (reasons.pop(site) or ""), fault
    assert reasons == {"site-1": None, "site-2": None, "site-3": None}
    initial = {name: value.numpy() for name, value in Net().state_dict().items()}
    assert same(done.model(), by_hand(initial, done.records, adapter=Glad()))


def test_a_run_in_which_nothing_was_trained_ends_as_failed(python: Path, tmp_path: Path):
    controller = {"num_rounds": 1, "retries": 0, "checkpoint_dir": str(tmp_path / "out")}
    faults = {f"site-{k}": "raises" for k in (1, 2)}
    job = Job(tmp_path / "job", controller, {"faults": faults}, TORCH)
    done = Simulation(python, job.write(), 2, tmp_path / "workspace").wait()
    assert "none of 1 rounds could be trained, the model is the initial one" in done.output
    assert Run(tmp_path / "out").rounds()[0]["status"] == "skipped"


def test_without_an_adapter_a_server_is_nvflares_fedavg(python: Path, tmp_path: Path):
    job = Job(
        tmp_path / "job",
        {"num_clients": 3, "num_rounds": 3},
        persistor=NUMPY,
        path="nvflare.app_common.workflows.fedavg.FedAvg",
    )
    theirs = Simulation(python, job.write(), 3, tmp_path / "workspace").wait()
    assert theirs.code == 0, theirs.output[-3000:]
    (path,) = theirs.workspace.rglob("server.npy")
    clients = [{"id": f"site-{k}"} for k in (1, 2, 3)]
    rounds = [
        {"status": "stepped", "round": t, "clients": clients, "population": 3} for t in range(3)
    ]
    initial = {"numpy_key": np.array([[1, 2], [3, 4]], dtype=np.float32)}
    ours = by_hand(initial, rounds, adapter=None)["numpy_key"].numpy()
    assert np.allclose(np.load(path), ours, atol=1e-5)
    assert not np.allclose(ours, initial["numpy_key"], atol=1e-2)
