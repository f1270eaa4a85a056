"""Which checkpoints of a run stay: the last, those of every k-th round, that of the best."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedglad import simulate
from fedglad.config.schema import Config, ConfigError, load
from fedglad.core.memory import Memories
from fedglad.records import Score
from fedglad.runs import execute
from fedglad.runs.checking import check
from fedglad.runs.checkpoints import Keep
from fedglad.runs.reader import Run
from fedglad.runs.running import signed_score
from tests.run_support import TINY

UNLINK = Path.unlink


def quick(**more: Any) -> Config:
    return load("digits", {**TINY, "rounds": 12, "checkpoint_every": 2, **more})[1]


def checkpoints(folder: Path) -> list[int]:
    """The rounds of the checkpoints; each has its tensors, and there are no others."""
    small = sorted(int(path.stem) for path in folder.glob("checkpoints/*.json"))
    assert small == sorted(int(p.stem) for p in folder.glob("checkpoints/*.safetensors"))
    return small


def accuracies(folder: Path) -> list[float]:
    return [one["test_accuracy"] for one in Run(folder).rounds()]


def results(folder: Path) -> tuple[Any, ...]:
    rounds = [{k: v for k, v in r.items() if k != "seconds"} for r in Run(folder).rounds()]
    return rounds, (folder / "model.safetensors").read_bytes()


class Stop(Exception):
    pass


def until(rounds: int) -> Callable[[Any], None]:
    def on_round(played: Any) -> None:
        if played.t + 1 == rounds:
            raise Stop

    return on_round


# By hand: after 9 rounds, saved every 2 rounds and when the run is stopped.
@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ({}, [8, 9]),
        ({"keep_checkpoints": 1}, [9]),
        ({"keep_checkpoints": 3}, [6, 8, 9]),
        ({"keep_every": 4}, [4, 8, 9]),
        ({"keep_every": 3}, [3, 6, 8, 9]),  # saved after 3 and 9 because it is asked for
        ({"keep_checkpoints": 1, "keep_every": 6}, [6, 9]),
    ],
)
def test_which_stay(tmp_path: Path, settings: dict[str, Any], stay: list[int]):
    with pytest.raises(Stop):
        execute("digits", quick(**settings), out=tmp_path, on_round=until(9))
    assert checkpoints(tmp_path) == stay
    assert check(tmp_path).good


def test_the_best_stays(tmp_path: Path):
    # A rate at which the accuracy goes up and down.
    settings = {"client.lr": 3.0, "keep_checkpoints": 1, "keep_best": True}
    config = quick(**settings, checkpoint_every=1)
    execute("digits", config, out=tmp_path, keep_state=True)
    found = accuracies(tmp_path)
    best = found.index(max(found)) + 1
    assert checkpoints(tmp_path) == sorted({best, 12})
    assert best < 12
    saved = json.loads((tmp_path / "checkpoints" / f"{best:06d}.json").read_text())
    assert saved["score"] == max(found)


def test_more_is_better_whatever_the_score_is_and_validation_comes_first():
    played = next(iter(simulate("digits", {**TINY, "rounds": 1})))
    assert signed_score(played) == played.test_accuracy
    perplexity = replace(played, score=Score("perplexity", higher=False))
    assert signed_score(perplexity) is None
    assert signed_score(replace(perplexity, metrics={"test_perplexity": 4.5})) == -4.5
    both = {"test_perplexity": 4.5, "validation_perplexity": 5.5}
    assert signed_score(replace(perplexity, metrics=both)) == -5.5


def test_the_rule_by_hand():
    scores: dict[int, float | None] = dict.fromkeys(range(10, 110, 10))
    assert Keep().of(scores) == {90, 100}
    assert Keep(last=3).of(scores) == {80, 90, 100}
    assert Keep(last=1, every=40).of(scores) == {40, 80, 100}
    assert Keep(best=True).of(scores) == {90, 100}  # none was tested
    assert Keep(best=True).of(scores | {20: 0.5, 70: 0.5, 80: 0.4}) == {20, 90, 100}
    assert Keep(last=5).of({7: None}) == {7}
    for wrong in (lambda: Keep(last=0), lambda: Keep(every=-1)):
        with pytest.raises(ValueError, match="at least the last checkpoint stays"):
            wrong()


@pytest.mark.parametrize("kept", [4, 8])
def test_a_run_goes_on_from_one_that_stayed(tmp_path: Path, kept: int):
    # The clients' control variates of that round must be there too.
    settings = {"client.name": "scaffold", "client.lr": 0.05, "checkpoint_every": 1}
    config = quick(**settings, keep_checkpoints=1, keep_every=4)
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    execute("digits", quick(**settings), out=whole)
    with pytest.raises(Stop):
        execute("digits", config, out=folder, on_round=until(11))
    assert checkpoints(folder) == [4, 8, 11]
    assert check(folder).good
    for done in checkpoints(folder):
        if done > kept:
            (folder / "checkpoints" / f"{done:06d}.json").unlink()
    execute("digits", config, out=folder, resume=True)
    assert results(folder) == results(whole)
    assert checkpoints(folder) == [done for done in (4, 8, 12) if done <= kept or done > 4]
    assert check(folder).good


def test_memories_that_no_kept_checkpoint_needs_are_dropped(tmp_path: Path):
    import torch

    store = Memories(tmp_path / "memories")
    for t in range(8):  # client 0 in every round, client 1 in the first and the last
        cohort = [0, 1] if t in (0, 7) else [0]
        for client in cohort:
            store.propose(client, t, {"x": torch.full((2,), float(t))})
        store.settle(t, cohort, cohort)
        store.sync()  # each round has its checkpoint
    store.prune(7, [2, 5])
    there = sorted(path.name for path in (tmp_path / "memories").glob("*/*"))
    fresh = Memories(tmp_path / "memories")
    for done in (2, 5, 7, 8):
        fresh.restore(8)
        assert not fresh.problem({str(done): [0]})
    assert not fresh.problem({"1": [1]})
    assert not fresh.problem({"8": [1]})
    assert len(there) == 4 + 2


def test_a_finished_run_keeps_what_was_asked_to_stay(tmp_path: Path):
    settings = {"client.name": "scaffold", "client.lr": 0.05}
    execute("digits", quick(**settings), out=tmp_path / "plain")
    assert checkpoints(tmp_path / "plain") == []  # clients' memories are not kept unasked
    execute("digits", quick(**settings, keep_every=6), out=tmp_path / "kept")
    assert checkpoints(tmp_path / "kept") == [6, 10, 12]


def test_the_rule_is_no_part_of_what_a_run_is(tmp_path: Path):
    more = {"keep_checkpoints": 5, "keep_every": 2, "keep_best": True}
    assert quick(**more).hash() == quick().hash()
    with pytest.raises(Stop):
        execute("digits", quick(), out=tmp_path, on_round=until(6))
    execute("digits", quick(**more), out=tmp_path, resume=True)  # from then on
    assert checkpoints(tmp_path) == [4, 6, 8, 10, 12]
    again = load(tmp_path / "config.toml")[1]
    assert (again.keep_checkpoints, again.keep_every, again.keep_best) == (5, 2, True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_checkpoints": 0}, "keep_checkpoints = 0: must be 1 or more"),
        ({"keep_every": -1}, "keep_every = -1: must be 0 or more"),
        ({"keep_every": 1.5}, "keep_every = 1.5: must be a whole number"),
        ({"keep_best": 1}, "keep_best = 1: must be true or false"),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        quick(**settings)


@pytest.mark.slow
def test_a_kill_between_a_save_and_the_removals(tmp_path: Path):
    settings = {"checkpoint_every": 1, "keep_checkpoints": 2, "keep_every": 5, "keep_best": True}
    whole = tmp_path / "whole"
    execute("digits", quick(**settings), out=whole, keep_state=True)
    expected, killed = checkpoints(whole), 0
    for at in range(1, 30, 3):
        folder = tmp_path / str(at)
        if (child := os.fork()) == 0:
            count = 0

            def counted(path: Path, missing_ok: bool = False, at: int = at) -> None:
                nonlocal count
                count += path.parent.name == "checkpoints"
                if count == at:
                    os._exit(9)
                UNLINK(path, missing_ok)

            Path.unlink = counted  # type: ignore[method-assign]
            execute("digits", quick(**settings), out=folder, keep_state=True)
            os._exit(0)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        execute("digits", quick(**settings), out=folder, resume=True, keep_state=True)
        assert checkpoints(folder) == expected
        assert results(folder) == results(whole)
    assert killed > 3
