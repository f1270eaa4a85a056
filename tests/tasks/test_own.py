"""Own tasks: by name, as objects and as loss functions, and in every engine the same."""

import copy
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

from fedglad import simulate
from fedglad.config.schema import Config, ConfigError, Unloaded, load
from fedglad.data.federation import Partitioned
from fedglad.records import Round
from fedglad.runs import Run, execute
from fedglad.simulation.engines.samples import fetch
from fedglad.tasks import Classification
from fedglad.tasks.base import ByLoss, ByScores
from tasks.support import SETTINGS, SIZES, Doubled, Own, classes, drawn, numbers, one

QUICK = {**SETTINGS, "rounds": 2, "client.lr": 0.3, "sampler.clients_per_round": len(SIZES)}


def play(model: nn.Module, data: Any, task: Any, engine: str, **more: Any) -> list[Round]:
    given = {**QUICK, "engine.name": engine, **more}
    return list(simulate("digits", given, model=copy.deepcopy(model), data=data, task=task))


# ------------------------------------------------------------------------- the batched engine


@dataclass(frozen=True, kw_only=True)
class Focal(Classification):
    """Its loss is not that of the class that it derives from."""

    gamma: float = 2.0

    def loss_of(self, scores: Tensor, y: Tensor) -> Tensor:
        logs = log_softmax(scores, dim=1).gather(1, y.unsqueeze(1)).squeeze(1)
        return -((1 - logs.exp()) ** self.gamma * logs).mean()


@dataclass(frozen=True, kw_only=True)
class Penalised(Classification):
    """Its loss looks at more than scores."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = next(iter(model.parameters()))
        return super().loss(model, batch) + 0.5 * weight.square().sum()


def summed(scores: Tensor, y: Tensor) -> Tensor:
    """No mean: a batch of five counts less than one of eight."""
    return cross_entropy(scores, y, reduction="sum") / 8


def contrast(scores: Tensor, y: Tensor) -> Tensor:
    """Samples of a batch see each other."""
    return cross_entropy(scores, y) + (scores.mean(dim=0) ** 2).sum()


@pytest.mark.parametrize("task", [Focal(), Penalised(), summed, contrast, cross_entropy])
def test_what_an_own_task_says_is_what_is_trained(task: Any):
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    serial, batched = (play(model, classes(), task, name) for name in ("serial", "batched"))
    plain = play(model, classes(), None, "serial")
    for a, b in zip(serial, batched, strict=True):
        assert b.test_loss == pytest.approx(a.test_loss, rel=1e-4)
        losses = [[client["loss"] for client in found.record.clients] for found in (a, b)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    if task is not cross_entropy:
        first = [found[0].record.clients[0]["loss"] for found in (serial, plain)]
        assert first[0] != pytest.approx(first[1], rel=1e-3)


def test_only_losses_that_are_known_to_be_means_are_filled_up():
    assert ByLoss(cross_entropy).by_sample
    assert ByLoss(mse_loss).by_sample
    assert not ByLoss(summed).by_sample
    assert not ByLoss(nn.CrossEntropyLoss(reduction="sum")).by_sample
    assert not ByScores.by_sample


def test_a_module_of_torch_is_a_loss_function():
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    by_module = play(model, classes(), nn.CrossEntropyLoss(), "serial")
    by_default = play(model, classes(), None, "serial")
    assert [f.test_loss for f in by_module] == [f.test_loss for f in by_default]
    # A function has no accuracy to be judged by, but it counts it where there are labels.
    assert by_module[-1].score.name == "loss"
    assert by_module[-1].test_accuracy == by_default[-1].test_accuracy


@pytest.mark.parametrize("name", ["serial", "batched"])
def test_models_of_float64_are_trained_in_float64(name: str):
    torch.manual_seed(3)
    x, y = drawn(1, 40, 5).double(), drawn(2, 40).double()
    rows = np.split(np.arange(40), [9, 23])
    data = Partitioned(x, y, x[:9], y[:9], rows)
    model = nn.Linear(5, 1).double()
    given = {"task.name": "regression", "sampler.clients_per_round": 3, "client.lr": 0.01}
    found = play(model, data, None, name, **given)
    assert not any(f.record.rejected for f in found)
    again = play(model, data, None, "serial", **given)
    assert found[-1].test_loss == pytest.approx(again[-1].test_loss, rel=1e-12)
    where = fetch(data, [0, 1], torch.float64)
    assert all(not isinstance(part, Exception) and part[0] is x for part in where)  # no copies


# ------------------------------------------------------------------------------ by name, by object


MODULE = """
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch.nn.functional import mse_loss
from fedglad.tasks import Task

