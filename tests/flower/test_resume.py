"""A run that was cut short goes on where it was: the same bits as one that was not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from typer.testing import CliRunner

from fedglad.adapters import Glad, Pooled
from fedglad.analysis.comparison import compare
from fedglad.cli import app
from fedglad.core import checksums
from fedglad.flower import FedGLAD
from fedglad.optimizers import SGD, Adam, Momentum, Yogi
from fedglad.runs import Run
from fedglad.samplers.adafl import AdaFL
from fedglad.samplers.clustered import Clustered
from fedglad.samplers.md import MD
from fedglad.samplers.uniform import Uniform
from fedglad.weights import FedAdp

from .grid import Clock, LocalGrid, Normed, bits, clients, facts, model, numpy, record

ROUNDS = 6
COUNT = 7

SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "defaults": lambda: {"fraction_evaluate": 0.5},
    "adam": lambda: {"optimizer": Adam(), "sampler": Uniform(clients_per_round=4, seed="run")},
    "momentum, pooled": lambda: {"optimizer": Momentum(), "adapter": Pooled(gamma=0.5)},
    "yogi, none": lambda: {"optimizer": Yogi(), "adapter": None, "weighting": FedAdp()},
    "clustered": lambda: {"sampler": Clustered(clients_per_round=3, by="similarity")},
    "adafl": lambda: {"sampler": AdaFL(clients_per_round=3, alpha=0.1), "adapter": Glad(gamma=0.5)},
    "md": lambda: {"sampler": MD(clients_per_round=4), "optimizer": Adam()},
    "cosine": lambda: {"optimizer": SGD(schedule="cosine", over=ROUNDS)},
}


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    monkeypatch.setattr("fedglad.federation.folder.time", found)
    return found


def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """A number that tells models apart."""
    found = float(np.abs(numpy(arrays)["weight"]).sum())
    return MetricRecord({"accuracy": found % 1.0, "loss": found})


def stopping(last: int) -> Callable[[int, ArrayRecord], MetricRecord]:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == last:
            raise Stop
        return accuracy(server_round, arrays)

    return evaluate


def population(**settings: Any) -> LocalGrid:
    return LocalGrid(clients(COUNT, Normed), **settings)


def play(
    folder: Path | None,
    settings: dict[str, Any],
    grid: LocalGrid | None = None,
    *,
    rounds: int = ROUNDS,
    evaluate: Any = accuracy,
    start: Any = None,
) -> tuple[Any, list[dict[str, Any]]]:
    settings = {"fraction_evaluate": 0.0, "nodes": "partition-id", "resume": True, **settings}
    strategy = FedGLAD(checkpoint_dir=folder, seed=3, **settings)
    start = record(start or model(normed=True))
    grid = grid or population()
    found = strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluate)
    return bits(found.arrays), facts(strategy.records)


def lines(folder: Path) -> list[dict[str, Any]]:
    return facts(Run(folder).rounds())


def as_json(told: list[dict[str, Any]]) -> Any:
    return json.loads(json.dumps(told))


@cache
def whole(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A run that nothing interrupts, without a folder."""
    found, records = play(None, SETTINGS[name]())
    assert [told["round"] for told in records] == list(range(ROUNDS))
    return found, records


STOPS = [*((name, 3) for name in SETTINGS), ("adafl", 1), ("adafl", ROUNDS), ("adam", ROUNDS)]


@pytest.mark.parametrize(("name", "stop"), STOPS)
def test_stopped_in_evaluation_and_started_again(name: str, stop: int, tmp_path: Path):
    with pytest.raises(Stop):
        play(tmp_path / "run", SETTINGS[name](), evaluate=stopping(stop))
    found, told = play(tmp_path / "run", SETTINGS[name]())
    assert found == whole(name)[0]
    assert lines(tmp_path / "run") == as_json(told) == as_json(whole(name)[1])


@pytest.mark.parametrize("name", ["adam", "adafl"])
def test_a_folder_changes_nothing(name: str, tmp_path: Path):
    assert play(tmp_path / "run", SETTINGS[name]()) == whole(name)


