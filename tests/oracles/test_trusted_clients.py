"""Trust in clients as the server has it: in the record, in the checkpoint, as a filter."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedglad import Glad, Server, Update
from fedglad.filters import Distrust
from fedglad.records import Several
from fedglad.server import Collector
from fedglad.trust import Kept, Seen, Trust

SIZE = 40
FORMS = pytest.mark.parametrize(
    "form", [list, iter, lambda updates: iter([Several(updates)])], ids=["list", "iter", "several"]
)
Form = Callable[..., Iterable[Any]]


def direction(t: int, k: int) -> torch.Tensor:
    """What an honest client sends: all have the larger part in common."""
    rng = np.random.default_rng([3, t, k])
    return torch.tensor(1 + 0.3 * rng.normal(size=SIZE), dtype=torch.float32)


def cohort(t: int, hostile: float = -1.0, count: int = 8) -> list[Update]:
    """Client 0 is the hostile one: its update times a factor."""
    factors = [hostile, *[1.0] * (count - 1)]
    return [
        Update({"w": direction(t, k) * factor}, client=k, loss=1.0)
        for k, factor in enumerate(factors)
    ]


def server(**settings: Any) -> Server:
    return Server({"w": torch.zeros(SIZE)}, adapter=Glad(), **settings)


@FORMS
def test_a_client_that_sends_the_opposite_is_flagged_and_still_counts(form: Form):
    tried, alone = server(), server(trust=None)
    for t in range(3):
        record = tried.step(form(cohort(t)))
        alone.step(form(cohort(t)))
        flags = {client["id"]: client.get("flags", []) for client in record.clients}
        assert flags == {0: ["opposed"], **{k: [] for k in range(1, 8)}}
        assert record.clients[0]["trust"] < 0.5
        assert all(client["trust"] > 0.5 for client in record.clients[1:])
    assert torch.equal(tried.params["w"], alone.params["w"])  # it only watches


def test_the_server_judges_by_what_it_has_seen():
    record = server().step(cohort(0))
    rows = np.array([update.delta["w"].numpy() for update in cohort(0)])  # type: ignore[index]
    seen = Seen(
        clients=range(8), norms=np.linalg.norm(rows, axis=1), losses=np.ones(8), sample=rows
    )
    verdicts, _ = Trust().judge(seen, Kept())
    scores = [round(verdict.score, 4) for verdict in verdicts]
    assert [client["trust"] for client in record.clients] == pytest.approx(scores, abs=1e-3)


@FORMS
def test_distrust_leaves_the_flagged_out_and_says_why(form: Form):
    tried = server(filter=Distrust())
    record = tried.step(form(cohort(0)))
    assert record.rejected == {0: "left out by Distrust: opposed"}
    mean = torch.stack([direction(0, k) for k in range(1, 8)]).mean(dim=0)
    torch.testing.assert_close(tried.params["w"], -mean)


def test_a_copy_and_a_boosted_update_are_flagged():
    updates = cohort(0, hostile=1.0)
    updates[1] = Update(updates[2].delta, client=1, loss=1.0)
    updates[7] = Update({"w": 10 * direction(0, 7)}, client=7, loss=1.0)
    flags = [client.get("flags") for client in server().step(updates).clients]
    assert flags == [None, ["copied"], ["copied"], None, None, None, None, ["boosted"]]


def test_of_a_large_model_a_sample_is_enough():
    shapes = {"a": (300, 100), "b": (7,), "c": (50, 1000)}
    base = {name: torch.zeros(shape) for name, shape in shapes.items()}
    rng = np.random.default_rng(5)
    common = {n: torch.tensor(rng.normal(size=s), dtype=torch.float32) for n, s in shapes.items()}

    def client(k: int) -> Any:
        own = np.random.default_rng(k)
        noise = {
            n: torch.tensor(own.normal(size=s), dtype=torch.float32) for n, s in shapes.items()
        }
        sign = -1 if k == 3 else 1
        return {n: sign * (common[n] + noise[n]) for n in shapes}

    for model in (False, True):
        tried = Server(base)
        sent = [client(k) for k in range(8)]
        updates = [
            Update(model={n: -x for n, x in g.items()}, client=k) if model else Update(g, client=k)
            for k, g in enumerate(sent)
        ]
        flagged = [c["id"] for c in tried.step(updates).clients if "flags" in c]
        assert flagged == [3]
        packed = [Update(tried.layout.pack(g), client=k) for k, g in enumerate(sent)]
        record = Server(base).step(packed)
        assert [c["id"] for c in record.clients if "flags" in c] == [3]


def test_what_is_kept_goes_through_a_checkpoint(tmp_path: Path):
    whole = server()
    for t in range(3):
        whole.step(cohort(t))
    whole.save(tmp_path / "state")
    again = Server.load(tmp_path / "state", {"w": torch.zeros(SIZE)})
    expected = whole.step(cohort(3, hostile=1.0)).clients
    assert again.step(cohort(3, hostile=1.0)).clients == expected
    assert expected[0]["trust"] < expected[1]["trust"]  # its past counts


def test_a_state_without_trust_is_loaded():
    old = server(trust=None)
    old.step(cohort(0))
    saved = old.state_dict()
    del saved["trust"]
    tried = server()
    tried.load_state_dict(saved)
    assert "trust" in tried.step(cohort(1)).clients[0]


def test_where_only_sums_are_seen_nobody_is_judged():
    tried = server()
    collector = Collector(tried)
    for update in cohort(0):
        collector.take(update, [float(update.delta["w"].square().sum())])  # type: ignore[index]
    record = tried.step_sums(collector.sums(), clients=collector.entries)
    assert not any("trust" in client for client in record.clients)


def test_a_skipped_round_and_a_rejected_update_leave_no_trace():
    tried, clean = server(min_clients=4), server(min_clients=4)
    for each in (tried, clean):
        each.step(cohort(0))
    assert not tried.step(cohort(1)[:3]).stepped
    nan = Update({"w": torch.full((SIZE,), float("nan"))}, client=9)
    tried.step([*cohort(2), nan])
    clean.step(cohort(2))
    assert tried.state_dict()["trust"] == clean.state_dict()["trust"]
