"""Methods that train in a way of their own, by hand, with the real loop and the real server.

Unless said otherwise F_k(w) = ½(w − b)² with b = 2 and −4, θ = 0, the local rate ½ and K = 2 steps.
Numbers are sums of powers of two, and so exact, where nothing else is said.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedglad import Glad, Record, Server, Update
from fedglad.clients import FedBN, FedProx, FedRep, FedSAM, Plain, Scaffold, Workbench
from fedglad.clients.ditto import Ditto
from fedglad.clients.method import Memory
from fedglad.clients.moon import MOON
from fedglad.rng import stream

Samples = tuple[list[float], list[float]]
TWO: list[Samples] = [([1.0], [2.0]), ([1.0], [-4.0])]
STEPS: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "steps": 2}
ONE: dict[str, Any] = {**STEPS, "steps": 1}


def half_square(scores: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (scores - y).square().mean()


def line(*weights: float, bias: float | None = None) -> nn.Sequential:
    """One number after the other is multiplied with; the bias is the last layer's."""
    layers = [nn.Linear(1, 1, bias=False) for _ in weights[1:]]
    model = nn.Sequential(*layers, nn.Linear(1, 1, bias=bias is not None))
    numbers = [*weights, *([] if bias is None else [bias])]
    for parameter, number in zip(model.parameters(), numbers, strict=True):
        nn.init.constant_(parameter, number)
    return model


@dataclass
class Played:
    """A round's end: the server's model, what each client remembers, the record."""

    state: dict[str, Any]
    memories: list[dict[str, Any]]
    record: Record
    losses: list[float]
    steps: list[int]


def play(
    client: Plain,
    model: nn.Module,
    samples: list[Samples] = TWO,
    rounds: int = 1,
    *,
    glad: bool = False,
) -> list[Played]:
    """All clients in every round."""
    client = client.among(len(samples))
    server = Server(model, method=client.server, guard=None, adapter=Glad() if glad else None)
    bench = Workbench(copy.deepcopy(model), half_square)
    memories: list[Memory] = [{} for _ in samples]
    found: list[Played] = []

    def plain(name: str, value: Tensor) -> Any:
        """Numbers by the parameter's name of a flat vector, and a list of anything else."""
        if value.shape != bench.w.shape or "/" in name:
            return value.tolist()
        return {name: view.flatten().tolist() for name, view in bench.layout.views(value).items()}

    for t in range(rounds):
        theta, buffers = server.packed[0].clone(), dict(server.packed[1])
        updates: list[Update] = []
        for k, (x, y) in enumerate(samples):
            pair = torch.tensor(x)[:, None], torch.tensor(y)[:, None]
            sent = {name: server.sent[name] for name in client.hears if name in server.sent}
            rng = stream(1, "client", t, k)
            method = client.at_round(t)
            many: Any = (method, theta, buffers, *pair, rng)
            done = bench.train(*many, t=t, memory=memories[k], sent=sent)
            memories[k] = done.memory
            told: dict[str, Any] = {"steps": done.steps, "loss": done.loss, "extra": done.extra}
            updates.append(Update(done.delta, client=k, buffers=done.buffers or None, **told))
        record = server.step(updates)
        assert record.stepped, record.reason
        held = [{name: plain(name, value) for name, value in own.items()} for own in memories]
        state = {name: value.flatten().tolist() for name, value in server.state.items()}
        losses = [update.loss for update in updates if update.loss is not None]
        steps = [update.steps for update in updates if update.steps is not None]
        found.append(Played(state, held, record, losses, steps))
    return found


# --------------------------------------------------------------------------------------- FedSAM


def test_fedsam_takes_the_gradient_further_on():
    # ρ = ½. Client 0: w = 0, ∇ = −2, so at −½: −2.5, w = 1.25; ∇ = −.75, at .75: −1.25, w = 1.875.
    # Client 1: ∇ = 4, at ½: 4.5, w = −2.25; ∇ = 1.75, at −1.75: 2.25, w = −3.375. Mean −.75.
    # The loss is that at w: (½·2² + ½·.75²)/2.
    (found,) = play(FedSAM(rho=0.5, **STEPS), line(0))
    assert found.state == {"0.weight": [-0.75]}
    assert [entry["sq_norm"] for entry in found.record.clients] == [1.875**2, 3.375**2]
    assert found.losses[0] == (2 + 0.28125) / 2


