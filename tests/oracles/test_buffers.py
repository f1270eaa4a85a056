"""Buffers by hand: averaged by weight, counters at their maximum, never stepped."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedglad import Glad, Server, Update
from fedglad.adapters import Fixed
from fedglad.filters import Krum
from fedglad.optimizers import Adam, Momentum


def trained(mean: list[float], var: list[float], count: int, **settings: Any) -> Update:
    """A client's BatchNorm: weight and bias moved by 1 (g = -1), and its own statistics."""
    state = nn.BatchNorm1d(2).state_dict()
    model: dict[str, Tensor] = {
        "weight": state["weight"] + 1,
        "bias": state["bias"] + 1,
        "running_mean": torch.tensor(mean),
        "running_var": torch.tensor(var),
        "num_batches_tracked": torch.tensor(count),
    }
    return Update(model=model, **settings)


def statistics(server: Server) -> tuple[list[float], list[float], int]:
    state = server.state
    mean, var = state["running_mean"].tolist(), state["running_var"].tolist()
    return mean, var, int(state["num_batches_tracked"])


START = ([0.0, 0.0], [1.0, 1.0], 0)
TWO = [trained([0.0, 4.0], [1.0, 2.0], 7, weight=1), trained([4.0, 8.0], [5.0, 2.0], 5, weight=3)]
# w = 1/4, 3/4: mean (3, 1 + 6 = 7), variance (.25 + 3.75 = 4, 2), counter max(7, 5)
AVERAGED = ([3.0, 7.0], [4.0, 2.0], 7)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adapter": Fixed(value=0.5)},
        {"adapter": Glad(groups="all")},
        {"optimizer": Momentum(lr=0.1)},
        {"optimizer": Adam()},
    ],
    ids=str,
)
def test_running_statistics_are_averaged_by_weight_and_nothing_else(settings: Any):
    # Neither the factor nor the optimizer's rate or memory touches them, in any round
    server = Server(nn.BatchNorm1d(2), **settings)
    for _ in range(3):
        server.step(TWO)
        assert statistics(server) == AVERAGED
    assert server.state["num_batches_tracked"].dtype == torch.int64
    assert server.state["num_batches_tracked"].shape == ()


def test_the_affine_parameters_are_stepped():
    # g = θ - θ_k = -1 for both; θ = (1, 0) - .5·(-1)
    server = Server(nn.BatchNorm1d(2), adapter=Fixed(value=0.5))
    record = server.step(TWO)
    assert server.params["weight"].tolist() == [1.5, 1.5]
    assert server.params["bias"].tolist() == [0.5, 0.5]
    assert record.gsi.keys() == record.scale.keys() == {"weight", "bias"}
    assert record.clients[0]["sq_norm"] == pytest.approx(4)  # four parameters moved by 1


def test_a_module_takes_the_state_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    server = Server(model)
    assert server.params.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    server.step([Update(model=model.state_dict())])
    model.load_state_dict(server.state)


def test_a_plain_difference_leaves_buffers_as_they_are():
    server = Server(nn.BatchNorm1d(2))
    server.step([{"weight": torch.ones(2), "bias": torch.ones(2)}])
    assert statistics(server) == START


def test_a_difference_that_names_buffers_is_accepted_and_they_are_not_used():
    # θ = 1 - 1, 0 - 1
    server = Server(nn.BatchNorm1d(2))
    delta = {name: torch.ones_like(value) for name, value in server.state.items()}
    assert server.step([delta]).rejected == {}
    assert statistics(server) == START
    assert server.params["weight"].tolist() == [0, 0]
    assert server.params["bias"].tolist() == [-1, -1]


def test_differences_have_no_say_in_the_buffers_of_trained_models():
    # The mean is over the two that brought any
    server = Server(nn.BatchNorm1d(2))
    delta = {"weight": torch.ones(2), "bias": torch.ones(2)}
    server.step([TWO[0], Update(delta, weight=50), TWO[1]])
    assert statistics(server) == AVERAGED


def test_a_skipped_round_leaves_buffers_as_they_are():
    server = Server(nn.BatchNorm1d(2), min_clients=3)
    assert not server.step(TWO).stepped
    assert statistics(server) == START


POISON: dict[str, tuple[dict[str, Any], str]] = {
    "parameter": ({"weight": torch.full((2,), math.nan)}, "'weight' holds NaN or inf"),
    "mean": ({"running_mean": torch.tensor([math.nan, 0.0])}, "'running_mean' holds NaN or inf"),
    "var": ({"running_var": torch.tensor([math.inf, 0.0])}, "'running_var' holds NaN or inf"),
    "shape": ({"running_mean": torch.zeros(1)}, "'running_mean' has shape"),
    "float counter": ({"num_batches_tracked": torch.tensor(9.0)}, "'num_batches_tracked' is"),
    "integer mean": ({"running_mean": torch.zeros(2, dtype=torch.int64)}, "'running_mean' is"),
    "missing": ({"running_mean": None}, "'running_mean'"),
    # finite in float64, inf in the model's float32
    "beyond float32": (
        {"running_var": torch.full((2,), 1e300, dtype=torch.float64)},
        "'running_var'",
    ),
}