@pytest.mark.parametrize("call", ["push", "pull"])
def test_the_superlink_dies_and_the_run_goes_on_elsewhere(call: str, tmp_path: Path):
    for attempt, most in enumerate((4, 3, 8)):
        grid = population()

        def fail(found: str, kind: str, grid: LocalGrid = grid, most: int = most) -> None:
            if found == call and kind == "train" and len(grid.asked()) >= most:
                raise ConnectionError("gone")

        grid.fails = fail
        with pytest.raises(ConnectionError, match="gone"):
            play(tmp_path / "run", SETTINGS["adafl"](), grid)
        done = [told["round"] for told in lines(tmp_path / "run")]
        assert done == list(range(len(done))), attempt
    found = play(tmp_path / "run", SETTINGS["adafl"]())
    assert found[0] == whole("adafl")[0]
    assert lines(tmp_path / "run") == as_json(whole("adafl")[1])


@pytest.mark.parametrize("name", ["defaults", "adam", "adafl"])
def test_more_rounds_later(name: str, tmp_path: Path):
    """A run of three rounds that is asked for six is one of six."""
    part = play(tmp_path / "run", SETTINGS[name](), rounds=3)
    assert len(part[1]) == 3
    found = play(tmp_path / "run", SETTINGS[name]())
    assert found[0] == whole(name)[0]
    assert lines(tmp_path / "run") == as_json(whole(name)[1])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == ROUNDS


def test_a_finished_run_trains_nobody(tmp_path: Path):
    once = play(tmp_path / "run", SETTINGS["adam"]())
    grid = population()
    assert play(tmp_path / "run", SETTINGS["adam"](), grid)[0] == once[0]
    assert grid.asked() == []
    assert lines(tmp_path / "run") == as_json(once[1])


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("adam", "key"), ("adafl", "name"), ("adafl", "partition-id"), ("md", "name")],
)
def test_clients_are_known_again_by_name_under_new_node_ids(name: str, nodes: str, tmp_path: Path):
    settings = SETTINGS[name]() | {"nodes": nodes}
    shape = {"named": True, "keyed": True}
    once = play(None, settings, population(**shape))
    with pytest.raises(Stop):
        play(tmp_path / "run", settings, population(**shape), evaluate=stopping(3))
    found = play(tmp_path / "run", settings, population(**shape, late={2: 4}))
    assert found == once


def newest(folder: Path) -> list[Path]:
    found = sorted((folder / "checkpoints").iterdir())
    last = found[-1].stem
    assert len({path.stem for path in found}) >= 2
    return [path for path in found if path.stem == last]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_checkpoint_is_not_used(damage: str, tmp_path: Path):
    with pytest.raises(Stop):
        play(tmp_path / "run", SETTINGS["adafl"](), evaluate=stopping(4))
    for path in newest(tmp_path / "run"):
        if path.suffix == ".safetensors":
            data = bytearray(path.read_bytes())
            data[-5] ^= 0xFF
            changed = {"cut": data[: len(data) // 2], "flip": data, "empty": b""}
            path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    found = play(tmp_path / "run", SETTINGS["adafl"]())
    assert found[0] == whole("adafl")[0]
    assert lines(tmp_path / "run") == as_json(whole("adafl")[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "x"),
        ("kind", []),
        ("names", 3),
        ("names", [[1]]),
        ("count", "x"),
        ("count", -1),
        ("count", 10**400),
        ("count", 10**9),
        ("online", None),
        ("nodes", {}),
    ],
)
def test_nodes_that_cannot_be_are_not_believed(key: str, value: Any, tmp_path: Path):
    with pytest.raises(Stop):
        play(tmp_path / "run", SETTINGS["adafl"](), evaluate=stopping(4))
    (path,) = [path for path in newest(tmp_path / "run") if path.suffix == ".json"]
    saved = json.loads(path.read_text())
    del saved["crc"]
    transport = saved["transport"]
    (transport if key == "nodes" else transport["nodes"])[key] = value
    path.write_text(checksums.json_with_crc(json.dumps(saved)))
    found = play(tmp_path / "run", SETTINGS["adafl"]())
    assert found[0] == whole("adafl")[0]
    assert lines(tmp_path / "run") == as_json(whole("adafl")[1])


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path):
    with pytest.raises(Stop):
        play(tmp_path / "run", SETTINGS["adam"](), evaluate=stopping(3))
    with open(tmp_path / "run" / "rounds.jsonl", "a") as file:
        file.write('{"round": 17, "stat')
    assert play(tmp_path / "run", SETTINGS["adam"]())[0] == whole("adam")[0]
    assert lines(tmp_path / "run") == as_json(whole("adam")[1])


