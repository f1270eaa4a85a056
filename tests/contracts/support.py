"""What the contract tests share: an awkward little model, cohorts for it, equality to the bit."""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedglad import Record, Server, Update
from fedglad.averages import NoAverage
from fedglad.estimators import Estimator
from fedglad.filters import MultiKrum
from fedglad.server.server import REGISTRIES

Parts = dict[str, Any]
"""Optimizer, adapter, filter, weighting, estimator and average by role: arguments of Server."""

ROWS = [(role, name) for role, registry in REGISTRIES.items() for name in registry]

TELLING: dict[str, dict[str, Any]] = {
    "glad": {"gamma": 0.5},
    "pooled": {"gamma": 0.5},
    "aligned": {"gamma": 0.5},
    "fixed": {"value": 0.7},
    "momentum": {"nesterov": True},
    "adagrad": {"beta1": 0.9},
    "trimmed-mean": {"beta": 0.2},
    "schedule-free": {"beta": 0.5},
    "dog": {"reach": 0.5},
    "fedau": {"cutoff": 2},
    "ema": {"beta": 0.5},
    "window": {"size": 2},
    "stale": {"beta": 0.7},
    "strat": {"cosine": 0.1, "most": 3},
}
"""Settings for rows whose defaults would let six clients and four rounds show less."""

POPULATION = 20
"""How many clients there are, of which a cohort has six."""


class Awkward(nn.Module):
    """Parameters with two, one and no dimensions; buffers that are floats and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        with torch.no_grad():
            for k, parameter in enumerate(self.parameters()):
                parameter.copy_(draw(parameter.shape, k))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) / self.temperature


def draw(shape: tuple[int, ...], *name: int) -> Tensor:
    """Normal numbers that depend on the name alone."""
    rng = np.random.default_rng([71, *name])
    return torch.as_tensor(rng.standard_normal(shape), dtype=torch.float32)


def make(role: str, name: str, **settings: Any) -> Any:
    """The registry row with telling settings."""
    return REGISTRIES[role][name](**{**TELLING.get(name, {}), **settings})


def refusal(parts: Parts) -> str | None:
    """The documented refusals (METHODS.md, section 6): the message of one that applies."""
    if parts["filter"].leaves_one and parts["adapter"].compares:
        return "leaves one update, so GSI is always 1 and .* has nothing to compare: use MultiKrum"
    weighting, optimizer = parts["weighting"], parts["optimizer"]
    if parts["filter"].robust and (weighting.keeps_updates or not weighting.normalises):
        return "ignores weights, so .* would have no effect: use Equal or Samples"
    if isinstance(parts.get("estimator"), Estimator):
        if optimizer.judges_mean:
            return "follows the cohort's mean by how much its updates disagree, and that says"
        if parts["filter"].robust or isinstance(parts["filter"], MultiKrum):
            return "takes those that are like each other: use filter.name = norm-clip, distrust or"
        if not weighting.unbiased:
            return (
                "weighs them by what they are, or how often they come: use weighting.name = samples"
            )
    if optimizer.reads_out and not isinstance(parts["average"], NoAverage):
        return "keeps an average itself, .*, and .* would be a second one: use average.name = none"
    if optimizer.reads_out and parts["adapter"].shrinks:
        return "shrinks θ after the step, and .* makes θ anew from what it keeps"
    return None


def difference(model: nn.Module, *name: int, scale: float = 0.3) -> dict[str, Tensor]:
    """An honest client's θ − θ_k."""
    parameters = enumerate(model.named_parameters())
    return {n: scale * draw(tuple(p.shape), *name, i) for i, (n, p) in parameters}


def trained(model: nn.Module, *name: int, scale: float = 0.3) -> dict[str, Tensor]:
    """An honest client's trained state_dict, buffers moved too."""
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for n, g in difference(model, *name, scale=scale).items():
        state[n] -= g
    for k, (n, buffer) in enumerate(model.named_buffers()):
        whole = not buffer.is_floating_point()
        state[n] = buffer + (name[-1] if whole else draw(tuple(buffer.shape), *name, k).abs())
    return state


def cohort(model: nn.Module, t: int) -> list[Update]:
    """Six good updates of round t in every form an update may have, and in round 1 two bad ones."""
    plain = [difference(model, t, k, scale=0.1 + 0.1 * k) for k in range(6)]
    forms: list[Mapping[str, Any]] = [
        plain[0],
        {n: g.double().numpy() for n, g in plain[1].items()},
        {n: g.half() for n, g in plain[2].items()},
        {n: g.T.contiguous().T if g.ndim == 2 else g for n, g in plain[3].items()},
    ]
    clients = [0, 1, "two", "3"]
    updates = [
        Update(form, weight=10.0 + 7 * k, client=client, loss=1.0 / (k + 1))
        for k, (form, client) in enumerate(zip(forms, clients, strict=True))
    ]
    updates.append(Update(model=trained(model, t, 4), weight=25, client=4))
    updates.append(Update(model=trained(model, t, 5, scale=0.6), client=5 + t, weight=1.5))
    if t == 1:
        nan = {n: g.clone() for n, g in plain[0].items()}
        nan["temperature"].fill_(math.nan)
        updates.insert(0, Update(nan, client="sick"))
        updates.insert(4, replace(updates[2], delta={}, client="empty"))
    if t == 3:
        updates = [_frozen(update, model) for update in updates]
    return updates


def _frozen(update: Update, model: nn.Module) -> Update:
    """The update without movement of one tensor."""
    name = "temperature"
    if update.model is not None:
        return replace(update, model={**update.model, name: model.state_dict()[name]})
    assert isinstance(update.delta, Mapping)
    return replace(update, delta={**update.delta, name: torch.tensor(0.0)})


def bits(value: Any) -> Any:
    """The value with its numbers as bytes: equal only if every bit is, −0.0 and NaN included."""
    match value:
        case float():
            return value.hex()
        case dict():
            return {key: bits(part) for key, part in value.items()}
        case list() | tuple():
            return [bits(part) for part in value]
        case Tensor():
            shape = tuple(value.shape)
            return (
                value.dtype,
                shape,
                value.detach().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        case np.ndarray():
            return value.dtype, value.shape, value.tobytes()
        case Update():
            return bits(vars(value))
        case Record():
            return bits(value.to_dict())
        case Server():
            return bits(value.state_dict())
        case _:
            return value


@contextmanager
def threads(n: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Correction:
    """A client method's server half with state like SCAFFOLD's (c) and like FedDyn's (h, a shift).

    c ← c + Σ extra / N;  h ← h + α r/N ḡ;  θ is shifted by −h/α after the step.
    """

    alpha: float = 0.1
    clients: int = 20

    def __call__(
        self, mean: Tensor, extra_sum: Tensor, count: int, state: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        c = state.get("c", torch.zeros_like(mean)) + extra_sum / self.clients
        h = state.get("h", torch.zeros_like(mean)) + mean * (self.alpha * count / self.clients)
        return {"c": c, "h": h}, h / -self.alpha


def with_extra(updates: list[Update], model: nn.Module) -> list[Update]:
    """The cohort of clients that also send a second set of tensors."""
    return [replace(u, extra=difference(model, 9, k)) for k, u in enumerate(updates)]
