"""Tables from results whose numbers were chosen: every figure worked out by hand."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedglad.config.schema import FORMAT, Config
from fedglad.studies.paper import formats
from fedglad.studies.paper.cells import Cell, Experiment
from fedglad.studies.paper.experiments import find
from fedglad.studies.paper.results import FinishedRun, Library, key, read
from fedglad.studies.paper.tables import table

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Puts a result of a cell, with these accuracies (shares of 1), into a folder."""

    def put(cell: Cell, seed: int, accuracy: Sequence[float], **others: Any) -> Path:
        config = cell.config(seed, len(accuracy))
        count = len(accuracy)
        columns: dict[str, Any] = {
            "test_accuracy": list(accuracy),
            "gsi_all": [1.0] * count,
            "label_similarity": [0.5] * count,
            "norm_ratio": [0.25] * count,
            "clients": [[0]] * count,
            "groups": {},
        }
        result = {
            "config": config.to_dict(),
            "last10_accuracy": sum(accuracy[-10:]) / len(accuracy[-10:]),
            "versions": {"format": others.pop("format", FORMAT)},
            "rounds": columns | others,
        }
        path = tmp_path / f"mnist-{config.hash()}.json"
        path.write_text(json.dumps(result))
        return tmp_path

    return put


def with_rounds(experiment: Experiment, rounds: int) -> Experiment:
    cells = tuple(
        replace(cell, overrides={**cell.overrides, "rounds": rounds}) for cell in experiment.cells
    )
    return replace(experiment, cells=cells)


CONTROLS = with_rounds(find("controls"), 12)
PLAIN, GLAD, _, SMALLER = CONTROLS.cells


def row_of(rows: list[dict[str, Any]], label: str) -> dict[str, Any]:
    (found,) = [row for row in rows if row["label"] == label]
    return found


def test_mean_difference_interval_and_stability_by_hand(write: Write):
    # 12 rounds, so the last 10 leave out the first two, and the second half is the last six.
    # plain: 0, 0, then .50 … with one round at .20: (9·50 + 20)/10 = 47
    bad = [0.0, 0.0, *[0.5] * 7, 0.2, 0.5, 0.5]
    for seed, more in {1: 0.0, 2: 0.02, 3: 0.04}.items():
        write(PLAIN, seed, [a + more for a in bad])  # 47, 49, 51: mean 49, s = 2
    folder = write(GLAD, 1, [0.5] * 12)  # 50: +3
    write(GLAD, 2, [0.5] * 12)  # 50: +1
    write(GLAD, 3, [0.56] * 12)  # 56: +5, so differences 3, 1, 5: mean 3, s = 2
    made = table(CONTROLS, Library([folder]))
    plain, glad = (row_of(made.rows, cell.label) for cell in (PLAIN, GLAD))
    assert plain["seeds"] == pytest.approx({1: 47, 2: 49, 3: 51})
    assert (plain["n"], plain["mean"], plain["std"]) == pytest.approx((3, 49, 2))
    assert plain["difference"] is None
    assert glad["differences"] == pytest.approx({1: 3, 2: 1, 3: 5})
    # t with 2 degrees of freedom 4.3027: 3 ± 4.3027·2/√3 = 3 ± 4.968
    assert glad["interval"] == pytest.approx([-1.968, 7.968], abs=1e-3)
    assert (glad["published"], glad["published_std"]) == (79.71, 0.49)
    assert glad["published_difference"] == pytest.approx(79.71 - 78.17)
    # the second half of plain, seed 1: 50 50 50 20 50 50: mean 45, squares 5·25 + 625 = 750,
    # s = √(750/5) = 12.247; the same for every seed; worst 20, 22, 24
    assert plain["spread"] == pytest.approx(12.2474, abs=1e-3)
    assert plain["worst"] == pytest.approx(22)
    assert (glad["spread"], glad["worst"]) == pytest.approx((0, 52))
    texts = dict(zip([row["label"] for row in made.rows], made.texts(), strict=True))
    assert texts[GLAD.label] == [
        GLAD.label, "3", "52.00 ± 3.46", "79.71 ± 0.49", "+3.00", "[-1.97, +7.97]", "+1.54",
        "0.00", "52.00",
    ]  # fmt: skip
    assert row_of(made.rows, SMALLER.label)["n"] == 0
    assert texts[SMALLER.label][:3] == [f"{SMALLER.label} (ours): not run", "0", "-"]


