"""`fedglad compare`: groups, labels, and numbers worked out by hand."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from cli.test_cli import said
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fedglad.analysis.comparison import ToTarget, compare
from fedglad.analysis.grouping import CompareError, labels_of
from fedglad.analysis.statistics import interval, students_t
from fedglad.cli import app
from fedglad.config.keys import label
from fedglad.config.schema import load
from fedglad.report.plots import comparison as plots
from fedglad.report.plots import style
from fedglad.runs.summary import figures


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "80"})


NONE = {1: 0.80, 2: 0.82, 3: 0.84}
GLAD = {1: 0.83, 2: 0.84, 3: 0.88}


@pytest.fixture
def pairs(finished: Any) -> list[Path]:
    """none and glad with seeds 1, 2, 3, none first."""
    none = [finished(a, seed=s, adapter__name="none") for s, a in NONE.items()]
    return none + [finished(a, seed=s) for s, a in GLAD.items()]


AVERAGED = {1: 0.90, 2: 0.90, 3: 0.93}


@pytest.fixture
def averaged(finished: Any) -> list[Path]:
    """FedAvg with seeds 1, 2, 3, of which an average was kept, and the same without one."""
    kept = [finished(a, seed=s, adapter__name="none", average__name="ema") for s, a in NONE.items()]
    for folder, accuracy in zip(kept, AVERAGED.values(), strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        figures = {
            "last10_averaged_accuracy": accuracy,
            "final_averaged_accuracy": accuracy - 0.01,
        }
        (folder / "summary.json").write_text(json.dumps(summary | figures))
    none = {"adapter__name": "none", "average__name": "none"}
    return kept + [finished(a, seed=s, **none) for s, a in GLAD.items()]


# ------------------------------------------------------------------------------------- arithmetic


def test_students_t_is_that_of_the_tables():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 120: 1.980}
    assert {df: round(students_t(df), 3) for df in table} == table
    # df = 1 is Cauchy's: P(|T| <= tan(pi/4)) = 1/2. df = 2: P = t/sqrt(2 + t^2), 1/2 at sqrt(2/3).
    assert students_t(1, 0.5) == pytest.approx(1)
    assert students_t(2, 0.5) == pytest.approx((2 / 3) ** 0.5)
    assert students_t(4, 0.99) == pytest.approx(4.604, abs=5e-4)


def test_an_interval_begins_at_three_values():
    assert interval([0.1]) is None
    assert interval([0.1, 0.2]) is None
    # mean 2, s 1, n 3: 2 ± 4.30265 / sqrt(3) = 2 ± 2.48414
    assert interval([1, 2, 3]) == pytest.approx((-0.48414, 4.48414), abs=1e-5)
    assert interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_means_spreads_and_paired_differences(pairs: list[Path]):
    found = compare(pairs)
    none, glad = found.groups
    assert (found.baseline, none.label, glad.label) == (
        "adapter.name=none",
        "adapter.name=none",
        "adapter.name=glad",
    )
    # (.80 + .82 + .84) / 3 = .82; squares .0004 + 0 + .0004 over 2: .0004 = .02²
    assert (none.mean, none.std) == (pytest.approx(0.82), pytest.approx(0.02))
    # (.83 + .84 + .88) / 3 = .85; squares .0004 + .0001 + .0009 over 2: .0007
    assert (glad.mean, glad.std) == (pytest.approx(0.85), pytest.approx(0.0007**0.5))
    assert glad.final_mean == pytest.approx(0.86)
    assert none.difference is None
    assert glad.difference
    # .03, .02, .04: mean .03, s .01; half the interval is 4.30265 · .01 / sqrt(3) = .0248414
    assert glad.difference.values == pytest.approx([0.03, 0.02, 0.04])
    assert [seed["seed"] for seed in glad.difference.seeds] == [1, 2, 3]
    assert glad.difference.mean == pytest.approx(0.03)
    assert glad.difference.interval == pytest.approx((0.0051586, 0.0548414), abs=1e-6)
    assert found.notes == []


def test_an_average_is_a_row_of_its_own_and_paired_with_the_newest_models(averaged: list[Path]):
    found = compare(averaged)
    newest, mean, other = found.groups
    assert [one.label for one in found.groups] == [
        "average.name=ema",
        "average.name=ema · averaged",
        "average.name=none",
    ]
    assert newest.averaged_of is newest.over_newest is other.over_newest is None
    assert mean.averaged_of == newest.label
    assert mean.runs == newest.runs
    # (.90 + .90 + .93) / 3 = .91; each final one is .01 less
    assert (mean.mean, mean.final_mean) == (pytest.approx(0.91), pytest.approx(0.90))
    # .90 - .80, .90 - .82, .93 - .84: .10, .08, .09, mean .09, s .01; ± 4.30265 · .01 / sqrt(3)
    assert mean.over_newest
    assert mean.over_newest.values == pytest.approx([0.10, 0.08, 0.09])
    assert mean.over_newest.interval == pytest.approx((0.0651586, 0.1148414), abs=1e-6)
    assert mean.difference == mean.over_newest  # as the newest models are the baseline
    again = compare(averaged, baseline="average.name=none").groups
    assert again[2].difference  # .90 - .83, .90 - .84, .93 - .88
    assert again[2].difference.values == pytest.approx([0.07, 0.06, 0.05])
    assert again[2].over_newest == mean.over_newest


def test_an_average_that_a_run_did_not_test_is_no_row(averaged: list[Path]):
    path = averaged[1] / "summary.json"
    summary = json.loads(path.read_text())
    del summary["last10_averaged_accuracy"], summary["final_averaged_accuracy"]
    path.write_text(json.dumps(summary))
    assert len(compare(averaged).groups) == 2


def test_a_metric_of_the_average_compares_nothing_else(averaged: list[Path]):
    (group,) = compare(averaged[:3], metric="last10_averaged_accuracy").groups
    assert group.values == list(AVERAGED.values())
    assert group.final_mean == pytest.approx(0.90)
    final = compare(averaged[:3], metric="final_accuracy").groups[1]
    assert final.values == pytest.approx([0.89, 0.89, 0.92])
    with pytest.raises(CompareError, match="has no number 'last10_averaged_accuracy': choose from"):
        compare(averaged, metric="last10_averaged_accuracy")
    assert len(compare(averaged, metric="rounds").groups) == 2


def test_an_average_is_shown_with_its_pair(averaged: list[Path]):
    lines = call("compare", *averaged).stdout.splitlines()
    row = next(line for line in lines if "average.name=ema · averaged  " in line)
    assert row.split("·")[1].split()[:4] == ["averaged", "3", "91.00", "±"]
    place = lines.index(
        "Average of the models − newest model, of the same runs in percentage points:"
    )
    assert lines[place + 1] == (
        "  average.name=ema   +9.00 [+6.52, +11.48]   by seed 1: +10.00,  2: +8.00,  3: +9.00"
    )
    assert not any("average.name=ema" in line for line in lines[place + 2 : place + 3])


def test_a_run_of_before_there_were_averages_is_one_without(averaged: list[Path]):
    for folder in averaged[3:5]:
        path = folder / "config.toml"
        tree = path.read_text()
        start = tree.index("[average]")
        path.write_text(tree[:start] + tree[tree.index("\n[", start) + 1 :])
        assert "[average]" not in path.read_text()
    assert [len(one.values) for one in compare(averaged[3:]).groups] == [3]


def test_only_common_seeds_are_paired(finished: Any):
    folders = [finished(a, seed=s, adapter__name="none") for s, a in {1: 0.5, 2: 0.6}.items()]
    folders += [finished(a, seed=s) for s, a in {3: 0.9, 2: 0.7}.items()]
    glad = compare(folders).groups[1]
    assert glad.mean == pytest.approx(0.8)  # of all its runs
    assert glad.difference
    assert glad.difference.values == pytest.approx([0.1])  # of seed 2 alone
    assert glad.difference.interval is None


def test_no_common_seed_is_said(finished: Any):
    found = compare([finished(0.5, seed=1, adapter__name="none"), finished(0.6, seed=2)])
    assert found.groups[1].difference is None
    assert found.notes == [
        "adapter.name=glad is not paired with adapter.name=none: they have no seed in common"
    ]


def test_one_run_has_no_spread(finished: Any):
    (group,) = compare([finished(0.5)]).groups
    assert (group.label, group.mean, group.std, group.difference) == ("all runs", 0.5, None, None)


def test_runs_with_fewer_rounds_than_their_preset_are_called_shortened(finished: Any):
    cnn = {"data__name": "mnist", "model__name": "cnn"}
    short = [finished(0.5, rounds=2, adapter__name=name, **cnn) for name in ("none", "glad")]
    assert compare(short).notes == ["all runs are shortened: 2 of 50 rounds"]
    whole = finished(0.5, rounds=50, **cnn)
    both = compare([short[0], whole]).notes
    assert any(note.endswith("is shortened: 2 of 50 rounds") for note in both)
    alone = {"data__partition": "centralised", "data__clients": 1, "sampler__clients_per_round": 1}
    assert compare([finished(0.5, rounds=2, **cnn, **alone)]).notes == []  # rounds are epochs
    assert compare([finished(0.5, rounds=2)]).notes == []  # digits are for trying out


# ---------------------------------------------------------------------------- curves and stability


def with_rounds(folder: Path, accuracies: list[float | None], gsi: list[float | None]) -> Path:
    lines = [
        {"round": t, "status": "stepped", "test_accuracy": accuracy, "gsi_all": g}
        for t, (accuracy, g) in enumerate(zip(accuracies, gsi, strict=True))
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def curved(finished: Any) -> list[Path]:
    """Two seeds of none, with rounds."""
    first = with_rounds(finished(0.5, seed=1, adapter__name="none"), [0.9, 0.2, 0.4, 0.6], [1] * 4)
    second = finished(0.7, seed=2, adapter__name="none")
    return [first, with_rounds(second, [0.5, 0.4, 0.7, 0.8], [3, 1, 1, None])]


def test_stability_is_that_of_the_second_half(curved: list[Path]):
    (group,) = compare(curved).groups
    steady = group.stability
    assert steady
    # .4, .6: deviations ∓.1, sqrt(.02 / 1) = .141421; .7, .8: ∓.05, sqrt(.005) = .0707107
    assert steady.stds == pytest.approx([0.1414214, 0.0707107], abs=1e-6)
    assert steady.worsts == [0.4, 0.7]
    assert steady.std == pytest.approx(0.1060660, abs=1e-6)
    assert steady.worst == pytest.approx(0.55)


def test_the_middle_of_an_odd_number_and_untested_rounds_do_not_count(finished: Any):
    tested = [0.1, None, 0.2, None, 0.3, None, 0.8, None, 0.6]  # .1 .2 .3 | .8 .6, .3 in the middle
    folder = with_rounds(finished(0.5), tested, [1] * 9)
    steady = compare([folder]).groups[0].stability
    assert steady
    assert (steady.stds, steady.worsts) == ([pytest.approx(0.1414214, abs=1e-6)], [0.6])


@pytest.mark.parametrize("accuracies", [[], [0.5], [0.5, 0.6], [0.5, 0.6, 0.7]])
def test_one_round_has_no_stability(finished: Any, accuracies: list[Any]):
    folder = with_rounds(finished(0.5), accuracies, [1] * len(accuracies))
    assert compare([folder]).groups[0].stability is None


def test_curves_are_means_over_the_seeds(curved: list[Path]):
    (group,) = compare(curved).groups
    assert group.curves
    accuracy, gsi = group.curves["accuracy"], group.curves["gsi"]
    assert accuracy.rounds == gsi.rounds == [1, 2, 3, 4]
    assert accuracy.mean == pytest.approx([0.7, 0.3, 0.55, 0.7])
    # two values a, b: |a − b| / sqrt(2)
    assert accuracy.std == pytest.approx([x / 2**0.5 for x in (0.4, 0.2, 0.3, 0.2)])
    assert gsi.mean == [2, 1, 1, 1]
    assert gsi.std == [pytest.approx(2**0.5), 0, 0, None]  # of the last round one seed is left


def test_the_stability_is_shown_and_in_json(curved: list[Path]):
    lines = [" ".join(line.split()) for line in call("compare", *curved).stdout.splitlines()]
    assert lines[-3:] == [
        "Test accuracy in the second half of the rounds, mean over the runs:",
        "std % worst round %",
        "all runs 10.61 55.00",
    ]
    (group,) = json.loads(call("compare", *curved, "--json").stdout)["groups"]
    assert group["stability"]["worsts"] == [0.4, 0.7]
    assert group["curves"]["gsi"]["std"][-1] is None


def test_a_plot_has_a_line_for_each_group(
    curved: list[Path], finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    glad = with_rounds(finished(0.5, seed=1), [0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4])
    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))
    result = call("compare", *curved, glad, "--plot", tmp_path / "curves.png")
    assert result.exit_code == 0, result.exception
    image = matplotlib.image.imread(tmp_path / "curves.png")
    assert min(image.shape[:2]) > 500
    above, below = drawn[0].axes
    assert above.get_lines()[0].get_ydata().tolist() == pytest.approx([70, 30, 55, 70])
    assert below.get_lines()[1].get_ydata().tolist() == [1, 2, 3, 4]
    labels = [line.get_label() for line in above.get_lines()]
    assert labels == ["adapter.name=none", "adapter.name=glad"]
    assert [len(axes.collections) for axes in (above, below)] == [1, 1]  # a band of two seeds


def test_an_average_is_drawn_in_the_colour_of_its_run(averaged: list[Path]):
    for folder in averaged:
        with_rounds(folder, [0.5, 0.6], [2.0, 3.0])
        path = folder / "rounds.jsonl"
        rounds = [json.loads(line) for line in path.read_text().splitlines()]
        both = [r | {"averaged_accuracy": r["test_accuracy"] + 0.125} for r in rounds]
        path.write_text("".join(f"{json.dumps(r)}\n" for r in both))
    with style.paper_style():
        accuracy, gsi = plots.draw(compare(averaged)).axes
    newest, mean, other = accuracy.get_lines()
    assert mean.get_ydata() == pytest.approx([62.5, 72.5])
    assert newest.get_color() == mean.get_color() != other.get_color()
    assert (newest.get_linestyle(), mean.get_linestyle()) == ("-", "--")
    assert len(gsi.get_lines()) == 2  # it is the same for both


def test_a_plot_of_one_client_a_round_has_no_gsi(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = with_rounds(finished(0.5), [0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1])
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: drawn.append(f))
    assert call("compare", alone, "--plot", tmp_path / "a.png").exit_code == 0
    (axes,) = drawn[0].axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("test accuracy, %", "round")


def test_a_plot_that_cannot_be_drawn(
    curved: list[Path], finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bare = finished(0.5, seed=9)
    for args, message in (
        ([bare, "--plot", tmp_path / "a.png"], "there are no rounds to plot"),
        ([*curved, "--plot", tmp_path / "a.xyz"], "a.xyz cannot be written: Format 'xyz'"),
        ([*curved, "--plot", tmp_path / "no" / "a.png"], "a.png cannot be written: "),
    ):
        result = call("compare", *args)
        assert result.exit_code == 2, result.exception
        assert message in said(result)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("compare", *curved, "--plot", tmp_path / "a.png")
    assert "pip install 'fedglad[report]'" in said(result)


# ----------------------------------------------------------------------------------- the controls


def control_of(folder: Path, factor: float, **adapter: Any) -> Path:
    rule = {"name": "glad", "groups": "tensor", "min_group": 1, "gamma": 0.02, "beta": 0.9}
    own = {"adapter": {**rule, **adapter}, "factor": factor}
    (folder / "control.json").write_text(json.dumps({"control_of": [own]}))
    return folder


@pytest.fixture
def controlled(pairs: list[Path], finished: Any) -> list[Path]:
    """none and glad, and controls of glad with a constant of each seed's own."""
    factors = {1: 0.9, 2: 0.95, 3: 0.99}
    made = [
        control_of(finished(0.81, seed=s, adapter__name="fixed", adapter__value=f), f)
        for s, f in factors.items()
    ]
    return pairs + made


