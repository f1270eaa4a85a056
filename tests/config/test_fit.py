"""A model that does not fit the data is refused before anything happens."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from run_support import Normed, tiny_data
from torch import Tensor, nn
from torch.nn.functional import dropout

from fedglad.config.schema import ConfigError, load, simulate
from fedglad.config.trial import check
from fedglad.data.digits import Digits
from fedglad.runs import execute


def refusal(overrides: dict[str, Any], **own: Any) -> str:
    with pytest.raises(ValueError, match="model") as error:
        load("digits", overrides)[1].plan(**own)
    assert not isinstance(error.value, ConfigError)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"model.name": "mlp"},
            "model mlp cannot take the data's inputs of shape (1, 8, 8): mat1 and mat2 shapes "
            "cannot be multiplied (1x64 and 784x200); set model.features=64",
        ),
        ({"model.name": "cnn"}, "(1x256 and 9216x128); set model.size=8"),
        ({"model.channels": 3}, "but got 1 channels instead; set model.channels=1"),
        (
            {"model.name": "cnn", "model.channels": 3},
            "; set model.channels=1, model.size=8",
        ),
        (
            {"model.classes": 5},
            "model small-cnn gives scores of shape (1, 5) for one input: 10 classes need (1, 10); "
            "set model.classes=10",
        ),
        (
            {"data.name": "synthetic"},
            "model small-cnn cannot take the data's inputs of shape (60,): ValueError: not enough "
            "values to unpack (expected 4, got 2); choose another model  (fedglad list models)",
        ),
        (
            {"data.name": "synthetic", "data.classes": 12, "model.name": "softmax"},
            "12 classes need (1, 12); set model.classes=12",
        ),
        (
            {"data.name": "synthetic", "data.features": 7, "data.classes": 12, "model.name": "mlp"},
            "; set model.features=7, model.classes=12",
        ),
    ],
)
def test_a_model_of_the_registry_is_refused_with_what_to_set(overrides: dict[str, Any], said: str):
    assert said in refusal(overrides)


@pytest.mark.parametrize("overrides", [{"model.name": "mlp"}, {"model.classes": 5}])
def test_what_is_said_to_set_helps(overrides: dict[str, Any]):
    key, _, value = refusal(overrides).rpartition("; set ")[2].partition("=")
    assert load("digits", {**overrides, key: int(value)})[1].plan()


class Odd(nn.Module):
    """Gives whatever it is told to."""

    def __init__(self, gives: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 10)
        self.gives = gives

    def forward(self, x: Tensor) -> Any:
        return self.gives(self.dense(x.flatten(1)))


def broken(scores: Tensor) -> Any:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (broken, "cannot take the data's inputs of shape (1, 8, 8): KeyError: 'no such layer'"),
        (lambda scores: (scores, 0), "gives a tuple, not a tensor of scores"),
        (lambda scores: scores[:, :9], "gives scores of shape (1, 9) for one input: 10 classes"),
        (lambda scores: scores[0], "gives scores of shape (10,) for one input"),
        (lambda scores: scores[..., None], "gives scores of shape (1, 10, 1) for one input"),
    ],
)
def test_an_own_model_is_refused_without_advice(gives: Any, said: str):
    found = refusal({}, model=Odd(gives))
    assert found.startswith(f"model Odd {said}")
    assert ";" not in found


def test_simulate_refuses_own_objects_before_the_first_round():
    with pytest.raises(ValueError, match=r"model Linear cannot take .* \(1, 8, 8\)"):
        next(simulate("digits", model=nn.Linear(9, 10)))
    with pytest.raises(ValueError, match=r"model small-cnn cannot take .* \(64,\)"):
        next(simulate("digits", data=tiny_data(5, 5, 5, 5, 5)))
    model = nn.Linear(64, 10)
    assert next(simulate("digits", {"rounds": 1}, model=model, data=tiny_data(5, 5, 5, 5, 5)))


def test_a_label_that_only_clients_have_counts():
    data = tiny_data(5, 5, 5, 5, 5)
    data.test_y = data.test_y.clamp(max=3)
    assert "10 classes need" in refusal({}, model=nn.Linear(64, 9), data=data)


@pytest.mark.parametrize("shape", [(20,), (20, 3)])
def test_targets_that_are_no_labels_are_refused(shape: tuple[int, ...]):
    data = tiny_data(5, 5, 5, 5, 5)
    data.test_y = torch.rand(shape)
    with pytest.raises(ValueError, match=r"float32, no labels: for numbers set task.name=regres"):
        load("digits")[1].plan(model=nn.Linear(64, 10), data=data)


def test_an_empty_test_set_is_said():
    data = tiny_data(5, 5)
    data.test_x, data.test_y = data.test_x[:0], data.test_y[:0]
    with pytest.raises(ValueError, match="the data's test set is empty"):
        load("digits")[1].plan(model=nn.Linear(64, 10), data=data)


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_written(tmp_path: Path, force: bool):
    with pytest.raises(ValueError, match="model mlp cannot take"):
        execute("d", load("digits", {"model.name": "mlp"})[1], out=tmp_path / "run", force=force)
    assert list(tmp_path.iterdir()) == []


class Drawing(Normed):
    """Draws even in eval mode, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return dropout(super().forward(x), 0.5, training=True)


def test_trying_leaves_no_trace():
    data = Digits().load_federation()
    model = Drawing().train()
    model.norm.eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    threads = torch.get_num_threads()
    assert load("digits")[1].plan(model=model, data=data).model is model
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]  # noqa: NPY002
    assert torch.get_num_threads() == threads
    assert [m.training for m in (model, model.norm, model.conv)] == [True, False, True]
    assert model.conv.weight.grad.equal(torch.ones_like(model.conv.weight))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_trying_takes_no_time():
    config = load("digits", {"model.name": "cnn", "model.size": 8})[1]
    data = Digits().load_federation()
    config.plan(data=data)
    begin = time.perf_counter()
    for _ in range(10):
        config.plan(data=data)
    assert time.perf_counter() - begin < 2.0  # building the model included


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x.long(), torch.zeros(5, 2)).mean(1)


@dataclass(frozen=True)
class Reader:
    """A model of texts that knows five ids."""

    classes: int = 2
    reads: ClassVar[dict[str, str]] = {"tokenizer": "its-own"}

    def build(self) -> nn.Module:
        return Reads()


def test_ids_that_a_model_does_not_know_are_a_matter_of_the_tokenizer():
    x, y = torch.tensor([[1, 2], [3, 9]]), torch.tensor([0, 1])
    data: Any = SimpleNamespace(clients=1, size=len, client=None, test=lambda: (x, y))
    with pytest.raises(ValueError, match=r"set data.tokenizer=its-own, whose ids it knows, or a"):
        check(Reads(), data, "reader", Reader())
