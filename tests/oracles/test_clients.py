"""Client methods by hand: two clients with F_k(w) = mean ½(w − b)² over their targets b.

Unless said otherwise b = 2 and −4, θ = 0, the local rate ½ and K = 2 steps, so that FedAvg takes

    client 0   ∇ = −2, −1   w = 0, 1, 1.5
    client 1   ∇ =  4,  2   w = 0, −2, −3      mean −.75, where the optimum is −1

All numbers are sums of powers of two, and so exact.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedglad import Record, Server, Update
from fedglad.adapters import Fixed
from fedglad.clients.feddyn import FedDyn
from fedglad.clients.fednova import FedNova
from fedglad.clients.fedprox import FedProx
from fedglad.clients.fedsgd import FedSGD
from fedglad.clients.method import Memory, Plain
from fedglad.clients.scaffold import Scaffold
from fedglad.clients.vrl_sgd import VRLSGD
from fedglad.clients.workbench import Workbench
from fedglad.optimizers import SGD
from fedglad.rng import stream

Targets = list[list[float]]

TWO: Targets = [[2.0], [-4.0]]
STEPS: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "steps": 2}


def half_square(scores: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (scores - y).square().mean()


@dataclass
class Played:
    """A round's end: θ, what each client remembers, the server half's state."""

    theta: float
    memories: list[dict[str, float]]
    state: dict[str, float]
    record: Record
    extras: list[float]


def play(client: Plain, targets: Targets = TWO, rounds: int = 1, **server: Any) -> list[Played]:
    """All clients in every round, by the real loop and the real server."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    client = client.among(len(targets))
    at = Server(model, method=client.server, guard=None, **server)
    bench = Workbench(nn.Linear(1, 1, bias=False), half_square)
    memories: list[Memory] = [{} for _ in targets]
    found: list[Played] = []

    def number(vector: Tensor) -> float:
        return bench.layout.views(vector)["weight"].item()

    for t in range(rounds):
        theta, updates, extras = at.packed[0].clone(), list[Update](), list[float]()
        for k, b in enumerate(targets):
            y = torch.tensor(b)[:, None]
            result = bench.train(
                *(client, theta, {}, torch.ones_like(y), y, stream(1, "client", t, k)),
                memory=memories[k],
                sent={name: at.sent[name] for name in client.hears if name in at.sent},
            )
            memories[k] = result.memory
            extras += [] if result.extra is None else [number(result.extra)]
            told: dict[str, Any] = {"weight": len(b), "steps": result.steps}
            updates.append(Update(result.delta, client=k, extra=result.extra, **told))
        record = at.step(updates)
        assert record.stepped, record.reason
        memories = [client.settle(own, at.sent) for own in memories]
        held = [{name: number(vector) for name, vector in own.items()} for own in memories]
        state = {name: number(vector) for name, vector in at.sent.items()}
        found.append(Played(number(at.packed[0]), held, state, record, extras))
    return found


def test_plain_is_fedavg():
    (found,) = play(Plain(**STEPS))
    assert found.theta == -0.75
    assert found.memories == [{}, {}]


# -------------------------------------------------------------------------------------- FedSGD


def test_fedsgd_sends_the_gradient_of_all_samples():
    # Client 0 has b = 2 and 0, client 1 b = −4: ∇F_0(0) = −1, ∇F_1(0) = 4.
    # By samples: (2·−1 + 1·4)/3 = ⅔, the gradient over all three, (−2 + 0 + 4)/3. θ = −½ · ⅔.
    (found,) = play(FedSGD(), [[2.0, 0.0], [-4.0]], optimizer=SGD(lr=0.5))
    assert [entry["sq_norm"] for entry in found.record.clients] == [1.0, 16.0]
    assert found.theta == pytest.approx(-1 / 3)


