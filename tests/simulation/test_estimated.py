"""Estimators in a run: what they remember lies in its folder, and is committed with it."""

import os
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, facts, outcome, play, tiny_data
from runs.test_runs import Trap, cut, stopped

from fedglad.config.schema import Config, ConfigError, load, simulate
from fedglad.core import checkpoint
from fedglad.estimators import MIFA, REGISTRY, VARP, Estimator
from fedglad.models.softmax import SoftmaxRegression
from fedglad.records import Bundle, Failure, Several, Update
from fedglad.runs import execute as executed
from fedglad.runs.checking import check
from fedglad.server.server import Server
from fedglad.simulation.simulation import Simulation

execute = partial(executed, keep_state=True)  # memories and checkpoints are looked at

NAMES = [name for name in REGISTRY if name != "none"]
ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"engine.name": "serial"},
    "local": {"engine.name": "local", "engine.workers": 2},
    "batched": {"engine.name": "batched"},
}


@dataclass(frozen=True, kw_only=True)
class Halved(Estimator):
    """An own one, without a memory."""

    remembers_clients = False

    def estimate(self, mean: Any, updates: Any, state: Any) -> Any:
        return mean / 2, state


def configured(name: str, **more: Any) -> Config:
    own = {"rounds": 5, "checkpoint_every": 2, "engine.name": "serial", "data.clients": 8}
    return load("digits", {**TINY, **own, "estimator.name": name, **more})[1]


def remembered(folder: Path) -> dict[str, Any]:
    """All vectors that lie in a run's folder."""
    paths = [path for path in (folder / "memories/estimator").rglob("*") if path.is_file()]
    read = {path.name: checkpoint.read(path)[0] for path in paths}
    return {name: {n: x.tolist() for n, x in vectors.items()} for name, vectors in read.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_gives_the_same_run(name: str):
    runs = {
        engine: play({**TINY, **settings, "rounds": 4, "data.clients": 8, "estimator.name": name})
        for engine, settings in ENGINES.items()
    }
    assert runs["local"] == runs["serial"]
    rounds, state = runs["batched"]
    for mine, theirs in zip(rounds, runs["serial"][0], strict=True):
        assert mine["test_accuracy"] == pytest.approx(theirs["test_accuracy"], abs=0.02)
    for key, value in runs["serial"][1].items():
        np.testing.assert_allclose(state[key], value, rtol=1e-3, atol=1e-4)


def test_the_run_steps_by_the_estimate_and_records_the_cohort():
    # The first round is FedAvg's; in the second the cohort's numbers are, and θ moves otherwise.
    plain, repaired = (
        play({**TINY, **ENGINES["serial"], "rounds": 3, "data.clients": 8, "estimator.name": name})
        for name in ("none", "varp")
    )
    assert plain[0][0] == repaired[0][0]
    assert plain[0][1]["clients"] == repaired[0][1]["clients"]
    assert plain[0][1]["gsi_all"] == repaired[0][1]["gsi_all"]
    assert plain[0][2]["clients"] != repaired[0][2]["clients"]
    assert plain[1] != repaired[1]


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name: str, after: int, tmp_path: Path):
    config = configured(name)
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "broken", after, config)
    execute("digits", config, out=tmp_path / "broken", resume=True)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")
    kept = [remembered(tmp_path / run) for run in ("whole", "broken")]
    assert kept[0].keys() >= kept[1].keys() > set()
    assert all(kept[0][file] == vectors for file, vectors in kept[1].items())
    assert check(tmp_path / "broken").good


def test_a_crash_at_any_change_of_the_disk_loses_no_memory(tmp_path: Path):
    config = configured("varp")
    execute("digits", config, out=tmp_path / "whole")
    moments, reached = range(7, 200, 32), 0
    for at in moments:
        folder = tmp_path / str(at)
        if (child := os.fork()) == 0:
            with Trap(at, lambda: os._exit(9)):
                execute("digits", config, out=folder)
            os._exit(0)
        reached += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        execute("digits", config, out=folder, resume=True)
        assert outcome(folder) == outcome(tmp_path / "whole"), f"after a crash at change {at}"
    assert reached > len(moments) // 2


def test_a_damaged_memory_is_seen_and_the_checkpoint_before_it_used(tmp_path: Path):
    config, folder = configured("varp"), tmp_path / "run"
    execute("digits", config, out=tmp_path / "whole")
    stopped(folder, 4, config)
    assert check(folder).good
    newest = max((folder / "memories" / "estimator").rglob("*.4.safetensors"))
    cut(newest)
    wrong = [file.name for file in check(folder).files if file.state == "damaged"]
    assert wrong == [newest.relative_to(folder).as_posix()]
    execute("digits", config, out=folder, resume=True)
    assert "checkpoint 000004.json is not usable" in (folder / "log.txt").read_text()
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_a_checkpoint_alone_has_the_model_and_cannot_go_on(tmp_path: Path):
    run = execute("digits", configured("mifa"), out=tmp_path / "run")
    path = max((run.folder / "checkpoints").glob("*.safetensors"))
    server = Server.load(path, SoftmaxRegression(features=64).build())
    assert isinstance(server.estimator, MIFA)
    seen = run.rounds()[0]["clients"][0]["id"]
    still = {name: torch.zeros_like(value) for name, value in server.params.items()}
    with pytest.raises(OSError, match=f"kept for client {seen} is not here: a run keeps them in"):
        server.step([Update(still, client=seen)])


