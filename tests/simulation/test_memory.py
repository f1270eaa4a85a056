"""What clients remember: committed with the run or not at all, and on the disk."""

import errno
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from run_support import TINY, cli, environment, facts, outcome, start, tiny_data, until
from runs.test_runs import Trap, cut, stopped
from torch import Tensor, nn

from fedglad.config.schema import Config, load, simulate
from fedglad.core import checkpoint
from fedglad.core import vectors as vectors_on_disk
from fedglad.core.memory import Memories
from fedglad.runs import Run, RunError
from fedglad.runs import execute as executed
from fedglad.simulation.simulation import Simulation

execute = partial(executed, keep_state=True)  # memories and checkpoints are looked at

ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"engine.name": "serial"},
    "local": {"engine.name": "local", "engine.workers": 2},
    "batched": {"engine.name": "batched"},
}


def vectors(value: float) -> dict[str, Tensor]:
    return {"c": torch.full((3,), value)}


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


# ------------------------------------------------------------------------------------- by itself


def test_what_is_proposed_counts_only_when_it_is_settled(tmp_path: Path):
    memories = Memories(tmp_path)
    assert memories.version(7) == 0
    assert memories.read(7, 0) == {}
    memories.propose(7, 0, vectors(1.5))
    assert memories.version(7) == 0
    memories.settle(0, [7, 8], [7])
    assert memories.version(7) == 1
    assert memories.read(7, 1)["c"].tolist() == [1.5, 1.5, 1.5]
    assert memories.version(8) == 0  # it proposed nothing
    memories.propose(7, 4, vectors(2.5))
    memories.settle(4, [7], [])
    assert memories.version(7) == 1
    assert len(files(tmp_path)) == 1  # of what was not accepted nothing is left


def test_another_process_reads_what_was_settled_and_proposes(tmp_path: Path):
    memories = Memories(tmp_path)
    memories.propose(1, 0, vectors(3.0))
    memories.settle(0, [1], [1])
    version = memories.version(1)
    if (child := os.fork()) == 0:
        held = memories.read(1, version)
        memories.propose(1, 1, {"c": held["c"] * 2})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memories.settle(1, [1], [1])
    assert memories.read(1, memories.version(1))["c"].tolist() == [6.0, 6.0, 6.0]


def test_a_memory_is_bit_for_bit_what_was_proposed(tmp_path: Path):
    odd = torch.tensor([math.nan, math.inf, -0.0, 1e-45, 3.0])
    given = {"a": odd, "b": torch.arange(5, dtype=torch.float64), "none": torch.zeros(0)}
    memories = Memories(tmp_path)
    memories.propose(0, 0, given)
    memories.settle(0, [0], [0])
    found = memories.read(0, 1)
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert found[name].dtype == value.dtype
        assert found[name].numpy().tobytes() == value.numpy().tobytes()


def test_vectors_that_share_their_memory_can_be_proposed(tmp_path: Path):
    """A method may give back what it was given: at first, one and the same zeros."""
    zeros = torch.zeros(4)
    memories = Memories(tmp_path)
    memories.propose(0, 0, {"first": zeros, "second": zeros, "half": zeros[::2]})
    memories.settle(0, [0], [0])
    assert {n: v.tolist() for n, v in memories.read(0, 1).items()} == {
        "first": [0.0] * 4,
        "second": [0.0] * 4,
        "half": [0.0] * 2,
    }


def test_a_damaged_memory_is_an_error_that_says_so(tmp_path: Path):
    memories = Memories(tmp_path)
    memories.propose(0, 0, {"c": torch.ones(100)})
    memories.settle(0, [0], [0])
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    cut(path)
    with pytest.raises(OSError, match="damaged"):
        memories.read(0, 1)


def test_a_foreign_file_in_the_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("mine")
    memories = Memories(tmp_path)
    memories.propose(0, 0, vectors(1.0))
    memories.restore(0)
    assert files(tmp_path) == ["cat.jpg"]


CLIENTS = [0, 1, 999, 1000, 5_000_000]
SOME = st.lists(st.sampled_from(CLIENTS), unique=True)