def test_fedsams_distance_is_of_the_whole_gradient():
    # h·a·x = ½·4·1 = 2 with b = 1: ∇ = (a, h) = (∂h 4, ∂a ½)·1; ‖∇‖ = √16.25, ρ = √16.25:
    # at (a, h) + (½, 4) = (4.5, 4.5): error 20.25 − 1 = 19.25, ∇ = 19.25·4.5 each = 86.625.
    model = line(4, 0.5)
    (found,) = play(FedSAM(rho=math.sqrt(16.25), **ONE), model, [([1.0], [1.0])])
    assert found.state["0.weight"][0] == pytest.approx(4 - 43.3125, rel=1e-6)
    assert found.state["1.weight"][0] == pytest.approx(0.5 - 43.3125, rel=1e-6)


def test_fedsam_at_no_distance_and_at_the_minimum_is_plain():
    (still,) = play(FedSAM(rho=0.5, **STEPS), line(2), [([1.0], [2.0])])  # ∇ = 0 has no direction
    assert still.state == {"0.weight": [2.0]}
    assert play(FedSAM(rho=0.0, **STEPS), line(0))[0] == play(Plain(**STEPS), line(0))[0]


def test_fedsams_second_pass_leaves_no_trace_in_the_buffers():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1))
    samples: list[Samples] = [([-1.0, 1.0], [0.0, 3.0])]
    # After one step both have seen one batch at θ.
    (sam,), (plain,) = (play(c, model, samples) for c in (FedSAM(rho=0.5, **ONE), Plain(**ONE)))
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert sam.state[name] == plain.state[name]
    assert sam.state["2.weight"] != plain.state["2.weight"]


# ----------------------------------------------------------------------------------------- MOON


