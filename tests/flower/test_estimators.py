"""Estimators of the mean of all clients on Flower: those of a plain Server, resumed to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedglad import Server
from fedglad.adapters import Glad
from fedglad.estimators import MIFA, VARP, Stale, Strat
from fedglad.filters import MultiKrum
from fedglad.flower import FedGLAD
from fedglad.runs.folder import RunError
from fedglad.samplers.uniform import Uniform

from .grid import Clock, LocalGrid, bits, by, clients, facts, model, record

COUNT, ROUNDS = 6, 5

SETTINGS: dict[str, Any] = {
    "varp": VARP(),
    "stale": Stale(beta=0.3),
    "mifa": MIFA(),
    "strat": Strat(most=3),
}


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", made)
    return made


def play(
    estimator: Any,
    folder: Path | None = None,
    evaluate_fn: Callable[[int, ArrayRecord], None] | None = None,
    **settings: Any,
) -> tuple[FedGLAD, Any]:
    settings.setdefault("sampler", Uniform(clients_per_round=3, seed="run"))
    strategy = FedGLAD(
        fraction_evaluate=0.0,
        estimator=estimator,
        seed=3,
        nodes="partition-id",
        checkpoint_dir=folder,
        resume=True,
        **settings,
    )
    grid = LocalGrid(clients(COUNT))
    start = record(model())
    return strategy, strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate_fn)


def stop(server_round: int, arrays: ArrayRecord) -> None:
    if server_round == 4:
        raise Stop


@pytest.mark.parametrize("name", SETTINGS)
def test_the_model_is_that_of_a_server_with_the_same_updates(name: str):
    strategy, result = play(SETTINGS[name], guard=None)
    update = by(clients(COUNT))
    server = Server(model(), estimator=SETTINGS[name], adapter=Glad(), guard=None)
    for line in strategy.records:
        sent = {key: value.numpy().copy() for key, value in server.state.items()}
        updates = [update(int(client["id"]), sent) for client in line["clients"]]
        assert server.step(updates, population=COUNT).stepped
    state = {key: server.state[key].numpy() for key in model()}
    assert bits(state) == bits(result.arrays)
    assert bits(play(None, guard=None)[1].arrays) != bits(result.arrays)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_was_cut_short_goes_on_to_the_same_bits(name: str, tmp_path: Path):
    whole, result = play(SETTINGS[name])
    with pytest.raises(Stop):
        play(SETTINGS[name], tmp_path / "run", stop)
    again, resumed = play(SETTINGS[name], tmp_path / "run")
    assert bits(resumed.arrays) == bits(result.arrays)
    assert facts(again.records) == facts(whole.records)


def test_its_settings_are_in_the_folder_and_others_are_refused(tmp_path: Path):
    with pytest.raises(Stop):
        play(Stale(beta=0.3), tmp_path / "run", stop)
    assert '[estimator]\nname = "stale"' in (tmp_path / "run" / "config.toml").read_text()
    for other, said in {
        Stale(beta=0.4): r"estimator.beta = 0.3 and here 0.4",
        VARP(): r"estimator.name = 'stale' and here 'varp'",
        None: r"estimator.name = 'stale' and here 'none'",
    }.items():
        with pytest.raises(RunError, match=said):
            play(other, tmp_path / "run")


def test_a_run_without_one_is_not_gone_on_with_by_one_that_has_it(tmp_path: Path):
    with pytest.raises(Stop):
        play(None, tmp_path / "run", stop)
    with pytest.raises(RunError, match=r"estimator.name = 'none' and here 'varp'"):
        play(VARP(), tmp_path / "run")


def test_what_cannot_be_combined_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"(?i)varp.*krum"):
        FedGLAD(estimator=VARP(), filter=MultiKrum(f=1, m=3))
