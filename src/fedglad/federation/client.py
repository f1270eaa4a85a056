"""A client's work by fedglad's own training loop: the bits are those of the simulator.

Knows nothing of messages: a model goes in and is trained in place.
"""

import math

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients.method import Loss, Plain
from fedglad.clients.workbench import Workbench
from fedglad.core.threads import threads
from fedglad.simulation.engines.base import CHUNK, measure
from fedglad.tasks.base import Task, added, as_task, finished


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
    if client.has_personal:
        raise ValueError(
            f"{type(client).__name__} keeps parameters with each client, and a Flower client "
            "begins anew in every round: use Plain or FedProx without client.personal"
        )
    if client.rounds_schedule != "constant":
        raise ValueError(
            f"{type(client).__name__}(rounds_schedule={client.rounds_schedule!r}): which round it "
            "is, a Flower client does not know: give client.of_round(t), with t as the server sent "
            "it in the message's config"
        )
    bench = Workbench(model, loss)
    theta = bench.w.clone()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with threads(1):  # with more, the bits would depend on how many cores a machine has
        return bench.train(client, theta, buffers, x, y, rng).loss


def score(
    model: nn.Module, x: Tensor, y: Tensor, *, loss: Loss = cross_entropy
) -> tuple[float, float]:
    """The mean loss and the accuracy of a model on samples."""
    measured = metrics(model, x, y, task=loss)
    return measured["loss"], measured.get("accuracy", math.nan)


def metrics(
    model: nn.Module, x: Tensor, y: Tensor, *, task: Task | Loss = cross_entropy
) -> dict[str, float]:
    """All metrics of a task on samples, for a MetricRecord; a loss function is a task, too.

    >>> from torch import ones, zeros
    >>> from fedglad.tasks import Regression
    >>> line = nn.Linear(1, 1).requires_grad_(False)
    >>> _ = line.weight.fill_(2.0), line.bias.fill_(0.0)
    >>> metrics(line, ones(3, 1), zeros(3, 1), task=Regression())["mae"]
    2.0
    """
    if not len(y):
        raise ValueError("there are no samples to evaluate on")
    made = as_task(task)
    with threads(1):
        chunks = zip(x.split(CHUNK), y.split(CHUNK), strict=True)
        return finished(made, added(measure(model, made, *chunk) for chunk in chunks))
