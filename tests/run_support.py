"""What the simulator's tests share: small runs, clients that misbehave, the command in a process.

A client misbehaves in `data.client(k)`, which every engine calls where the client trains. Counters
lie in shared memory, so that forked workers and the test see the same ones.
"""

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.method import Plain
from fedglad.config.schema import load
from fedglad.core import checkpoint
from fedglad.core.layout import split
from fedglad.data.digits import Digits
from fedglad.data.federation import Partitioned
from fedglad.models.softmax import SoftmaxRegression
from fedglad.records import Bundle, Failure, Round, Update
from fedglad.runs import Run
from fedglad.simulation.engines.base import Job
from fedglad.simulation.simulation import Simulation

TESTS = Path(__file__).parent

TINY: dict[str, Any] = {
    "model.name": "softmax",
    "model.features": 64,
    "client.epochs": 1,
    "sampler.clients_per_round": 3,
}
"""Overrides of `digits` for a run of milliseconds."""


class Normed(nn.Module):
    """BatchNorm, whose buffers travel, and dropout, which draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(0.3)
        self.dense = nn.Linear(6 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.dropout(self.norm(self.conv(x)).relu().flatten(1)))


class Watched:
    """Digits among few clients; `before(k, attempt)` runs wherever client k trains."""

    def __init__(self, clients: int = 12, before: Callable[[int, int], None] | None = None) -> None:
        self.inner = Digits(clients=clients, partition="iid").load_federation()
        self.clients = clients
        self.before = before
        self.attempts: Any = multiprocessing.Array("i", clients)
        self.pid: Any = multiprocessing.Value("i", 0)
        self.started: Any = multiprocessing.Value("i", 0)

    def size(self, k: int) -> int:
        return self.inner.size(k)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        self.attempts[k] += 1
        with self.started.get_lock():
            self.started.value += 1
        if self.before:
            self.before(k, self.attempts[k])
        self.pid.value = os.getpid()
        return self.inner.client(k)

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()

    def labels(self, k: int) -> np.ndarray | None:
        return self.inner.labels(k)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Raising:
    """A data set for the configuration: one client raises, another kills its worker."""

    raises: int = 3
    kills: int = -1
    clients: int = 12

    def load_federation(self) -> Watched:
        def before(k: int, attempt: int) -> None:
            if k == self.raises:
                raise KeyError("the file of this client is missing")
            if k == self.kills:
                die()

        return Watched(self.clients, before)


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A data set for the configuration: every client takes `seconds` to read."""

    seconds: float = 0.5
    clients: int = 12

    def load_federation(self) -> Watched:
        return Watched(self.clients, lambda k, attempt: time.sleep(self.seconds))


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A data set for the configuration whose file is not there."""

    def load_federation(self) -> Any:
        return open("/nowhere/images.npz")


def job(
    data: Any, model: nn.Module | None = None, client: Plain | None = None, seed: int = 1
) -> Job:
    start = model or SoftmaxRegression(features=64).build()
    return Job(start, data, client or Plain(), cross_entropy, seed)


def packed(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    layout, parameters, buffers = split(model)
    return layout.pack(parameters), {name: b.clone() for name, b in buffers.items()}


def kept(groups: Any) -> list[Any]:
    """Updates outlive the engine's memory only as copies."""
    found: list[Any] = []
    for update in (u for g in groups for u in (g.updates() if isinstance(g, Bundle) else g)):
        if isinstance(update, Failure):
            found.append((update.client, update.reason))
            continue
        assert isinstance(update, Update)
        assert isinstance(update.delta, Tensor)
        buffers = {n: torch.as_tensor(b).tolist() for n, b in (update.buffers or {}).items()}
        delta = update.delta.tolist()
        found.append((update.client, update.weight, update.steps, update.loss, delta, buffers))
    return found


def facts(found: Round | Mapping[str, Any]) -> dict[str, Any]:
    """All of a round but its times."""
    told = found.to_dict() if isinstance(found, Round) else dict(found)
    return {key: value for key, value in told.items() if key != "seconds"}


def play(
    overrides: Mapping[str, Any], *, model: nn.Module | None = None, data: Any = None
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """The rounds of a run of digits and its final parameters and buffers."""
    plan = load("digits", overrides)[1].plan(model=copy.deepcopy(model), data=data)
    with closing(Simulation(plan)) as simulation:
        rounds = [facts(found) for found in simulation.rounds()]
        return rounds, {name: value.tolist() for name, value in simulation.server.state.items()}


def outcome(folder: Path) -> tuple[Any, ...]:
    """All that a finished run leaves, but times: records, checkpoint, summary, models, scores.

    Of a run that kept no state (`keep_state`) there is no checkpoint to compare.
    """
    run = Run(folder)
    last = max((folder / "checkpoints").glob("*.json"), default=None)
    tensors, meta = checkpoint.read(last.with_suffix(".safetensors")) if last else ({}, {})
    summary = {key: value for key, value in (run.summary or {}).items() if key != "seconds"}
    rounds = [facts(found) for found in run.rounds()]
    state = {name: value.tolist() for name, value in tensors.items()}
    models = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    scores = {path.name: path.read_bytes() for path in folder.glob("client_scores.jsonl")}
    return (
        rounds,
        state,
        meta,
        last and last.name,
        last and last.read_text(),
        summary,
        models,
        scores,
    )


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-c", "from fedglad.cli import app; app()", *map(str, args)]


def environment() -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(TESTS), *([given] if given else [])])
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"}


def cli(*args: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`fedglad ARGS` in a process of its own."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=300, env=environment(), **options
    )


def start(*args: str | Path, **options: Any) -> "subprocess.Popen[str]":
    """The same without waiting; in a session of its own, as a terminal's foreground job."""
    return subprocess.Popen(
        command(*args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
        **options,
    )


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Waits for something to become true and returns it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.005)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def tiny_data(*sizes: int, features: int = 64) -> Partitioned:
    """Clients of the given sizes with random samples of ten classes."""
    rng = np.random.default_rng(3)
    n = sum(sizes)
    x = torch.from_numpy(rng.standard_normal((n, features)).astype(np.float32))
    y = torch.from_numpy(rng.integers(10, size=n))
    owned = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    return Partitioned(x, y, x[:20], y[:20], owned)
