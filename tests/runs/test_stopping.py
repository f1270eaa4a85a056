"""Runs that end before their last round: by validation score, by time; the same after a kill."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_support import TINY, Slow, outcome
from typer.testing import CliRunner

from fedglad import simulate
from fedglad.cli import app
from fedglad.config.schema import Config, ConfigError, load
from fedglad.records import Record, Round, Score
from fedglad.runs import Run, check, execute
from fedglad.runs.tuning import combinations, result, tune
from fedglad.simulation.stopping import Stopping
from tests.runs.test_runs import stopped

QUICK = {
    **TINY,
    "engine.name": "serial",
    "rounds": 30,
    "checkpoint_every": 4,
    "data.validation": 0.2,
    "average.name": "none",
    "stop_after": 3,
}
TIMED = {**TINY, "engine.name": "serial", "rounds": 50, "checkpoint_every": 4}
TIMED |= {"data.name": "run_support:Slow", "data.seconds": 0.02, "max_seconds": 0.2}


def config(settings: dict[str, Any] | None = None) -> Config:
    return load("digits", QUICK if settings is None else settings)[1]


def ends_after(scores: list[float | None], after: int, **more: Any) -> int | None:
    """After how many rounds with these scores, None for one that is not tested."""
    stopping = Stopping(after=after)
    for t, value in enumerate(scores):
        stopping.look({"round": t, **({} if value is None else {"validation_loss": value}), **more})
        if stopping.reason:
            return t + 1
    return None


# ------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("scores", "after", "wanted"),
    [
        ([5.0, 4.0, 4.0, 6.0, 3.0], 2, 4),  # 4 again is not better, nor is 6
        ([5.0, 4.0, 4.0, 3.0, 3.0], 2, None),  # 3 comes in time; one more would end it
        ([5.0, None, 6.0, None, 6.0], 2, 5),  # only tested rounds count
        ([5.0, 6.0, 4.5, 6.0, 6.0, 6.0], 3, 6),
        ([5.0, 6.0], 1, 2),
        ([5.0, 6.0, 7.0, 8.0], 0, None),
    ],
)
def test_tested_rounds_without_a_better_score(
    scores: list[float | None], after: int, wanted: int | None
):
    lower: dict[str, Any] = {"score": {"name": "loss", "higher": False}}
    assert ends_after(scores, after, **lower) == wanted
    # The same numbers turned around, of a score of which more is better.
    turned = [None if value is None else -value for value in scores]
    assert ends_after(turned, after, score={"name": "loss", "higher": True}) == wanted


def test_a_score_that_is_no_number_is_not_better():
    lower: dict[str, Any] = {"score": {"name": "loss", "higher": False}}
    stopping = Stopping(after=2)
    stopping.look({"round": 0, "validation_loss": None, **lower})
    assert not stopping.reason
    stopping.look({"round": 1, "validation_loss": None, **lower})
    assert stopping.reason == (
        "no better validation score for 2 tested rounds (best: none is a number)"
    )


def test_a_better_average_is_a_better_score():
    stopping = Stopping(after=2)
    both = [(0.5, 0.25), (0.25, 0.5), (0.25, 0.625), (0.25, 0.5), (0.5, 0.625)]
    for t, (ours, averaged) in enumerate(both):
        assert not stopping.reason
        scores = {"validation_accuracy": ours, "averaged_validation_accuracy": averaged}
        stopping.look({"round": t, **scores})
    assert stopping.reason == (
        "no better validation score for 2 tested rounds (best: round 1, of the average: round 3)"
    )


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf, -math.inf])
def test_a_round_and_its_record_are_judged_alike(value: float):
    score = Score("perplexity", higher=False)
    by_round, by_record = Stopping(after=1, seconds=9.0), Stopping(after=1, seconds=9.0)
    for t, one in enumerate([value, 2.0, value, 2.0]):
        metrics = {"test_perplexity": 1.0, "validation_perplexity": one}
        seconds = {"train": 1.5, "test": 0.25}
        played = Round.measured(
            t, (), Record("stepped"), metrics=metrics, score=score, seconds=seconds
        )
        by_round.look_at(played)
        by_record.look(played.to_dict())
        assert by_round == by_record
        assert by_round.reason == by_record.reason
    assert by_round.reason


def test_the_seconds_of_all_rounds_count():
    stopping = Stopping(seconds=5.0)
    for t in range(3):
        assert not stopping.reason
        stopping.look({"round": t, "seconds": {"train": 1.5, "test": 0.25}})
    assert stopping.reason == "max_seconds"  # 3 · 1.75 = 5.25


# ---------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute("digits", config(), out=tmp_path_factory.mktemp("made") / "run").folder


def test_a_run_stops_where_its_records_say(made: Path):
    run = Run(made)
    records, summary = run.rounds(), run.summary
    assert summary
    scores = [record["validation_accuracy"] for record in records]
    best = scores.index(max(scores))
    assert len(records) == best + 1 + 3 < 30
    # No three in a row before were without a better one.
    for t in range(3, len(records) - 1):
        assert max(scores[t - 2 : t + 1]) > max(scores[: t - 2])
    reason = f"no better validation score for 3 tested rounds (best: round {best + 1})"
    assert summary["stopped"] == reason
    assert summary["rounds"] == len(records)
    assert summary["best_round"] == best
    assert (made / "best.safetensors").is_file()
    assert (made / "checkpoints" / f"{len(records):06d}.json").is_file()
    assert check(made).good
    view = run.read()
    assert view.finished
    assert view.complete
    assert not view.missing


def test_simulate_ends_after_the_same_round(made: Path):
    rounds = [*simulate(config())]
    assert len(rounds) == len(Run(made).rounds())
    assert rounds[-1].test_accuracy == Run(made).rounds()[-1]["test_accuracy"]


def test_only_tested_rounds_count_and_the_schedule_is_that_of_all_rounds():
    every = {**QUICK, "eval_every": 2, "stop_after": 1, "server.schedule": "cosine"}
    rounds = [*simulate(config(every))]
    tested = [played.t for played in rounds if played.validation_accuracy is not None]
    assert tested == list(range(1, len(rounds), 2))
    whole = [*simulate(config({**every, "stop_after": 0}))]
    pairs = zip(rounds, whole, strict=False)
    assert all(ours.record.to_dict() == theirs.record.to_dict() for ours, theirs in pairs)


def test_a_stopped_run_is_finished(made: Path):
    before = (made / "summary.json").stat().st_mtime_ns
    assert execute("digits", config(), out=made).folder == made
    assert (made / "summary.json").stat().st_mtime_ns == before
    args = [text for key, value in QUICK.items() for text in ("--set", f"{key}={value}")]
    done = CliRunner().invoke(app, ["run", "digits", *args, "--out", str(made)])
    assert done.exit_code == 0, done.output
    assert "finished already" in done.output
    said = " ".join(done.output.split())
    assert "of 30 rounds: no better validation score for 3 tested rounds" in said


@pytest.mark.parametrize("before_the_end", [1, 2, 3, 5])
def test_killed_and_resumed_it_stops_after_the_same_round(
    made: Path, tmp_path: Path, before_the_end: int
):
    stopped(tmp_path / "run", len(Run(made).rounds()) - before_the_end, config())
    execute("digits", config(), out=tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(made)


def test_killed_between_the_last_checkpoint_and_the_summary(made: Path, tmp_path: Path):
    folder = tmp_path / "run"
    if (child := os.fork()) == 0:
        import fedglad.runs.running as running

        running.write_models = lambda *_: os._exit(9)
        execute("digits", config(), out=folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (folder / "summary.json").exists()
    played: list[Any] = []
    execute("digits", config(), out=folder, resume=True, on_round=played.append)
    assert not played
    assert outcome(folder) == outcome(made)


def test_single_clients_are_tested_in_the_round_that_turns_out_to_be_the_last():
    settings = {**QUICK, "eval_clients": 3, "eval_clients_every": 1000}
    rounds = [*simulate(config(settings))]
    assert len(rounds) < 30
    assert [played.t for played in rounds if played.client_scores] == [rounds[-1].t]


def test_without_a_validation_set_it_is_refused_before_the_run(tmp_path: Path):
    settings = {**QUICK, "data.validation": 0.0}
    with pytest.raises(
        ConfigError, match=r"stop_after = 3 needs a validation set.*validation=0\.1"
    ):
        execute("digits", config(settings), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="stop_after = 3 needs"):
        next(simulate(config(settings)))


# ------------------------------------------------------------------------------------ by time


def test_a_run_ends_with_the_round_in_which_its_time_is_over(tmp_path: Path):
    run = execute("digits", config({**TIMED, "eval_every": 1000}), out=tmp_path / "run")
    records, summary = run.rounds(), run.summary
    assert summary
    assert summary["stopped"] == "max_seconds"
    seconds = [math.fsum(record["seconds"].values()) for record in records]
    assert math.fsum(seconds) >= 0.2 > math.fsum(seconds[:-1])
    assert 1 <= len(records) < 50
    tested = [record["round"] for record in records if record["test_accuracy"] is not None]
    assert tested == [len(records) - 1]  # the last one is tested, as always
    assert check(run.folder).good
    assert run.read().finished


def test_the_time_before_a_kill_counts(tmp_path: Path):
    settings = config({**TIMED, "max_seconds": 0.6, "checkpoint_every": 1})
    stopped(tmp_path / "run", 3, settings)
    run = execute("digits", settings, out=tmp_path / "run", resume=True)
    seconds = [math.fsum(record["seconds"].values()) for record in run.rounds()]
    assert math.fsum(seconds) >= 0.6 > math.fsum(seconds[:-1])
    assert len(seconds) > 3


def test_simulate_ends_in_time():
    begin = time.perf_counter()
    rounds = [*simulate(config(TIMED))]
    assert 1 <= len(rounds) < 50
    assert time.perf_counter() - begin < 30
    assert sum(sum(played.seconds.values()) for played in rounds) >= 0.2


def test_tuning_takes_a_stopped_run_for_a_whole_one(tmp_path: Path):
    settings = {key: value for key, value in QUICK.items() if key != "rounds"}
    search = combinations("digits", ["client.lr=0.01,0.1"], {**settings, "rounds": 40}, tmp_path)
    for task in search.tasks:
        execute(task.name, task.config, out=task.folder)
    assert any((Run(task.folder).summary or {}).get("stopped") for task in search.tasks)
    assert [event.what for event in tune(search)] == ["kept", "kept"]
    assert {trial.status for trial in result(search).trials} == {"scored"}


@dataclass(frozen=True, kw_only=True)
class Own(Slow):
    """A class of the user's own takes the key `validation` too."""


def test_data_of_ones_own_may_stop_a_run():
    settings = {**QUICK, "data.name": f"{__name__}:Own", "data.seconds": 0.0}
    rounds = [*simulate(config(settings))]
    assert len(rounds) < 30
