"""The batched engine: the same mathematics as serial, other bits; and what it cannot train."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, Normed, facts, job, kept, outcome, packed, play, tiny_data
from runs.test_runs import stopped
from torch import Tensor, nn
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.clients.method import Plain
from fedglad.config.schema import ConfigError, load, simulate
from fedglad.data.federation import Partitioned
from fedglad.models.cnn import FedOptCNN, SmallCNN
from fedglad.models.mlp import MLP
from fedglad.models.networks.encoder import TextEncoder
from fedglad.models.softmax import SoftmaxRegression
from fedglad.runs import RunError, execute
from fedglad.simulation.engines.base import Worker
from fedglad.simulation.engines.batched import BatchedEngine
from fedglad.simulation.engines.settings import Batched, Local, Serial
from fedglad.simulation.simulation import Simulation

SERIAL = {"engine.name": "serial"}
BATCHED = {"engine.name": "batched"}
ENGINES = {"serial": SERIAL, "local": {"engine.name": "local", "engine.workers": 2}}
ENGINES["batched"] = BATCHED

UNEQUAL = (1, 3, 8, 8, 21, 40)  # batches of 8: one sample, a part of a batch, one, several
EQUAL = (8, 8, 8, 8)


def images(*sizes: int) -> Partitioned:
    """As tiny_data, with the inputs as pictures of 8 × 8."""
    data = tiny_data(*sizes)
    data.x, data.test_x = data.x.view(-1, 1, 8, 8), data.test_x.view(-1, 1, 8, 8)
    return data


def trained(
    settings: Any,
    data: Any,
    model: nn.Module,
    client: Plain,
    cohort: Sequence[int] | None = None,
    t: int = 0,
) -> list[Any]:
    """What the clients bring of a round, in the order of the cohort."""
    with closing(settings.start(job(data, model, client))) as engine:
        asked = range(data.clients) if cohort is None else cohort
        return kept(engine.train(t, asked, packed(model), {}))


def far(found: Any, wanted: Any) -> float:
    """The largest difference, and infinity if anything that must be equal is not."""
    if (
        len(found) == 2
        or len(wanted) == 2
        or found[:3] != wanted[:3]
        or found[5].keys() != wanted[5].keys()
    ):
        return math.inf
    pairs = [(found[3], wanted[3]), (found[4], wanted[4])]
    pairs += [(found[5][name], wanted[5][name]) for name in wanted[5]]
    differences = [np.abs(np.subtract(a, b, dtype=float)).max() for a, b in pairs]
    return float(np.nan_to_num(max(differences), nan=math.inf))


def check(
    data: Any, model: nn.Module, client: Plain, atol: float = 2e-5, settings: Any = None
) -> None:
    """Serial and batched bring the same, to rounding, and that is not nothing."""
    wanted = trained(Serial(), data, model, client)
    found = trained(settings or Batched(), data, model, client)
    assert [update[0] for update in found] == list(range(data.clients))
    assert max(np.abs(update[4]).max() for update in wanted) > 100 * atol
    assert [far(a, b) for a, b in zip(found, wanted, strict=True)] == pytest.approx(
        [0] * data.clients, abs=atol
    )


# ------------------------------------------------------------------------------ all engines agree


def test_digits_in_every_engine():
    """The promise in one place: bit for bit in serial and local, to 1e-4 in batched."""
    given = {"rounds": 3}
    rounds, state = play({**given, **SERIAL})
    for workers in (1, 2):
        local = {"engine.name": "local", "engine.workers": workers}
        assert play({**given, **local}) == (rounds, state)
    other_rounds, other_state = play({**given, **BATCHED})
    assert other_state.keys() == state.keys()
    for name in state:
        np.testing.assert_allclose(other_state[name], state[name], rtol=0, atol=1e-4)
    for found, wanted in zip(other_rounds, rounds, strict=True):
        assert found["status"] == "stepped"
        assert [c["id"] for c in found["clients"]] == [c["id"] for c in wanted["clients"]]
        assert [c["weight"] for c in found["clients"]] == [c["weight"] for c in wanted["clients"]]
        assert found["train_loss"] == pytest.approx(wanted["train_loss"], abs=1e-4)
        assert found["test_loss"] == pytest.approx(wanted["test_loss"], abs=1e-4)
        assert found["gsi_all"] == pytest.approx(wanted["gsi_all"], rel=1e-3)


METHODS = {
    "fedprox": {"client.name": "fedprox", "client.mu": 0.5},
    "fedprox+momentum+clip": {
        "client.name": "fedprox",
        "client.mu": 2.0,
        "client.clip_norm": 0.5,
    },
    "scaffold": {
        "client.name": "scaffold",
        "client.option": "II",
        "client.optimizer": "sgd",
        "client.clip_norm": 0,
        "client.clients": 12,
    },
    "scaffold+linear": {
        "client.name": "scaffold",
        "client.optimizer": "sgd",
        "client.clients": 12,
        "client.schedule": "linear",
        "client.warmup": 0.3,
    },
    "feddyn": {"client.name": "feddyn", "client.optimizer": "sgd", "client.clients": 12},
    "tally": {"client.name": "simulation.support:Tally"},
    "sends its update": {"client.name": "simulation.support:Sends"},
    "hears later": {"client.name": "simulation.support:Late"},
    "keeps what it heard": {
        "client.name": "simulation.support:Echo",
        "client.optimizer": "sgd",
        "client.clients": 12,
    },
    "keeps two as they are": {"client.name": "simulation.support:Pair"},
}

Played = tuple[list[dict[str, Any]], dict[str, Any], dict[int, dict[str, Any]]]


def played(overrides: Mapping[str, Any], data: Any, model: nn.Module) -> Played:
    """The rounds of a run, its final state with the method's, and what the clients remember."""
    plan = load("digits", overrides)[1].plan(model=copy.deepcopy(model), data=data)
    with closing(Simulation(plan)) as simulation:
        rounds = [facts(found) for found in simulation.rounds()]
        tensors = simulation.server.state_dict()["tensors"]
        state = {name: value.tolist() for name, value in tensors.items()}
        remembered: dict[int, dict[str, Any]] = {}
        if simulation.memories:
            for client in range(data.clients):
                held = simulation.memories.read(client, simulation.memories.version(client))
                remembered[client] = {name: value.tolist() for name, value in held.items()}
        return rounds, state, remembered