def test_fedsgd_takes_one_step_however_many_samples_there_are():
    client = FedSGD()
    (batch,) = client.batches(1000, np.random.default_rng(0))
    assert batch.tolist() == list(range(1000))
    assert client.count(1000) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"lr": 0.1}, r"FedSGD\(lr=0.1\): .*fixed at 1.0; set server.lr"),
        ({"optimizer": "adam"}, r"FedSGD\(optimizer='adam'\): .*fixed at 'sgd'"),
        ({"batch_size": 64}, r"FedSGD\(batch_size=64\): .*fixed at 0; use plain for local steps"),
        ({"epochs": 2}, r"FedSGD\(epochs=2\): .*fixed at 1"),
        ({"steps": 3}, r"FedSGD\(steps=3\): .*fixed at 0"),
        ({"drop_last": True}, r"FedSGD\(drop_last=True\)"),
        ({"schedule": "linear"}, r"FedSGD\(schedule='linear'\): .*fixed at 'constant'"),
        ({"warmup": 0.5}, r"FedSGD\(warmup=0.5\)"),
        ({"weight_decay": -1.0}, r"FedSGD\(weight_decay=-1.0\): must be 0 or more"),
    ],
)
def test_what_fedsgd_has_no_use_for_is_refused(setting: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        FedSGD(**setting)


# -------------------------------------------------------------------------------------- FedProx


def test_fedprox_pulls_back_to_the_global_model():
    # μ = 1. Client 0: ∇ = −2, w = 1; then (1 − 2) + 1·(1 − 0) = 0, w = 1.
    # Client 1: ∇ = 4, w = −2; then (−2 + 4) + 1·(−2 − 0) = 0, w = −2. Mean −.5.
    (found,) = play(FedProx(mu=1.0, **STEPS))
    assert found.theta == -0.5


def test_fedprox_without_a_pull_leaves_every_bit():
    # 0·(w − θ) would make +0 of −0, and NaN where a client has gone to infinity.
    grad, theta = torch.tensor([-0.0, 3.0]), torch.zeros(2)
    FedProx(mu=0.0).correct(grad, torch.tensor([1.0, math.inf]), theta, {}, {})
    assert grad.numpy().tobytes() == np.array([-0.0, 3.0], np.float32).tobytes()


@pytest.mark.parametrize("mu", [-0.1, math.inf, math.nan])
def test_a_pull_that_cannot_be_meant_is_refused(mu: float):
    with pytest.raises(ValueError, match=rf"FedProx\(mu={mu}\): must be 0 or more, and finite"):
        FedProx(mu=mu)


# ------------------------------------------------------------------------------------- SCAFFOLD


@pytest.mark.parametrize("option", ["mean", "II"])
def test_scaffold_takes_the_drift_out(option: Any):
    # Round 0 is FedAvg: θ = −.75. Raw gradients −2, −1 and 4, 2: c_0 = −1.5, c_1 = 3, c = .75.
    # II: c_0 = 0 − 0 + (0 − 1.5)/(2·½) = −1.5, c_1 = (0 + 3)/1 = 3.
    # Round 1, client 0 takes (w − 2) + 1.5 + .75 = w + .25: w = −.75, −.5, −.375; raw −2.75, −2.5.
    #          client 1 takes (w + 4) − 3 + .75 = w + 1.75: w = −.75, −1.25, −1.5; raw 3.25, 2.75.
    # c_0 = −2.625, c_1 = 3, c = .75 + ½(−1.125 + 0) = .1875 = ½(−2.625 + 3); θ = −.9375.
    # II: c_0 = −1.5 − .75 + (−.75 + .375)/1 = −2.625, c_1 = 3 − .75 + (−.75 + 1.5)/1 = 3.
    first, second = play(Scaffold(option=option, **STEPS), rounds=2)
    assert first.theta == -0.75
    assert first.memories == [{"c_k": -1.5}, {"c_k": 3.0}]
    assert first.state == {"c": 0.75}
    assert second.theta == -0.9375
    assert second.memories == [{"c_k": -2.625}, {"c_k": 3.0}]
    assert second.state == {"c": 0.1875}
    assert second.extras == [-1.125, 0.0]


def test_scaffolds_mean_gradient_is_raw_whatever_the_steps_are():
    # Momentum ½: client 0 has ∇ = −2, m = −2, w = 1; ∇ = −1, m = −2, w = 2. The mean is −1.5, and
    # (θ − w)/(K lr) would be −2. Client 1: ∇ = 4, w = −2; ∇ = 2, m = 4, w = −4; mean 3.
    sgdm: Any = {**STEPS, "optimizer": "sgdm", "momentum": 0.5}
    (found,) = play(Scaffold(**sgdm))
    assert found.theta == -1
    assert found.memories == [{"c_k": -1.5}, {"c_k": 3.0}]
    # Steps cut to length 1: client 0 has ∇ = −2, w = ½; ∇ = −1.5, w = 1: mean −1.75.
    # Client 1: ∇ = 4, w = −½; ∇ = 3.5, w = −1: mean 3.75. (Clipping divides by norm + 1e-6.)
    (found,) = play(Scaffold(clip_norm=1.0, **STEPS))
    assert [own["c_k"] for own in found.memories] == pytest.approx([-1.75, 3.75], abs=1e-5)
    # Adam goes lr in each of its first steps, whatever the gradient: w = ½, −½, so ∇ = −1.5, 3.5.
    adam: Any = {**STEPS, "optimizer": "adam"}
    (found,) = play(Scaffold(**adam))
    assert [own["c_k"] for own in found.memories] == pytest.approx([-1.75, 3.75], abs=1e-5)


def test_scaffold_divides_by_all_clients_also_when_few_take_part():
    client = Scaffold(clients=8)
    state, shift = client.server(torch.zeros(3), torch.full((3,), 2.0), 2, {"c": torch.ones(3)})
    assert state["c"].tolist() == [1.25] * 3  # 1 + 2/8
    assert shift is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"optimizer": "sgdm"}, r"Scaffold\(optimizer='sgdm'\): must be 'sgd'.*option = 'mean'"),
        ({"optimizer": "adam"}, r"Scaffold\(optimizer='adam'\)"),
        ({"clip_norm": 1.0}, r"Scaffold\(clip_norm=1.0\): must be 0"),
        ({"schedule": "linear"}, r"Scaffold\(schedule='linear'\): must be 'constant'"),
    ],
)
def test_option_ii_is_for_plain_sgd_alone(setting: Any, said: str):
    settings: Any = {"optimizer": "sgd", **setting}
    with pytest.raises(ValueError, match=said):
        Scaffold(option="II", **settings)
    Scaffold(option="mean", **settings)


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"Scaffold\(option='III'\): must be 'mean' or 'II'"):
        Scaffold(option="III")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- FedDyn


