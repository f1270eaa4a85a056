"""The scores of single clients: by hand, the same in every engine and after every kill, refused."""

import json
import math
import os
import resource
import shutil
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, outcome
from torch import Tensor, nn

from fedglad import simulate
from fedglad.config.schema import Config, load
from fedglad.data import Synthetic
from fedglad.data.validation import HeldOut, clients_with_test, dealt, held_out
from fedglad.records import ClientScores, Round, Score
from fedglad.runs import RunError, check, execute
from fedglad.runs.reader import CLIENT_SCORES, Run
from fedglad.simulation.simulation import Simulation, drawn
from tests.runs.test_runs import Trap, stopped

QUICK = {
    **TINY,
    "engine.name": "serial",
    "rounds": 7,
    "checkpoint_every": 2,
    "data.clients": 12,
    "data.validation": 0.2,
    "average.name": "ema",
    "eval_clients": 5,
    "eval_clients_every": 3,
}
FEW = {**QUICK, "rounds": 3, "eval_clients_every": 1}


def config(settings: dict[str, Any] | None = None) -> Config:
    return load("digits", QUICK if settings is None else settings)[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    for name, settings in {"quick": QUICK, "few": FEW}.items():
        execute("digits", config(settings), out=folder / name)
    stopped(folder / "cut", 5, config())  # checkpoints 2 and 4; tested after rounds 3 and 6
    return {path.name: path for path in folder.iterdir()}


# ------------------------------------------------------------------------------------- by hand


def test_mean_worst_decile_and_spread():
    # 20 clients, 0.05 … 1.00: mean 0.525; worst two (0.05 + 0.10)/2 = 0.075; the variance of
    # 1 … n is (n² − 1)/12 = 399/12 = 33.25, times 0.05²: 0.083125.
    scores = tuple(k / 20 for k in range(1, 21))
    found = ClientScores(Score(), tuple(range(20)), scores).to_dict()
    assert found["count"] == 20
    assert found["mean"] == pytest.approx(0.525, abs=1e-15)
    assert found["worst_decile"] == pytest.approx(0.075, abs=1e-15)
    assert found["std"] == pytest.approx(math.sqrt(0.083125), abs=1e-15)
    assert "left_out" not in found


def test_the_worst_are_the_highest_where_less_is_better():
    # The worst of 3 is one, 8; mean (1 + 3 + 8)/3 = 4, squares 9 + 1 + 16 = 26.
    score = Score("perplexity", higher=False)
    found = ClientScores(score, (4, 5, 9), (3.0, 8.0, 1.0)).to_dict()
    assert found == {
        "score": "perplexity",
        "count": 3,
        "mean": 4.0,
        "worst_decile": 8.0,
        "std": math.sqrt(26 / 3),
    }


def test_a_client_without_a_score_is_left_out_and_counted():
    found = ClientScores(Score(), (1, 2, 3), (0.5, None, math.nan)).to_dict()
    assert (found["count"], found["left_out"], found["mean"], found["std"]) == (1, 2, 0.5, 0.0)


def test_nobody_and_infinity_give_no_figure():
    nobody = ClientScores(Score(), (1,), (None,)).to_dict()
    assert (nobody["count"], nobody["mean"], nobody["worst_decile"], nobody["std"]) == (
        0,
        *[None] * 3,
    )
    endless = ClientScores(Score("loss", higher=False), (1, 2), (1.0, math.inf)).to_dict()
    assert (endless["count"], endless["mean"], endless["worst_decile"]) == (2, None, None)
    json.dumps(endless, allow_nan=False)


class Told(nn.Module):
    """Says class 1 for a positive number, 0 otherwise; its parameter does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([-x, x], dim=1) + 0 * self.w


class Few:
    """Five clients: k of four answers of client k's held-out samples are 1; client 4 has none."""

    clients = 5

    def size(self, k: int) -> int:
        return 2

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.ones(2, 1), torch.tensor([0, 1])

    def test(self) -> tuple[Tensor, Tensor]:
        return self.client(0)

    def client_test(self, k: int) -> tuple[Tensor, Tensor] | None:
        if k == 4:
            return None
        return torch.ones(4, 1), (torch.arange(4) < k).long()


@pytest.mark.parametrize("engine", ["serial", "local", "batched"])
def test_each_client_is_tested_on_its_own_samples(engine: str):
    settings = {"rounds": 1, "engine.name": engine, "eval_clients": "all", "average.name": "ema"}
    settings |= {"sampler.clients_per_round": 2}
    [played] = simulate("digits", settings, model=Told(), data=Few())
    # The model always says 1: client k has k/4 right. Mean (0 + 1 + 2 + 3)/16 = 0.375.
    assert played.client_scores
    assert played.client_scores.ids == (0, 1, 2, 3, 4)
    assert played.client_scores.scores == (0.0, 0.25, 0.5, 0.75, None)
    record = played.to_dict()
    assert record["client_scores"]["mean"] == 0.375
    assert record["client_scores"]["worst_decile"] == 0.0
    assert record["client_scores"]["left_out"] == 1
    assert record["averaged_client_scores"] == record["client_scores"]


def test_all_of_a_clients_samples_are_measured_however_many_a_task_takes_at_a_time():
    """Fifty sequences at a time: of 120, those after the first fifty count, too."""

    class Speakers:
        clients = 1

        def size(self, k: int) -> int:
            return 4

        def client(self, k: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64)

        def test(self) -> tuple[Tensor, Tensor]:
            return self.client(0)

        def client_test(self, k: int) -> tuple[Tensor, Tensor]:
            said = (torch.arange(120) >= 50).long()[:, None].expand(120, 3)
            return torch.zeros_like(said), said

    given = {
        "rounds": 1,
        "sampler.clients_per_round": 1,
        "task.name": "next-token",
        "eval_clients": "all",
        "engine.name": "serial",
    }
    (only,) = simulate("digits", given, model=nn.Embedding(2, 2), data=Speakers())
    assert only.client_scores
    # Either way one of the two ids is always said: 50 or 70 of 120 sequences are right.
    assert only.client_scores.scores in ((50 / 120,), (70 / 120,))


class Broken(Few):
    """Client 1's file cannot be read, and client 2 kills its process."""

    def client_test(self, k: int) -> tuple[Tensor, Tensor] | None:
        if k == 1:
            raise OSError("no such file")
        if k == 2 and os.getpid() != PARENT:
            os._exit(9)
        return super().client_test(k)


PARENT = os.getpid()


def test_a_client_that_fails_is_left_out_alone(caplog: pytest.LogCaptureFixture):
    settings = {"rounds": 1, "eval_clients": "all", "engine.workers": 2}
    settings |= {"sampler.clients_per_round": 2, "average.name": "none"}
    [played] = simulate("digits", settings, model=Told(), data=Broken())
    assert played.client_scores
    assert played.client_scores.scores == (0.0, None, None, 0.75, None)
    assert played.to_dict()["client_scores"]["left_out"] == 3
    assert "client 2 could not be tested: its worker died" in caplog.text


# ------------------------------------------------------------------------------- whose samples


def test_the_share_of_a_client_is_what_was_taken_out_of_it():
    data = held_out(Named(), 0.5, seed=3)
    assert isinstance(data, HeldOut)
    for k in range(4):
        held = data.client_test(k)
        assert held is not None
        both = torch.cat([data.client(k)[0], held[0]]).flatten().sort().values
        assert torch.equal(both, Named().client(k)[0].flatten())
    parts = [data.client_test(k) for k in range(4)]
    assert torch.equal(data.validation_set()[0], torch.cat([p[0] for p in parts if p]))


class Named:
    """Client k has the numbers 10k … 10k + 7; it knows no test samples of single clients."""

    clients = 4

    def size(self, k: int) -> int:
        return 8

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.arange(8.0).view(8, 1) + 10 * k, torch.zeros(8, dtype=torch.int64)

    def test(self) -> tuple[Tensor, Tensor]:
        return self.client(0)


def test_samples_that_were_taken_first_are_dealt_by_class():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=30_000)
    rest, rows = np.arange(20_000), np.arange(20_000, 30_000)
    zeros = rest[labels[rest] == 0]
    ones = rest[labels[rest] == 1]
    # Client 0 has a quarter of class 0, client 1 the rest of it and all of class 1; nobody has 2.
    owners = [zeros[: len(zeros) // 4], np.concatenate([zeros[len(zeros) // 4 :], ones])]
    whose = dealt(labels, owners, rows, seed=5)
    first = whose[labels[rows] == 0]
    # A binomial share of n ≈ 3300 with p = 1/4: standard deviation √(p(1 − p)/n) ≈ 0.0075.
    assert abs(np.mean(first == 0) - 0.25) < 4 * 0.0075
    assert {*first.tolist()} == {0, 1}
    assert {*whose[labels[rows] == 1].tolist()} == {1}
    assert {*whose[labels[rows] == 2].tolist()} == {-1}
    assert np.array_equal(whose, dealt(labels, owners, rows, seed=5))


def test_targets_that_are_no_labels_are_dealt_by_size():
    owners = [np.arange(100), np.arange(100, 400)]
    whose = dealt(np.linspace(0, 1, 1400), owners, np.arange(400, 1400), seed=0)
    assert abs(np.mean(whose == 0) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000)


@pytest.mark.parametrize("partition", ["label-skew", "iid", f"{__name__}:Stripes"])
def test_every_validation_sample_is_somebodys(partition: str):
    settings = {"data.validation": 0.2, "data.partition": partition, "data.clients": 6}
    data = load("digits", settings)[1].load_data()
    parts = [held for k in range(6) if (held := data.client_test(k))]
    x, y = data.validation_set()
    assert sum(len(held[1]) for held in parts) == len(y)
    for k in range(6):  # only of classes that it trains on
        if (held := data.client_test(k)) and ":" not in partition:
            assert {*held[1].tolist()} <= {*data.client(k)[1].tolist()}
    rows = {row.numpy().tobytes() for row in x.flatten(1)}
    assert {row.numpy().tobytes() for held in parts for row in held[0].flatten(1)} == rows


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """An own partition: sample i belongs to client i modulo their number."""

    def split(self, labels: np.ndarray, clients: int, rng: Any) -> list[np.ndarray]:
        return [np.arange(k, len(labels), clients) for k in range(clients)]


def test_training_is_the_same_whoever_is_tested():
    plain = [*simulate(config({**QUICK, "eval_clients": 0}))]
    tested = [*simulate(config())]
    fields = ("test_loss", "validation_accuracy", "averaged_loss", "record")
    for ours, theirs in zip(plain, tested, strict=True):
        assert all(
            getattr(ours, name) == getattr(theirs, name) for name in fields if name != "record"
        )
        assert ours.record.to_dict() == theirs.record.to_dict()
    assert not any("client" in key for key in plain[-1].to_dict() if key != "clients")


# ------------------------------------------------------------------------------ who is drawn


def test_a_number_of_clients_is_drawn_once_by_the_seed():
    ids = [drawn(Synthetic(clients=1000), 20, seed) for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    assert len({*ids[0]}) == 20
    assert [*ids[0]] == sorted(ids[0])
    lines = [played.client_line() for played in simulate(config())]
    assert [line and line["round"] for line in lines] == [None, None, 2, None, None, 5, 6]
    assert len({tuple(line["ids"]) for line in lines if line}) == 1


def test_five_of_a_million_clients_cost_no_more_than_five():
    asked: list[int] = []

    class Many(Synthetic):
        def client_test(self, k: int) -> tuple[Tensor, Tensor]:
            asked.append(k)
            return super().client_test(k)

    data = Many(clients=10**6, samples=20)
    settings = {**QUICK, "data.validation": 0.0, "rounds": 2, "model.features": 60}
    plan = config(settings).plan(data=data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with closing(Simulation(plan)) as simulation:
        rounds = [*simulation.rounds()]
    assert len({*asked}) == 5
    assert len(asked) == 11  # one before the run, and both models in the last round
    assert rounds[-1].to_dict()["client_scores"]["count"] == 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB


def test_of_many_clients_those_are_drawn_that_gave_a_share():
    class Many(Named):
        clients = 5000

    data = held_out(Many(), 0.25, seed=1)
    asked = clients_with_test(data)
    assert len(asked) == 1000
    ids = drawn(data, 30, seed=1)
    assert {*ids} <= {*data.giving}
    assert all(data.client_test(k) is not None for k in ids)


def test_own_test_samples_come_before_a_share():
    class Partly(Named):
        """Clients 0 and 1 have a test of their own, a sample that is −1."""

        def client_test(self, k: int) -> tuple[Tensor, Tensor] | None:
            return (-torch.ones(1, 1), torch.zeros(1)) if k < 2 else None

    data = held_out(Partly(), 0.5, seed=3)
    sizes = [len(held[1]) for k in range(4) if (held := data.client_test(k))]
    assert sizes == [1, 1, 4, 4]
    assert drawn(Partly(), "all", 1) == drawn(data, "all", 1) == (0, 1, 2, 3)

    class Many(Partly):
        clients = 5000

    assert len(clients_with_test(held_out(Many(), 0.5))) == 5000
    assert len(clients_with_test(Many())) == 5000
    assert not clients_with_test(Named())


# --------------------------------------------------------------------------------- refused


def test_without_held_out_samples_it_is_refused_before_the_run(tmp_path: Path):
    settings = {**QUICK, "data.validation": 0.0}
    with pytest.raises(ValueError, match=r"eval_clients = 5: none of .*data\.validation=0\.1"):
        execute("digits", config(settings), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_clients_than_there_are_and_none_with_samples_are_refused():
    with pytest.raises(ValueError, match="eval_clients = 13: 12 clients may have held-out samples"):
        next(simulate(config({**QUICK, "eval_clients": 13})))

    class Empty(Few):
        def client_test(self, k: int) -> tuple[Tensor, Tensor] | None:
            return torch.ones(0, 1), torch.ones(0)

    with pytest.raises(ValueError, match="none of these clients has held-out samples"):
        drawn(Empty(), "all", 1)


# ------------------------------------------------------------------------------- in the folder


def test_the_table_and_the_summary_are_those_of_the_records(made: dict[str, Path]):
    run = Run(made["quick"])
    tables = run.client_scores()
    assert [table["round"] for table in tables] == [2, 5, 6]
    records = {record["round"]: record for record in run.rounds()}
    for table in tables:
        assert len(table["ids"]) == len(table["scores"]) == len(table["averaged_scores"]) == 5
        known = [score for score in table["scores"] if score is not None]
        found = records[table["round"]]["client_scores"]
        assert found["count"] == len(known)
        assert found["mean"] == pytest.approx(sum(known) / len(known))
        assert found["worst_decile"] == min(known)
    assert [t for t, record in records.items() if "client_scores" in record] == [2, 5, 6]
    summary, last = run.summary, records[6]
    assert summary
    for name in ("mean", "worst_decile", "std"):
        assert summary[f"last_client_{name}"] == last["client_scores"][name]
        assert summary[f"last_averaged_client_{name}"] == last["averaged_client_scores"][name]


def test_a_run_that_tests_no_client_has_no_table(tmp_path: Path):
    run = execute("digits", config({**FEW, "eval_clients": 0}), out=tmp_path / "run")
    assert not (run.folder / CLIENT_SCORES).exists()
    assert not any("client" in key for key in run.summary or {})
    assert check(run.folder).good


@pytest.mark.parametrize("workers", [1, 2])
def test_local_leaves_the_same_bytes(made: dict[str, Path], tmp_path: Path, workers: int):
    settings = {**QUICK, "engine.name": "local", "engine.workers": workers}
    execute("digits", config(settings), out=tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(made["quick"])


@pytest.mark.parametrize("after", range(7))
def test_a_run_killed_after_any_round_ends_with_the_same_bytes(
    made: dict[str, Path], tmp_path: Path, after: int
):
    stopped(tmp_path / "run", after, config())
    execute("digits", config(), out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(made["quick"])
    assert check(tmp_path / "run").good


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_crash_at_any_change_of_the_disk_ends_with_the_same_bytes(
    made: dict[str, Path], tmp_path: Path, part: int
):
    at, reached = 1 + part, True
    while reached:
        folder = tmp_path / str(at)
        if (child := os.fork()) == 0:
            with Trap(at, lambda: os._exit(9)):
                execute("digits", config(FEW), out=folder)
            os._exit(0)
        reached = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        execute("digits", config(FEW), out=folder, resume=True)
        assert outcome(folder) == outcome(made["few"]), f"after a crash at change {at}"
        assert check(folder).good
        at += 3
    assert at > 45


def lost(folder: Path) -> None:
    (folder / CLIENT_SCORES).unlink()


def cut(folder: Path) -> None:
    path = folder / CLIENT_SCORES
    path.write_bytes(path.read_bytes()[:-30])


def changed(folder: Path) -> None:
    path = folder / CLIENT_SCORES
    path.write_text(path.read_text().replace('"round": 2', '"round": 3'))


@pytest.mark.parametrize(("harm", "state"), [(lost, "missing"), (changed, "damaged")])
def test_check_sees_a_table_that_is_not_as_it_was_written(
    made: dict[str, Path], tmp_path: Path, harm: Callable[[Path], None], state: str
):
    folder = Path(shutil.copytree(made["quick"], tmp_path / "run"))
    harm(folder)
    found = {file.name: file.state for file in check(folder).files}
    assert found[CLIENT_SCORES] == state
    assert not check(folder).good


@pytest.mark.parametrize("harm", [lost, cut, changed])
def test_without_its_table_a_checkpoint_is_not_used(
    made: dict[str, Path], tmp_path: Path, harm: Callable[[Path], None]
):
    folder = Path(shutil.copytree(made["cut"], tmp_path / "run"))
    harm(folder)  # the cut one is of round 6, which no checkpoint has
    said: list[str] = []
    execute("digits", config(), out=folder, resume=True, on_lost=said.append)
    assert outcome(folder) == outcome(made["quick"])
    assert any(CLIENT_SCORES in text for text in said) == (harm is not cut)


def test_force_begins_the_table_anew(made: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "run"
    execute("digits", config(FEW), out=folder)
    execute("digits", config({**FEW, "eval_clients": 0}), out=folder, force=True)
    assert not (folder / CLIENT_SCORES).exists()
    execute("digits", config(FEW), out=folder, force=True)
    assert outcome(folder) == outcome(made["few"])
    with pytest.raises(RunError, match="another configuration"):
        execute("digits", config({**FEW, "eval_clients": 4}), out=folder)


def test_the_names_of_runs_stay():
    plain = load("digits")[1]
    same = {"eval_clients": 0, "eval_clients_every": 10, "stop_after": 0, "max_seconds": 0}
    assert load("digits", same)[1].hash() == plain.hash()
    assert load("digits", {"max_seconds": 60})[1] == load("digits", {"max_seconds": 60.0})[1]
    old = "\n".join(
        line for line in plain.to_toml().splitlines() if line.partition(" ")[0] not in same
    )
    assert "eval_clients" not in old
    assert Config.of(tomllib.loads(old)) == plain
    assert replace(plain, eval_clients=3).hash() != plain.hash()


def test_a_round_without_scores_has_no_line():
    [played] = simulate("digits", {**TINY, "rounds": 1, "engine.name": "serial"})
    assert isinstance(played, Round)
    assert played.client_line() is None
