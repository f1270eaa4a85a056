"""The models that a run leaves: loaded in plain PyTorch, the same after a kill, checked, exported.

The best by the validation set is worked out here from the records, and from a run that keeps all.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import TINY, outcome
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from fedglad.averages import EMA
from fedglad.cli import app
from fedglad.config.schema import Config, load
from fedglad.core import checkpoint
from fedglad.records import Record, Round
from fedglad.runs import RunError, check, execute, export
from fedglad.runs.models import Best, apart
from fedglad.server import Server
from fedglad.simulation.simulation import Simulation
from tests.runs.test_runs import Trap, stopped

QUICK = {
    **TINY,
    "engine.name": "serial",
    "rounds": 7,
    "checkpoint_every": 2,
    "average.name": "none",
}
CHOSEN = {**QUICK, "data.validation": 0.2, "average.name": "ema", "adapter.name": "none"}
CHOSEN |= {"data.partition": "iid"}  # its accuracy rises
NORMED = {**CHOSEN, "model.name": "run_support:Normed", "data.partition": "label-skew"}
NORMED.pop("model.features")
FEW = {**CHOSEN, "rounds": 3}
RUNS = {"plain": QUICK, "chosen": CHOSEN, "normed": NORMED, "few": FEW}
MODELS = ["averaged", "best", "best_averaged", "model"]


class Tied(nn.Module):
    """Two layers that are one; a state_dict has both of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x.flatten(1)).relu()))


def config(settings: dict[str, Any]) -> Config:
    return load("digits", settings)[1]