class Remembering(RuleBasedStateMachine):
    """Memories against a plain dict: rounds, saves and crashes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.memories = Memories(self.folder)
        self.value = 0.0
        self.t = 0
        self.now: dict[int, float] = {}
        self.saved: list[tuple[int, dict[int, float]]] = [(0, {})]

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(cohort=SOME, failed=SOME, rejected=SOME, again=SOME)
    def play(
        self, cohort: list[int], failed: list[int], rejected: list[int], again: list[int]
    ) -> None:
        """A round: some fail, some propose twice (their worker died), some are rejected."""
        for client in (c for c in cohort if c not in failed):
            for _ in range(1 + (client in again)):
                self.value += 1
                self.memories.propose(client, self.t, vectors(self.value))
            if client not in rejected:
                self.now[client] = self.value
        accepted = [c for c in cohort if c not in failed and c not in rejected]
        self.memories.settle(self.t, cohort, accepted)
        self.t += 1

    @rule(cohort=SOME, rounds=st.integers(1, 4))
    def play_and_save(self, cohort: list[int], rounds: int) -> None:
        """Several good rounds of the same clients."""
        for _ in range(rounds):
            self.play(cohort, [], [], [])
        self.save()

    @rule(cohort=SOME)
    def abandon(self, cohort: list[int]) -> None:
        """A round that is given up: its proposals stay, and must not count later."""
        for client in cohort:
            self.memories.propose(client, self.t, vectors(-1.0))
        self.go_back(1)

    @rule()
    def sync(self) -> None:
        self.memories.sync()

    @rule()
    def save(self) -> None:
        """As a run does: two checkpoints are kept, and what they need."""
        self.memories.sync()
        self.saved = [*(s for s in self.saved if s[0] < self.t), (self.t, dict(self.now))][-2:]
        self.memories.prune(self.saved[0][0])

    @rule(depth=st.integers(1, 2))
    def crash(self, depth: int) -> None:
        """A new process goes on from the last checkpoint or, that being damaged, the first."""
        self.memories = Memories(self.folder)
        self.go_back(depth)

    def go_back(self, depth: int) -> None:
        self.saved = self.saved[: max(1, len(self.saved) + 1 - depth)]
        self.t, now = self.saved[-1]
        self.now = dict(now)
        self.memories.restore(self.t)

    @rule()
    def prune(self) -> None:
        self.memories.prune(self.saved[0][0])

    @invariant()
    def everybody_remembers_what_was_settled(self) -> None:
        for client in CLIENTS:
            version = self.memories.version(client)
            found = self.memories.read(client, version)
            wanted = vectors(self.now[client]) if client in self.now else {}
            assert {n: v.tolist() for n, v in found.items()} == {
                n: v.tolist() for n, v in wanted.items()
            }
            assert 0 <= version <= self.t

    @invariant()
    def both_checkpoints_find_what_was_remembered_then(self) -> None:
        """As `restore` would: of each client the newest that is not newer than the checkpoint."""
        for t, then in self.saved:
            known: dict[int, int] = {}
            for name in files(self.folder):
                client, version = map(int, name.split(".")[:2])
                if version <= t:
                    known[client] = max(known.get(client, 0), version)
            found = {c: self.memories.read(c, v)["c"][0].item() for c, v in known.items()}
            assert found == then

    @invariant()
    def nothing_is_left_of_what_was_not_accepted(self) -> None:
        assert all(name.endswith(".safetensors") for name in files(self.folder))

    @invariant()
    def nothing_is_kept_that_nobody_can_ask_for(self) -> None:
        """Of a client its memory now, and as it was at each of two checkpoints."""
        owners = [name.split(".")[0] for name in files(self.folder)]
        assert all(owners.count(owner) <= 3 for owner in owners)


TestRemembering = Remembering.TestCase
TestRemembering.settings = settings(max_examples=30, stateful_step_count=20)


# -------------------------------------------------------------------------------- in a simulation


class Flawed:
    """Twelve clients; the n-th time client k is asked, its inputs are NaN if `bad(k, n)`."""

    clients = 12

    def __init__(self, bad: Callable[[int, int], bool]) -> None:
        self.inner, self.bad = tiny_data(*[6] * 12), bad
        self.asked: Any = multiprocessing.Array("i", 12)

    def size(self, k: int) -> int:
        return 6

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        self.asked[k] += 1
        x, y = self.inner.client(k)
        return (x * math.nan if self.bad(k, self.asked[k]) else x), y

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()


TALLY = {
    "client.name": "simulation.support:Tally",
    "client.batch_size": 8,
    "sampler.clients_per_round": 7,
    "adapter.name": "none",
}


def tallies(simulation: Simulation) -> dict[int, float]:
    """How many rounds each client remembers; 0 if it remembers nothing."""
    memories = simulation.memories
    assert memories
    held = {k: memories.read(k, memories.version(k)) for k in range(simulation.parts.data.clients)}
    return {k: own["rounds"][0].item() if own else 0.0 for k, own in held.items()}


def accepted(rounds: list[dict[str, Any]]) -> dict[int, float]:
    """In how many stepped rounds each of twelve clients was let in."""
    found = dict.fromkeys(range(12), 0.0)
    for told in rounds:
        for client in told["clients"]:
            if told["status"] == "stepped" and "rejected" not in client:
                found[client["id"]] += 1
    return found


def counted(overrides: Mapping[str, Any], data: Any) -> list[dict[str, Any]]:
    """Plays, and checks after every round that clients remember just the rounds they were in."""
    plan = load("digits", {**TALLY, **overrides})[1].plan(model=nn.Linear(64, 10), data=data)
    rounds: list[dict[str, Any]] = []
    with closing(Simulation(plan)) as simulation:
        for found in simulation.rounds():
            rounds.append(facts(found))
            assert tallies(simulation) == accepted(rounds)
    return rounds


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rejected_client_keeps_the_memory_it_had(engine: str):
    """Every second time a client is asked it brings NaN."""
    data = Flawed(lambda k, n: n % 2 == 0)
    rounds = counted({**ENGINES[engine], "rounds": 6}, data)
    rejected = [c for found in rounds for c in found["clients"] if "rejected" in c]
    assert len(rejected) > 5
    assert all("NaN" in c["rejected"] for c in rejected)
    assert all(found["status"] == "stepped" for found in rounds)
    assert max(accepted(rounds).values()) >= 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_a_filter_leaves_out_keeps_the_memory_it_had(engine: str):
    filter = {"filter.name": "multi-krum", "filter.f": 2, "filter.m": 4}
    rounds = counted({**ENGINES[engine], **filter, "rounds": 4}, Flawed(lambda k, n: False))
    left = [c for found in rounds for c in found["clients"] if "rejected" in c]
    assert len(left) == 4 * 3
    assert all("left out by" in c["rejected"] for c in left)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_round_changes_no_memory(engine: str):
    """Krum of 7 with f = 2 needs seven: with a client rejected the round is skipped, and the six
    good ones, whose new memories are already written, forget it again."""
    filter = {"filter.name": "multi-krum", "filter.f": 2, "filter.m": 4}
    data = Flawed(lambda k, n: k == 3 and n == 2)
    rounds = counted({**ENGINES[engine], **filter, "rounds": 5}, data)
    assert sorted(found["status"] for found in rounds) == ["skipped"] + ["stepped"] * 4


@pytest.mark.parametrize(
    "engine",
    [
        "serial",
        "local",
        "batched",
    ],
)
def test_a_memory_that_is_gone_stops_the_run(temporary: Path, engine: str):
    """It is no client's fault, and to leave the client out for it would change the result."""
    given = {**SCAFFOLD, **ENGINES[engine], "data.clients": 3, "rounds": 3}
    rounds: Any = simulate("digits", given)
    next(rounds)
    for path in temporary.rglob("0.1.safetensors"):
        path.unlink()
    with closing(rounds), pytest.raises(OSError, match="no saved state"):
        next(rounds)