def test_controls_are_one_group_and_the_rule_is_compared_with_them(controlled: list[Path]):
    found = compare(controlled)
    none, glad, control = found.groups
    assert control.label == "control of adapter.name=glad"
    assert control.control_of == glad.label == "adapter.name=glad"
    assert control.factors == [0.9, 0.95, 0.99]
    assert control.config == {"adapter.name": "fixed"}
    assert control.values == [0.81] * 3
    assert control.difference
    assert control.difference.values == pytest.approx([0.01, -0.01, -0.03])  # to none
    # glad − control: .83 − .81, .84 − .81, .88 − .81: mean .04, s = sqrt((4 + 1 + 9)e-4 / 2)
    assert glad.over_control
    assert glad.over_control.values == pytest.approx([0.02, 0.03, 0.07])
    half = 4.30265 * 0.0007**0.5 / 3**0.5
    assert glad.over_control.interval == pytest.approx((0.04 - half, 0.04 + half), abs=1e-6)
    assert none.over_control is None
    assert control.over_control is None


def test_the_baseline_of_controls_can_be_named(controlled: list[Path]):
    assert compare(controlled, baseline="glad").baseline == "adapter.name=glad"
    assert compare(controlled, baseline="control").baseline == "control of adapter.name=glad"


def test_controls_of_two_rules_are_told_apart(finished: Any):
    folders = [finished(0.5, adapter__gamma=g) for g in (0.02, 0.1)]
    for gamma, factor in ((0.02, 0.9), (0.1, 0.8)):
        own = finished(0.4, adapter__name="fixed", adapter__value=factor)
        folders.append(control_of(own, factor, gamma=gamma))
    found = compare(folders)
    assert [group.label for group in found.groups] == [
        "adapter.name=glad adapter.gamma=0.02",
        "adapter.name=glad adapter.gamma=0.1",
        "control of adapter.name=glad adapter.gamma=0.02",
        "control of adapter.name=glad adapter.gamma=0.1",
    ]
    assert [g.over_control.mean for g in found.groups[:2] if g.over_control] == [
        pytest.approx(0.1)
    ] * 2


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"control_of": 3}', '{"control_of": [3]}'])
def test_a_run_that_is_not_or_no_longer_a_control_is_a_run_of_its_own(finished: Any, text: Any):
    folder = finished(0.5, adapter__name="fixed", adapter__value=0.9)
    if text is None:
        control_of(folder, 0.8)  # of a run that was overwritten
    else:
        (folder / "control.json").write_text(text)
    found = compare([folder, finished(0.6)])
    assert [group.label for group in found.groups] == ["adapter.name=fixed", "adapter.name=glad"]