def states_after(settings: dict[str, Any]) -> list[dict[str, dict[str, Tensor]]]:
    """θ and the average after every round, of a run that leaves nothing on the disk."""
    with closing(Simulation(config(settings).plan())) as simulation:
        states = []
        for _ in simulation.rounds():
            both = {"model": simulation.server.state, "averaged": simulation.server.averaged}
            states.append({k: {n: t.clone() for n, t in s.items()} for k, s in both.items()})
        return states


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def needed(folder: Path) -> set[str]:
    """The best models that a run's checkpoints name."""
    saved = [json.loads(path.read_text()) for path in (folder / "checkpoints").glob("*.json")]
    pairs = [(which, done) for one in saved for which, (done, _) in one["best"].items()]
    return {f"{which}-{done:06d}.safetensors" for which, done in pairs}


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that are finished, and one stopped after its last round but one."""
    folder = tmp_path_factory.mktemp("made")
    for name, settings in RUNS.items():
        execute("digits", config(settings), out=folder / name)
    stopped(folder / "cut", 5, config(CHOSEN))  # checkpoints 2 and 4
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made[name], tmp_path / name))


# -------------------------------------------------------------------------------- what they are


def test_a_plain_run_leaves_its_last_model(made: dict[str, Path]):
    assert [path.stem for path in made["plain"].glob("*.safetensors")] == ["model"]
    assert not (made["plain"] / "best").exists()
    with closing(Simulation(config(QUICK).plan())) as simulation:
        assert [*simulation.rounds()]
        assert same(load_file(made["plain"] / "model.safetensors"), simulation.server.state)


@pytest.mark.parametrize("name", ["chosen", "normed"])
def test_each_is_the_model_of_its_round(made: dict[str, Path], name: str):
    states = states_after({"chosen": CHOSEN, "normed": NORMED}[name])
    folder = made[name]
    assert sorted(path.stem for path in folder.glob("*.safetensors")) == MODELS
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for which, prefix in (("best", ""), ("best_averaged", "averaged_")):
        scores = [record[f"{prefix}validation_accuracy"] for record in records]
        t = scores.index(max(scores))  # the first of equals
        assert summary[f"best_{prefix}round"] == t
        assert summary[f"best_{prefix}validation_accuracy"] == max(scores)
        wanted = states[t]["averaged" if prefix else "model"]
        assert same(load_file(folder / f"{which}.safetensors"), wanted)
    assert same(load_file(folder / "model.safetensors"), states[-1]["model"])
    assert same(load_file(folder / "averaged.safetensors"), states[-1]["averaged"])


def test_plain_pytorch_takes_parameters_and_buffers(made: dict[str, Path]):
    model = config(NORMED).sections["model"].build()
    before = model.norm.running_mean.clone()
    for which in MODELS:
        model.load_state_dict(load_file(made["normed"] / f"{which}.safetensors"))
    assert not torch.equal(model.norm.running_mean, before)


def test_a_tied_parameter_is_there_under_each_of_its_names(tmp_path: Path):
    tied = {**QUICK, "model.name": f"{__name__}:Tied", "rounds": 3}
    tied.pop("model.features")
    run = execute("digits", config(tied), out=tmp_path / "run")
    Tied().load_state_dict(load_file(run.folder / "model.safetensors"))
    (run.folder / "model.safetensors").rename(tmp_path / "kept.safetensors")
    export(run, tmp_path / "mine.safetensors")  # of a checkpoint, where it is there once
    ours, theirs = (load_file(tmp_path / f"{n}.safetensors") for n in ("mine", "kept"))
    assert same(ours, theirs)
    Tied().load_state_dict(ours)


def test_the_header_says_which_round_of_which_run(made: dict[str, Path]):
    with safe_open(made["chosen"] / "best.safetensors", "pt") as file:
        meta = json.loads(file.metadata()["fedglad"])
    summary = json.loads((made["chosen"] / "summary.json").read_text())
    done, run = summary["best_round"] + 1, config(CHOSEN).hash()
    assert meta == {"version": 1, "which": "best", "round": done, "run": run}


def test_the_first_of_equals_stays_and_rounds_without_a_test_do_not_count(tmp_path: Path):
    server, best = Server({"w": torch.zeros(1)}), Best(tmp_path, "run")
    for t, accuracy in enumerate([None, 0.5, 0.25, 0.5, None, 0.75, 0.75]):
        server.step([{"w": torch.tensor([-1.0])}])  # θ counts the rounds
        best.look(Round(t, (), Record("stepped"), validation_accuracy=accuracy), server)
        if t == 4:
            assert best.kept["best"].state["w"] == 2
    assert best.kept["best"].state["w"] == best.kept["best"].done == 6
    assert [*best.kept] == ["best"]


def test_an_average_that_is_not_tested_is_kept_without_a_best(tmp_path: Path):
    settings = {**CHOSEN, "average.test": False, "rounds": 2}
    run = execute("digits", config(settings), out=tmp_path / "run")
    there = {path.stem for path in run.folder.glob("*.safetensors")}
    assert there == {"model", "averaged", "best"}


def test_the_memory_of_one_tensor_is_written_once_for_every_name():
    w = torch.arange(6.0).view(2, 3)
    written = apart({"a": w, "b": w, "c": w.t(), "d": torch.ones(0)})
    assert len({t.data_ptr() for t in written.values()}) == 4
    assert torch.equal(written["c"], w.t())
    assert written["c"].is_contiguous()


# ------------------------------------------------------------------- killed, resumed, same bytes


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_every_engine_leaves_the_same_files(made: dict[str, Path], tmp_path: Path, engine: str):
    settings = {**NORMED, "engine.name": engine}
    run = execute("digits", config(settings), out=tmp_path / "run")
    if engine == "local":
        assert outcome(run.folder) == outcome(made["normed"])
    assert sorted(path.stem for path in run.folder.glob("*.safetensors")) == MODELS


@pytest.mark.parametrize("after", range(7))
def test_a_run_killed_after_any_round_ends_with_the_same_files(
    made: dict[str, Path], tmp_path: Path, after: int
):
    settings = config({**NORMED, "engine.name": "local", "engine.workers": 2})
    stopped(tmp_path / "run", after, settings)
    execute("digits", settings, out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(made["normed"])
    assert check(tmp_path / "run").good


@pytest.mark.parametrize("part", range(3))
def test_a_crash_at_any_change_of_the_disk_ends_with_the_same_files(
    made: dict[str, Path], tmp_path: Path, part: int
):
    at, reached = 1 + part, True
    while reached:
        folder = tmp_path / str(at)
        if (child := os.fork()) == 0:
            with Trap(at, lambda: os._exit(9)):
                execute("digits", config(FEW), out=folder)
            os._exit(0)
        reached = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        lost: list[str] = []
        execute("digits", config(FEW), out=folder, resume=True, on_lost=lost.append)
        assert outcome(folder) == outcome(made["few"]), f"after a crash at change {at}"
        assert check(folder).good
        assert {path.name for path in (folder / "best").iterdir()} == needed(folder)
        assert not lost
        at += 3
    assert at > 45


@pytest.mark.parametrize("how", ["lost", "damaged", "swapped"])
def test_without_its_best_model_a_checkpoint_is_not_used(
    copy: Callable[[str], Path], made: dict[str, Path], how: str
):
    folder = copy("cut")
    # The accuracy rises from the first checkpoint to the second, so each needs another model.
    first, second = sorted((folder / "best").glob("best-*.safetensors"))
    if how == "lost":
        second.unlink()
    elif how == "damaged":
        second.write_bytes(second.read_bytes()[:-1] + b"!")
    else:
        shutil.copy(first, second)
    (bad,) = [file for file in check(folder).files if file.state in ("damaged", "missing")]
    assert bad.name == f"best/{second.name}"
    lost: list[str] = []
    execute("digits", config(CHOSEN), out=folder, resume=True, on_lost=lost.append)
    assert "checkpoint 000004.json is not usable" in lost[0]
    assert lost[1] == "going on after round 2"
    assert outcome(folder) == outcome(made["chosen"])


def test_what_no_checkpoint_needs_is_removed(made: dict[str, Path]):
    assert {path.name for path in (made["chosen"] / "best").iterdir()} == needed(made["chosen"])


def test_a_lost_summary_is_written_anew_with_the_same_models(
    copy: Callable[[str], Path], made: dict[str, Path]
):
    folder = copy("chosen")
    (folder / "summary.json").unlink()
    (folder / "best.safetensors").unlink()
    execute("digits", config(CHOSEN), out=folder, resume=True)
    assert outcome(folder) == outcome(made["chosen"])


def test_force_clears_them(copy: Callable[[str], Path]):
    folder = copy("chosen")
    execute("digits", config({**QUICK, "rounds": 1}), out=folder, force=True)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not (folder / "best").exists()


# ---------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("name", ["plain", "chosen", "cut"])
def test_a_run_that_nobody_touched_is_good(made: dict[str, Path], name: str):
    assert {file.state for file in check(made[name]).files} == {"good"}
    found = [file.name for file in check(made[name]).files]
    assert len(found) == len({*found})
    there = {str(p.relative_to(made[name])) for p in made[name].rglob("*.safetensors")}
    assert there <= {*found}


@pytest.mark.parametrize("which", MODELS)
def test_a_lost_a_damaged_and_another_model_are_named(copy: Callable[[str], Path], which: str):
    folder = copy("chosen")
    path = folder / f"{which}.safetensors"
    data = path.read_bytes()
    other = folder / ("model.safetensors" if which != "model" else "best.safetensors")

    def wrong() -> list[tuple[str, str, str]]:
        files = [(f.name, f.state, f.detail) for f in check(folder).files if f.state != "good"]
        assert call("check", folder).exit_code == bool(files)
        return files

    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert wrong() == [(path.name, "damaged", "its checksum does not match")]
    path.write_bytes(other.read_bytes())
    assert wrong() == [(path.name, "damaged", "it is not that of summary.json")]
    path.unlink()
    assert wrong() == [(path.name, "missing", "summary.json names it")]


def test_a_finished_run_from_before_is_fine_and_said_to_be(copy: Callable[[str], Path]):
    folder = copy("plain")
    (folder / "model.safetensors").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["models"], summary["crc"]
    (folder / "summary.json").write_text(json.dumps(summary))
    found = {file.name: (file.state, file.detail) for file in check(folder).files}
    said = "it names no model: fedglad export takes a checkpoint's"
    assert found["summary.json"] == ("no checksum", said)
    assert check(folder).good


@pytest.mark.parametrize("models", [[], 3, {"../x": "1"}, {"model.safetensors": 1}, "ab"])
def test_models_that_cannot_be_are_damage_of_the_summary(copy: Callable[[str], Path], models: Any):
    folder = copy("plain")
    summary = json.loads((folder / "summary.json").read_text())
    del summary["crc"]
    (folder / "summary.json").write_text(json.dumps({**summary, "models": models}))
    (file,) = [file for file in check(folder).files if file.name == "summary.json"]
    assert file.state == ("no checksum" if models == [] else "damaged")


@pytest.mark.parametrize("best", [3, {"best": 3}, {"../x": [1, "2"]}, {"best": [0, "2"]}, [1]])
def test_best_models_that_cannot_be_are_damage_of_the_checkpoint(
    copy: Callable[[str], Path], best: Any
):
    folder = copy("cut")
    path = folder / "checkpoints" / "000004.json"
    saved = json.loads(path.read_text())
    del saved["crc"]
    path.write_text(json.dumps({**saved, "best": best}))
    states = [f.state for f in check(folder).files if f.name == "checkpoints/000004.json"]
    assert "damaged" in states
    lost: list[str] = []
    execute("digits", config(CHOSEN), out=folder, resume=True, on_lost=lost.append)
    assert "checkpoint 000004.json is not usable" in lost[0]


# --------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("kind", [".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize("which", MODELS)
def test_a_finished_run_gives_each_of_its_models(
    made: dict[str, Path], tmp_path: Path, which: str, kind: str
):
    to = tmp_path / f"mine{kind}"
    options = [f"--{part}" for part in which.split("_") if part != "model"]
    said = call("export", made["chosen"], "--to", to, *options)
    assert said.exit_code == 0, said.output
    source = made["chosen"] / f"{which}.safetensors"
    meta = checkpoint.read(source)[1]
    assert f"after round {meta['round']}, from {source}" in said.stdout.replace("\n", "")
    state = load_file(to) if kind == ".safetensors" else torch.load(to, weights_only=True)
    assert same(state, load_file(source))
    if kind == ".safetensors":
        assert to.read_bytes() == source.read_bytes()


def test_an_unfinished_run_gives_those_of_its_last_checkpoint(
    made: dict[str, Path], tmp_path: Path
):
    states = states_after(CHOSEN)
    for averaged in (False, True):
        done = export(made["cut"], tmp_path / f"{averaged}.pt", averaged=averaged)
        assert (done.round, done.source.name) == (4, "000004.safetensors")
        wanted = states[3]["averaged" if averaged else "model"]
        assert same(torch.load(done.path, weights_only=True), wanted)
    best = export(str(made["cut"]), tmp_path / "best.pt", best=True)
    records = (made["cut"] / "rounds.jsonl").read_text().splitlines()[:4]
    scores = [json.loads(line)["validation_accuracy"] for line in records]
    assert best.round == scores.index(max(scores)) + 1
    assert same(torch.load(best.path, weights_only=True), states[best.round - 1]["model"])
    assert best.words == f"the best model after round {best.round}"


def test_of_damaged_checkpoints_the_one_before_is_taken(
    copy: Callable[[str], Path], tmp_path: Path
):
    folder = copy("cut")
    (folder / "checkpoints" / "000004.safetensors").write_bytes(b"")
    assert export(folder, tmp_path / "a.pt").round == 2
    (folder / "checkpoints" / "000002.json").write_text("{}")
    with pytest.raises(RunError, match="has no checkpoint that can be read: 000004"):
        export(folder, tmp_path / "b.pt")


def test_parameters_of_a_checkpoint_have_their_dtype_and_skipped_rounds_count(tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("rounds = 9")
    model = {"a": torch.full((3,), 0.3, dtype=torch.bfloat16), "b": torch.ones(2)}
    server = Server({**model, "n": torch.tensor(4)}, average=EMA())
    server.step([{"a": torch.full((3,), 1e-3), "b": torch.ones(2)}])
    path = tmp_path / "run" / "checkpoints" / "000003.json"
    server.save(path.with_suffix(".safetensors"))
    path.write_text('{"round": 3}')  # two of which were skipped
    for averaged, wanted in ((False, server.state), (True, server.averaged)):
        done = export(tmp_path / "run", tmp_path / "mine.pt", averaged=averaged, force=True)
        found = torch.load(done.path, weights_only=True)
        assert done.round == 3
        assert same(found, wanted)
        dtypes = [t.dtype for t in found.values()]
        assert dtypes == [torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", {"averaged": True}, "keeps no average of its models: only average.name = ema"),
        ("plain", {"best": True}, "has no best model: it is kept by runs with a validation set"),
        ("plain", {"best": True, "averaged": True}, "has no best average: .*average is tested"),
    ],
)
def test_what_a_run_does_not_have_is_refused(
    made: dict[str, Path], tmp_path: Path, name: str, options: dict[str, bool], message: str
):
    with pytest.raises(RunError, match=message):
        export(made[name], tmp_path / "mine.pt", **options)
    assert not [*tmp_path.iterdir()]


def test_mistakes_in_the_call_are_one_line(made: dict[str, Path], tmp_path: Path):
    there = tmp_path / "there.pt"
    there.write_text("mine")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.toml").write_text("rounds = 3")
    plain, new = made["plain"], tmp_path / "new.pt"
    for run, to, message in [
        (plain, there, "is there already: choose another name, or replace it with --force"),
        (plain, tmp_path / "folder.pt", "is a folder: name a file"),
        (plain, tmp_path / "model.bin", "end it in .safetensors, .pt, .pth"),
        (plain, tmp_path / "nowhere" / "x.pt", "there is no folder"),
        (tmp_path / "nowhere", new, "there is no folder"),
        (tmp_path / "empty", new, "is not a run: it has no config.toml"),
        (begun, new, "has no checkpoint"),
    ]:
        with pytest.raises(RunError) as raised:
            export(run, to)
        assert message in str(raised.value)
        said = call("export", run, "--to", to)
        assert said.exit_code == 2
        assert "Traceback" not in said.output
    assert there.read_text() == "mine"
    assert not new.exists()
    assert call("export", plain, "--to", there, "--force").exit_code == 0
    assert torch.load(there, weights_only=True)


def test_a_damaged_model_is_named_and_the_checkpoint_can_be_had(
    copy: Callable[[str], Path], tmp_path: Path
):
    folder = copy("chosen")
    for which in ("model", "best"):
        path = folder / f"{which}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(RunError, match=f"{which}.safetensors is damaged: .*remove it, and"):
            export(folder, tmp_path / "a.pt", best=which == "best")
        path.unlink()
        done = export(folder, tmp_path / "a.pt", best=which == "best")
        done.path.unlink()


def test_the_settings_of_a_run_are_not_loaded_for_it(copy: Callable[[str], Path], tmp_path: Path):
    folder = copy("cut")
    text = (folder / "config.toml").read_text().replace('name = "softmax"', 'name = "evil:Code"')
    (folder / "config.toml").write_text(text)
    assert export(folder, tmp_path / "a.pt").round == 4


def test_a_disk_that_is_full_is_said(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"mine.pt could not be written: .*No space left"):
        export(made["plain"], tmp_path / "mine.pt")
    assert not [*tmp_path.iterdir()]


def test_a_state_is_the_same_bytes_whenever_it_is_written(tmp_path: Path):
    tensors = {"b": torch.ones(3), "ä": torch.zeros(2)}
    meta = {"round": 1, "name": "ü\n\x7f", "numbers": [1e-7, 3]}
    for k in range(8):
        checkpoint.write(tmp_path / str(k), tensors, meta)
        assert checkpoint.read(tmp_path / str(k))[1] == meta
    assert len({(tmp_path / str(k)).read_bytes() for k in range(8)}) == 1


def test_hashes_of_runs_without_validation_are_as_before():
    chosen = config(CHOSEN)
    data = replace(chosen.sections["data"], validation=0.0)
    without = {k: v for k, v in CHOSEN.items() if k != "data.validation"}
    assert (
        replace(chosen, sections={**chosen.sections, "data": data}).hash() == config(without).hash()
    )
    assert chosen.hash() != config(without).hash()
