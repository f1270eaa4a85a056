"""A run with central differential privacy: the same in every engine, resumed, shown, refused."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from run_support import outcome
from typer.testing import CliRunner

import fedglad
from fedglad.cli import app
from fedglad.config import load
from fedglad.config.schema import ConfigError
from fedglad.privacy import Central
from fedglad.report.figures import payload
from fedglad.runs import execute
from fedglad.runs.reader import Run

needs_accountant = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="dp-accounting is not installed"
)
TINY: dict[str, Any] = {
    "rounds": 3,
    "checkpoint_every": 1,
    "data.clients": 30,
    "model.name": "softmax",
    "model.features": 64,
    "client.epochs": 1,
    "sampler.clients_per_round": 6,
    "engine.name": "serial",
    "average.name": "none",
}
PRIVATE: dict[str, Any] = {
    "privacy.name": "central",
    "privacy.clip": 0.5,
    "privacy.noise": 2.0,
    "adapter.name": "none",
    "weighting.name": "equal",
    "guard.name": "none",
    "trust.name": "none",
    "sampler.seed": "run",
}


def rounds(settings: dict[str, Any]) -> list[dict[str, Any]]:
    made = fedglad.simulate("digits", TINY | PRIVATE | settings)
    return [{**played.to_dict(), "seconds": None} for played in made]


@needs_accountant
def test_every_record_has_epsilon_and_nothing_of_the_updates_as_a_whole():
    spent = [Central(noise=2.0).epsilon(t, 6, 30) for t in (1, 2, 3)]
    for played, epsilon in zip(rounds({}), spent, strict=True):
        assert played["epsilon"] == epsilon
        assert (played["status"], played["groups"], played["tensors"]) == ("stepped", {}, {})
        assert (played["gsi_all"], played["gsi_unfiltered"]) == (None, None)
        assert [client["weight"] for client in played["clients"]] == [1 / 6] * 6


@needs_accountant
def test_every_engine_draws_the_same_noise():
    serial = rounds({})
    assert rounds({"engine.name": "local", "engine.workers": 2}) == serial
    batched = rounds({"engine.name": "batched"})
    losses = [[played["test_loss"] for played in run] for run in (batched, serial)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert rounds({"seed": 2})[0]["test_loss"] != serial[0]["test_loss"]


@needs_accountant
@pytest.mark.parametrize("more", [{}, {"transform.name": "quantise"}, {"server.name": "adam"}])
def test_going_on_after_a_stop_gives_the_same_bits(more: dict[str, Any], tmp_path: Path):
    config = load("digits", TINY | PRIVATE | more)[1]
    execute("private", config, out=tmp_path / "whole")

    class Stop(BaseException):  # after which nothing is saved any more
        pass

    def stop(played: Any) -> None:
        if played.t == 1:
            raise Stop

    with pytest.raises(Stop):
        execute("private", config, out=tmp_path / "broken", on_round=stop)
    run = execute("private", config, out=tmp_path / "broken", resume=True)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")
    assert run.summary is not None
    assert run.summary["epsilon"] == run.rounds()[-1]["epsilon"]


@needs_accountant
def test_the_terminal_and_the_report_say_it(tmp_path: Path):
    given = [text for k, v in (TINY | PRIVATE).items() for text in ("--set", f"{k}={v}")]
    said = CliRunner().invoke(app, ["run", "digits", *given, "--out", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert "Its models are differentially private: ε = " in said.output
    assert " at δ = 1e-05." in said.output
    assert "  ε " in said.output
    tiles = {tile["label"]: tile for tile in payload([Run(tmp_path / "run").read()])["headline"]}
    assert tiles["Privacy of the models"]["value"].startswith("ε = ")
    assert tiles["Privacy of the models"]["detail"] == "δ = 1e-05"


def test_what_would_make_epsilon_wrong_is_refused_with_all_that_is_to_be_set():
    with pytest.raises(ConfigError, match="Glad scales the step by what the updates are") as error:
        load("digits", {"privacy.name": "central"})
    for key in ("adapter.name = none", "weighting.name = equal", "guard.name = none"):
        assert key in str(error.value)
    assert "sampler.seed = run" in str(error.value)
    load("digits", TINY | PRIVATE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"client.name": "scaffold"},
            "Scaffold sends, or keeps with clients, more than the update",
        ),
        ({"sampler.name": "adafl"}, "every client is as likely as any other"),
        ({"sampler.availability": "bernoulli"}, "every client is as likely as any other"),
        ({"transform.name": "topk"}, "TopK sends later what is left"),
        ({"data.validation": 0.2}, "the validation set is made of clients' own samples"),
        ({"estimator.name": "varp"}, "VARP keeps single updates"),
        ({"server.name": "fedeve"}, "FedEve steps by how much the updates disagree"),
        ({"filter.name": "median"}, "Median treats a client by what others sent"),
        ({"trust.name": "clients"}, "Trust judges clients by each other's updates"),
        ({"privacy.noise": 0}, "must be from 1e-3 to 1e6"),
    ],
)
def test_a_configuration_that_would_make_it_wrong_is_refused(
    settings: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        load("digits", TINY | PRIVATE | settings)


def test_a_model_with_buffers_is_refused_before_the_run():
    from torch import nn

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    with pytest.raises(ValueError, match=r"the model's buffers, '2\.running_mean' among them"):
        next(fedglad.simulate("digits", TINY | PRIVATE, model=model))


def test_the_names_of_runs_without_it_stay():
    config = load("digits")[1]
    assert load("digits", {"privacy.name": "none"})[1].hash() == config.hash()
    assert config.sections["privacy"].__class__.__name__ == "NoPrivacy"