def test_the_pair_is_shown(controlled: list[Path]):
    text = call("compare", *controlled).stdout
    assert "Rule − control in percentage points:" in text
    line = next(x for x in text.splitlines() if "factors" in x)
    assert " ".join(line.split()) == (
        "adapter.name=glad − control of adapter.name=glad +4.00 [-2.57, +10.57] "
        "by seed 1: +2.00, 2: +3.00, 3: +7.00 (factors 0.9000, 0.9500, 0.9900)"
    )


def with_average(folder: Path, accuracy: float) -> Path:
    summary = json.loads((folder / "summary.json").read_text())
    figures = {"last10_averaged_accuracy": accuracy, "final_averaged_accuracy": accuracy}
    (folder / "summary.json").write_text(json.dumps(summary | figures))
    return folder


def noted(folder: Path, *entries: dict[str, Any]) -> Path:
    (folder / "control.json").write_text(json.dumps({"control_of": list(entries)}))
    return folder


def chosen(kind: str, factor: float) -> dict[str, Any]:
    on = [{"seed": 1, "data.seed": 0}]
    by = "last10_accuracy" if kind == "tuned" else "last10_averaged_accuracy"
    return {"kind": kind, "factor": factor, "by": by, "among": [0.5, 1.5, 2], "on": on}


