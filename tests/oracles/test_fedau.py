"""FedAU: weights by the mean interval between a client's participations."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedglad import Record, Server, Update
from fedglad.core.checkpoint import CheckpointError
from fedglad.filters import Median, MultiKrum, NormClip
from fedglad.server import Collector
from fedglad.weights import FedAU, Samples


def server_of(weighting: FedAU, **settings: Any) -> Server:
    theta = {"w": torch.zeros(1, dtype=torch.float64)}
    return Server(theta, weighting=weighting, **settings)


def send(server: Server, clients: str, population: int | None = None) -> dict[str, float]:
    """A round in which client "a" sends 1, "b" 2, ...: the weights."""
    record = server.step(updates(clients), population=population)
    assert record.stepped, record.reason
    return weights(record)


def updates(clients: str) -> list[Update]:
    return [
        Update({"w": torch.tensor([ord(name) - 96.0]).double()}, client=name, weight=7)
        for name in clients
    ]


def weights(record: Record) -> dict[str, float]:
    return {client["id"]: client["weight"] for client in record.clients}


def test_by_hand():
    # N = 4; an interval ends with a participation. ω is the mean of those before the round.
    # round  cohort  ω of a         ω of b           θ moves by Σ ω g/4, g = 1 of a and 2 of b
    # 0      a b     1              1                (1 + 2)/4
    # 1      a       1 (1)                           1/4
    # 2      a b     1 (1, 1)       1 (1)            (1 + 2)/4
    # 3      b                      (1 + 2)/2        2 · 1.5/4
    # 4      a b     1 (1, 1, 1)    (1 + 2 + 1)/3    (1 + 2 · 4/3)/4
    # 5      a       (1 + 1 + 1 + 2)/4               1.25/4
    server = server_of(FedAU())
    expected = [
        {"a": 1, "b": 1},
        {"a": 1},
        {"a": 1, "b": 1},
        {"b": 1.5},
        {"a": 1, "b": 4 / 3},
        {"a": 1.25},
    ]
    theta = 0.0
    for omega in expected:
        found = send(server, "".join(omega), population=4)
        assert found == pytest.approx({name: w / 4 for name, w in omega.items()}, rel=1e-12)
        theta -= sum(w / 4 * (ord(name) - 96) for name, w in omega.items())
        assert float(server.params["w"]) == pytest.approx(theta, rel=1e-12)
        before = server.state_dict()["weighting"]
        assert not server.step([]).stepped  # counts as no round
        assert server.state_dict()["weighting"] == before


def test_an_interval_is_cut():
    # K = 2. b is first there in round 5: five rounds without, so two intervals of 2 before it
    # (rounds 0, 1 and 2, 3), and the one of rounds 4 and 5 ends with it: ω = 2, and 2 again in
    # round 6. There it takes part, an interval of 1: (2 + 2 + 2 + 1)/4 in round 7
    server = server_of(FedAU(cutoff=2))
    for _ in range(5):
        send(server, "a", population=1)
    assert send(server, "ab", population=1) == {"a": 1, "b": 2}
    assert send(server, "ab", population=1) == {"a": 1, "b": 2}
    assert send(server, "ab", population=1) == {"a": 1, "b": 7 / 4}


def test_a_client_that_is_new_counts_once_until_its_first_interval_is_over():
    # as in the paper: ω starts as 1. Round 2 ends its interval of 3
    server = server_of(FedAU())
    send(server, "a", population=2)
    send(server, "a", population=2)
    assert send(server, "ab", population=2) == {"a": 0.5, "b": 0.5}
    assert send(server, "ab", population=2) == {"a": 0.5, "b": 1.5}


@pytest.mark.parametrize("cutoff", [1, 2, 3, 50])
@pytest.mark.parametrize("streamed", [False, True])
def test_forty_rounds_agree_with_the_papers_algorithm_2(cutoff: int, streamed: bool):
    # For every client, in every round: S += 1; if it took part in the round before, or S = K,
    # ω becomes the mean of all S so far, and S begins anew.
    rng = np.random.default_rng(8)
    chance = {"a": 1.0, "b": 0.5, "c": 0.2, "d": 0.05}
    count, since = dict.fromkeys(chance, 0), dict.fromkeys(chance, 0)
    omega, last = dict.fromkeys(chance, 1.0), ""
    server = server_of(FedAU(cutoff=cutoff))
    for t in range(40):
        for name in chance if t else ():
            since[name] += 1
            if name in last or since[name] == cutoff:
                n = count[name]
                omega[name] = (n * omega[name] + since[name]) / (n + 1) if n else since[name]
                count[name], since[name] = n + 1, 0
        last = "".join(name for name, p in chance.items() if rng.random() < p)
        sent = updates(last)
        record = server.step(iter(sent) if streamed else sent, population=4)
        expected = {name: omega[name] / 4 for name in last}
        assert weights(record) == pytest.approx(expected, rel=1e-12)


def test_it_estimates_the_mean_of_all_however_often_they_are_there():
    # p = 1, ½, ¼; g = 1, 2, 3, whose mean is 2. FedAvg's is (1 + 2/2 + 3/4)/(1 + ½ + ¼) or so
    rng = np.random.default_rng(1)
    chance = list(zip("abc", (1, 0.5, 0.25), strict=True))
    server = server_of(FedAU())
    moved: list[float] = []
    for _ in range(4000):
        before = float(server.params["w"])
        send(server, "".join(name for name, p in chance if rng.random() < p), population=3)
        moved.append(before - float(server.params["w"]))
    assert np.mean(moved[500:]) == pytest.approx(2, abs=0.1)


def test_without_a_population_the_weights_sum_to_one():
    # ω = 1 and 3 of the test above: ¼ and ¾
    server = server_of(FedAU())
    send(server, "a")
    send(server, "a")
    assert send(server, "ab") == {"a": 0.5, "b": 0.5}
    assert send(server, "ab") == {"a": 0.25, "b": 0.75}


def test_samples_do_not_count_and_the_guard_does_not_cut_what_the_server_gives():
    # b comes in round 30 and, from then on, counts 31 times as much as the others
    server = server_of(FedAU())
    for _ in range(30):
        send(server, "acdefg", population=7)
    send(server, "abcdefg", population=7)
    found = server.step(updates("abcdefg"), population=7)
    assert weights(found)["b"] == pytest.approx(31 / 7)
    assert "claimed" not in found.clients[1]


def test_a_rejected_update_is_no_participation():
    server = server_of(FedAU())
    bad = Update({"w": torch.tensor([math.nan])}, client="b")
    for _ in range(2):
        assert server.step([*updates("a"), bad], population=2).stepped
    send(server, "ab", population=2)
    assert send(server, "ab", population=2) == {"a": 0.5, "b": 1.5}


def test_with_filters():
    # Multi-Krum leaves out e, which is far from the others, so it has not taken part
    server = server_of(FedAU(), filter=MultiKrum(f=1, m=4))
    record = server.step([*updates("abcd"), Update({"w": torch.tensor([9.0])}, client="e")])
    assert [c["id"] for c in record.clients if "rejected" in c] == ["e"]
    assert "str:e" not in server.state_dict()["weighting"]["state"]
    clipped = server_of(FedAU(), filter=NormClip(max_norm=1))
    send(clipped, "ab", population=4)
    assert float(clipped.params["w"]) == pytest.approx(-(1 + 1) / 4)
    with pytest.raises(ValueError, match="Median ignores weights, so FedAU would have no effect"):
        server_of(FedAU(), filter=Median())


def test_it_needs_clients_and_updates():
    server = server_of(FedAU())
    record = server.step([{"w": torch.ones(1)}])
    assert record.reason
    assert "FedAU needs Update(client=...)" in record.reason
    with pytest.raises(ValueError, match="the weights of FedAU do not sum to 1: use Samples or"):
        Collector(server)


def test_it_goes_through_a_file_exactly(tmp_path: Path):
    cohorts = ["ab", "a", "bc", "ab", "c", "abc"]
    whole, half = server_of(FedAU(cutoff=2)), server_of(FedAU(cutoff=2))
    expected = [send(whole, cohort, population=3) for cohort in cohorts]
    assert [send(half, cohort, population=3) for cohort in cohorts[:3]] == expected[:3]
    half.save(tmp_path / "state")
    loaded = Server.load(tmp_path / "state", {"w": torch.zeros(1, dtype=torch.float64)})
    assert [send(loaded, cohort, population=3) for cohort in cohorts[3:]] == expected[3:]
    assert torch.equal(loaded.params["w"], whole.params["w"])


@pytest.mark.parametrize(
    "bad",
    [[1.0], [1.0, 60.0, 3.0], [1.0, 0.5, 3.0], [0.0, 1.0, 3.0], [1.0, math.nan, 3.0], [1, 1, 0]],
)
def test_a_state_that_cannot_be_is_refused_and_nothing_changes(bad: list[float]):
    server = server_of(FedAU())
    send(server, "a", population=2)
    saved = server.state_dict()
    kept = dict(saved["weighting"]["state"])
    saved["weighting"]["state"] = {"str:a": bad}
    with pytest.raises(CheckpointError):
        server.load_state_dict(saved)
    assert server.state_dict()["weighting"]["state"] == kept


@pytest.mark.parametrize("cutoff", [0, -1])
def test_a_bad_setting_is_refused(cutoff: int):
    with pytest.raises(ValueError, match=rf"FedAU\(cutoff={cutoff}\): must be from 1 to 1e9"):
        FedAU(cutoff=cutoff)


@dataclass(frozen=True, kw_only=True)
class Halves(Samples):
    """An own weighting whose weights are half of what clients claim, and sum to anything."""

    normalises: ClassVar[bool] = False

    def weigh(self, weight: float) -> float:
        return weight / 2


def test_an_own_weighting_that_does_not_normalise_streams_and_its_claims_are_cut():
    # ½ (1 + 3) = 2 in the first round. A weight of 1 is usual then: 1000 is cut to 1 of two
    listed, streamed = (
        Server({"w": torch.zeros(1)}, weighting=Halves(), trust=None) for _ in range(2)
    )
    for weight in (1.0, 1000.0):
        sent = [Update({"w": torch.tensor([g])}, client=int(g), weight=weight) for g in (1.0, 3.0)]
        assert listed.step(sent).stepped
        assert streamed.step(iter(sent)).stepped
        assert torch.equal(listed.params["w"], streamed.params["w"])
    assert float(listed.params["w"]) == -4
