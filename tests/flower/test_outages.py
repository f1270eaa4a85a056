"""Too few nodes, nodes that are slow, and nodes that fail again and again."""

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from fedglad.flower import FedGLAD, NothingTrained, TooFewNodes, TooManySkipped
from fedglad.samplers.uniform import Uniform

from .grid import Clock, Linear, LocalGrid, bits, clients, model, record, rejected, who


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", made)
    return made


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Generator[Callable[[], str]]:
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("flwr")
    if not logger.propagate:
        logger.addHandler(caplog.handler)
    yield lambda: "\n".join(dict.fromkeys(line.getMessage() for line in caplog.records))
    logger.removeHandler(caplog.handler)


class InMemoryGrid(LocalGrid):
    """By its name, the one of Flower's simulation engine."""


def ours(**settings: Any) -> FedGLAD:
    shape: dict[str, Any] = {"fraction_evaluate": 0.0, "nodes": "partition-id"}
    return FedGLAD(**shape | settings)


def go(strategy: FedGLAD, grid: LocalGrid, rounds: int = 3, **more: Any) -> Any:
    return strategy.start(grid, record(model()), num_rounds=rounds, **more)


# --------------------------------------------------------------------------------- the beginning


def test_a_cohort_larger_than_the_federation_is_all_of_it(said: Callable[[], str], clock: Clock):
    strategy = ours(sampler=Uniform(clients_per_round=5))
    begin = clock.now
    go(strategy, InMemoryGrid(clients(2)))
    assert [sorted(who(told)) for told in strategy.records] == [[0, 1]] * 3
    assert clock.now - begin < 5
    assert said().count("2 nodes are connected and 5 were to take part") == 1
    assert "flwr federation simulation-config @none/default --num-supernodes 5" in said()


def test_where_no_more_can_come_it_says_so_at_once(clock: Clock):
    begin = clock.now
    with pytest.raises(TooFewNodes, match=r"2 nodes are connected, at least 7 .*supernodes 7"):
        go(ours(min_available_nodes=7), InMemoryGrid(clients(2)))
    assert clock.now - begin < 10


def test_who_waits_says_so_every_half_minute_and_not_for_ever(
    said: Callable[[], str], clock: Clock
):
    begin = clock.now
    with pytest.raises(TooFewNodes, match=r"1 nodes are connected after 300 s, at least 2 "):
        go(ours(node_timeout=300), LocalGrid(clients(1)))
    assert 300 <= clock.now - begin < 310
    assert said().count("Waiting for nodes to connect: 1 of 2; ") == 10
    assert "; 270 s are left" in said()


# ----------------------------------------------------------------------------------- the outages


def leaving(grid: LocalGrid, after: int, clock: Clock, seconds: float) -> Any:
    """All nodes go after a round, and come back after so many seconds."""
    gone: dict[int, Any] = {}

    def evaluate(server_round: int, arrays: Any) -> None:
        if server_round == after and not gone:
            gone.update(grid.nodes)
            grid.nodes = {}
            back = clock.now + seconds

            def nap() -> None:
                if clock.now >= back and not grid.nodes:
                    grid.nodes = dict(gone)

            clock.on_nap = nap

    return evaluate


def test_an_outage_costs_no_round(clock: Clock):
    alone = ours()
    expected = bits(go(alone, LocalGrid(clients(3)), 5).arrays)
    grid = LocalGrid(clients(3))
    strategy = ours(round_timeout=30.0)
    found = go(strategy, grid, 5, evaluate_fn=leaving(grid, 2, clock, 900.0))
    assert [told["status"] for told in strategy.records] == ["stepped"] * 5
    assert bits(found.arrays) == expected


