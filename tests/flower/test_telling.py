"""Who hears of each round, which checkpoints stay, and a model that was changed on purpose."""

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict

from fedglad import Glad
from fedglad.flower import FedGLAD, Keep, Tell
from fedglad.optimizers import Momentum
from fedglad.report import ReportError
from fedglad.runs import Run, RunError
from fedglad.runs.line import clean

from .grid import Clock, LocalGrid, clients, model, numpy, received, record


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", made)
    monkeypatch.setattr("fedglad.federation.folder.time", made)
    return made


def go(rounds: int = 3, **settings: Any) -> FedGLAD:
    given: dict[str, Any] = {"fraction_evaluate": 0.0, **settings}
    strategy = FedGLAD(**given)
    strategy.start(LocalGrid(clients(3), salt=1), record(model()), num_rounds=rounds)
    return strategy


def test_functions_hear_of_rounds_once_they_are_saved(tmp_path: Path):
    heard: list[dict[str, Any]] = []
    alarms: list[dict[str, Any]] = []
    saved: list[int] = []

    def on_round(told: dict[str, Any]) -> None:
        heard.append(told)
        saved.append(len([*(tmp_path / "run/checkpoints").glob("*.json")]))

    tell = Tell(on_round=on_round, on_alarm=alarms.append)
    strategy = go(checkpoint_dir=tmp_path / "run", tell=tell)
    assert heard == strategy.records == Run(tmp_path / "run").rounds()
    assert saved == [1, 2, 2]
    assert alarms == [one for one in heard if one["alarm"] or one["status"] == "skipped"]


def test_a_skipped_round_is_an_alarm_and_what_fails_is_said(caplog: pytest.LogCaptureFixture):
    def fails(told: dict[str, Any]) -> None:
        raise OSError(f"no line to the pager in round {told['round']}")

    heard: list[int] = []
    tell = Tell(on_round=lambda told: heard.append(told["round"]), on_alarm=fails)
    strategy = FedGLAD(
        fraction_evaluate=0.0, tell=tell, on_short="skip", retries=0, min_clients=3, max_skipped=1.0
    )
    grid = LocalGrid(clients(3), never={1}, salt=1)
    with pytest.raises(Exception, match="none of 2 rounds"):
        strategy.start(grid, record(model()), num_rounds=2)
    assert heard == [0, 1]
    assert "on_alarm failed: OSError('no line to the pager in round 1')" in caplog.text


def test_a_line_of_json_for_each_round(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        strategy = go(tell=Tell(json=True))
    said = [entry.getMessage() for entry in caplog.records if entry.name == "flwr"]
    told = [json.loads(text) for text in said if text.startswith('{"round":')]
    assert [one["round"] for one in told] == [0, 1, 2]
    for line, one in zip(told, strategy.records, strict=True):
        assert line["gsi_all"] == one["gsi_all"]
        assert (line["cohort"], line["accepted"], line["status"]) == (3, 3, "stepped")
        assert clean(one)


def test_prometheus_finds_the_rounds_while_they_go_on_and_those_before(tmp_path: Path):
    port: list[int] = []
    counts: list[float] = []

    def scrape(told: dict[str, Any]) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port[0]}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain")
        counts.append(float(text.split("\nfedglad_round ")[1].split()[0]))

    folder = tmp_path / "run"
    strategy = go(rounds=2, checkpoint_dir=folder)
    tell = Tell(on_round=scrape, metrics=0)
    strategy = FedGLAD(
        fraction_evaluate=0.0, checkpoint_dir=folder, resume=True, tell=tell, adapter=Glad()
    )
    info = strategy._begin

    def begin(*arguments: Any) -> Any:
        session = info(*arguments)
        plain = session.info

        def heard(text: str, *values: Any) -> None:
            if "/metrics" in text:
                port.append(values[1])
            plain(text, *values)

        session.info = heard
        return session

    strategy._begin = begin  # type: ignore[method-assign]
    strategy.start(LocalGrid(clients(3), salt=1), record(model()), num_rounds=4)
    assert counts == [3.0, 4.0]
    with pytest.raises(urllib.error.URLError):  # it ends with the run
        urllib.request.urlopen(f"http://127.0.0.1:{port[0]}/metrics", timeout=5)


