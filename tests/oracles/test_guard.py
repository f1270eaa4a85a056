"""The guard by hand: what is usual, what is cut, what is left out, and who can lead it."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedglad import Guard, Server, Update
from fedglad.clients import FedDyn, FedNova, Scaffold
from fedglad.core.guard import Limits, upper_median
from fedglad.filters import Median, MultiKrum, NormClip, TrimmedMean
from fedglad.weights import Equal, Optimal

FORMS = pytest.mark.parametrize("form", [list, iter])
Form = Callable[..., Iterable[Any]]


def one(value: float, **settings: Any) -> Update:
    return Update({"w": torch.tensor([value, 0.0])}, **settings)


def zero(**settings: Any) -> Server:
    return Server({"w": torch.zeros(2)}, **settings)


def after(*norms: float, **settings: Any) -> Server:
    """A server whose usual norm is the upper median of these, and is at 0 again."""
    server = zero(**settings)
    server.step([one(norm) for norm in norms])
    fresh = zero(**settings).state_dict()
    server.load_state_dict({**server.state_dict(), "tensors": fresh["tensors"]})
    return server


def moved(server: Server) -> float:
    return -float(server.params["w"][0])


# --- norms ---


@pytest.mark.parametrize(
    ("theta", "limit"),
    [([0.0, 0.0], 100.0), ([0.0, 0.5], 100.0), ([3.0, 4.0], 500.0)],  # 100·max(1, ‖θ‖)
)
def test_in_the_first_round_a_norm_is_compared_with_the_model(theta: list[float], limit: float):
    for length, rejected in ((limit * 0.999, []), (limit * 1.001, ["long"])):
        server = Server({"w": torch.tensor(theta)})
        record = server.step([one(length, client="long"), one(1.0), one(1.0)])
        assert list(record.rejected) == rejected
        assert "clipped" not in record.clients[0]


@FORMS
def test_a_first_round_with_a_norm_far_from_the_others_is_skipped_once(form: Form):
    # ‖θ‖ = 50: 100·50 is allowed by the model, but 4,000 is far from the others' 1
    server = Server({"w": torch.tensor([30.0, 40.0])})
    cohort = [one(4000.0, client="hostile"), *(one(1.0) for _ in range(4))]
    record = server.step(form(cohort))
    assert record.reason == (
        "norm 4000 is more than 100 times the median of the first round's: "
        "it will be left out from the next round on"
    )
    assert float(server.params["w"][0]) == 30
    record = server.step(form(cohort))
    assert record.stepped
    assert list(record.rejected) == ["hostile"]


@FORMS
def test_a_long_update_is_cut_and_a_far_one_left_out(form: Form):
    # usual 2: up to 6 as it is, to 200 cut to 6, beyond left out
    server = after(1.0, 2.0, 9.0)
    record = server.step(form([one(5.9), one(1.0), one(1.0), one(60.0), one(201.0)]))
    assert record.clients[3]["clipped"] == pytest.approx(0.1)
    assert record.clients[3]["sq_norm"] == pytest.approx(3600)
    assert record.rejected == {"#4": "norm 201 is more than 100 times the usual 2"}
    assert ["clipped" in client for client in record.clients] == [False, False, False, True, False]
    # (5.9 + 1 + 1 + 6)/4, and GSI is of what is in the mean: √((34.81 + 1 + 1 + 36)/4)/3.475
    assert moved(server) == pytest.approx(3.475)
    assert record.gsi_all == pytest.approx(math.sqrt(72.81 / 4) / 3.475)


@pytest.mark.parametrize("filter", [Median(), TrimmedMean(beta=0.2), MultiKrum(f=1)], ids=repr)
@FORMS
def test_a_kept_cohort_is_cut_too(filter: Any, form: Form):
    server = after(1.0, 1.0, 1.0, 1.0, 1.0, filter=filter)
    record = server.step(form([one(1.0), one(1.0), one(1.0), one(1.0), one(50.0)]))
    assert record.clients[4]["clipped"] == pytest.approx(3 / 50)
    assert moved(server) == pytest.approx(1.0)


def test_a_kept_cohort_of_which_all_count_is_cut_too():
    # usual 1: 1, 1, 50 become 1, 1, 3: ḡ = 5/3, from which they are 2/3, 2/3 and 4/3 away;
    # GSI is √((1 + 1 + 9)/3)/(5/3)
    server = after(1.0, 1.0, 1.0, distances=True)
    record = server.step([one(1.0, client=0), one(1.0, client=1), one(50.0, client=2)])
    assert moved(server) == pytest.approx(5 / 3)
    assert record.distances == pytest.approx({0: 2 / 3, 1: 2 / 3, 2: 4 / 3})
    assert record.gsi_all == pytest.approx(math.sqrt(11 / 3) / (5 / 3))


def test_the_guard_cuts_before_the_filter_does():
    # usual 1: 50 → 3; the filter's 2: 3 → 2; (1 + 1 + 2)/3
    server = after(1.0, 1.0, 1.0, filter=NormClip(max_norm=2.0))
    server.step([one(1.0), one(1.0), one(50.0)])
    assert moved(server) == pytest.approx(4 / 3)


def test_what_is_usual_follows_the_median_at_a_bounded_speed():
    # C = 1; then M = 9: √9; M = 1e9: 8 times at most; M = 1e-9: an eighth at least
    usual = 1.0
    server = after(1.0, 1.0, 1.0)
    for norm, factor in ((9.0, 3.0), (1e9, 8.0), (1e-9, 1 / 8)):
        server.step([one(norm), one(norm), one(norm)])
        usual *= factor
        assert server.state_dict()["gate"]["norm"] == pytest.approx(usual)


def test_of_an_even_number_the_upper_median_counts():
    # half of the clients with tiny updates do not lock out the others
    server = after(1e-6, 1e-6, 1.0, 1.0)
    assert server.state_dict()["gate"]["norm"] == 1.0
    assert server.step([one(1e-6), one(1e-6), one(1.0), one(1.0)]).rejected == {}


@pytest.mark.parametrize(
    ("values", "middle"),
    [
        ([], 0.0),
        ([7.0], 7.0),
        ([2.0, 1.0], 2.0),
        ([9.0, 1.0, 2.0], 2.0),
        ([8.0, 1.0, 4.0, 2.0], 4.0),
        ([16.0, 1.0, 8.0, 2.0, 4.0], 4.0),
        ([32.0, 1.0, 16.0, 2.0, 8.0, 4.0], 8.0),
    ],
)
def test_the_upper_median(values: list[float], middle: float):
    assert upper_median(values) == middle


def test_the_state_of_the_first_edition_had_the_last_norms_and_weights():
    saved = {"norms": [1.0, 9.0, 1.0, 4.0], "weights": [2.0, 32.0, 8.0, 2.0]}
    assert Limits.of(Guard(), saved).usual == {"norm": 4.0, "weight": 8.0}
    assert Limits.of(Guard(), {"norms": [], "weights": []}).usual == {}


@FORMS
def test_a_jump_of_all_clients_is_cut_and_never_skipped(form: Form):
    # A local warm-up from 1e-6 to 1e-2: usual 1e-6, then all far from it
    server = after(1e-6, 1e-6, 1e-6)
    for t in range(12):
        record = server.step(form([one(1e-2), one(1e-2), one(1e-2)]))
        assert record.stepped
        assert record.rejected == {}
        # 1e4 below, then 8, 8, 8 times nearer: 19.5, and by roots 4.4, 2.1
        assert ("clipped" in record.clients[0]) == (t < 5)


@FORMS
def test_a_slow_warm_up_is_not_touched(form: Form):
    server = zero()
    for t in range(30):
        norm = 1e-6 * 1e4 ** (t / 29)
        record = server.step(form([one(norm), one(1.5 * norm), one(0.5 * norm)]))
        assert record.stepped
        assert not any("clipped" in client or "rejected" in client for client in record.clients)


@FORMS
def test_half_a_first_round_with_tiny_norms_locks_nobody_out(form: Form):
    server = zero()
    server.step(form([one(1e-9)] * 6 + [one(1.0)] * 4))
    for t in range(14):
        record = server.step(form([one(1.0)] * 10))
        assert record.stepped
        assert record.rejected == {}
        assert t < 11 or "clipped" not in record.clients[0]


def test_one_of_ten_who_sends_nearly_a_hundred_times_the_usual_does_not_lead_it():
    """A quadratic whose honest clients pull θ to their own optima, around 1."""
    rng = np.random.default_rng(0)
    distances: dict[bool, float] = {}
    for attacked in (False, True):
        server = Server({"w": torch.zeros(20)})
        worst = 0.0
        for t in range(300):
            theta = server.params["w"].clone()
            optima = torch.tensor(1 + rng.normal(size=(10, 20)), dtype=torch.float32)
            updates = [theta - optimum for optimum in optima]
            if attacked:
                usual = server.state_dict()["gate"].get("norm", 1.0)
                updates[0] = -99.9 * usual * updates[0] / updates[0].norm()
            server.step([{"w": update} for update in updates])
            if t >= 250:
                worst = max(worst, float((server.params["w"] - 1).norm()))
        distances[attacked] = worst
    assert distances[True] <= 3 * distances[False]


@given(
    honest=st.lists(st.floats(0.5, 2.0), min_size=6, max_size=9),
    hostile=st.lists(st.floats(0, 1e11), min_size=1, max_size=5),
)
def test_fewer_than_half_never_lead_what_is_usual(honest: list[float], hostile: list[float]):
    server = zero()
    for _ in range(20):
        server.step([one(x) for x in [*honest, *hostile]])
    assert 0.5 <= server.state_dict()["gate"]["norm"] <= 2.0


def test_the_factors_are_settings():
    server = after(2.0, 2.0, 2.0, guard=Guard(norm=10, clip=1.5))
    record = server.step([one(19.0), one(21.0), one(2.0), one(2.9)])
    assert record.clients[0]["clipped"] == pytest.approx(3 / 19)
    assert list(record.rejected) == ["#1"]
    free = after(2.0, 2.0, 2.0, guard=Guard(norm=math.inf, clip=math.inf))
    assert "clipped" not in free.step([one(1e9), one(1.0), one(1.0)]).clients[0]
    for name in ("norm", "clip", "weight"):
        with pytest.raises(ValueError, match="greater than 1"):
            Guard(**{name: 1.0})


# --- weights ---


def test_a_list_has_no_weight_over_half():
    # of 5 clients: 10,000 of 10,004 becomes half
    server = zero()
    record = server.step([one(9.0, weight=10_000), *(one(1.0) for _ in range(4))])
    assert [client["weight"] for client in record.clients] == pytest.approx([0.5] + [0.125] * 4)
    assert record.clients[0]["claimed"] == 10_000
    assert moved(server) == pytest.approx(5.0)


def test_of_many_no_weight_is_over_ten_times_the_equal_share():
    # of 40: 10/40 = ¼ at most; two are over it, at one level: 2·¼, the rest ½/38 each
    server = zero()
    weights = [1e6, 1e3, *[1.0] * 38]
    record = server.step([one(1.0, weight=weight) for weight in weights])
    shares = [client["weight"] for client in record.clients]
    assert shares == pytest.approx([0.25, 0.25, *[0.5 / 38] * 38])


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [2.0, 2.0, 3.0], [1.0] * 30, [9.0, 1.0]])
def test_honest_weights_stay(weights: list[float]):
    record = zero().step([one(1.0, weight=weight) for weight in weights])
    shares = [client["weight"] for client in record.clients]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights])
    assert not any("claimed" in client for client in record.clients)


@given(st.lists(st.floats(1e-9, 1e15), min_size=3, max_size=60))
def test_no_share_is_ever_over_its_limit(weights: list[float]):
    heeded = Limits(Guard()).heed(weights)
    most = min(10 / len(weights), 0.5)
    assert max(heeded) / math.fsum(heeded) <= most * (1 + 1e-6)
    assert all(now <= before for now, before in zip(heeded, weights, strict=True))


def test_a_stream_is_cut_by_the_rounds_before():
    # usual weight 2 of 4 clients: not over 2·min(10, 4 − 1)
    server = zero()
    server.step(iter([one(1.0, weight=2.0) for _ in range(4)]))
    record = server.step(iter([one(1.0, weight=1e6), *(one(1.0, weight=2.0) for _ in range(3))]))
    assert [client["weight"] for client in record.clients] == pytest.approx([0.5, *[1 / 6] * 3])
    assert record.clients[0]["claimed"] == 1e6


def test_a_streams_first_round_with_an_absurd_weight_is_skipped_once():
    server = zero()
    cohort = [one(9.0, weight=1e4), *(one(1.0) for _ in range(4))]
    record = server.step(iter(cohort))
    assert record.reason == (
        "weight 1e+04 is more than 10 times the median of the first round's: "
        "it will be cut from the next round on"
    )
    assert moved(server) == 0
    record = server.step(iter(cohort))
    assert record.stepped
    assert record.clients[0]["weight"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("weights", "skipped"),
    [
        ((1.0, 80.0, 9.0, 1.0), False),  # the upper median is 9; the lower 1, the middle 5
        ((1.0, 91.0, 9.0, 1.0), True),
        ((1.0, 1000.0), False),  # of two nobody knows which is unusual
        ((1.0, 1000.0, 1.0), True),
    ],
)
def test_a_streams_first_round_is_judged_by_its_upper_median(
    weights: tuple[float, ...], skipped: bool
):
    record = zero().step(iter([one(1.0, weight=weight) for weight in weights]))
    assert record.stepped != skipped


def test_where_weights_do_not_count_they_are_not_cut():
    record = zero(weighting=Equal()).step(iter([one(1.0, weight=w) for w in (1e6, 1, 1, 1)]))
    assert [client["weight"] for client in record.clients] == [0.25] * 4


# --- what client methods send ---


@FORMS
def test_fednovas_steps_are_those_that_the_cohort_allows(form: Form):
    # steps 5, 5, 5 and 2^52: believed are ten times the median, 50: τ = (5·3 + 50)/4
    server = Server({"w": torch.zeros(2)}, method=FedNova(optimizer="sgd").server)
    cohort = [one(1.0, steps=5), one(1.0, steps=5), one(1.0, steps=5), one(1.0, steps=2**52)]
    record = server.step(form(cohort))
    assert moved(server) == pytest.approx(65 / 4)
    assert record.clients[3]["steps"] == 2**52


@pytest.mark.parametrize(
    ("steps", "tau", "most"),
    [
        ((5, 10**6, 20, 5), (5 + 200 + 20 + 5) / 4, 10.0),  # ten times the upper median, 20
        ((3, 100, 3, 3), (3 + 5 + 3 + 3) / 4, 1.5),  # 1.5 times 3, up to the next whole step
    ],
)
def test_fednovas_steps_are_compared_with_the_upper_median(
    steps: tuple[int, ...], tau: float, most: float
):
    method = FedNova(optimizer="sgd").server
    server = Server({"w": torch.zeros(2)}, method=method, guard=Guard(weight=most))
    record = server.step([one(1.0, steps=count) for count in steps])
    assert moved(server) == pytest.approx(tau)
    # the squares have the mean's length again: all are alike
    assert record.gsi_all == pytest.approx(1.0)
    assert record.statistics is not None
    assert record.statistics.sum_sq == pytest.approx({"w": tau**2})
    assert record.statistics.mean_sq == pytest.approx({"w": tau**2})


def test_fednovas_steps_are_those_of_its_settings():
    server = Server({"w": torch.zeros(2)}, method=FedNova(optimizer="sgd", steps=7).server)
    server.step([one(1.0, steps=7), one(1.0, steps=7), one(1.0, steps=60)])
    assert moved(server) == pytest.approx(7)


@pytest.mark.parametrize("method", [FedDyn(), Scaffold()], ids=["feddyn", "scaffold"])
@FORMS
def test_an_ordinary_update_with_an_absurd_extra_is_left_out(method: Any, form: Form):
    client = method.among(10)
    clean, tried = (Server({"w": torch.zeros(2)}, method=client.server) for _ in range(2))
    honest = [one(1.0, extra={"w": torch.ones(2)}) for _ in range(3)]
    hostile = one(1.0, extra={"w": torch.full((2,), 6e11)}, client="hostile")
    for _ in range(2):
        clean.step(form(honest))
        record = tried.step(form([*honest, hostile]))
        assert "norm of the extra" in record.rejected["hostile"]
    assert torch.equal(tried.params["w"], clean.params["w"])
    assert all(torch.equal(tried.sent[key], clean.sent[key]) for key in clean.sent)


def test_an_extra_is_cut_with_its_update_and_left_out_with_it():
    # usual norm 1, extra 1 for it: an update cut to a tenth cuts its extra; 11 is too much
    server = Server({"w": torch.zeros(2)}, method=Scaffold().among(3).server)
    usual = [one(1.0, extra={"w": torch.tensor([1.0, 0.0])}) for _ in range(3)]
    server.step(usual)
    before = server.sent["c"].clone()
    long = one(1.0, extra={"w": torch.tensor([9.0, 0.0])})
    longer = one(1.0, extra={"w": torch.tensor([11.0, 0.0])}, client="longer")
    with_it = one(30.0, extra={"w": torch.tensor([1.0, 0.0])})
    record = server.step([usual[0], long, longer, with_it])
    assert "norm of the extra 11 is more than 10 times" in record.rejected["longer"]
    # c grows by (1 + 9 + 0.1)/3
    assert float((server.sent["c"] - before)[0]) == pytest.approx(10.1 / 3)


@FORMS
def test_a_first_round_with_an_unusual_extra_is_skipped_once(form: Form):
    server = Server({"w": torch.zeros(2)}, method=Scaffold().among(3).server)
    usual = [one(1.0, extra={"w": torch.tensor([1.0, 0.0])}) for _ in range(3)]
    cohort = [*usual, one(1.0, extra={"w": torch.tensor([500.0, 0.0])}, client="hostile")]
    assert "extra 500 is more than 10 times the median" in (server.step(form(cohort)).reason or "")
    record = server.step(form(cohort))
    assert record.stepped
    assert list(record.rejected) == ["hostile"]


@FORMS
def test_an_extra_where_the_others_have_none_stops_one_round_alone(form: Form):
    server = Server({"w": torch.zeros(2)}, method=Scaffold().among(3).server)
    usual = [one(1.0, extra={"w": torch.zeros(2)}) for _ in range(3)]
    cohort = [*usual, one(1.0, extra={"w": torch.ones(2)}, client="hostile")]
    records = [server.step(form(cohort)) for _ in range(3)]
    assert [record.stepped for record in records] == [False, True, True]
    assert list(records[-1].rejected) == ["hostile"]


@pytest.mark.parametrize("steps", [None, 0, -3, 5.5, "7", 10**400], ids=lambda x: str(x)[:5])
def test_who_sends_no_number_of_steps_does_not_stop_the_round(steps: Any):
    server = Server({"w": torch.zeros(2)}, method=FedNova(optimizer="sgd").server)
    record = server.step([one(1.0, steps=5), one(1.0, steps=steps, client="hostile")])
    assert record.stepped
    assert "needs Update(steps=...)" in record.rejected["hostile"]
    assert moved(server) == pytest.approx(5)


@pytest.mark.parametrize("filter", [Median(), TrimmedMean(beta=0.34)], ids=repr)
def test_a_robust_mean_is_one_of_extras_too(filter: Any):
    # 1, 1, 5: the middle is 1, times three clients, over a population of three
    server = Server({"w": torch.zeros(2)}, method=Scaffold().among(3).server, filter=filter)
    sent = [one(1.0, extra={"w": torch.tensor([x, 0.0])}) for x in (1.0, 1.0, 5.0)]
    server.step(sent)
    assert float(server.sent["c"][0]) == pytest.approx(1.0)


# --- buffers ---


def trained(mean: float, var: float, count: int = 1, **settings: Any) -> Update:
    state = nn.BatchNorm1d(1).state_dict()
    model = {
        **state,
        "running_mean": torch.tensor([mean]),
        "running_var": torch.tensor([var]),
        "num_batches_tracked": torch.tensor(count),
    }
    return Update(model=model, **settings)


def norm(**settings: Any) -> Server:
    return Server(nn.BatchNorm1d(1), **settings)


@FORMS
@pytest.mark.parametrize("guard", [Guard(), None], ids=["guarded", "unguarded"])
def test_a_negative_variance_is_rejected(form: Form, guard: Guard | None):
    server = norm(guard=guard)
    honest = [trained(0.1, 1.1) for _ in range(9)]
    record = server.step(form([*honest, trained(0.1, -10.0, client="hostile")]))
    assert record.rejected == {"hostile": "'running_var' is a variance, and holds -10"}
    assert float(server.state["running_var"]) == pytest.approx(1.1)


@FORMS
def test_buffers_that_moved_too_far_are_cut_or_left_out(form: Form):
    # usual: √(.3² + .4²) = .5; 5 is cut to 1.5, 500 left out
    server = norm()
    server.step(form([trained(0.3, 1.4) for _ in range(3)]))
    start = trained(0.3 + 0.3, 1.4 + 0.4)
    record = server.step(
        form([start, start, start, trained(0.3 + 3.0, 1.4 + 4.0), trained(300.0, 401.4)])
    )
    assert record.clients[3]["buffers_clipped"] == pytest.approx(0.3)
    assert "norm of the buffers" in record.rejected["#4"]
    # .3 + (3·.3 + .9)/4 and 1.4 + (3·.4 + 1.2)/4
    assert float(server.state["running_mean"]) == pytest.approx(0.75, abs=1e-6)
    assert float(server.state["running_var"]) == pytest.approx(2.0, abs=1e-6)


@FORMS
def test_a_first_round_with_buffers_far_from_the_others_is_skipped_once(form: Form):
    server = norm()
    cohort = [*(trained(0.1, 1.1) for _ in range(3)), trained(1e5, 1.1, client="hostile")]
    assert "buffers 1e+05 is more than 100 times" in (server.step(form(cohort)).reason or "")
    record = server.step(form(cohort))
    assert list(record.rejected) == ["hostile"]
    assert float(server.state["running_mean"]) == pytest.approx(0.1)


class Fixed(nn.Module):
    """A model with tables that are no statistics, beside those that are."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.norm = nn.BatchNorm1d(1) if statistics else nn.Identity()
        self.register_buffer("table", torch.tensor([0.5, 0.25]))
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("mask", torch.tensor([False, True]))
        self.register_buffer("nothing", torch.zeros(0))


