"""Every sampler in a run of digits: what it does there, and that a run that broke off goes on."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY, outcome

from fedglad.config.schema import Config, load
from fedglad.runs import Run, execute
from fedglad.samplers import REGISTRY
from fedglad.simulation.simulation import Simulation

SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "fedml": {},
    "scripted": {"cohorts": {"2": [1, 7]}, "largest_class": {"4": 3}},
    "md": {},
    "adafl": {"alpha": 0.5},
    "power-of-choice": {"candidates": 8},
    "clustered": {},
    "clustered, by similarity": {"by": "similarity"},
    "optimal": {"candidates": 8},
    "uniform, markov": {"availability": "markov", "reachable": 0.1},
    "adafl, bernoulli": {"availability": "bernoulli", "reachable": 0.1},
    "clustered, cyclic": {"by": "similarity", "availability": "cyclic"},
}

every_sampler = pytest.mark.parametrize("name", SETTINGS)


def config(name: str, **more: Any) -> Config:
    own = {f"sampler.{key}": value for key, value in SETTINGS[name].items()}
    given = {
        **TINY,
        "engine.name": "serial",
        "rounds": 6,
        "checkpoint_every": 2,
        "sampler.name": name.partition(",")[0],
    }
    return load("digits", {**given, **own, **more})[1]


def rounds_of(name: str, **more: Any) -> list[Any]:
    with closing(Simulation(config(name, **more).plan())) as simulation:
        return list(simulation.rounds())


class Broken(BaseException):  # after which nothing is saved any more
    pass


@every_sampler
def test_a_run_that_broke_off_goes_on_to_the_same_bits(tmp_path: Path, name: str):
    execute("digits", config(name), out=tmp_path / "whole")

    def breaks_off(found: Any) -> None:
        if found.t == 4:  # the last checkpoint is that after round 3
            raise Broken

    with pytest.raises(Broken):
        execute("digits", config(name), out=tmp_path / "broken", on_round=breaks_off)
    seen: list[int] = []
    execute(
        "digits",
        config(name),
        out=tmp_path / "broken",
        resume=True,
        on_round=lambda found: seen.append(found.t),
    )
    assert seen == [4, 5]
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")
    assert all(found["status"] == "stepped" for found in Run(tmp_path / "whole").rounds())


@every_sampler
def test_a_sampler_goes_through_toml(tmp_path: Path, name: str):
    (tmp_path / "run.toml").write_text(config(name).to_toml())
    assert load(tmp_path / "run.toml")[1] == config(name)


def test_every_row_is_run():
    assert {name.partition(",")[0] for name in SETTINGS} == set(REGISTRY)


def test_md_counts_a_client_as_often_as_it_was_drawn():
    # 40 draws of 50 clients: some twice and more; shares m/40, also in the indicator's weights
    (found,) = rounds_of("md", rounds=1, **{"sampler.clients_per_round": 40})
    shares = [client["weight"] for client in found.record.clients]
    times = [round(40 * share) for share in shares]
    assert [m / 40 for m in times] == pytest.approx(shares, rel=1e-12)
    assert sum(times) == 40
    assert max(times) > 1
    assert len(set(found.cohort)) == len(found.cohort) < 40
    assert found.record.statistics.weights == pytest.approx(shares)


def test_adafl_remembers_who_was_far_from_the_mean(tmp_path: Path):
    run = execute("digits", config("adafl"), out=tmp_path / "run")
    saved = json.loads((run.folder / "checkpoints" / "000006.json").read_text())["sampler"]
    taken_part = {str(c["id"]) for found in run.rounds() for c in found["clients"]}
    assert saved["relative"].keys() == taken_part
    assert len({round(value, 9) for value in saved["relative"].values()}) == len(taken_part)
    assert sum(saved["relative"].values()) == pytest.approx(len(taken_part))  # Σp is kept


def test_power_of_choice_takes_the_highest_losses_at_the_present_model():
    own = {"sampler.candidates": 50, "rounds": 3}
    with closing(Simulation(config("power-of-choice", **own).plan())) as simulation:
        losses: list[float] = []
        for _ in range(3):
            losses = simulation.engine.losses(range(50), simulation.server.packed)
            found = next(simulation.rounds())
            chosen = [losses[k] for k in found.cohort]
            assert chosen == sorted(losses, reverse=True)[:3]
            assert [c["weight"] for c in found.record.clients] == pytest.approx([1 / 3] * 3)
        assert len(set(losses)) == 50


def test_clustered_by_similarity_uses_the_last_updates():
    """Its cohorts are those of nobody known at first, and then become others."""
    similar, blind = rounds_of("clustered, by similarity"), rounds_of("clustered")
    assert all(sum(c["weight"] for c in f.record.clients) == pytest.approx(1) for f in similar)
    with closing(Simulation(config("clustered, by similarity").plan())) as simulation:
        assert simulation.updates
        for found in simulation.rounds():
            for client in found.cohort:
                update = simulation.pool.last(client)
                assert update is not None
    assert [f.cohort for f in similar] != [f.cohort for f in blind]


def test_optimal_keeps_some_of_the_candidates():
    kept: list[int] = []
    for found in rounds_of("optimal", rounds=20):
        clients = found.record.clients
        assert len(clients) == 8
        out = [c for c in clients if "rejected" in c]
        assert all(c["rejected"].startswith("left out by Optimal(") for c in out)
        assert all(c["weight"] == 0 for c in out)
        kept.append(8 - len(out))
    # 3 on average; the variance of one round is at most Σ p(1 − p) ≤ 3·(1 − 3/8) = 1.9
    assert sum(kept) / 20 == pytest.approx(3, abs=4 * (1.9 / 20) ** 0.5)
    assert len(set(kept)) > 1


def test_all_clients_are_candidates_by_default():
    (found,) = rounds_of("optimal", rounds=1, **{"sampler.candidates": 0})
    assert sorted(found.cohort) == list(range(50))
