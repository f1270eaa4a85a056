"""Local steps of the models of images against plain PyTorch: torch.optim.SGD."""

import copy
import importlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.models import REGISTRY

SHAPES = {
    "softmax": (60,),
    "mlp": (784,),
    "cnn": (1, 28, 28),
    "small-cnn": (1, 8, 8),
    "resnet56": (3, 8, 8),
    "resnet56-basic": (3, 8, 8),
    "resnet56-gn": (3, 8, 8),
}
LR, MOMENTUM = 0.01, 0.9


def drawn(name: str, n: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model away from its start, so that no gradient is small by chance, and data for it."""
    module, _, kind = REGISTRY[name].partition(":")
    torch.manual_seed(7)
    model = getattr(importlib.import_module(module), kind)().build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model, torch.randn(n, *SHAPES[name]), torch.randint(10, (n,))


def by_torch(
    model: nn.Module, x: Tensor, y: Tensor, batch: int, clip: float
) -> tuple[nn.Module, list[float]]:
    """The hand-written loop, with the client's seed and order; and the norms of its gradients."""
    rng = np.random.default_rng(1)
    torch.manual_seed(rng.bit_generator.random_raw())
    order = torch.from_numpy(rng.permutation(len(y)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    norms: list[float] = []
    model.train()
    for index in order.split(batch):
        optimizer.zero_grad()
        cross_entropy(model(x[index]), y[index]).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return model, norms


def by_us(model: nn.Module, x: Tensor, y: Tensor, batch: int, clip: float) -> dict[str, Tensor]:
    """The client's round; parameters and buffers by name."""
    bench = Workbench(model)
    theta, buffers = bench.w.clone(), {n: b.clone() for n, b in model.named_buffers()}
    client = Plain(lr=LR, momentum=MOMENTUM, batch_size=batch, clip_norm=clip)
    found = bench.train(client, theta, buffers, x, y, np.random.default_rng(1))
    return {**bench.layout.views(bench.w), **found.buffers}


@pytest.mark.parametrize("name", SHAPES)
def test_steps_are_torchs_bit_for_bit(name: str):
    """Same operations in the same memory format; nothing is clipped, so nothing is reordered."""
    model, x, y = drawn(name, 24)
    start = {n: v.clone() for n, v in model.state_dict().items()}
    wanted = by_torch(copy.deepcopy(model), x, y, 8, clip=1e9)[0].state_dict()
    found = by_us(model, x, y, 8, clip=1e9)
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not found[n].equal(wanted[n])] == []
    assert [n for n in wanted if wanted[n].equal(start[n])] == []  # all of it has moved


@pytest.mark.parametrize("name", SHAPES)
def test_a_clipped_step_is_torchs_to_rounding(name: str):
    """Not bit for bit: torch takes the norm of the tensors' norms, we that of one vector."""
    model, x, y = drawn(name, 16)
    with torch.no_grad():
        x *= 10  # so that the gradient is cut in every model
    wanted, norms = by_torch(copy.deepcopy(model), x, y, 16, clip=1.0)
    assert norms[0] > 1.1
    found = by_us(model, x, y, 16, clip=1.0)
    for key, value in wanted.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
