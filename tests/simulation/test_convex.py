"""Least squares that clients disagree about: whose fixed point is the optimum, and whose is not.

Client k has F_k(w) = mean over its samples of (x·w − y)², with y = x·b_k: a quadratic with Hessian
H_k = 2 XᵀX/n and optimum b_k. K steps of gradient descent at rate η go from θ to

    w_k = b_k + M_k(θ − b_k),    M_k = (1 − ηH_k)^K

so FedAvg stops where Σ p_k (1 − M_k)(θ − b_k) = 0, with p_k its weights, whereas the mean of the
F_k is least where Σ H_k(θ − b_k) = 0. With equal weights and steps the two agree only as η → 0.
"""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fedglad.adapters import Adapter
from fedglad.clients.feddyn import FedDyn
from fedglad.clients.fednova import FedNova
from fedglad.clients.method import Plain
from fedglad.clients.scaffold import Scaffold
from fedglad.clients.vrl_sgd import VRLSGD
from fedglad.filters import Filter
from fedglad.optimizers import SGD
from fedglad.samplers.uniform import Uniform
from fedglad.simulation.engines.base import Job
from fedglad.simulation.engines.settings import Batched, Serial
from fedglad.simulation.simulation import Parts, Simulation
from fedglad.weights import Samples


class Regression:
    """Clients with their own inputs and their own exact rule."""

    def __init__(self, inputs: list[np.ndarray], rules: list[np.ndarray]) -> None:
        self.inputs, self.rules = inputs, rules
        self.clients = len(inputs)

    def size(self, k: int) -> int:
        return len(self.inputs[k])

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(self.inputs[k])
        return x, (x @ torch.from_numpy(self.rules[k]))[:, None]

    def test(self) -> tuple[Tensor, Tensor]:
        return self.client(0)

    def hessian(self, k: int) -> np.ndarray:
        return 2 * self.inputs[k].T @ self.inputs[k] / self.size(k)

    def balance(self, factors: list[np.ndarray]) -> np.ndarray:
        """The θ of Σ A_k(θ − b_k) = 0."""
        right = [factor @ rule for factor, rule in zip(factors, self.rules, strict=True)]
        return np.linalg.solve(sum(factors), sum(right))  # type: ignore[arg-type]

    def optimum(self, weights: Any = None) -> np.ndarray:
        """Of the mean of the F_k, the plain one if not by weight."""
        p = np.ones(self.clients) if weights is None else weights
        return self.balance([p[k] * self.hessian(k) for k in range(self.clients)])

    def drift(self, k: int, lr: float, steps: int) -> np.ndarray:
        """1 − M_k"""
        one = np.eye(self.inputs[k].shape[1])
        return one - np.linalg.matrix_power(one - lr * self.hessian(k), steps)


