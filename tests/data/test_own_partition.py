"""A user's own partition, "package.module:Class": found, set, checked and run like ours."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_support import TINY
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.config.schema import Config, ConfigError, load, simulate
from fedglad.data.digits import TRAIN, Digits
from fedglad.data.partition import Dirichlet, named
from fedglad.data.split import Split
from fedglad.rng import stream

HUB = f"{__name__}:Hub"
LABELS = np.arange(100) % 10


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Client 0 owns a share of all samples, the others the rest."""

    share: float = 0.5
    alpha: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"Hub(share={self.share!r}): must be between 0 and 1")

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        order = rng.permutation(len(labels))
        cut = round(self.share * len(labels))
        return [order[:cut], *np.array_split(order[cut:], clients - 1)]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Two samples a client, however many that makes; one setting has no default."""

    label: str
    counts_clients = True

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Any:
        assert clients == 0
        return [[k, k + 1] for k in range(0, len(labels), 2)]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Gives what it is told to."""

    gives: Any

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Any:
        return [np.array(part) for part in self.gives]


@dataclass(frozen=True, kw_only=True)
class Unsplit:
    """A dataclass, and no partition."""


def test_it_owns_what_its_class_says():
    split = Split(clients=6, partition=HUB, partition_settings={"share": 0.7}, seed=4)
    owners = split.owners(LABELS)
    assert [len(part) for part in owners] == [70, 6, 6, 6, 6, 6]
    expected = Hub(share=0.7).split(LABELS, 6, stream(4, "partition"))
    assert [part.tolist() for part in owners] == [part.tolist() for part in expected]
    assert split.words(10) == f"{HUB}, share = 0.7"


def test_a_setting_that_all_partitions_have_is_given_by_its_name():
    assert named(HUB, {"share": 0.2}, alpha=0.1, sigma=2.0) == Hub(share=0.2, alpha=0.1)
    assert named(HUB, share=0.2) == Hub(share=0.2)


def test_it_may_know_how_many_clients_there_are():
    split = Split(partition=f"{__name__}:Pairs", partition_settings={"label": "x"}, clients=3)
    assert [part.tolist() for part in split.owners(LABELS)][:2] == [[0, 1], [2, 3]]


def test_a_field_of_ours_that_the_section_does_not_have_can_be_set():
    assert named("dirichlet", {"least": 4}, alpha=0.5) == Dirichlet(alpha=0.5, least=4)
    owners = Digits(partition="dirichlet", partition_settings={"least": 9}).owners(LABELS.repeat(9))
    assert min(map(len, owners)) >= 9


def test_it_survives_the_way_through_toml_and_changes_the_hash(tmp_path: Path):
    own = {"data.partition": HUB, "data.partition_settings": {"share": 0.25}}
    _, config = load("digits", own)
    (tmp_path / "own.toml").write_text(config.to_toml())
    assert 'partition_settings = {"share" = 0.25}' in config.to_toml()
    assert load(tmp_path / "own.toml")[1] == config
    hashes = {
        load("digits", given)[1].hash()
        for given in ({}, {"data.partition": HUB}, own, own | {"data.alpha": 2.0})
    }
    assert len(hashes) == 4


def test_without_settings_of_its_own_nothing_is_written_or_hashed():
    tree = load("digits", {"data.partition": "dirichlet", "data.alpha": 0.5})[1].to_dict()
    keys = ["name", "clients", "partition", "alpha", "classes_per_client", "sigma", "key", "seed"]
    assert list(tree["data"]) == [*keys, "validation"]
    assert "# partition_settings = " in Config.of(tree).to_toml()


def test_a_run_trains_on_it():
    own = {"data.partition": HUB, "data.partition_settings": {"share": 0.5}, "data.clients": 3}
    own |= {"sampler.clients_per_round": 3, "engine.name": "serial"}
    (done,) = simulate("digits", {**TINY, **own, "rounds": 1})
    weights = [client["weight"] for client in done.to_dict()["clients"]]
    assert math.fsum(weights) == pytest.approx(1)
    assert max(weights) == pytest.approx(round(TRAIN / 2) / TRAIN)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": "nowhere:Hub"}, "[data] partition = 'nowhere:Hub' cannot be loaded: No "),
        ({"partition": f"{__name__}:Hubs"}, "cannot be loaded: module"),
        ({"partition": f"{__name__}:Unsplit"}, "is not a dataclass with split(labels, clients, "),
        ({"partition": "json:loads"}, "is not a dataclass with split(labels, clients, rng)"),
        (
            {"partition": HUB, "partition_settings": {"shard": 0.5}},
            f"[data] unknown key 'partition_settings.shard': {HUB} has share",
        ),
        (
            {"partition": HUB, "partition_settings": {"alpha": 0.5}},
            "[data] partition_settings.alpha: give it as alpha, which all of them have",
        ),
        (
            {"partition": HUB, "partition_settings": {"share": "half"}},
            "[data] partition_settings.share = 'half': must be a number",
        ),
        ({"partition": HUB, "partition_settings": {"share": 1.5}}, "[data] Hub(share=1.5): must"),
        ({"partition": HUB, "partition_settings": 3}, "data.partition_settings = 3: must be a tab"),
        (
            {"partition": f"{__name__}:Pairs"},
            "[data] partition_settings.label is missing: it has no default",
        ),
        (
            {"partition": "iid", "partition_settings": {"least": 2}},
            "[data] unknown key 'partition_settings.least': iid has none of its own",
        ),
    ],
)
def test_a_mistake_is_told_with_its_key(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        load("digits", {f"data.{key}": value for key, value in given.items()})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        ([[0], [1], [2]], "split gave 3 parts, and there are 2 clients"),
        ([[0], []], "split gave client 1 the shape (0,) of float64: it must be one vector"),
        ([[0], [0.5]], "split gave client 1 the shape (1,) of float64"),
        ([[0], [100]], "split gave client 1 places outside of 0 … 99"),
        ([[-1], [1]], "split gave client 0 places outside of 0 … 99"),
        ([[0, 7], [7, 7]], "split gave sample 7 away 3 times"),
    ],
)
def test_what_is_no_partition_is_refused(gives: list[list[float]], message: str):
    name = f"{__name__}:Wrong"
    split = Split(clients=2, partition=name, partition_settings={"gives": gives})
    with pytest.raises(ValueError, match="split gave") as error:
        split.owners(LABELS)
    assert f"partition = {name!r}: {message}" in str(error.value)


def test_the_command_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    args = ["data", "show", "digits", "--partition", HUB, "--clients", "4"]
    done = CliRunner().invoke(app, [*args, "--set", "partition_settings={share = 0.9}", "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown["partition"] == f"digits, {HUB}, share = 0.9"
    assert shown["max_size"] == round(0.9 * TRAIN)
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == [f"digits-{HUB.replace(':', '-')}.png"]
