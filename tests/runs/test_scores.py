"""Runs of tasks whose score is not accuracy, from the record to all that a person looks at."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedglad.analysis.comparison import CompareError, compare
from fedglad.cli import app
from fedglad.cli.progress import results, round_line, single_clients, validation
from fedglad.config.schema import ConfigError, load
from fedglad.data.federation import Partitioned
from fedglad.records import ACCURACY, ClientScores, Record, Round, Score
from fedglad.report import page
from fedglad.report.figures import payload
from fedglad.report.headline import verdict
from fedglad.report.plots import comparison as comparison_plot
from fedglad.report.trackers.names import Names, scalars, summary_scalars
from fedglad.runs import Run, execute
from fedglad.runs.control import Controls
from fedglad.runs.line import METRICS, clean
from fedglad.runs.models import Best
from fedglad.runs.scores import Number, metrics_in, score_of
from fedglad.runs.summary import best_round, figures, summarise, summary_damage
from fedglad.runs.sweeping import sweep, tasks
from fedglad.runs.tuning import combinations, result, tune

HERE = __name__
MAE = Score("mae", higher=False)


def line(features: int = 3) -> nn.Module:
    return nn.Linear(features, 1)


def numbers(clients: int = 6, noise: float = 0.1) -> Any:
    """y = x₁ + 2 x₂ + 3 x₃ + 1 and noise: 12 samples a client, 20 to test on."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((12 * clients + 20, 3)).astype(np.float32)
    y = x @ np.array([1, 2, 3], dtype=np.float32) + 1
    y += noise * rng.standard_normal(len(y)).astype(np.float32)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    owned = np.split(np.arange(12 * clients), clients)
    tested = slice(12 * clients, None)
    return Partitioned(inputs, targets, inputs[tested], targets[tested], owned)


SETTINGS: dict[str, Any] = {
    "task.name": "regression",
    "data.name": f"{HERE}:numbers",
    "model.name": f"{HERE}:line",
    "rounds": 4,
    "client.epochs": 1,
    "client.lr": 0.05,
    "sampler.clients_per_round": 3,
}
HELD_OUT = {"data.validation": 0.25}


