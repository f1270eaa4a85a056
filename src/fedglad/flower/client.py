"""A Flower client's work by fedglad's own training loop: the bits are those of the simulator.

Knows nothing of Flower: a model goes in and is trained in place.
"""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.method import Loss, Plain
from fedglad.clients.workbench import Workbench

CHUNK = 1000  # samples evaluated at a time, as in the simulator's engines


def fit(
    model: nn.Module,
    client: Plain,
    x: Tensor,
    y: Tensor,
    rng: np.random.Generator,
    *,
    loss: Loss = cross_entropy,
) -> float:
    """Trains a model that has the global weights, in place; returns the mean loss of the steps.

    `client` says how, and must be a method without a memory or a server half, such as `Plain` or
    `FedProx`: a Flower client sends its weights and nothing else.
    """
    if client.remembers or client.hears or client.server is not None:
        raise ValueError(
            f"{type(client).__name__} has a memory or a server half, which do not travel with "
            "Flower's messages: use Plain or FedProx"
        )
    bench = Workbench(model, loss)
    theta = bench.w.clone()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with _one_thread():
        return bench.train(client, theta, buffers, x, y, rng).loss


@torch.no_grad()
def score(
    model: nn.Module, x: Tensor, y: Tensor, *, loss: Loss = cross_entropy
) -> tuple[float, float]:
    """The mean loss and the accuracy of a model on samples."""
    if not len(y):
        raise ValueError("there are no samples to evaluate on")
    model.eval()
    losses: list[float] = []
    hits = 0
    with _one_thread():
        for inputs, targets in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            scores = model(inputs)
            losses.append(float(loss(scores, targets)) * len(targets))
            hits += int((scores.argmax(dim=1) == targets).sum())
    return sum(losses) / len(y), hits / len(y)


@contextmanager
def _one_thread() -> Generator[None]:
    """With more, the bits would depend on how many cores a machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