def test_without_a_method_that_remembers_there_are_none():
    with closing(Simulation(load("digits", TINY)[1].plan())) as simulation:
        assert simulation.memories is None


# ------------------------------------------------------------------------- the temporary folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for temporary folders, for this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


SCAFFOLD = {
    **TINY,
    "client.name": "scaffold",
    "client.optimizer": "sgd",
    "client.lr": 0.05,
    "client.batch_size": 16,
    "engine.name": "serial",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_simulate_removes_its_folder_at_the_end(temporary: Path, engine: str):
    given = {**SCAFFOLD, **ENGINES[engine], "rounds": 3}
    seen = [len(files(temporary)) for _ in simulate("digits", given)]
    assert all(seen)
    assert list(temporary.iterdir()) == []


def test_simulate_removes_its_folder_when_it_is_closed_early(temporary: Path):
    rounds: Any = simulate("digits", SCAFFOLD)
    next(rounds)
    assert files(temporary)
    rounds.close()
    assert list(temporary.iterdir()) == []


def test_simulate_removes_its_folder_when_it_is_dropped(temporary: Path):
    rounds: Any = simulate("digits", SCAFFOLD)
    next(rounds)
    del rounds
    assert list(temporary.iterdir()) == []


class Untestable(nn.Linear):
    """Raises when it is tested for the second time."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.tests = 0

    def forward(self, input: Tensor) -> Tensor:
        self.tests += not self.training
        if self.tests > 1:
            raise RuntimeError("a bug in an own model")
        return super().forward(input.flatten(1))


def test_simulate_removes_its_folder_when_it_raises(temporary: Path):
    with pytest.raises(RuntimeError, match="own model"):
        list(simulate("digits", SCAFFOLD, model=Untestable()))
    assert list(temporary.iterdir()) == []


class Mixed(nn.Module):
    """Two dtypes, which no engine can train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1)).double())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_simulation_that_cannot_start_leaves_no_folder(temporary: Path, engine: str):
    with pytest.raises(ValueError, match="one dtype"):
        next(simulate("digits", {**SCAFFOLD, **ENGINES[engine]}, model=Mixed()))  # type: ignore
    given = {**SCAFFOLD, **ENGINES[engine], "engine.device": "nonsense"}
    with pytest.raises(ValueError, match="device"):
        next(simulate("digits", given))  # type: ignore
    assert list(temporary.iterdir()) == []


