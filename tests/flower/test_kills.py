"""Real processes that hang, die and are killed: rounds go on, and a run goes on where it was."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedglad.core import checkpoint
from fedglad.runs import Run
from tests.flower.deployment import Federation, Program

APP = Path(__file__).parent / "apps" / "faulty"

pytestmark = pytest.mark.slow


def rounds(out: Path) -> list[dict[str, Any]]:
    return Run(out).rounds()


def until(happened: Callable[[], bool], watched: Program, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert watched.process.poll() is None, watched.log
        assert time.monotonic() < deadline, watched.log
        time.sleep(0.1)


def left_out(record: dict[str, Any]) -> dict[int, str]:
    return {c["id"]: c["rejected"] for c in record["clients"] if "rejected" in c}


def test_clients_that_die_hang_or_lose_their_node_cost_no_round(tmp_path: Path):
    """Client 1's process dies in round 1, node 2 is killed in round 2, client 3 hangs in 3."""
    marks, out = tmp_path / "marks", tmp_path / "out"
    marks.mkdir()
    config = {"rounds": 3, "timeout": 20.0, "marks": str(marks), "out": str(out)}
    faults = {"dies": "1/1", "slow": "2/2", "hangs": "3/3"}
    with Federation(tmp_path, nodes=4) as federation:
        # With a quorum, one that takes 45 s costs the others the grace time.
        hurried = {"rounds": 2, "timeout": 300.0, "quorum": 0.6, "grace": 5.0, "naps": "3/1"}
        done = federation.run(APP, {**hurried, "out": str(tmp_path / "hurried")})
        assert federation.status(done.run) == "finished:completed", done.log

        run = federation.submit(APP, {**config, **faults})
        until(lambda: (marks / "2-2").exists(), run)
        federation.kill(2)
        run.wait(180)
        assert "3 of 3 rounds trained" in run.log, run.log
    one, two = rounds(tmp_path / "hurried")
    assert left_out(one).keys() == {3}
    assert "in which most others had replied" in left_out(one)[3]
    assert (one["status"], two["status"]) == ("stepped", "stepped")
    assert one["seconds"]["train"] < 40
    first, second, third = rounds(out)
    assert left_out(first).keys() == {1}
    assert left_out(second).keys() >= {2}
    assert left_out(third).keys() >= {3}
    assert "no reply within 20 s" in left_out(third)[3]
    assert all(record["status"] == "stepped" for record in (first, second, third))
    assert {c["id"] for c in first["clients"]} == {0, 1, 2, 3}


def serverapp(federation: Federation) -> int:
    """The process in which the strategy runs."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                home = f"FLWR_HOME={federation.superlink.home}".encode()
                ours = home in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ours and any(b"serverapp" in word for word in words):
                return int(entry.name)
    raise AssertionError("no ServerApp is running")


def test_a_run_survives_the_serverapp_and_the_superlink(tmp_path: Path):
    """Killed in round 2 and again in round 3, it ends with the bits of one that was left alone."""
    alone, out, marks = tmp_path / "alone", tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    config = {"rounds": 4, "per-round": 2, "clients": 3, "out": str(out), "marks": str(marks)}
    with Federation(tmp_path, nodes=3) as federation:
        done = federation.run(APP, {**config, "out": str(alone)})
        assert federation.status(done.run) == "finished:completed", done.log

        run = federation.submit(APP, config)
        until(lambda: len(rounds(out)) >= 1, run)
        os.kill(serverapp(federation), signal.SIGKILL)
        run.kill()

        run = federation.submit(APP, config)
        until(lambda: len(rounds(out)) >= 2, run)
        federation.superlink.kill()
        run.kill()
        for k in (0, 1, 2):
            federation.kill(k)
        federation.superlink = federation.start_superlink()
        for k in (0, 1, 2):
            federation.start_node(k)

        done = federation.run(APP, config)
        assert federation.status(done.run) == "finished:completed", done.log
        assert "Going on after round" in done.log
    assert [record["round"] for record in rounds(out)] == [0, 1, 2, 3]
    same = ("clients", "gsi_all", "groups", "tensors", "status")
    for key in same:
        assert [r[key] for r in rounds(out)] == [r[key] for r in rounds(alone)], key
    theirs, ours = (
        checkpoint.read(folder / "checkpoints" / "000004.safetensors")[0] for folder in (alone, out)
    )
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].equal(ours[name]) for name in theirs)