@pytest.fixture
def all_kinds(finished: Any) -> list[Path]:
    """glad and pooled with four seeds, and the controls that they share: 1.5 raw, 2 averaged."""
    made: list[Path] = []
    for seed in (1, 2, 3, 4):
        for name, raw, mean in (("none", 0.80, 0.90), ("glad", 0.82, 0.91), ("pooled", 0.81, 0.9)):
            made.append(with_average(finished(raw, seed=seed, adapter__name=name), mean))
        fixed = {"seed": seed, "adapter__name": "fixed"}
        best = finished(0.9 if seed == 1 else 0.83, adapter__value=1.5, **fixed)
        trial = [{"kind": "trial", "factor": 1.5}] if seed == 1 else []
        made.append(noted(with_average(best, 0.85), *trial, chosen("tuned", 1.5)))
        best = finished(0.70, adapter__value=2.0, **fixed)
        made.append(noted(with_average(best, 0.93 + seed / 1000), chosen("tuned-averaged", 2.0)))
        falls = finished(0.84, seed=seed, adapter__name="none", server__schedule="linear")
        made.append(noted(with_average(falls, 0.84), {"kind": "linear"}))
    trial = finished(0.1, seed=1, adapter__name="fixed", adapter__value=0.5)
    made.append(noted(with_average(trial, 0.1), {"kind": "trial", "factor": 0.5}))
    return made


def test_rules_share_their_constants_and_the_decay(all_kinds: list[Path]):
    found = compare(all_kinds)
    assert [group.label for group in found.groups] == [
        *("adapter.name=none", "adapter.name=none · averaged"),
        *("adapter.name=glad", "adapter.name=glad · averaged"),
        *("adapter.name=pooled", "adapter.name=pooled · averaged"),
        "tuned constant 1.5",  # its average is that of a constant that was not chosen for it
        "constant tuned for the average 2 · averaged",
        *("linear decay", "linear decay · averaged"),
    ]
    rows = {group.label: group for group in found.groups}
    assert rows["tuned constant 1.5"].config == {"adapter.name": "fixed", "adapter.value": 1.5}
    assert rows["linear decay"].config == {"adapter.name": "none", "server.schedule": "linear"}
    assert [rows[name].control for name in ("adapter.name=glad", "linear decay")] == [
        None,
        "linear",
    ]
    assert rows["adapter.name=none"].over_controls is None
    # Newest to newest: .82 − .83 without seed 1, on which 1.5 was chosen; .82 − .84 with all.
    over = rows["adapter.name=glad"].over_controls or {}
    assert [*over] == ["tuned constant 1.5", "linear decay"]
    assert over["tuned constant 1.5"].values == pytest.approx([-0.01] * 3)
    assert [seed["seed"] for seed in over["tuned constant 1.5"].seeds] == [2, 3, 4]
    assert over["linear decay"].values == pytest.approx([-0.02] * 4)
    # Average to average: .91 − .932, .933, .934: mean −.023, s = .001, 4.30265 · .001/√3 = .002484
    over = rows["adapter.name=glad · averaged"].over_controls or {}
    assert [*over] == ["constant tuned for the average 2 · averaged", "linear decay · averaged"]
    tuned = over["constant tuned for the average 2 · averaged"]
    assert tuned.values == pytest.approx([-0.022, -0.023, -0.024])
    assert tuned.interval == pytest.approx((-0.025484, -0.020516), abs=1e-6)
    assert over["linear decay · averaged"].mean == pytest.approx(0.07)
    # The row has the mean of all seeds, its difference to the baseline leaves the same one out.
    row = rows["tuned constant 1.5"]
    assert row.mean == pytest.approx((0.9 + 3 * 0.83) / 4)
    assert row.difference
    assert row.difference.mean == pytest.approx(0.03)