def test_a_run_without_one_is_as_before_and_has_no_folder(tmp_path: Path):
    before = {key: part for key, part in configured("none").to_dict().items() if key != "estimator"}
    assert configured("none").hash() == Config.of(before).hash()
    assert len({configured(name).hash() for name in REGISTRY}) == len(REGISTRY)
    execute("digits", configured("none"), out=tmp_path / "run")
    assert not (tmp_path / "run" / "memories").exists()


def test_clients_that_fail_leave_no_trace(tmp_path: Path):
    plan = configured("varp", rounds=3).plan(data=tiny_data(*[30] * 8))
    with closing(Simulation(plan, tmp_path)) as simulation:
        train = simulation.engine.train

        def failing(t: int, cohort: Any, *rest: Any) -> Any:
            for group in train(t, cohort, *rest):
                single = group.updates() if isinstance(group, Bundle) else group
                lost = [Failure(u.client, "gone") if u.client == cohort[1] else u for u in single]
                yield Several(lost)

        simulation.engine.train = failing  # type: ignore[method-assign]
        rounds = [facts(done) for done in simulation.rounds()]
        accepted = {c["id"] for done in rounds for c in done["clients"] if "rejected" not in c}
        assert set(simulation.server._estimated.seen) == accepted  # type: ignore[union-attr]
    assert not [path for path in tmp_path.rglob("*") if "proposal" in path.name]


def test_a_draw_by_size_counts_clients_by_their_size():
    sizes = [10, 20, 30, 40, 50, 60, 70, 80]
    plan = configured("varp", **{"sampler.name": "md"}).plan(data=tiny_data(*sizes))
    with closing(Simulation(plan)) as simulation:
        for _ in simulation.rounds():
            pass
        seen = simulation.server._estimated.seen  # type: ignore[union-attr]
    assert seen
    counts = {k: size / np.mean(sizes) for k, size in enumerate(sizes)}
    assert {k: a for k, (_, a) in seen.items()}.items() <= counts.items()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sampler.name": "power-of-choice"}, "sampler PowerOfChoice prefers some"),
        ({"sampler.name": "adafl"}, "sampler AdaFL prefers some"),
        ({"sampler.availability": "markov"}, "who can be reached depends on the round before"),
        ({"filter.name": "median"}, "Median takes those that are like each other"),
        ({"client.name": "fednova"}, "FedNova is right for a step by the mean of the cohort's"),
        ({"client.name": "feddyn"}, "FedDyn is right for a step by the mean of the cohort's"),
        ({"weighting.name": "inverse-distance"}, "InverseDistance weighs them by what they are"),
        ({"estimator.beta": 0.5}, "unknown key 'estimator.beta'"),
        ({"estimator.disk": 0.0}, r"VARP\(disk=0.0\): must be more than 0 GB"),
    ],
)
def test_what_would_be_wrong_is_refused_before_the_run(settings: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        configured("varp", **settings)


def test_what_does_not_fit_on_the_disk_is_refused_before_the_run():
    # softmax: 640 weights and 10 biases, in rows of 64: 704 floats; 8 clients in 5 rounds of 3
    config = configured("varp", **{"estimator.disk": 2e-5})
    with pytest.raises(ValueError, match=r"up to 8 updates of 2816 bytes on disk, 2.253e-05 GB"):
        next(iter(simulate(config)))
    config = configured("varp", **{"estimator.disk": 2e-5, "rounds": 2})
    assert len(list(simulate(config))) == 2  # 6 updates, 1.7e-05 GB


def test_an_own_estimator_by_its_name():
    settings = {**TINY, **ENGINES["serial"], "rounds": 2, "adapter.name": "none"}
    halved = play({**settings, "estimator.name": f"{__name__}:Halved"})
    slower = play({**settings, "server.lr": 0.5})
    assert halved[1] == slower[1]
    with pytest.raises(ConfigError, match="Guard is not derived from fedglad"):
        configured("fedglad.core.guard:Guard")


def test_a_million_clients_cost_nothing_until_they_take_part(tmp_path: Path):
    class Many:
        clients = 1_000_000
        inner = tiny_data(30)

        def size(self, k: int) -> int:
            return 30

        def client(self, k: int) -> Any:
            return self.inner.client(0)

        def test(self) -> Any:
            return self.inner.test()

    plan = configured("varp", rounds=2).plan(data=Many())
    with closing(Simulation(plan, tmp_path)) as simulation:
        rounds = list(simulation.rounds())
        assert all(done.record.stepped for done in rounds)
        assert torch.isfinite(simulation.server.packed[0]).all()
    kept = [path for path in (tmp_path / "estimator").rglob("*") if path.is_file()]
    assert len(kept) == 6
    assert isinstance(simulation.server.estimator, VARP)
