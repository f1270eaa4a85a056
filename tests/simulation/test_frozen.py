"""Parameters that are not trained are neither packed, measured, sent nor saved."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import tiny_data
from safetensors.torch import load_file
from torch import Tensor, nn

from fedglad import Server, Update, simulate
from fedglad.config import load
from fedglad.core.layout import frozen, twin
from fedglad.runs import execute

HERE = "simulation.test_frozen"
ENGINES = {"serial": 0.0, "local": 0.0, "batched": 2e-5}


def half_frozen() -> nn.Module:
    """A frozen layer of 64 × 32 below a trained one of 32 × 10."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model[0].requires_grad_(False)
    return model


def data() -> Any:
    return tiny_data(8, 8, 8, 8, 8)


def test_the_server_has_what_is_trained_and_its_state_is_whole():
    model = half_frozen()
    server = Server(model)
    assert list(server.params) == ["2.weight", "2.bias"]
    assert server.layout.constants == {"0.weight", "0.bias"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    delta = {name: torch.ones_like(value) for name, value in server.params.items()}
    record = server.step([delta])
    assert record.stepped
    assert set(record.gsi) == {"2.weight", "2.bias"}
    assert model.load_state_dict(server.state)  # strict
    assert server.state["0.weight"].equal(before["0.weight"])
    assert server.state["2.bias"].equal(before["2.bias"] - 1)


def test_an_update_may_have_them_and_they_are_not_looked_at():
    model = half_frozen()
    server, other = Server(model), Server(model)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    deltas = {name: torch.full_like(server.params[name], -1.0) for name in server.params}
    assert server.step([Update(model=state)]).stepped
    assert other.step([deltas]).stepped
    for name, value in other.state.items():
        torch.testing.assert_close(server.state[name], value)
    assert server.state["0.weight"].equal(model.state_dict()["0.weight"])


def test_a_model_that_asks_for_no_gradient_at_all_is_sent_whole():
    model = half_frozen().requires_grad_(False)
    assert len(Server(model).params) == 4


def test_a_tied_frozen_parameter_is_nobodys_to_send_under_both_names():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 1)})
    model["b"].weight = model["a"].weight
    model["a"].weight.requires_grad_(False)
    assert set(frozen(model)) == {"a.weight", "b.weight"}
    server = Server(model)
    assert set(server.params) == {"a.bias", "b.bias", "c.weight", "c.bias"}
    assert model.load_state_dict(server.state)


def test_a_twin_shares_what_is_not_trained_alone():
    model = half_frozen()
    copied = dict(twin(model).named_parameters())
    for name, value in model.named_parameters():
        assert (copied[name].data_ptr() == value.data_ptr()) == name.startswith("0.")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_run_trains_the_rest_as_if_the_frozen_part_were_a_transformation(
    engine: str, decay: float
):
    """The same run with the frozen layer applied to the data beforehand."""
    below: Any = half_frozen()
    plain = data()
    with torch.no_grad():
        plain.x, plain.test_x = (below[1](below[0](x)) for x in (plain.x, plain.test_x))
    given = {
        "rounds": 2,
        "engine.name": engine,
        "client.weight_decay": decay,
        "average.name": "ema",
    }
    head: Any = half_frozen()
    whole = list(simulate("digits", given, model=half_frozen(), data=data()))
    alone = list(simulate("digits", given, model=head[2], data=plain))
    for one, other in zip(whole, alone, strict=True):
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-5)
        assert one.averaged_loss == pytest.approx(other.averaged_loss, rel=1e-5)
        assert one.record.gsi_all == pytest.approx(other.record.gsi_all, rel=1e-4)


def run(folder: Path, **more: Any) -> Iterator[dict[str, Any]]:
    given = {
        "rounds": 3,
        "model.name": f"{HERE}:half_frozen",
        "data.name": f"{HERE}:data",
        "engine.name": "serial",
        "checkpoint_every": 1,
        **more,
    }
    done = execute("frozen", load("digits", given)[1], out=folder)
    return (line for line in done.rounds())


def test_no_file_of_a_run_has_them(tmp_path: Path):
    rounds = list(run(tmp_path / "run"))
    assert [line["status"] for line in rounds] == ["stepped"] * 3
    saved = {path: load_file(path) for path in (tmp_path / "run").rglob("*.safetensors")}
    assert len(saved) > 2
    trained = 32 * 10 + 10
    for path, tensors in saved.items():
        assert not [name for name in tensors if name.endswith(("0.weight", "0.bias"))], path
        own = (value for name, value in tensors.items() if name != "trust/samples")
        assert all(value.numel() <= trained for value in own)
    model = half_frozen()
    files = {path.name: tensors for path, tensors in saved.items()}
    missing = model.load_state_dict(files["model.safetensors"], strict=False).missing_keys
    assert missing == ["0.weight", "0.bias"]


def test_a_base_of_another_dtype_may_be_frozen():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)
            self.dense = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(x * self.scale.to(x.dtype))

    (only,) = simulate("digits", {"rounds": 1}, model=Scaled(), data=data())
    assert only.record.stepped
    assert json.dumps(only.to_dict())