@FORMS
@pytest.mark.parametrize("filter", [None, TrimmedMean(beta=0.1), MultiKrum(f=1)], ids=repr)
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("table", torch.tensor([0.5, 0.3])),
        ("table", torch.full((2,), 1e5)),
        ("positions", torch.full((3,), 10**6)),
        ("mask", torch.tensor([True, True])),
    ],
)
def test_what_nearly_everybody_leaves_as_it_is_stays(
    form: Form, filter: Any, statistics: bool, name: str, sent: torch.Tensor
):
    server = Server(Fixed(statistics), filter=filter)
    before = {key: value.clone() for key, value in server.state.items()}
    for _ in range(3):
        cohort: list[Update] = []
        for k in range(6):
            state = {key: value.clone() for key, value in server.state.items()}
            state["weight"] = state["weight"] + 1 + 0.01 * k
            if statistics:
                state["norm.running_mean"] = state["norm.running_mean"] + 0.1
            cohort.append(Update(model={**state, **({name: sent} if k == 3 else {})}))
        server.step(form(cohort))
    assert all(
        torch.equal(server.state[key], before[key]) for key in ("table", "positions", "mask")
    )
    assert (float(server.state["norm.running_mean"]) > 0) if statistics else True


def test_what_half_of_the_clients_change_is_averaged():
    server = Server({"w": torch.zeros(1), "table": torch.zeros(1)}, buffers=["table"])
    sent = [{"w": torch.ones(1), "table": torch.tensor([x])} for x in (0.0, 0.5)]
    server.step([Update(model=model) for model in sent])
    assert float(server.state["table"]) == 0.25


