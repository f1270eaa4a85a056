"""Engines: the same bits in all of them, and what happens when clients or workers fail."""

import copy
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from contextlib import closing
from typing import Any

import pytest
import torch
from run_support import (
    TINY,
    Normed,
    Watched,
    alive,
    die,
    environment,
    facts,
    job,
    kept,
    packed,
    play,
    tiny_data,
    until,
)
from torch import Tensor, nn

from fedglad.clients.method import Plain
from fedglad.config.schema import simulate
from fedglad.models.softmax import SoftmaxRegression
from fedglad.simulation.engines import local as local_engine
from fedglad.simulation.engines.base import find_devices
from fedglad.simulation.engines.local import LocalEngine, Shared
from fedglad.simulation.engines.ray import Hand, Message, RayEngine
from fedglad.simulation.engines.settings import Local, Serial

SERIAL = {"engine.name": "serial"}
BRIEF = {"rounds": 4, "client.epochs": 2, "sampler.clients_per_round": 5}


def local(workers: int) -> dict[str, Any]:
    return {"engine.name": "local", "engine.workers": workers}


def zeros(features: int = 64) -> tuple[Tensor, dict[str, Tensor]]:
    return packed(SoftmaxRegression(features=features).build())


def engine(data: Any, workers: int = 2, client_timeout: float = 0, **given: Any) -> LocalEngine:
    return Local(workers=workers, client_timeout=client_timeout).start(job(data, **given))


@pytest.mark.parametrize("model", [None, Normed()], ids=["small-cnn", "batchnorm+dropout"])
def test_serial_and_local_give_the_same_bits(model: nn.Module | None):
    reference = play({**BRIEF, **SERIAL}, model=model)
    assert len(reference[0]) == 4
    for workers in (1, 2, 3):
        assert play({**BRIEF, **local(workers)}, model=model) == reference


@pytest.mark.parametrize("filter", ["median", "multi-krum", "norm-clip"])
def test_methods_that_keep_the_cohort_keep_copies(filter: str):
    # 24 clients are more groups than the 2 × 1 slots the local engine reuses.
    given = {**TINY, "rounds": 2, "filter.name": filter, "sampler.clients_per_round": 24}
    assert play({**given, **local(1), "engine.client_timeout": 100}) == play({**given, **SERIAL})


def test_weightings_that_keep_the_cohort_keep_copies():
    given = {**TINY, "rounds": 2, "weighting.name": "fedadp", "sampler.clients_per_round": 24}
    assert play({**given, **local(1), "engine.client_timeout": 100}) == play({**given, **SERIAL})


@pytest.mark.parametrize("settings", [SERIAL, local(2)], ids=["serial", "local"])
def test_the_parents_threads_change_nothing(settings: dict[str, Any]):
    given = {**BRIEF, **settings, "rounds": 2}
    before = torch.get_num_threads()
    assert before == 1
    reference = play(given, model=Normed())
    try:
        torch.set_num_threads(2)
        torch.rand(1000, 1000).matmul(torch.rand(1000, 1000))  # starts the threads
        assert play(given, model=Normed()) == reference
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_global_seed_changes_nothing():
    given = {**BRIEF, **SERIAL, "rounds": 2}
    torch.manual_seed(1)
    reference = play(given, model=Normed())
    torch.manual_seed(2)
    assert play(given, model=Normed()) == reference


def test_a_models_unsaved_buffers_do_not_pass_from_client_to_client():
    class Counting(nn.Linear):
        """Scales its output by how often it was called: state that no state_dict has."""

        def __init__(self) -> None:
            super().__init__(64, 10)
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input.flatten(1)) / self.calls

    given = {**BRIEF, "rounds": 1}
    assert play({**given, **local(2)}, model=Counting()) == play(
        {**given, **SERIAL}, model=Counting()
    )


