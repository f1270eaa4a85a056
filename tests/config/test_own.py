"""A user's own model and data by name: a class, or a function whose arguments are settings."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import cli
from torch import Tensor, nn

from fedglad import simulate
from fedglad.config.schema import Config, ConfigError, load
from fedglad.data.digits import Digits
from fedglad.runs import RunError, execute

HERE = __name__


def wide(width: int = 7, bias: bool = True, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width, bias=bias), act(), nn.Linear(width, 10, bias=bias)
    )


class Net(nn.Module):
    """A module is its own factory."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).relu())


def few(clients: int, scale: float = 1.0) -> Any:
    """Digits among few clients."""
    found = Digits(clients=clients, partition="iid").load_federation()
    found.x *= scale
    return found


def alone(width: int, /) -> nn.Module:
    return wide(width)


def play(**given: Any) -> list[float | None]:
    settings = {key.replace("__", "."): value for key, value in given.items()}
    small = {"rounds": 2, "sampler.clients_per_round": 3, "client.epochs": 1}
    return [found.test_loss for found in simulate("digits", small | settings)]


@pytest.mark.parametrize("name", ["wide", "Net"])
def test_an_own_factory_is_built_with_its_settings(name: str):
    _, config = load("digits", {"model.name": f"{HERE}:{name}", "model.width": 3})
    model = config.plan().model
    assert sum(p.numel() for p in model.parameters()) == 64 * 3 + 3 + 3 * 10 + 10
    assert config.to_dict()["model"]["name"] == f"{HERE}:{name}"
    assert config.to_dict()["model"]["width"] == 3


def test_it_survives_the_way_through_toml(tmp_path: Path):
    _, config = load("digits", {"model.name": f"{HERE}:wide", "model.bias": False})
    (tmp_path / "own.toml").write_text(config.to_toml())
    _, again = load(tmp_path / "own.toml")
    assert again.to_dict() == config.to_dict()
    assert again.hash() == config.hash()
    assert again.hash() != load("digits", {"model.name": f"{HERE}:wide"})[1].hash()


def test_a_default_that_no_file_can_hold_is_left_to_the_function():
    _, config = load("digits", {"model.name": f"{HERE}:wide"})
    assert list(config.to_dict()["model"]) == ["name", "width", "bias"]


def test_own_data_and_own_model_run_as_they_do_as_objects():
    given = {"model__name": f"{HERE}:Net", "data__name": f"{HERE}:few", "data__clients": 6}
    by_name = play(**given)
    seeded = load("digits", {"model.name": f"{HERE}:Net"})[1].plan().model
    settings = {"rounds": 2, "sampler.clients_per_round": 3, "client.epochs": 1}
    as_objects = [
        found.test_loss for found in simulate("digits", settings, model=seeded, data=few(6))
    ]
    assert by_name == as_objects
    assert play(**given, data__scale=0.5) != by_name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model.name": f"{HERE}:wide", "model.width": "x"}, "model.width = 'x': must be a whole"),
        ({"model.name": f"{HERE}:wide", "model.wdth": 1}, "did you mean 'model.width'?"),
        ({"model.name": f"{HERE}:HERE"}, "is not a dataclass or a function"),
        ({"model.name": f"{HERE}:alone"}, "its argument 'width' has no name"),
        ({"data.name": f"{HERE}:few"}, "data.clients is missing: it has no default"),
        ({"client.name": f"{HERE}:wide"}, "is not a dataclass"),
        ({"model.name": f"{HERE}:named"}, "its argument 'name' has a name that is taken"),
        ({"model.name": f"{HERE}:building"}, "its argument 'build' has a name that is taken"),
    ],
)
def test_mistakes_are_told_in_a_sentence(given: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        load("digits", given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "the model's function gave a NoneType"),
        ("broken", "RuntimeError: no such weights"),
    ],
)
def test_a_factory_that_fails_is_named(name: str, said: str):
    with pytest.raises(ConfigError, match=f"model.name = '{HERE}:{name}'") as caught:
        load("digits", {"model.name": f"{HERE}:{name}"})[1].plan()
    assert said in str(caught.value)


