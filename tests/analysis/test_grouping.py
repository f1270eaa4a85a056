"""Groups, labels and the baseline are the same for `compare` and for a report."""

import os
from pathlib import Path
from typing import Any

import pytest

from fedglad.analysis import compare
from fedglad.analysis.grouping import group, settings_of, usual_baseline
from fedglad.report.figures import payload
from fedglad.runs.reader import Run, run_folders
from tests.report.made import changed, rounds, write


def made(folder: Path, name: str, at: int, others_at: int | None = None, **how: Any) -> Path:
    """A finished run whose config.toml is from one moment, and the rest from another."""
    run = write(folder / name, rounds([0.5] * 3), config=changed(**how), finish=True)
    for path in run.iterdir():
        os.utime(path, (others_at or at, others_at or at))
    os.utime(run / "config.toml", (at, at))
    return run


def baselines(folder: Path) -> list[str]:
    """That of a comparison, and that of a report, of all runs in the folder."""
    told = payload([Run(run).read() for run in run_folders([folder])])
    return [
        compare([folder]).baseline,
        *(one["label"] for one in told["groups"] if one["baseline"]),
    ]


def test_the_first_without_an_adapter(tmp_path: Path):
    made(tmp_path, "a", 1, adapter__name="glad")
    made(tmp_path, "b", 2, adapter__name="none")
    made(tmp_path, "c", 3, adapter__name="none", sampler__name="md")
    assert baselines(tmp_path) == ["adapter.name=none sampler.name=uniform"] * 2


def test_else_the_first_to_be_started(tmp_path: Path):
    """By its config.toml, which is written once; a copied folder's other files have any time."""
    made(tmp_path, "a", 10, others_at=1, adapter__name="glad")
    made(tmp_path, "b", 5, others_at=20, adapter__name="pooled")
    assert baselines(tmp_path) == ["adapter.name=pooled"] * 2


def test_a_run_without_settings_is_never_the_baseline(tmp_path: Path):
    lost = made(tmp_path, "a", 1, adapter__name="none")
    made(tmp_path, "b", 2, adapter__name="pooled")
    made(tmp_path, "c", 3, adapter__name="glad")
    (lost / "config.toml").unlink()
    assert baselines(tmp_path) == ["adapter.name=pooled"] * 2


def test_another_order_of_the_same_seeds(tmp_path: Path):
    for k, (name, seed) in enumerate([("glad", 2), ("none", 2), ("glad", 1), ("none", 1)]):
        made(tmp_path, f"{name}-{seed}", k + 1, adapter__name=name, seed=seed)
    assert baselines(tmp_path) == ["adapter.name=none"] * 2


def test_the_rule_by_hand():
    none, glad = {"adapter.name": "none"}, {"adapter.name": "glad"}
    assert [usual_baseline(runs) for runs in ([glad, none], [glad, glad], [None, glad])] == [
        1,
        0,
        1,
    ]
    assert usual_baseline([None, None]) == 0


def test_no_class_that_a_folder_names_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hostile_rule.py").write_text("raise SystemExit('was loaded')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    how: dict[str, Any] = {
        "engine__name": "hostile_rule:Engine",
        "adapter__name": "hostile_rule:Rule",
    }
    run = made(tmp_path, "run", 1, **how)
    other = made(tmp_path, "other", 2)
    labels = [one.label for one in compare([run, other]).groups]
    assert labels[0].startswith("adapter.name=hostile_rule:Rule engine.name=hostile_rule:Engine")


def test_groups_by_hand():
    runs = [({"rounds": n, "format": 2}, (seed,)) for n, seed in ((3, 2), (3, 1), (4, 1), (3, 2))]
    found = group([*runs, (None, ())], unknown=lambda k: f"run {k}")
    assert found.parts == [{(1,): 1, (2,): 0}, {(1,): 2}, {(): 4}]
    assert found.labels == ["rounds=3", "rounds=4", "run 4"]
    assert (found.base, found.order, found.twice) == (0, [0, 1, 2], [(0, 3)])
    assert [found.unpaired(k) for k in range(3)] == ["", "", "settings are not known"]
    assert found.unpaired(1, same_length=True) == "3 and 4 rounds"


def test_a_format_is_that_of_the_summary():
    for summary, format in (
        (None, 2),
        ({}, 1),
        ({"versions": 3}, 1),
        ({"versions": {"format": 7}}, 7),
    ):
        assert settings_of({"seed": 1}, summary)["format"] == format


def test_runs_from_before_there_was_a_validation_set_are_of_the_group_without_one():
    old = {"data": {"name": "digits"}, "rounds": 3}
    new, other = ({**old, "data": {"name": "digits", "validation": v}} for v in (0.0, 0.1))
    made = group([(settings_of(one, None), (1,)) for one in (old, new, other)])
    assert made.twice == [(0, 1)]
    assert made.labels == ["data.validation=0.0", "data.validation=0.1"]
