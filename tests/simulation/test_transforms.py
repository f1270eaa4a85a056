"""Transforms in a run: the same in every engine, kept and resumed, and bytes in every record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import outcome

import fedglad
from fedglad.analysis.targets import rounds_to
from fedglad.clients import Plain
from fedglad.config import load
from fedglad.config.schema import ConfigError
from fedglad.records import Failure, Score, Several, Update
from fedglad.runs import execute
from fedglad.runs.checking import check
from fedglad.samplers import Uniform
from fedglad.server import Server
from fedglad.simulation.driver import Driver
from fedglad.transforms import Quantise, TopK

TINY: dict[str, Any] = {
    "rounds": 3,
    "checkpoint_every": 1,
    "data.clients": 12,
    "model.name": "softmax",
    "model.features": 64,
    "client.epochs": 1,
    "sampler.clients_per_round": 6,
    "engine.name": "serial",
}
SIZE = 650  # of softmax: 64 · 10 weights and 10 biases, float32
QUANTISE = {"transform.name": "quantise"}
TOP = {"transform.name": "topk", "transform.share": 0.1}


def rounds(settings: dict[str, Any]) -> list[dict[str, Any]]:
    made = fedglad.simulate("digits", TINY | settings)
    return [{**played.to_dict(), "seconds": None} for played in made]


@pytest.mark.parametrize(
    ("settings", "up"),
    [
        ({}, 4 * SIZE),
        (QUANTISE, 640 + 4 + 10 + 4),
        (TOP, 65 * 8),
        ({"transform.name": "oracles.test_transforms:Half"}, 2 * SIZE),
    ],
)
def test_bytes_are_in_every_record(settings: dict[str, Any], up: int):
    sizes = {"down": 6 * 4 * SIZE, "up": 6 * up}
    assert [played["bytes"] for played in rounds(settings)] == [sizes] * 3


@pytest.mark.parametrize("settings", [QUANTISE, TOP], ids=["quantise", "topk"])
def test_every_engine_sends_the_same(settings: dict[str, Any]):
    serial = rounds(settings)
    assert rounds(settings | {"engine.name": "local", "engine.workers": 2}) == serial
    batched = rounds(settings | {"engine.name": "batched"})
    losses = [[played["test_loss"] for played in run] for run in (batched, serial, rounds({}))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[2] != losses[1]


def test_another_seed_round_or_client_quantises_otherwise(tmp_path: Path):
    def moved(seed: int, client: int, t: int) -> torch.Tensor:
        server = Server({"w": torch.zeros(500)}, guard=None)
        driver = Driver(server, Uniform(), seed, transform=Quantise(bits=3))
        driver.t = t
        update = Update({"w": torch.linspace(-1, 1, 500)}, client=client)
        driver.step((client,), iter([update]), population=9)
        return server.state["w"].clone()

    first = moved(1, 4, 0)
    assert torch.equal(first, moved(1, 4, 0))
    for other in ((2, 4, 0), (1, 5, 0), (1, 4, 1)):
        assert not torch.equal(first, moved(*other))


def driver(tmp_path: Path, **server: Any) -> Driver:
    made = Server({"w": torch.zeros(4)}, **server)
    return Driver(made, Uniform(), 1, transform=TopK(share=0.25), memories=tmp_path / "memories")


def unsent(driver: Driver, client: int) -> list[float]:
    assert driver.unsent
    kept = driver.unsent.read(client, driver.unsent.version(client)).get("unsent")
    return [] if kept is None else driver.server.layout.views(kept)["w"].tolist()


def play(driver: Driver, **updates: list[float]) -> Any:
    named = {int(name[1:]): torch.tensor(values) for name, values in updates.items()}
    sent = [Update({"w": values}, client=client) for client, values in named.items()]
    record, _ = driver.step(tuple(named), iter([Several(sent)]), population=9)
    driver.t += 1
    return record


def test_what_was_not_sent_waits_with_its_client_by_hand(tmp_path: Path):
    made = driver(tmp_path, guard=None)
    play(made, c3=[4.0, 1.0, 2.0, 0.0], c5=[0.0, 0.0, 8.0, 1.0])
    assert made.server.state["w"].tolist() == [-2, 0, -4, 0]
    assert (unsent(made, 3), unsent(made, 5)) == ([0, 1, 2, 0], [0, 0, 0, 1])
    play(made, c3=[0.0, 0.0, 2.0, 0.0])  # 2 + 2
    assert made.server.state["w"].tolist() == [-2, 0, -8, 0]
    assert (unsent(made, 3), unsent(made, 5)) == ([0, 1, 0, 0], [0, 0, 0, 1])


def test_a_rejected_update_and_a_skipped_round_leave_it_as_it_was(tmp_path: Path):
    made = driver(tmp_path, guard=None)
    play(made, c3=[4.0, 1.0, 2.0, 0.0], c5=[0.0, 0.0, 8.0, 1.0])
    record = play(made, c3=[1.0, float("nan"), 0.0, 0.0], c5=[0.0, 0.0, 0.0, 5.0])
    assert record.rejected == {3: "'w' holds NaN or inf"}
    assert (unsent(made, 3), unsent(made, 5)) == ([0, 1, 2, 0], [0, 0, 0, 0])
    strict = driver(tmp_path / "strict", guard=None, min_clients=2)
    play(strict, c3=[4.0, 1.0, 2.0, 0.0], c5=[0.0, 0.0, 8.0, 1.0])
    record = play(strict, c3=[9.0, 9.0, 0.0, 0.0])
    assert (record.status, unsent(strict, 3)) == ("skipped", [0, 1, 2, 0])


def test_of_an_update_that_was_cut_as_much_waits_as_was_taken(tmp_path: Path):
    """‖(4, 0, 0, 0)‖ = 4 is cut to 1, a quarter: so e goes a quarter of its way to (0, 1, 2, 0)."""
    from fedglad.filters import NormClip

    made = driver(tmp_path, guard=None, filter=NormClip(max_norm=1.0))
    play(made, c3=[4.0, 1.0, 2.0, 0.0])
    assert made.server.state["w"].tolist() == [-1, 0, 0, 0]
    assert unsent(made, 3) == [0, 0.25, 0.5, 0]


def test_an_update_of_a_wrong_form_is_rejected_as_it_is(tmp_path: Path):
    made = driver(tmp_path)
    updates = [Update({"v": torch.ones(4)}, client=1), Failure(2, "timed out")]
    record, _ = made.step((1, 2), iter(updates), population=9)
    assert list(record.rejected) == [1, 2]
    assert record.rejected[2] == "timed out"
    model = Update(model={"w": torch.tensor([-3.0, 0.0, 1.0, 0.0])}, client=1)
    record, _ = made.step((1,), iter([model]), population=9)
    assert made.server.state["w"].tolist() == [-3, 0, 0, 0]


def test_a_run_keeps_it_beside_its_checkpoints_and_check_reads_it(tmp_path: Path):
    run = execute(*load("digits", TINY | TOP), out=tmp_path / "run", keep_state=True)
    found = [*(tmp_path / "run" / "memories" / "transform").rglob("*.safetensors")]
    assert found
    names = [file.name for file in check(run.folder).files if "transform" in file.name]
    assert names
    assert check(run.folder).good
    max(found, key=lambda path: int(path.name.split(".")[1])).unlink()
    assert not check(run.folder).good


def test_going_on_after_a_stop_gives_the_same_bits(tmp_path: Path):
    config = load("digits", TINY | TOP)[1]
    whole = execute("top", config, out=tmp_path / "whole")

    class Stop(BaseException):  # after which nothing is saved any more
        pass

    def stop(played: Any) -> None:
        if played.t == 1:
            raise Stop

    with pytest.raises(Stop):
        execute("top", config, out=tmp_path / "broken", on_round=stop)
    execute("top", config, out=tmp_path / "broken", resume=True)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")
    assert [played["bytes"]["up"] for played in whole.rounds()] == [6 * 65 * 8] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client.name": "scaffold"}, "Scaffold sends a second vector beside its update, as long"),
        (
            {"client.name": "feddyn", **QUANTISE},
            "FedDyn sends a second .* Quantise would not shorten: use transform.name = none, or",
        ),
        ({"filter.name": "median"}, "most elements of what TopK sends are 0, and Median takes the"),
        ({"transform.name": "top"}, r"unknown transform 'top': did you mean 'topk'\?  \(fedglad l"),
        ({"transform.bits": 4}, "unknown key 'transform.bits'"),
    ],
)
def test_what_would_mean_nothing_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load("digits", {"transform.name": "topk"} | settings)


@pytest.mark.parametrize("settings", [{"client.name": "fednova"}, {"filter.name": "multi-krum"}])
def test_what_goes_together_does(settings: dict[str, Any]):
    assert [played["status"] for played in rounds(TOP | settings | {"rounds": 2})]


def test_the_names_of_runs_without_one_stay():
    config = load("digits")[1]
    assert load("digits", {"transform.name": "none"})[1].hash() == config.hash()
    assert load("digits", QUANTISE)[1].hash() != config.hash()
    assert Plain().server is None


def test_bytes_to_a_target_are_those_of_the_records():
    records: list[dict[str, Any]] = [
        {"clients": [{"id": 1}], "bytes": {"down": 100, "up": 10}, "test_accuracy": 0.5},
        {"clients": [{"id": 1}], "bytes": {"down": 100, "up": 7}, "test_accuracy": 0.9},
    ]
    found = rounds_to(records, Score(), 0.8, update_bytes={"down": 1, "up": 1})
    assert found is not None
    assert (found.sent, found.received, found.bytes) == (200, 17, 217)
    assert rounds_to(records, Score(), 0.8) == found
    # a record of before, and one that somebody has changed: by the summary's, one client each
    for odd in ({}, {"bytes": None}, {"bytes": {"down": "x", "up": 1}}, {"bytes": {"down": -1}}):
        records[1] = {"clients": [{"id": 1}], "test_accuracy": 0.9, **odd}
        found = rounds_to(records, Score(), 0.8, update_bytes={"down": 60, "up": 6})
        assert found is not None
        assert (found.sent, found.received) == (160, 16)
        found = rounds_to(records, Score(), 0.8)
        assert found is not None
        assert found.bytes is None


def test_a_client_that_fails_has_sent_nothing():
    """Its data cannot be read, in every round; the model was sent to it all the same."""
    from fedglad.data import Partitioned

    x, y = torch.randn(40, 64), torch.randint(10, (40,))

    class Faulty(Partitioned):
        def client(self, k: int) -> Any:
            if k == 2:
                raise OSError("gone")
            return super().client(k)

    data = Faulty(x, y, x, y, np.split(np.arange(40), 4))
    settings = TINY | {"sampler.clients_per_round": 4, "rounds": 1, **QUANTISE}
    (played,) = fedglad.simulate("digits", settings, data=data)
    assert list(played.record.rejected) == [2]
    assert json.loads(json.dumps(played.bytes)) == {"down": 4 * 4 * SIZE, "up": 3 * 658}