def test_another_model_is_refused_and_nothing_lost(tmp_path: Path):
    with pytest.raises(Stop):
        play(tmp_path / "run", SETTINGS["adam"](), evaluate=stopping(3))
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    other = model(normed=True)
    other["weight"] = np.zeros((4, 3), np.float32)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)weight|model"):
        play(tmp_path / "run", SETTINGS["adam"](), start=other)
    other = model(normed=True) | {"head": np.zeros(2, np.float32)}
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)head|model"):
        play(tmp_path / "run", SETTINGS["adam"](), start=other)
    after = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert after == before
    assert play(tmp_path / "run", SETTINGS["adam"]()) == whole("adam")


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": SGD(lr=0.3)},
        {"optimizer": Adam(), "adapter": None},
        {"optimizer": Adam(), "sampler": Uniform(clients_per_round=2)},
    ],
)
def test_other_settings_are_refused(other: dict[str, Any], tmp_path: Path):
    with pytest.raises(Stop):
        play(tmp_path / "run", SETTINGS["adam"](), evaluate=stopping(3))
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)another|other|differ|setting"):
        play(tmp_path / "run", other)


def test_two_at_once_are_refused(tmp_path: Path):
    errors: list[Exception] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 2 and not errors:
            with pytest.raises((ValueError, RuntimeError), match=r"another process|being written"):
                play(tmp_path / "run", SETTINGS["adam"]())
            errors.append(Exception())
        return accuracy(server_round, arrays)

    assert play(tmp_path / "run", SETTINGS["adam"](), evaluate=evaluate) == whole("adam")
    assert errors


def test_the_folder_is_that_of_a_run(tmp_path: Path):
    play(tmp_path / "run", SETTINGS["adam"]())
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found >= {"config.toml", "rounds.jsonl", "summary.json", "checkpoints", "log.txt"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    tested = [told["test_accuracy"] for told in lines(tmp_path / "run")]
    assert summary["final_accuracy"] == tested[-1]
    assert summary["last10_accuracy"] == pytest.approx(sum(tested) / len(tested))
    assert (summary["rounds"], summary["skipped"]) == (ROUNDS, 0)


def test_rejections_are_in_the_folders_log(tmp_path: Path):
    grid = population()
    grid.clients[2].n = -5  # pyright: ignore
    play(tmp_path / "run", {}, grid)
    assert "is -5" in (tmp_path / "run" / "log.txt").read_text()


def test_two_runs_can_be_compared(tmp_path: Path):
    for name, adapter in (("none", None), ("glad", Glad(gamma=0.5))):
        play(tmp_path / name, {"adapter": adapter})
    found = compare([tmp_path / "none", tmp_path / "glad"])
    labels = [group.label for group in found.groups]
    assert [("none" in label, "glad" in label) for label in labels] == [
        (True, False),
        (False, True),
    ]
    for name, group in zip(("none", "glad"), found.groups, strict=True):
        tested = [told["test_accuracy"] for told in lines(tmp_path / name)]
        assert group.mean == pytest.approx(sum(tested) / len(tested))
    said = CliRunner().invoke(app, ["compare", str(tmp_path / "none"), str(tmp_path / "glad")])
    assert said.exit_code == 0, said.output
    assert "glad" in said.output


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)file.*checkpoint_dir"):
        play(tmp_path / "file", {})


def test_without_an_accuracy_there_is_still_a_summary(tmp_path: Path):
    play(tmp_path / "run", {}, evaluate=None)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == ROUNDS
    assert all(told["test_accuracy"] is None for told in lines(tmp_path / "run"))


CHILD = """
import sys
from pathlib import Path
from flower.test_resume import SETTINGS, accuracy, play

def evaluate(server_round, arrays):
    print(server_round, flush=True)
    if server_round == int(sys.argv[3]):
        import time; time.sleep(600)
    return accuracy(server_round, arrays)

play(Path(sys.argv[1]), SETTINGS[sys.argv[2]](), evaluate=evaluate)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "adafl"])
def test_killed_for_real_and_started_again(name: str, tmp_path: Path):
    tests = str(Path(__file__).parents[1])
    for stop in ("2", "4"):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "run"), name, stop],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
        )
        assert child.stdout
        with child.stdout:
            assert any(line.strip() == stop for line in child.stdout)
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    found = play(tmp_path / "run", SETTINGS[name]())
    assert found[0] == whole(name)[0]
    assert lines(tmp_path / "run") == as_json(whole(name)[1])