@pytest.mark.parametrize("kind", ["layer norm", "batch norm"])
@pytest.mark.parametrize("name", METHODS)
def test_every_client_method_trains_in_every_engine(name: str, kind: str):
    """Twelve clients of other sizes, seven a round: some come again, with their memories."""
    data = images(1, 2, 5, 8, 8, 8, 9, 13, 16, 21, 30, 40)
    torch.manual_seed(2)
    model = MODELS[kind]()
    given = {
        "rounds": 3,
        "sampler.clients_per_round": 7,
        "adapter.name": "none",
        "client.lr": 0.05,
        "client.batch_size": 8,
        "client.epochs": 2,
        **METHODS[name],
    }
    rounds, state, remembered = played({**given, **SERIAL}, data, model)
    assert [found["status"] for found in rounds] == ["stepped"] * 3
    assert not any("rejected" in c for found in rounds for c in found["clients"])
    again = {c["id"] for c in rounds[0]["clients"]} & {c["id"] for c in rounds[1]["clients"]}
    assert again
    local = {"engine.name": "local", "engine.workers": 2}
    assert played({**given, **local}, data, model) == (rounds, state, remembered)

    found, other_state, other_remembered = played({**given, **BATCHED}, data, model)
    assert [f["status"] for f in found] == ["stepped"] * 3
    assert not any("rejected" in c for f in found for c in f["clients"])
    assert other_state.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_allclose(other_state[key], value, rtol=0, atol=1e-4)
    assert {k: v.keys() for k, v in other_remembered.items()} == {
        k: v.keys() for k, v in remembered.items()
    }
    for client, held in remembered.items():
        for key, value in held.items():
            np.testing.assert_allclose(other_remembered[client][key], value, rtol=0, atol=1e-3)


class Two:
    """Two clients with one sample each: x = 1 and the targets 1 and 3."""

    clients = 2

    def size(self, k: int) -> int:
        return 1

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1), torch.tensor([1.0 + 2 * k])

    def test(self) -> tuple[Tensor, Tensor]:
        return self.client(0)


def half_square(scores: Tensor, y: Tensor) -> Tensor:
    """½(w x − y)², whose gradient at x = 1 is w − y."""
    return ((scores.squeeze(1) - y) ** 2).mean() / 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn"])
