"""Replay: the recorded factors to the bit, other rules by hand, and what cannot be replayed."""

import csv
import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from cli.test_cli import said
from flower.grid import Clock, Linear, LocalGrid, clients, model, record
from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAvg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_support import start, until
from runs.test_runs import stopped
from typer.testing import CliRunner

from fedglad import Server, Update, simulate
from fedglad.adapters import REGISTRY, Adapter, Factors, FedExP, FedHyper, Fixed, Glad, Pooled
from fedglad.analysis.recording import Recording, ReplayError, _sum_weights, read
from fedglad.analysis.replaying import Replayed, replay, rule
from fedglad.cli.progress import clipped
from fedglad.cli.replay import app
from fedglad.config.schema import Config, ConfigError, load
from fedglad.flower import FedGLAD, Monitor, report_norms
from fedglad.records import Record, Statistics
from fedglad.runs import Run, execute, reader
from fedglad.server.from_sums import Collector, weights_of

SMALL = {
    "model.name": "mlp",
    "model.features": 64,
    "model.hidden": [6],
    "client.epochs": 1,
    "sampler.clients_per_round": 5,
    "engine.name": "serial",
    "rounds": 5,
    "eval_every": 5,
    "adapter.name": "glad",
}
"""Overrides of `digits` for a run of milliseconds with four tensors in two layers."""

REPLAYABLE = ["none", "glad", "fedexp", "fixed", "pooled"]
REFUSED = ["fedhyper", "fedlws", "aligned"]
NEW = ("population", "weight_sq")


def config(more: Mapping[str, Any]) -> Config:
    return load("digits", {**SMALL, **more})[1]


def play(folder: Path, more: Mapping[str, Any]) -> Path:
    execute("digits", config(more), out=folder)
    return folder


def own(folder: Path) -> Replayed:
    """The run replayed with its own settings, seen to be what its file says."""
    found = replay(folder, rule(read(folder).config, {}))
    stepped = [r for r in Run(folder).rounds() if r["status"] == "stepped"]
    assert stepped
    assert [one.round for one in found.rounds] == [r["round"] for r in stepped]
    assert [one.groups for one in found.rounds] == [r["groups"] for r in stepped]
    return found


