"""What new users give by mistake: one line before the run, or it simply works."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, cli
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from fedglad import simulate
from fedglad.cli import app
from fedglad.data.federation import Partitioned
from fedglad.records import Round
from fedglad.runs import Run
from fedglad.runs.summary import summarise
from fedglad.tasks import CausalLM, Regression, Task
from tasks.support import (
    SETTINGS,
    SIZES,
    Characters,
    N,
    Own,
    Two,
    characters,
    classes,
    drawn,
    numbers,
    pairs,
    pixels,
    several,
)

QUICK = {**SETTINGS, "rounds": 2, "client.lr": 0.5, "sampler.clients_per_round": len(SIZES)}


def play(
    model: nn.Module | None = None, data: Any = None, task: Any = None, **more: Any
) -> list[Round]:
    given = {**QUICK, **{key.replace("__", "."): value for key, value in more.items()}}
    torch.manual_seed(1)
    return list(
        simulate("digits", given, model=model or nn.Linear(5, 3), data=data or classes(), task=task)
    )


def refusal(*args: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        play(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(rows: Any, value: Any, of: str = "x") -> Own:
    own = classes()
    held = (own.x if of == "x" else own.targets).clone()
    held[rows] = value
    return Own(held, own.targets) if of == "x" else Own(own.x, held)


# ---------------------------------------------------------------------------- what simply works


def twins() -> dict[str, Own]:
    own = classes()
    x, y = own.x, own.targets
    kinds = (torch.int32, torch.int16, torch.int8, torch.uint8)
    return {
        **{f"{kind} labels": Own(x, y.to(kind)) for kind in kinds},
        "uint16 labels": Own(x, y.numpy().astype(np.uint16)),
        "float64 inputs": Own(x.double(), y),
        "NumPy arrays": Own(x.numpy(), y.numpy()),
        "float64 NumPy arrays": Own(x.numpy().astype(np.float64), y.numpy()),
    }


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_types_that_users_have_train_as_those_of_torch(engine: str):
    wanted = play(engine__name=engine)[-1].test_loss
    for name, data in twins().items():
        assert play(data=data, engine__name=engine)[-1].test_loss == wanted, name
    two = Two()
    with torch.no_grad():  # the same model, of two inputs
        torch.manual_seed(1)
        line = nn.Linear(5, 3)
        two.dense.load_state_dict(line.state_dict())
    found = play(two, pairs(), engine__name=engine)[-1].test_loss
    assert found == pytest.approx(play(line, engine__name=engine)[-1].test_loss, rel=1e-5)


def test_a_label_that_does_not_count_is_left_out():
    own = changed([2, 30], -100, of="y")
    rows = [np.arange(s.start, s.stop) for s in own.parts]
    x, y = own.test()
    data = Partitioned(own.x, own.targets, x, y, rows)
    serial, batched = (play(data=data, engine__name=name) for name in ("serial", "batched"))
    assert serial[-1].test_loss == pytest.approx(batched[-1].test_loss, rel=1e-4)
    assert not serial[-1].record.rejected
    counts = data.labels(0)
    assert counts is not None
    assert counts.sum() == SIZES[0] - 1


# ---------------------------------------------------------------------------- what is refused


def vector(scores: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(scores, y, reduction="none")


def number(scores: Tensor, y: Tensor) -> Any:
    return 1.0


class Counted(Task):
    score = "accuracy"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": (int((model(batch[0]).argmax(dim=1) == batch[1]).sum()), len(batch[1]))}


class Percent(Counted):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        (right, n) = super().metrics(model, batch)["accuracy"]
        return {"accuracy": (100 * right, n)}


class Elsewhere(Counted):
    score = "kappa"


class Plain(Counted):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": 0.5}


class Forgets(Counted):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return None


class LossAlone(Task):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])


class NoTask:
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {}


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("there is no derivative")


class Underivable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Backward.apply(super().forward(x))  # pyright: ignore


class Short(Own):
    def client(self, k: int) -> tuple[Any, Any]:
        x, y = super().client(k)
        return x, y[:-1]


def unpartitioned(indices: list[np.ndarray]) -> str:
    with pytest.raises(ValueError, match="client") as caught:
        Partitioned(*classes().test(), *classes().test(), indices)
    return str(caught.value)


class Chosen(Own):
    def validation_set(self) -> tuple[Any, Any]:
        return self.x[:3], [0, 7, 1]


class Nobody(Own):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x, y)
        self.clients = 0


def refused(*args: Any, **more: Any) -> Callable[[], str]:
    return lambda: refusal(*args, **more)


def own(x: Any = None, y: Any = None) -> Own:
    return Own(classes().x if x is None else x, y)


def parts(y: Tensor) -> Partitioned:
    x = classes().x
    return Partitioned(x, y, x[:9], classes().targets[:9], [np.arange(20), np.arange(20, 50)])


MISTAKES: dict[str, tuple[Callable[[], str], str]] = {
    "characters as classes": (
        refused(Characters(), characters()),
        "client 0: each sample has a sequence of 6 targets: set task.name=next-token",
    ),
    "numbers (n, 1) as classes": (
        refused(nn.Linear(5, 1), own(y=drawn(2, N, 1))),
        "the targets are float32, no labels: for numbers set task.name=regression",
    ),
    "numbers (n,) as classes": (
        refused(nn.Linear(5, 1), own(y=drawn(2, N))),
        "the targets are float32, no labels: for numbers set task.name=regression",
    ),
    "several labels as classes": (
        refused(data=several()),
        "each sample has 3 targets: for several labels set task.name=multilabel",
    ),
    "pixels as classes": (
        refused(nn.Conv2d(1, 3, 1), pixels()),
        "each sample has (4, 4) targets: for labelled pixels set task.name=segmentation",
    ),
    "bool labels": (
        refused(data=own(y=classes().targets > 0)),
        "the targets are bool: give whole numbers, y.long()",
    ),
    "classes as several labels": (
        refused(task__name="multilabel"),
        "for one label of several set task.name=classification",
    ),
    "classes as characters": (
        refused(task__name="next-token"),
        "for one label a sample set task.name=classification",
    ),
    "classes as pixels": (
        refused(task__name="segmentation"),
        "a label for each pixel, (height, width) whole numbers, is needed",
    ),
    "three numbers for one": (
        refused(data=numbers(), task__name="regression"),
        "the model gives (3,) numbers a sample, but a sample has targets of shape ()",
    ),
    "numbers that are not there": (
        refused(
            nn.Linear(5, 1),
            own(y=torch.where(torch.arange(N) % 7 == 0, math.nan, 1.0)),
            task=Regression(),
        ),
        "there are NaN or infinite numbers among the targets",
    ),
    "a mask as several labels": (
        refused(data=own(y=several().targets * 2), task__name="multilabel"),
        "a target is 2: each is 0 or 1; for numbers set task.name=regression",
    ),
    "pixels without their ignored label": (
        refused(nn.Conv2d(1, 3, 1), pixels(), task__name="segmentation"),
        "a label is 255, but the model has scores for 0 … 2: if such pixels do not count, set "
        "task.ignore=255",
    ),
    "a token beyond the vocabulary": (
        refused(Characters(), Own(characters().x, characters().x + 3), task__name="next-token"),
        "but the model has scores for 0 … 5",
    ),
    "an id beyond the vocabulary": (
        refused(Characters(), Own(characters().x + 3, None), task__name="causal-lm"),
        "index out of range in self; the largest id among the inputs is 8",
    ),
    "no targets": (
        refused(data=own()),
        "there are no targets: a language model's inputs alone are task.name=causal-lm",
    ),
    "targets in a dict": (
        refused(data=own(y={"label": classes().targets})),
        "the targets are a dict, but this task takes one tensor",
    ),
    "no language model": (
        refused(data=own(), task__name="causal-lm"),
        "the model gives scores of shape (8, 3) for tokens of shape (8, 5): (samples, length, voc",
    ),
    "a loader": (
        refused(data=DataLoader(TensorDataset(classes().x, classes().targets))),
        "the data is a DataLoader without clients, size, client, test: it needs clients, size(k), "
        "client(k) -> (x, y) and test() -> (x, y). fedglad.data.from_datasets makes one",
    ),
    "no clients": (refused(data=Nobody(classes().x, classes().targets)), "has no clients"),
    "only an empty client": (
        refused(data=Own(classes().x, classes().targets, (0,))),
        "client 0: the client has no samples",
    ),
    "label -1 of a client": (
        refused(data=parts(changed(3, -1, of="y").targets)),
        "the samples of all clients: a label is -1: labels are 0 … C − 1, and −100 where",
    ),
    "label -1 of the test set": (
        refused(data=changed(-1, -1, of="y")),
        "the samples of the test set: a label is -1",
    ),
    "a label beyond the classes": (
        refused(data=changed(-1, 3, of="y")),
        "gives scores of shape (1, 3) for one input: 4 classes need (1, 4)",
    ),
    "a label of the validation set": (
        refused(data=Chosen(classes().x, classes().targets)),
        "the samples of the validation set: a label is 7, but the model has scores for 0 … 2",
    ),
    "NaN everywhere": (
        refused(data=changed(slice(None), math.nan)),
        "client 0: there are NaN or infinite numbers among the inputs",
    ),
    "NaN of all clients": (
        refused(data=changed(slice(sum(SIZES)), math.nan)),
        "client 0: there are NaN or infinite numbers among the inputs",
    ),
    "NaN in the test set": (
        refused(data=changed(-1, math.inf)),
        "the test set has NaN or infinite numbers in 1 of its 40 inputs, first in sample 39",
    ),
    "fewer targets than inputs": (
        refused(data=Short(classes().x, classes().targets)),
        "the client has 9 inputs for 8 targets",
    ),
    "an empty client of Partitioned": (
        lambda: unpartitioned([np.arange(0)]),
        "client 0 has no samples: leave it out",
    ),
    "a model without parameters": (refused(nn.Identity()), "Identity has no parameters"),
    "a frozen model": (
        refused(nn.Linear(5, 3).requires_grad_(False)),
        "its loss does not depend on the model's parameters",
    ),
    "a model that gives a pair": (
        refused(nn.LSTM(5, 3)),
        "gives a tuple, not a tensor of scores",
    ),
    "a model that cannot be derived": (refused(Underivable(5, 3)), "there is no derivative"),
    "a loss for each sample": (
        refused(task=vector),
        "task vector cannot be trained with the samples of client 0: its loss is of shape (8,)",
    ),
    "a loss that is a number": (refused(task=number), "its loss is 1.0, a float and not a tensor"),
    "a percentage": (refused(task=Percent()), "by its name it is a share of one"),
    "a score that is not there": (
        refused(task=Elsewhere()),
        "its score is 'kappa', which is not among its metrics: loss, accuracy",
    ),
    "a metric without a count": (
        refused(task=Plain()),
        "its metric 'accuracy' is 0.5: a sum and a count are needed",
    ),
    "metrics without a return": (refused(task=Forgets()), "its metrics are None: a dict"),
    "a task without metrics": (refused(task=LossAlone()), "is a LossAlone without metrics"),
    "a task without a loss": (refused(task=NoTask()), "is a NoTask without loss"),
    "a class for a task": (refused(task=Counted), "the class Counted: give an object"),
    "a name for a task": (refused(task="regression"), "with the key task.name"),
    "a number for a task": (refused(task=3), "the task is a int without loss and metrics"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_in_one_line_before_the_run(name: str):
    make, said = MISTAKES[name]
    assert said in make()


# ---------------------------------------------------------- what is left out, and the run goes on


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("empty", [0, 2])
def test_an_empty_client_is_left_out_with_its_reason(engine: str, empty: int):
    sizes = [9, 20, 9, 14]
    sizes[empty] = 0
    data = Own(classes().x, classes().targets, sizes)
    for found in play(data=data, engine__name=engine, sampler__clients_per_round=4):
        assert found.record.stepped
        assert found.record.rejected == {empty: "ValueError: the client has no samples"}


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: changed(3, math.nan), "holds NaN or inf"),
        (lambda: changed(3, -1, of="y"), ""),
        (lambda: changed(3, 3, of="y"), ""),
    ],
)
def test_a_fault_of_one_client_is_its_own(engine: str, data: Callable[[], Own], said: str):
    for found in play(data=data(), engine__name=engine):
        assert found.record.stepped
        assert list(found.record.rejected) == [0]
        assert said in found.record.rejected[0]


def test_what_a_failure_of_the_batched_engine_logs_is_its_own_traceback(
    caplog: pytest.LogCaptureFixture,
):
    data = Own(classes().x, classes().targets, (9, 0, 20))
    play(data=data, engine__name="batched", sampler__clients_per_round=3)
    assert "NoneType: None" not in caplog.text
    assert "ValueError: the client has no samples" in caplog.text


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_cohort_of_one_agrees_with_itself(engine: str):
    rounds = play(sampler__clients_per_round=1, adapter__name="glad", engine__name=engine)
    # ‖g‖² / ‖g‖²: the index is 1, whatever the update.
    for found in rounds:
        assert found.record.stepped
        assert found.record.gsi_all == pytest.approx(1)
        assert all(math.isfinite(scale) for scale in found.record.scale.values())


def test_a_rate_far_too_large_leaves_the_model_as_it_was():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    rounds = play(model, client__lr=1e8, client__clip_norm=0.0)
    for found in rounds:
        assert not found.record.stepped
        assert found.record.reason
        assert len(found.record.rejected) == len(SIZES)
        assert found.test_loss is not None
        assert found.test_loss < 3


@torch.no_grad()
def test_targets_that_are_shifted_already_are_refused_by_a_causal_model():
    ids = torch.arange(12).view(2, 6) % 5
    task, model = CausalLM(), nn.Embedding(5, 5)
    assert task.metrics(model, (ids, ids))["loss"][1] == 10  # five of each are foretold
    with pytest.raises(ValueError, match=r"next tokens already.*set task\.name=next-token"):
        task.metrics(model, (ids[:, :-1], ids[:, 1:]))


@pytest.mark.parametrize(("rate", "warned"), [(1e6, 1), (0.1, 0)])
def test_training_that_runs_away_is_said_once(rate: float, warned: int, caplog: Any):
    """Updates that are far too large, but finite and all alike, are no single client's fault."""
    torch.manual_seed(2)
    model = nn.Linear(5, 3)
    rounds = play(model, client__lr=rate, client__clip_norm=0.0, rounds=4)
    said = [found.warning for found in rounds if found.warning]
    logged = [entry.message for entry in caplog.records if "runs away" in entry.message]
    assert len(said) == len(logged) == warned
    if warned:
        assert "the test loss is" in said[0]
        assert "Lower client.lr or server.lr" in said[0]
        kept = [found.to_dict().get("warning") for found in rounds]
        assert [text for text in kept if text] == said
        assert summarise([found.to_dict() for found in rounds])["warning"].endswith(said[0])