def test_two_clients_and_one_parameter_by_hand(
    method: str, engine: str, monkeypatch: pytest.MonkeyPatch
):
    # Gradients w − 1 and w − 3, two steps of lr .1 from θ = 0, two rounds, mean of both.
    #
    # FedProx, μ = .5: gradient w − y + .5(w − θ)
    #   round 0, client 0: −1 → .1;  −.9 + .05 → .185         client 1: −3 → .3; −2.7 + .15 → .555
    #   θ = .37
    #   round 1, client 0: −.63 → .433; −.567 + .0315 → .48655
    #            client 1: −2.63 → .633; −2.367 + .1315 → .85655
    #   θ = .67155
    #
    # SCAFFOLD, N = 2: gradient w − y − c_k + c; K lr = .2
    #   round 0, client 0: −1 → .1; −.9 → .19;  c_0 = −.19/.2 = −.95
    #            client 1: −3 → .3; −2.7 → .57; c_1 = −.57/.2 = −2.85
    #   θ = .38, c = −1.9
    #   round 1, client 0: w − 1 + .95 − 1.9 = w − 1.95: −1.57 → .537; −1.413 → .6783
    #                      c_0 = −.95 + 1.9 + (.38 − .6783)/.2 = .95 − 1.4915 = −.5415
    #            client 1: w − 3 + 2.85 − 1.9 = w − 2.05: −1.67 → .547; −1.503 → .6973
    #                      c_1 = −2.85 + 1.9 + (.38 − .6973)/.2 = −.95 − 1.5865 = −2.5365
    #   θ = .6878, c = −1.9 + (.4085 + .3135)/2 = −1.539, which is the mean of c_0 and c_1
    #
    # FedDyn, α = .5, N = 2: gradient w − y − λ_k + .5(w − θ); round 0 trains as FedProx does
    #   round 0: λ_0 = −.5 · .185 = −.0925, λ_1 = −.5 · .555 = −.2775, h = −.25 · .74 = −.185
    #   θ = .37 + .185/.5 = .74, twice the mean, as METHODS.md says
    #   round 1, client 0: −.26 + .0925 = −.1675 → .75675
    #                      −.24325 + .0925 + .5 · .01675 = −.142375 → .7709875
    #            client 1: −2.26 + .2775 = −1.9825 → .93825
    #                      −2.06175 + .2775 + .5 · .19825 = −1.685125 → 1.1067625
    #   λ_0 = −.0925 − .5 · .0309875 = −.10799375, λ_1 = −.2775 − .5 · .3667625 = −.46088125
    #   h = −.185 − .25 · .39775 = −.2844375, which is the mean of λ_0 and λ_1
    #   θ = .938875 + .2844375/.5 = 1.50775
    wanted = {
        "fedprox": ([0.37, 0.67155], {}, {}),
        "scaffold": ([0.38, 0.6878], {"c": -1.539}, {"c_k": [-0.5415, -2.5365]}),
        "feddyn": ([0.74, 1.50775], {"h": -0.2844375}, {"lambda_k": [-0.10799375, -0.46088125]}),
    }
    own: dict[str, dict[str, Any]] = {
        "fedprox": {"client.mu": 0.5},
        "scaffold": {"client.clients": 2, "client.option": "II"},
        "feddyn": {"client.clients": 2, "client.alpha": 0.5},
    }
    given = {
        "rounds": 2,
        "sampler.clients_per_round": 2,
        "weighting.name": "equal",
        "adapter.name": "none",
        "client.name": method,
        "client.optimizer": "sgd",
        "client.lr": 0.1,
        "client.batch_size": 1,
        "client.steps": 2,
        "client.clip_norm": 0,
        **own[method],
        **ENGINES[engine],
    }
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    thetas: list[float] = []
    with closing(
        Simulation(load("digits", given)[1].plan(model=model, data=Two(), task=half_square))
    ) as simulation:
        for _ in simulation.rounds():
            thetas.append(simulation.server.params["weight"].item())
        sent = {name: vector[0].item() for name, vector in simulation.server.sent.items()}
        memories, remembered = simulation.memories, dict[str, list[float]]()
        if memories:
            held = [memories.read(k, memories.version(k)) for k in range(2)]
            remembered = {name: [own[name][0].item() for own in held] for name in held[0]}
    assert thetas == pytest.approx(wanted[method][0], abs=1e-6)
    assert sent == pytest.approx(wanted[method][1], abs=1e-6)
    assert remembered.keys() == wanted[method][2].keys()
    for name, values in wanted[method][2].items():
        assert remembered[name] == pytest.approx(values, abs=1e-6)


# ---------------------------------------------------------------------- every setting of a client


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("optimizer", ["sgd", "sgdm", "adam", "adamw"])
def test_every_setting_of_the_loop(optimizer: Any, schedule: Any, clip: float):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    data = tiny_data(*UNEQUAL)
    for decay, drop_last, steps in product((0.0, 0.1), (False, True), (0, 7)):
        client = Plain(
            optimizer=optimizer,
            lr=0.02,
            eps=1e-4,  # with less, Adam makes whole steps of rounding errors
            schedule=schedule,
            warmup=0.25 if schedule == "linear" else 0.0,
            clip_norm=clip,
            weight_decay=decay,
            drop_last=drop_last,
            steps=steps,
            epochs=2,
            batch_size=8,
        )
        check(data, model, client)