def test_the_server_sees_one_update_after_the_other_in_cohort_order():
    cohort = [7, 1, 4, 11, 0, 3]
    for settings in (Serial(), Local(workers=2, client_timeout=60), Local(workers=2)):
        with closing(settings.start(job(Watched()))) as found:
            assert [u[0] for u in kept(found.train(0, cohort, zeros(), {}))] == cohort


def test_evaluation_in_chunks_is_exact():
    data = tiny_data(3)
    rng = torch.Generator().manual_seed(1)
    data.test_x = torch.randn(2345, 64, generator=rng)
    data.test_y = torch.randint(10, (2345,), generator=rng)
    model = nn.Linear(64, 10)
    scores = model(data.test_x)
    loss = nn.functional.cross_entropy(scores, data.test_y).item()
    hits = (scores.argmax(1) == data.test_y).sum().item()
    results: list[Any] = []
    for settings in (Serial(), Local(workers=2)):
        with closing(settings.start(job(data, model))) as found:
            results.append(found.evaluate(packed(model)))
    assert results[0] == results[1]
    assert results[0]["loss"] == pytest.approx(loss, rel=1e-6)
    assert results[0]["accuracy"] == hits / 2345


# --------------------------------------------------------------------- where there is no fork

SPAWNED = """
    import multiprocessing, os, signal, sys
    from contextlib import closing
    from run_support import *
    from fedglad.simulation.engines.settings import Local, Serial

    multiprocessing.set_start_method("spawn")
    given = {**TINY, "rounds": 3, "sampler.clients_per_round": 20, "client.name": "scaffold"}
    serial = play({**given, "engine.name": "serial"}, model=Normed())
    assert play({**given, "engine.workers": 2}, model=Normed()) == serial

    with closing(Local(workers=2).start(job(tiny_data(*[9] * 6)))) as engine:
        zeros = packed(SoftmaxRegression(features=64).build())
        first = kept(engine.train(0, range(6), zeros, {}))
        for process in engine.pool.processes:
            os.kill(process.handle.pid, signal.SIGKILL)
        assert kept(engine.train(0, range(6), zeros, {})) == first
        assert engine.evaluate(zeros)["accuracy"] > 0
    with closing(Serial().start(job(tiny_data(*[9] * 6)))) as engine:
        assert kept(engine.train(0, range(6), zeros, {})) == first
    print("same bits")

    try:
        play(given, data=Watched(20, before=lambda k, attempt: None))
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_workers_that_are_spawned_not_forked_give_the_same_bits():
    script = [sys.executable, "-c", textwrap.dedent(SPAWNED)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment(), timeout=300)
    same, refused = done.stdout.splitlines()
    assert same == "same bits", done.stderr
    assert refused.startswith("a worker process cannot be sent all that it needs: ")
    assert refused.endswith('or set engine.name = "serial"')


# ---------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("cpu", 2, ["cpu"]),
        ("auto", 0, ["cpu"]),
    ],
)
def test_workers_are_spread_over_the_gpus(
    name: str, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [str(device) for device in find_devices(name)] == expected


def test_each_worker_computes_on_the_next_device(monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []
    monkeypatch.setattr(local_engine, "Worker", lambda job, device: used.append(str(device)))
    nothing, devices = torch.zeros(0, 2), [torch.device("cuda", k) for k in range(2)]
    shared = Shared(job(tiny_data(3)), devices, nothing, {}, nothing, nothing, nothing)
    for number in range(5):  # five workers on two GPUs
        shared(number)
    assert used == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


# ------------------------------------------------------------------------------------- faults


def test_a_killed_worker_is_replaced_and_its_client_trained_again_to_the_same_bits():
    slow = Plain(batch_size=16, epochs=250)
    cohort = [0, 1, 2, 3]
    with closing(Serial().start(job(Watched(), client=slow))) as found:
        reference = kept(found.train(0, cohort, zeros(), {}))
    data = Watched()

    def kill() -> None:
        pid = until(lambda: data.pid.value)
        time.sleep(0.15)  # it trains now
        os.kill(pid, signal.SIGKILL)

    with closing(engine(data, client=slow, client_timeout=100)) as found:
        killer = threading.Thread(target=kill)
        killer.start()
        again = kept(found.train(0, cohort, zeros(), {}))
        killer.join()
        after = kept(found.train(1, cohort, zeros(), {}))
    assert sum(data.attempts) == 4 + 1 + 4  # one of them twice
    assert again == reference
    assert len(after) == 4


def test_all_workers_killed_while_idle_are_replaced():
    with closing(engine(Watched())) as found:
        first = kept(found.train(0, [1, 2, 3], zeros(), {}))
        for process in found.pool.processes:
            os.kill(process.handle.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert kept(found.train(0, [1, 2, 3], zeros(), {})) == first
        for process in found.pool.processes:
            os.kill(process.handle.pid, signal.SIGKILL)
        assert found.evaluate(zeros())["accuracy"] > 0


class Wide(nn.Linear):
    """A model whose buffers are more than a pipe holds at once."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("table", torch.zeros(1_000_000))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