def test_nodes_that_have_gone_while_they_are_still_listed_cost_no_round(clock: Clock):
    """The SuperLink says so of each message, at once, until it notices that they are gone."""
    grid = LocalGrid(clients(3))
    strategy = ours()

    def lose(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            grid.lost, back = {0, 1, 2}, clock.now + 180.0
            clock.on_nap = lambda: grid.lost.clear() if clock.now >= back else None

    go(strategy, grid, 4, evaluate_fn=lose)
    assert [told["status"] for told in strategy.records] == ["stepped"] * 4
    assert len(grid.asked()) < 3 * 4 + 3 * 12  # not asked again every moment


def test_skip_and_fail(tmp_path: Path, clock: Clock):
    grid = LocalGrid(clients(3))
    strategy = ours(round_timeout=30.0, on_short="skip")
    go(strategy, grid, 5, evaluate_fn=leaving(grid, 2, clock, 45.0))
    statuses = [told["status"] for told in strategy.records]
    assert statuses == ["stepped", "stepped", "skipped", "stepped", "stepped"]

    grid = LocalGrid(clients(3))
    clock.on_nap = lambda: None
    folder = {"checkpoint_dir": tmp_path / "run", "resume": True}
    strategy = ours(round_timeout=30.0, on_short="fail", **folder)
    begin = clock.now
    with pytest.raises(TooFewNodes, match=r"round 3: 0 nodes .* resume=True goes on from here"):
        go(strategy, grid, 5, evaluate_fn=leaving(grid, 2, clock, 1e6))
    assert clock.now - begin < 60
    strategy = ours(on_short="fail", **folder)
    go(strategy, LocalGrid(clients(3)), 5)
    assert [told["status"] for told in strategy.records] == ["stepped"] * 5


def test_waiting_ends_by_the_deadline(clock: Clock):
    grid = LocalGrid(clients(3))
    begin = clock.now
    with pytest.raises(TooFewNodes, match="0 nodes are connected"):
        go(ours(node_timeout=500.0), grid, 5, evaluate_fn=leaving(grid, 2, clock, 1e6))
    assert 500 <= clock.now - begin < 1100


class Sick(Linear):
    """Fails from a round on."""

    since = 3

    def __call__(self, message: Any, context: Any) -> Any:
        config = message.content.get("config", {})
        if message.metadata.message_type == "train" and config["server-round"] >= self.since:
            raise RuntimeError("out of memory")
        return super().__call__(message, context)


def test_a_run_of_which_too_much_was_skipped_fails():
    with pytest.raises(TooManySkipped, match=r"4 of 6 rounds were skipped, .*max_skipped=0.5"):
        go(ours(), LocalGrid([Sick(k) for k in range(3)]), 6)
    strategy = ours(max_skipped=1.0)
    go(strategy, LocalGrid([Sick(k) for k in range(3)]), 6)
    assert len(strategy.records) == 6
    with pytest.raises(TooManySkipped, match=r"1 of 6 .*max_skipped=0 "):
        go(ours(max_skipped=0.0), LocalGrid([Sick(k) for k in range(3)]), 6)


# ------------------------------------------------------------------------------------ stragglers


def test_a_quorum_waits_for_the_others_no_longer_than_the_grace_time(clock: Clock):
    strategy = ours(round_timeout=600.0, quorum=0.8, grace=15.0)
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: grid.never.update({0} if kind == "train" else ())
    begin = clock.now
    go(strategy, grid, 5)
    assert 75 <= clock.now - begin < 100  # five rounds, and not 5 × 600
    for told in strategy.records:  # who is merely slow does not rest
        (reason,) = rejected(told).values()
        assert reason == "no reply within 15 s, in which most others had replied"
        assert len(told["clients"]) == 5

    late = LocalGrid(clients(5), late={2: 6})  # comes within the grace time
    strategy = ours(round_timeout=600.0, quorum=0.8, grace=15.0)
    go(strategy, late, 1)
    assert rejected(strategy.records[0]) == {}


def test_without_enough_replies_a_quorum_waits_for_the_whole_time(clock: Clock):
    strategy = ours(round_timeout=100.0, quorum=0.8, grace=5.0)
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: grid.never.update({0, 3} if kind == "train" else ())
    begin = clock.now
    go(strategy, grid, 1)
    assert 100 <= clock.now - begin < 110


def test_with_a_quorum_that_all_meet_the_model_is_the_same():
    plain = go(ours(quorum=1.0), LocalGrid(clients(5)))
    assert bits(go(ours(quorum=0.6, grace=60.0), LocalGrid(clients(5))).arrays) == bits(
        plain.arrays
    )


def test_a_node_that_fails_again_and_again_rests_and_has_a_way_back(
    clock: Clock, said: Callable[[], str], tmp_path: Path
):
    """Client 3 hangs in rounds 1 to 3 and is well later: it rests for 10 rounds."""
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: grid.never.update({3} if kind == "train" else ())
    folder = {"checkpoint_dir": tmp_path / "run", "resume": True}
    strategy = ours(round_timeout=20.0, **folder)
    go(strategy, grid, 5)
    assert [3 in who(told) for told in strategy.records] == [True] * 3 + [False] * 2
    assert [told.get("resting") for told in strategy.records] == [None, None, [3], [3], [3]]
    assert "Client 3 (node " in said()
    assert "has not answered in 3 rounds in a row: it rests for 10 rounds" in said()

    begin = clock.now
    strategy = ours(round_timeout=20.0, **folder)  # a restart does not wake it
    go(strategy, LocalGrid(clients(5)), 16)
    there = [told["round"] for told in strategy.records if 3 in who(told)]
    assert there == [0, 1, 2, 13, 14, 15]
    assert clock.now - begin < 30


def test_who_fails_again_after_its_rest_rests_twice_as_long():
    class Ill(Linear):
        def train(self, arrays: Any) -> Any:
            raise RuntimeError("out of memory")

    strategy = ours(quarantine=2)
    go(strategy, LocalGrid([*clients(4), Ill(4)]), 40)
    there = [told["round"] for told in strategy.records if 4 in who(told)]
    assert there == [0, 1, 12, 33]  # two, then 10 rounds of rest, then 20
    strategy = ours(quarantine=0)
    go(strategy, LocalGrid([*clients(4), Ill(4)]), 8)
    assert all(4 in who(told) for told in strategy.records)


def test_if_all_fail_nobody_rests():
    population = [Sick(k) for k in range(3)]
    for own in population:
        own.since = 1
    strategy = ours(quarantine=1)
    with pytest.raises(NothingTrained):
        go(strategy, LocalGrid(population))
    assert [told.get("resting") for told in strategy.records] == [None] * 3


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"quorum": 0.0}, "quorum=0.0: must be a share"),
        ({"quorum": 1.2}, "quorum=1.2: must be a share"),
        ({"grace": -1.0}, "grace=-1.0: must be 0 or more"),
        ({"quarantine": -1}, "quarantine=-1: must be 0 or more"),
        ({"on_short": "panic"}, "on_short='panic': choose wait, skip, fail"),
        ({"node_timeout": 0.0}, "node_timeout=0.0: must be positive"),
        ({"max_skipped": 1.5}, "max_skipped=1.5: must be a share"),
    ],
)
def test_what_cannot_be_meant_is_refused(setting: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        FedGLAD(**setting)


def test_a_message_that_could_not_be_sent_is_not_called_a_missing_reply(clock: Clock):
    class Full(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            kept = [m for m in messages if self.nodes[m.metadata.dst_node_id].index != 2]
            sent = super().push_messages(kept)
            return sent if messages[0].metadata.message_type == "train" else [*sent]

    strategy = ours(nodes="id")
    begin = clock.now
    go(strategy, Full(clients(4)), 1)
    assert list(rejected(strategy.records[0]).values()) == [
        "the message could not be sent: it is too large, or its node has gone"
    ]
    assert clock.now - begin < 5