def test_runs_with_an_average_stand_for_the_cell_and_show_it(write: Write):
    folder, *_ = (write(PLAIN, seed, [0.5] * 12) for seed in (1, 2, 3))
    ema = replace(PLAIN, overrides={**PLAIN.overrides, "average.name": "ema"})
    for seed, gain in {1: 0.1, 2: 0.2, 3: 0.3}.items():
        path = write(ema, seed, [0.5] * 12) / f"mnist-{ema.config(seed).hash()}.json"
        told = json.loads(path.read_text()) | {"last10_averaged_accuracy": 0.5 + gain}
        path.write_text(json.dumps(told))
    library = Library([folder])
    made = table(CONTROLS, library)
    row = row_of(made.rows, PLAIN.label)
    assert (row["n"], row["mean"]) == (3, pytest.approx(50))
    # gains 10, 20, 30: mean 20, s = 10; 20 ± 4.3027·10/√3 = 20 ± 24.841
    assert row["averaged_seeds"] == pytest.approx({1: 60, 2: 70, 3: 80})
    assert row["averaged_difference"] == pytest.approx(20)
    assert row["averaged_interval"] == pytest.approx([-4.841, 44.841], abs=1e-3)
    assert made.texts()[0][-3:] == ["70.00 ± 10.00", "+20.00", "[-4.84, +44.84]"]
    assert made.texts()[1][-3:] == ["-", "-", "-"]
    assert len(library.all()) == 6
    # Another average in place of one of them: their mean would mean nothing.
    (folder / f"mnist-{ema.config(3).hash()}.json").unlink()
    poly = replace(PLAIN, overrides={**PLAIN.overrides, "average.name": "poly"})
    path = write(poly, 3, [0.5] * 12) / f"mnist-{poly.config(3).hash()}.json"
    told = json.loads(path.read_text()) | {"last10_averaged_accuracy": 0.9}
    path.write_text(json.dumps(told))
    made = table(CONTROLS, Library([folder]))
    assert row_of(made.rows, PLAIN.label)["averaged"] is None
    assert len(made.texts()[0]) == 9  # without the columns


def test_two_seeds_have_no_interval_and_other_seeds_are_not_paired(write: Write):
    for seed in (1, 2):
        write(PLAIN, seed, [0.5] * 12)
    for seed in (2, 5):
        folder = write(GLAD, seed, [0.6] * 12)
    glad = row_of(table(CONTROLS, Library([folder])).rows, GLAD.label)
    assert glad["n"] == 2
    assert glad["differences"] == pytest.approx({2: 10})
    assert glad["interval"] is None


def test_a_shortened_run_is_a_row_of_its_own_that_says_so(write: Write):
    write(PLAIN, 1, [0.5] * 12)
    write(PLAIN, 1, [0.3] * 5)
    folder = write(GLAD, 1, [0.4] * 5)
    made = table(CONTROLS, Library([folder]))
    short = "(shortened: 5 of 12 rounds)"
    assert row_of(made.rows, PLAIN.label)["mean"] == pytest.approx(50)
    assert row_of(made.rows, f"{PLAIN.label} {short}")["mean"] == pytest.approx(30)
    glad = row_of(made.rows, f"{GLAD.label} {short}")
    # compared with the baseline of the same length, and with nothing that is published
    assert glad["difference"] == pytest.approx(10)
    assert glad["published"] is None
    assert row_of(made.rows, GLAD.label)["n"] == 0
    assert any("shortened" in note for note in made.notes)
    for form in formats.FORMATS.values():
        assert "shortened" in form(made)


def test_what_does_not_change_a_round_does_not_change_the_key():
    config = PLAIN.config(1)
    assert key(config) == key(PLAIN.config(2, 3))
    assert key(config) == key(replace(config, checkpoint_every=1))
    assert key(config) != key(replace(config, eval_every=2))
    assert key(config) != key(GLAD.config(1))


def test_another_format_is_read_with_a_note_and_a_broken_file_named(write: Write):
    folder = write(PLAIN, 1, [0.5] * 12, format=FORMAT - 1)
    (folder / "broken.json").write_text("{")
    (folder / "README.md").write_text("not a result")
    library = Library([folder, folder / "nowhere"])
    assert len(library.all()) == 1
    (reason,) = library.broken
    assert "broken.json cannot be read" in reason
    made = table(CONTROLS, library)
    assert row_of(made.rows, PLAIN.label)["n"] == 1
    assert [n for n in made.notes if f"format {FORMAT - 1}" in n]


def test_infinity_survives_json(write: Write, tmp_path: Path):
    cell = find("gamma").cell("CIFAR-10 FedAvg, γ = ∞")
    config = cell.config(1)
    result = FinishedRun(tmp_path, config, {"last10_accuracy": 0.5})
    object.__setattr__(result, "__dict__", {**result.__dict__, "columns": {}})
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result.to_dict(), allow_nan=False))
    again = read(path)
    assert again is not None
    assert again.config.hash() == config.hash()
    assert Config.of(config.to_dict()).hash() == config.hash()


