"""An FLModel becomes an Update: full weights, differences, and what cannot be one."""

from typing import Any

import numpy as np
import pytest
import torch

from fedglad import Server, Update
from fedglad.nvflare.replies import (
    Unusable,
    mean_metrics,
    metrics_of,
    update_of,
    weight_of,
)

from .sites_support import WEIGHT, model, reply, same


def server() -> Server:
    return Server({name: torch.from_numpy(np.array(v)) for name, v in model().items()})


def made(params: Any, **settings: Any) -> Update:
    ours = server()
    return update_of(reply(params, **settings), 3, ours.state, ours.layout, 5.0)


def weighing(value: Any) -> Any:
    """A reply that says this of its weight."""
    meta: dict[str, Any] = {WEIGHT: value}
    return reply({}, **meta)


def test_full_weights_are_the_trained_model_itself():
    params = model()
    update = made(params, metrics={"train_loss": 0.25})
    assert update.model is params
    assert (update.weight, update.client, update.loss) == (5.0, 3, 0.25)


def test_nvflares_difference_is_what_training_added():
    # theta = (1, 1, 1), theta_k = (1.5, 1, 0.75): NVFlare sends (.5, 0, -.25), an Update is
    # theta - theta_k = (-.5, 0, .25). Of buffers it is what they have become that is sent on.
    params = {name: np.zeros_like(value) for name, value in model().items()}
    params["b"] = np.array([0.5, 0.0, -0.25], dtype=np.float32)
    params["bn.running_var"] = np.array([0.5, 0.0, -0.5], dtype=np.float32)
    params["bn.num_batches_tracked"] = np.array(7)
    update = made(params, diff=True)
    assert isinstance(update.delta, dict)
    assert update.delta["b"].tolist() == [-0.5, 0.0, 0.25]
    assert update.buffers is not None
    assert update.buffers["bn.running_var"].tolist() == [1.5, 1.0, 0.5]
    assert update.buffers["bn.num_batches_tracked"].item() == 7
    assert update.buffers["bn.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_differences_make_the_model_that_full_weights_make(kind: Any):
    # Eighths: no rounding, whichever way round it is computed.
    sent = model()
    whole = {
        n: np.asarray(v + np.asarray(3).astype(v.dtype) / 8).astype(v.dtype)
        for n, v in sent.items()
    }
    added = {n: np.asarray(whole[n] - sent[n]) for n in sent}
    states = []
    for params, diff in ((whole, False), (added, True)):
        ours = server()
        one = reply({n: kind(v) for n, v in params.items()}, diff=diff)
        record = ours.step([update_of(one, k, ours.state, ours.layout, 1.0) for k in (0, 1)])
        assert record.stepped
        assert not [c for c in record.clients if "rejected" in c]
        states.append(ours.state)
    assert same(states[0], states[1])
    assert not same(states[0], sent)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ([1.0], "the params are a list, not a dict of arrays"),
        (None, "the params are a NoneType"),
        ({"b": np.array([object()])}, "'b' cannot be read as an array"),
        ({"b": np.array(["x"])}, "'b' cannot be read as an array"),
        ({"b": torch.ones(3, dtype=torch.bool)}, "'b' cannot be read as an array"),
        ({"bn.running_var": np.ones(1, np.float32)}, r"has shape \(1,\), not \(3,\)"),
    ],
)
def test_what_is_no_difference_is_said(params: Any, reason: str):
    with pytest.raises(Unusable, match=reason):
        made(params, diff=True)


def test_a_difference_that_lacks_a_tensor_or_has_another_is_rejected_by_the_server():
    ours = server()
    whole = {name: np.zeros_like(value) for name, value in model().items()}
    lacking = {name: value for name, value in whole.items() if name != "w"}
    for params, reason in (
        (lacking, "no tensor 'w'"),
        ({**whole, "x": whole["b"]}, "extra tensor"),
    ):
        one = update_of(reply(params, diff=True), 1, ours.state, ours.layout, 1.0)
        good = update_of(reply(whole, diff=True), 2, ours.state, ours.layout, 1.0)
        record = ours.step([one, good])
        assert reason in record.clients[0]["rejected"]
        assert "rejected" not in record.clients[1]


@pytest.mark.parametrize("value", [40, 40.0, np.int64(40), torch.tensor(40)])
def test_a_weight_is_a_number(value: Any):
    assert weight_of(weighing(value), WEIGHT) == 40.0


def test_no_weight_counts_as_one_as_in_fedavg():
    assert weight_of(reply({}), WEIGHT) == 1.0
    assert weight_of(weighing(9), None) == 1.0


@pytest.mark.parametrize("value", [0, -3, float("nan"), float("inf"), "many", True, [1, 2]])
def test_a_senseless_weight_is_said(value: Any):
    with pytest.raises(Unusable, match="not a positive finite number"):
        weight_of(weighing(value), WEIGHT)


def test_metrics_are_finite_numbers_with_names():
    metrics = {"loss": 0.5, "auc": np.float32(0.25), "ok": True, "x": "y", "n": float("nan"), 3: 1}
    metrics["long" * 200] = 1.0
    assert metrics_of(reply({}, metrics=metrics)) == {"loss": 0.5, "auc": 0.25}
    assert metrics_of(reply({}, metrics=None)) == {}


def test_a_mean_that_is_no_number_is_left_out():
    reported = [(1e300, {"a": 1e300, "b": 1.0}), (1.0, {"a": 2.0})]
    assert mean_metrics(reported) == {"b": 1.0}