def test_a_long_simulation_keeps_one_file_a_client(temporary: Path):
    """Nobody can go back in it: what is replaced is of no use to anyone."""
    given = {**SCAFFOLD, "rounds": 12, "data.clients": 5, "sampler.clients_per_round": 4}
    for _ in simulate("digits", given):
        assert len(files(temporary)) <= 5


# ------------------------------------------------------------------------------------ in a run

QUICK = {**SCAFFOLD, "client.clients": 8, "data.clients": 8, "sampler.clients_per_round": 4}
QUICK |= {"rounds": 8, "client.batch_size": 64}


def quick(every: int, **more: Any) -> Config:
    return load("digits", {**QUICK, "checkpoint_every": every, **more})[1]


def remembered(folder: Path, rounds: int) -> dict[int, Any]:
    """What each client remembers after so many rounds, read from the disk alone."""
    newest: dict[int, tuple[int, Path]] = {}
    for path in (folder / "memories").rglob("*.safetensors"):
        client, version = map(int, re.findall(r"\d+", path.name))
        assert version <= rounds
        newest[client] = max(newest.get(client, (0, path)), (version, path))
    return {
        client: (version, {n: v.tolist() for n, v in checkpoint.read(path)[0].items()})
        for client, (version, path) in sorted(newest.items())
    }


def result(folder: Path) -> tuple[Any, ...]:
    """All that a finished run leaves, memories too."""
    rounds = len(Run(folder).rounds())
    return *outcome(folder), remembered(folder, rounds)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, ...]]:
    """What the quick run gives when nothing happens to it, by checkpoint_every."""
    found: dict[int, tuple[Any, ...]] = {}
    for every in (2, 3):
        folder = tmp_path_factory.mktemp("runs") / "reference"
        execute("digits", quick(every), out=folder)
        found[every] = result(folder)
        assert len(found[every][-1]) == 8  # all clients had their turn
    return found


