"""Estimators of the mean of all clients' updates, by hand and against float64."""

import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedglad import Glad, Guard, Server, Update
from fedglad.adapters import Aligned, Fixed
from fedglad.clients import FedDyn, FedNova, Plain, Scaffold
from fedglad.core import checkpoint, vectors
from fedglad.core.checkpoint import CheckpointError
from fedglad.core.memory import Memories
from fedglad.core.threads import threads
from fedglad.estimators import MIFA, REGISTRY, VARP, Estimator, NoEstimator, Stale, Strat
from fedglad.filters import Filter, Median, MultiKrum, NormClip
from fedglad.optimizers import Adam, DoG, FedEve
from fedglad.records import Bundle, Several
from fedglad.samplers import MD, AdaFL, PowerOfChoice, Uniform
from fedglad.server import Collector, estimated
from fedglad.server.compatibility import refuse
from fedglad.weights import Equal, FedAdp, Optimal, Samples

ROWS = [cls for cls in REGISTRY.values() if cls is not NoEstimator]


def update(client: Any, *g: float, weight: float = 1.0) -> Update:
    return Update({"w": torch.tensor(g)}, client=client, weight=weight)


def at_zero(estimator: Estimator | None, size: int = 1, **settings: Any) -> Server:
    """A server at 0 that steps by −ĝ, and takes what it is given."""
    given: dict[str, Any] = {"guard": None, **settings}
    return Server({"w": torch.zeros(size)}, estimator=estimator, **given)


def stepped_by(server: Server, *updates: Update, population: int = 4, **given: Any) -> Any:
    """ĝ of a round: by what θ has moved."""
    before = server.params["w"].double()
    record = server.step(updates, population=population, **given)
    assert record.stepped, record.reason
    moved = (before - server.params["w"].double()).tolist()
    return moved[0] if len(moved) == 1 else moved


def test_varp_by_hand():
    server = at_zero(VARP())
    # N = 4, nothing is remembered: ĝ = (8 + 4)/2
    assert stepped_by(server, update(0, 8.0), update(1, 4.0)) == 6
    # y = 8, 4, –, –: ȳ = 12/4 = 3; ĝ = 3 + ((2 − 8) + (6 − 0))/2
    assert stepped_by(server, update(0, 2.0), update(2, 6.0)) == 3
    # y = 2, 4, 6, –: ȳ = 12/4 = 3; ĝ = 3 + ((10 − 4) + (2 − 6))/2
    assert stepped_by(server, update(1, 10.0), update(2, 2.0)) == 4
    # y = 2, 10, 2, –: ȳ = 14/4; ĝ = 3.5 + (1 − 2)
    assert stepped_by(server, update(0, 1.0)) == 2.5


def test_stale_by_hand():
    server = at_zero(Stale(beta=0.5))
    # as varp, with half of the memory: 6; 0.5·3 + ((2 − 4) + 6)/2; 0.5·3 + ((10 − 2) + (2 − 3))/2
    assert stepped_by(server, update(0, 8.0), update(1, 4.0)) == 6
    assert stepped_by(server, update(0, 2.0), update(2, 6.0)) == 3.5
    assert stepped_by(server, update(1, 10.0), update(2, 2.0)) == 5


def test_varp_with_unequal_weights_by_hand():
    server = at_zero(VARP())
    # weights 3 and 1: ĝ = (3·4 + 1·8)/4
    rounds = [[update("a", 4.0, weight=3), update("b", 8.0, weight=1)]]
    assert stepped_by(server, *rounds[0]) == 5
    # Y = 3·4 + 1·8 = 20, A = 4 of 2 clients, so that the mean weight is 2: ȳ = 20/(4·2) = 2.5
    # w = 3/5, 2/5: ĝ = 2.5 + 3/5·(6 − 4) + 2/5·(3 − 0)
    second = update("a", 6.0, weight=3), update("c", 3.0, weight=2)
    assert stepped_by(server, *second) == pytest.approx(4.9)
    # Y = 3·6 + 8 + 2·3 = 32, A = 6 of 3: ȳ = 32/(4·2) = 4; b comes with another weight
    assert stepped_by(server, update("b", 5.0, weight=4)) == pytest.approx(4 + 5 - 8)
    # Y = 18 + 4·5 + 6 = 44, A = 9 of 3: ȳ = 44/(4·3)
    assert stepped_by(server, update("d", 1.0, weight=1)) == pytest.approx(44 / 12 + 1)