# ------------------------------------------------------------------------ through the command line

MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tasks.support import Own, Characters, characters, classes
from fedglad.tasks import Task

def net() -> nn.Module:
    return nn.Linear(5, 3)

def chars() -> nn.Module:
    return Characters()

def sequences():
    return characters()

def labels():
    return classes()

def holes():
    own = classes()
    own.x[:] = float("nan")
    return own

def loader():
    own = classes()
    return DataLoader(TensorDataset(own.x, own.targets))

class Percent(Task):
    score = "accuracy"
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": (100 * len(batch[1]), len(batch[1]))}
"""


@pytest.mark.parametrize(
    ("model", "data", "task", "said"),
    [
        ("chars", "sequences", "classification", "set task.name=next-token"),
        ("net", "holes", "classification", "NaN or infinite numbers among the inputs"),
        ("net", "loader", "classification", "fedglad.data.from_datasets"),
        ("net", "labels", "usermistakes:Percent", "by its name it is a share of one"),
        ("net", "labels", "usermistakes:Nothing", "Nothing"),
        ("net", "labels", "regresion", "did you mean 'regression'?"),
    ],
)
def test_the_command_line_says_it_and_writes_nothing(
    model: str, data: str, task: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "usermistakes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"model.name": f"usermistakes:{model}", "data.name": f"usermistakes:{data}"}
    given |= {"task.name": task, "engine.name": "serial", "rounds": "2"}
    options = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", "digits", *options, "--out", str(out)])
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    text = " ".join(result.output.split())
    assert said in text
    assert "Traceback" not in text
    assert not out.exists()


@pytest.mark.slow
def test_a_process_says_it_too(tmp_path: Path):
    (tmp_path / "usermistakes.py").write_text(MODULE)
    names = ("model.name=usermistakes:chars", "data.name=usermistakes:sequences")
    options = [word for name in names for word in ("--set", name)]
    done = cli("run", "digits", *options, "--out", tmp_path / "run", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "task.name=next-token" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_says_so_in_the_terminal_and_its_summary(tmp_path: Path):
    given = {**TINY, "engine.name": "serial", "rounds": 2, "client.lr": 1e9}
    options = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", "digits", *options, "--out", str(out)])
    assert "2 of 2 rounds were skipped: 0 of 3 updates were accepted" in " ".join(
        result.output.split()
    )
    run = Run(out)
    assert [found["status"] for found in run.rounds()] == ["skipped", "skipped"]
    assert run.summary
    assert run.summary["skipped"] == 2
    assert all(value.isfinite().all() for value in load_file(out / "model.safetensors").values())