def test_feddyn_reaches_the_optimum_of_the_mean():
    # α = 1. Round 0, client 0: ∇ = −2, w = 1; (1 − 2) + 1·(1 − 0) = 0, w = 1; λ_0 = −1.
    #                 client 1: ∇ = 4, w = −2; (−2 + 4) + (−2) = 0, w = −2; λ_1 = 2.
    # mean −.5, h = ½(−1 + 2) = .5, θ = −.5 − .5/1 = −1 = 0 + 2·(−.5): the optimum already.
    # Round 1, client 0 takes (w − 2) + 1 + (w + 1) = 2w: w = −1, 0, 0; λ_0 = −1 − 1 = −2.
    #          client 1 takes (w + 4) − 2 + (w + 1) = 2w + 3: w = −1, −1.5, −1.5; λ_1 = 2.5.
    # mean −.75, h = ½(−2 + 2.5) = .25, θ = −.75 − .25 = −1.
    first, second = play(FedDyn(alpha=1.0, **STEPS), rounds=2)
    assert first.theta == -1
    assert first.memories == [{"lambda_k": -1.0}, {"lambda_k": 2.0}]
    assert first.state == {"h": 0.5}
    assert second.theta == -1
    assert second.memories == [{"lambda_k": -2.0}, {"lambda_k": 2.5}]
    assert second.state == {"h": 0.25}


def test_an_adapter_scales_feddyns_mean_and_not_its_shift():
    # As above with s = ½: θ = 0 + ½·(−.5) − .5/1 = −.75.
    (found,) = play(FedDyn(alpha=1.0, **STEPS), adapter=Fixed(value=0.5))
    assert found.theta == -0.75