def older(folder: Path) -> Path:
    """The same records without the fields that older versions did not write."""
    lines = [
        json.dumps({k: v for k, v in one.items() if k not in NEW}) for one in Run(folder).rounds()
    ]
    (folder / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of Glad."""
    return play(tmp_path_factory.mktemp("replay") / "run", {})


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, args)], env={"COLUMNS": "80"})


# ------------------------------------------------------------------------------------- by hand

# Two clients, w = 1/2 each, so Σw²‖g‖² = Σw‖g‖²/2. (Σw‖g‖², ‖ḡ‖²) of the tensors net.a and net.b:
BY_HAND = [
    {"net.a": (4.0, 1.0), "net.b": (4.0, 1.0)},  # GSI 2, 2
    None,  # skipped: the next is t = 1
    {"net.a": (16.0, 1.0), "net.b": (1.0, 1.0)},  # GSI 4, 1
    {"net.a": (9.0, 1.0), "net.b": (9.0, 1.0)},  # GSI 3, 3
]


def line(t: int, tensors: Mapping[str, tuple[float, float]] | None) -> dict[str, Any]:
    """A line of rounds.jsonl of a run without a rule."""
    if tensors is None:
        return {"round": t, "status": "skipped", "reason": "nobody came", "clients": []}
    one = {"gsi": 1.0, "baseline": None, "scale": 1.0}  # GSI is not looked at
    return {
        "round": t,
        "status": "stepped",
        "clients": [
            {"id": 0, "weight": 0.5},
            {"id": 1, "weight": 0.0, "rejected": "holds NaN"},
            {"id": 2, "weight": 0.5},
        ],
        "tensors": {
            name: {"sum_sq": top, "sum_sq2": top / 2, "mean_sq": mean}
            for name, (top, mean) in tensors.items()
        },
        "groups": dict.fromkeys(tensors, one),
    }


def by_hand() -> list[dict[str, Any]]:
    return [line(t, tensors) for t, tensors in enumerate(BY_HAND)]


def scales(found: Replayed) -> list[list[float | None]]:
    return [[group["scale"] for group in one.groups.values()] for one in found.rounds]


def test_glad_by_hand():
    # gamma 1/4, beta 1/2. t=0: B = GSI = 2, 2 and s = 1.
    # t=1, bounds 3/4 and 5/4: a 4/2 = 2 -> 5/4, B = (2+4)/2 = 3; b 1/2 -> 3/4, B = (2+1)/2 = 3/2.
    # t=2, bounds 1/2 and 3/2: a 3/3 = 1; b 3/(3/2) = 2 -> 3/2.
    found = replay(by_hand(), Glad(gamma=0.25, beta=0.5))
    assert [one.round for one in found.rounds] == [0, 2, 3]
    assert scales(found) == [[1, 1], [1.25, 0.75], [1, 1.5]]
    assert found.rounds[2].groups["net.b"] == {"gsi": 3, "baseline": 1.5, "scale": 1.5}
    assert [(one.low, one.high) for one in found.rounds] == [
        ((), ()),
        (("net.b",), ("net.a",)),
        ((), ("net.b",)),
    ]
    # The mean factors are 1, (5/4 + 3/4)/2 = 1 and (1 + 3/2)/2 = 5/4: none slows down.
    summary = found.replayed
    assert (summary.least, summary.most, summary.slowed, summary.sped) == (0.75, 1.5, 0, 1)
    assert summary.mean == pytest.approx((1 + 1 + 1.25) / 3)
    assert summary.deviation == pytest.approx(math.sqrt((2 * (1 / 12) ** 2 + (1 / 6) ** 2) / 3))
    assert (summary.low, summary.high) == (1 / 6, 2 / 6)
    # The recorded factors are all 1: the differences are 0, 1/4 (the first of two), 1/2.
    assert [(one.difference, one.where) for one in found.rounds] == [
        (0, None),
        (0.25, "net.a"),
        (0.5, "net.b"),
    ]
    assert found.largest is found.rounds[2]
    assert (found.recorded.mean, found.recorded.slowed, found.recorded.sped) == (1, 0, 0)
    assert not found.exact


def test_other_groups_by_hand():
    # One group: GSI² = (4+4)/2 = 4, 17/2, 18/2 = 9. t=1: sqrt(8.5)/2 = 1.458 -> 5/4, and
    # B = (2 + 2.915476)/2 = 2.457738. t=2: 3/2.457738 = 1.220635, within 1/2 and 3/2.
    for groups, label in {"all": "all", "layer": "net"}.items():
        found = replay(by_hand(), Glad(gamma=0.25, beta=0.5, groups=groups))  # pyright: ignore[reportArgumentType]
        assert [list(one.groups) for one in found.rounds] == [[label]] * 3
        assert scales(found)[:2] == [[1], [1.25]]
        assert scales(found)[2] == [pytest.approx(1.220635, abs=1e-6)]
        # Recorded are tensors: a difference has the name of one.
        assert [one.where for one in found.rounds] == [None, "net.a", "net.a"]


def test_fedexp_by_hand():
    # eps 0: max(1, Σw‖g‖²/(2‖ḡ‖²)): 4/2 = 2; 16/2 = 8 and 1/2 -> 1; 9/2.
    found = replay(by_hand(), FedExP(groups="tensor", eps=0))
    assert scales(found) == [[2, 2], [8, 1], [4.5, 4.5]]
    assert [(one.low, one.high) for one in found.rounds] == [((), ()), (("net.b",), ()), ((), ())]
    # all as one: 8/4 = 2, 17/4, 18/4
    assert scales(replay(by_hand(), FedExP(eps=0))) == [[2], [4.25], [4.5]]


def test_pooled_by_hand():
    # Two of N = 4 with w = 1/2: 1 − Σw² = 1/2.
    # t=0, sums 4, 2, ‖ḡ‖² 3: P = (3−2)/(1/2) = 2, V = (1−2/4)(3−2) = 1/2, P_N = 5/2 = P̄;
    #   x = E = (5/2)/3.
    # t=1, ‖ḡ‖² 5/2: P = 1, V = (1/2)(3/2) = 3/4, P_N = 7/4; P̄ = (5/2 + 7/4)/2 = 17/8;
    #   x = (17/8)/(5/2) = 17/20, s = (17/20)/(5/6) = 1.02.
    rounds = [line(0, {"a": (4.0, 3.0)}), line(1, {"a": (4.0, 2.5)})]
    rule = Pooled(gamma=0.25, beta=0.5)
    found = replay(rounds, rule, population=4)
    assert scales(found) == [[1], [pytest.approx(1.02)]]
    # N = 2, everybody: P_N = ‖ḡ‖²: 3, then P̄ = (3 + 5/2)/2 = 11/4, x = 11/10, s = 1.1.
    assert scales(replay(rounds, rule, population=2))[1] == [pytest.approx(1.1)]


def test_fixed_and_none_by_hand():
    found = replay(by_hand(), Fixed(value=0.5))
    assert scales(found) == [[0.5, 0.5]] * 3
    assert (found.replayed.slowed, found.replayed.deviation, found.replayed.low) == (3, 0, 0)
    assert scales(replay(by_hand(), Adapter())) == [[1, 1]] * 3


def test_an_own_grouping_is_replayed_from_python():
    # By last letter: the groups are those of the tensors under other names.
    found = replay(by_hand(), Glad(gamma=0.25, beta=0.5, groups=lambda name: name[-1]))
    assert list(found.rounds[0].groups) == ["a", "b"]
    assert scales(found) == [[1, 1], [1.25, 0.75], [1, 1.5]]
    assert found.rounds[2].where == "net.b"


def test_recorded_groups_that_no_name_tells():
    rounds = by_hand()
    for told in rounds:
        told["groups"] = told.get("groups") and {"mine": told["groups"]["net.a"]}
    found = replay(rounds, Glad(gamma=0.25, beta=0.5))
    assert [one.difference for one in found.rounds] == [None] * 3
    assert found.largest is None
    assert "is not known" in found.notes[0]
    # By a function that gives the same groups, they are known again.
    assert replay(rounds, Glad(groups=lambda _: "mine")).rounds[0].difference == 0


@dataclass(frozen=True, kw_only=True)
class Doubling(Adapter):
    """An own rule, infinite in its second round: the server skips such a one."""

    start_at: float = 1.0

    def start(self, groups: Any) -> Any:
        return {"n": np.zeros(1)}

    def adapt(self, stats: Statistics, groups: Any, state: Any, t: int) -> Any:
        once = np.ones(len(groups.labels))
        if stats.sum_sq["net.a"] == 16:
            return Factors(once, once * 0, once * math.inf), {"n": state["n"] + 100}
        return Factors(once, once * 0, once * self.start_at * 2**t), {"n": state["n"] + 1}


def test_a_round_that_would_have_been_skipped():
    found = replay(by_hand(), Doubling())
    assert scales(found) == [[1, 1], [2, 2]]  # t counts only what steps
    assert [one.round for one in found.rounds] == [0, 3]
    assert "round 3 would have been skipped" in found.notes[0]


# ------------------------------------------------------------------------- exactly the recorded


def test_the_registry_is_divided_in_two():
    assert sorted([*REPLAYABLE, *REFUSED]) == sorted(REGISTRY)


@pytest.mark.parametrize("groups", ["tensor", "layer", "all", "small"])
@pytest.mark.parametrize("name", REPLAYABLE)
def test_own_settings_give_exactly_the_recorded_factors(name: str, groups: str, tmp_path: Path):
    more: dict[str, Any] = {"adapter.name": name, "adapter.groups": groups, "rounds": 4}
    if groups == "small":  # biases have 6 and 10 elements: the first layer becomes one group
        more |= {"adapter.groups": "tensor", "adapter.min_group": 7}
    if name in ("glad", "pooled"):
        more |= {"adapter.gamma": 0.1, "adapter.beta": 0.7}
    folder = play(tmp_path / "run", more)
    found = own(folder)
    assert found.exact
    assert found.largest is None
    assert found.recorded == found.replayed
    counts = {"tensor": 4, "layer": 2, "all": 1, "small": 3}
    assert {len(one.groups) for one in found.rounds} == {counts[groups]}
    if groups == "all":
        told = [r["gsi_all"] for r in Run(folder).rounds()]
        assert [one.groups["all"]["gsi"] for one in found.rounds] == pytest.approx(told, rel=1e-12)


RUNS: dict[str, dict[str, Any]] = {
    "md": {"sampler.name": "md"},
    "optimal": {"sampler.name": "optimal", "sampler.candidates": 12},
    "uneven clients": {"data.partition": "quantity", "data.sigma": 1.5},
    "all in one place": {"data.partition": "centralised"},
    "norm-clip": {"filter.name": "norm-clip", "filter.max_norm": 0.5},
    "multi-krum": {"filter.name": "multi-krum", "filter.f": 1},
    "median": {"filter.name": "median"},
    "trimmed-mean": {"filter.name": "trimmed-mean", "filter.beta": 0.2},
    "fedadp": {"weighting.name": "fedadp"},
    "inverse-distance": {"weighting.name": "inverse-distance"},
    "fednova": {"client.name": "fednova", "data.partition": "quantity"},
    "batched": {"engine.name": "batched"},
    "rejected": {"data.name": "run_support:Raising", "data.clients": 8},
    "skipped": {
        "data.name": "run_support:Raising",
        "data.clients": 8,
        "sampler.clients_per_round": 3,
        "filter.name": "multi-krum",  # needs three updates, and client 3 has none
        "filter.f": 0,
        "rounds": 8,
    },
}


@pytest.mark.parametrize("case", RUNS)
def test_whatever_came_before_the_statistics(case: str, tmp_path: Path):
    """With Pooled, which looks at all there is: both sums, every weight, N."""
    more = {"adapter.name": "pooled", "adapter.gamma": 0.1, "rounds": 4, **RUNS[case]}
    folder = play(tmp_path / "run", more)
    found = own(folder)
    assert found.exact
    rounds = Run(folder).rounds()
    weights = [
        math.fsum(c["weight"] for c in r["clients"]) for r in rounds if r["status"] == "stepped"
    ]
    left_out = any("rejected" in c for r in rounds for c in r["clients"])
    # The case is what it says.
    assert left_out == (case in ("rejected", "skipped", "multi-krum", "optimal"))
    assert any(abs(w - 1) > 1e-3 for w in weights) == (case == "optimal")
    assert (len(found.rounds) < len(rounds)) == (case == "skipped")


def test_a_bit_of_the_record_is_seen(recorded: Path):
    rounds = Run(recorded).rounds()
    tensor = rounds[3]["tensors"]["1.weight"]
    tensor["sum_sq"] *= 1 - 2**-50
    found = replay(rounds, Glad())
    assert not found.exact
    assert [one.same for one in found.rounds][:4] == [True, True, True, False]


def test_a_run_that_was_killed_and_resumed(tmp_path: Path, recorded: Path):
    folder = tmp_path / "run"
    often = config({"checkpoint_every": 2})
    stopped(folder, 2, often)  # after a round that no checkpoint has
    assert len(Run(folder).rounds()) == 3
    assert own(folder).exact  # unfinished
    execute("digits", often, out=folder, resume=True)
    assert own(folder).exact
    assert replay(folder, Glad(gamma=0.5)).rounds == replay(recorded, Glad(gamma=0.5)).rounds


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path):
    folder, rng = tmp_path / "run", random.Random(4)
    args = [f"--set={key}={json.dumps(value)}" for key, value in {**SMALL, "rounds": 400}.items()]
    for _ in range(3):
        process = start("run", "digits", *args, "--resume", "--out", folder)
        before = len(Run(folder).rounds())
        until(lambda before=before: len(Run(folder).rounds()) > before + 2)
        time.sleep(0.05 * rng.random())
        process.kill()
        process.communicate()
        stepped = read(folder).lines  # with the last line cut off or not
        assert replay(folder, Glad()).exact
        assert len(stepped) > before
    process = start("run", "digits", *args, "--resume", "--out", folder)
    process.communicate()
    found = own(folder)
    assert found.exact
    assert len(found.rounds) == 400


def test_rounds_of_simulate_know_the_number_of_clients():
    rounds = list(simulate(config({"adapter.name": "pooled", "adapter.gamma": 0.5})))
    found = replay(rounds, Pooled(gamma=0.5))
    assert found.exact
    assert scales(found) != scales(replay(rounds, Pooled(gamma=0.5), population=10**6))
    # As the terminal counts them.
    rounds = list(simulate(config({"adapter.gamma": 0.01})))
    found = replay(rounds, Glad(gamma=0.01))
    assert found.exact
    told = [clipped(one.record) for one in rounds]
    assert [len(one.low) + len(one.high) for one in found.rounds] == told
    assert sum(told) > 0


RULES = st.one_of(
    st.builds(
        Glad,
        gamma=st.sampled_from([0.0, 0.02, 0.5, math.inf]),
        beta=st.sampled_from([0.0, 0.5, 0.9]),
        groups=st.sampled_from(["tensor", "layer", "all"]),
    ),
    st.builds(
        Pooled,
        gamma=st.sampled_from([0.0, 0.1, 2.0]),
        groups=st.sampled_from(["tensor", "layer", "all"]),
    ),
    st.builds(
        FedExP, eps=st.sampled_from([0.0, 1e-3, 1.0]), groups=st.sampled_from(["tensor", "all"])
    ),
    st.builds(Fixed, value=st.floats(0.1, 10)),
)


def theta() -> dict[str, torch.Tensor]:
    return {"a.w": torch.zeros(3, 2), "a.b": torch.zeros(3), "c.w": torch.zeros(4)}


def some_rounds(seed: int) -> Iterator[list[Update]]:
    """Cohorts of any size and weight; some updates are zero, cancel, or hold NaN."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        cohort: list[Update] = []
        for k in range(int(rng.integers(0, 6))):
            kind = rng.integers(8)
            scale = 0.0 if kind == 0 else math.nan if kind == 1 else 10.0 ** rng.integers(-3, 3)
            delta = {
                name: torch.from_numpy(scale * rng.standard_normal(tuple(zero.shape))).float()
                for name, zero in theta().items()
            }
            if kind == 2:
                delta["a.b"] = torch.zeros(3)
            cohort.append(Update(delta, weight=float(rng.integers(1, 900)), client=k))
            if kind == 3:
                away = {name: -value for name, value in delta.items()}
                cohort.append(Update(away, weight=cohort[-1].weight, client=k + 100))
        yield cohort


def written(records: list[Record]) -> list[dict[str, Any]]:
    """As rounds.jsonl has them."""
    told = [{"round": t, **found.to_dict()} for t, found in enumerate(records)]
    return [json.loads(json.dumps(one, allow_nan=False)) for one in told]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(RULES, st.integers(0, 2**32))
def test_any_cohorts_of_any_rule_are_replayed_to_the_bit(adapter: Adapter, seed: int):
    server = Server(theta(), adapter=adapter, guard=None)
    records = [server.step(cohort, population=20) for cohort in some_rounds(seed)]
    if not any(found.stepped for found in records):
        with pytest.raises(ReplayError, match="all rounds were skipped"):
            replay(written(records), adapter)
        return
    found = replay(written(records), adapter, population=20)
    stepped = [one for one in records if one.stepped]
    assert [one.groups for one in found.rounds] == [one.to_dict()["groups"] for one in stepped]
    assert found.exact


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([Glad, Pooled]))
def test_no_gamma_no_adaptation(seed: int, kind: type[Glad] | type[Pooled]):
    server = Server(theta(), adapter=Glad(gamma=0.5), guard=None)
    records = [server.step(cohort) for cohort in some_rounds(seed)]
    if any(one.stepped for one in records):
        found = replay(written(records), kind(gamma=0), population=20)
        assert {s for row in scales(found) for s in row} == {1.0}
        assert found.replayed.mean == 1
        assert (found.replayed.slowed, found.replayed.sped) == (0, 0)
        assert (found.replayed.low, found.replayed.high) == (0, 0)


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(adapter=RULES, seed=st.integers(0, 2**32))
def test_sums_of_reported_norms_are_replayed_to_the_bit(
    adapter: Adapter, seed: int, tmp_path: Path
):
    """The server knows only sums of the weights there; the record has their Σw²."""
    server = Server(theta(), adapter=adapter, guard=None)
    records: list[Record] = []
    for cohort in some_rounds(seed):
        collector = Collector(server)
        for update in cohort:
            assert isinstance(update.delta, dict)
            norms = [float(x.double().square().sum()) for x in update.delta.values()]
            collector.take(update, norms)
        sums = collector.sums()
        records.append(server.step_sums(sums, population=20, clients=collector.entries))
    if any(found.stepped for found in records):
        lines = "".join(f"{json.dumps(one)}\n" for one in written(records))
        (tmp_path / "rounds.jsonl").write_text(lines)
        (tmp_path / "config.toml").unlink(missing_ok=True)
        found = replay(tmp_path, adapter)
        assert (found.exact, found.notes) == (True, ())
        assert replay(written(records), adapter).exact
        (tmp_path / "config.toml").write_text('[engine]\nreport = "norms"\n')
        assert replay(older(tmp_path), adapter, population=20).exact