with Path({mark!r}).open("a") as file:
    file.write("loaded\\n")

@dataclass(frozen=True, kw_only=True)
class LM(Task):
    score = "error"
    times: Annotated[float, "what the model's outputs are multiplied by"] = 2.0

    def loss(self, model, batch):
        x, y = batch
        return mse_loss(self.times * model(x).squeeze(1), y)

    def metrics(self, model, batch):
        x, y = batch
        return {{"error": (float((self.times * model(x).squeeze(1) - y).abs().sum()), len(y))}}
"""

TOML = """
rounds = 2
[data]
name = "tasks.support:numbers"
[model]
name = "tasks.support:one"
[task]
name = "{module}:LM"
times = 2.0
[client]
lr = 0.1
[sampler]
clients_per_round = 3
[server]
name = "sgd"
[engine]
name = "serial"
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A user's module, whose name no other test has."""
    module = f"mine_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(MODULE.format(mark=str(tmp_path / "mark")))
    (tmp_path / "own.toml").write_text(TOML.format(module=module))
    monkeypatch.syspath_prepend(str(tmp_path))
    return module


def test_a_task_by_its_name_in_a_file(written: str, tmp_path: Path):
    _, config = load(tmp_path / "own.toml")
    assert config.to_dict()["task"] == {"name": f"{written}:LM", "times": 2.0}
    by_name = list(simulate(config))
    model = config.plan().model
    by_object = list(simulate(config, {"task.name": "regression"}, model=model, task=Doubled()))
    assert [f.test_loss for f in by_name] == [f.test_loss for f in by_object]
    assert by_name[-1].score.name == "error"
    assert by_name[-1].to_dict()["test_error"] == by_name[-1].scored()
    other = load(tmp_path / "own.toml", {"task.times": 3.0})[1]
    assert other.hash() != config.hash()
    assert list(simulate(other))[-1].test_loss != by_name[-1].test_loss
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load(tmp_path / "again.toml")[1].hash() == config.hash()
    with pytest.raises(ConfigError, match=r"did you mean 'task.times'"):
        load(tmp_path / "own.toml", {"task.time": 3.0})


def test_reading_somebodys_run_does_not_import_their_task(written: str, tmp_path: Path):
    execute("own", load(tmp_path / "own.toml")[1], out=tmp_path / "run")
    (tmp_path / "mark").unlink()
    del sys.modules[written]
    run = Run(tmp_path / "run")
    assert [found["score"]["name"] for found in run.rounds()] == ["error", "error"]
    assert all(math.isfinite(found["test_error"]) for found in run.rounds())
    known = ("tasks.support:numbers", "tasks.support:one")
    config = load(tmp_path / "run" / "config.toml", trust_code=known)[1]
    assert isinstance(config.sections["task"], Unloaded)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(ConfigError, match=r"task.name = .* so it was not loaded.*--trust-code"):
        Config.of(*config.__reduce__()[1]).plan()
    assert not (tmp_path / "mark").exists()
    assert load(tmp_path / "run" / "config.toml", trust_code=True)[1].plan().task
    assert (tmp_path / "mark").exists()


def test_a_loss_function_as_a_task():
    own = numbers()
    data = Own(own.x, own.targets.unsqueeze(1))
    torch.manual_seed(3)
    model = one()
    found = play(model, data, mse_loss, "serial")
    by_name = play(model, data, None, "serial", **{"task.name": "regression"})
    assert [f.test_loss for f in found] == [f.test_loss for f in by_name]
    assert found[-1].score.name == "loss"
    assert not found[-1].score.higher