def test_a_port_that_is_taken_is_said(tmp_path: Path):
    with Tell(metrics=0).telling(None):  # nothing is served without a session
        pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ReportError, match="cannot be used for metrics"):
            go(tell=Tell(metrics=taken.getsockname()[1]))
    with pytest.raises(ValueError, match="a port is a number"):
        Tell(metrics=70000)


# ------------------------------------------------------------------------------------- what stays


def names(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "checkpoints").glob("*.json"))


def test_checkpoints_stay_by_a_rule(tmp_path: Path):
    go(7, checkpoint_dir=tmp_path / "two")
    assert names(tmp_path / "two") == [6, 7]
    go(7, checkpoint_dir=tmp_path / "every", keep=Keep(last=1, every=3))
    assert names(tmp_path / "every") == [3, 6, 7]


def test_the_best_rounds_checkpoint_stays(tmp_path: Path):
    scores = iter([0.1, 0.2, 0.9, 0.3, 0.4, 0.5])

    def tested(number: int, arrays: Any) -> Any:
        return MetricRecord({"accuracy": next(scores) if number else 0.0})

    strategy = FedGLAD(
        fraction_evaluate=0.0, checkpoint_dir=tmp_path / "run", keep=Keep(last=1, best=True)
    )
    grid = LocalGrid(clients(3), salt=1)
    strategy.start(grid, record(model()), num_rounds=6, evaluate_fn=tested)
    assert names(tmp_path / "run") == [3, 6]


# -------------------------------------------------------------------------------- a changed model


class Wider:
    """A client of a model with one more tensor, which it moves by one a round."""

    def __init__(self, index: int) -> None:
        self.plain = clients(3)[index]

    def __call__(self, message: Any, context: Any) -> Any:
        if message.metadata.message_type != "train":
            return self.plain(message, context)
        arrays = received(message)
        gate = arrays.pop("gate")
        moved = {**self.plain.train(arrays), "gate": gate + 1}
        content: dict[str, Any] = {
            "a": record(moved),
            "m": MetricRecord({"num-examples": self.plain.n}),
        }
        return Message(RecordDict(content), reply_to=message)


def test_a_model_that_was_changed_goes_on_only_if_that_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "run"
    settings: dict[str, Any] = {
        "optimizer": Momentum(lr=0.5),
        "checkpoint_dir": folder,
        "guard": None,
        "fraction_evaluate": 0.0,
    }
    go(3, **settings)
    whole = go(5, **settings | {"checkpoint_dir": tmp_path / "whole"})
    wider = {**model(), "gate": np.zeros(2, np.float32)}
    before = (folder / "rounds.jsonl").read_bytes()

    def on(**more: Any) -> Any:
        grid = LocalGrid([Wider(k) for k in range(3)], salt=1)
        strategy = FedGLAD(**settings, resume=True, **more)
        return strategy, strategy.start(grid, record(wider), num_rounds=5)

    with pytest.raises(RunError, match=r"other settings, model\.tensors = 2 and here 3"):
        on()
    assert (folder / "rounds.jsonl").read_bytes() == before
    strategy, result = on(migrate=True)
    assert "2 tensors are kept (weight, bias), 1 is new (gate)" in caplog.text
    assert len(strategy.records) == 5
    assert strategy.session
    assert whole.session
    for name in ("weight", "bias"):  # as if nothing had happened: each tensor is a group
        assert np.array_equal(numpy(result.arrays)[name], whole.session.server.state[name].numpy())
    # Each round Δ = 1: m = 1, then 1.9; ½ (1 + 1.9) by rate ½, times FedGLAD's factor of its group.
    scales = [one["groups"]["gate"]["scale"] for one in strategy.records[3:]]
    moved = 0.5 * (scales[0] + 0.9 * scales[0] + scales[1])
    assert np.allclose(numpy(result.arrays)["gate"], moved, rtol=1e-6)
    on(migrate=True)  # there is nothing more to do
