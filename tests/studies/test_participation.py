"""The study of participation: its cells, its files, its tables, and a whole tiny one."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedglad.analysis.statistics import paired_p, students_t
from fedglad.cli import app
from fedglad.studies.participation import cells as study_cells
from fedglad.studies.participation.cells import StudyError, cells, study
from fedglad.studies.participation.results import export, kept, tasks
from fedglad.studies.participation.tables import tables

TINY = """
[study]
about = "a tiny one"
average = "ema"
set = {"guard.name" = "none", "trust.name" = "none", "sampler.seed" = "run", "rounds" = 3}

[problems.small]
about = "digits"
preset = "digits"
draws = 3
set = {"data.clients" = 20, "client.epochs" = 1}

[participation.few]
about = "2 of 20"
set = {"sampler.clients_per_round" = 2}

[rules.none]

[rules.glad]
set = {"adapter.name" = "glad"}

[rules.half]
set = {"adapter.name" = "fixed", "adapter.value" = 0.5}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "study.toml").write_text(TINY)
    monkeypatch.setattr(study_cells, "STUDY", tmp_path / "study.toml")
    monkeypatch.chdir(tmp_path)
    study.cache_clear()
    yield tmp_path
    study.cache_clear()


def invoke(*words: str):
    return CliRunner().invoke(app, ["study", *words])


def test_every_cell_of_the_study_is_a_configuration():
    every = cells()
    assert len({cell.name for cell in every}) == len(every) > 200
    hashes = {cell.config(1).hash() for cell in every}
    assert len(hashes) == len(every)  # no two cells are the same run
    for cell in every:
        config = cell.config(7)
        assert (config.seed, config.sections["data"].seed) == (7, 7)
        assert config.sections["sampler"].seed == "run"
        readout = {"schedule-free": "none", "dog": "poly"}.get(cell.rule.name, "ema")
        assert config.to_dict()["average"]["name"] == readout


def test_rules_of_a_problem_meet_the_same_clients_and_cohorts():
    block = cells(["digits-cnn uniform-10"])
    assert len({repr(cell.config(2).sections["data"]) for cell in block}) == 1
    assert len({repr(cell.config(2).sections["sampler"]) for cell in block}) == 1


def test_a_word_that_is_no_part_is_answered_with_the_closest():
    with pytest.raises(StudyError, match="did you mean 'digits-cnn'"):
        cells(["digit-cnn"])
    assert {cell.rule.name for cell in cells(["glad"])} == {"glad"}  # words are whole names


def made(folder: Path, rule: str, last: list[float], averaged: list[float]) -> None:
    """A cell's file: a draw for each number, an accuracy that is the same in all rounds."""
    [cell] = cells([f"small few {rule}"])
    folder.mkdir(exist_ok=True)
    draws = {
        str(d): {
            "hash": cell.config(d).hash(),
            "raw": [raw] * 4,
            "averaged": [mean] * 4,
            "seconds": 1.0,
            "skipped": 0,
        }
        for d, (raw, mean) in enumerate(zip(last, averaged, strict=True), start=1)
    }
    text = json.dumps({"config": cell.config(1).to_dict(), "draws": draws})
    (folder / f"{cell.name}.json").write_text(text)


def test_differences_are_paired_by_draw(tiny: Path):
    folder = tiny / "kept"
    made(folder, "none", [0.50, 0.60, 0.70], [0.80, 0.80, 0.80])
    made(folder, "glad", [0.51, 0.62, 0.73], [0.80, 0.80, 0.80])
    [table] = tables(cells(), folder)
    none, glad = table.rows
    # Raw: 1, 2 and 3 points, mean 2, s = 1: 2 ± t(2) · 1/√3 = 2 ± 4.303 · 0.577 = 2 ± 2.484.
    assert glad["raw_difference"] == pytest.approx(2)
    assert glad["raw_interval"] == pytest.approx([2 - 2.484, 2 + 2.484], abs=1e-3)
    assert glad["averaged_difference"] == pytest.approx(0)
    assert none["raw_difference"] is None
    assert none["gain"] == pytest.approx(20)  # 80 − (50 + 60 + 70)/3
    assert "not run: half" in table.notes[-1]


