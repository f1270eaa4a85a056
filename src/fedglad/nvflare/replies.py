"""A site's FLModel as an Update, and what is wrong with one that cannot be. Needs no NVFlare."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedglad.core.layout import Layout, as_tensor
from fedglad.core.validate import as_number
from fedglad.federation.metrics import loss_of
from fedglad.records import Update

LONGEST = 500  # letters that the name of a metric may have
DIFF = "DIFF"


class Unusable(Exception):
    """A reply that is no update; the message is the reason kept in the record."""


def update_of(
    reply: Any, client: int, sent: Mapping[str, Tensor], layout: Layout, weight: float
) -> Update:
    """The Update in a reply with full weights or with differences; raises Unusable.

    `sent` is the model that the site began with. NVFlare's difference is what training added.
    """
    params = reply.params
    if not isinstance(params, Mapping):
        raise Unusable(f"the params are a {type(params).__name__}, not a dict of arrays")
    loss = loss_of(metrics_of(reply))
    if _kind(reply) != DIFF:
        return Update(model=params, weight=weight, client=client, loss=loss)
    delta, buffers = _from_difference(params, sent, layout)
    return Update(delta, weight=weight, client=client, loss=loss, buffers=buffers or None)


def _kind(reply: Any) -> str:
    return str(getattr(reply.params_type, "value", reply.params_type))


def _from_difference(
    params: Mapping[str, Any], sent: Mapping[str, Tensor], layout: Layout
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """θ − θ_k of the parameters; of buffers, what they have become."""
    delta: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for name, value in params.items():
        try:
            tensor = as_tensor(value)
            if name not in layout.buffers:
                delta[name] = -tensor
                continue
            shape = tuple(sent[name].shape)
            if tensor.shape != shape:  # which might else be broadcast
                raise Unusable(f"{name!r} has shape {tuple(tensor.shape)}, not {shape}")
            buffers[name] = sent[name] + tensor
        except (TypeError, ValueError, RuntimeError) as error:
            name = str(name)[:200]
            raise Unusable(f"{name!r} cannot be read as an array: {error!s:.200}") from None
    return delta, buffers


def weight_of(reply: Any, key: str | None) -> float:
    """The site's weight: 1 where it says none, as in NVFlare's FedAvg; raises for a senseless one.

    >>> from types import SimpleNamespace as FLModel
    >>> weight_of(FLModel(meta={"NUM_STEPS_CURRENT_ROUND": 40}), "NUM_STEPS_CURRENT_ROUND")
    40.0
    """
    value = (reply.meta or {}).get(key) if key else None
    if value is None:
        return 1.0
    number = None if isinstance(value, bool) else as_number(value)
    if number is None or number <= 0:
        raise Unusable(f"the weight {key!r} is {str(value)[:40]}, not a positive finite number")
    return number


def metrics_of(reply: Any) -> dict[str, float]:
    """The reply's metrics that are finite numbers."""
    found: dict[str, float] = {}
    metrics = reply.metrics if isinstance(reply.metrics, Mapping) else {}
    for name, value in metrics.items():
        number = None if isinstance(value, bool) else as_number(value)
        if isinstance(name, str) and len(name) <= LONGEST and number is not None:
            found[name] = number
    return found


def mean_metrics(reported: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The weighted mean of each metric, over those sites that reported it.

    >>> mean_metrics([(1, {"loss": 4.0}), (3, {"loss": 2.0, "accuracy": 0.5})])
    {'loss': 2.5, 'accuracy': 0.5}
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for weight, metrics in reported:
        for name, value in metrics.items():
            pairs.setdefault(name, []).append((weight, value))
    means: dict[str, float] = {}
    for name, some in pairs.items():
        weights, values = np.array(some).T
        with np.errstate(all="ignore"):  # of senseless ones the mean is none
            mean = float(values @ weights / weights.sum())
        if math.isfinite(mean):
            means[name] = mean
    return means


def in_form_of(
    state: Mapping[str, Tensor], arrays: Mapping[str, bool]
) -> dict[str, np.ndarray | Tensor]:
    """Copies of a state's tensors by these names; as NumPy's arrays where that is said."""
    copies = {name: state[name].clone() for name in arrays}
    return {name: copies[name].numpy() if arrays[name] else copies[name] for name in copies}