def test_a_worker_killed_while_it_is_sent_a_large_message_is_replaced():
    model = Wide()
    with closing(engine(Watched(), model=model, workers=1)) as found:
        first = kept(found.train(0, [1], packed(model), {}))
        pid = found.pool.processes[0].handle.pid
        os.kill(pid, signal.SIGSTOP)  # so that it reads nothing and the sender waits
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        assert kept(found.train(0, [1], packed(model), {})) == first
        timer.join()


def test_a_client_that_kills_its_worker_every_time_is_left_out_after_three_tries():
    data = Watched(before=lambda k, attempt: die() if k == 2 else None)
    with closing(engine(data, client_timeout=100)) as found:
        result = kept(found.train(0, [0, 1, 2, 3, 4, 5], zeros(), {}))
    assert result[2] == (2, "its worker died 3 times")
    assert data.attempts[2] == 3
    with closing(Serial().start(job(Watched()))) as found:
        others = kept(found.train(0, [0, 1, 3, 4, 5], zeros(), {}))
    assert [*result[:2], *result[3:]] == others


def test_a_client_that_kills_its_worker_does_not_take_its_group_with_it():
    """Tiny clients share a message; the others of it are innocent, and who they are depends on
    the number of workers, which must not show in the result."""
    data = Watched(before=lambda k, attempt: die() if k == 2 else None)
    with closing(engine(data, workers=1)) as found:
        result = kept(found.train(0, [0, 1, 2, 3, 4, 5], zeros(), {}))
    assert [u[0] for u in result] == [0, 1, 2, 3, 4, 5]
    assert [u[0] for u in result if len(u) == 2] == [2]
    with closing(Serial().start(job(Watched()))) as found:
        others = kept(found.train(0, [0, 1, 3, 4, 5], zeros(), {}))
    assert [u for u in result if len(u) > 2] == others


def test_a_client_whose_worker_dies_twice_is_still_trained():
    data = Watched(before=lambda k, attempt: die() if k == 2 and attempt <= 2 else None)
    with closing(engine(data, client_timeout=100)) as found:
        result = kept(found.train(0, [0, 1, 2, 3], zeros(), {}))
    with closing(Serial().start(job(Watched()))) as found:
        assert result == kept(found.train(0, [0, 1, 2, 3], zeros(), {}))


@pytest.mark.parametrize("settings", [SERIAL, local(1), local(2)], ids=["serial", "x1", "x2"])
def test_a_client_that_raises_is_recorded_and_the_others_go_on(settings: dict[str, Any]):
    def before(k: int, attempt: int) -> None:
        if k == 3:
            raise KeyError("no such file")

    given = {**TINY, "rounds": 2, "sampler.clients_per_round": 12}
    rounds = list(simulate("digits", {**given, **settings}, data=Watched(before=before)))
    for found in rounds:
        assert found.record.stepped
        assert found.record.rejected == {3: "KeyError: 'no such file'"}
        assert sum(c["weight"] for c in found.record.clients) == pytest.approx(1)
    reference = play({**given, **SERIAL}, data=Watched(before=before))[0]
    assert [facts(found) for found in rounds] == reference