def features(*weights: float) -> nn.Module:
    """Two features a·x, and a last layer of zeros: with targets of 0 the task has no gradient."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    first, last = model.parameters()
    with torch.no_grad():
        first.copy_(torch.tensor(weights)[:, None])
        last.zero_()
    return model


def test_moon_turns_features_away_from_those_of_before():
    # z = z_glob = (1, 0), z_prev = (0, 1): cosines 1 and 0. τ = 1: ℓ = log(1 + e^{−1}), and
    # ∂ℓ/∂z = σ(−1)·((0, 1) − (0, 0)), σ(−1) = 1/(1 + e). μ = 2, rate ½: a = (1, 0 − σ(−1)).
    bench, client = Workbench(features(1, 0), half_square), MOON(mu=2.0, tau=1.0, **ONE)
    theta, previous = bench.w.clone(), Workbench(features(0, 1)).w
    one = torch.ones(1, 1)
    done = bench.train(
        client, theta, {}, one, 0 * one, stream(1, "a"), memory={"previous": previous}
    )
    sigma = 1 / (1 + math.e)
    moved = bench.layout.views(theta - done.delta)["0.weight"].flatten().tolist()
    assert moved == pytest.approx([1.0, -sigma], rel=1e-6)
    assert done.loss == pytest.approx(2 * math.log(1 + math.exp(-1)), rel=1e-6)
    # What is remembered is the model as it is now.
    assert torch.equal(done.memory["previous"], theta - done.delta)
    assert bench.layout.views(previous)["0.weight"].flatten().tolist() == [0.0, 1.0]


def test_moons_first_round_is_fedavg_with_a_loss_that_is_log_2_more():
    samples: list[Samples] = [([1.0, 2.0], [1.0, 3.0]), ([1.0, -2.0], [1.0, 3.0])]
    # Models to compare with are as for evaluation, without dropout, and so the same.
    layers = [nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 1)]
    model = nn.Sequential(nn.Linear(1, 3), *layers)
    client: dict[str, Any] = {**STEPS, "steps": 3}
    moon, plain = (play(c, model, samples, 2) for c in (MOON(mu=4.0, **client), Plain(**client)))
    for name, value in plain[0].state.items():
        assert moon[0].state[name] == pytest.approx(value, rel=1e-5, abs=1e-6)
    # In the first step the model in training is θ; then it differs from both alike.
    assert moon[0].losses[0] == pytest.approx(plain[0].losses[0] + 4 * math.log(2), rel=1e-5)
    assert moon[1].state["0.weight"] != pytest.approx(plain[1].state["0.weight"], rel=1e-4)


def test_moon_asks_the_previous_model_with_its_own_buffers():
    """Running statistics are a part of the model that was remembered."""
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    (found,) = play(MOON(**ONE), model, [([1.0, 2.0], [1.0, 3.0])])
    assert found.memories[0]["previous/1.running_mean"] == found.state["1.running_mean"]
    assert found.memories[0]["previous/1.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mu": -1.0}, r"MOON\(mu=-1.0\): must be 0 or more"),
        ({"tau": 0.0}, r"MOON\(tau=0.0\): must be positive"),
    ],
)
def test_what_moon_cannot_mean_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        MOON(**given)


@pytest.mark.parametrize(
    ("model", "layer", "said"),
    [
        (nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten()), "", "no linear layer .*name a layer"),
        (line(1), "head", "the model has no layer 'head'"),
    ],
)
def test_moon_says_that_it_finds_no_features(model: nn.Module, layer: str, said: str):
    bench = Workbench(model, half_square)
    with pytest.raises(ValueError, match=said):
        bench.train(
            *(MOON(layer=layer), bench.w.clone(), {}, torch.ones(1, 1, 1), torch.ones(1, 1)),
            stream(1, "a"),
        )


# ---------------------------------------------------------------------------------------- Ditto


def test_ditto_trains_a_second_model_near_the_global_one():
    # Global as FedAvg: w = 1, 1.5 and −2, −3, θ = −.75. λ = ½, v = θ = 0 at first.
    # v_0: −2 + 0, v = 1; −1 + ½·1, v = 1.25. v_1: 4, v = −2; 2 + ½·(−2), v = −2.5.
    # Round 1, θ = −.75: w_0: −2.75, .625, −1.375, 1.3125; w_1: 3.25, −2.375, 1.625, −3.1875:
    # θ = −.9375. v_0: −.75 + ½·2 = .25, v = 1.125; −.875 + ½·1.875 = .0625, v = 1.09375.
    # v_1: 1.5 + ½·(−1.75) = .625, v = −2.8125; 1.1875 + ½·(−2.0625) = .15625, v = −2.890625.
    first, second = play(Ditto(lam=0.5, **STEPS), line(0), rounds=2)
    assert first.state == {"0.weight": [-0.75]}
    assert [own["own"]["0.weight"] for own in first.memories] == [[1.25], [-2.5]]
    assert second.state == {"0.weight": [-0.9375]}
    assert [own["own"]["0.weight"] for own in second.memories] == [[1.09375], [-2.890625]]
    # Steps and loss are those of the global model: (½·2² + ½·1²)/2.
    assert (first.steps[0], first.losses[0]) == (2, 1.25)


def test_dittos_own_model_has_its_own_statistics():
    """And it sends just what FedAvg would: nothing of the second pass."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1))
    samples: list[Samples] = [([-1.0, 1.0], [0.0, 3.0]), ([0.0, 4.0], [0.0, 3.0])]
    ditto, plain = (play(c, model, samples, 2) for c in (Ditto(**STEPS), Plain(**STEPS)))
    assert [found.state for found in ditto] == [found.state for found in plain]
    counts = [own["own/1.num_batches_tracked"] for own in ditto[1].memories]
    assert counts == [4, 4]  # its own four steps; the server's count has four of FedAvg's
    bench = Workbench(model)
    theta, buffers = bench.w.clone(), bench.kept()
    memory = {"own": theta + 1, **{f"own/{n}": b + 7 for n, b in buffers.items()}}
    vector, own = Ditto().personalised(theta, buffers, memory)
    assert torch.equal(vector, theta + 1)
    assert own["1.num_batches_tracked"] == 7