def test_mifa_by_hand():
    server = at_zero(MIFA())
    # y = 8, 4; then 2, 4, 6; then 2, 10, 2: the means of those seen
    assert stepped_by(server, update(0, 8.0), update(1, 4.0)) == 6
    assert stepped_by(server, update(0, 2.0), update(2, 6.0)) == 4
    assert stepped_by(server, update(1, 10.0), update(2, 2.0)) == pytest.approx(14 / 3)
    # weights 3 and 1: (3·4 + 8)/4 = 5; then c with 4: (20 + 4·1)/8
    server = at_zero(MIFA())
    assert stepped_by(server, update(0, 4.0, weight=3), update(1, 8.0)) == 5
    assert stepped_by(server, update(2, 1.0, weight=4)) == 3


def test_mifa_needs_no_population():
    assert at_zero(MIFA()).step([update(0, 1.0)]).stepped


def test_strat_by_hand():
    server = at_zero(Strat(), size=2)
    # (4, 0) and (2, 0) are alike, (0, 6) is not: p = 2/3, 1/3; y = (3, 0), (0, 6): as FedAvg
    first = stepped_by(server, update(0, 4.0, 0.0), update(1, 0.0, 6.0), update(2, 2.0, 0.0))
    assert first == pytest.approx([2, 2])
    # one of the first kind: p = 3/4, 1/4; y = (8, 0), and (0, 6) as it was
    assert stepped_by(server, update(5, 8.0, 0.0)) == pytest.approx([6, 1.5])
    # (−1, 0) is like neither: p = 3/5, 1/5, 1/5; y = (8, 0), (0, 6), (−1, 0)
    assert stepped_by(server, update(6, -1.0, 0.0)) == pytest.approx([4.8 - 0.2, 1.2])
    # (0, 1) twice, weights 1 and 3: p = 3/7, 3/7, 1/7; y_1 = (0, 1·1/4 + 5·3/4) = (0, 4)
    last = stepped_by(server, update(7, 0.0, 1.0), update(8, 0.0, 5.0, weight=3))
    assert last == pytest.approx([24 / 7 - 1 / 7, 12 / 7])


def test_a_stratum_is_the_nearest_and_the_last_ones_are_shared():
    # at most two strata: the third kind goes to the nearest, (0, 1), at a cosine of 0
    server = at_zero(Strat(most=2), size=2)
    for g in ([1.0, 0.0], [0.0, 1.0]):
        stepped_by(server, update(0, *g))
    # p = 1/3, 2/3: (1, 0)/3 + 2/3·(−0.6, 0.8)
    assert stepped_by(server, update(1, -0.6, 0.8)) == pytest.approx([1 / 3 - 0.4, 1.6 / 3])
    # cosine 0.5 to the direction of (0, 1) + (−0.6, 0.8), which is (−0.316, 0.949): now its third
    state = server.state_dict()["tensors"]
    assert state["estimator/state/directions"].tolist() == pytest.approx(
        np.array([[1.0, 0.0], [-0.6, 1.8]])
    )
    assert state["estimator/state/weights"].tolist() == [1, 2]


def test_strat_looks_at_the_last_matrix_unless_told_otherwise():
    model = {"a": torch.zeros(1, 2), "b": torch.zeros(1, 2), "c": torch.zeros(2)}

    def cohort(client: int, a: list[float], b: list[float]) -> Update:
        delta = {"a": torch.tensor([a]), "b": torch.tensor([b]), "c": torch.ones(2)}
        return Update(delta, client=client)

    rounds = [[cohort(0, [1.0, 0.0], [1.0, 0.0])], [cohort(1, [0.0, 1.0], [1.0, 0.0])]]
    for layer, strata in {"": 1, "b": 1, "a": 2, "c": 1}.items():
        server = Server(model, estimator=Strat(layer=layer))
        for updates in rounds:
            server.step(updates)
        assert len(server.state_dict()["tensors"]["estimator/state/weights"]) == strata
    with pytest.raises(ValueError, match=r"Strat\(layer='d'\): the model has no such parameter"):
        Server(model, estimator=Strat(layer="d"))