def test_the_weights_behind_sums_are_found_again_from_the_shares():
    """Shares divided by the first would do it in nine of ten cohorts."""
    server, rng = Server({"a": torch.zeros(2)}, guard=None), np.random.default_rng(5)
    naive = 0
    for _ in range(200):
        collector = Collector(server)
        for size in rng.integers(1, 5000, size=rng.integers(2, 12)):
            collector.take(Update({"a": torch.ones(2)}, weight=float(size)), [2.0])
        found = server.step_sums(collector.sums(), clients=collector.entries)
        assert found.statistics is not None
        shares = [client["weight"] for client in found.clients]
        assert _sum_weights(shares) == found.statistics.weights
        given = np.array(shares) / shares[0]
        squares = float(given @ given) / math.fsum(given) ** 2
        naive += weights_of(len(given), squares) == found.statistics.weights
    assert 150 < naive < 195


# ------------------------------------------------------------------------------------- Flower


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedglad.flower.transport.time", Clock())


def reporting(client: Linear) -> Callable[..., Message]:
    """It tells its norms; one of them never trains."""

    def answer(message: Message, context: Context) -> Message:
        if client.partition == 2 and message.metadata.message_type == "train":
            raise OSError("the disk is full")
        return report_norms(message, context, client)

    return answer