def test_it_is_said_how_a_constant_was_chosen(all_kinds: list[Path]):
    notes = compare(all_kinds).notes
    assert "1 of the runs are left out: constants that were tried, not chosen" in notes
    assert (
        "tuned constant 1.5: the best of 0.5, 1.5, 2 by last10_accuracy, on the test data, of "
        "seed=1 data.seed=0; its differences leave that seed out" in notes
    )
    (other,) = (note for note in notes if note.startswith("constant tuned for the average 2"))
    assert other.endswith("; it is at the end of these: --factors takes others")
    alone = [path for path in all_kinds if load(path / "config.toml")[1].seed == 1]
    found = compare(alone)
    assert any(
        note.endswith("of seed=1 data.seed=0; no other seed is there") for note in found.notes
    )
    rows = {group.label: group for group in found.groups}
    over = rows["adapter.name=glad"].over_controls or {}
    assert over["tuned constant 1.5"].values == pytest.approx([-0.08])


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "linear"},  # of a run that was overwritten
        {"kind": "tuned", "factor": 0.8},
        {"kind": "tuned"},
        {"kind": "tuned", "factor": 0.9, "on": 3},
        {"kind": "tuned", "factor": 0.9, "on": [3]},
        {"kind": "of tomorrow", "factor": 0.9},
        {"kind": 3, "factor": 0.9},
        {"kind": "trial", "factor": 0.9, "asked": True},
        {"adapter": 3, "factor": 0.9},
    ],
)
def test_an_entry_that_is_not_true_or_not_known_changes_nothing(finished: Any, entry: Any):
    folder = noted(finished(0.5, adapter__name="fixed", adapter__value=0.9), entry)
    found = compare([folder, finished(0.6)])
    assert [group.label for group in found.groups] == ["adapter.name=fixed", "adapter.name=glad"]


# ------------------------------------------------------------------------------------- the groups


def test_seeds_and_the_engine_make_no_groups(finished: Any):
    folders = [finished(0.5, seed=1), finished(0.6, seed=1, data__seed=1)]
    folders.append(finished(0.7, seed=2, engine__name="serial"))
    (group,) = compare(folders).groups
    assert group.values == [0.5, 0.6, 0.7]
    assert group.seeds == [
        {"seed": 1, "data.seed": 0},
        {"seed": 1, "data.seed": 1},
        {"seed": 2, "data.seed": 0},
    ]


def labels(*folders: Path) -> list[str]:
    return [group.label for group in compare(folders).groups]


def test_a_label_has_the_keys_that_differ(finished: Any):
    assert labels(
        finished(0.5, adapter__gamma=0.02, rounds=5), finished(0.6, adapter__gamma=0.5, rounds=7)
    ) == ["adapter.gamma=0.02 rounds=5", "adapter.gamma=0.5 rounds=7"]


def test_another_class_is_told_by_its_name(finished: Any):
    """Not by fields that the other does not have, nor by defaults that differ."""
    assert labels(
        finished(0.5, adapter__name="none"),
        finished(0.6, adapter__name="glad"),
        finished(0.7, adapter__name="fedexp"),
    ) == ["adapter.name=none", "adapter.name=glad", "adapter.name=fedexp"]


def test_fields_are_told_where_a_class_is_there_twice(finished: Any):
    assert labels(
        finished(0.5, adapter__name="none"),
        finished(0.6, adapter__gamma=0.02),
        finished(0.7, adapter__gamma=0.1),
    ) == [
        "adapter.name=none",
        "adapter.name=glad adapter.gamma=0.02",
        "adapter.name=glad adapter.gamma=0.1",
    ]


def test_a_field_that_only_one_has_tells_them_apart(finished: Any):
    found = labels(
        finished(0.5, data__name="synthetic", model__name="softmax"),
        finished(0.6, data__name="synthetic", model__name="softmax", data__samples=9),
    )
    assert len(set(found)) == 2
    assert found[1] == "data.samples=9"


def test_a_long_label_names_four_keys_classes_first(finished: Any):
    """And all of them in `config`; --baseline looks there too."""
    many = {
        **{"rounds": 7, "client__lr": 0.5, "client__epochs": 1, "data__alpha": 0.5},
        **{"server__name": "adam", "weighting__name": "equal"},
    }
    folders = [finished(0.5), finished(0.6, **many)]
    assert labels(*folders) == [
        "server.name=sgd weighting.name=samples client.lr=0.05 client.epochs=5 +2 more",
        "server.name=adam weighting.name=equal client.lr=0.5 client.epochs=1 +2 more",
    ]
    found = compare(folders, baseline="rounds=7")
    assert found.groups[0].label == labels(*folders)[1]
    assert found.groups[0].config.keys() == {k.replace("__", ".") for k in many}
    assert compare(folders, baseline=labels(*folders)[1]).baseline == labels(*folders)[1]


def test_a_long_label_is_as_long_as_it_takes_to_tell_groups_apart(finished: Any):
    many = {"client__lr": 0.5, "client__epochs": 1, "data__alpha": 0.5, "model__classes": 11}
    found = labels(finished(0.5), finished(0.6, **many), finished(0.7, **many, rounds=7))
    assert found == [
        "client.lr=0.05 client.epochs=5 data.alpha=0.1 model.classes=10 +1 more",
        "client.lr=0.5 client.epochs=1 data.alpha=0.5 model.classes=11 rounds=60",
        "client.lr=0.5 client.epochs=1 data.alpha=0.5 model.classes=11 rounds=7",
    ]


def test_an_engine_with_other_bits_is_a_row_of_its_own(finished: Any):
    folders = [finished(0.5), finished(0.6, "batched", engine__name="batched")]
    folders.append(finished(0.7, seed=2, engine__name="serial"))
    found = compare(folders)
    assert [group.label for group in found.groups] == ["engine.name=local", "engine.name=batched"]
    assert [group.values for group in found.groups] == [[0.5, 0.7], [0.6]]
    assert found.groups[1].difference
    assert found.notes == []