def test_random_strata_are_those_of_the_ids():
    server = at_zero(Strat(strata="random", most=3), size=2)
    of = {k: server.estimator._drawn(k) for k in range(12)}  # type: ignore[union-attr]
    assert set(of.values()) == {0, 1, 2}
    a, b = next((a, b) for a, b in combinations(of, 2) if of[a] == of[b])
    other = next(k for k in of if of[k] != of[a])
    # opposite updates of one stratum, and another: p = 2/3, 1/3; then b alone: p = 3/4, 1/4
    first = stepped_by(server, update(a, 4.0, 0.0), update(b, -2.0, 0.0), update(other, 0.0, 6.0))
    assert first == pytest.approx([2 / 3, 2])
    assert stepped_by(server, update(b, 1.0, 0.0)) == pytest.approx([0.75, 1.5])


def test_an_update_of_zeros_opens_no_stratum():
    server = at_zero(Strat(), size=2)
    stepped_by(server, update(0, 1.0, 0.0))
    # p = 1: y is now 0
    assert stepped_by(server, update(1, 0.0, 0.0)) == [0, 0]
    assert stepped_by(server, update(2, 2.0, 0.0)) == [2, 0]


@pytest.mark.parametrize("cls", ROWS)
def test_a_skipped_round_changes_no_memory(cls: Any):
    rounds = [[update(0, 8.0), update(1, 4.0)], [update(0, 2.0), update(2, 6.0)]]
    alone, disturbed = (at_zero(cls(), min_clients=2) for _ in range(2))
    for updates in rounds:
        alone.step(updates, population=4)
        assert (
            disturbed.step([update(3, 1.0), update(4, math.nan)], population=4).status == "skipped"
        )
        disturbed.step(updates, population=4)
        assert disturbed.params["w"].equal(alone.params["w"])
    assert saved_bits(disturbed) == saved_bits(alone)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"filter": NormClip(max_norm=2.0)}, 0.25), ({"guard": Guard(norm=2.0)}, None)],
    ids=["filter", "guard"],
)
def test_of_a_cut_update_as_much_is_remembered_as_was_taken(
    settings: dict[str, Any], kept: float | None
):
    server = at_zero(VARP(), **settings)
    for k in range(3):  # what is usual: 2
        server.step([update(k, 2.0)], population=4)
    record = server.step([update(3, 8.0)], population=4)
    kept = float(kept or record.clients[0]["clipped"])
    assert kept < 1
    # y = 2, 2, 2, 8·kept; client 3 sends 1: ĝ = (6 + 8·kept)/4 + 1 − 8·kept
    expected = (6 + 8 * kept) / 4 + 1 - 8 * kept
    assert stepped_by(server, update(3, 1.0)) == pytest.approx(expected)
    (vector,) = (x for n, x in server.state_dict()["tensors"].items() if n.endswith("kept/1002"))
    assert float(vector[0]) == 2


def test_the_factors_are_those_of_the_cohort_and_scale_the_estimate():
    rounds = [[update(0, 8.0), update(1, 4.0)], [update(0, 2.0), update(2, 6.0)]]
    plain, repaired = (at_zero(e, adapter=Fixed(value=0.5)) for e in (None, VARP()))
    for updates, estimate in zip(rounds, (6, 3), strict=True):
        at = float(repaired.params["w"])
        expected, record = plain.step(updates, population=4), repaired.step(updates, population=4)
        assert record.to_dict() == expected.to_dict()
        assert at - float(repaired.params["w"]) == estimate / 2


def test_dog_measures_what_it_steps_by():
    # reach 0.5 at θ = 0: d = 0.5. ĝ = 6: G = 36, θ = −0.5/6 · 6 = −0.5, so that d stays 0.5
    server = at_zero(VARP(), optimizer=DoG(reach=0.5))
    assert stepped_by(server, update(0, 8.0), update(1, 4.0)) == 0.5
    # ȳ = 12/4, ĝ = 3 + ((2 − 8) + (6 − 0))/2 = 3, where ḡ = 4: G = 36 + 9
    moved = stepped_by(server, update(0, 2.0), update(2, 6.0))
    assert moved == pytest.approx(0.5 / math.sqrt(45) * 3)


def test_a_gain_by_the_cohorts_disagreement_is_refused():
    with pytest.raises(ValueError, match=r"FedEve follows the cohort's mean .* of what VARP puts"):
        at_zero(VARP(), optimizer=FedEve())