@pytest.mark.parametrize("report", ["updates", "norms"])
@pytest.mark.parametrize("adapter", [Glad(gamma=0.5), Pooled(gamma=0.5), Glad(min_group=3)])
@pytest.mark.usefixtures("clock")
def test_the_folder_of_a_run_with_flower(report: Any, adapter: Adapter, tmp_path: Path):
    grid = LocalGrid([reporting(client) for client in clients(7)])
    strategy = FedGLAD(
        adapter=adapter,
        checkpoint_dir=tmp_path / "run",
        seed=3,
        report=report,
        fraction_evaluate=0.0,
        nodes="partition-id",
    )
    strategy.start(grid, record(model()), num_rounds=5, timeout=1)
    assert any("rejected" in c for r in Run(tmp_path / "run").rounds() for c in r["clients"])
    assert all(("weight_sq" in r) == (report == "norms") for r in Run(tmp_path / "run").rounds())
    found = own(tmp_path / "run")
    assert (found.exact, found.notes) == (True, ())
    other = replay(tmp_path / "run", FedExP(eps=0))
    assert [list(one.groups) for one in other.rounds] == [["all"]] * 5
    found = own(older(tmp_path / "run"))
    assert found.exact
    late = "Pooled reckons with 7 clients in every round: some may have come later"
    assert found.notes == ((late,) if isinstance(adapter, Pooled) else ())