def make(folder: Path, **more: Any) -> Run:
    given = {key.replace("__", "."): value for key, value in more.items()}
    return execute(*load("digits", {**SETTINGS, **given}), out=folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A regression with a validation set and an average."""
    return make(tmp_path_factory.mktemp("score") / "run", **HELD_OUT)


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "200"})


def record(t: int, mae: Any, **more: Any) -> dict[str, Any]:
    return {"round": t, "status": "stepped", "test_mae": mae, "score": MAE.to_dict(), **more}


# ---------------------------------------------------------------------------------- the score


def test_a_score_knows_its_words_its_unit_and_its_direction():
    assert (ACCURACY.text(0.8125, 2), ACCURACY.unit, ACCURACY.title) == ("81.25 %", 100, "Accuracy")
    assert (MAE.text(2.35946), MAE.unit, MAE.title) == ("2.359", 1, "MAE")
    assert (MAE.better(1.0, 2.0), ACCURACY.better(1.0, 2.0)) == (True, False)
    assert ACCURACY.of("loss") == Score("loss", higher=False)
    assert MAE.of("r2") == Score("r2", higher=True)
    assert Score("perplexity", higher=True).of("perplexity").higher  # as its task says


@pytest.mark.parametrize(
    "name",
    ["last10_accuracy", "final_averaged_f1", "best_validation_mae", "last10_averaged_validation_x"],
)
def test_a_summary_number_is_read_as_it_is_written(name: str):
    number = Number.named(name)
    assert number is not None
    assert number.name == name


@pytest.mark.parametrize("name", ["seconds", "rounds", "best_round", "best_averaged_round", "x"])
def test_other_numbers_are_of_no_metric(name: str):
    assert Number.named(name) is None


def test_the_average_of_a_number():
    assert [n and n.name for n in (Number("final", "validation", "f1").averaged,)] == [
        "final_averaged_validation_f1"
    ]
    assert Number("final", "averaged", "f1").averaged is None


# -------------------------------------------------------------------------------- hostile records


@pytest.mark.parametrize(
    "raw",
    [
        None,
        7,
        "mae",
        [],
        {},
        {"name": "mae"},
        {"name": "mae", "higher": 0},
        {"name": 3, "higher": True},
        {"name": "", "higher": True},
        {"name": "<script>alert(1)</script>", "higher": True},
        {"name": "a" * 41, "higher": True},
        {"name": "mae\n", "higher": False},
        {"name": "\x1b[31mred", "higher": False},
        {"name": {"name": "mae"}, "higher": False},
    ],
)
def test_a_hostile_score_is_left_out_and_noted(raw: Any):
    checked = clean({"round": 0, "score": raw})
    assert checked is not None
    cleaned, bad = checked
    assert "score" not in cleaned
    assert "score" in bad
    assert score_of([cleaned]) == ACCURACY
    assert score_of([{"score": raw}]) == ACCURACY  # not cleaned, as compare reads it


def test_further_metrics_have_their_ranges():
    given = {
        "test_perplexity": 4.5,
        "validation_mae": -3,
        "test_macro_f1": 1.5,  # a share
        "averaged_mean_iou": 0.5,
        "averaged_validation_r2": 1e200,  # its square would overflow
        "test_text": "<b>",
        "test_nan": math.nan,
        "test_true": True,
        "test_null": None,
        "test_UPPER": 1.0,
        "test_<b>": 1.0,
        "train_thing": 1.0,
    }
    checked = clean({"round": 0, "status": "stepped", **given})
    assert checked is not None
    cleaned, bad = checked
    assert cleaned["test_perplexity"] == 4.5
    assert cleaned["validation_mae"] == -3.0
    assert cleaned["averaged_mean_iou"] == 0.5
    lost = ["test_macro_f1", "averaged_validation_r2", "test_text", "test_nan", "test_true"]
    assert bad == lost
    assert [cleaned[name] for name in (*lost, "test_null")] == [None] * 6
    assert not {"test_UPPER", "test_<b>", "train_thing"} & {*cleaned}


def test_endlessly_many_metrics_are_read_in_part():
    checked = clean(
        {"round": 0, "status": "stepped", **{f"test_m{k}": k for k in range(METRICS + 5)}}
    )
    assert checked is not None
    cleaned, bad = checked
    assert bad == ["metrics"]
    assert sum(name.startswith("test_m") for name in cleaned) == METRICS


# -------------------------------------------------------------------------------------- summary


def test_a_summary_has_every_metric_and_the_score():
    rounds = [
        record(t, mae, test_loss=mae**2, test_accuracy=None, averaged_mae=mae + 1)
        for t, mae in enumerate([4.0, 2.0, 3.0])
    ]
    summary = summarise(rounds)
    assert summary["last10_mae"] == 3.0  # (4 + 2 + 3) / 3
    assert summary["final_mae"] == 3.0
    assert summary["last10_averaged_mae"] == 4.0
    assert summary["last10_loss"] == 29 / 3  # (16 + 4 + 9) / 3
    assert summary["score"] == {"name": "mae", "higher": False}
    assert not {"last10_accuracy", "last10_averaged_loss", "best_round"} & {*summary}
    assert summary_damage(summary) == ""
    assert summary_damage({**summary, "score": None}) == "it has no 'last10_accuracy'"


def test_the_best_round_is_the_lowest_where_less_is_better():
    rounds = [record(t, 1.0, validation_mae=v) for t, v in enumerate([3.0, None, 1.0, 1.0, 2.0])]
    assert best_round(rounds, "validation_mae", MAE) == 2  # the first of equals
    assert best_round(rounds, "validation_mae") == 0
    found = figures(rounds)
    assert (found["best_round"], found["best_validation_mae"]) == (2, 1.0)


def test_a_summary_of_classification_has_no_new_key():
    rounds = [{"round": 0, "test_accuracy": 0.5, "test_loss": 1.0, "averaged_accuracy": 0.25}]
    assert list(figures(rounds)) == [
        *("last10_accuracy", "final_accuracy", "last10_averaged_accuracy"),
        *("final_averaged_accuracy", "rounds", "skipped", "seconds"),
    ]
    assert "score" not in summarise(rounds)
    assert metrics_in(rounds, ACCURACY) == ["accuracy"]


def test_a_real_run_of_regression(made: Run):
    rounds, summary = made.rounds(), made.summary or {}
    assert made.score == MAE
    assert made.read().score == MAE
    assert made.read().missing == ("there is no labels.json: no label distributions can be shown",)
    errors = [one["test_mae"] for one in rounds]
    assert summary["last10_mae"] == pytest.approx(sum(errors) / 4)
    validated = [one["validation_mae"] for one in rounds]
    assert summary["best_round"] == validated.index(min(validated))
    assert call("check", made.folder).exit_code == 0


# ------------------------------------------------------------------------------------ best models


class Still:
    """A server whose model is the number of the round."""

    def __init__(self, t: int) -> None:
        self.trained = self.trained_average = {"w": torch.tensor([float(t)])}


def test_the_best_model_is_that_of_the_lowest_error_also_after_a_resume(tmp_path: Path):
    errors = [3.0, math.inf, 1.0, math.nan, 2.0, 0.5]
    played = [
        Round(t, (), Record("stepped"), metrics={"validation_mae": e}, score=MAE)
        for t, e in enumerate(errors)
    ]
    best = Best(tmp_path, "hash")
    for one in played[:4]:
        best.look(one, Still(one.t))  # pyright: ignore[reportArgumentType]
    assert (best.kept["best"].done, best.kept["best"].value) == (3, 1.0)
    saved = best.save()
    again = Best(tmp_path, "hash")
    again.restore(saved, [one.to_dict() for one in played[:4]])
    assert (again.kept["best"].done, again.kept["best"].value) == (3, 1.0)
    assert again.kept["best"].state["w"].item() == 2.0
    for one in played[4:]:
        again.look(one, Still(one.t))  # pyright: ignore[reportArgumentType]
    assert (again.kept["best"].done, again.kept["best"].value) == (6, 0.5)


# --------------------------------------------------------------------------------------- terminal


def test_a_round_in_the_terminal():
    metrics = {"test_perplexity": 4.312, "averaged_perplexity": 4.1, "validation_perplexity": 4.5}
    done = Round(
        9,
        (1, 2),
        Record("stepped"),
        test_loss=1.46,
        metrics=metrics,
        score=Score("perplexity", higher=False),
        seconds={"train": 1.0},
    )
    assert round_line(done, 50) == (
        "round 10/50  perplexity 4.312, averaged 4.1; validation 4.5  loss 1.460  2.0 clients/s"
    )


def test_a_round_of_classification_with_a_validation_set():
    done = Round(
        0,
        (1,),
        Record("stepped"),
        test_loss=0.5,
        test_accuracy=0.5,
        averaged_accuracy=1.0,
        validation_accuracy=0.25,
        averaged_validation_accuracy=0.75,
        seconds={"train": 1.0},
    )
    assert round_line(done, 2) == (
        "round 1/2  accuracy  50.0 %, averaged 100.0 %; validation  25.0 %, averaged  75.0 %  "
        "loss 0.500  1.0 clients/s"
    )


def test_run_says_the_score_and_that_of_the_validation_set(tmp_path: Path):
    settings = {**SETTINGS, **HELD_OUT, "rounds": 2}
    given = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
    shown = call("run", "digits", *given, "--out", tmp_path / "run")
    assert shown.exit_code == 0, shown.output
    summary = Run(tmp_path / "run").summary or {}
    last10, final = results(summary, MAE)
    assert f"MAE over its 2 rounds {last10}, final {final}, 2 rounds in" in shown.output
    said = validation(summary, MAE).removeprefix("validation ")
    assert f"On the validation set, MAE: {said}." in shown.output
    assert f"best {summary['best_validation_mae']:.4g} after round 2" in said
    assert "%" not in shown.output.partition("See it")[0]
    first = Run(tmp_path / "run").rounds()[0]
    assert (
        f"round 1/2  MAE {first['test_mae']:.4g}, averaged {first['averaged_mae']:.4g}; validation "
        f"{first['validation_mae']:.4g}, averaged {first['averaged_validation_mae']:.4g}  loss "
    ) in shown.output


# ---------------------------------------------------------------------------------------- compare


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Regressions without noise at two rates: the larger one has less error after 4 rounds."""
    folder = tmp_path_factory.mktemp("two")
    for lr in (0.01, 0.1):
        make(folder / f"lr{lr}", client__lr=lr)
    return folder


def test_compare_takes_the_runs_own_score_and_says_which_way_is_better(two: Path):
    found = compare([two])
    assert (found.metric, found.score, found.tested, found.final) == (
        *("last10_mae", MAE, MAE, "final_mae"),
    )
    slow, averaged, fast, *_ = found.groups
    values = {name: Run(two / name).summary or {} for name in ("lr0.01", "lr0.1")}
    assert slow.values == [values["lr0.01"]["last10_mae"]]
    assert averaged.values == [values["lr0.01"]["last10_averaged_mae"]]
    assert fast.difference is not None
    assert fast.difference.mean == pytest.approx(
        values["lr0.1"]["last10_mae"] - values["lr0.01"]["last10_mae"]
    )
    assert fast.difference.mean < 0
    errors = [one["test_mae"] for one in Run(two / "lr0.1").rounds()]
    assert fast.stability is not None
    assert fast.stability.worst == max(errors[2:])  # of the second half, the largest
    assert fast.curves is not None
    assert fast.curves["mae"].mean == errors

    shown = call("compare", two)
    assert shown.exit_code == 0
    assert "of last10_mae less is better" in shown.output
    assert "Test MAE in the second half of the rounds" in shown.output
    table = shown.output.partition("Differences")[0]
    assert "%" not in table.replace("95 % interval", "")
    assert f"{slow.mean:.4g}" in table


def test_compare_by_another_number(two: Path):
    found = compare([two], metric="last10_r2")
    assert found.score == Score("r2", higher=True)
    assert found.final == "final_r2"
    assert "less is better" not in call("compare", two, "--metric", "last10_r2").output
    timed = compare([two], metric="seconds")
    assert (timed.score.higher, timed.tested, timed.final) == (False, MAE, "final_mae")
    with pytest.raises(CompareError, match=r"has no number 'last10_accuracy': choose from last10_"):
        compare([two], metric="last10_accuracy")


def test_runs_with_different_scores_are_refused_in_one_line(two: Path, tmp_path: Path):
    small = {"rounds": 1, "client.epochs": 1, "sampler.clients_per_round": 2}
    classes = execute(*load("digits", small), out=tmp_path / "classes")
    said = (
        f"the runs have different scores, MAE ({two / 'lr0.01'}) and accuracy ({classes.folder}): "
        "compare those of one task, or choose a --metric that all have"
    )
    with pytest.raises(CompareError) as caught:
        compare([two, classes.folder])
    assert str(caught.value) == said
    shown = call("compare", two, classes.folder)
    assert shown.exit_code == 2 or shown.exit_code == 1
    assert "Traceback" not in shown.output
    mixed = compare([two, classes.folder], metric="seconds")
    assert {group.final_mean for group in mixed.groups} == {None}
    assert "final" not in call("compare", two, classes.folder, "--metric", "seconds").output


def test_the_picture_of_a_comparison_names_the_score(two: Path):
    found = compare([two])
    axes = comparison_plot.draw(found).axes
    assert axes[0].get_ylabel() == "test MAE"
    mean = found.groups[0].curves["mae"].mean if found.groups[0].curves else []
    assert list(axes[0].lines[0].get_ydata()) == mean  # not times 100


# ------------------------------------------------------------------------------------------- tune


def searched(out: Path, **more: Any) -> Any:
    given = {key.replace("__", "."): value for key, value in more.items()}
    fixed = {k: v for k, v in SETTINGS.items() if k != "client.lr"}
    return combinations(
        "digits", ["client.lr=0.01,0.1"], {**fixed, "rounds": 3, **given}, out, share=1.0
    )


def test_tune_takes_the_lowest_error_on_the_validation_set(tmp_path: Path):
    search = searched(tmp_path, **HELD_OUT)
    assert search.metric == "last10_validation_mae"
    for one in search.tasks:
        execute(one.name, one.config, out=one.folder)
    assert [event.what for event in tune(search)] == ["kept", "kept"]
    found = result(search)
    assert found.metric == "last10_validation_mae"
    scores = {t.settings["client.lr"]: t.score or 0.0 for t in found.trials}
    assert found.best is not None
    assert scores[0.1] < scores[0.01]
    assert found.best.settings == {"client.lr": 0.1}
    assert "chosen by the validation set: the test set was not looked at" in found.notes
    by_loss = result(search, metric="train_loss")
    assert by_loss.best is not None
    fixed = {k: v for k, v in {**SETTINGS, **HELD_OUT, "rounds": 3}.items() if k != "client.lr"}
    given = [part for k, v in fixed.items() for part in ("--set", f"{k}={v}")]
    asked = ("tune", "digits", "--grid", "client.lr=0.01,0.1", *given, "--share", "1")
    shown = call(*asked, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "last10_validation_mae, of which less is better, over the first 3" in shown.output
    assert "--set client.lr=0.1" in shown.output
    refused = call(*asked, "--out", tmp_path, "--metric", "last10_mae")
    assert refused.exit_code != 0
    assert "is of the test set, and there is a validation set to choose by" in refused.output


def test_without_a_validation_set_tune_is_as_it_was(tmp_path: Path):
    search = searched(tmp_path)
    assert search.metric == "train_loss"
    assert "last10_mae" in search.metrics
    known = combinations("digits", ["client.lr=0.01,0.1"], {"rounds": 3}, tmp_path)
    with pytest.raises(ConfigError, match=r"needs a validation set: --set data\.validation"):
        result(known, metric="last10_validation_accuracy")
    with pytest.raises(ConfigError, match="'last10_accuracy' is no score: choose from train_loss"):
        result(search, metric="last10_accuracy")
    for one in search.tasks:
        execute(one.name, one.config, out=one.folder)
    assert [event.what for event in tune(search)] == ["kept", "kept"]
    found = result(search, metric="final_mae")
    assert found.best is not None
    assert found.best.settings == {"client.lr": 0.1}
    assert any("chosen by the test set" in note for note in found.notes)


def bringing() -> Any:
    """The same with a validation set of its own: the last client's samples."""
    data = numbers()
    rows = np.split(np.arange(72), 6)
    x, y = data.test()
    return Partitioned(data.x, data.y, x, y, rows[:5], validation=rows[5])


def test_data_that_bring_their_validation_set_may_be_tuned_by_it(tmp_path: Path):
    search = searched(tmp_path, data__name=f"{HERE}:bringing")
    assert search.metric == "train_loss"  # it is not known before they are loaded
    for one in search.tasks:
        execute(one.name, one.config, out=one.folder)
    found = result(search, metric="last10_validation_mae")
    assert found.best is not None
    assert found.best.settings == {"client.lr": 0.1}
    said = "there is a validation set to choose by: --metric last10_validation_mae"
    assert said in result(search, metric="last10_mae").notes


# ------------------------------------------------------------------------------------- controls


@pytest.mark.slow
def test_a_constant_is_chosen_by_the_lowest_error(tmp_path: Path):
    given = {**SETTINGS, "rounds": 2, "adapter.name": "glad", "average.name": "ema"}
    planned = tasks("digits", ["seed=1"], given, tmp_path)
    controls = Controls(planned, (0.5, 2.0))
    list(sweep(planned, then=controls.then))
    entries = [one for f in tmp_path.iterdir() for one in Run(f).control_of()]
    (tuned,) = [one for one in entries if one.get("kind") == "tuned"]
    assert (tuned["factor"], tuned["by"]) == (2.0, "last10_mae")  # the longer step errs less
    found = compare([tmp_path])
    assert any("by last10_mae, on the test data" in note for note in found.notes)


# ----------------------------------------------------------------------------------------- report


def shown(maes: list[float | None], **more: Any) -> dict[str, Any]:
    """One run's figures as the verdict reads them."""
    score = {**MAE.to_dict(), "words": "MAE", "title": "MAE", "share": False}
    empty = [None] * len(maes)
    return {
        "name": "run",
        "score": score,
        "scores": maes,
        "lost": False,
        "rounds": list(range(1, 1 + len(maes))),
        "test_loss": [1.0] * len(maes),
        "train_loss": empty,
        "status": ["stepped"] * len(maes),
        "reason": empty,
        "alarm": empty,
        "updates": 1,
        "rejected": 0,
        "finished": True,
        **more,
    }


def test_an_error_that_falls_is_healthy_and_one_that_rises_is_not():
    falling: list[float | None] = [10.0 - 0.4 * t for t in range(20)]
    # The last ten are 6, 5.6 … 2.4: their mean is 4.2.
    assert verdict([shown(falling)]) == (
        "Training looks healthy: MAE 4.2 over the last 10 tests, 0 of 20 rounds distrusted."
    )
    # From 10 to 2, and back to 8: more than half of the way (10 − 2 = 8, half of it is 4).
    back: list[float | None] = [10.0, *[2.0] * 10, *[8.0] * 10]
    assert "MAE rose from 2 to 8 (means over 10 tests)" in verdict([shown(back)])
    assert "MAE has not fallen from its first 3" in verdict([shown([3.0] * 20)])
    gone = verdict([shown([3.0, 2.0, None], lost=True)])
    assert gone == "Training needs a look: MAE is no longer a finite number."


def test_the_page_of_a_regression(made: Run):
    told = payload([made.read()])
    (run,) = told["runs"]
    assert told["score"] == run["score"]
    assert run["score"] == {
        **{"name": "mae", "higher": False, "words": "MAE", "title": "MAE", "share": False}
    }
    rounds = made.rounds()
    for key, field in {
        "scores": "test_mae",
        "averaged": "averaged_mae",
        "validation": "validation_mae",
        "averaged_validation": "averaged_validation_mae",
    }.items():
        assert run[key] == [float(f"{one[field]:.5g}") for one in rounds]
    first, averaged, *_ = told["headline"]
    summary = made.summary or {}
    assert first["label"] == "MAE, last 4 tests"
    assert first["value"] == f"{summary['last10_mae']:.4g}"
    assert f"validation {summary['last10_validation_mae']:.4g}" in first["detail"]
    assert "points" not in averaged["detail"]
    written = page.html(told)
    assert '"words":"MAE"' in written


def test_a_difference_of_errors_is_good_if_it_is_below_zero(tmp_path: Path):
    for seed in (1, 2, 3):
        for lr in (0.01, 0.1):
            make(tmp_path / f"{lr}-{seed}", client__lr=lr, seed=seed, rounds=2)
    told = payload([Run(f).read() for f in sorted(tmp_path.iterdir())])
    (tile,) = [one for one in told["headline"] if one["label"].startswith("Difference to")]
    assert tile["value"].startswith("−")
    assert tile["tone"] == "good"
    assert "of MAE less is better" in tile["detail"]


def test_a_hostile_score_in_a_folder_shows_a_report(made: Run, tmp_path: Path):
    (tmp_path / "config.toml").write_text("rounds = 2\n")
    hostile = {"name": "</script><b>", "higher": False}
    lines = [
        {"round": 0, "status": "stepped", "test_accuracy": 0.5, "score": hostile},
        {"round": 1, "status": "stepped", "test_accuracy": 0.5, "score": 1, "test_gsi": "x"},
    ]
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    (tmp_path / "rounds.jsonl").write_text(text)
    view = Run(tmp_path).read()
    assert view.score == ACCURACY
    assert "'score' is damaged in rounds 1, 2: what can be read is shown" in view.missing
    assert "</script><b>" not in page.html(payload([view]))


# --------------------------------------------------------------------------------------- trackers


def test_trackers_have_the_metrics_under_their_names(made: Run):
    view = made.read()
    named = scalars(view.rounds[0], Names(), usual=None, flag=None)
    first = made.rounds()[0]
    for name, field in {
        "test/mae": "test_mae",
        "test/loss": "test_loss",
        "averaged/r2": "averaged_r2",
        "validation/mae": "validation_mae",
        "averaged_validation/loss": "averaged_validation_loss",
    }.items():
        assert named[name] == first[field]
    assert "test/accuracy" not in named
    assert "summary/last10_mae" in summary_scalars(view.summary or {})


# ------------------------------------------------------------------------------------------- list


def test_list_tasks():
    shown = call("list", "tasks")
    assert shown.exit_code == 0
    names = [row.split()[0] for row in shown.output.splitlines()]
    assert names[:2] == ["classification", "multilabel"]


def odd_task(name: str) -> Any:
    from fedglad.tasks.base import Task

    class Odd(Task):
        score = name

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return model(batch[0]).square().mean()

        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {name: (1.0, 1)}

    return Odd()


@pytest.mark.parametrize("name", ["Bleu-4", "validation_mae", "averaged_x", "a" * 41])
def test_a_metric_whose_name_no_record_takes_is_refused(name: str):
    config = load("digits", {k: v for k, v in SETTINGS.items() if k != "task.name"})[1]
    with pytest.raises(ValueError, match=f"its metric is called '{name}'"):
        config.plan(task=odd_task(name))


# ------------------------------------------------------------------------- single clients' scores

OWN = {"score": "accuracy", "count": 9, "left_out": 1, "mean": 0.7, "worst_decile": 0.4, "std": 0.1}


def test_the_scores_of_single_clients_are_kept():
    own, average = OWN, {"count": 3, "mean": 4.5, "worst_decile": None, "std": 0.0}
    given = {"client_scores": {**own, "more": "<b>"}, "averaged_client_scores": average}
    checked = clean({"round": 0, "status": "stepped", **given})
    assert checked is not None
    record, bad = checked
    assert (record["client_scores"], record["averaged_client_scores"]) == (own, average)
    assert bad == []
    plain = clean({"round": 0, "status": "stepped"})
    assert plain is not None
    assert "client_scores" not in plain[0]


@pytest.mark.parametrize(
    "raw",
    [
        None,
        7,
        [OWN],
        {},
        {**OWN, "count": -1},
        {**OWN, "count": True},
        {**OWN, "count": 10**30},
        {**OWN, "score": "<script>"},
        {**OWN, "score": ["accuracy"]},
    ],
)
def test_hostile_scores_of_single_clients_are_left_out(raw: Any):
    record = {"round": 0, "status": "stepped", "client_scores": raw}
    checked = clean(record)
    assert checked is not None
    assert "client_scores" not in checked[0]
    assert checked[1] == ["client_scores"]
    figures([record])  # of a record as it is, too


def test_a_figure_of_single_clients_that_is_none_is_left_out():
    raw = {**OWN, "mean": 1.5, "worst_decile": "x", "std": -1, "left_out": 0.5}
    checked = clean({"round": 0, "status": "stepped", "client_scores": raw})
    assert checked is not None
    nothing = dict.fromkeys(("mean", "worst_decile", "std", "left_out"))
    assert checked[0]["client_scores"] == {"score": "accuracy", "count": 9, **nothing}
    assert set(checked[1]) == {"client_scores"}


def test_the_terminal_shows_the_scores_of_single_clients():
    # 20 clients, 0.05 … 1.00: mean 0.525, worst two (0.05 + 0.10)/2 = 0.075
    own = ClientScores(Score(), tuple(range(20)), tuple(k / 20 for k in range(1, 21)))
    done = Round(4, (1, 2), Record("stepped"), test_accuracy=0.5, client_scores=own)
    assert "clients 52.5 % (worst tenth 7.5 %)" in round_line(done, 9)
    assert "worst tenth" not in round_line(replace(done, client_scores=None), 9)
    summary = {"last_client_mean": 4.5, "last_client_worst_decile": 9.0}
    average = {"last_averaged_client_mean": 4.0, "last_averaged_client_worst_decile": None}
    score = Score("mae", higher=False)
    assert single_clients(summary, score) == "clients 4.5 (worst tenth 9)"
    both = "clients 4.5 (worst tenth 9), averaged 4 (worst tenth –)"
    assert single_clients({**summary, **average}, score) == both
    assert single_clients({"last_client_mean": None}) == ""