def test_an_engine_that_is_not_here_is_a_row_of_its_own(finished: Any):
    folder = finished(0.6, seed=2)
    text = (folder / "config.toml").read_text()
    own = text.partition("[engine]")[0] + '[engine]\nname = "absent:Engine"\n'
    (folder / "config.toml").write_text(own)
    assert labels(finished(0.5), folder) == ["engine.name=local", "engine.name=absent:Engine"]


def test_runs_with_other_random_draws_are_not_paired(finished: Any):
    old, new = finished(0.5), finished(0.6, "new")
    summary = json.loads((new / "summary.json").read_text())
    (new / "summary.json").write_text(json.dumps({**summary, "versions": {"format": 2}}))
    found = compare([old, new])
    assert [group.label for group in found.groups] == ["format=1", "format=2"]
    assert found.groups[1].difference is None
    assert "random draws differ" in found.notes[0]


def test_other_numbers_of_rounds_are_paired_with_a_note(finished: Any):
    found = compare([finished(0.5, rounds=5), finished(0.6, rounds=7), finished(0.7, rounds=3)])
    assert all(group.difference for group in found.groups[1:])
    assert found.notes == ["the baseline has 5 rounds, what is compared with it 7, 3"]
    found = compare([finished(0.5, rounds=8), finished(0.6, rounds=9, data__alpha=0.5)])
    assert [note.rpartition(": ")[2] for note in found.notes] == ["the data differ"]


def test_skipped_rounds_are_noted(finished: Any):
    folder = finished(0.5)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "rounds": 1, "skipped": 1}))
    (folder / "rounds.jsonl").write_text('{"round": 0, "status": "skipped", "reason": "bad"}\n')
    assert compare([folder]).notes == [f"{folder}: 1 of 1 rounds were skipped: bad"]


def test_the_baseline_is_the_first_without_an_adapter_else_the_first(finished: Any):
    glad, none = finished(0.5), finished(0.6, adapter__name="none")
    found = compare([glad, none])
    assert found.baseline == "adapter.name=none"
    assert [group.label for group in found.groups] == ["adapter.name=none", "adapter.name=glad"]
    assert compare([glad, none], baseline="glad").baseline == "adapter.name=glad"
    adam = finished(0.7, adapter__name="none", server__name="adam")
    assert compare([glad, none, adam]).baseline == "adapter.name=none server.name=sgd"
    assert compare([glad, adam, none]).baseline == "adapter.name=none server.name=adam"
    pooled = finished(0.8, adapter__name="pooled")
    assert compare([pooled, glad]).baseline == "adapter.name=pooled"


def test_a_label_is_what_the_command_line_takes():
    assert label({"a.b": "x", "c": [1, 2], "d": 0.5, "e": True}) == "a.b=x c=[1, 2] d=0.5 e=true"


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"data__alpha": 0.5}, "data.alpha=0.5 is not paired with data.alpha=0.1: the data differ"),
        (
            {"sampler__clients_per_round": 7},
            "sampler.clients_per_round=7 is not paired with sampler.clients_per_round=5: "
            "the cohorts differ",
        ),
    ],
)
def test_other_data_or_cohorts_are_not_paired(finished: Any, settings: Any, note: str):
    found = compare([finished(0.5), finished(0.6, **settings)])
    assert [group.mean for group in found.groups] == [0.5, 0.6]
    assert found.groups[1].difference is None
    assert found.notes == [note]


def test_the_same_configuration_twice_counts_once_and_is_named(finished: Any):
    first, second = finished(0.5, "first"), finished(0.9, "second")
    found = compare([first, second])
    assert found.groups[0].values == [0.5]
    assert found.notes == [f"{second} is left out: the same configuration as {first}"]


def test_the_same_folder_twice_is_one_run(finished: Any, tmp_path: Path):
    folder = finished(0.5)
    found = compare([folder, tmp_path / "runs", f"{folder}/../{folder.name}"])
    assert found.groups[0].values == [0.5]
    assert found.notes == []


def test_an_unfinished_run_is_left_out_and_named(finished: Any):
    done, other = finished(0.5), finished(None, seed=2)
    (other / "rounds.jsonl").write_text('{"round": 0}\n{"round": 1}\n')
    found = compare([done, other])
    assert found.groups[0].values == [0.5]
    assert found.notes == [f"{other} is left out: unfinished, 2 of 60 rounds"]


def test_a_folder_of_runs_is_read_in_the_order_of_their_start(pairs: list[Path], tmp_path: Path):
    (tmp_path / "runs" / "notes.md").write_text("mine")
    (tmp_path / "runs" / "plots").mkdir()
    assert compare([tmp_path / "runs"]) == compare(pairs)


@pytest.mark.parametrize("baseline", ["glad", "adapter.name=glad"])
def test_another_baseline(pairs: list[Path], baseline: str):
    found = compare(pairs, baseline=baseline)
    assert [group.label for group in found.groups] == ["adapter.name=glad", "adapter.name=none"]
    assert found.groups[1].difference
    assert found.groups[1].difference.mean == pytest.approx(-0.03)


def test_a_label_that_is_part_of_another_can_be_the_baseline(finished: Any):
    folders = [finished(0.5, rounds=50), finished(0.6, rounds=5)]
    assert compare(folders, baseline="rounds=5").baseline == "rounds=5"


def test_another_metric(pairs: list[Path]):
    assert compare(pairs, metric="final_accuracy").groups[0].mean == pytest.approx(0.83)


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "fedexp"}, "matches no group: choose from adapter.name=none; adapter.name="),
        ({"baseline": "adapter"}, "matches several groups: choose from"),
        ({"metric": "acc"}, "has no number 'acc': choose from last10_accuracy, final_accuracy"),
    ],
)
def test_an_option_that_fits_nothing(pairs: list[Path], options: Any, message: str):
    with pytest.raises(CompareError, match=message):
        compare(pairs, **options)