@pytest.mark.usefixtures("clock")
def test_what_a_monitor_recorded(tmp_path: Path):
    strategy = Monitor(FedAvg(fraction_evaluate=0.0), checkpoint_dir=tmp_path / "run")
    strategy.start(LocalGrid(clients(5)), record(model()), num_rounds=4, timeout=1)
    assert own(tmp_path / "run").exact
    assert {line.stats.N for line in read(tmp_path / "run").lines} == {5}
    told = replay(tmp_path / "run", Pooled())
    older(tmp_path / "run")
    with pytest.raises(ReplayError, match="--population"):  # there is no checkpoint to tell
        replay(tmp_path / "run", Pooled())
    assert replay(tmp_path / "run", Pooled(), population=5).rounds == told.rounds
    assert replay(tmp_path / "run", Pooled(), population=5).rounds
    with pytest.raises(ReplayError, match=r"no checkpoint .* Flower"):
        replay(tmp_path / "run", Glad(min_group=3))


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_the_record_has(name: str, recorded: Path, tmp_path: Path):
    with pytest.raises(
        ReplayError, match=r"cannot be replayed: it .* These can: none, glad, fedexp"
    ):
        replay(recorded, REGISTRY[name]())
    result = call(recorded, "--set", f"adapter.name={name}")
    assert result.exit_code == 2
    why = {"fedlws": "norm of the model"}.get(name, "no inner products")
    assert why in said(result)
    # Its own rounds can be replayed with a rule that asks for less.
    folder = play(tmp_path / "run", {"adapter.name": name, "rounds": 2})
    assert len(replay(folder, Glad()).rounds) == 2
    result = call(folder, "--set", "adapter.name=glad")
    assert result.exit_code == 0
    assert "The record was not checked" in result.stdout