def test_ditto_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match=r"Ditto\(lam=-1.0\): must be 0 or more"):
        Ditto(lam=-1.0)
    with pytest.raises(ValueError, match=r"Ditto\(personal='a'\): .*whole model .*leave it empty"):
        Ditto(personal="a")


# --------------------------------------------------------------------------------------- personal


def test_what_is_personal_stays_and_the_rest_is_averaged():
    # w·1 + c, one step. w = c = 0: ∇ = −2 for both, w = c = 1; ∇ = 4, w = c = −2.
    # θ: w = −.5, c = 0 as before. Round 1: −.5 + 1 − 2 = −1.5: w = .25, c = 1.75;
    # −.5 − 2 + 4 = 1.5: w = −1.25, c = −2.75. θ: w = −.5.
    first, second = play(Plain(personal="*.bias", **ONE), line(0, bias=0), rounds=2)
    assert first.state == {"0.weight": [-0.5], "0.bias": [0.0]}
    assert [own["personal/0.bias"] for own in first.memories] == [[1.0], [-2.0]]
    assert second.state == {"0.weight": [-0.5], "0.bias": [0.0]}
    assert [own["personal/0.bias"] for own in second.memories] == [[1.75], [-2.75]]
    # Nothing of it was sent: a group of zeros has GSI 1 and the factor 1.
    (glad,) = play(Plain(personal="*.bias", **ONE), line(0, bias=0), glad=True)
    assert (glad.record.gsi["0.bias"], glad.record.scale["0.bias"]) == (1.0, 1.0)
    assert glad.record.gsi["0.weight"] == pytest.approx(math.sqrt((1 + 4) / 2 / 0.25))
    assert [entry["sq_norm"] for entry in first.record.clients] == [1.0, 4.0]
    assert set(first.memories[0]) == {"personal/0.bias"}  # and no whole model


@pytest.mark.parametrize("method", [FedProx(mu=1.0, **STEPS), Scaffold(**STEPS)])
def test_corrections_are_for_what_is_shared(method: Plain):
    """Of what stays with a client the gradient is its own: nobody else's c, no pull to anywhere."""
    # A model of w + c where w is fixed at 0 by its input: F_k = ½(c − b)².
    samples: list[Samples] = [([0.0], [2.0]), ([0.0], [-4.0])]
    method = replace(method, personal="*.bias")
    first, second = play(method, line(0, bias=0), samples, rounds=2)
    # c = 0, 1, 1.5 and 0, −2, −3; then 1.5, 1.75, 1.875 and −3, −3.5, −3.75.
    assert [own["personal/0.bias"] for own in first.memories] == [[1.5], [-3.0]]
    assert [own["personal/0.bias"] for own in second.memories] == [[1.875], [-3.75]]
    assert second.state == {"0.weight": [0.0], "0.bias": [0.0]}


def test_a_server_half_is_sent_nothing_of_what_is_personal():
    client = Scaffold(clients=1, personal="*.bias", **STEPS)
    bench, one = Workbench(line(0, bias=0), half_square), torch.ones(1, 1)
    done = bench.train(client, bench.w.clone(), {}, one, 2 * one, stream(1, "a"))
    assert done.extra is not None
    sent = bench.layout.views(done.extra)
    assert sent["0.bias"].tolist() == [0.0]
    assert sent["0.weight"].item() != 0


# ----------------------------------------------------------------------------------------- FedBN


