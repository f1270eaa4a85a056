"""Any floating dtype, any memory layout, any container: the same numbers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedglad import Glad, Server, Update
from fedglad.filters import Filter, Median, MultiKrum, NormClip
from fedglad.optimizers import SGD, Adam, Momentum
from fedglad.weights import InverseDistance


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)], ids=str
)
@pytest.mark.parametrize("filter", [Filter(), NormClip(max_norm=1e6), Median()], ids=repr)
def test_short_floats_are_added_up_in_float32(dtype: torch.dtype, large: float, filter: Filter):
    # 2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16; the mean is half of the true sum
    server = Server({"w": torch.zeros(1)}, guard=None, filter=filter)
    record = server.step([{"w": torch.tensor([x], dtype=dtype)} for x in (large, 1.0)])
    assert server.params["w"] == -(large + 1) / 2
    assert server.params["w"].dtype == torch.float32
    # ‖g‖² = 2048² does not exist in float16
    assert record.clients[0]["sq_norm"] == pytest.approx(large**2)


def test_a_float64_model_keeps_every_bit():
    # 1 - 2^-40 has no float32
    server = Server({"w": torch.ones(1, dtype=torch.float64)})
    server.step([{"w": torch.tensor([2.0**-40], dtype=torch.float64)}])
    assert server.params["w"].dtype == torch.float64
    assert server.params["w"] == 1 - 2.0**-40
    server.step([{"w": torch.tensor([2.0**-40], dtype=torch.float32)}])
    assert server.params["w"] == 1 - 2.0**-39


def test_float64_updates_of_a_float32_model():
    server = Server({"w": torch.ones(2)})
    server.step([{"w": np.array([0.5, 0.25])}])
    assert server.params["w"].dtype == torch.float32
    assert server.params["w"].tolist() == [0.5, 0.75]


def test_a_bfloat16_model_does_not_lose_small_steps():
    # Below 1 bfloat16 has steps of 2^-8: 1 - 2^-11 rounds to 1. Eight such steps make 2^-8.
    server = Server({"w": torch.ones(1, dtype=torch.bfloat16)})
    small = {"w": torch.tensor([2.0**-11], dtype=torch.bfloat16)}
    server.step([small])
    assert server.params["w"].dtype == torch.bfloat16
    assert server.params["w"] == 1
    for _ in range(7):
        server.step([small])
    assert server.params["w"].dtype == torch.bfloat16
    assert server.params["w"] == 1 - 2.0**-8


def test_a_client_that_did_not_train_does_not_undo_what_bfloat16_hides():
    # Inside θ = 1 - 2^-11, outside 1: the client returns the 1 it received, so g = 0
    server = Server({"w": torch.ones(1, dtype=torch.bfloat16)})
    small = {"w": torch.tensor([2.0**-11], dtype=torch.bfloat16)}
    for _ in range(4):
        server.step([small])
        record = server.step([Update(model=server.state)])
        assert record.clients[0]["sq_norm"] == 0
        server.step([small])
    assert server.params["w"] == 1 - 2.0**-8


ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def read_only() -> np.ndarray:
    array = ARRAY.copy()
    array.flags.writeable = False
    return array


FORMS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.from_numpy(ARRAY.copy()),
    "numpy": lambda: ARRAY.copy(),
    "numpy float64": lambda: ARRAY.astype(np.float64),
    "numpy float16": lambda: ARRAY.astype(np.float16),
    "numpy read-only": read_only,
    "numpy transposed": lambda: np.ascontiguousarray(ARRAY.T).T,
    "numpy every second": lambda: np.repeat(ARRAY, 2, axis=1)[:, ::2],
    "numpy backwards": lambda: ARRAY[::-1, ::-1].copy()[::-1, ::-1],
    "lists": ARRAY.tolist,
    "torch transposed": lambda: torch.from_numpy(ARRAY.copy()).t().contiguous().t(),
    "torch every second": lambda: torch.from_numpy(np.repeat(ARRAY, 2, axis=1))[:, ::2],
    "torch offset": lambda: torch.cat([torch.zeros(1), torch.arange(6.0)])[1:].view(2, 3),
    "torch with gradient": lambda: torch.arange(6.0).view(2, 3).requires_grad_(),
    "parameter": lambda: nn.Parameter(torch.arange(6.0).view(2, 3)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("filter", [Filter(), NormClip(max_norm=1e6), Median()], ids=repr)
def test_every_memory_layout_is_read_in_its_logical_order(form: str, filter: Filter):
    # θ = 0 - (0 ... 5), then back by the trained model θ_k = 0 ... 5: g = -2·(0 ... 5), lr 1
    expected = torch.arange(6.0).view(2, 3)
    server = Server({"w": torch.zeros(2, 3)}, filter=filter)
    record = server.step([{"w": FORMS[form]()}])
    assert record.rejected == {}
    assert torch.equal(server.params["w"], -expected)
    server.step([Update(model={"w": FORMS[form]()})])
    assert torch.equal(server.params["w"], expected)
    assert not server.params["w"].requires_grad


def test_channels_last():
    # 2·3·2·2 = 24 different numbers, in torch's order of indices and not of memory
    weight = torch.arange(24.0).view(2, 3, 2, 2)
    swapped = weight.to(memory_format=torch.channels_last)
    assert not swapped.is_contiguous()
    server = Server({"w": swapped})
    server.step([{"w": swapped}])
    assert torch.equal(server.params["w"], torch.zeros(2, 3, 2, 2))
    server.step([{"w": -swapped}, {"w": -weight}])
    assert torch.equal(server.params["w"], weight)


def test_a_repeated_tensor_without_memory_of_its_own():
    server = Server({"w": torch.zeros(2, 3)})
    server.step([{"w": torch.tensor(2.0).expand(2, 3)}])
    assert torch.equal(server.params["w"], torch.full((2, 3), -2.0))


def test_scalars_and_empty_tensors():
    # a scalar: 3, -1 gives ḡ = 1, GSI = sqrt(5); an empty tensor is a frozen one: GSI 1
    server = Server(
        {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "none": torch.zeros(0)},
        adapter=Glad(),
        optimizer=Momentum(),
    )
    record = server.step(
        [
            {"empty": torch.zeros(0, 3), "scalar": torch.tensor(x), "none": torch.zeros(0)}
            for x in (3.0, -1.0)
        ]
    )
    assert record.gsi == pytest.approx({"empty": 1, "scalar": math.sqrt(5), "none": 1})
    assert server.params["scalar"].shape == ()
    assert server.params["scalar"] == 1
    assert server.params["empty"].shape == (0, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 1, bias=False)
        self.decoder = nn.Linear(2, 1, bias=False)
        self.decoder.weight = self.encoder.weight
        nn.init.zeros_(self.encoder.weight)


def test_tied_weights_are_counted_once():
    # ‖(3, 4)‖² = 25, not 50
    model = Tied()
    server = Server(model)
    g = torch.tensor([[3.0, 4.0]])
    record = server.step([{"encoder.weight": g, "decoder.weight": g.clone()}])
    assert record.clients[0]["sq_norm"] == pytest.approx(25)
    assert record.gsi == {"encoder.weight": 1}
    assert server.params.keys() == {"encoder.weight"}
    assert server.state.keys() == {"encoder.weight", "decoder.weight"}
    model.load_state_dict(server.state)
    assert model.decoder.weight.tolist() == [[-3, -4]]


def test_the_second_name_of_a_tied_weight_may_be_missing_but_not_differ():
    g = torch.tensor([[3.0, 4.0]])
    server = Server(Tied())
    record = server.step(
        [
            Update({"encoder.weight": g}, client="one name"),
            Update({"encoder.weight": g, "decoder.weight": g + 1}, client="two values"),
            Update(model={"encoder.weight": -g, "decoder.weight": -g}, client="a model"),
        ]
    )
    assert record.rejected.keys() == {"two values"}
    assert "'decoder.weight' is tied to 'encoder.weight'" in record.rejected["two values"]
    assert torch.equal(server.params["encoder.weight"], -g)


@pytest.mark.parametrize(
    "model",
    [nn.ReLU(), {}, {"running_mean": torch.zeros(3)}, {"w": torch.zeros(0)}],
    ids=["module", "dict", "buffers only", "nothing in it"],
)
def test_a_model_without_parameters_is_refused(model: Any):
    with pytest.raises(ValueError, match="the model has no parameters"):
        Server(model)


def test_a_model_with_gradients_is_copied_and_never_changed():
    # .5 - 1 - 1, exact in float32
    model = nn.Linear(2, 1)
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    server = Server(model)
    for _ in range(2):
        server.step([{name: torch.ones_like(p) for name, p in model.named_parameters()}])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(server.params[name], torch.full_like(value, -1.5))


def random_cohort(seed: int, clients: int) -> list[Update]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Update(
            {
                "a": torch.randn(7, 3, generator=generator),
                "b": torch.randn(20_000, generator=generator),
            },
            client=k,
            weight=1 + k % 5,
        )
        for k in range(clients)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"filter": NormClip(max_norm=100.0)},
        {"filter": Median()},
        {"filter": MultiKrum(f=2)},
        {"weighting": InverseDistance()},
    ],
    ids=str,
)
def test_a_list_a_tuple_and_a_generator_give_the_same_bits(settings: Any):
    model = {"a": torch.ones(7, 3), "b": torch.ones(20_000)}
    forms: list[Callable[[list[Update]], Any]] = [list, tuple, lambda x: (u for u in x)]
    servers = [Server(model, optimizer=Adam(), adapter=Glad(), **settings) for _ in forms]
    for t in range(2):
        cohort = random_cohort(t, clients=40)
        records = [s.step(form(cohort)) for s, form in zip(servers, forms, strict=True)]
        assert records[0] == records[1] == records[2]
    for other in servers[1:]:
        for name, value in servers[0].params.items():
            assert torch.equal(other.params[name], value)


def test_a_generator_may_use_its_memory_again():
    # ḡ = (1 + 2 + 3)/3
    def reusing():
        memory = torch.zeros(5)
        for k in (1, 2, 3):
            yield {"w": memory.fill_(k)}

    for filter in (Filter(), NormClip(max_norm=1e3), Median()):
        server = Server({"w": torch.zeros(5)}, filter=filter)
        server.step(reusing())
        assert torch.equal(server.params["w"], torch.full((5,), -2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_trained_model_equals_its_difference(dtype: torch.dtype):
    # θ = (1, 2), θ_k = (.5, 4): g = (.5, -2); all of it exact in any dtype; lr .5: (.75, 3)
    theta, trained = torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([0.5, 4.0], dtype=dtype)
    for update in (Update(model={"w": trained}), Update({"w": theta - trained})):
        server = Server({"w": theta}, optimizer=SGD(lr=0.5))
        assert server.step([update]).clients[0]["sq_norm"] == pytest.approx(4.25)
        assert server.params["w"].tolist() == [0.75, 3]


def test_trained_models_equal_differences_to_rounding():
    model = {"a": torch.ones(7, 3), "b": torch.ones(20_000)}
    cohort = random_cohort(3, clients=5)
    deltas: list[dict[str, Tensor]] = [u.delta for u in cohort if isinstance(u.delta, dict)]
    models = [
        Update(model={name: model[name] - g for name, g in delta.items()}, weight=u.weight)
        for delta, u in zip(deltas, cohort, strict=True)
    ]
    by_model, by_delta = Server(model, adapter=Glad()), Server(model, adapter=Glad())
    first, second = by_model.step(models), by_delta.step(cohort)
    assert first.gsi == pytest.approx(second.gsi, rel=1e-6)
    torch.testing.assert_close(by_model.params, by_delta.params, atol=1e-6, rtol=0)