def test_updates_that_take_several_stretches_are_those_of_one(monkeypatch: pytest.MonkeyPatch):
    rounds = [[0, 1, 2], [1, 3, 4], [0, 3, 1]]
    made: list[list[float]] = []
    for stretch, together, workers in ((1 << 17, 8, 1), (64, 2, 1), (64, 2, 3)):
        monkeypatch.setattr(vectors, "STRETCH", stretch)
        monkeypatch.setattr(vectors, "LARGE", 0)
        monkeypatch.setattr(estimated, "TOGETHER", together)
        rng = torch.Generator().manual_seed(1)
        server = at_zero(VARP(), size=1000)
        with threads(workers):
            for cohort in rounds:
                sent = [update(k, *torch.randn(1000, generator=rng).tolist()) for k in cohort]
                assert server.step(sent, population=5).stepped
        made.append(server.params["w"].tolist())
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("where", [0, 20, -1])  # length, header, the last number
def test_a_kept_update_that_is_damaged_stops_the_round(where: int):
    server = at_zero(VARP())
    server.step([update(0, 8.0), update(1, 4.0)], population=4)
    assert server._estimated
    path = min(server._estimated.store.folder.rglob("*.safetensors"))
    damaged = bytearray(path.read_bytes())
    damaged[where] ^= 1
    path.write_bytes(damaged)
    before = server.params["w"].clone()
    with pytest.raises(OSError, match="is damaged"):
        server.step([update(0, 2.0), update(2, 6.0)], population=4)
    assert torch.equal(server.params["w"], before)
    assert stepped_by(server, update(1, 3.0)) == 12 / 4 + 3 - 4  # another one is whole


def test_a_kept_update_is_the_file_that_the_library_writes(tmp_path: Path):
    vector = torch.randn(1000)
    ours, theirs = Memories(tmp_path / "ours"), tmp_path / "theirs.safetensors"
    ours.propose(7, 0, {"update": vector})
    ours.settle(0, [7], [7])
    (path,) = (tmp_path / "ours").rglob("*.safetensors")
    checkpoint.write(theirs, {"update": vector}, {"client": 7, "after": 1})  # as it was before
    assert path.read_bytes()[-4000:] == theirs.read_bytes()[-4000:]
    assert checkpoint.checksum(path) == checkpoint.checksum(theirs)
    assert path.stat().st_mode & 0o777 == theirs.stat().st_mode & 0o777 == 0o600
    assert torch.equal(load_file(path)["update"], vector)
    theirs.replace(path)
    assert torch.equal(ours.read(7, 1)["update"], vector)
    reader = ours.opened(7, 1)
    reader.read(there := torch.empty(1000))
    reader.finish()
    reader.close()
    assert torch.equal(there, vector)


def test_a_running_mean_of_an_adapter_is_that_of_the_cohorts():
    rounds = [[update(0, 8.0), update(1, 4.0)], [update(0, 2.0), update(2, 6.0)]]
    plain, repaired = (at_zero(e, adapter=Aligned()) for e in (None, VARP()))
    for updates in [*rounds, *rounds]:
        assert repaired.step(updates, population=4).gsi == plain.step(updates, population=4).gsi
    directions = [s.state_dict()["tensors"]["direction/w"] for s in (plain, repaired)]
    assert directions[0].equal(directions[1])


# ---------------------------------------------------------------------------------- float64 twins


class Net(nn.Module):
    """Two layers, BatchNorm between them, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 4)
        self.twin = nn.Linear(5, 4, bias=False)
        self.twin.weight = self.last.weight


def numbers(*name: int) -> np.random.Generator:
    return np.random.default_rng([29, *name])


def made(model: nn.Module, t: int, k: int, form: int, weight: float) -> Update:
    """An update of client k in one of the forms that one may have."""
    rng = numbers(t, k)
    parameters = dict(model.named_parameters())
    drawn = {n: 0.1 * (k + 1) * rng.standard_normal(p.shape) for n, p in parameters.items()}
    delta = {n: torch.as_tensor(x, dtype=torch.float32) for n, x in drawn.items()}
    if form == 0:
        return Update(delta, client=k, weight=weight)
    if form == 1:
        return Update({n: x.half() for n, x in delta.items()}, client=k, weight=weight)
    trained = {n: x.clone() for n, x in model.state_dict().items()}
    for n, x in delta.items():
        trained[n] -= x
    trained["twin.weight"] = trained["last.weight"]
    trained["norm.running_mean"] += k + 1
    trained["norm.num_batches_tracked"] += 7
    return Update(model=trained, client=k, weight=weight)


@dataclass
class Twin:
    """The formulas in float64, with every client's last update at hand."""

    N: int
    beta: float
    y: dict[Any, np.ndarray] = field(default_factory=dict[Any, np.ndarray])
    a: dict[Any, float] = field(default_factory=dict[Any, float])

    def mean(self, cohort: dict[Any, tuple[np.ndarray, float]]) -> np.ndarray:
        whole = sum(a for _, a in cohort.values())
        nothing = np.zeros_like(next(iter(cohort.values()))[0])
        average = nothing
        if self.y:
            total = sum(self.a[k] * y for k, y in self.y.items())
            average = total / (self.N * sum(self.a.values()) / len(self.a))
        terms = (
            a / whole * (g - self.beta * self.y.get(k, nothing)) for k, (g, a) in cohort.items()
        )
        return self.beta * average + sum(terms, nothing)

    def latest(self) -> np.ndarray:
        return np.sum([self.a[k] * y for k, y in self.y.items()], axis=0) / sum(self.a.values())

    def follow(self, cohort: dict[Any, tuple[np.ndarray, float]]) -> None:
        for k, (g, a) in cohort.items():
            self.y[k], self.a[k] = g, a


