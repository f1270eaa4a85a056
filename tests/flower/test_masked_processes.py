"""Masked updates between real processes: a node that is killed in the middle of a round."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedglad import Glad, Update
from fedglad.core import checkpoint
from fedglad.optimizers import Momentum
from fedglad.runs import Run
from tests.flower.deployment import Federation

from .grid import Arrays, rejected, replay, who

APP = Path(__file__).parent / "apps" / "faulty"

pytestmark = pytest.mark.slow


def test_a_node_that_is_killed_while_it_trains_costs_no_round(tmp_path: Path):
    """In round 1 node 2 has shared its secrets when it is killed: the others' take off its masks.

    The model is that of the same rounds without masks, to the resolution.
    """
    marks, out = tmp_path / "marks", tmp_path / "out"
    marks.mkdir()
    config = {"rounds": 2, "timeout": 90.0, "marks": str(marks), "out": str(out)}
    with Federation(tmp_path, nodes=4) as federation:
        run = federation.submit(APP, {**config, "report": "secure", "slow": "2/1"})
        deadline = time.monotonic() + 300
        while not (marks / "2-1").exists():
            assert run.process.poll() is None, run.log
            assert time.monotonic() < deadline, run.log
            time.sleep(0.1)
        federation.kill(2)
        run.wait(400)
        assert "2 of 2 rounds trained" in run.log, run.log + federation.logs
    records = Run(out).rounds()
    first, second = records
    assert [record["status"] for record in records] == ["stepped"] * 2
    assert sorted(who(first)) == [0, 1, 2, 3]
    assert rejected(first).keys() == {2}
    assert {*who(second)} - rejected(second).keys() == {0, 1, 3}
    assert all(c["weight"] is None for record in records for c in record["clients"])

    start = {"weight": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    expected = replay(records, Trained(), start, optimizer=Momentum(lr=0.5), adapter=Glad())
    tensors, _ = checkpoint.read(out / "checkpoints" / "000002.safetensors")
    # 4 clients, each off by 2^-33 over Σw = 46, is far below what float32 tells apart.
    assert np.allclose(tensors["params/weight"], expected["weight"], rtol=0, atol=1e-6)


class Trained:
    """What the clients of the app train: they count their rounds, as it does."""

    def __init__(self) -> None:
        self.t = 0
        self.sent: Arrays | None = None

    def __call__(self, client: Any, sent: Arrays) -> Update:
        if self.sent is not sent:  # the next round
            self.t, self.sent = self.t + 1, sent
        rng, value = np.random.default_rng([client, self.t]), sent["weight"]
        step = 0.9 * value + 0.1 * client + 0.01 * rng.standard_normal(value.shape)
        return Update(model={"weight": step.astype(value.dtype)}, weight=10 + client, client=client)