def test_the_memories_make_a_difference(tmp_path: Path, references: dict[int, tuple[Any, ...]]):
    """Else what follows would prove nothing."""
    execute("digits", quick(2), out=tmp_path / "run")
    stopped(tmp_path / "cut", 5, quick(2))
    shutil.rmtree(tmp_path / "cut" / "memories")
    for path in (tmp_path / "cut" / "checkpoints").glob("*.json"):
        saved = json.loads(path.read_text())
        del saved["memories"], saved["crc"]  # else they would be missed
        path.write_text(json.dumps(saved))
    execute("digits", quick(2), out=tmp_path / "cut", resume=True)
    assert result(tmp_path / "run") == references[2]
    assert outcome(tmp_path / "cut")[1] != references[2][1]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("after", range(8))
def test_a_run_stopped_after_any_round_goes_on_with_the_memories_of_its_checkpoint(
    tmp_path: Path, references: dict[int, tuple[Any, ...]], after: int, every: int
):
    folder = tmp_path / "run"
    stopped(folder, after, quick(every))
    versions = [int(name.split(".")[1]) for name in files(folder / "memories")]
    assert max(versions) == after + 1  # newer than any checkpoint
    execute("digits", quick(every), out=folder, resume=True)
    assert result(folder) == references[every]


@pytest.mark.parametrize("engine", ["serial", "local", "batched"])
def test_every_engine_goes_on_with_the_memories(tmp_path: Path, engine: str):
    config = load("digits", {**QUICK, "checkpoint_every": 3, **ENGINES[engine]})[1]
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", 4, config)
    execute("digits", config, out=tmp_path / "cut", resume=True)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def test_a_run_can_go_on_in_another_engine(tmp_path: Path, references: dict[int, tuple[Any, ...]]):
    stopped(tmp_path / "run", 4, quick(2))
    local = load("digits", {**QUICK, "checkpoint_every": 2, **ENGINES["local"]})[1]
    execute("digits", local, out=tmp_path / "run", resume=True)
    assert result(tmp_path / "run") == references[2]


@pytest.mark.parametrize("every", [2, 3])
def test_a_damaged_checkpoint_is_left_for_the_one_before_with_its_memories(
    tmp_path: Path, references: dict[int, tuple[Any, ...]], every: int
):
    folder = tmp_path / "run"
    stopped(folder, 7, quick(every))  # checkpoints 4 and 6, or 3 and 6
    cut(folder / "checkpoints" / "000006.safetensors")
    seen: list[int] = []
    execute("digits", quick(every), out=folder, resume=True, on_round=lambda f: seen.append(f.t))
    assert seen[0] == {2: 4, 3: 3}[every]
    assert result(folder) == references[every]


def test_all_checkpoints_damaged_starts_without_memories(
    tmp_path: Path, references: dict[int, tuple[Any, ...]]
):
    folder = tmp_path / "run"
    stopped(folder, 7, quick(2))
    for path in (folder / "checkpoints").glob("*.safetensors"):
        cut(path)
    execute("digits", quick(2), out=folder, resume=True)
    assert result(folder) == references[2]


CHANGES = 150  # the quick run renames, removes and syncs some 140 times