def vector(server: Server, one: Update) -> np.ndarray:
    """θ − θ_k in float64, as the server has it."""
    arrays = one.delta if one.model is None else one.model
    assert isinstance(arrays, dict)
    parts = {n: arrays[n].float() for n in server.layout.names}
    if one.model is not None:
        parts = {n: server.params[n] - x for n, x in parts.items()}
    return np.concatenate([parts[n].double().numpy().ravel() for n in server.layout.names])


@pytest.mark.parametrize("weights", [(1, 1, 1), (10, 40, 25)], ids=["equal", "unequal"])
@pytest.mark.parametrize("estimator", [VARP(), Stale(beta=0.3), MIFA()])
def test_many_rounds_against_float64(estimator: Estimator, weights: Sequence[float]):
    model = Net()
    server = Server(model, estimator=estimator, guard=None)
    plain = Server(model, guard=None)
    twin = Twin(N=9, beta=getattr(estimator, "beta", 1.0))
    for t in range(12):
        chosen = numbers(t).choice(9, 3, replace=False).tolist()
        updates = [
            made(model, t, k, (t + i) % 3, w)
            for i, (k, w) in enumerate(zip(chosen, weights, strict=True))
        ]
        cohort = {u.client: (vector(server, u), u.weight) for u in updates}
        expected = twin.mean(cohort)
        twin.follow(cohort)
        if isinstance(estimator, MIFA):
            expected = twin.latest()
        before = vector(server, Update(model={n: 0 * x for n, x in server.params.items()}))
        assert server.step(iter(updates), population=9).stepped
        after = vector(server, Update(model={n: 0 * x for n, x in server.params.items()}))
        assert before - after == pytest.approx(expected, rel=1e-4, abs=1e-6)
        plain.step(updates)
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            assert server.state[name].equal(plain.state[name])
    assert server.state["twin.weight"].equal(server.state["last.weight"])


# ------------------------------------------------------------------------------------- identities


def rounds_of(model: nn.Module, count: int, clients: Iterable[int]) -> list[list[Update]]:
    return [[made(model, t, k, k % 3, 5.0 + k) for k in clients] for t in range(count)]


def saved_bits(server: Server) -> Any:
    """All of a server's state, to the bit."""
    saved = server.state_dict()
    tensors = {n: (x.dtype, x.numpy().tobytes()) for n, x in saved.pop("tensors").items()}
    return json.dumps(saved), tensors


def test_stale_between_fedavg_and_varp_to_the_bit():
    model = Net()
    servers = {
        e: Server(model, estimator=e, optimizer=Adam(lr=0.01), adapter=Glad())
        for e in (None, Stale(beta=0.0), VARP(), Stale(beta=1.0))
    }
    none, zero, varp, one = servers.values()
    for t, updates in enumerate(rounds_of(model, 5, range(5))):
        for server in servers.values():
            server.step([u for k, u in enumerate(updates) if (k + t) % 5 < 3], population=5)
        for a, b in ((none, zero), (varp, one)):
            assert all(
                a.state[n].numpy().tobytes() == b.state[n].numpy().tobytes() for n in a.state
            )
    assert not none.params["last.weight"].equal(varp.params["last.weight"])


@pytest.mark.parametrize("estimator", [VARP(), Stale(beta=0.7), MIFA(), Strat(most=1)])
def test_with_all_clients_every_round_it_is_fedavg_to_rounding(estimator: Estimator):
    model = Net()
    server, plain = Server(model, estimator=estimator), Server(model)
    for updates in rounds_of(model, 6, range(5)):
        server.step(updates, population=5)
        plain.step(updates, population=5)
        for name, value in plain.params.items():
            torch.testing.assert_close(server.params[name], value, rtol=1e-5, atol=1e-6)