@FORMS
def test_a_counter_neither_falls_nor_jumps(form: Form):
    server = norm()
    server.step(form([trained(0.1, 1.1, 50) for _ in range(3)]))
    cohort = [trained(0.1, 1.1, 100), trained(0.1, 1.1, 100), trained(0.1, 1.1, 2**39)]
    record = server.step(form(cohort))
    assert "norm of the counters" in record.rejected["#2"]
    assert int(server.state["num_batches_tracked"]) == 100
    server.step(form([trained(0.1, 1.1, 3) for _ in range(3)]))
    assert int(server.state["num_batches_tracked"]) == 100


@pytest.mark.parametrize("filter", [Median(), TrimmedMean(beta=0.34)], ids=repr)
def test_a_robust_mean_is_one_of_buffers_too(filter: Any):
    server = norm(filter=filter, guard=None)
    server.step([trained(1.0, 2.0, 4), trained(2.0, 3.0, 5), trained(1e6, 1e6, 10**9)])
    assert float(server.state["running_mean"]) == 2.0
    assert float(server.state["running_var"]) == 3.0
    assert int(server.state["num_batches_tracked"]) == 5


@pytest.mark.parametrize("filter", [Median(), TrimmedMean(beta=0.25)], ids=repr)
def test_a_robust_mean_of_the_buffers_of_an_even_number(filter: Any):
    # the mean of the middle two; of counters the larger, since it is of clients that are believed
    server = norm(filter=filter, guard=None)
    sent = [(1.0, 2.0, 4), (1e6, 1e6, 10**9), (2.0, 3.0, 5), (4.0, 9.0, 7)]
    server.step([trained(*values) for values in sent])
    assert float(server.state["running_mean"]) == 3.0
    assert float(server.state["running_var"]) == 6.0
    assert int(server.state["num_batches_tracked"]) == 7


