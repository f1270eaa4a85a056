"""`fedglad data show`: a partition drawn, counted, and told with its convention of α."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.data.digits import Digits


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(*args: str) -> Any:
    return CliRunner().invoke(app, ["data", "show", *args])


def test_it_draws_and_writes_a_png(here: Path):
    told = show("digits", "--clients", "20", "--alpha", "0.1")
    assert told.exit_code == 0, told.output
    assert "α = 0.1 in total (0.01 per class" in " ".join(told.output.split())
    assert "20 clients × 10 classes, 71 to 88 samples" in told.output
    assert "effective classes" in told.output
    assert "Picture: digits-label-skew.png" in told.output
    assert (here / "digits-label-skew.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_json_has_the_counts_of_the_partition_that_runs_meet(here: Path):
    told = show("digits", "--clients", "20", "--alpha", "1", "--seed", "3", "--json")
    found = json.loads(told.stdout)
    data = Digits(clients=20, alpha=1.0, seed=3).load_federation()
    counts = [data.labels(k).tolist() for k in range(20)]  # pyright: ignore
    assert found["counts"] == counts
    assert found["sizes"] == [sum(row) for row in counts]
    assert found["top_share"] == pytest.approx(np.mean([max(row) / sum(row) for row in counts]))
    assert not list(here.iterdir())  # no picture unless one is asked for


def test_a_picture_where_one_wants_it(here: Path):
    assert show("digits", "--json", "--png", "mine.png").exit_code == 0
    assert [path.name for path in here.iterdir()] == ["mine.png"]
    assert show("digits", "--no-png").exit_code == 0
    assert [path.name for path in here.iterdir()] == ["mine.png"]


def test_other_partitions_and_their_settings():
    found = json.loads(
        show("digits", "--partition", "shards", "--set", "classes_per_client=1", "--json").stdout
    )
    assert found["top_share"] == 1
    assert "at most 1 classes" in found["partition"]
    one = json.loads(show("digits", "--partition", "centralised", "--json").stdout)
    assert one["sizes"] == [1437]


def test_a_set_that_makes_its_own_clients():
    found = json.loads(show("synthetic", "--clients", "7", "--json").stdout)
    assert len(found["sizes"]) == 7


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("digts",), "did you mean 'digits'?"),
        (("digits", "--partition", "shrads"), "did you mean 'shards'?"),
        (("digits", "--clients", "2000"), "must be in 1 … 1437"),
        (("digits", "--alpha", "-1"), "alpha=-1.0"),
        (("digits", "--set", "alfa=1"), "did you mean 'data.alpha'?"),
        (("digits", "--png", "no/such/folder.png"), "no/such/folder.png"),
    ],
)
def test_mistakes_are_told_in_a_sentence(args: tuple[str, ...], said: str):
    told = show(*args)
    assert said in " ".join(told.output.split())
    assert told.exit_code == 2
    assert "Traceback" not in told.output


class Unlabelled:
    clients = 2

    def size(self, k: int) -> int:
        return (3, 9)[k]

    def test(self) -> tuple[Any, Any]:
        return np.zeros((4, 1)), np.zeros(4)


class Incomplete:
    clients = 2


def test_data_without_labels_is_shown_by_its_sizes(here: Path):
    told = show(f"{__name__}:Unlabelled")
    assert told.exit_code == 0, told.output
    assert "2 clients, 3 to 9 samples, median 9, 12 in all; 4 in the test set; no cl" in told.output
    bars = [line.split() for line in told.output.splitlines()[1:]]
    # 3 is one of at most 4, 9 one of at most 16, and none is in between
    assert [(row[1], row[-1]) for row in bars if row] == [("4", "1"), ("8", "0"), ("16", "1")]
    found = json.loads(show(f"{__name__}:Unlabelled", "--json").stdout)
    assert (found["sizes"], found["test_size"]) == ([3, 9], 4)
    assert not list(here.iterdir())
    asked = show(f"{__name__}:Unlabelled", "--png", "mine.png")
    assert asked.exit_code == 2
    assert "no PNG: the data has no classes to draw" in asked.output


def raising() -> None:
    raise KeyError("no such table")


@pytest.mark.parametrize(
    ("name", "said"),
    [("Incomplete", "has no attribute 'size'"), ("raising", "KeyError: 'no such table'")],
)
def test_own_data_that_cannot_be_drawn(name: str, said: str):
    told = show(f"{__name__}:{name}")
    assert told.exit_code == 2
    assert said in " ".join(told.output.split())