def made(width: int) -> Any:
    def build() -> nn.Module:
        return wide(width)

    return build


small, large = made(3), made(4)  # of one __qualname__


def test_a_function_goes_by_the_name_it_was_asked_for():
    configs = [load("digits", {"model.name": f"{HERE}:{name}"})[1] for name in ("small", "large")]
    assert [c.to_dict()["model"]["name"] for c in configs] == [f"{HERE}:small", f"{HERE}:large"]
    assert configs[0].hash() != configs[1].hash()
    again = Config.of(configs[0].to_dict()).plan().model
    assert sum(p.numel() for p in again.parameters()) == 64 * 3 + 3 + 3 * 10 + 10


def test_a_configuration_with_own_functions_can_be_pickled():
    given = {"model.name": f"{HERE}:small", "data.name": f"{HERE}:few", "data.clients": 6}
    config = load("digits", given)[1]
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


def layered(hidden: list[int] = [32], act: nn.Module | None = None) -> nn.Module:  # noqa: B006
    return wide(hidden[0])


def test_lists_and_types_that_no_file_can_hold():
    config = load("digits", {"model.name": f"{HERE}:layered", "model.hidden": [5]})[1]
    assert config.plan().model[1].out_features == 5  # pyright: ignore
    assert load("digits", {"model.name": f"{HERE}:layered"})[1].sections["model"].hidden == [32]


def named(name: str = "x") -> nn.Module:
    return wide()


def building(build: int = 1) -> nn.Module:
    return wide()


def a_tuple() -> Any:
    return 1, 2


class Numbers:
    """Ten numbers to meet instead of one label."""

    clients = 2

    def size(self, k: int) -> int:
        return 4

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(4, 1, 8, 8), torch.zeros(4, 10)

    def test(self) -> tuple[Tensor, Tensor]:
        return self.client(0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a_tuple", "the data is a tuple without clients, size, client, test"),
        ("Numbers", r"the targets are float32, no labels: for numbers set task.name=regression"),
    ],
)
def test_data_of_the_wrong_kind_is_told_before_the_run(name: str, said: str):
    with pytest.raises(ValueError, match=said):
        load("digits", {"data.name": f"{HERE}:{name}"})[1].plan()


def nothing() -> None:
    """Forgets its return."""


def broken() -> nn.Module:
    raise RuntimeError("no such weights")


# ---------------------------------------------------------------------------------- the batch's way


class Bytes:
    """Digits as bytes: what the model sees is made batch by batch, with noise in training."""

    def __init__(self, noise: bool = False) -> None:
        self.inner = Digits(clients=6, partition="iid").load_federation()
        self.clients, self.noise = 6, noise
        self.size, self.labels = self.inner.size, self.inner.labels

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner.client(k)
        return (x * 16).to(torch.uint8), y

    def test(self) -> tuple[Tensor, Tensor]:
        x, y = self.inner.test()
        return (x * 16).to(torch.uint8), y

    def prepare(self, x: Tensor, training: bool) -> Tensor:
        x = x.to(torch.float32) / 16
        return x + torch.rand(len(x), 1, 1, 1) if training and self.noise else x


ENGINES = [
    {"engine.name": "serial"},
    {"engine.name": "local", "engine.workers": 1},
    {"engine.name": "local", "engine.workers": 2},
]


