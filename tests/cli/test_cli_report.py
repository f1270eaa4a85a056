"""`fedglad report` and `fedglad watch` as a person types them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedglad.cli import app
from tests.report.made import changed, record, rounds, write
from tests.report.test_page import Elements


def call(*arguments: object) -> Any:
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def shown(path: Path) -> dict[str, Any]:
    """The data of a written page."""
    return json.loads(Elements(path.read_text("utf-8")).texts["script"][0])


def test_a_page_in_the_runs_folder(tmp_path: Path):
    folder = write(tmp_path / "run", rounds([0.2, 0.4, 0.6]), finish=True)
    found = call("report", folder)
    assert found.exit_code == 0
    assert found.stdout.splitlines() == [
        "Too early to say whether training is healthy: accuracy 40.0 % over the last 3 tests, "
        "0 of 3 rounds distrusted.",
        "  Accuracy, last 3 tests: 40.0 %  (final 60.0 %)",
        "  Rounds distrusted: 0 of 3",
        "  Updates rejected: 0 of 6",
        "  Time: 4.5 s  (1.5 s a round)",
        "Note: There is no labels.json: no label distributions can be shown.",
        f"Page: {folder / 'report.html'}",
    ]
    told = shown(folder / "report.html")
    assert (told["title"], told["runs"][0]["scores"]) == ("run", [20, 40, 60])


def test_several_runs_here_or_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("none", "glad"):
        config = changed(adapter__name=name)
        write(tmp_path / "runs" / name, rounds([0.5] * 3), config=config, finish=True)
    assert call("report", "runs").exit_code == 0
    assert shown(Path("report.html"))["title"] == "2 runs"
    found = call("report", "runs/none", "runs/glad", "--out", "x.html", "--baseline", "glad")
    assert found.exit_code == 0
    assert "Gain over adapter.name=glad: +0.00 points  (one seed: no interval)" in found.stdout
    assert shown(Path("x.html"))["groups"][0]["label"] == "adapter.name=glad"


def test_json_prints_the_figures_alone(tmp_path: Path):
    folder = write(tmp_path / "run", [record(0)])
    found = call("report", folder, "--json")
    assert json.loads(found.stdout)["runs"][0]["rounds"] == [1]
    assert not (folder / "report.html").exists()
    call("report", folder, "--json", "--out", tmp_path / "x.html")
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize("form", ["png", "svg"])
def test_plots(tmp_path: Path, form: str):
    folder = write(tmp_path / "run", rounds([0.2, 0.4, 0.6]), finish=True)
    found = call("report", folder, "--plots", tmp_path / "new" / "plots", "--format", form)
    assert found.exit_code == 0
    drawn = sorted((tmp_path / "new" / "plots").iterdir())
    assert drawn
    assert {path.suffix for path in drawn} == {f".{form}"}
    assert all(f"Plot: {path}" in found.stdout for path in drawn)


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path):
    folder = write(tmp_path / "run", rounds([0.2, 0.4, 0.6]), finish=True)
    (tmp_path / "plots" / "rounds.png").mkdir(parents=True)
    found = call("report", folder, "--plots", tmp_path / "plots")
    assert found.exit_code == 2
    said = " ".join(found.stderr.split())
    assert "rounds.png cannot be written: Is a directory" in said


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write(tmp_path / "run", rounds([0.2, 0.4, 0.6]), finish=True)
    found = call("report", folder, "--plots", tmp_path / "plots")
    assert found.exit_code == 2
    assert "pip install 'fedglad[report]'" in found.stderr


def test_mistakes_are_said(tmp_path: Path):
    folder = write(tmp_path / "run", [record(0)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, said in (
        (["report", tmp_path / "absent"], "there is no folder"),
        (
            ["report", tmp_path / "empty"],
            "holds no run: there is no config.toml, no rounds.jsonl, no summary.json in it or one",
        ),
        (["report", folder, "--format", "gif"], "unknown format 'gif': choose from png, svg, pdf"),
        (["report", folder, "--baseline", "x"], "baseline 'x' matches no group"),
        (["report", folder, "--out", tmp_path], "is a folder: name a file"),
        (["report", folder, "--plots", tmp_path / "file"], "cannot be written: File exists"),
        (["watch", tmp_path / "file"], "is a file: give the folder of a run"),
        (["watch", tmp_path / "empty"], "is not a run: it has no config.toml"),
    ):
        found = call(*arguments)
        assert (found.exit_code, found.stdout) == (2, "")
        assert said in found.stderr


def test_a_damaged_run_is_reported_with_notes(tmp_path: Path):
    folder = write(tmp_path / "run", [record(0), record(2)], config=None)
    with open(folder / "rounds.jsonl", "a") as file:
        file.write('{"round": 3, "sta')
    found = call("report", folder)
    assert found.exit_code == 0
    for note in (
        "Note: There is no config.toml: the settings and the seed are not known.",
        "Note: The last line of rounds.jsonl is half written, and left out.",
        "Note: Round 2 not recorded, or damaged.",
        "Note: The run is not finished, rounds recorded: 2.",
    ):
        assert note in found.stdout
    assert shown(folder / "report.html")["runs"][0]["rounds"] == [1, 3]


def test_a_hostile_config_is_reported_on(tmp_path: Path):
    folder = write(tmp_path / "run", rounds([0.2, 0.4, 0.6]), finish=True)
    with open(folder / "config.toml", "a") as file:
        file.write(".".join(["a"] * 3000) + " = 1\n[b]\n" + f"c = 0x{'f' * 5000}\n")
    assert call("report", folder).exit_code == 0
    config = shown(folder / "report.html")["runs"][0]["config"]
    assert (config["engine.a"], config["b.c"]) == ("?", "?")


def test_names_are_printed_and_not_obeyed(tmp_path: Path):
    folder = write(tmp_path / "[red]x[/]", [record(0, status="skipped", reason="[bold]\x1b[2J")])
    found = call("report", folder)
    assert "because [bold]�[2J" in found.stdout
    assert f"Page: {folder / 'report.html'}" in found.stdout
