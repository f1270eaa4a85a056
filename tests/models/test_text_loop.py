"""What texts need of the training loop: batches shuffled once, and amsgrad."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients.test_loop import ours, samples, two_layers
from run_support import packed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.config.schema import Config, load
from fedglad.data.digits import Digits
from fedglad.models.softmax import SoftmaxRegression
from fedglad.records import Bundle
from fedglad.rng import stream
from fedglad.simulation.engines.base import Job
from fedglad.simulation.engines.settings import Batched, Local, Serial

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------------------------- amsgrad


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_amsgrad_is_torchs(optimizer: Any, decay: float):
    client = Plain(
        optimizer=optimizer,
        lr=0.05,
        betas=(0.5, 0.6),  # forgets quickly, so that it matters
        amsgrad=True,
        weight_decay=decay,
        batch_size=8,
        epochs=4,
    )
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        model, (x, y) = two_layers(dtype), samples(37, dtype)
        x = x * torch.linspace(3, 0.1, 37, dtype=dtype)[:, None]  # gradients of many sizes
        found, _ = ours(client, model, x, y)
        without, _ = ours(replace(client, amsgrad=False), model, x, y)
        kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
        settings = {"lr": 0.05, "betas": client.betas, "weight_decay": decay, "amsgrad": True}
        wanted = by_torch(kind(model.parameters(), **settings), model, client, x, y)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)
        assert not torch.allclose(found["0.weight"], without["0.weight"], atol=1e-4)


def by_torch(
    optimizer: torch.optim.Optimizer, model: nn.Module, client: Plain, x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    rng = stream(1, "client", 0, 0)
    rng.bit_generator.random_raw()
    for batch in client.batches(len(y), rng):
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def test_amsgrad_remembers_the_largest_second_moment_by_hand():
    # Gradients 2 then 0 with betas (0, 0.5), eps 0, rate 0.1, no decay:
    # step 1: v = .5·4 = 2, corrected by 1 − .5 = .5: √(2/.5) = 2; w −= .1·2/2 = .1
    # step 2: the gradient is 0, m = 0: w stays. Then gradient 1:
    # v = .5·(.5·2) + .5·1 = 1 < 2, so amsgrad keeps 2; corrected by 1 − .5³ = .875:
    # w −= .1·1/√(2/.875) = .06614, where Adam has .1/√(1/.875) = .09354
    from fedglad.clients.local_optimizers import move, slot_names

    for amsgrad, step in ((True, 0.1 / (2 / 0.875) ** 0.5), (False, 0.1 / (1 / 0.875) ** 0.5)):
        client = Plain(optimizer="adam", lr=0.1, betas=(0.0, 0.5), eps=0.0, amsgrad=amsgrad)
        w = torch.zeros(1, dtype=torch.float64)
        slots = {name: torch.zeros_like(w) for name in slot_names(client)}
        for k, gradient in enumerate((2.0, 0.0, 1.0)):
            move(client, w, torch.tensor([gradient], dtype=torch.float64), slots, 0.1, k)
        assert w.item() == pytest.approx(-0.1 - step, abs=1e-12)


# ---------------------------------------------------------------------------------------- shuffle


def test_an_order_drawn_once_is_that_of_every_epoch():
    client = Plain(batch_size=8, epochs=3, shuffle="once")
    found = [batch.tolist() for batch in client.batches(20, stream(1, "x"))]
    assert [len(batch) for batch in found] == [8, 8, 4] * 3
    assert found[:3] == found[3:6] == found[6:]
    epoch = [*found[0], *found[1], *found[2]]
    assert sorted(epoch) == list(range(20))
    assert epoch == stream(1, "x").permutation(20).tolist()


def test_the_default_draws_as_it_always_did():
    rng, found = stream(3, "x"), list(Plain(batch_size=8, epochs=2).batches(20, stream(3, "x")))
    wanted = [rng.permutation(20) for _ in range(2)]
    assert np.concatenate(found).tolist() == np.concatenate(wanted).tolist()
    assert Plain().order(1, 2) is None


def test_the_order_is_a_clients_own_and_the_same_in_every_round():
    client = Plain(shuffle="once")

    def order(seed: int, k: int) -> list[int]:
        rng = client.order(seed, k)
        assert rng is not None
        return rng.permutation(50).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, k)) for seed in (1, 2) for k in (0, 1)}) == 4


def test_dropout_still_draws_anew_in_every_round():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.Linear(9, 5))
    theta, buffers = packed(model)
    bench, (x, y) = Workbench(model), samples(20)
    client = Plain(batch_size=20, shuffle="once")

    def once(t: int) -> Tensor:
        rng = stream(1, "client", t, 0)
        return bench.train(client, theta, buffers, x, y, rng, order=client.order(1, 0)).delta

    assert once(0).equal(once(0))
    assert not once(0).equal(once(1))


def rounds(engine: Any, client: Plain, count: int = 2) -> list[Tensor]:
    """The deltas of three clients in each round, from one and the same model."""
    data: Any = Digits(clients=20, partition="iid").load_federation()
    job = Job(SoftmaxRegression(features=64).build(), data, client, cross_entropy, seed=1)
    theta, buffers = packed(job.build())
    found: list[Tensor] = []
    with closing(engine.start(job)) as started:
        for t in range(count):
            groups = list(started.train(t, [0, 4, 7], (theta, buffers), {}))
            assert all(isinstance(group, Bundle) for group in groups)
            found.append(torch.cat([group.deltas.clone() for group in groups]))
    return found


@pytest.mark.parametrize("amsgrad", [False, True])
def test_every_engine_takes_the_same_batches(amsgrad: bool):
    # With ε = 1e-8 Adam takes the sign of gradients that are 0 but for rounding, which differs.
    adam: dict[str, Any] = {"optimizer": "adam", "amsgrad": amsgrad, "eps": 1e-3, "lr": 0.01}
    client = Plain(batch_size=16, epochs=2, shuffle="once", **adam)
    first, second = rounds(Serial(), client)
    assert first.equal(second)  # no dropout: the same order, the same round
    assert len({tuple(row.tolist()) for row in first}) == 3
    for other in rounds(Batched(), client):
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)
    first, second = rounds(Serial(), replace(client, shuffle="epoch"))
    assert not first.equal(second)


@pytest.mark.slow
def test_worker_processes_take_the_same_batches():
    client = Plain(optimizer="adam", amsgrad=True, batch_size=16, epochs=2, shuffle="once")
    found = rounds(Local(workers=2, device="cpu"), client)
    assert all(a.equal(b) for a, b in zip(found, rounds(Serial(), client), strict=True))


# ------------------------------------------------------------------------------------------ hashes


def test_results_keep_their_names():
    """Fields that were added since then change no hash, unless they are set."""
    paths = sorted((ROOT / "results").glob("*.json"))
    assert len(paths) >= 2
    usual = {name: getattr(Plain(), name) for name in Plain.added}
    for path in paths:
        told = json.loads(path.read_text("utf-8"))
        without = {
            section: {k: v for k, v in keys.items() if k not in usual or v != usual[k]}
            if section == "client"
            else keys
            for section, keys in told["config"].items()
        }
        for tree in (told["config"], without):
            assert Config.of(tree).hash() == told["hash"] == path.stem.rpartition("-")[2]


def test_the_hash_has_an_added_field_that_is_set():
    found = {
        load("digits", given)[1].hash()
        for given in ({}, {"client.shuffle": "once"}, {"client.amsgrad": True})
    }
    assert len(found) == 3
    told = load("digits", {"client.shuffle": "epoch", "client.amsgrad": False})[1]
    assert told.hash() == load("digits")[1].hash()
    assert told.to_dict()["client"]["shuffle"] == "epoch"  # in the file it is, as all others


@pytest.mark.parametrize("value", ["never", "", 3])
def test_another_shuffle_is_refused(value: Any):
    with pytest.raises(ValueError, match=r"client.shuffle = .*: must be one of 'epoch', 'once'"):
        load("digits", {"client.shuffle": value})