class Tied(nn.Module):
    """One weight that is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x.flatten(1)).tanh()).tanh())


class Normalised(nn.Module):
    """Batch normalisation of 8 × 8 pictures, with running statistics or without."""

    def __init__(self, *, tracked: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6, track_running_stats=tracked)
        self.dense = nn.Linear(6 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.norm(self.conv(x)).relu().flatten(1))


class Positional(nn.Linear):
    """Adds a table that belongs to the model and to no state_dict."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("table", torch.linspace(-1, 1, 64), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1) + self.table)


def frozen() -> nn.Module:
    model = MLP(features=64, hidden=(16,)).build()
    model[1].weight.requires_grad_(False)  # type: ignore[index]
    return model


def double() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, dtype=torch.float64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "softmax": SoftmaxRegression(features=64).build,
    "mlp": MLP(features=64, hidden=(16,)).build,
    "small-cnn": SmallCNN().build,
    "batch norm": Normalised,
    "batch norm without statistics": lambda: Normalised(tracked=False),
    "layer norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 10)
    ),
    "frozen": frozen,
    "tied": Tied,
    "unsaved table": Positional,
}


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL, (40, 1, 40, 1, 9)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str, sizes: tuple[int, ...], clip: float):
    torch.manual_seed(3)
    client = Plain(lr=0.05, batch_size=8, epochs=2, clip_norm=clip, weight_decay=0.01)
    check(images(*sizes), MODELS[name](), client)


def test_a_model_of_doubles_keeps_its_precision():
    data = images(*UNEQUAL)
    data.x, data.test_x = data.x.double(), data.test_x.double()
    check(data, double(), Plain(lr=0.1, batch_size=8, epochs=2), atol=1e-6)


def test_a_frozen_parameter_is_not_sent():
    model = frozen()
    found = trained(Batched(), tiny_data(*UNEQUAL), model, Plain(lr=0.1, weight_decay=0.1))
    for update in found:
        assert 16 + 16 * 10 + 10 <= len(update[4]) < 64 * 16  # biases and the last layer, padded
        assert np.abs(update[4]).max() > 0.01


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_of_the_engine_alone(threads: int):
    before = torch.get_num_threads()
    client = Plain(lr=0.05, batch_size=8)
    check(tiny_data(*UNEQUAL), MODELS["mlp"](), client, settings=Batched(threads=threads))
    assert torch.get_num_threads() == before