def test_folders_that_hold_no_run(tmp_path: Path, finished: Any):
    with pytest.raises(CompareError, match=r"there is no folder .*absent"):
        compare([tmp_path / "absent"])
    (tmp_path / "file").touch()
    with pytest.raises(CompareError, match=r"file is a file: give the folder of a run"):
        compare([tmp_path / "file"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CompareError, match="empty holds no run"):
        compare([tmp_path / "empty"])
    with pytest.raises(CompareError, match=r"no finished run.*unfinished, 0 of 60 rounds"):
        compare([finished(None)])


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\x00"])
def test_a_broken_summary_is_named(finished: Any, text: str):
    folder = finished(0.5)
    (folder / "summary.json").write_text(text)
    with pytest.raises(CompareError, match=f"{folder.name}/summary.json"):
        compare([folder])


@pytest.mark.parametrize("value", [None, "0.5", True, float("nan")])
def test_a_summary_whose_value_is_no_number(finished: Any, value: Any):
    folder = finished(0.5)
    (folder / "summary.json").write_text(json.dumps({"last10_accuracy": value}))
    with pytest.raises(CompareError, match="has no number 'last10_accuracy'"):
        compare([folder])


def test_a_broken_configuration_is_named(finished: Any):
    folder = finished(0.5)
    (folder / "config.toml").write_bytes(b"\xff = [")
    with pytest.raises(CompareError, match=r"config\.toml cannot be read"):
        compare([folder])


# ------------------------------------------------------------------------------ the command line


def test_the_table(pairs: list[Path]):
    result = call("compare", *pairs)
    assert result.exit_code == 0, result.exception
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "n last10_accuracy % final % difference 95 % interval",
        "adapter.name=none 3 82.00 ± 2.00 83.00 baseline",
        "adapter.name=glad 3 85.00 ± 2.65 86.00 +3.00 [+0.52, +5.48]",
        "Baseline: adapter.name=none",
        "",
        "Differences to adapter.name=none by seed in percentage points:",
        "adapter.name=glad 1: +3.00, 2: +2.00, 3: +4.00",
    ]


def test_the_table_of_one_group_has_no_differences(finished: Any):
    result = call("compare", finished(0.5, seed=1), finished(0.7, seed=2))
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == ["n last10_accuracy % final %", "all runs 2 60.00 ± 14.14 61.00"]


def test_seeds_of_the_data_are_told_where_they_differ(finished: Any):
    folders = [finished(0.5, data__seed=s, adapter__name="none") for s in (4, 5)]
    folders += [finished(0.6, data__seed=s) for s in (4, 5)]
    result = call("compare", *folders)
    assert "adapter.name=glad   4: +10.00,  5: +10.00" in result.stdout


def test_notes_and_gaps_are_shown(finished: Any):
    result = call("compare", finished(0.5), finished(0.6, data__alpha=0.5), finished(None, seed=9))
    text = " ".join(result.stdout.split())
    assert "Note: data.alpha=0.5 is not paired with data.alpha=0.1: the data differ." in text
    assert "unfinished, 0 of 60 rounds." in text
    assert "data.alpha=0.1 1 50.00 51.00 data.alpha=0.5 1 60.00" in text
    assert "±" not in text
    assert "Baseline: data.alpha=0.1" in text


def test_a_metric_that_is_no_share_is_not_shown_in_percent(pairs: list[Path]):
    text = " ".join(call("compare", *pairs, "--metric", "rounds").stdout.split())
    assert "n rounds final % difference 95 % interval" in text
    assert "adapter.name=glad 3 60 ± 0 86.00 +0 [+0, +0]" in text


def test_a_long_label_is_not_cut_in_a_pipe(finished: Any):
    cohorts = [{"0": [*range(40), last]} for last in (40, 41)]
    folders = [finished(0.5, sampler__name="scripted", sampler__cohorts=c) for c in cohorts]
    result = call("compare", *folders)
    for given in cohorts:
        assert f"\nsampler.cohorts={json.dumps(given)}  " in result.stdout


def test_json_has_everything(pairs: list[Path]):
    result = call("compare", *pairs, "--json", "--baseline", "none")
    found = json.loads(result.stdout)
    assert found.keys() == {
        "metric",
        "baseline",
        "groups",
        "notes",
        "score",
        "tested",
        "final",
        "target",
        "blocks",
        "tests",
        "alias",
    }
    assert found["groups"][0].keys() == {
        *("label", "config", "runs", "seeds", "values", "mean", "std", "final_mean", "difference"),
        *("control_of", "factors", "over_control", "stability", "curves"),
        *("averaged_of", "over_newest", "control", "over_controls", "to_target", "clients"),
        *("best", "block"),
    }
    glad = found["groups"][1]
    assert glad["config"] == {"adapter.name": "glad"}
    assert glad["values"] == list(GLAD.values())
    assert glad["runs"] == [str(path) for path in pairs[3:]]
    assert glad["seeds"][0] == {"seed": 1, "data.seed": 0}
    assert glad["difference"]["values"] == pytest.approx([0.03, 0.02, 0.04])
    assert glad["difference"]["interval"] == pytest.approx([0.0051586, 0.0548414], abs=1e-6)
    assert found["groups"][0]["difference"] is None


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path, finished: Any):
    broken = finished(0.5)
    (broken / "summary.json").write_text("{")
    for args in ([tmp_path / "absent"], [tmp_path], [broken], [broken, "--baseline", "x"]):
        result = call("compare", *args)
        assert result.exit_code == 2, result.exception
        assert said(result).startswith("error: ")
        assert not result.stdout
    assert call("compare").exit_code == 2


def test_values_that_look_alike_get_labels_that_do():
    assert labels_of([{"server.lr": 1}, {"server.lr": "1"}]) == ["server.lr=1", "server.lr=1"]


# --------------------------------------------------------------------------- rounds to a target

BYTES = {"down": 1_000_000, "up": 100_000}