class LeastSquares(Simulation):
    """A run with squared errors in place of cross entropy, and all clients in every round."""

    def __init__(self, data: Regression, client: Plain, rounds: int, engine: Any) -> None:
        features = data.inputs[0].shape[1]
        model = nn.Linear(features, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        plan = Parts(
            rounds=rounds,
            seed=1,
            eval_every=rounds,
            model=model,
            data=data,
            client=client,
            sampler=Uniform(clients_per_round=data.clients),
            optimizer=SGD(),
            adapter=Adapter(),
            filter=Filter(),
            weighting=Samples(),
            engine=engine,
        )
        super().__init__(plan)
        self.engine.close()
        own = self.parts.client
        job = Job(model, data, own, mse_loss, 1, self.memories)
        self.engine = engine.start(job)


def end(data: Regression, client: Plain, rounds: int, engine: Any = None) -> np.ndarray:
    """θ after so many rounds, all of which went well."""
    with closing(LeastSquares(data, client, rounds, engine or Serial())) as run:
        for found in run.rounds():
            assert found.record.stepped, found.record.reason
            assert not found.record.rejected
        return run.server.params["weight"].numpy().ravel().copy()


def disagreeing(*sizes: int) -> Regression:
    """Inputs of three features, of which each client sees others strongly, and rules of its own."""
    rng = np.random.default_rng(7)
    scales = [rng.permutation([1.4, 1.0, 0.8]) for _ in sizes]
    inputs = [rng.standard_normal((n, 3)) * scale for n, scale in zip(sizes, scales, strict=True)]
    return Regression(inputs, [3 * rng.standard_normal(3) for _ in sizes])


def constant(sizes: list[int], rules: list[float]) -> Regression:
    """One feature that is 1 for everyone: all batches of a client are alike, H_k = 2, b_k given."""
    return Regression([np.ones((n, 1)) for n in sizes], [np.array([b]) for b in rules])


LR, STEPS = 0.1, 6
LOCAL: dict[str, Any] = {"optimizer": "sgd", "lr": LR, "batch_size": 64, "steps": STEPS}
METHODS = [
    pytest.param(Scaffold(**LOCAL), id="scaffold"),
    pytest.param(Scaffold(option="II", **LOCAL), id="scaffold-II"),
    pytest.param(FedDyn(alpha=2.0, **LOCAL), id="feddyn"),
    pytest.param(VRLSGD(**LOCAL), id="vrl-sgd"),
]
ROUNDS = 45  # FedDyn is the slowest of them: its error falls by about .62 a round
ENGINES = [pytest.param(Serial(), id="serial"), pytest.param(Batched(), id="batched")]


def test_fedavg_stops_beside_the_optimum():
    data = disagreeing(12, 12, 12, 12)
    wrong = data.balance([data.drift(k, LR, STEPS) for k in range(data.clients)])
    assert np.linalg.norm(wrong - data.optimum()) > 0.2  # of a problem whose rules have length ~5
    assert end(data, Plain(**LOCAL), 100) == pytest.approx(wrong, abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("client", METHODS)
def test_these_reach_the_optimum(client: Plain, engine: Any):
    data = disagreeing(12, 12, 12, 12)
    assert end(data, client, ROUNDS, engine) == pytest.approx(data.optimum(), abs=1e-6)


@pytest.mark.parametrize("client", METHODS)
def test_what_they_reach_is_the_optimum_of_the_plain_mean(client: Plain):
    data = disagreeing(6, 12, 18, 30)
    weighted = data.optimum(weights=[6, 12, 18, 30])
    assert np.linalg.norm(weighted - data.optimum()) > 0.2
    assert end(data, client, ROUNDS) == pytest.approx(data.optimum(), abs=1e-6)


UNEQUAL = constant([1, 2, 3, 4], [4.0, -1.0, 2.0, -3.0])
ONES: dict[str, Any] = {"optimizer": "sgd", "batch_size": 1}  # n_k steps a round


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(Scaffold(lr=0.1, **ONES), id="scaffold"),
        pytest.param(FedDyn(lr=0.1, alpha=4.0, **ONES), id="feddyn"),
        pytest.param(VRLSGD(lr=0.1, **ONES), id="vrl-sgd"),
    ],
)
def test_they_reach_it_with_unequal_numbers_of_steps_too(client: Plain):
    assert end(UNEQUAL, client, ROUNDS) == pytest.approx([0.5], abs=1e-6)  # mean of 4, −1, 2, −3


def test_fednova_undoes_what_unequal_numbers_of_steps_do():
    # By samples: p = .1, .2, .3, .4, the optimum .4 − .2 + .6 − 1.2 = −.4.
    p, steps, lr = [0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4], 0.02
    assert UNEQUAL.optimum(weights=p) == pytest.approx([-0.4])
    drifts = [p[k] * UNEQUAL.drift(k, lr, steps[k]) for k in range(4)]
    fedavg = UNEQUAL.balance(drifts)
    fednova = UNEQUAL.balance([drifts[k] / steps[k] for k in range(4)])
    assert end(UNEQUAL, Plain(lr=lr, **ONES), 200) == pytest.approx(fedavg, abs=1e-8)
    assert end(UNEQUAL, FedNova(lr=lr, **ONES), 200) == pytest.approx(fednova, abs=1e-8)
    # FedAvg is near Σ p_k τ_k b_k/Σ p_k τ_k = (.4 − .4 + 1.8 − 4.8)/3 = −1 instead.
    assert fedavg == pytest.approx([-1], abs=0.05)
    assert fednova == pytest.approx([-0.4], abs=0.05)
