"""The models of a run tested again, and runs that begin with such models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import TINY
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.config import Config, ConfigError, load
from fedglad.models import REGISTRY
from fedglad.models.softmax import SoftmaxRegression
from fedglad.models.weights import checksum
from fedglad.runs import Run, RunError, evaluate, execute
from tests.runs.test_runs import stopped

QUICK: dict[str, Any] = {**TINY, "engine.name": "serial", "rounds": 3, "checkpoint_every": 2}
CHOSEN = {**QUICK, "data.validation": 0.2, "average.name": "ema", "client.lr": 0.5}


def config(settings: dict[str, Any], **more: Any) -> Config:
    return load("digits", {**settings, **{k.replace("__", "."): v for k, v in more.items()}})[1]


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    execute("digits", config(CHOSEN), out=folder / "run")
    stopped(folder / "cut", 2, config(CHOSEN, rounds=5))
    return folder


# -------------------------------------------------------------------------------------- evaluate


def test_every_model_has_the_scores_that_the_run_recorded(made: Path):
    found = {one.which: one for one in evaluate(made / "run").models}
    records = Run(made / "run").rounds()
    assert list(found) == ["model", "averaged", "best", "best_averaged"]
    for which, before in (("model", ""), ("averaged", "averaged_")):
        one, last = found[which], records[-1]
        assert one.round == 3
        assert one.test["accuracy"] == last[f"{before or 'test_'}accuracy"]
        assert one.test["loss"] == last[f"{before or 'test_'}loss"]
        assert one.validation
        assert one.validation["accuracy"] == last[f"{before}validation_accuracy"]
    best = found["best"]
    assert best.test["accuracy"] == records[best.round - 1]["test_accuracy"]


def test_other_data_by_a_key_or_by_a_preset(made: Path, tmp_path: Path):
    own = evaluate(made / "run")
    iid = evaluate(made / "run", overrides={"data.partition": "iid", "data.validation": 0.0})
    assert iid.models[0].test == own.models[0].test  # the test set is the same
    assert iid.models[0].validation is None
    (tmp_path / "other.toml").write_text('[data]\nname = "digits"\nvalidation = 0.5\n')
    other = evaluate(made / "run", data=tmp_path / "other.toml")
    assert other.models[0].validation != own.models[0].validation
    with pytest.raises(ValueError, match="cannot take the data's inputs"):
        evaluate(made / "run", data="synthetic")
    with pytest.raises(ConfigError, match="'rounds' cannot be set here"):
        evaluate(made / "run", overrides={"rounds": 3})


def test_a_run_that_is_not_finished_has_the_models_of_its_checkpoint(made: Path):
    found = {one.which: one.round for one in evaluate(made / "cut").models}
    assert found["model"] == found["averaged"] == 2


def test_the_command(made: Path, tmp_path: Path):
    before = sorted(made.rglob("*"))
    done = call("evaluate", made / "run")
    assert done.exit_code == 0, done.output
    assert f"{made / 'run'} on digits, 360 test samples" in done.output
    for words in ("model after round 3", "average after round 3", "on the validation set", "loss"):
        assert words in done.output
    told = json.loads(call("evaluate", made / "run", "--json").stdout)
    assert (
        told["models"]["model"]["test"]["accuracy"]
        == evaluate(made / "run").models[0].test["accuracy"]
    )
    assert sorted(made.rglob("*")) == before  # nothing is written
    assert call("evaluate", tmp_path).exit_code == 2
    wrong = call("evaluate", made / "run", "--set", "client.lr=1")
    assert wrong.exit_code == 2
    assert "'client.lr' cannot be set here" in wrong.output


def test_a_model_of_somebody_is_not_loaded_unasked(tmp_path: Path):
    settings = {**QUICK, "model.name": "run_support:Normed"}
    settings.pop("model.features")
    run = execute("digits", config(settings), out=tmp_path / "run").folder
    assert evaluate(run).models  # it was begun here
    (tmp_path / "run").rename(tmp_path / "theirs")
    with pytest.raises(RunError, match="--trust-code"):
        evaluate(tmp_path / "theirs")
    assert evaluate(tmp_path / "theirs", trust_code=True).models


# ------------------------------------------------------------------------------------ a warm start


def first_loss(settings: dict[str, Any], folder: Path, **more: Any) -> float:
    tiny = config(settings, **{"rounds": 1, "client.lr": 1e-12, **more})
    return execute("digits", tiny, out=folder).rounds()[0]["test_loss"]


@pytest.mark.parametrize("name", ["", "model.safetensors", "averaged.safetensors"])
def test_a_run_begins_with_the_weights(made: Path, tmp_path: Path, name: str):
    which = "averaged" if "averaged" in name else "model"
    wanted = {one.which: one for one in evaluate(made / "run").models}[which].test["loss"]
    given = {"model.weights": str(made / "run" / name), "adapter.name": "none"}
    assert first_loss(QUICK | given, tmp_path / "warm") == pytest.approx(wanted, abs=1e-6)
    assert first_loss(QUICK | {"adapter.name": "none"}, tmp_path / "cold") != pytest.approx(
        wanted, abs=1e-3
    )


def test_the_checksum_is_part_of_the_name_and_the_place_is_not(made: Path, tmp_path: Path):
    source = made / "run" / "model.safetensors"
    (tmp_path / "copy.safetensors").write_bytes(source.read_bytes())
    here, there = (
        config(QUICK, model__weights=str(path)) for path in (source, tmp_path / "copy.safetensors")
    )
    assert here.hash() == there.hash() != config(QUICK).hash()
    other = config(QUICK, model__weights=str(made / "run" / "averaged.safetensors"))
    assert other.hash() != here.hash()
    assert config(QUICK, model__weights="").hash() == config(QUICK).hash()
    run = execute("digits", there, out=tmp_path / "run")
    assert f'weights_checksum = "{checksum(source)}"' in (run.folder / "config.toml").read_text()
    (tmp_path / "copy.safetensors").unlink()
    assert load(run.folder / "config.toml")[1].hash() == here.hash()  # reading needs no file
    assert execute("digits", here, out=run.folder).summary  # finished already


def test_another_file_in_its_place_is_noticed(made: Path, tmp_path: Path):
    path = tmp_path / "w.safetensors"
    path.write_bytes((made / "run" / "model.safetensors").read_bytes())
    begun = config(QUICK, model__weights=str(path))
    path.write_bytes((made / "run" / "averaged.safetensors").read_bytes())
    with pytest.raises(ValueError, match="is another file than this run began with"):
        begun.plan()


def test_what_does_not_fit_is_one_sentence(made: Path, tmp_path: Path):
    weight, bias = torch.zeros(10, 64), torch.zeros(10)
    for tensors, wrong in {
        "lacks": ({"weight": weight}, "has no 'bias', which the model has: it has weight"),
        "more": (
            {"weight": weight, "bias": bias, "extra": bias.clone()},
            "has 'extra', which the model has not: that has weight, bias",
        ),
        "shape": (
            {"weight": weight, "bias": torch.zeros(3)},
            r"'bias' is of shape \(3,\), the model's is \(10,\)",
        ),
        "nan": (
            {"weight": weight, "bias": bias.log() * 0},
            "its 'bias' has numbers that are not finite",
        ),
    }.values():
        save_file(tensors, tmp_path / "w.safetensors")
        with pytest.raises(ValueError, match=wrong):
            config(QUICK, model__weights=str(tmp_path / "w.safetensors")).plan()
    (tmp_path / "w.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        config(QUICK, model__weights=str(tmp_path / "w.safetensors")).plan()
    for given, wrong in {
        str(tmp_path / "w.pt"): "give a .safetensors file",
        str(tmp_path / "none.safetensors"): "there is no such file",
        str(made / "cut"): "is no finished run",
    }.items():
        done = call("run", "digits", "--set", f"model.weights={given}", "--out", tmp_path / "run")
        assert done.exit_code == 2
        assert wrong in done.output
        assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["softmax", "mlp", "small-cnn", "cnn", "tiny-gpt", "char-lstm"])
def test_every_model_takes_the_key(name: str, tmp_path: Path):
    assert name in REGISTRY
    plain = Config.of({"model": {"name": name}})
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors")
    warm = Config.of({"model": {"name": name, "weights": str(tmp_path / "w.safetensors")}})
    assert warm.to_dict()["model"]["name"] == name
    assert warm.hash() != plain.hash()
    assert Config.of(warm.to_dict()).hash() == warm.hash()
    assert "# weights =" in plain.to_toml()


def own(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))


def test_so_do_own_functions_and_given_modules(tmp_path: Path):
    state = {name: value + 1 for name, value in own().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    given = {"model.name": f"{__name__}:own", "model.weights": str(tmp_path / "w.safetensors")}
    warm = config({"model.width": 4}, **{k.replace(".", "__"): v for k, v in given.items()})
    model = warm.plan().model
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    mine = SoftmaxRegression(features=64).build()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    save_file({name: value + 1 for name, value in before.items()}, tmp_path / "s.safetensors")
    plan = config(QUICK, model__weights=str(tmp_path / "s.safetensors")).plan(model=mine)
    assert all(torch.equal(plan.model.state_dict()[n], before[n] + 1) for n in before)
    assert all(torch.equal(mine.state_dict()[n], before[n]) for n in before)  # it is the user's
    assert load_file(tmp_path / "s.safetensors").keys() == before.keys()