def test_a_cohort_larger_than_a_group():
    """So many parameters that some thirty clients are more than are trained together."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 2000), nn.Tanh(), nn.Linear(2000, 10))
    data, client = tiny_data(*[2] * 31), Plain(lr=0.05, steps=1)
    with closing(Batched().start(job(data, model, client))) as engine:
        groups = sum(1 for _ in engine.train(0, range(31), packed(model), {}))
    assert groups > 1
    check(data, model, client)


def test_a_client_twice_in_a_cohort_and_any_order():
    data, model = tiny_data(*UNEQUAL), MODELS["mlp"]()
    client, cohort = Plain(lr=0.05, batch_size=8, epochs=2), [4, 0, 5, 4, 2]
    wanted = trained(Serial(), data, model, client, cohort)
    found = trained(Batched(), data, model, client, cohort)
    assert [update[0] for update in found] == cohort
    assert max(far(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-5


class Doubled(Partitioned):
    """An own data set that changes what its clients have, as an augmentation would."""

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        x, y = super().client(k)
        return 2 * x, y


def test_an_own_data_sets_client_is_asked():
    plain = tiny_data(*UNEQUAL)
    owned = np.split(np.arange(sum(UNEQUAL)), np.cumsum(UNEQUAL)[:-1])
    data = Doubled(plain.x, plain.y, plain.test_x, plain.test_y, owned)
    check(data, MODELS["mlp"](), Plain(lr=0.05, batch_size=8))


# ----------------------------------------------------------------------------------------- dropout


class Same:
    """Six clients that have one and the same sample."""

    clients = 6

    def __init__(self) -> None:
        self.inner = images(1)

    def size(self, k: int) -> int:
        return 1

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return self.inner.client(0)

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()


DROPOUT: dict[str, Callable[[], nn.Module]] = {
    "torch's": Normed,
    "bytes": FedOptCNN(size=8).build,
    "torch's of a third": FedOptCNN(size=8, dropout=(0.3, 0.3)).build,
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_every_clients_own_and_fixed_by_the_seed(name: str):
    torch.manual_seed(4)
    model, client = DROPOUT[name](), Plain(lr=0.05, batch_size=8)

    def once(seed: int, t: int) -> list[Any]:
        with closing(Batched().start(job(Same(), model, client, seed))) as engine:
            return kept(engine.train(t, range(6), packed(model), {}))

    first = once(1, 0)
    assert all(len(update) > 2 for update in first), first
    deltas = {tuple(update[4]) for update in first}
    assert len(deltas) == 6  # without dropout they would be one
    torch.manual_seed(77)
    assert once(1, 0) == first
    assert once(2, 0) != first
    assert once(1, 1) != first


@pytest.mark.parametrize("name", DROPOUT)
def test_a_run_with_dropout_steps_and_repeats(name: str):
    given = {"rounds": 2, "client.epochs": 1, **BATCHED}
    torch.manual_seed(4)
    model = DROPOUT[name]()
    rounds, state = play(given, model=model)
    assert [found["status"] for found in rounds] == ["stepped", "stepped"]
    assert not any("rejected" in c for found in rounds for c in found["clients"])
    assert play(given, model=model) == (rounds, state)


# ---------------------------------------------------------------------------------------- failures

Spoil = Callable[[Tensor, Tensor], tuple[Any, Any]]


class Spoiled:
    """Six clients of unequal sizes; client 2 gives something else."""

    clients = 6

    def __init__(self, spoil: Spoil) -> None:
        self.inner, self.spoil = tiny_data(8, 9, 8, 1, 21, 8), spoil

    def size(self, k: int) -> int:
        return self.inner.size(k)

    def client(self, k: int) -> tuple[Any, Any]:
        x, y = self.inner.client(k)
        return self.spoil(x, y) if k == 2 else (x, y)

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()


def missing(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    raise KeyError("no such file")


SPOILT: dict[str, tuple[Spoil, str]] = {
    "raises": (missing, "KeyError: 'no such file'"),
    "no samples": (lambda x, y: (x[:0], y[:0]), "no samples"),
    "another feature shape": (lambda x, y: (x[:, :5], y), "RuntimeError"),
    "another rank, which the model flattens": (lambda x, y: (x.unsqueeze(2), y), ""),
    "another rank, smaller": (lambda x, y: (x[:, 0], y), "Error"),
    "another dtype, of which nothing is lost": (lambda x, y: (x.double(), y), ""),
    "another dtype, in which it is lost": (
        lambda x, y: (x.double() * 1e300, y),
        "beyond the range",
    ),
    "labels that are not there": (lambda x, y: (x, y + 10), "Error"),
    "targets of another shape": (lambda x, y: (x, y.unsqueeze(1)), "Error"),
    "targets of another dtype": (lambda x, y: (x, y.float()), "Error"),
    "fewer inputs than targets": (lambda x, y: (x[:5], y), "Error"),
    "inputs that are a list": (lambda x, y: (x.tolist(), y), "Error"),
    "nothing": (lambda x, y: (None, None), "Error"),
}


@pytest.mark.parametrize("model", ["mlp", "counting"])
@pytest.mark.parametrize("name", SPOILT)
def test_a_client_with_bad_data_fails_alone(name: str, model: str):
    spoil, reason = SPOILT[name]
    start = MODELS["mlp"]() if model == "mlp" else Counting()
    client, others = Plain(lr=0.05, batch_size=8, epochs=2), [0, 1, 3, 4, 5]
    found = trained(Batched(), Spoiled(spoil), start, client)
    wanted = trained(Serial(), Spoiled(spoil), start, client)
    assert [update[0] for update in found] == [0, 1, 2, 3, 4, 5]
    assert max(far(found[k], wanted[k]) for k in others) < 2e-5
    if reason:
        assert len(wanted[2]) == len(found[2]) == 2
        assert reason in found[2][1]
    else:
        assert far(found[2], wanted[2]) < 2e-5


def test_a_client_with_more_inputs_than_targets_does_not_shift_its_neighbours():
    data = Spoiled(lambda x, y: (torch.cat([x, x]), y))
    model, client, others = MODELS["mlp"](), Plain(lr=0.05, batch_size=8), [0, 1, 3, 4, 5]
    found = trained(Batched(), data, model, client)
    wanted = trained(Serial(), data, model, client, others)
    assert max(far(found[k], own) for k, own in zip(others, wanted, strict=True)) < 2e-5


@pytest.mark.parametrize("bad", [0, 2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["mlp", "small-cnn", "batch norm", "layer norm"])
def test_nan_of_one_client_poisons_that_client_alone(name: str, value: float, bad: int):
    """Not even its neighbours with shorter batches, wherever what fills them up is from."""
    torch.manual_seed(3)
    sizes = (8, 8, 8, 3, 8)
    data, whole, model = images(*sizes), images(*sizes), MODELS[name]()
    data.test_x = data.test_x.clone()
    start = sum(sizes[:bad])
    data.x[start : start + sizes[bad]] = value
    given = {
        "rounds": 1,
        "sampler.name": "scripted",
        "sampler.clients_per_round": 5,
        "sampler.cohorts": {"0": [0, 1, 2, 3, 4]},
        "client.batch_size": 8,
        "adapter.name": "none",
        "engine.name": "batched",
    }
    (found,) = simulate("digits", given, model=copy.deepcopy(model), data=data)
    assert found.record.stepped
    assert list(found.record.rejected) == [bad]
    assert "NaN" in found.record.rejected[bad]
    client = Plain(lr=0.05, batch_size=8)
    wanted = trained(Serial(), whole, model, client)
    brought = trained(Batched(), data, model, client)
    assert max(far(brought[k], wanted[k]) for k in range(5) if k != bad) < 2e-5


class Tokens:
    """Three clients whose samples have four targets, some of them −100: to be ignored."""

    clients = 3

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.parts = [
            (torch.randn(n, 4, 8, generator=rng), torch.randint(5, (n, 4), generator=rng))
            for n in (3, 8, 9)
        ]
        for _, y in self.parts:
            y[0, :3] = -100

    def size(self, k: int) -> int:
        return len(self.parts[k][1])

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        return self.parts[k]

    def test(self) -> tuple[Tensor, Tensor]:
        return self.parts[0]


class Tagger(nn.Linear):
    """A score of five classes for each of the four."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).transpose(1, 2)