def test_correlation_by_hand(write: Write):
    cell = with_rounds(find("similarity"), 5).cell("MNIST FedAvg")
    # x = 1 … 5, y = 2 1 4 3 5 (tenths): Σdxdy = 8, Σdx² = Σdy² = 10, r = .8
    x, y = [0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.1, 0.4, 0.3, 0.5]
    folder = write(cell, 1, [0.5] * 5, label_similarity=x, gsi_all=y)
    made = table(with_rounds(find("similarity"), 5), Library([folder]))
    row = row_of(made.rows, "MNIST FedAvg")
    assert row["mean"] == pytest.approx(0.8)
    # Fisher: atanh .8 = 1.0986; ± 1.96/√2 = 1.3859: tanh −.2873 = −.2797, tanh 2.4845 = .9862
    assert row["interval"] == pytest.approx([-0.2797, 0.9862], abs=2e-4)
    assert row_of(made.rows, "CIFAR-10 FedAvg")["published"] == 0.4753


def test_a_correlation_of_what_does_not_vary_is_none(write: Write):
    experiment = with_rounds(find("similarity"), 5)
    folder = write(experiment.cell("MNIST FedAvg"), 1, [0.5] * 5)
    row = row_of(table(experiment, Library([folder])).rows, "MNIST FedAvg")
    assert (row["mean"], row["interval"]) == (None, None)


def test_norm_ratio_fluctuation_and_bad_round_by_hand(write: Write):
    experiment = with_rounds(find("norm-ratio"), 4)
    label = "MNIST FedAvg, α = 0.1, E = 5"
    folder = write(experiment.cell(label), 1, [0.5] * 4, norm_ratio=[0.1, None, 0.2, 0.3])
    assert row_of(table(experiment, Library([folder])).rows, label)["mean"] == pytest.approx(0.2)

    experiment = with_rounds(find("gsi-groups"), 4)
    groups = {"a": {"gsi": [1.0, 2.0, 3.0, None], "scale": [1.0] * 4}}
    write(experiment.cell("MNIST FedAvg"), 1, [0.5] * 4, groups=groups)
    (row,) = [r for r in table(experiment, Library([folder])).rows if r["group"]]
    assert (row["group"], row["mean"], row["std"]) == ("a", 2, 1)  # squares 1 + 0 + 1 over 2
    assert (row["lowest"], row["highest"], row["relative"]) == (1, 3, 0.5)

    experiment = with_rounds(find("bad-round"), 41)
    accuracy = [0.5] * 39 + [0.2, 0.4]
    gsi = [3.0] * 20 + [2.5] + [3.0] * 18 + [1.1, 3.0]
    write(experiment.cells[0], 1, accuracy, gsi_all=gsi)
    row = table(experiment, Library([folder])).rows[0]
    assert row["t"] == 39
    told = [row[name] for name in ("before", "after", "drop", "gsi", "lowest_other")]
    assert told == pytest.approx([50, 20, 30, 1.1, 2.5])


def test_two_rounds_have_no_deviation_and_a_run_without_a_value_was_run(write: Write):
    folder = write(PLAIN, 1, [0.5, 0.25])
    short = f"{PLAIN.label} (shortened: 2 of 12 rounds)"
    row = row_of(table(CONTROLS, Library([folder])).rows, short)
    assert row["mean"] == pytest.approx(37.5)
    assert (row["spread"], row["worst"]) == (None, None)
    # both rounds have the same similarity, so there is no correlation
    similar = replace(CONTROLS, reading="similarity")
    made = table(similar, Library([folder]))
    texts = next(line for line in made.texts() if line[0].startswith(short))
    assert texts == [short, "1", "2", "-", "-", "-"]


def test_formats_have_every_row(write: Write):
    for seed in (1, 2, 3):
        folder = write(GLAD, seed, [0.5] * 12)
    made = table(CONTROLS, Library([folder]))
    text = formats.markdown(made)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(made.rows)
    assert len({line.count("|") for line in lines}) == 1
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(made))))
    assert len(rows) == len(made.rows)
    assert float(rows[1]["mean"]) == pytest.approx(50)
    assert rows[0]["mean"] == ""
    assert json.loads(rows[1]["seeds"]).keys() == {"1", "2", "3"}
    tex = formats.latex(made)
    assert r"50.00 $\pm$ 0.00" in tex
    assert r"last 10 rounds \%" in tex
    assert tex.count(r"\\") == 1 + len(made.rows)
    assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["rows"]