@pytest.mark.parametrize("name", POISON)
@pytest.mark.parametrize("form", [list, iter])
def test_the_buffers_of_a_rejected_client_leave_no_trace(name: str, form: Any):
    change, reason = POISON[name]
    model = {**(trained([900.0, 900.0], [900.0, 900.0], 900).model or {}), **change}
    model = {key: value for key, value in model.items() if value is not None}
    server = Server(nn.BatchNorm1d(2))
    record = server.step(form([TWO[0], Update(model=model, client="bad"), TWO[1]]))
    assert statistics(server) == AVERAGED
    assert reason in record.rejected["bad"]


def test_the_buffers_of_an_update_that_krum_left_out_leave_no_trace():
    # Five models; Krum keeps one of the four equal ones
    outlier = trained([900.0, 900.0], [900.0, 900.0], 900)
    assert outlier.model is not None
    far = Update(model={**outlier.model, "weight": torch.full((2,), 50.0)})
    server = Server(nn.BatchNorm1d(2), filter=Krum(f=1))
    server.step([far, *[trained([1.0, 2.0], [3.0, 4.0], 5)] * 4])
    assert statistics(server) == ([1, 2], [3, 4], 5)


# --- a plain dict: integer tensors, and names that end like BatchNorm's ---

DICT = {
    "conv.weight": torch.zeros(2),
    "bn.weight": torch.zeros(1),
    "bn.running_mean": torch.zeros(1),
    "bn.running_var": torch.zeros(1),
    "bn.num_batches_tracked": torch.tensor(0),
    "step": torch.tensor([0, 0], dtype=torch.int32),
    "ema": torch.zeros(1),
}


def test_a_plain_dict_tells_buffers_by_dtype_and_suffix():
    server = Server(DICT)
    assert server.params.keys() == {"conv.weight", "bn.weight", "ema"}
    assert server.state.keys() == DICT.keys()


def test_buffers_can_be_named():
    # ema: (1·2 + 3·6)/4 = 5, averaged and not stepped at lr .1; running_mean is now a parameter:
    # g = 0 - 2, 0 - 6, ḡ = -5, θ = .5; step: the larger in each place
    names = ["ema", "step", "bn.num_batches_tracked"]
    server = Server(DICT, buffers=names, optimizer=Momentum(lr=0.1))
    assert server.params.keys() == DICT.keys() - set(names)
    models = [
        {**DICT, "ema": torch.tensor([x]), "bn.running_mean": torch.tensor([x]), "step": counts}
        for x, counts in [
            (2.0, torch.tensor([9, 1], dtype=torch.int32)),
            (6.0, torch.tensor([3, 4], dtype=torch.int32)),
        ]
    ]
    server.step([Update(model=models[0], weight=1), Update(model=models[1], weight=3)])
    assert server.state["ema"] == 5
    assert float(server.state["bn.running_mean"]) == pytest.approx(0.5)
    assert server.state["step"].tolist() == [9, 4]
    assert server.state["step"].dtype == torch.int32


COUNTERS = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*COUNTERS, torch.int8, torch.int16], ids=str)
def test_counters_of_every_kind_take_the_maximum(dtype: torch.dtype, tmp_path: Path):
    many = {torch.bool: 1, torch.int8: 100, torch.uint64: 2**64 - 1}.get(dtype, 200)
    counts = [torch.tensor(row, dtype=dtype) for row in ([many, 0], [0, 1])]
    model = {"w": torch.zeros(1), "seen": torch.zeros(2, dtype=dtype)}
    server = Server(model, guard=None)
    server.step([Update(model={**model, "seen": row}) for row in counts])
    assert server.state["seen"].dtype == dtype
    assert server.state["seen"].tolist() == [many, 1]
    server.save(tmp_path / "state")
    again = Server.load(tmp_path / "state", model)
    assert again.state["seen"].tolist() == [many, 1]


def test_a_buffer_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'typo', which the model does not have"):
        Server(DICT, buffers=["typo"])


def test_an_integer_parameter_is_refused():
    with pytest.raises(ValueError, match=r"parameter 'step' is torch.int32.*buffers="):
        Server(DICT, buffers=["bn.num_batches_tracked"])


def test_buffers_keep_their_dtype_and_are_averaged_in_better():
    # float16: 2048 + 1 would be 2048; (2048 + 1)/2 = 1024.5, which float16 holds
    model = {"w": torch.zeros(1), "running_mean": torch.zeros(1, dtype=torch.float16)}
    server = Server(model)
    server.step(
        [
            Update(model={"w": torch.zeros(1), "running_mean": torch.tensor([x]).half()})
            for x in (2048.0, 1.0)
        ]
    )
    assert server.state["running_mean"].dtype == torch.float16
    assert server.state["running_mean"] == 1024.5