@pytest.mark.parametrize("tokens", [False, True])
def test_targets_to_be_ignored_are(tokens: bool):
    torch.manual_seed(7)
    ignoring = Spoiled(lambda x, y: (x, torch.where(torch.arange(len(y)) < 2, -100, y)))
    data, model = (Tokens(), Tagger(8, 5)) if tokens else (ignoring, MODELS["mlp"]())
    check(data, model, Plain(lr=0.05, batch_size=8, epochs=2))


class Branching(nn.Linear):
    """Looks at its inputs to decide what to do, which vmap cannot do."""

    def forward(self, input: Tensor) -> Tensor:
        flat = input.flatten(1)
        return super().forward(flat if flat.sum() > 0 else -flat)


class Peeking(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1) * input.mean().item())


class PeekingLong(nn.Linear):
    """Does so only for batches of more than four."""

    def forward(self, input: Tensor) -> Tensor:
        flat = input.flatten(1)
        return super().forward(flat * flat.mean().item() if len(flat) > 4 else flat)


def peeking() -> nn.Module:
    """A model for the configuration."""
    return Peeking(64, 10)


@pytest.mark.parametrize("model", [Branching(64, 10), Peeking(64, 10)], ids=["if", "item"])
def test_a_model_that_vmap_cannot_take_is_refused_before_the_first_round(model: nn.Module):
    given = {**TINY, "rounds": 1}
    with pytest.raises(ValueError, match=r"vmap.*engine\.name = local"):
        list(simulate("digits", {**given, **BATCHED}, model=model))
    (found,) = simulate("digits", {**given, "engine.name": "local"}, model=model)
    assert found.record.stepped


def test_such_a_model_is_refused_and_nothing_written(tmp_path: Path):
    own = "model.name=simulation.test_batched:peeking"
    given = ["--set", own, "--set", "engine.name=batched", "--out", str(tmp_path / "run")]
    said = CliRunner().invoke(app, ["run", "digits", *given])
    assert said.exit_code == 2
    text = " ".join(said.output.split())
    assert "vmap" in text
    assert "engine.name = local" in text
    assert not (tmp_path / "run").exists()


def test_a_model_that_vmap_can_take_for_some_clients_fails_for_the_others_alone():
    torch.manual_seed(4)
    data, model = tiny_data(3, 4, 8, 21), PeekingLong(64, 10)
    client = Plain(lr=0.05, batch_size=8)
    found, wanted = (trained(engine, data, model, client) for engine in (Batched(), Serial()))
    assert max(far(found[k], wanted[k]) for k in (0, 1)) < 2e-5
    for k in (2, 3):
        assert "vmap" in found[k][1]
        assert "engine.name = local" in found[k][1]
    given = {"rounds": 1, "sampler.clients_per_round": 4, "client.batch_size": 8, **BATCHED}
    (played,) = simulate("digits", given, model=model, data=data)
    assert played.record.stepped
    assert sorted(played.record.rejected) == [2, 3]
    assert all("engine.name = local" in said for said in played.record.rejected.values())


