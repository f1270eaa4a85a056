"""From Flower's strategies to ours: three rounds of each side by side, equal or by formula.

The table in docs/flower.md says the same in words. The clients move by what was drawn for the
round, whatever model they are sent: so both strategies see the same mean Δ_t in round t = 0, 1, 2,
and the steps they take can be written down.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from fedglad.flower import FedGLAD
from fedglad.optimizers import SGD, Adagrad, Adam, Momentum, Yogi

from .grid import Arrays, Clock, LocalGrid, model, numpy, received, record, server_round

ROUNDS, COUNT = 3, 4
DOCS = Path(__file__).parents[2] / "docs" / "flower.md"
WEIGHTS = [10, 20, 30, 40]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


def moves(t: int, k: int) -> Arrays:
    """What client k adds to the model in round t."""
    rng = np.random.default_rng([5, t, k])
    return {name: 0.1 * rng.standard_normal(x.shape) for name, x in model(np.float64).items()}


def client(k: int) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        moved = moves(server_round(message) - 1, k)
        arrays = {name: x + moved[name] for name, x in received(message).items()}
        metrics = MetricRecord({"num-examples": WEIGHTS[k]})
        return Message(RecordDict({"a": record(arrays), "m": metrics}), reply_to=message)

    return reply


def delta(t: int) -> Arrays:
    """Δ_t, the mean by the clients' samples."""
    parts = [moves(t, k) for k in range(COUNT)]
    return {
        name: np.average([part[name] for part in parts], axis=0, weights=WEIGHTS)
        for name in parts[0]
    }


def trained(strategy: Any, **settings: Any) -> tuple[list[Arrays], LocalGrid]:
    """The model that clients were sent in each round, and the last one; from the same start."""
    grid = LocalGrid([client(k) for k in range(COUNT)])
    start = record(model(np.float64))
    result = strategy.start(grid, start, num_rounds=ROUNDS, **settings)
    sent = {server_round(message): received(message) for message in grid.sent}
    return [sent[t] for t in range(1, ROUNDS + 1)] + [numpy(result.arrays)], grid


def ours(optimizer: Any) -> FedGLAD:
    return FedGLAD(fraction_evaluate=0.0, optimizer=optimizer, adapter=None)


def steps(models: list[Arrays]) -> list[Arrays]:
    return [
        {name: after[name] - before[name] for name in before} for before, after in pairwise(models)
    ]


def same(first: list[Arrays], second: list[Arrays], tolerance: float = 1e-12) -> bool:
    return all(
        np.allclose(a[name], b[name], rtol=tolerance, atol=1e-14)
        for a, b in zip(first, second, strict=True)
        for name in a
    )


def test_fedavg_is_sgd():
    theirs, _ = trained(FedAvg(fraction_evaluate=0.0))
    found, _ = trained(ours(SGD()))
    assert same(found, theirs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavgm_is_momentum(momentum: float):
    theirs, _ = trained(
        FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.5, server_momentum=momentum)
    )
    found, _ = trained(ours(Momentum(lr=0.5, momentum=momentum) if momentum else SGD(lr=0.5)))
    assert same(found, theirs)


def test_fedprox_is_a_word_in_the_configuration():
    theirs, their_grid = trained(FedProx(fraction_evaluate=0.0, proximal_mu=0.1))
    config = ConfigRecord({"proximal-mu": 0.1})
    found, grid = trained(ours(SGD()), train_config=config)
    assert same(found, theirs)
    for told in (grid, their_grid):
        configs = [message.content["config"] for message in told.sent]
        assert [one["proximal-mu"] for one in configs] == [0.1] * ROUNDS * COUNT