def test_the_mean_over_all_cohorts_is_that_of_all_clients():
    # r = 2 of N = 4: each of the 6 cohorts is as likely; whatever is remembered, E ĝ is the mean
    g = [3.0, -1.0, 7.0, 2.0]
    estimates: list[float] = []
    for pair in combinations(range(4), 2):
        server = at_zero(VARP())
        for first in ([update(0, 5.0), update(1, 9.0)], [update(2, -4.0), update(0, 1.0)]):
            stepped_by(server, *first)
        estimates.append(stepped_by(server, *(update(k, g[k]) for k in pair)))
    assert np.mean(estimates) == pytest.approx(np.mean(g))


def test_a_draw_by_size_needs_what_clients_count_in_the_mean_of_all():
    # n = 1, 3, 4: one draw by n_k/n with weight 1; N n_k/n = 3/8, 9/8, 12/8
    g, n = [3.0, -1.0, 7.0], [1, 3, 4]
    importance = {k: 3 * size / 8 for k, size in enumerate(n)}
    estimates: list[float] = []
    for drawn in range(3):
        server = at_zero(VARP())
        for k, value in ((0, 5.0), (2, 9.0)):
            stepped_by(server, update(k, value), population=3, importance=importance)
        one = update(drawn, g[drawn])
        estimates.append(stepped_by(server, one, population=3, importance=importance))
    # Σ n_k/n ĝ_k = (1·3 − 3·1 + 4·7)/8, as without memory
    assert np.dot(estimates, n) / 8 == pytest.approx(np.dot(g, n) / 8)


# ------------------------------------------------------------------------- forms, files, refusals


@pytest.mark.parametrize("estimator", [VARP(), MIFA(), Strat(cosine=0.1, most=3)])
def test_a_list_a_stream_several_and_a_bundle_are_the_same(estimator: Estimator):
    deltas = [
        torch.tensor(numbers(k).standard_normal((4, 3)), dtype=torch.float32) for k in range(6)
    ]

    def forms(server: Server, t: int) -> dict[str, Any]:
        ids = [(t + k) % 6 for k in range(4)]
        rows = torch.stack([server.layout.pack({"w": deltas[k]}) for k in ids])
        updates = [Update({"w": deltas[k]}, client=k) for k in ids]

        def reusing() -> Iterable[Update]:
            scratch = torch.empty(4, 3)
            for k in ids:
                scratch.copy_(deltas[k])
                yield Update({"w": scratch}, client=k)

        bundle = Bundle(
            deltas=rows, weights=[1.0] * 4, clients=ids, steps=[1] * 4, losses=[0.0] * 4
        )
        several = iter([Several(updates[:2]), Several(updates[2:])])
        return {
            "list": updates, "stream": reusing(), "several": several, "bundle": iter([bundle])
        }  # fmt: skip

    states: list[Any] = []
    for form in ("list", "stream", "several", "bundle"):
        server = Server({"w": torch.zeros(4, 3)}, estimator=estimator, trust=None)
        for t in range(4):
            assert server.step(forms(server, t)[form], population=6).stepped
        states.append(saved_bits(server))
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("cls", ROWS)
def test_a_saved_server_goes_on_to_the_same_bits_whatever_the_ids_are(cls: Any, tmp_path: Path):
    model = Net()
    ids = [3, "3", "client/ä", -1, 2**40]
    server = Server(model, estimator=cls())
    rounds = [
        [replace(u, client=ids[k]) for k, u in enumerate(updates) if (k + t) % 5 < 3]
        for t, updates in enumerate(rounds_of(model, 6, range(5)))
    ]
    for updates in rounds[:3]:
        server.step(updates, population=9)
    server.save(tmp_path / "state")
    state = server.state_dict()
    loaded, taken = Server.load(tmp_path / "state", Net()), Server(Net(), estimator=cls())
    taken.load_state_dict(state)
    assert saved_bits(loaded) == saved_bits(taken) == saved_bits(server)
    for updates in rounds[3:]:
        records = [s.step(updates, population=9).to_dict() for s in (server, loaded, taken)]
        assert records[0] == records[1] == records[2]
        assert saved_bits(loaded) == saved_bits(taken) == saved_bits(server)
    with pytest.raises(CheckpointError, match="was saved with estimator"):
        Server(Net()).load_state_dict(state)
    fresh = Server(Net(), estimator=cls())
    fresh.load_state_dict(Server(Net()).state_dict())  # of before there were any
    assert fresh.step(rounds[0], population=9).stepped