@pytest.fixture
def tested(finished: Any):
    """Makes a run by its accuracies, and those of its average, round by round."""

    def make(
        accuracies: list[float], averaged: list[float] | None = None, **settings: Any
    ) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
        folder = finished(0.5, rounds=len(accuracies), **settings)
        cohort = [{"id": 0, "loss": 1.0}, {"id": 1, "loss": 1.0}]
        records: list[dict[str, Any]] = []
        for t, accuracy in enumerate(accuracies):
            more = {"averaged_accuracy": averaged[t]} if averaged else {}
            records.append({"round": t, "clients": cohort, "test_accuracy": accuracy, **more})
        summary = {**figures(records), "update_bytes": BYTES}
        save(folder, records, summary)
        return folder, records, summary

    return make


def save(folder: Path, records: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "summary.json").write_text(json.dumps(summary))


def test_rounds_and_bytes_to_a_target(tested: Any):
    none = {"adapter__name": "none", "average__name": "none"}
    runs = [tested([0.5, 0.7, 0.8, 0.9], seed=1, **none)[0]]  # 3 rounds · 2 clients · 1.1 MB: 6.6
    runs.append(tested([0.5, 0.8, 0.7, 0.7], seed=2, **none)[0])  # 2 · 2 · 1.1: 4.4
    slow, records, summary = tested([0.5, 0.6, 0.7, 0.85], seed=1, average__name="none")
    records[0] = {**records[0], "clients": [{"id": 0, "loss": 1.0}, {"id": 1, "rejected": "late"}]}
    save(slow, records, summary)  # 8 · 1 MB there, 7 · 0.1 MB back: 8.7
    runs += [slow, tested([0.5, 0.6, 0.7, 0.79], seed=2, average__name="none")[0]]
    found = compare(runs, target="80 %")
    assert found.target == 0.8
    first, second = (group.to_target for group in found.groups)
    assert first == ToTarget(2, 2, rounds=2.5, bytes=5.5e6, by_run=[3, 2])
    assert second == ToTarget(1, 2, rounds=4, bytes=8.7e6, by_run=[4, None])
    shown = call("compare", *runs, "--target", "0.8")
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.output.splitlines() if "adapter.name=" in line][:2]
    assert "rounds to 80.0 %" in shown.output
    assert "MB to it" in shown.output
    assert "2.5 (2 of 2)" in rows[0]
    assert " 5.5 " in rows[0]
    assert "4.0 (1 of 2)" in rows[1]
    assert " 8.7 " in rows[1]
    made = json.loads(call("compare", *runs, "--target", "80%", "--json").stdout)
    assert made["target"] == 0.8
    assert made["groups"][1]["to_target"]["by_run"] == [4, None]
    never = call("compare", *runs, "--target", "0.95")
    assert [line.count("–") for line in never.output.splitlines() if "baseline" in line] == [2]
    assert "rounds to" not in call("compare", *runs).output


def test_the_row_of_averages_goes_by_their_tests(tested: Any):
    run, _, summary = tested([0.5, 0.6, 0.9], averaged=[0.4, 0.8, 0.9], average__name="ema")
    newest, averaged = compare([run], target=0.8).groups
    assert newest.to_target is not None
    assert newest.to_target.rounds == 3
    assert averaged.to_target is not None
    assert averaged.to_target.rounds == 2
    assert averaged.to_target.bytes == 4.4e6  # 2 rounds · 2 clients · 1.1 MB
    del summary["update_bytes"]  # as older runs have it
    (run / "summary.json").write_text(json.dumps(summary))
    older = compare([run], target=0.8).groups[0].to_target
    assert older == ToTarget(1, 1, rounds=3, bytes=None, by_run=[3])
    for damaged in (3, {"down": 1}, {"down": "x", "up": 1}):
        (run / "summary.json").write_text(json.dumps({**summary, "update_bytes": damaged}))
        assert compare([run], target=0.8).groups[0].to_target == older


def test_a_run_whose_rounds_are_not_there_is_not_counted(tested: Any, finished: Any):
    whole, _, _ = tested([0.5, 0.9], seed=1)
    cut, records, summary = tested([0.5, 0.9], seed=2)
    save(cut, records[:1], summary)
    found = compare([whole, cut], target=0.8)
    assert found.groups[0].to_target == ToTarget(1, 1, rounds=2, bytes=4.4e6, by_run=[2, None])
    assert f"{cut}: its rounds do not say whether it reached the target" in found.notes


@pytest.mark.parametrize("target", ["80", "-0.1", "nan", "much", "180%", ""])
def test_a_target_that_is_none_is_refused(tested: Any, target: str):
    result = call("compare", tested([0.5])[0], f"--target={target}")
    assert result.exit_code == 2
    assert "accuracy is a share from 0 to 1, such as 0.8 or 80%" in said(result)


# --------------------------------------------------------------------------- single clients


def test_scores_of_single_clients_are_shown_where_every_run_has_them(averaged: list[Path]):
    assert "single clients" not in call("compare", *averaged).output
    for k, folder in enumerate(averaged[:3]):
        summary = json.loads((folder / "summary.json").read_text())
        names = ("mean", "worst_decile", "std")
        own = {f"last_client_{n}": x + k / 100 for n, x in zip(names, (0.7, 0.4, 0.1), strict=True)}
        of_average = {f"last_averaged_client_{n}": 0.75 for n in names}
        (folder / "summary.json").write_text(json.dumps({**summary, **own, **of_average}))
    shown = call("compare", *averaged)
    head, row, mean = shown.output.partition("Accuracy of single clients")[2].splitlines()[1:4]
    assert [part for part in head.split() if part != "%"] == ["mean", "worst", "tenth", "std"]
    assert row.split()[-3:] == ["71.00", "41.00", "11.00"]  # (.70 + .71 + .72) / 3, and so on
    assert mean.split()[-3:] == ["75.00"] * 3
    groups = json.loads(call("compare", *averaged, "--json").stdout)["groups"]
    assert groups[0]["clients"]["worst_decile"] == pytest.approx(0.41)
    assert groups[1]["clients"]["score"] == {"name": "accuracy", "higher": True}
    assert groups[2]["clients"] is None
