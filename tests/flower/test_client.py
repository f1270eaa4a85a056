"""A Flower client's work is that of a simulated client, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.fedprox import FedProx
from fedglad.clients.method import Plain
from fedglad.clients.scaffold import Scaffold
from fedglad.config.schema import load
from fedglad.data.federation import Partitioned
from fedglad.flower.client import fit, score
from fedglad.flower.template.digits_app import task
from fedglad.records import Bundle, Update
from fedglad.rng import stream
from fedglad.server.server import Server
from fedglad.simulation.engines.base import Job
from fedglad.simulation.engines.serial import SerialEngine
from fedglad.simulation.engines.settings import Serial

SEED = 7


def samples(n: int) -> tuple[Tensor, Tensor]:
    rng = stream(SEED, "samples")
    x = torch.from_numpy(rng.normal(size=(n, 6)).astype("float32"))
    return x, torch.from_numpy(rng.integers(0, 3, n))


def network() -> nn.Module:
    """With what travels beside the parameters: BatchNorm's statistics and its counter."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def engine(model: nn.Module, data: Any, client: Plain) -> SerialEngine:
    job = Job(model, data, client, cross_entropy, SEED)
    return Serial(device="cpu").start(job)


@pytest.mark.parametrize(
    "client", [Plain(batch_size=4, epochs=2, clip_norm=0.5), FedProx(batch_size=4, mu=0.3)]
)
def test_a_client_trains_as_in_the_simulator(client: Plain):
    x, y = samples(23)
    model = network()
    data = Partitioned(x, y, x, y, [stream(SEED, "owners").permutation(23)])
    layout, packed = Server(model).layout, Server(model).packed
    (group,) = engine(model, data, client).train(5, [0], packed, {})
    assert not isinstance(group, Bundle)  # there are buffers
    (update,) = group
    assert isinstance(update, Update)
    assert isinstance(update.delta, Tensor)
    assert update.buffers

    loss = fit(model, client, *data.client(0), stream(SEED, "client", 5, 0))
    assert loss == update.loss
    trained = layout.pack({name: p.detach() for name, p in model.named_parameters()})
    assert (packed[0] - trained).equal(update.delta)
    assert update.delta.any()
    found = dict(model.named_buffers())
    assert found.keys() == update.buffers.keys()
    assert [name for name in found if not found[name].equal(update.buffers[name])] == []
    assert found["1.num_batches_tracked"] == client.count(23)


def test_a_model_is_tested_as_in_the_simulator():
    x, y = samples(2345)  # two whole chunks and a part
    data = Partitioned(x, y, x, y, [stream(SEED, "owners").permutation(2345)])
    model = network()
    found = engine(model, data, Plain()).evaluate(Server(model).packed)
    assert score(model, x, y) == (found["loss"], found["accuracy"])


def test_threads_stay_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        score(network(), *samples(5))
        fit(network(), Plain(), *samples(5), stream(1, "x"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_method_that_needs_more_than_weights_is_refused():
    with pytest.raises(ValueError, match=r"Scaffold has a memory .*: use Plain or FedProx"):
        fit(network(), Scaffold(), *samples(5), stream(1, "x"))


def test_a_rate_that_changes_with_the_rounds_is_not_taken_for_a_constant_one():
    client = Plain(rounds_schedule="exponential", over=1, drop=0.5)
    with pytest.raises(
        ValueError, match=r"exponential'\): which round it is.*client.of_round\(t\)"
    ):
        fit(network(), client, *samples(5), stream(1, "x"))
    model, halved = network(), network()
    fit(model, client.of_round(1), *samples(5), stream(1, "x"))
    fit(halved, Plain(lr=client.lr / 2), *samples(5), stream(1, "x"))
    assert all(map(torch.equal, model.parameters(), halved.parameters()))


def test_no_samples_are_refused():
    x, y = samples(0)
    with pytest.raises(ValueError, match="no samples"):
        fit(network(), Plain(), x, y, stream(1, "x"))
    with pytest.raises(ValueError, match="no samples"):
        score(network(), x, y)


@pytest.mark.parametrize("clients", [4, 50])
def test_the_app_is_the_preset_digits(clients: int):
    _, config = load("digits", {"data.clients": clients, "data.alpha": 1.0, "seed": 2})
    plan = config.plan()
    assert plan.client == task.CLIENT
    ours, theirs = task.build_model(2).state_dict(), plan.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []
    for pair in (
        (task.load_client(3, clients), plan.data.client(3)),
        (task.load_test(), plan.data.test()),
    ):
        assert all(mine.equal(other) for mine, other in zip(*pair, strict=True))