def test_fedadam_is_adam_whose_bias_correction_is_a_round_ahead():
    """Flower counts rounds from 1 and corrects by the power of round + 1, so its factor in round t
    is ours of round t + 1: c_t = √(1 − β₂^(t+1)) / (1 − β₁^(t+1))."""
    beta1, beta2 = 0.8, 0.95
    theirs, _ = trained(
        FedAdam(fraction_evaluate=0.0, eta=0.05, beta_1=beta1, beta_2=beta2, tau=1e-2)
    )
    found, _ = trained(ours(Adam(lr=0.05, betas=(beta1, beta2), eps=1e-2)))

    def c(t: int) -> float:
        return float(np.sqrt(1 - beta2 ** (t + 1)) / (1 - beta1 ** (t + 1)))

    # c_0 = √.05/.2 = 1.118, c_1 = √.0975/.36 = .867: Flower's first step is .776 of ours.
    assert c(1) / c(0) == pytest.approx(0.7758, abs=1e-4)
    scaled = [
        {name: x * c(t + 1) / c(t) for name, x in step.items()}
        for t, step in enumerate(steps(found))
    ]
    assert same(steps(theirs), scaled, 1e-9)
    assert not same(steps(theirs), steps(found), 0.05)


def test_fedadam_of_its_paper_is_the_form_reddi():
    """Algorithm 2 corrects nothing, and v starts as τ²: neither is Flower's FedAdam."""
    found, _ = trained(ours(Adam(lr=0.05, form="reddi", betas=(0.8, 0.95), eps=1e-2)))
    for name in delta(0):
        m, v = 0.0, 1e-2**2
        for t, step in enumerate(steps(found)):
            d = delta(t)[name]
            m, v = 0.8 * m + 0.2 * d, 0.95 * v + 0.05 * d**2
            assert np.allclose(step[name], 0.05 * m / (np.sqrt(v) + 1e-2), rtol=1e-9)


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_fedadagrad_is_adagrad_whose_v_starts_as_the_square_of_tau(side: str):
    tau = 1e-2
    if side == "ours":
        found, _ = trained(ours(Adagrad(lr=0.05, eps=tau)))
    else:
        found, _ = trained(FedAdagrad(fraction_evaluate=0.0, eta=0.05, tau=tau))
    start = tau**2 if side == "ours" else 0.0  # the paper: v ≥ τ²
    for name in delta(0):
        v = start
        for t, step in enumerate(steps(found)):
            v = v + delta(t)[name] ** 2
            assert np.allclose(step[name], 0.05 * delta(t)[name] / (np.sqrt(v) + tau), rtol=1e-9)


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_fedyogi_is_yogi_whose_v_starts_as_the_square_of_tau(side: str):
    tau, beta1, beta2 = 1e-2, 0.8, 0.95
    if side == "ours":
        found, _ = trained(ours(Yogi(lr=0.05, betas=(beta1, beta2), eps=tau)))
    else:
        found, _ = trained(
            FedYogi(fraction_evaluate=0.0, eta=0.05, beta_1=beta1, beta_2=beta2, tau=tau)
        )
    for name in delta(0):
        m, v = 0.0, tau**2 if side == "ours" else 0.0
        for t, step in enumerate(steps(found)):
            d = delta(t)[name]
            m = beta1 * m + (1 - beta1) * d
            v = v - (1 - beta2) * d**2 * np.sign(v - d**2)
            assert np.allclose(step[name], 0.05 * m / (np.sqrt(v) + tau), rtol=1e-9)


def test_the_table_in_the_docs_has_a_row_for_each():
    rows = re.findall(r"^\| `(Fed\w+)\((.*?)\)` \| `(.*?)` \|", DOCS.read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == [
        *("FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedAdagrad", "FedYogi"),
    ]
    known = {"SGD": SGD, "Momentum": Momentum, "Adam": Adam, "Adagrad": Adagrad, "Yogi": Yogi}
    for _, _, code in rows:
        values = {"eta": 0.1, "tau": 1e-3, "beta_1": 0.9, "beta_2": 0.99, "mu": 0.1}
        names = {**known, **values, "FedGLAD": FedGLAD, "ConfigRecord": ConfigRecord}
        made = eval(code, names)
        assert isinstance(made, (*known.values(), ConfigRecord))