def losses(data: Any, engine: dict[str, Any], seed: int = 1) -> list[float | None]:
    settings = {"rounds": 2, "sampler.clients_per_round": 3, "client.epochs": 1, "seed": seed}
    return [found.test_loss for found in simulate("digits", settings | engine, data=data)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_is_prepared_where_it_is_used(engine: dict[str, Any]):
    ready = Digits(clients=6, partition="iid").load_federation()
    assert losses(Bytes(), engine) == losses(ready, engine)


def test_the_batched_engine_prepares_too():
    ready = Digits(clients=6, partition="iid").load_federation()
    batched = {"engine.name": "batched"}
    assert losses(Bytes(), batched) == losses(ready, batched)
    assert losses(Bytes(noise=True), batched) != losses(ready, batched)


def test_augmentation_is_the_same_in_every_engine_and_new_with_the_seed():
    found = [losses(Bytes(noise=True), engine) for engine in ENGINES]
    assert found[0] == found[1] == found[2] != losses(Bytes(), ENGINES[0])
    assert losses(Bytes(noise=True), ENGINES[0], seed=2) != found[0]


# ------------------------------------------------------------------------------------- centralised


def test_centralised_training_is_one_client_with_everything():
    _, config = load("digits", {"data.partition": "centralised", "rounds": 1})
    plan = config.plan()
    assert plan.data.clients == 1
    assert plan.data.size(0) == 1437
    tree = config.to_dict()
    assert (tree["data"]["clients"], tree["sampler"]["clients_per_round"]) == (1, 1)
    assert Config.of(tree).hash() == config.hash()


def test_centralised_training_is_the_same_local_recipe():
    """One round of it is the local loop on all samples, and nothing else."""
    given = {"data.partition": "centralised", "rounds": 1, "client.epochs": 1, "model.name": "mlp"}
    given |= {"model.features": 64, "engine.name": "serial", "client.lr": 0.1}
    config = load("digits", given)[1]
    plan = config.plan()
    played = next(iter(simulate(config)))
    from fedglad.clients.workbench import Workbench
    from fedglad.rng import stream

    bench = Workbench(plan.model)
    result = bench.train(
        plan.client, bench.w.clone(), {}, *plan.data.client(0), stream(1, "client", 0, 0)
    )
    assert result.loss == played.record.clients[0]["loss"]
    assert played.record.gsi == dict.fromkeys(played.record.gsi, 1.0)


def test_a_run_is_not_continued_with_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The code of an own model may change under the same name; what was saved stays as it is."""
    given = {"model.name": f"{HERE}:changing", "client.name": "scaffold", "rounds": 2}
    given |= {"sampler.clients_per_round": 3, "client.epochs": 1, "checkpoint_every": 1}
    config = load("digits", given)[1]
    with pytest.raises(KeyboardInterrupt):
        execute("own", config, out=tmp_path, on_round=lambda _: interrupt())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    monkeypatch.setattr(f"{HERE}.WIDTH", 4)
    with pytest.raises(RunError, match=r"of another model: it has parameter '1.weight' \(3, 64\)"):
        execute("own", config, out=tmp_path, resume=True)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    log = tmp_path / "log.txt"
    assert {**after, log: b""} == {**before, log: b""}


WIDTH = 3


def changing() -> nn.Module:
    return wide(WIDTH)


played: list[int] = []


def interrupt() -> None:
    """In the second round, when the first is saved."""
    played.append(1)
    if len(played) == 2:
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------------ from a folder

OWN_FILE = '''
import torch
from torch import nn

def model(hidden: int = 16) -> nn.Module:
    """A hidden layer on eight by eight pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
'''


@pytest.mark.slow
def test_an_own_file_in_the_working_folder(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN_FILE)
    told = cli(
        *("run", "digits", "--set", "model.name=mine:model", "--set", "model.hidden=8"),
        *("--set", "rounds=2", "--out", tmp_path / "run"),
        cwd=tmp_path,
    )
    assert told.returncode == 0, told.stderr
    text = (tmp_path / "run" / "config.toml").read_text()
    assert 'name = "mine:model"' in text
    assert "hidden = 8" in text
    swept = cli(
        *("sweep", "digits", "--set", "model.name=mine:model", "--grid", "model.hidden=4,8"),
        *("--set", "rounds=2", "--out", tmp_path / "runs"),
        cwd=tmp_path,
    )
    assert swept.returncode == 0, swept.stderr
    assert "model.hidden=4" in swept.stdout