def test_what_is_called_better_is_so_for_all_rules_together(tiny: Path):
    folder = tiny / "kept"
    made(folder, "none", [0.5] * 3, [0.5] * 3)
    # Differences of 10, 11, 12 points: t = 11/(1/√3) = 19.05, p = 1 − 19.05/√(2 + 19.05²) = 0.0027,
    # and of 3, 4, 6: mean 13/3, s = 1.528, t = 4.914, p = 0.039, below 5 % by itself. Of two rules
    # Holm asks 2.5 % of the first, which it is, then 5 % of the second.
    made(folder, "glad", [0.60, 0.61, 0.62], [0.5] * 3)
    made(folder, "half", [0.53, 0.54, 0.56], [0.5] * 3)
    assert paired_p([10, 11, 12]) == pytest.approx(0.00274, abs=2e-5)
    assert paired_p([3, 4, 6]) == pytest.approx(0.039, abs=1e-3)
    rows = {row["label"]: row for row in tables(cells(), folder)[0].rows}
    assert (rows["glad"]["raw_sure"], rows["half"]["raw_sure"]) == ("▲", "▲")
    made(folder, "half", [0.51, 0.54, 0.58], [0.5] * 3)  # 1, 4, 8: p = 0.17
    rows = {row["label"]: row for row in tables(cells(), folder)[0].rows}
    assert (rows["glad"]["raw_sure"], rows["half"]["raw_sure"]) == ("▲", "")
    made(folder, "glad", [0.53, 0.54, 0.56], [0.5] * 3)  # p = 0.039 is not below 2.5 %
    rows = {row["label"]: row for row in tables(cells(), folder)[0].rows}
    assert rows["glad"]["raw_sure"] == ""


@pytest.mark.parametrize("df", [1, 2, 5, 11])
def test_p_is_5_percent_at_the_ends_of_the_interval(df: int):
    # A mean that is t(df) standard errors from 0, made of n numbers of deviation 1.
    n = df + 1
    values = [(-1.0) ** k for k in range(n)]
    mean = sum(values) / n
    spread = (sum((v - mean) ** 2 for v in values) / df) ** 0.5
    shifted = [(v - mean) / spread + students_t(df) / n**0.5 for v in values]
    expected = None if n < 3 else pytest.approx(0.05, abs=1e-9)
    assert paired_p(shifted) == expected


def test_a_draw_of_another_configuration_does_not_count(tiny: Path):
    folder = tiny / "kept"
    made(folder, "glad", [0.5, 0.5], [0.5, 0.5])
    [cell] = cells(["glad"])
    path = folder / f"{cell.name}.json"
    path.write_text(path.read_text().replace(cell.config(2).hash(), "0123456789"))
    assert list(kept(cell, folder)) == [1]
    path.write_text("{")
    with pytest.raises(StudyError, match=r"glad\.json cannot be read"):
        kept(cell, folder)


def test_a_tiny_study_from_the_first_run_to_its_table(tiny: Path):
    half = invoke("run", "participation", "--only", "none", "--only", "glad", "--draws", "1,2")
    assert half.exit_code == 0, half.output
    first = (tiny / "results/participation/small.few.glad.json").read_text()
    assert [*json.loads(first)["draws"]] == ["1", "2"]
    done = invoke("run", "participation", "--jobs", "1")
    assert "4 of 9 runs are there already." in done.output
    assert done.exit_code == 0, done.output
    table = invoke("table", "participation", "--json")
    rows = {row["label"]: row for row in json.loads(table.output)[0]["rows"]}
    assert {label: row["n"] for label, row in rows.items()} == {"none": 3, "glad": 3, "half": 3}
    assert rows["half"]["raw_interval"] is not None

    # The files are all that the table needs, and what is in them is not run again.
    again = invoke("run", "participation", "--out", "elsewhere")
    assert "9 of 9 runs are there already." in again.output
    assert not list((tiny / "elsewhere").glob("*"))
    # Folders give the same files, whoever has run them.
    export(cells(), tiny / "runs/participation", tiny / "anew")
    for path in (tiny / "results/participation").glob("*.json"):
        assert (tiny / "anew" / path.name).read_text() == path.read_text()
    text = invoke("table", "participation", "--format", "markdown").output
    assert "small, few: digits; 2 of 20" in text
    assert text.count("\n| ") >= 3


def test_a_run_that_fails_is_exit_code_1_and_the_others_are_kept(tiny: Path):
    folder = tiny / "runs/participation"
    folder.mkdir(parents=True)
    (folder / "small.few.glad.1").touch()  # a file where the run's folder is to be
    only = ("--only", "none", "--only", "glad")
    said = invoke("run", "participation", *only, "--draws", "1", "--jobs", "1")
    assert said.exit_code == 1
    assert "its folder cannot be written" in said.output
    assert "The tables:" not in said.output
    kept_files = [path.name for path in (tiny / "results/participation").glob("*")]
    assert kept_files == ["small.few.none.json"]


def test_an_unfinished_run_is_not_exported(tiny: Path):
    [cell] = cells(["glad"])
    [task] = tasks([cell], [1], tiny / "runs")
    task.folder.mkdir(parents=True)
    assert export([cell], tiny / "runs", tiny / "to") == []


@pytest.mark.parametrize("verb", ["run", "table", "export"])
def test_an_unknown_study_is_a_message(verb: str):
    said = invoke(verb, "participaton")
    assert said.exit_code == 2
    assert "choose from participation" in said.output


def test_the_paper_is_a_study():
    assert invoke("paper", "list", "--help").exit_code == 0
