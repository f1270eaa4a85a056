"""The clients' rate over the rounds: every engine has that of the round."""

from pathlib import Path
from typing import Any

import pytest

import fedglad
from fedglad.config import ConfigError, load
from fedglad.runs.sweeping import first_rounds

TINY: dict[str, Any] = {
    "rounds": 4,
    "data.clients": 30,
    "model.name": "softmax",
    "model.features": 64,
    "client.optimizer": "sgd",
    "client.lr": 0.2,
    "client.clip_norm": 0.0,
    "sampler.clients_per_round": 4,
    "adapter.name": "none",
}
FALLS: list[dict[str, Any]] = [
    {"schedule": "cosine"},
    {"schedule": "step", "over": 2, "drop": 0.3},
    {"schedule": "exponential", "over": 1, "drop": 0.7},
]


def losses(settings: dict[str, Any]) -> list[float]:
    """The test loss after each round."""
    made = [played.test_loss for played in fedglad.simulate("digits", TINY | settings)]
    return [loss for loss in made if loss is not None]


def at(section: str, fall: dict[str, Any]) -> dict[str, Any]:
    names = {"schedule": "rounds_schedule"} if section == "client" else {}
    return {f"{section}.{names.get(key, key)}": value for key, value in fall.items()}


@pytest.mark.parametrize("fall", FALLS, ids=lambda fall: fall["schedule"])
def test_with_one_local_step_it_is_the_servers_rate_that_falls(fall: dict[str, Any]):
    """θ − lr_t mean(∇F_k): of the two rates only the product counts."""
    one = {"client.steps": 1, "engine.name": "serial"}
    expected = losses(one | at("server", fall))
    assert losses(one | at("client", fall)) == pytest.approx(expected, rel=1e-5)
    assert losses(one) != pytest.approx(expected, rel=1e-3)


def test_every_engine_has_the_rate_of_the_round():
    settings = {"client.epochs": 1, **at("client", FALLS[1])}
    serial = losses(settings | {"engine.name": "serial"})
    assert losses(settings | {"engine.name": "local", "engine.workers": 2}) == serial
    assert losses(settings | {"engine.name": "batched"}) == pytest.approx(serial, rel=1e-5)
    assert losses({"client.epochs": 1, "engine.name": "serial"}) != pytest.approx(serial, rel=1e-3)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_method_with_the_rate_in_its_formula_has_that_of_the_round(engine: str):
    """SCAFFOLD's option II reads the mean gradient off θ − w_k, by K lr: of plain SGD, the same as
    `mean` sums up on the way. With another round's rate they would differ."""
    falls = at("client", {"schedule": "step", "over": 1, "drop": 0.2})
    settings = {"client.name": "scaffold", "client.epochs": 1, "engine.name": engine, **falls}
    mean, second = (losses(settings | {"client.option": option}) for option in ("mean", "II"))
    assert second == pytest.approx(mean, rel=1e-4)


def test_the_first_rounds_of_a_run_have_its_rates():
    config = load("digits", {"rounds": 40, "client.rounds_schedule": "cosine"})[1]
    short = first_rounds(config, 5)
    assert (short.rounds, short.plan().client) == (5, config.plan().client)


def test_the_names_of_runs_without_one_stay():
    plain = load("digits")[1]
    same = load("digits", {"client.rounds_schedule": "constant", "client.over": 0})[1]
    assert plain.hash() == same.hash()
    assert load("digits", {"client.rounds_schedule": "cosine"})[1].hash() != plain.hash()


def test_a_rate_that_ends_before_the_run_is_refused_before_it_begins():
    with pytest.raises(ValueError, match="clients would learn nothing in round 2: set over=4"):
        losses({"client.rounds_schedule": "linear", "client.over": 2})


@pytest.mark.parametrize("key", ["client.rounds_schedule", "server.schedule"])
def test_code_that_a_runs_folder_names_as_a_schedule_is_not_loaded(key: str, tmp_path: Path):
    section, name = key.split(".")
    path = tmp_path / "config.toml"
    path.write_text(f'[{section}]\n{name} = "no_such_module:Schedule"\n')
    config = load(path)[1]
    assert config.own_names(loaded=False) == {key: "no_such_module:Schedule"}
    with pytest.raises(ConfigError, match="is code that a run's folder names, so it was not load"):
        config.plan()
    with pytest.raises(ConfigError, match="must be one that can be loaded: No module named 'no_su"):
        load(path, trust_code=True)