class Changing(nn.Module):
    """Becomes another with every call, and draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.inner, self.calls = nn.Linear(64, 10), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(input)
        return self.inner(nn.functional.dropout(input.flatten(1), 0.5)) / self.calls


class Grouped(nn.Module):
    """vmap takes a convolution before a group norm for several clients, but not for one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.dense = nn.Linear(4 * 36, 10)

    def forward(self, input: Tensor) -> Tensor:
        return self.dense(self.norm(self.conv(input)).flatten(1))


def test_a_model_that_vmap_takes_only_for_several_clients_is_not_refused():
    torch.manual_seed(2)
    client = Plain(lr=0.05, batch_size=8)
    found, wanted = (
        trained(engine, images(8, 8, 8), copy.deepcopy(model), client)
        for model in [Grouped()]
        for engine in (Batched(), Serial())
    )
    assert max(far(a, b) for a, b in zip(found, wanted, strict=True)) < 2e-5


def test_trying_a_model_out_leaves_no_trace():
    data, model, client = tiny_data(8, 8), Changing(), Plain(lr=0.05, batch_size=8)
    untried = BatchedEngine(Worker(job(data, model, client), torch.device("cpu")), 1)
    wanted = kept(untried.train(0, [0, 1], packed(model), {}))
    before = torch.get_rng_state()
    with closing(Batched().start(job(data, model, client))) as engine:
        assert torch.get_rng_state().equal(before)
        assert kept(engine.train(0, [0, 1], packed(model), {})) == wanted
    assert (model.calls, float(model.seen)) == (0, 0)


@pytest.mark.parametrize(
    "spoil",
    [lambda x, y: (x[:0], y[:0]), lambda x, y: (x[:, :5], y), lambda x, y: (x, y + 10)],
    ids=["none", "another shape", "labels that are not there"],
)
def test_a_test_set_that_nothing_can_be_tried_on_refuses_no_model(spoil: Spoil):
    data, model = tiny_data(8, 8), MODELS["mlp"]()
    data.test_x, data.test_y = spoil(data.test_x, data.test_y)
    found = trained(Batched(), data, model, Plain(lr=0.05, batch_size=8))
    assert all(len(update) > 2 for update in found)


@pytest.mark.parametrize("mask", [False, True])
def test_an_encoder_trains_or_is_refused(mask: bool):
    """Where padding is left out, what it computes depends on the texts' lengths."""
    transformers = pytest.importorskip("transformers")
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 30}
    config = transformers.AutoConfig.for_model("distilbert", num_labels=10, **sizes)
    torch.manual_seed(1)
    inner = transformers.AutoModelForSequenceClassification.from_config(config)
    model, data = TextEncoder(inner, mask=mask, lora=0), tiny_data(3, 4)
    data.x, data.test_x = (
        torch.randint(1, 30, (len(x), 6), dtype=torch.int32) for x in (data.x, data.test_x)
    )
    client = Plain(lr=0.05, batch_size=8)
    if not mask:
        assert all(len(update) > 2 for update in trained(Batched(), data, model, client))
        return
    with pytest.raises(ValueError, match=r"vmap.*engine\.name = local"):
        Batched().start(job(data, model, client))


class Counting(nn.Linear):
    """Divides by how often it was called: state that no state_dict has."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input.flatten(1)) / self.calls


class CountingNormed(Counting):
    """The same with a buffer that travels, so that only clients of one size go together."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.seen += len(input)
        return super().forward(input)


class Centred(nn.Linear):
    """Subtracts a running mean of its inputs, which it changes in place or replaces."""

    def __init__(self, *, persistent: bool, replaces: bool) -> None:
        super().__init__(64, 10)
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(64), persistent=persistent)

    def forward(self, input: Tensor) -> Tensor:
        x = input.flatten(1)
        if self.training and self.replaces:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


BUFFERED: dict[str, Callable[[], nn.Module]] = {
    "unsaved counter": Counting,
    "unsaved counter and a saved one": CountingNormed,
    "saved, in place": lambda: Centred(persistent=True, replaces=False),
    "saved, replaced": lambda: Centred(persistent=True, replaces=True),
    "unsaved, in place": lambda: Centred(persistent=False, replaces=False),
    "unsaved, replaced": lambda: Centred(persistent=False, replaces=True),
}