def test_a_round_in_which_every_client_fails_is_skipped_and_the_run_goes_on():
    def before(k: int, attempt: int) -> None:
        if attempt <= 1 + (k == 0):  # the first is asked once more, before the run
            raise ValueError("not yet")

    data = Watched(clients=3, before=before)
    first, second = simulate("digits", {**TINY, **local(2), "rounds": 2}, data=data)
    assert not first.record.stepped
    assert "0 of 3 updates were accepted" in str(first.record.reason)
    assert second.record.stepped


def test_a_client_that_hangs_is_killed_and_recorded_in_about_that_time():
    def before(k: int, attempt: int) -> None:
        if k == 1:
            time.sleep(60)

    data = Watched(before=before)
    with closing(engine(data, client_timeout=1.0)) as found:
        begin = time.monotonic()
        result = kept(found.train(0, [0, 1, 2, 3, 4], zeros(), {}))
        took = time.monotonic() - begin
        assert result[1] == (1, "no answer within 1 s")
        assert [u[0] for u in result] == [0, 1, 2, 3, 4]
        assert all(len(u) > 2 for u in (*result[:1], *result[2:]))
        assert 1.0 <= took < 3.0
        assert data.attempts[1] == 1  # a client that hangs is not tried again
        assert len(kept(found.train(1, [2, 3], zeros(), {}))) == 2  # the new worker works


def test_a_model_that_cannot_be_trained_is_refused_by_every_engine():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10, dtype=torch.float64))
    for settings in (Serial(), Local(workers=1)):
        with pytest.raises(ValueError, match="one dtype, float32 or float64"):
            settings.start(job(Watched(), copy.deepcopy(model))).close()


# ---------------------------------------------------------------------------- streaming, groups


def test_at_most_two_updates_a_worker_are_in_flight():
    data = Watched(clients=30)
    with closing(engine(data, workers=2, client_timeout=100)) as found:
        for place, _ in enumerate(found.train(0, range(30), zeros(), {})):
            time.sleep(0.03)  # a slow server: the workers could run far ahead
            # `place` were taken before this one, which is still held.
            assert data.started.value <= place + 4
    assert data.started.value == 30


def test_workers_go_on_while_the_server_takes_what_waits_for_a_slow_client():
    """When the first client is slow the window fills up; the moment it comes, there is room."""
    data = Watched(before=lambda k, attempt: time.sleep(0.3) if k == 0 else None)
    with closing(engine(data, workers=2, client_timeout=100)) as found:
        updates = found.train(0, range(12), zeros(), {})
        for _ in range(2):  # 0 is taken and gone, 1 is held: 1 … 4 may be in flight
            next(updates)
        until(lambda: data.started.value == 5, 2)
        updates.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_memory_for_updates_does_not_grow_with_the_cohort():
    with closing(engine(Watched(), model=nn.Linear(600, 500))) as found:  # more than a megabyte
        assert tuple(found.slots.shape[:2]) == (4, 1)
    with closing(engine(Watched())) as found:
        assert found.slots.numel() * 4 <= 4 * (1 << 20)


def test_tiny_clients_travel_in_groups():
    data = tiny_data(*[4] * 100)
    with closing(engine(data)) as found:
        sent: list[Any] = []
        send = found.pool._send
        found.pool._send = lambda *args: (sent.append(args), send(*args))[1]  # type: ignore
        result = kept(found.train(0, range(100), zeros(), {}))
    assert [u[0] for u in result] == list(range(100))
    assert 4 <= len(sent) <= 20


def test_groups_give_the_same_bits_as_single_clients():
    data = tiny_data(*range(1, 41))
    results: list[Any] = []
    for settings in (Serial(), Local(workers=1), Local(workers=2), Local(client_timeout=100)):
        with closing(settings.start(job(data))) as found:
            results.append(kept(found.train(0, range(40), zeros(), {})))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("held", [False, True], ids=["closed", "held"])
