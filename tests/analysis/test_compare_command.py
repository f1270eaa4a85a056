"""`fedglad compare` as it is typed: blocks, formats and files, and the page on it."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import said
from typer.testing import CliRunner

from fedglad.analysis import compare
from fedglad.analysis.tables import FORMATS, SHOWN
from fedglad.cli import app

from .test_tables import faults

ROOT = Path(__file__).parents[2]


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "100"})


def lines(*args: str | Path) -> list[str]:
    result = call("compare", *args)
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_blocks_stand_below_each_other(crossed: list[Path]):
    assert lines(*crossed) == [
        "n last10_accuracy % final % difference 95 % interval",
        "data.alpha=0.1",
        "adapter.name=none 3 72.00 ± 2.00 73.00 baseline",
        "adapter.name=glad 3 75.00 ± 2.65 76.00 +3.00 [+0.52, +5.48]",
        "",
        "data.alpha=1.0",
        "adapter.name=none 3 90.00 ± 0.00 91.00 baseline",
        "adapter.name=glad 3 91.00 ± 2.00 92.00 +1.00 [-3.97, +5.97]",
        "Baseline in each block: adapter.name=none",
        "",
        "Differences to adapter.name=none by seed in percentage points:",
        "data.alpha=0.1: adapter.name=glad 1: +3.00, 2: +2.00, 3: +4.00",
        "data.alpha=1.0: adapter.name=glad 1: -1.00, 2: +1.00, 3: +3.00",
    ]


def test_every_option_at_once(crossed: list[Path]):
    options = "--where data.alpha=0.1,1.0 --where seed=1,2 --by data.alpha --columns score,n"
    names = (
        "--alias adapter.name=glad:FedGLAD --alias data.alpha:α --baseline FedGLAD --no-averaged"
    )
    found = lines(*crossed, *options.split(), *names.split())
    assert found[:4] == [
        "last10_accuracy % n",
        "α=0.1",
        "FedGLAD 73.50 ± 0.71 2",
        "adapter.name=none 71.00 ± 1.41 2",
    ]
    assert "Baseline in each block: FedGLAD" in found


def test_one_table_if_no_blocks_are_wanted(crossed: list[Path]):
    found = lines(*crossed, "--by", "none")
    assert found[1].startswith("adapter.name=none data.alpha=0.1 3 ")
    assert any("the data differ" in line for line in found)


def test_an_alias_may_be_for_an_own_class(crossed: list[Path]):
    from fedglad.cli.compare import _aliases  # pyright: ignore[reportPrivateUsage]

    assert _aliases(["adapter.name=mine:Rule:My rule"]) == {"adapter.name=mine:Rule": "My rule"}


@pytest.mark.parametrize("form", [*FORMATS])
def test_a_format_is_printed_or_written(crossed: list[Path], form: str, tmp_path: Path):
    wanted = FORMATS[form](compare(crossed), None)
    shown = call("compare", *crossed, "--format", form)
    assert (shown.exit_code, shown.stdout) == (0, wanted)
    ending = {"latex": "tex", "markdown": "md", "csv": "csv"}[form]
    path = tmp_path / f"table.{ending}"
    written = call("compare", *crossed, "--to", path)
    assert written.stdout == f"Table: {path}\n"
    assert path.read_text("utf-8") == wanted
    other = tmp_path / "table.of.mine"
    assert call("compare", *crossed, "--format", form, "--to", other).exit_code == 0
    assert other.read_text("utf-8") == wanted


def test_json_and_the_table_can_be_written_too(crossed: list[Path], tmp_path: Path):
    as_json = call("compare", *crossed, "--json").stdout
    assert call("compare", *crossed, "--format", "json").stdout == as_json
    call("compare", *crossed, "--to", tmp_path / "all.json")
    assert (tmp_path / "all.json").read_text("utf-8") == as_json
    assert [group["block"] for group in json.loads(as_json)["groups"]][1:3] == [
        "data.alpha=0.1",
        "data.alpha=1.0",
    ]
    call("compare", *crossed, "--to", tmp_path / "all.txt")
    told = call("compare", *crossed).stdout
    assert (tmp_path / "all.txt").read_text("utf-8") == told


def test_what_is_to_be_known_is_said_beside_a_csv(crossed: list[Path]):
    result = call("compare", *crossed, "--format", "csv", "--by", "none")
    assert "warning: adapter.name=none data.alpha=1.0 is not paired with" in result.stderr
    assert len(list(csv.DictReader(result.stdout.splitlines()))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "word"], "unknown format 'word': choose from table, latex, markdown, csv,"),
        (["--to", "x.doc"], "the ending of x.doc names no format: give one, --format latex"),
        (["--to", "absent/x.tex"], "absent/x.tex cannot be written: No such file"),
        (["--json", "--format", "csv"], "--json is --format json: leave it or --format csv out"),
        (["--where", "seed"], "--where 'seed': write it as KEY=V1,V2"),
        (["--where", "seed=1", "--where", "seed=2"], "--where 'seed' is there twice: give all"),
        (["--where", "sed=1"], "did you mean 'seed'?"),
        (["--alias", "FedGLAD"], "--alias 'FedGLAD': write it as LABEL:NAME, for example"),
        (["--alias", "x:FedGLAD"], "the alias 'x' is no part of a label"),
        (["--by", "data.alfa"], "no run has that key; did you mean 'data.alpha'?"),
        (["--columns", "n,finale"], "unknown column 'finale'; did you mean 'final'?"),
        (["--columns", "rounds"], "the column 'rounds' is that to a target: give one"),
    ],
)
def test_a_mistake_is_one_message(
    crossed: list[Path],
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    result = call("compare", *crossed, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in said(result)
    assert [*tmp_path.iterdir()] == []


def test_the_help_names_every_format():
    text = " ".join(call("compare", "--help").stdout.split())
    for name in SHOWN:
        assert name in text


def page() -> str:
    return (ROOT / "docs/sweep.md").read_text("utf-8")


def commands() -> list[str]:
    """Those of the page that compare methods × settings."""
    part = page().split("### Methods × settings")[1].split("\n## ")[0]
    return re.findall(r"^    (fedglad .*)$", part, re.M)


@pytest.mark.slow
def test_a_sweep_becomes_a_table_in_one_command_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """2 settings × 4 methods × 3 seeds, with the commands of the page, in fewer rounds."""
    monkeypatch.chdir(tmp_path)
    first, *others = commands()
    small = ["--set", "rounds=2", "--set", "client.epochs=1"]
    swept = call(*shlex.split(first)[1:], *small)
    assert swept.exit_code == 0, swept.output
    assert len([*(tmp_path / "study").iterdir()]) == 2 * 4 * 3
    for command in others:
        result = call(*shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}: {result.output}"
    tex = Path("table.tex").read_text("utf-8")
    assert faults(tex) == []
    shape = re.compile(r"\$(\\mathbf\{)?[\d.]+\}? \\pm [\d.]+\$")
    (block,) = re.findall(r"```latex\n(.*?)```", page(), re.S)
    numbers = [shape.sub("N", re.sub(r"is over.*", "", text)) for text in (tex, block)]
    assert [line.split(";")[0].rstrip(".") for line in numbers[0].splitlines()] == [
        line.rstrip(".") for line in numbers[1].splitlines()
    ]
    rows = list(csv.DictReader(Path("study.csv").read_text("utf-8").splitlines()))
    assert len(rows) == 16  # each with its average
    (frame, *_) = re.findall(r"```python\n(.*?)```", page(), re.S)
    exec(frame, {})