# --- whose update it is ---


@FORMS
def test_a_client_has_one_update_in_a_round(form: Form):
    server = zero()
    record = server.step(form([one(1.0, client=7), one(3.0, client=8), one(9.0, client=7)]))
    assert record.clients[2]["rejected"] == "the client has sent an update already"
    assert moved(server) == 2.0


def test_an_id_of_ten_megabytes_is_not_kept():
    record = zero().step([one(1.0), one(1.0, client="x" * 10**7)])
    assert record.clients[1] == {
        "id": "x" * 20 + "…",
        "weight": 0.0,
        "loss": None,
        "sq_norm": None,
        "rejected": "the client's id is longer than 200 characters",
    }


@pytest.mark.parametrize("guard", [Guard(), None], ids=["guarded", "unguarded"])
def test_an_id_of_more_digits_than_python_prints_is_not_kept(guard: Guard | None, tmp_path: Path):
    server = zero(guard=guard)
    record = server.step([one(1.0, client=10**5000), one(1.0, client=2**127)])
    assert record.clients[0]["rejected"] == "the client's id is a number of more than 128 bits"
    assert [client["id"] for client in record.clients] == [None, 2**127]
    json.dumps(record.to_dict())
    server.save(tmp_path / "state")


def test_a_tensors_name_of_ten_megabytes_is_not_kept():
    record = zero().step([one(1.0), {"w": torch.ones(2), "x" * 10**7: torch.ones(1)}])
    assert len(record.clients[1]["rejected"]) < 200


class Raises:
    """An array whose own method raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [StopIteration(), KeyError("x"), ZeroDivisionError()], ids=repr)
@pytest.mark.parametrize("filter", [None, Median()], ids=["none", "median"])
@FORMS
def test_an_update_whose_own_methods_raise_is_rejected(error: Exception, filter: Any, form: Form):
    server = zero(filter=filter)
    record = server.step(form([one(1.0), Update({"w": Raises(error)}), one(1.0), one(1.0)]))
    assert len(record.clients) == 4
    assert list(record.rejected) == ["#1"]
    assert type(error).__name__ in record.rejected["#1"]


def test_losses_that_would_overflow_are_no_losses():
    record = zero().step([one(1.0, loss=1.7e308), one(1.0, loss=1.7e308), one(1.0, loss=0.5)])
    assert record.stepped
    assert record.train_loss == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_losses_do_not_overflow_by_weights_that_sum_to_more_than_one(seed: int):
    # Optimal weighs those that it keeps up: 1.7e308 times 2 is no float, and the model had moved
    server = zero(weighting=Optimal(kept=2, seed=seed))
    record = server.step([one(1.0 + k, loss=1.7e308, client=k) for k in range(8)])
    assert record.stepped
    assert record.train_loss is None