def test_fedbn_keeps_statistics_and_scale_with_each_client():
    # Inputs −1, 1: mean 0, variance 2 (of two): running mean .1·0, variance .9 + .1·2 = 1.1.
    # Inputs 0, 4: mean 2, variance 8: .2 and 1.7. One step, normalised to −1, 1; the bias's
    # gradient is the mean of (s − y) = −y: +½·mean(y) = .75 for y = 0, 3.
    model = nn.Sequential(line(1), nn.BatchNorm1d(1, eps=1e-12))
    samples: list[Samples] = [([-1.0, 1.0], [0.0, 3.0]), ([0.0, 4.0], [0.0, 3.0])]
    before = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    (found,) = play(FedBN(**ONE), model, samples)
    own = [{n.removeprefix("personal/1."): v for n, v in m.items()} for m in found.memories]
    assert [one["running_mean"] for one in own] == [[0.0], [pytest.approx(0.2)]]
    assert [one["running_var"] for one in own] == [[pytest.approx(1.1)], [pytest.approx(1.7)]]
    assert [one["num_batches_tracked"] for one in own] == [1, 1]
    assert [one["bias"] for one in own] == [[pytest.approx(0.75)]] * 2
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert found.state[f"1.{name}"] == before[f"1.{name}"]
    assert {name for one in own for name in one} == set(model[1].state_dict())


def test_fedbn_goes_on_from_a_clients_own_statistics():
    model = nn.Sequential(line(1), nn.BatchNorm1d(1, eps=1e-12))
    # The gradient of a weight before a normalisation without eps is 0: it stays 1, up to rounding.
    _, second = play(FedBN(**ONE), model, [([0.0, 4.0], [0.0, 3.0])], rounds=2)
    assert second.memories[0]["personal/1.running_mean"] == pytest.approx([0.2 * 0.9 + 0.2])
    assert second.memories[0]["personal/1.num_batches_tracked"] == 2


# ---------------------------------------------------------------------------------------- FedRep


def test_fedrep_trains_the_head_and_then_the_body():
    # h·a·x with a = h = 1, b = 3. Head: ∇ = (1 − 3)·a = −2, h = 2. Body: (2 − 3)·h = −2, a = 2.
    # The other client has b = 1 and nothing to do: mean a = 1.5; h stays 1 at the server.
    samples: list[Samples] = [([1.0], [3.0]), ([1.0], [1.0])]
    client = FedRep(head_epochs=1, optimizer="sgd", lr=0.5)
    first, second = play(client, line(1, 1), samples, rounds=2)
    assert first.state == {"0.weight": [1.5], "1.weight": [1.0]}
    assert [own["personal/1.weight"] for own in first.memories] == [[[2.0]], [[1.0]]]
    assert (first.steps, first.losses[0]) == ([2, 2], (2 + 0.5) / 2)
    assert set(first.memories[0]) == {"personal/1.weight"}
    # a = 1.5, h = 2: error 0 for the first. The second: (1.5 − 1)·1.5 = .75, h = .625;
    # (.9375 − 1)·.625 = −.0390625, a = 1.51953125: mean 1.509765625.
    assert second.state == {"0.weight": [1.509765625], "1.weight": [1.0]}
    assert [own["personal/1.weight"] for own in second.memories] == [[[2.0]], [[0.625]]]


def test_fedreps_phases_leave_the_other_part_where_it_is():
    # Weight decay ½: head −2 + ½, h = 1.75; body (1.75 − 3)·1.75 + ½ = −1.6875, a = 1.84375.
    client = FedRep(head_epochs=1, optimizer="sgd", lr=0.5, weight_decay=0.5)
    (found,) = play(client, line(1, 1), [([1.0], [3.0])])
    assert found.state == {"0.weight": [1.84375], "1.weight": [1.0]}
    assert found.memories[0]["personal/1.weight"] == [[1.75]]


def test_fedrep_without_epochs_for_the_head_leaves_it():
    client = FedRep(head_epochs=0, optimizer="sgd", lr=0.5)
    (found,) = play(client, line(1, 1), [([1.0], [3.0])])
    assert found.memories[0]["personal/1.weight"] == [[1.0]]
    assert found.state == {"0.weight": [2.0], "1.weight": [1.0]}  # −2·1, a = 2
