"""What a run refuses before it touches anything, and what it says then."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_support import TINY

from fedglad.adapters import Adapter
from fedglad.config.schema import ConfigError, load
from fedglad.report.figures import payload
from fedglad.runs import Run, RunError, check, execute
from fedglad.schedules import Schedule
from fedglad.simulation.simulation import Simulation


def run(folder: Path, how: dict[str, Any] | None = None, **more: Any) -> Run:
    return execute(*load("digits", {**TINY, "rounds": 1, **(how or {})}), out=folder, **more)


def test_more_rounds_without_resume_name_resume_before_force(tmp_path: Path):
    run(tmp_path)
    with pytest.raises(RunError, match="holds this run with rounds = 1: go on with it by"):
        run(tmp_path, {"rounds": 3})


def test_another_configuration_is_told_by_its_keys(tmp_path: Path):
    run(tmp_path)
    with pytest.raises(RunError, match=r"\(client\.lr = \S+, not 0\.5\): choose another --out"):
        run(tmp_path, {"client.lr": 0.5})
    with pytest.raises(RunError, match=r"\(adapter\.name = 'glad', not 'none'\): choose"):
        run(tmp_path, {"adapter.name": "none"}, resume=True)


def test_a_folder_of_runs_does_not_become_a_run(tmp_path: Path):
    run(tmp_path / "a")
    with pytest.raises(RunError, match=r"is a folder of runs, a for one, which nobody would see"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_run_that_kept_nothing_leaves_no_stub_of_the_longer_one(tmp_path: Path):
    done = run(tmp_path / "digits-done", keep_state=False)
    longer = tmp_path / "longer"
    with pytest.raises(RunError, match="kept no state to go on from"):
        run(longer, {"rounds": 3}, resume=True, extend=done.folder)
    assert not longer.exists()


def test_an_emptied_config_is_damage_everywhere(tmp_path: Path):
    done = run(tmp_path / "run")
    (done.folder / "config.toml").write_text("")
    assert not check(done.folder).good
    with pytest.raises(RunError, match=r"config.toml cannot be read: it is empty"):
        _ = done.config
    with pytest.raises(ConfigError, match="is empty, and says nothing of the run"):
        load(done.folder / "config.toml")
    with pytest.raises(RunError, match="is damaged, so it is not known which run this is"):
        run(done.folder, resume=True)


def test_runs_whose_long_labels_are_cut_alike_make_a_page(tmp_path: Path):
    long = "a" * 300
    folders = [tmp_path / name for name in "abc"]
    for k, folder in enumerate(folders):
        run(folder, {"rounds": 1 + k})
        text = (folder / "config.toml").read_text().replace("[data]", f'[data]\n{long} = "{k}"')
        (folder / "config.toml").write_text(text)
    labels = [group["label"] for group in payload([Run(one).read() for one in folders])["groups"]]
    assert len(set(labels)) == 3


@dataclass(frozen=True, kw_only=True)
class Wrong(Adapter):
    """Gives what no step can be scaled by."""

    kind: str = "float"

    def scale(self, stats: Any, groups: Any) -> Any:
        return {"float": 1.0, "long": np.ones(99), "text": np.array(["a"] * len(groups.labels))}[
            self.kind
        ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("float", "Wrong gave a float for the factors: it must be a NumPy vector with one number"),
        ("long", r"Wrong gave an array of float64 of the shape \(99,\) for the factors"),
        ("text", r"Wrong gave an array of <U1 of the shape \(\d+,\) for the factors"),
    ],
)
def test_factors_of_the_wrong_form_name_the_class(kind: str, said: str, tmp_path: Path):
    name = f"{__name__}:Wrong"
    with pytest.raises(ValueError, match=said):
        run(tmp_path, {"adapter.name": name, "adapter.kind": kind})


@dataclass(frozen=True, kw_only=True)
class Half(Schedule):
    """Gives a text."""

    def factor(self, t: int, rounds: int) -> Any:
        return "half"


def test_a_schedule_that_gives_no_number_is_refused():
    with pytest.raises(ValueError, match="one that gives a number: it gave a str in round 0"):
        Simulation(load("digits", {**TINY, "server.schedule": f"{__name__}:Half"})[1].plan())


def test_a_delta_that_protects_nobody_is_refused():
    private = {"privacy.name": "central", "privacy.delta": 0.5, "adapter.name": "none"}
    private |= {"weighting.name": "equal", "guard.name": "none", "trust.name": "none"}
    with pytest.raises(ValueError, match=r"privacy.delta = 0.5: with δ of 1/N or more, here 0.02"):
        Simulation(load("digits", {**TINY, **private, "sampler.seed": "run"})[1].plan())