def test_feddyns_mean_is_by_weight_and_its_h_by_clients():
    # α = 1, client 0 counts 3: mean(w_k) is by weight, (3·1 − 2)/4 = .25; h by clients as above.
    (found,) = play(FedDyn(alpha=1.0, **STEPS), [[2.0] * 3, [-4.0]])
    assert found.theta == -0.25  # .25 − .5/1


@given(st.floats(1e-3, 1e3), st.lists(st.floats(-8, 8), min_size=1, max_size=5))
def test_feddyns_round_0_goes_twice_the_mean_for_every_alpha(alpha: float, targets: list[float]):
    # K = 1: w_k = b_k/2 without a pull, as w = θ. θ + 2 mean(w_k − θ) = mean b, for every α.
    client = FedDyn(alpha=alpha, optimizer="sgd", lr=0.5, steps=1)
    (found,) = play(client, [[b] for b in targets])
    assert found.theta == pytest.approx(sum(targets) / len(targets), rel=1e-5, abs=1e-5)
    held = [own["lambda_k"] for own in found.memories]
    assert held == pytest.approx([-alpha * b / 2 for b in targets], rel=1e-5)
    assert found.state["h"] == pytest.approx(sum(held) / len(held), rel=1e-4, abs=1e-5 * alpha)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_an_alpha_that_cannot_be_meant_is_refused(alpha: float):
    with pytest.raises(ValueError, match=rf"FedDyn\(alpha={alpha}\): must be positive and finite"):
        FedDyn(alpha=alpha)


@pytest.mark.parametrize("method", [Scaffold, FedDyn])
def test_methods_that_count_clients_know_how_many_there_are(method: type[Scaffold | FedDyn]):
    assert method().among(7).clients == 7
    assert method(clients=7).among(7).clients == 7
    with pytest.raises(ValueError, match=r"\(clients=5\): there are 7 in the data, leave it at 0"):
        method(clients=5).among(7)
    with pytest.raises(ValueError, match=r"\(clients=-1\): must be 0"):
        method(clients=-1)
    with pytest.raises(ValueError, match=r"\(clients=0\): the server half must know how many"):
        method().server(torch.zeros(1), torch.zeros(1), 1, {})


# -------------------------------------------------------------------------------------- FedNova


def test_fednova_gives_more_steps_no_more_say():
    # Batches of one: client 0 has b = 2, 2 and takes 2 steps, client 1 one: w = 1.5 and −2.
    # d = −1.5/2 = −.75 and 2/1; by samples ⅔, ⅓: mean ⅙, τ_eff = ⅔·2 + ⅓·1 = 5/3, θ = −5/18,
    # where FedAvg goes up: ⅔·1.5 + ⅓·(−2) = ⅓.
    settings: Any = {"optimizer": "sgd", "lr": 0.5, "batch_size": 1}
    (found,) = play(FedNova(**settings), [[2.0, 2.0], [-4.0]])
    assert found.theta == pytest.approx(-5 / 18)
    assert play(Plain(**settings), [[2.0, 2.0], [-4.0]])[0].theta == pytest.approx(1 / 3)
    # GSI of d: sqrt((⅔·.5625 + ⅓·4)/(1/36)) = sqrt(61.5); statistics are of τ_eff d.
    assert found.record.gsi["weight"] == pytest.approx(math.sqrt(61.5))
    assert found.record.statistics
    assert found.record.statistics.mean_sq["weight"] == pytest.approx((5 / 18) ** 2)
    assert found.record.statistics.sum_sq["weight"] == pytest.approx(25 / 9 * 61.5 / 36)


def test_fednova_under_momentum():
    # ρ = ½, τ = 2: the first gradient counts 1 + ½, the second 1: a = 2.5. τ = 1: a = 1.
    # Client 0: ∇ = −2, w = 1; ∇ = −1, m = −2, w = 2: d = −2/2.5 = −.8. Client 1: w = −2, d = 2.
    # mean ⅔·(−.8) + ⅓·2 = 2/15, τ_eff = ⅔·2.5 + ⅓ = 2, θ = −4/15.
    client = FedNova(optimizer="sgdm", momentum=0.5, lr=0.5, batch_size=1)
    (found,) = play(client, [[2.0, 2.0], [-4.0]])
    assert found.theta == pytest.approx(-4 / 15)