def test_min_group_without_a_checkpoint_asks_the_model(recorded: Path, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.toml", "rounds.jsonl"):
        (folder / name).write_bytes((recorded / name).read_bytes())
    before = torch.random.get_rng_state()
    found = replay(folder, Glad(min_group=7))
    assert torch.equal(before, torch.random.get_rng_state())
    assert found.rounds == replay(recorded, Glad(min_group=7)).rounds
    assert list(found.rounds[0].groups) == ["1", "3.weight", "3.bias"]
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("hidden = [6]", "hidden = [6, 6]"))
    with pytest.raises(ReplayError, match="other tensors than the record"):
        replay(folder, Glad(min_group=7))
    (folder / "config.toml").write_text(text.replace('name = "mlp"', 'name = "gone:Model"'))
    with pytest.raises(ReplayError, match=r"cannot be built: .*gone:Model"):
        replay(folder, Glad(min_group=7))
    assert replay(folder, Glad()).exact  # nothing else asks for the model
    with pytest.raises(ReplayError, match="only a run's folder tells"):
        replay(by_hand(), Glad(min_group=7))


def test_the_number_of_clients_of_own_data_must_be_given(recorded: Path, tmp_path: Path):
    for name, known in {"digits": 50, "mine:Data": None}.items():
        text = (recorded / "config.toml").read_text().replace('"digits"', f'"{name}"')
        (tmp_path / "config.toml").write_text(text)
        (tmp_path / "rounds.jsonl").write_bytes((recorded / "rounds.jsonl").read_bytes())
        assert read(tmp_path).lines[0].stats.N == 50  # in every round's own record
        assert known == read(older(tmp_path)).lines[0].stats.N
    with pytest.raises(ReplayError, match="population=N"):
        replay(tmp_path, Pooled())
    assert read(tmp_path, population=9).lines[0].stats.N == 9
    (tmp_path / "labels.json").write_text(json.dumps({"counts": [[1, 2]] * 11}))
    assert read(tmp_path).lines[0].stats.N == 11


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("adapter.gama=1", "unknown key 'adapter.gama': did you mean 'adapter.gamma'?"),
        ("adapter.gamma=-1", "Glad(gamma=-1.0): must be 0 or more"),
        ("adapter.gamma=much", "adapter.gamma = 'much': must be a number"),
        ("adapter.groups=block", "'tensor', 'layer', 'all'"),
        ("adapter.name=gald", "unknown adapter 'gald': did you mean 'glad'?"),
        ("adapter.name=builtins:object", "is not a dataclass"),
        ("adapter.name=fedglad.filters:Krum", "is not a fedglad.adapters.Adapter"),
        ("gamma=0.1", "unknown key 'gamma': did you mean 'adapter.gamma'?"),
        ("server.lr=0.1", "only keys of [adapter] can"),
        ("rounds=9", "only keys of [adapter] can"),
        ("adapter=glad", "is a section: set its keys"),
        ("sever.lr=0.1", "unknown key 'sever.lr'"),
        ("adapter.gamma", "write it as KEY=VALUE"),
    ],
)
def test_mistakes_in_settings(given: str, says: str, recorded: Path):
    result = call(recorded, "--set", given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in said(result)
    assert "Traceback" not in result.stderr


def test_a_key_that_the_runs_own_rule_does_not_have(tmp_path: Path):
    folder = play(tmp_path / "run", {"adapter.name": "none", "rounds": 2})
    result = call(folder, "--set", "adapter.gamma=0.1")
    assert result.exit_code == 2
    assert "unknown key 'adapter.gamma'" in said(result)
    assert "(adapter.name=none)" in said(result)
    assert call(folder, "--set", "adapter.gamma=0.1", "--set", "adapter.name=glad").exit_code == 0


def without(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def edited(change: Callable[[list[Any]], Any]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        rounds = Run(folder).rounds()
        change(rounds)
        text = "".join(f"{json.dumps(told)}\n" for told in rounds)
        (folder / "rounds.jsonl").write_text(text)

    return edit


def garbled(folder: Path) -> None:
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    lines[2] = lines[2][:40] + "\n"
    (folder / "rounds.jsonl").write_text("".join(lines))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (without("rounds.jsonl"), "it has no rounds.jsonl"),
    "empty": (lambda f: (f / "rounds.jsonl").write_text(""), "no round is recorded yet"),
    "a broken line": (garbled, "line 3 is not JSON"),
    "no configuration": (without("config.toml"), "--set adapter.name="),
    "broken TOML": (lambda f: (f / "config.toml").write_text("[adapter"), "config.toml cannot be"),
    "no tensors": (edited(lambda r: r[1].update(tensors={})), "round 2 has no tensors"),
    "no such field": (edited(lambda r: r[1].pop("tensors")), "round 2 .* has no 'tensors'"),
    "no number": (
        edited(lambda r: r[4]["tensors"]["3.bias"].update(mean_sq="1.0")),
        "round 5 .* '1.0' is not a finite number",
    ),
    "NaN": (edited(lambda r: r[0]["tensors"]["3.bias"].update(sum_sq=math.nan)), "round 1 .* nan"),
    "not an object": (edited(lambda r: r.__setitem__(2, 7)), "round 3 .* damaged"),
    "no clients": (edited(lambda r: r[0].update(clients=[])), "names no clients"),
    "no groups": (edited(lambda r: r[0].update(groups={})), "has no groups"),
    "another model": (edited(lambda r: r[3]["tensors"].pop("3.bias")), "of several runs"),
    "twice": (edited(lambda r: r.append(r[0])), "round 1 follows round 5"),
    "no name": (edited(lambda r: r[1].update(round="x")), "its number is 'x'"),
    "none stepped": (
        edited(lambda r: [told.update(status="skipped") for told in r]),
        "all rounds were skipped",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder(what: str, recorded: Path, tmp_path: Path):
    for name in ("config.toml", "rounds.jsonl"):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    damage, says = DAMAGE[what]
    damage(tmp_path)
    result = call(tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(says, said(result)), said(result)
    assert "Traceback" not in result.stderr


def test_no_folder(tmp_path: Path):
    result = call(tmp_path / "gone")
    assert result.exit_code == 2
    assert "there is no such folder" in said(result)


def test_a_line_that_was_cut_off_is_told(recorded: Path, tmp_path: Path):
    text = (recorded / "rounds.jsonl").read_text()
    (tmp_path / "rounds.jsonl").write_text(text[:-40])
    (tmp_path / "config.toml").write_bytes((recorded / "config.toml").read_bytes())
    result = call(tmp_path)
    assert result.exit_code == 0
    assert "Note: the last line of rounds.jsonl is cut off: 4 rounds are there." in result.stdout
    assert "4 rounds that stepped" in result.stdout


def test_without_a_configuration_a_rule_can_be_given(recorded: Path, tmp_path: Path):
    (tmp_path / "rounds.jsonl").write_bytes((recorded / "rounds.jsonl").read_bytes())
    result = call(tmp_path, "--set", "adapter.name=glad")
    assert result.exit_code == 0
    assert "without config.toml" in result.stdout
    assert "Largest difference: none" in result.stdout


# ------------------------------------------------------------------------------------- the command


def test_the_command_shows_a_summary_and_the_rounds_that_differ_most(recorded: Path):
    result = call(recorded, "--set", "adapter.gamma=0.3")
    assert result.exit_code == 0, result.stderr
    out = result.stdout
    assert "Checked: its own settings give exactly the recorded factors." in out
    assert "name=glad groups=tensor min_group=1 gamma=0.02 beta=0.9" in out
    assert "not a forecast" in out
    found = replay(recorded, Glad(gamma=0.3))
    row = next(x for x in out.splitlines() if x.startswith("gamma=0.3")).split()
    means = [one.replayed.mean for one in found.rounds]
    assert row[1:5] == [f"{x:.3f}" for x in (fmean(means), pstdev(means))] + [
        f"{found.replayed.least:.3f}",
        f"{found.replayed.most:.3f}",
    ]
    assert row[5:7] == [str(sum(m < 1 for m in means)), str(sum(m > 1 for m in means))]
    most = max(found.rounds, key=lambda one: abs(one.difference or 0))
    assert f"{abs(most.difference or 0):.3f} {most.where}, round {most.round + 1}." in out
    table = out[out.index("Rounds that differ most") :].splitlines()[2:]
    assert table[0].split()[0] == str(most.round + 1)
    assert len(table) == sum(one.difference != 0 for one in found.rounds)
    every = call(recorded, "--set", "adapter.gamma=0.3", "--all").stdout
    rows = every[every.index("All rounds") :].splitlines()[2:]
    assert [x.split()[0] for x in rows] == ["1", "2", "3", "4", "5"]


def test_as_it_was(recorded: Path):
    result = call(recorded)
    assert result.exit_code == 0
    assert "Largest difference: none." in result.stdout
    assert "Rounds that differ" not in result.stdout


def test_a_grid_is_a_row_each(recorded: Path):
    result = call(recorded, "--grid", "adapter.gamma=0,0.1,inf", "--set", "adapter.groups=layer")
    assert result.exit_code == 0, result.stderr
    rows = [x for x in result.stdout.splitlines() if x.startswith("groups=layer")]
    assert [x.split()[1] for x in rows] == [f"gamma={g}" for g in ("0", "0.1", "inf")]
    assert rows[0].split()[2:6] == ["1.000", "0.000", "1.000", "1.000"]
    both = call(recorded, "--grid", "adapter.gamma=0,1", "--set", "adapter.gamma=1")
    assert both.exit_code == 2
    assert "both set and in a grid" in said(both)


def test_json_and_files(recorded: Path, tmp_path: Path):
    args = ("--grid", "adapter.gamma=0.1,inf", "--json")
    result = call(recorded, *args, "--out", tmp_path / "all.json")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "all.json").read_text() == result.stdout

    def strict(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    told = json.loads(result.stdout, parse_constant=strict)
    assert [one["settings"] for one in told["replays"]] == [
        "adapter.gamma=0.1",
        "adapter.gamma=inf",
    ]
    found = replay(recorded, Glad(gamma=0.1))
    assert told["replays"][0]["rounds"][3]["groups"] == found.rounds[3].groups
    assert told["replays"][1]["adapter"]["gamma"] == "inf"
    assert not told["replays"][0]["exact"]

    call(recorded, *args, "--out", tmp_path / "rounds.csv")
    with open(tmp_path / "rounds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["settings"], row["round"]) for row in rows] == [
        (f"adapter.gamma={g}", str(t)) for g in ("0.1", "inf") for t in range(5)
    ]
    assert float(rows[3]["replayed_mean"]) == found.rounds[3].replayed.mean
    assert int(rows[3]["at_upper_bound"]) == len(found.rounds[3].high)
    assert float(rows[3]["difference"]) == found.rounds[3].difference

    result = call(recorded, "--out", tmp_path / "rounds.xlsx")
    assert result.exit_code == 2
    assert "ends in .csv or .json" in said(result)
    assert call(recorded, "--out", tmp_path / "no" / "x.csv").exit_code == 2


def test_names_are_shown_and_not_read_as_markup(tmp_path: Path):
    rounds = [line(t, {"[red]a[/]": (4.0, 1.0 + t), "b": (4.0, 1.0)}) for t in range(3)]
    text = "".join(f"{json.dumps(told)}\n" for told in rounds)
    (tmp_path / "rounds.jsonl").write_text(text)
    result = call(tmp_path, "--set", "adapter.name=glad")
    assert result.exit_code == 0, result.stderr
    assert "[red]a[/]" in result.stdout


def test_a_record_that_its_own_settings_do_not_give_is_told(recorded: Path, tmp_path: Path):
    for name in ("config.toml", "rounds.jsonl"):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    edited(lambda r: r[2]["groups"]["1.bias"].update(scale=0.5))(tmp_path)
    result = call(tmp_path, "--set", "adapter.gamma=0")
    assert result.exit_code == 0
    assert "do not give the recorded factors in 1 of 5 rounds, first in round 3" in said(result)
    assert "Checked" not in result.stdout


def test_bounds():
    assert Glad(gamma=0.25).bounds(0) == (-math.inf, math.inf)
    assert Glad(gamma=0.25).bounds(2) == (0.5, 1.5)
    assert Glad(gamma=0.25).bounds(8) == (0, 3)
    assert Glad(gamma=0).bounds(8) == (-math.inf, math.inf)
    assert Glad(gamma=math.inf).bounds(8) == (0, math.inf)
    assert FedExP().bounds(3) == (1, math.inf)
    assert FedHyper(bound=4).bounds(3) == (0.25, 4)
    assert Fixed(value=2).bounds(3) == (-math.inf, math.inf)


def test_a_recording_is_read_once_and_replayed_often(recorded: Path):
    found = read(recorded)
    assert isinstance(found, Recording)
    assert os.fspath(found.folder or "") == str(recorded)
    with pytest.raises(ConfigError, match="only keys of"):
        rule(found.config, {"server.lr": 1})
    for gamma in (0.0, 0.1):
        adapter = rule(found.config, {"adapter.gamma": gamma})
        assert adapter == Glad(gamma=gamma)
        assert replay(found, adapter) == replay(recorded, adapter)


def test_a_number_of_clients_that_cannot_be(recorded: Path, tmp_path: Path):
    with pytest.raises(ReplayError, match=r"the run tells of \d+ clients, not 3: leave it out"):
        read(recorded, population=3)
    untold = shutil.copytree(recorded, tmp_path / "untold")
    for name in ("labels.json", "config.toml"):
        (untold / name).unlink()
    shutil.rmtree(untold / "checkpoints")
    with pytest.raises(ReplayError, match="the run tells of 50 clients, not 1: leave it out"):
        read(untold, population=1)
    older(untold)
    with pytest.raises(ReplayError, match=r"clients: there are more than 1"):
        read(untold, population=1)


def test_a_file_that_cannot_be_written_is_said(recorded: Path, tmp_path: Path):
    result = call(recorded, "--out", tmp_path / "no/a.csv")
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in said(result)


@pytest.mark.parametrize("report", ["updates", "norms"])
def test_the_number_of_clients_may_grow(report: str, tmp_path: Path):
    """Each round's record has the N that its rule was given."""
    server, records = Server(theta(), adapter=Pooled(gamma=0.5), guard=None), list[Record]()
    for t, cohort in enumerate(some_rounds(3)):
        if report == "updates":
            records.append(server.step(cohort, population=10 + t))
            continue
        collector = Collector(server)
        for update in cohort:
            assert isinstance(update.delta, dict)
            collector.take(
                update, [float(x.double().square().sum()) for x in update.delta.values()]
            )
        sums = collector.sums()
        records.append(server.step_sums(sums, population=10 + t, clients=collector.entries))
    assert sum(one.stepped for one in records) > 2
    lines = "".join(f"{json.dumps(one)}\n" for one in written(records))
    (tmp_path / "rounds.jsonl").write_text(lines)
    found = read(tmp_path)
    assert [line.stats.N for line in found.lines] == [
        10 + t for t, one in enumerate(records) if one.stepped
    ]
    assert replay(found, Pooled(gamma=0.5)).exact
    with pytest.raises(ReplayError, match="the run tells of 14 clients, not 12"):
        read(tmp_path, population=12)


def test_a_run_that_is_resumed_meanwhile_is_read_at_one_moment(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    plain = reader.opened

    def counted(path: Path) -> Any:
        opened.append(path.name)
        return plain(path)

    monkeypatch.setattr(reader, "opened", counted)
    assert replay(recorded, Glad()).exact
    assert opened.count("rounds.jsonl") == 1


@pytest.mark.parametrize("value", ["12", 1.5, True, [], -1])
def test_a_population_that_is_no_number_is_damage(value: Any, recorded: Path, tmp_path: Path):
    for name in ("config.toml", "rounds.jsonl"):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    edited(lambda r: r[1].update(population=value))(tmp_path)
    with pytest.raises(ReplayError, match="round 2 "):
        read(tmp_path)