@pytest.mark.parametrize("name", BUFFERED)
def test_a_buffer_is_every_clients_own(name: str):
    """Batched trains it as serial does, or says that it cannot: never anything else."""
    torch.manual_seed(6)
    data, model = tiny_data(*UNEQUAL), BUFFERED[name]()
    client = Plain(lr=0.05, batch_size=8, epochs=2)
    # Serial: a client's round does not depend on who came before it.
    wanted = trained(Serial(), data, model, client)
    for k in (1, 5):
        assert trained(Serial(), data, model, client, [k]) == [wanted[k]]
    found = trained(Batched(), data, model, client)
    for own, serial in zip(found, wanted, strict=True):
        if len(own) == 2:
            assert "engine.name = local" in own[1]
        else:
            assert far(own, serial) < 2e-5


# ----------------------------------------------------------------------------- runs and the command

QUICK = {**TINY, "rounds": 6, "checkpoint_every": 2, "client.batch_size": 8}


@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize(
    "own",
    [
        {"model.name": "small-cnn"},
        {"model.name": "cnn", "model.size": 8},
        {"client.name": "scaffold", "client.optimizer": "sgd", "client.lr": 0.1},
    ],
    ids=["small-cnn", "dropout", "scaffold"],
)
def test_a_batched_run_resumes_to_the_same_bits(tmp_path: Path, own: dict[str, Any], after: int):
    given = {**QUICK, **own, **BATCHED}
    if "model.name" in own:
        given = {k: v for k, v in given.items() if not k.startswith("model.") or k in own}
    config = load("digits", given)[1]
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", after, config)
    execute("digits", config, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_batched_run_has_a_name_of_its_own():
    def name(**engine: Any) -> str:
        return load("digits", {f"engine.{key}": value for key, value in engine.items()})[1].hash()

    assert name(name="serial") == name(name="local") == name(name="local", workers=1)
    assert name(name="batched") != name(name="local")
    assert name(name="batched") == name(name="batched", threads=1)
    assert name(name="batched") != name(name="batched", threads=2)  # other bits, perhaps


def test_a_run_of_another_engine_is_not_taken_for_a_batched_one(tmp_path: Path):
    folder = tmp_path / "run"
    execute("digits", load("digits", {**QUICK, **SERIAL})[1], out=folder)
    for resume in (False, True):
        with pytest.raises(RunError, match="another configuration"):
            execute("digits", load("digits", {**QUICK, **BATCHED})[1], out=folder, resume=resume)


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_is_refused(threads: int):
    with pytest.raises(ConfigError, match=f"threads = {threads}: must be 1 or more"):
        load("digits", {**BATCHED, "engine.threads": threads})


REFUSED = [
    ("device", "nonsense", "device = 'nonsense': choose auto, cpu, cuda"),
    ("device", "cuda", "device = 'cuda': there is none here"),
    ("device", "cuda:7", "device = 'cuda:7': there is none here"),
    ("device", "mps", "device = 'mps': there is none here"),
    ("device", "meta", "device = 'meta'"),
]


CASES = [
    ("batched", "threads", "0", "threads = 0: must be 1 or more"),
    *((engine, *refused) for engine in ("batched", "serial", "local") for refused in REFUSED),
]


@pytest.mark.parametrize(("engine", "key", "value", "said"), CASES)
def test_an_engine_that_cannot_be_is_refused_and_nothing_written(
    engine: str, key: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if value.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    given = [f"engine.name={engine}", f"engine.{key}={value}", "rounds=1"]
    options = [part for setting in given for part in ("--set", setting)]
    for out in ([], ["--out", "run"]):
        done = CliRunner().invoke(app, ["run", "digits", *options, *out])
        assert done.exit_code == 2, done.output
        assert said in " ".join(done.output.split())
        assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_of_a_batched_run_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    given = {**QUICK, "rounds": 1}
    folders = [
        execute("digits", load("digits", {**given, "engine.name": name})[1]).folder
        for name in ("serial", "local", "batched")
    ]
    assert folders[0] == folders[1] != folders[2]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        folder.name for folder in folders
    }


def test_evaluation_is_serials():
    data, model = tiny_data(3), nn.Linear(64, 10)
    found = [
        settings.start(job(data, model)) for settings in (Serial(), Batched(), Local(workers=1))
    ]
    results = [engine.evaluate(packed(model)) for engine in found]
    for engine in found:
        engine.close()
    assert results[0] == results[1] == results[2]