@pytest.mark.parametrize(
    "moments",
    [range(5, CHANGES, 40), pytest.param(range(1, CHANGES, 2), marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_a_crash_at_any_change_of_the_disk_loses_no_memory(
    tmp_path: Path, references: dict[int, tuple[Any, ...]], moments: range
):
    reached = 0
    for at in moments:
        folder = tmp_path / str(at)
        if (child := os.fork()) == 0:
            with Trap(at, lambda: os._exit(9)):
                execute("digits", quick(3), out=folder)
            os._exit(0)
        reached += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        execute("digits", quick(3), out=folder, resume=True)
        assert result(folder) == references[3], f"after a crash at change {at}"
    assert reached > len(moments) // 2


def test_what_a_kill_left_among_the_memories_is_cleared_away(
    tmp_path: Path, references: dict[int, tuple[Any, ...]]
):
    folder = tmp_path / "run"
    stopped(folder, 4, quick(2))
    shelf = next((folder / "memories").iterdir())
    (shelf / ".3.5.proposal.999999.tmp").write_bytes(b"half")
    (shelf / "3.5.proposal").write_bytes(b"of a round that was given up")
    execute("digits", quick(2), out=folder, resume=True)
    assert result(folder) == references[2]
    assert all(name.endswith(".safetensors") for name in files(folder / "memories"))


def test_force_forgets(tmp_path: Path, references: dict[int, tuple[Any, ...]]):
    folder = tmp_path / "run"
    execute("digits", quick(2, seed=5), out=folder)
    (folder / "notes.md").write_text("mine")
    execute("digits", quick(2), out=folder, force=True)
    assert result(folder) == references[2]
    assert (folder / "notes.md").read_text() == "mine"
    plain = load("digits", {**TINY, "rounds": 1, "engine.name": "serial"})[1]
    execute("digits", plain, out=folder, force=True)
    assert not (folder / "memories").exists()


@pytest.mark.parametrize("every", [1, 3, 5])
def test_the_files_on_disk_do_not_grow_with_the_rounds(tmp_path: Path, every: int):
    """At most a client's memory now and at each of two checkpoints, however many rounds lie
    between them."""
    folder, most = tmp_path / "run", list[int]()
    # All clients every round: the most there can be.
    config = quick(every, rounds=13, **{"sampler.clients_per_round": 8, "eval_every": 13})
    execute("digits", config, out=folder, on_round=lambda _: most.append(files_of(folder)))
    assert len(most) == 13
    assert max(most) <= 3 * 8
    assert files_of(folder) <= 2 * 8


def files_of(folder: Path) -> int:
    return len(files(folder / "memories"))


# ------------------------------------------------------------------------------------- a full disk


@pytest.mark.parametrize("engine", ["serial", "local"])
@pytest.mark.parametrize("at", ["0", "3"])
def test_a_disk_too_full_for_a_memory_stops_the_run_and_loses_nothing(
    tmp_path: Path,
    references: dict[int, tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    at: str,
):
    """It is no client's fault: a client left out for it would change the result for ever."""
    write, folder = vectors_on_disk.write_all, tmp_path / "run"

    def full(file: FileIO, data: Any) -> None:
        if re.search(rf"\d\.{at}\.proposal", str(file.name)):
            write(file, b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    config = load("digits", {**QUICK, "checkpoint_every": 2, **ENGINES[engine]})[1]
    with monkeypatch.context() as patched:
        patched.setattr(vectors_on_disk, "write_all", full)
        with pytest.raises(RunError, match=r"No space left on device.*--resume"):
            execute("digits", config, out=folder)
    assert not list(folder.rglob(".*.tmp"))
    execute("digits", config, out=folder, resume=True)
    assert result(folder) == references[2]


FULL = ["run", "digits", "--set", "rounds=12", "--set", "checkpoint_every=2"]
FULL += ["--set", "client.name=scaffold", "--set", "client.lr=0.05"]
FULL += ["--set", "client.optimizer=sgd"]
FULL += ["--set", "data.clients=10", "--set", "client.clients=10", "--set", "engine.name=serial"]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("runs") / "roomy"
    assert cli(*FULL, "--out", folder).returncode == 0
    return result(folder)


def check_full(folder: Path, done: "subprocess.CompletedProcess[str]", copied: Path) -> None:
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, done.stdout + said
    assert "Traceback" not in done.stderr
    assert "could not be written" in said
    assert "--resume" in said
    shutil.copytree(folder, copied)
    finished = cli(*FULL, "--out", copied, "--resume")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_a_memory_too_large_to_write_stops_the_run_cleanly(tmp_path: Path, roomy: tuple[Any, ...]):
    # A memory of small-cnn has 45 kB.
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    done = cli(*FULL, "--out", tmp_path / "run", preexec_fn=limit)
    check_full(tmp_path / "run", done, tmp_path / "copy")
    assert result(tmp_path / "copy") == roomy


@pytest.mark.slow
@pytest.mark.parametrize("room", [200_000, 450_000, 700_000])
def test_a_disk_that_fills_up_with_memories_stops_the_run_cleanly(
    tmp_path: Path, roomy: tuple[Any, ...], room: int
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        done = cli(*FULL, "--out", disk / "run")
        check_full(disk / "run", done, tmp_path / "copy")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert result(tmp_path / "copy") == roomy


# ------------------------------------------------------------------------ real processes, kills


def process(every: int) -> list[str]:
    return [
        *("run", "digits", "--set", "rounds=100", "--set", f"checkpoint_every={every}"),
        *("--set", "engine.workers=2", "--set", "client.name=scaffold"),
        *("--set", "client.optimizer=sgd"),
        *(
            "--set",
            "client.lr=0.05",
            "--set",
            "client.batch_size=16",
            "--set",
            "client.epochs=4",
            "--keep-state",
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 3])
def test_killed_at_random_moments_and_resumed_remembers_the_same(tmp_path: Path, every: int):
    """Kill −9 of the run, mostly while its clients train; some seconds later it goes on."""
    assert cli(*process(every), "--out", tmp_path / "whole").returncode == 0
    rng, folder = random.Random(every), tmp_path / "run"
    records = folder / "rounds.jsonl"

    def written() -> int:
        return records.stat().st_mtime_ns if records.exists() else 0

    kills = ahead = 0
    for _ in range(8):
        before = written()
        running = start(*process(every), "--out", folder, "--resume")
        until(lambda before=before: written() != before)
        time.sleep(rng.uniform(0, 0.3))
        running.kill()
        running.communicate()
        kills += running.returncode == -signal.SIGKILL
        last = max((int(p.stem) for p in (folder / "checkpoints").glob("*.json")), default=0)
        names = files(folder / "memories")
        ahead += any(int(n.split(".")[1]) > last for n in names if n.endswith(".safetensors"))
    assert kills == 8, "the run was over before it could be killed eight times: make it longer"
    assert ahead  # memories newer than the checkpoint were on the disk
    finished = cli(*process(every), "--out", folder, "--resume")
    assert finished.returncode == 0, finished.stderr
    assert result(folder) == result(tmp_path / "whole")


GROWTH = """
    import sys
    from contextlib import closing
    from pathlib import Path
    import torch
    from torch import nn
    from run_support import tiny_data
    from fedglad.config.schema import load
    from fedglad.simulation.simulation import Simulation

    def peak():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    given = {
        "rounds": 20, "client.name": "simulation.support:Tally", "client.batch_size": 8,
        "sampler.clients_per_round": 20, "engine.name": sys.argv[1], "adapter.name": "none",
        "eval_every": 20,
    }
    model = nn.Sequential(nn.Linear(64, 3500), nn.Linear(3500, 10))
    plan = load("digits", given)[1].plan(model=model, data=tiny_data(*[2] * 200))
    with closing(Simulation(plan, Path(sys.argv[2]))) as simulation:
        rounds = simulation.rounds()
        next(rounds)
        next(rounds)
        before = peak()
        for _ in rounds:
            pass
        known = sum(simulation.memories.version(k) > 0 for k in range(200))
    print(peak() - before, known)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_memories_are_on_the_disk_and_not_in_memory(tmp_path: Path, engine: str):
    """200 clients that remember a megabyte each: after two rounds of twenty of them the process
    is as large as it gets."""
    script = [sys.executable, "-c", textwrap.dedent(GROWTH), engine, str(tmp_path / "memories")]
    done = subprocess.run(script, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    grown, known = done.stdout.split()
    assert int(known) > 150
    sizes = [p.stat().st_size for p in (tmp_path / "memories").rglob("*.safetensors")]
    assert min(sizes) > 1_000_000
    assert float(grown) < 40  # megabytes; all memories are more than 150
