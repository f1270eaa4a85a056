"""Where a run's files go: a folder for every run, and going on only where that is asked for."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from fedglad.federation.app import NAME, write
from fedglad.federation.folder import run_folder
from fedglad.flower import FedGLAD
from fedglad.optimizers import SGD, Adam
from fedglad.runs import Run, RunError
from fedglad.runs.folder import locked
from fedglad.samplers.uniform import Uniform

from .grid import Clock, LocalGrid, clients, model, record


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", made)
    monkeypatch.setattr("fedglad.federation.folder.time", made)
    return made


def go(path: Path | str, rounds: int = 2, **settings: Any) -> Any:
    strategy = FedGLAD(fraction_evaluate=0.0, checkpoint_dir=path, **settings)
    strategy.start(LocalGrid(clients(3)), record(model()), num_rounds=rounds)
    return strategy


def test_every_run_has_its_own_folder_and_resume_goes_on_with_the_last(tmp_path: Path):
    out = tmp_path / "out" / "{run}"
    assert go(out).folder == tmp_path / "out/1"
    assert go(out, 3).folder == tmp_path / "out/2"
    (tmp_path / "out/notes").mkdir()
    (tmp_path / "out/3").mkdir()  # of a run that never had a round
    again = go(out, 5, resume=True)
    assert again.folder == tmp_path / "out/2"
    assert len(again.records) == 5
    assert len(Run(tmp_path / "out/1").rounds()) == 2
    assert go(out).folder == tmp_path / "out/4"
    assert go(tmp_path / "none" / "{run}", resume=True).folder == tmp_path / "none/1"


def test_two_that_begin_at_once_have_two_folders(tmp_path: Path):
    found: list[Path | None] = []
    begin = threading.Barrier(8)

    def ask() -> None:
        begin.wait()
        found.append(run_folder(tmp_path / "{run}"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in found if path} == {str(k) for k in range(1, 9)}


@pytest.mark.parametrize("path", ["{run}/out", "out-{run}", "{run}/{run}"])
def test_a_run_stands_for_the_last_folder_alone(tmp_path: Path, path: str):
    with pytest.raises(ValueError, match=r"{run} stands for the last folder"):
        go(tmp_path / path)


def test_nothing_is_a_success_without_training(tmp_path: Path):
    go(tmp_path / "run", 3)
    with pytest.raises(RunError, match=r"finished already after 3 rounds, nothing was trained"):
        go(tmp_path / "run", 3)
    with pytest.raises(RunError, match=r"ended after round 3 of 5.* resume=True goes on with it"):
        go(tmp_path / "run", 5)
    assert len(go(tmp_path / "run", 5, resume=True).records) == 5


def test_who_asks_to_go_on_with_a_finished_run_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    go(tmp_path / "run", 3)
    before = (tmp_path / "run/model.safetensors").read_bytes()
    go(tmp_path / "run", 3, resume=True)
    log = (tmp_path / "run/log.txt").read_text("utf-8")
    assert "finished already after 3 rounds, nothing was trained. To go on, raise" in log
    assert (tmp_path / "run/model.safetensors").read_bytes() == before


def test_a_folder_without_a_finished_round_is_nobodys(tmp_path: Path):
    class Stop(Exception):
        pass

    def stop(server_round: int, arrays: Any) -> None:
        raise Stop

    strategy = FedGLAD(checkpoint_dir=tmp_path / "run", optimizer=Adam())
    with pytest.raises(Stop):
        strategy.start(LocalGrid(clients(3)), record(model()), evaluate_fn=stop)
    assert (tmp_path / "run/config.toml").is_file()
    assert go(tmp_path / "run", optimizer=SGD(lr=0.5)).records  # other settings
    assert "lr = 0.5" in (tmp_path / "run/config.toml").read_text("utf-8")


def test_all_settings_that_differ_are_named(tmp_path: Path):
    go(tmp_path / "run")
    other = {"optimizer": SGD(lr=0.5), "sampler": Uniform(clients_per_round=2), "seed": 4}
    with pytest.raises(RunError) as caught:
        go(tmp_path / "run", 3, resume=True, **other)
    for named in ("server.lr = 1.0 and here 0.5", "seed = 0 and here 4", "sampler.name = "):
        assert named in str(caught.value)


def test_the_lock_is_waited_for_some_seconds(tmp_path: Path, clock: Clock):
    """A run that is just ending lets go of it."""
    (tmp_path / "run").mkdir()
    other = locked(tmp_path / "run")
    other.__enter__()

    def let_go() -> None:
        if len(clock.naps) == 4:
            other.__exit__(None, None, None)

    clock.on_nap = let_go
    assert go(tmp_path / "run").records
    clock.on_nap = lambda: None
    with locked(tmp_path / "run"):
        begin = clock.now
        with pytest.raises(RunError, match=r"written by another run: .*flwr stop"):
            go(tmp_path / "run", 4, resume=True)
        assert 5 <= clock.now - begin <= 15


def test_the_log_has_what_the_terminal_had(tmp_path: Path):
    go(tmp_path / "run")
    log = (tmp_path / "run/log.txt").read_text("utf-8")
    for line in ("[ROUND 2/2]", "Optimizer: SGD(lr=1.0", "Aggregated MetricRecord: ", "GSI "):
        assert line in log
    assert "WARNING" not in log


@dataclass(frozen=True, kw_only=True)
class Scheduled(SGD):
    """A setting that TOML cannot hold."""

    by: Annotated[Any, "a function"] = None


class Plan:
    """A schedule of somebody's own."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __repr__(self) -> str:
        return f"Plan({self.rate})"


def test_settings_that_toml_cannot_hold_are_compared_too(tmp_path: Path):
    go(tmp_path / "run", optimizer=Scheduled(by=Plan(0.5)))
    assert len(go(tmp_path / "run", 3, resume=True, optimizer=Scheduled(by=Plan(0.5))).records) == 3
    with pytest.raises(RunError, match=r"other settings, server: .*Plan\(0.5\).* here .*Plan\(0.7"):
        go(tmp_path / "run", 4, resume=True, optimizer=Scheduled(by=Plan(0.7)))


def test_what_changed_in_the_app_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    files = {"app/task.py": "1", "app/old.py": "2", "pyproject.toml": "3"}
    monkeypatch.setattr("fedglad.flower.strategy.fingerprints", lambda grid: files)  # pyright: ignore
    go(tmp_path / "run")
    files = {"app/task.py": "9", "pyproject.toml": "3"}
    go(tmp_path / "run", 3, resume=True)
    log = (tmp_path / "run/log.txt").read_text("utf-8")
    assert (
        "The app is not the one that this run went by so far: app/task.py changed, app/old.py"
        in (log)
    )
    assert json.loads((tmp_path / "run" / NAME).read_text())["files"] == files


def test_a_record_of_the_app_that_cannot_be_read_is_none(tmp_path: Path):
    (tmp_path / NAME).write_text("{")
    assert write(tmp_path, {}, {}) == ""