def test_a_round_abandoned_in_the_middle_leaves_the_engine_usable(held: bool):
    slow = Plain(batch_size=16, epochs=40)
    with closing(Serial().start(job(Watched(), client=slow))) as found:
        reference = kept(found.train(1, [6, 7, 8, 9], zeros(), {}))
    with closing(engine(Watched(), client=slow, client_timeout=100)) as found:
        updates = found.train(0, range(12), zeros(), {})
        next(updates)
        if not held:
            del updates
            gc.collect()
        assert kept(found.train(1, [6, 7, 8, 9], zeros(), {})) == reference


def test_a_server_that_raises_leaves_the_engine_usable():
    with closing(engine(Watched(), client_timeout=100)) as found:
        reference = kept(found.train(0, [1, 2, 3, 4, 5], zeros(), {}))

        def consume() -> None:
            for _ in found.train(0, [1, 2, 3, 4, 5], zeros(), {}):
                raise RuntimeError("a bug in an own adapter")

        with pytest.raises(RuntimeError, match="own adapter") as caught:
            consume()
        assert caught.tb  # it holds the frame, and with it the generator
        assert kept(found.train(0, [1, 2, 3, 4, 5], zeros(), {})) == reference


# ------------------------------------------------------------------------------------ processes


def test_close_leaves_no_process_and_can_be_called_twice():
    found = engine(Watched(), workers=3)
    pids = [process.handle.pid for process in found.pool.processes]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    found.close()
    found.close()
    assert not any(alive(pid) for pid in pids)
    assert not {child.pid for child in multiprocessing.active_children()} & set(pids)


def test_a_simulation_left_early_leaves_no_process():
    before = set(multiprocessing.active_children())
    for _ in simulate("digits", {**TINY, **local(2)}):
        during = set(multiprocessing.active_children()) - before
        assert len(during) == 2
        break
    gc.collect()
    assert not set(multiprocessing.active_children()) - before


PARENT = """
    import os, sys, time
    from run_support import *
    from simulation.test_engines import Wide
    from fedglad.simulation.engines.settings import Local

    mode = sys.argv[1]
    model = Wide() if mode == "sending" else SoftmaxRegression(features=64).build()
    client = Plain(batch_size=16, epochs=1 if mode == "idle" else 500)
    engine = Local(workers=2, client_timeout=1000).start(job(Watched(), model, client))
    print(*(p.handle.pid for p in engine.pool.processes), flush=True)
    updates = engine.train(0, range(12), packed(model), {})
    if mode == "idle":
        list(updates)
    print("ready", flush=True)
    list(updates)
    time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["idle", "training", "sending"])
def test_workers_end_when_their_parent_is_killed(mode: str):
    script = [sys.executable, "-c", textwrap.dedent(PARENT), mode]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.5)
        assert all(alive(pid) for pid in pids)
        parent.kill()
    try:
        until(lambda: not any(alive(pid) for pid in pids), 15)
    finally:
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_what_two_lost_workers_had_is_sent_again_in_the_cohorts_order(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else the message that is waited for could lie behind others, for which there is no room."""
    engine = RayEngine.__new__(RayEngine)
    for name in ("_dismiss", "_hire", "_wait_for_one"):
        monkeypatch.setattr(engine, name, lambda *_: None, raising=False)
    messages = [Message("train", (k,)) for k in range(6)]
    first, second = (
        Hand(None, None, deque((messages[k], None) for k in at)) for at in [(0, 1), (2, 3)]
    )
    engine.hands = [first, second]
    order, unsent = deque(messages), deque(messages[4:])
    engine._lose(first, "", order, unsent)
    engine._lose(second, "", order, unsent)
    assert [message.args[0] for message in unsent] == [0, 1, 2, 3, 4, 5]
    assert [message.deaths for message in messages] == [1, 0, 1, 0, 0, 0]
