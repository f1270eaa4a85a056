"""FedHyper, FedLWS, `pooled` and `aligned`: numbers by hand, what P estimates, and no NaN ever."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad import Record, Server, Statistics, Update
from fedglad.adapters import (
    REGISTRY,
    Adapter,
    AdapterState,
    Aligned,
    Factors,
    FedHyper,
    FedLWS,
    Pooled,
    Relative,
)
from fedglad.optimizers import Momentum

Array = np.ndarray


def server_of(adapter: Adapter, *theta: float, **settings: Any) -> Server:
    model = {"w": torch.tensor(theta, dtype=torch.float64)}
    return Server(model, adapter=adapter, guard=None, **settings)


def send(server: Server, *updates: Sequence[float], **settings: Any) -> Record:
    tensors = [torch.tensor(g, dtype=torch.float64) for g in updates]
    return server.step([{"w": g} for g in tensors], **settings)


def scales(server: Server, rounds: Sequence[Sequence[float]], **settings: Any) -> list[float]:
    """The factors of rounds whose clients send these numbers."""
    records = [send(server, *([g] for g in cohort), **settings) for cohort in rounds]
    return [next(iter(record.scale.values())) for record in records]


def memory(server: Server, name: str) -> float:
    return server.state_dict()["adapter"]["state"][name][0]


# --- FedHyper ---


def test_fedhyper_adds_up_the_products_of_successive_means():
    # ḡ = (1, 0), (1, 1), (-1, -.5), (10, 0), (10, 0), (0, 2)
    # products -, 1, -1.5, -10, 100, 0;  a = 1, 2, .5, .2 (cut), 5 (cut), 5
    # θ = -(1, 0) - 2(1, 1) + .5(1, .5) - .2(10, 0) - 5(10, 0) - 5(0, 2) = (-54.5, -11.75)
    server = server_of(FedHyper(), 0, 0)
    means = [(1, 0), (1, 1), (-1, -0.5), (10, 0), (10, 0), (0, 2)]
    found = [send(server, mean).scale["all"] for mean in means]
    assert found == pytest.approx([1, 2, 0.5, 0.2, 5, 5], rel=1e-12)
    assert server.params["w"].tolist() == pytest.approx([-54.5, -11.75], rel=1e-12)


def test_fedhyper_remembers_exactly_the_last_mean_and_no_skipped_round():
    # After the skipped round the product is still with (1, 3): 1 + 3·.1 + 1·.1 = 1.4
    server = server_of(FedHyper(), 0, 0, min_clients=2)
    send(server, (2, 5), (0, 1))
    assert server.state_dict()["tensors"]["direction/w"].tolist() == [1, 3]
    assert send(server, (7, 7)).status == "skipped"
    assert send(server, (0.1, 0.1), (0.1, 0.1)).scale["all"] == pytest.approx(1.4, rel=1e-12)
    assert server.state_dict()["tensors"]["direction/w"].tolist() == [0.1, 0.1]


def test_fedhyper_has_one_factor_unless_told_otherwise():
    # v: 1·.5, w: 2·.25; together 1 + .5 + .5 = 2, apart 1.5 and 1.5; bound 1.6 cuts the one
    model = {"v": torch.zeros(1), "w": torch.zeros(1)}
    rounds = [
        {"v": torch.ones(1), "w": torch.ones(1) * 2},
        {"v": torch.ones(1) / 2, "w": torch.ones(1) / 4},
    ]
    for adapter, expected in [
        (FedHyper(), {"all": 2.0}),
        (FedHyper(groups="tensor"), {"v": 1.5, "w": 1.5}),
        (FedHyper(bound=1.6), {"all": 1.6}),
    ]:
        server = Server(model, adapter=adapter)
        assert [server.step([g]).scale for g in rounds][-1] == pytest.approx(expected)


# --- FedLWS ---


def test_fedlws_shrinks_by_hand():
    # θ = 5(.6, .8), ḡ = (.6, .8) in every round, updates ḡ ± d: Σw‖g‖² - ‖ḡ‖² = ‖d‖², ‖ḡ‖ = 1
    # d = (4, 3):   τ = .03·5 = .15         γ = 5/5.15            ‖θ‖ = 4γ = 3.883495
    # d = (4, 3):   τ = .15                 γ = 3.883495/4.033495 ‖θ‖ = 2.883495·.962811 = 2.776262
    # d = (40, 30): τ = .03·50 = 1.5, .2    γ = 2.776262/2.976262 ‖θ‖ = 1.776262·.932801 = 1.656899
    # d = 0:        τ = 0, .01              γ = 1.656899/1.666899 ‖θ‖ = .656899·.994001 = .652958
    server = server_of(FedLWS(), 3, 4)
    lengths: list[float] = []
    for d in ((4, 3), (4, 3), (40, 30), (0, 0)):
        record = send(server, (0.6 + d[0], 0.8 + d[1]), (0.6 - d[0], 0.8 - d[1]))
        assert set(record.scale.values()) == {1}  # the step itself is not scaled
        lengths.append(float(server.params["w"].norm()))
        assert (server.params["w"] / lengths[-1]).tolist() == pytest.approx([0.6, 0.8])
    assert lengths == pytest.approx([3.883495, 2.776262, 1.656899, 0.652958], abs=2e-6)


def test_fedlws_shrinks_after_another_optimizers_step():
    # One client: τ = .01, ḡ = 1. m = 1, 1.9; θ = 4:
    # γ = 4/4.01, θ = γ(4 - .5·1) = 3.491272; γ = 3.491272/3.501272, θ = γ(3.491272 - .5·1.9)
    server = server_of(FedLWS(), 4, optimizer=Momentum(lr=0.5))
    first = 4 / 4.01 * 3.5
    for expected in (first, first / (first + 0.01) * (first - 0.95)):
        send(server, (1,))
        assert server.params["w"].item() == pytest.approx(expected, rel=1e-12)


def test_fedlws_takes_a_layer_together_and_lets_one_that_is_zero_move():
    # a: ‖θ‖ = √(3² + 0) = 3, ‖ḡ‖ = √(1² + 1²); τ = .01. Alone, a.bias would have γ = 0
    # b: all zero, γ = 1, so θ = -ḡ = -1; in the next round ‖θ‖ = 1, γ = 1/1.01, θ = -2/1.01
    model = {"a.weight": torch.tensor([3.0]), "a.bias": torch.zeros(1), "b.weight": torch.zeros(1)}
    server = Server(model, adapter=FedLWS())
    g = {name: torch.ones(1) for name in model}
    server.step([g])
    gamma = 3 / (3 + 0.01 * math.sqrt(2))
    found = {name: value.item() for name, value in server.params.items()}
    assert found == pytest.approx({"a.weight": 2 * gamma, "a.bias": -gamma, "b.weight": -1})
    server.step([g])
    assert server.params["b.weight"].item() == pytest.approx(-2 / 1.01)


def test_fedlws_takes_weights():
    # w = .9, .1; g = 1, 11: ḡ = 2, Σw‖g‖² = .9 + 12.1 = 13, spread √(13 - 4) = 3, τ = .09, θ = 4
    server = server_of(FedLWS(), 4)
    updates = [((1.0,), 9), ((11.0,), 1)]
    server.step([Update({"w": torch.tensor(g).double()}, weight=w) for g, w in updates])
    assert server.params["w"].item() == pytest.approx(4 / (4 + 0.09 * 2) * 2, rel=1e-12)


# --- pooled ---

TWO = [(3, 1), (4, 2), (1, 1), (2, -4), (10, -12), (0, 0), (2, 2)]
"""Two clients a round: P = (2n² - A)/1 = ab and n² = ((a + b)/2)²."""


def test_pooled_by_hand():
    # n² = 4, P = 3:     P̄ = 3,                    x = .75,       E = .75,                   s = 1
    # n² = 9, P = 8:     P̄ = 2.7 + .8 = 3.5,       x = 3.5/9      s = x/.75 = .518519 within 1 ± .5
    #                                                             E = .675 + .038889 = .713889
    # n² = 1, P = 1:     P̄ = 3.15 + .1 = 3.25,     x = 3.25       s = 4.55, cut to 2
    #                                                             E = .6425 + .325 = .9675
    # n² = 1, P = -8:    P̄ = 2.925 - .8 = 2.125,   x = 2.125      s = 2.125/.9675 within 2.5
    #                                                             E = .87075 + .2125 = 1.08325
    # n² = 1, P = -120:  P̄ = 1.9125 - 12 < 0                      s = 1, E stays
    # all zero:                                                   s = 1, E and P̄ stay
    # n² = 4, P = 4:     P̄ = .9·-10.0875 + .4 < 0                 s = 1
    server = server_of(Pooled(gamma=0.5), 0)
    expected = [1, 3.5 / 9 / 0.75, 2, 2.125 / 0.9675, 1, 1, 1]
    pooled = [3, 3.5, 3.25, 2.125, -10.0875, -10.0875, -8.67875]
    baseline = [0.75, 0.675 + 0.35 / 9, 0.9675, 1.08325, 1.08325, 1.08325, 1.08325]
    for cohort, s, p, e in zip(TWO, expected, pooled, baseline, strict=True):
        assert scales(server, [cohort]) == pytest.approx([s], rel=1e-12)
        assert memory(server, "pooled") == pytest.approx(p, rel=1e-12)
        assert memory(server, "baseline") == pytest.approx(e, rel=1e-12)


@pytest.mark.parametrize(
    ("population", "second", "third"),
    [
        # N = 4: P_N = n² - (1 - 2/4)(n² - P) = 3.5, 8.5, 1. P̄ = 3.5, 3.15 + .85 = 4, 3.7
        # x = .875, 4/9, 3.7. E = .875, .7875 + .4/9
        (4, 4 / 9 / 0.875, 3.7 / (0.7875 + 0.4 / 9)),
        # all clients: P_N = n² = 4, 9, 1. P̄ = 4, 4.5, 4.15; x = 1, .5, 4.15; E = 1, .95
        (2, 0.5, 4.15 / 0.95),
        (1, 0.5, 4.15 / 0.95),  # a client may be drawn twice
        # not known: endless, P̄ = 3, 3.5, 3.25
        (None, 3.5 / 9 / 0.75, 3.25 / (0.675 + 0.35 / 9)),
    ],
)
def test_pooled_knows_how_many_clients_were_not_asked(
    population: int | None, second: float, third: float
):
    server = server_of(Pooled(gamma=math.inf), 0)
    found = scales(server, TWO[:3], population=population)
    assert found == pytest.approx([1, second, third], rel=1e-12)


def test_pooled_takes_weights():
    # w = .75, .25; g = 1, 5: ḡ = 2, n² = 4, Q = .5625 + 1.5625 = 2.125, P = 1.875/.375 = 5 = 1·5
    server = server_of(Pooled(), 0)
    server.step([Update({"w": torch.tensor([g]).double()}, weight=w) for g, w in ((1, 3), (5, 1))])
    assert memory(server, "pooled") == pytest.approx(5, rel=1e-12)
    assert memory(server, "baseline") == pytest.approx(1.25, rel=1e-12)


def test_pooled_learns_nothing_from_one_client_or_from_updates_that_cancel():
    # P̄ = 3, E = .75. One client of 2: x = 3/4, s = 1; of 4: x = 3/16, E = .75, s = .25
    # (5, -5): n² = 0, far beyond E: 1 + γt = 4, and nothing is remembered. (3, 1): s = x/E
    server = server_of(Pooled(gamma=1), 0)
    assert scales(server, [(3, 1), (2,), (4,)]) == pytest.approx([1, 1, 0.25], rel=1e-12)
    e = 0.9 * 0.75 + 0.1 * 3 / 16
    assert scales(server, [(5, -5)]) == [4]
    assert (memory(server, "pooled"), memory(server, "baseline")) == pytest.approx((3, e))
    assert scales(server, [(3, 1)]) == pytest.approx([0.75 / e], rel=1e-12)
    assert scales(server_of(Pooled(gamma=1), 0), [(2,), (3,), (5, -5), (4,)]) == [1] * 4


def test_a_round_that_hardly_moves_is_not_remembered():
    # ḡ a millionth of what it was: x = P̄/n² ~ 1e12, which E would carry for hundreds of rounds
    server = server_of(Pooled(gamma=0.1), 0)
    scales(server, [(3, 1), (3, 1)])
    assert scales(server, [(3e-6, 1e-6)]) == [1.2]
    assert memory(server, "baseline") == pytest.approx(0.75)


# --- aligned ---


def test_aligned_by_hand():
    # β = .5, γ = .25. ḡ, the mean m of those before it, y = ⟨ḡ, m⟩/‖ḡ‖²:
    # (2, 0)   no m                                                      s = 1
    # (1, 1)   (2, 0)                          y = 1        E = 1        s = 1, the first y
    # (1, 0)   ((1, 1) + .5(2, 0))/1.5         y = 4/3      E = 7/6      s = 4/3 within 1 ± .5
    # (4, 0)   ((1, 0) + .5(1, 1) + .25(2, 0))/1.75 = (8/7, 2/7)
    #                                          y = 2/7      E = 61/84    s = 12/49, cut to .25
    # (-1, 0)  ((4, 0) + .5(1, 0) + .25(1, 1) + .125(2, 0))/1.875 = (8/3, 2/15)
    #                                          y = -8/3     E = -163/168 s < 0, cut to 0
    # (1, 0)   (-1 + .5·4 + .25·1 + .125·1 + .0625·2)/1.9375 = 24/31 = y
    #                                                                    s = 1, as E < 0
    means = [(2, 0), (1, 1), (1, 0), (4, 0), (-1, 0), (1, 0)]
    expected = [1, 1, 4 / 3, 0.25, 0, 1]
    baseline = [0, 1, 7 / 6, 61 / 84, -163 / 168, -163 / 336 + 12 / 31]
    server = server_of(Aligned(gamma=0.25, beta=0.5), 0, 0)
    for mean, s, e in zip(means, expected, baseline, strict=True):
        before = server.params["w"].clone()
        assert send(server, mean).scale["w"] == pytest.approx(s, rel=1e-12)
        assert memory(server, "baseline") == pytest.approx(e, rel=1e-12)
        moved = (before - server.params["w"]).tolist()
        assert moved == pytest.approx([s * x for x in mean], rel=1e-12)


def test_aligned_slows_down_and_never_turns_round():
    # ḡ = 1 for 9 rounds, then -1: y = -1, E = 1; γt = 9·.5 would allow 1 - 4.5
    server = server_of(Aligned(gamma=0.5), 0)
    assert scales(server, [(1,)] * 9 + [(-1,)]) == pytest.approx([1] * 9 + [0], abs=1e-12)


def test_aligned_with_a_group_that_wakes_up_and_one_that_hardly_moves():
    # Zero for two rounds: nothing known. Then ḡ = 1 with m = 0: y = 0, no baseline yet.
    # Then y = .1/(1 - .9³) is the first: s = 1. A millionth of ḡ: y ~ 1e6, 1 + γt, E stays
    server = server_of(Aligned(), 0)
    assert scales(server, [(0,), (0,), (1,), (1,)]) == [1, 1, 1, 1]
    e = memory(server, "baseline")
    assert e == pytest.approx(0.1 / (1 - 0.9**3), rel=1e-12)
    assert scales(server, [(1e-6,), (-1e-6,)]) == pytest.approx([1 + 0.02 * 4, 1 - 0.02 * 5])
    assert memory(server, "baseline") == e


# --- what P estimates: every cohort is a group of its own, so that the rule itself is measured ---

COHORTS = 40_000
UNEQUAL = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
WEIGHTS = pytest.mark.parametrize(
    "weights", [np.full(5, 0.2), UNEQUAL], ids=["equal weights", "unequal weights"]
)


def heavy_tailed(clients: int) -> Array:
    rng = np.random.default_rng(5)
    g = np.array([1.0, 0.5, 0, 0]) + rng.standard_normal((clients, 4))
    return g * np.exp(0.7 * rng.standard_normal((clients, 1)))


def measured(clients: Array, members: Array, weights: Array, N: int | None) -> tuple[Array, Array]:
    """P_N of each cohort, as the rule remembers it after its first round, and their means."""
    g = clients[members]
    means = np.einsum("k,ckd->cd", weights, g)
    names = [f"{k}.g" for k in range(len(members))]
    sq = (g**2).sum(axis=2)
    columns = (sq @ weights, sq @ weights**2, (means**2).sum(axis=1))
    sums = [dict(zip(names, column.tolist(), strict=True)) for column in columns]
    adapter = Pooled()
    groups = adapter.group(dict.fromkeys(names, 4))
    stats = Statistics(*sums, weights=tuple(weights), N=N)
    return adapter.adapt(stats, groups, adapter.start(groups), 0)[1]["pooled"], means


def within_three_errors(sample: Array, expected: float) -> bool:
    return abs(sample.mean() - expected) < 3 * sample.std(ddof=1) / math.sqrt(len(sample))


@WEIGHTS
def test_p_is_unbiased_in_an_endless_population(weights: Array):
    # Drawn with replacement: endless copies of 30 clients
    clients = heavy_tailed(30)
    members = np.random.default_rng(1).integers(30, size=(COHORTS, 5))
    target = float((clients.mean(axis=0) ** 2).sum())
    found, means = measured(clients, members, weights, None)
    assert within_three_errors(found, target)
    assert not within_three_errors((means**2).sum(axis=1), target)  # ‖ḡ‖² is not


def without_replacement(N: int) -> Array:
    rng = np.random.default_rng(2)
    return rng.permuted(np.tile(np.arange(N), (COHORTS, 1)), axis=1)[:, :5]


@WEIGHTS
def test_p_n_in_a_population_of_n(weights: Array):
    # With S² = Σ‖g_k - g_c‖²/(N - 1) and c = ‖g_c‖², cohorts without replacement have
    #   E‖g‖² = c + S²(N - 1)/N,  E⟨g_j, g_k⟩ = c - S²/N,  so  E P = c - S²/N,  E(n² - P) = S²Σw²
    #   E P_N = E P + (r/N) S²Σw² = c + (rΣw² - 1) S²/N: c itself for equal weights
    N, clients = 12, heavy_tailed(12)
    members = without_replacement(N)
    c = float((clients.mean(axis=0) ** 2).sum())
    per_client = float(((clients - clients.mean(axis=0)) ** 2).sum()) / (N - 1) / N
    endless, _ = measured(clients, members, weights, None)
    finite, _ = measured(clients, members, weights, N)
    assert within_three_errors(endless, c - per_client)
    assert not within_three_errors(endless, c)
    assert within_three_errors(finite, c + (5 * float(weights @ weights) - 1) * per_client)


def test_p_n_and_v_with_equal_weights_are_what_their_names_say():
    # E P_N = E⟨ḡ, g_c⟩ and E V = E‖ḡ - g_c‖², cohort by cohort against the truth
    N, clients = 12, heavy_tailed(12)
    everyone = clients.mean(axis=0)
    found, means = measured(clients, without_replacement(N), np.full(5, 0.2), N)
    assert within_three_errors(found - means @ everyone, 0)
    variance = (means**2).sum(axis=1) - found
    assert within_three_errors(variance - ((means - everyone) ** 2).sum(axis=1), 0)


def test_weights_that_do_not_sum_to_one_count_by_their_shares():
    # An estimator's weights 1.5, .5 are twice .75, .25: sums of w double, of w² and ḡ² quadruple.
    # g = 1, 5 as above: P = 5, ‖ḡ/2‖² = 4. Spread: .75 + 6.25 - 4 = 3; ‖θ‖ = 3, ‖ḡ‖ = 4
    stats = Statistics({"g": 14.0}, {"g": 8.5}, {"g": 16.0}, (1.5, 0.5), model_sq={"g": 9.0})
    pooled, shrinking = Pooled(), FedLWS()
    groups = pooled.group({"g": 1})
    _, state = pooled.adapt(stats, groups, pooled.start(groups), 0)
    assert (state["pooled"][0], state["baseline"][0]) == pytest.approx((5, 1.25), rel=1e-12)
    factors, _ = shrinking.adapt(stats, groups, {}, 0)
    assert factors.shrink == pytest.approx(3 / (3 + 0.03 * math.sqrt(3) * 4), rel=1e-12)


# --- settings, and what no statistics may do ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pooled(gamma=-0.1), r"Pooled\(gamma=-0.1\): must be 0 or more, inf for no bounds"),
        (lambda: Aligned(beta=1.0), r"Aligned\(beta=1.0\): must be in \[0, 1\)"),
        (lambda: FedHyper(bound=0.5), r"FedHyper\(bound=0.5\): must be from 1 to 1e15"),
        (lambda: FedHyper(bound=math.nan), r"FedHyper\(bound=nan\): must be from 1 to 1e15"),
        (lambda: FedLWS(slope=-1), r"FedLWS\(slope=-1\): must be 0 or more"),
        (lambda: FedLWS(min_tau=math.inf), r"FedLWS\(min_tau=inf\): must be 0 or more"),
        (lambda: FedLWS(max_tau=0.001), r"FedLWS\(max_tau=0.001\): must be min_tau=0.01 or more"),
    ],
)
def test_a_bad_setting_is_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("adapter", [FedHyper(), Aligned(), FedLWS()], ids=repr)
def test_a_statistic_that_was_not_measured_is_missed(adapter: Adapter):
    groups = adapter.group({"g": 1})
    stats = Statistics({"g": 1.0}, {"g": 1.0}, {"g": 1.0}, (1.0,))
    with pytest.raises(ValueError, match="a statistic the adapter needs was not measured"):
        adapter.adapt(stats, groups, adapter.start(groups), 0)


TENSORS = ("a.x", "a.y")
SQUARES = st.one_of(st.just(0.0), st.floats(0, 1e60), st.floats(0, 1), st.floats(0, 1e-290))
EACH = st.tuples(SQUARES, SQUARES).map(lambda values: dict(zip(TENSORS, values, strict=True)))
ANY_STATISTICS = st.builds(
    Statistics,
    sum_sq=EACH,
    sum_sq2=EACH,
    mean_sq=EACH,
    weights=st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=4).map(tuple),
    N=st.one_of(st.none(), st.integers(1, 10**9)),
    direction=st.builds(
        lambda sign, values: {name: sign * x for name, x in values.items()},
        st.sampled_from((-1, 1)),
        EACH,
    ),
    model_sq=EACH,
)
"""Whether or not updates could have them."""


@settings(max_examples=100)
@given(
    rounds=st.lists(ANY_STATISTICS, min_size=1, max_size=5),
    gamma=st.sampled_from((0.0, 0.02, 5.0, math.inf)),
    groups=st.sampled_from(("tensor", "all")),
)
def test_no_statistics_give_nan_or_infinity(rounds: list[Statistics], gamma: float, groups: Any):
    for cls in REGISTRY.values():
        own: dict[str, Any] = {"gamma": gamma} if issubclass(cls, Relative) else {}
        adapter = cls(groups=groups, **own)
        grouped = adapter.group(dict.fromkeys(TENSORS, 1))
        state = adapter.start(grouped)
        for t, stats in enumerate(rounds):
            factors, state = adapter.adapt(stats, grouped, state, t)
            require_healthy(factors, state)
            assert gamma or not own or (factors.scale == 1).all()


def require_healthy(factors: Factors, state: AdapterState) -> None:
    shrink = np.ones(1) if factors.shrink is None else factors.shrink
    for values in (factors.gsi, factors.baseline, factors.scale, shrink, *state.values()):
        assert np.isfinite(values).all()
    assert (factors.scale >= 0).all()
    assert ((shrink >= 0) & (shrink <= 1)).all()


def test_fedlws_leaves_a_frozen_tensor_as_it_is():
    model = {"a": torch.ones(2), "frozen": torch.ones(2)}
    server = Server(model, adapter=FedLWS())
    record = server.step([{"a": torch.tensor([g, 1.0]), "frozen": torch.zeros(2)} for g in (1, 2)])
    assert record.stepped
    assert torch.equal(server.params["frozen"], torch.ones(2))
    assert not torch.equal(server.params["a"], torch.ones(2) - torch.tensor([1.5, 1.0]))