DAMAGED: dict[str, Any] = {
    "clients": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "places": torch.tensor([1000, 1000]),
    "weights": torch.tensor([1.0, math.nan], dtype=torch.float64),
    "state/total": torch.zeros(3, dtype=torch.float64),
    "kept/1000": torch.full((64,), math.nan),
    "kept/1001": torch.zeros(3),
    "kept/x": torch.zeros(64),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_state_that_cannot_be_one_changes_nothing(name: str):
    server = at_zero(VARP())
    server.step([update(0, 8.0), update(1, 4.0)], population=4)
    state, before = server.state_dict(), saved_bits(server)
    state["tensors"][f"estimator/{name}"] = DAMAGED[name]
    with pytest.raises(CheckpointError, match="the state cannot be used"):
        server.load_state_dict(state)
    assert saved_bits(server) == before
    del state["tensors"][f"estimator/{name}"]
    if name != "kept/x":
        with pytest.raises(CheckpointError):
            server.load_state_dict(state)
    assert stepped_by(server, update(0, 2.0), update(2, 6.0)) == 3


def test_a_client_counts_once_a_round_and_must_be_known():
    server = at_zero(VARP())  # also without a guard
    record = server.step([update(0, 8.0), update(0, 1.0), update(None, 1.0)], population=4)
    assert [c.get("rejected") for c in record.clients] == [
        None,
        "the client has sent an update already",
        "VARP needs Update(client=...)",
    ]
    assert float(server.params["w"]) == -8
    record = at_zero(Strat(strata="random")).step([update(None, 1.0)])
    assert record.reason is not None
    assert "Strat needs Update(client=...)" in record.reason
    assert at_zero(Strat()).step([update(None, 1.0)]).stepped


@pytest.mark.parametrize("estimator", [VARP(), Stale()])
def test_the_number_of_clients_must_be_known(estimator: Estimator):
    server = at_zero(estimator)
    with pytest.raises(
        ValueError, match=r"must know how many there are: server.step\(updates, pop"
    ):
        server.step([update(0, 1.0)])
    server.step([update(0, 1.0), update(1, 1.0)], population=2)
    with pytest.raises(ValueError, match="population=1: 2 clients have taken part already"):
        server.step([update(0, 1.0)], population=1)


def test_more_disk_than_allowed_is_refused_with_the_arithmetic():
    with pytest.raises(
        ValueError,
        match=r"VARP keeps up to 1000000 updates of 4e\+06 bytes on disk, 4000 GB, which is more "
        r"than disk=10: raise it, or take a smaller model or fewer clients",
    ):
        VARP().require_room(1_000_000, 4_000_000)
    with pytest.raises(ValueError, match=r"5 GB, which is more than the 2 GB free: choose another"):
        VARP().require_room(5, 10**9, free=2e9)
    with pytest.raises(ValueError, match=r"1e\+09 bytes on disk, each in up to 3 versions, 12 GB"):
        VARP().require_room(4, 10**9, versions=3)
    Strat().require_room(1_000_000, 4_000_000)  # 20 updates
    server = at_zero(VARP(disk=600e-9))  # two updates of 64 float32
    server.step([update(0, 1.0), update(1, 1.0)], population=4)
    with pytest.raises(ValueError, match="VARP keeps up to 3 updates of 256 bytes"):
        server.step([update(0, 1.0), update(2, 1.0)], population=4)
    assert stepped_by(server, update(1, 3.0)) == 2.5  # ȳ = 2/4, and 3 − 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"filter": Median()}, "VARP estimates the mean of all .* Median takes those that are like"),
    ({"filter": MultiKrum()}, "MultiKrum takes those that are like each other: use filter.name"),
    (
        {"weighting": FedAdp()},
        "FedAdp weighs them by what they are, or how often they come: use weigh",
    ),
    ({"client": FedNova()}, "FedNova is right for a step by the mean of the cohort's updates"),
    ({"client": FedDyn()}, "FedDyn is right for a step by the mean of the cohort's updates"),
    ({"sampler": PowerOfChoice()}, "sampler PowerOfChoice prefers some: use sampler.name = unif"),
    ({"sampler": AdaFL()}, "sampler AdaFL prefers some: .* estimator.name = mifa"),
    ({"sampler": Uniform(availability="markov")}, "availability = 'markov' who can be reached"),
    ({"sampler": Uniform(availability="cyclic")}, "availability = 'cyclic' who can be reached"),
]