def test_fednovas_lengths():
    # ρ = ½, τ = 3: 1 + ½ + ¼ and 1 + ½ and 1: 4.25
    assert FedNova(optimizer="sgdm", momentum=0.5).server.lengths([1, 2, 3]).tolist() == [
        *(1.0, 2.5, 4.25)
    ]
    assert FedNova(optimizer="sgd", momentum=0.5).server.lengths([1, 7]).tolist() == [1, 7]


@given(st.floats(0, 0.99), st.integers(1, 50))
def test_a_length_is_the_sum_of_what_each_gradient_counts(rho: float, steps: int):
    w = m = 0.0
    for _ in range(steps):  # momentum with a gradient of 1 and a rate of 1
        m = rho * m + 1
        w += m
    found = FedNova(optimizer="sgdm", momentum=rho).server.lengths([steps])
    assert found[0] == pytest.approx(w, rel=1e-9)


def test_fednova_needs_the_numbers_of_steps():
    server = Server({"w": torch.zeros(1)}, method=FedNova().server)
    sent = [Update({"w": torch.ones(1)}, steps=steps) for steps in (2, None)]
    record = server.step(sent)
    assert record.stepped
    assert record.rejected == {"#1": "the method needs Update(steps=...), got None"}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"optimizer": "adam"}, r"FedNova\(optimizer='adam'\): a_k is known for sgd and sgdm"),
        ({"optimizer": "adamw"}, r"FedNova\(optimizer='adamw'\)"),
        ({"weight_decay": 0.1}, r"FedNova\(weight_decay=0.1\): .*set it to 0"),
        ({"schedule": "linear"}, r"FedNova\(schedule='linear'\): .*set it to 'constant'"),
    ],
)
def test_fednova_is_for_sgd_with_and_without_momentum(setting: Any, said: str):
    with pytest.raises(ValueError, match=said):
        FedNova(**setting)


# -------------------------------------------------------------------------------------- VRL-SGD


def test_vrl_sgd_takes_each_clients_deviation_out():
    # Round 0 is FedAvg: θ = −.75. K lr = 1, g = −1.5, 3, ḡ = .75: Δ = −2.25, 2.25.
    # Round 1, client 0 takes (w − 2) + 2.25: w = −.75, −.5, −.375; client 1 (w + 4) − 2.25:
    # w = −.75, −1.25, −1.5. θ = −.9375, g = −.375, .75, ḡ = .1875: Δ = ∓(2.25 + .5625).
    first, second = play(VRLSGD(lr=0.5, steps=2), rounds=2)
    assert first.theta == -0.75
    assert first.memories == [{"deviation": -2.25}, {"deviation": 2.25}]
    assert second.theta == -0.9375
    assert second.memories == [{"deviation": -2.8125}, {"deviation": 2.8125}]


def test_vrl_sgd_divides_each_way_by_its_own_steps():
    # Batches of one: client 0 takes 2 steps, w = 1.5, client 1 one, w = −2.
    # u = −1.5/(2·½) = −1.5 and 2/(1·½) = 4, ū = 1.25: Δ = −2.75, 2.75.
    (found,) = play(VRLSGD(lr=0.5, batch_size=1), [[2.0, 2.0], [-4.0]])
    assert found.memories == [{"deviation": -2.75}, {"deviation": 2.75}]


@given(st.lists(st.lists(st.floats(-8, 8), min_size=1, max_size=4), min_size=1, max_size=4))
def test_vrl_sgds_deviations_sum_to_nothing(targets: Targets):
    for found in play(VRLSGD(lr=0.25, batch_size=2), targets, rounds=2):
        assert sum(own["deviation"] for own in found.memories) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"optimizer": "sgdm"}, r"VRLSGD\(optimizer='sgdm'\): must be 'sgd'"),
        ({"clip_norm": 1.0}, r"VRLSGD\(clip_norm=1.0\): must be 0"),
        ({"schedule": "linear"}, r"VRLSGD\(schedule='linear'\): must be 'constant'"),
    ],
)
def test_vrl_sgd_is_for_plain_sgd_alone(setting: Any, said: str):
    with pytest.raises(ValueError, match=said):
        VRLSGD(**setting)