@pytest.mark.parametrize(("parts", "reason"), REFUSED)
def test_what_would_be_biased_is_refused(parts: dict[str, Any], reason: str):
    rules: list[Any] = [Glad(), parts.get("filter", Filter()), parts.get("weighting", Samples())]
    others = {k: v for k, v in parts.items() if k in ("client", "sampler")}
    with pytest.raises(ValueError, match=reason):
        refuse(*rules, estimator=VARP(), **others)
    if "sampler" in parts:  # who takes part may be anybody, or the bias is accepted
        refuse(*rules, estimator=MIFA(), **others)
        refuse(*rules, estimator=VARP(biased=True), **others)
    refuse(*rules, estimator=NoEstimator(), **others)


@pytest.mark.parametrize(
    "parts",
    [
        {"filter": NormClip()},
        {"weighting": Equal()},
        {"weighting": Optimal()},
        {"client": Scaffold()},
        {"client": Plain()},
        {"sampler": MD()},
        {"sampler": Uniform(availability="bernoulli")},
    ],
)
@pytest.mark.parametrize("cls", ROWS)
def test_what_is_right_is_not_refused(cls: Any, parts: dict[str, Any]):
    others = {k: v for k, v in parts.items() if k in ("client", "sampler")}
    filter, weighting = parts.get("filter", Filter()), parts.get("weighting", Samples())
    refuse(Glad(), filter, weighting, estimator=cls(), **others)


def test_what_a_server_refuses_of_methods_and_sums():
    with pytest.raises(ValueError, match="of another length in every round: use estimator=None"):
        at_zero(VARP(), method=FedNova().server)
    with pytest.raises(ValueError, match="VARP remembers single updates, and there are only their"):
        Collector(at_zero(VARP()))

    def shifting(mean: Tensor, extra: Tensor, count: int, state: Any) -> Any:
        return state, mean

    server = at_zero(VARP(), method=shifting)
    with pytest.raises(ValueError, match="the method moves θ by the cohort's updates, past VARP"):
        server.step([replace(update(0, 1.0), extra={"w": torch.ones(1)})], population=4)
    assert float(server.params["w"]) == 0

    class Other:
        pass

    with pytest.raises(ValueError, match="Other is not derived from fedglad"):
        at_zero(Other())  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Wild(Estimator):
    """An own one that gives what it is told to."""

    value: float = math.nan
    shape: int = 64

    def estimate(self, mean: Tensor, updates: Any, state: Any) -> Any:
        return torch.full((self.shape,), self.value), {"rounds": torch.tensor(len(updates))}


def test_an_own_estimator_cannot_poison_the_model():
    server = at_zero(Wild())
    record = server.step([update(0, 1.0)])
    assert record.status == "skipped"
    assert record.reason
    assert "gave an estimate that is not finite" in record.reason
    assert float(server.params["w"]) == 0
    assert server.state_dict()["tensors"]["estimator/weights"].numel() == 0
    with pytest.raises(ValueError, match=r"gave a vector of \(3,\) torch.float32, where the mean"):
        at_zero(Wild(shape=3)).step([update(0, 1.0)])
    server = at_zero(Wild(value=2.0))
    assert stepped_by(server, update(0, 1.0)) == 2
    assert server.state_dict()["tensors"]["estimator/state/rounds"] == 1


def test_a_copy_of_a_server_has_a_memory_of_its_own():
    server = at_zero(VARP())
    server.step([update(0, 8.0), update(1, 4.0)], population=4)
    twin = copy.deepcopy(server)
    assert saved_bits(twin) == saved_bits(server)
    assert stepped_by(twin, update(0, 2.0), update(2, 6.0)) == 3
    del twin
    assert stepped_by(server, update(0, 2.0), update(2, 6.0)) == 3


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = at_zero(VARP())
    assert not list(tmp_path.iterdir())  # before a client takes part
    for _ in range(3):
        server.step([update(0, 8.0), update(1, 4.0)], population=10**6)
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["1000.3.safetensors", "1001.3.safetensors"]
    server.step([update(7, math.nan)], population=10**6)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == names
    del server
    assert not list(tmp_path.iterdir())
