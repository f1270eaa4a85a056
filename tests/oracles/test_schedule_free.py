"""Schedule-Free by hand, and what is read out of an optimizer that keeps an average itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedglad import Server, Update
from fedglad.adapters import FedLWS, Fixed
from fedglad.averages import EMA, NoAverage
from fedglad.clients import FedDyn
from fedglad.core.checkpoint import CheckpointError
from fedglad.optimizers import SGD, ScheduleFree
from fedglad.server import Collector


def at(place: float, **settings: Any) -> Server:
    return Server({"w": torch.tensor([place], dtype=torch.float64)}, guard=None, **settings)


def go(server: Server, *means: float) -> list[tuple[float, float]]:
    """θ and x after rounds with these means."""
    seen: list[tuple[float, float]] = []
    for mean in means:
        assert server.step([{"w": torch.tensor([mean], dtype=torch.float64)}]).stepped
        seen.append((float(server.params["w"]), float(server.averaged["w"])))
    return seen


def test_three_rounds_by_hand():
    # η = β = ½, θ_0 = 4. ḡ = (1·1 + 3·5)/4 = 4, then −2, then 8
    # z = 4 − 2 = 2     x = 2                         θ = 2
    # z = 2 + 1 = 3     x = 2 + (3 − 2)/2 = 2.5       θ = (3 + 2.5)/2 = 2.75
    # z = 3 − 4 = −1    x = 2.5 + (−1 − 2.5)/3 = 4/3  θ = (−1 + 4/3)/2 = 1/6
    server = at(4, optimizer=ScheduleFree(lr=0.5, beta=0.5))
    assert float(server.averaged["w"]) == 4  # the model itself before the first round
    updates = [Update({"w": torch.tensor([g]).double()}, weight=w) for g, w in ((1, 1), (5, 3))]
    assert server.step(updates).stepped
    assert (float(server.params["w"]), float(server.averaged["w"])) == (2, 2)
    assert not server.step([]).stepped  # and nothing has changed by it
    assert go(server, -2, 8) == [(2.75, 2.5), pytest.approx((1 / 6, 4 / 3), rel=1e-12)]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_x_is_the_mean_of_the_steps_and_theta_lies_between(beta: float):
    # z_t = −Σ η s ḡ with s = ½, x = (z_1 + … + z_t)/t, θ = (1−β)z + βx
    means = np.random.default_rng(3).standard_normal(9)
    z = -np.cumsum(0.7 * 0.5 * means)
    x = np.cumsum(z) / np.arange(1, 10)
    server = at(0, optimizer=ScheduleFree(lr=0.7, beta=beta), adapter=Fixed(value=0.5))
    expected = np.stack([(1 - beta) * z + beta * x, x], axis=1)
    np.testing.assert_allclose(go(server, *means), expected, rtol=1e-12, atol=1e-14)


def test_with_beta_0_clients_train_as_under_sgd():
    means = [1.0, -3.0, 2.5]
    free, plain = at(1, optimizer=ScheduleFree(beta=0)), at(1, optimizer=SGD(), average=EMA())
    # β = .9 of EMA: the plain mean of the first ten models
    for found, expected in zip(go(free, *means), go(plain, *means), strict=True):
        assert found == pytest.approx(expected, rel=1e-12)


def test_updates_that_are_zero_leave_everything_to_the_bit():
    theta = torch.tensor([0.1, -3.7, 1e-20])
    server = Server({"w": theta}, optimizer=ScheduleFree())
    for _ in range(5):
        server.step([{"w": torch.zeros(3)}] * 2)
    assert torch.equal(server.params["w"], theta)
    assert torch.equal(server.averaged["w"], theta)


def test_buffers_are_the_newest():
    model = nn.BatchNorm1d(1)
    server = Server(model, optimizer=ScheduleFree())
    for k in (1, 2):
        state = {name: value + k for name, value in model.state_dict().items()}
        assert server.step([Update(model=state)]).stepped
    model.load_state_dict(server.averaged)
    assert float(model.running_mean) == 2  # type: ignore[arg-type]
    assert int(model.num_batches_tracked) == 2  # type: ignore[arg-type]
    flat, buffers = server.packed_average
    assert torch.equal(flat, server.layout.pack(server.averaged))
    assert buffers is server.packed[1]


def test_a_model_of_half_precision_is_read_out_in_it():
    server = Server({"w": torch.ones(2, dtype=torch.float16)}, optimizer=ScheduleFree())
    server.step([{"w": torch.full((2,), 0.25)}])
    assert server.averaged["w"].dtype == torch.float16
    assert server.packed_average[0].unique().tolist() == [0.0, 0.75]  # 0: padding


def test_it_goes_through_a_file_exactly(tmp_path: Path):
    whole, half = (at(2, optimizer=ScheduleFree()) for _ in range(2))
    expected = go(whole, 1, 2, -0.3, 0.7)
    assert go(half, 1, 2) == expected[:2]
    half.save(tmp_path / "state")
    loaded = Server.load(tmp_path / "state", {"w": torch.zeros(1, dtype=torch.float64)})
    assert (loaded.has_average, loaded.average) == (True, NoAverage())
    loaded.guard = None
    assert go(loaded, -0.3, 0.7) == expected[2:]


def test_a_state_of_another_optimizer_is_refused():
    message = "the state was saved with optimizer SGD, this server has ScheduleFree"
    with pytest.raises(CheckpointError, match=message):
        at(0, optimizer=ScheduleFree()).load_state_dict(at(0).state_dict())


def test_a_round_from_sums_is_read_out_too():
    seen, summed = (at(1, optimizer=ScheduleFree()) for _ in range(2))
    go(seen, 3, -1)
    for g in (3.0, -1.0):
        collector = Collector(summed)
        collector.take(Update({"w": torch.tensor([g]).double()}), [g * g])
        assert summed.step_sums(collector.sums()).stepped
    assert float(summed.averaged["w"]) == float(seen.averaged["w"])


def test_what_would_be_undone_or_be_there_twice_is_refused():
    with pytest.raises(ValueError, match=r"ScheduleFree keeps an average itself, .*EMA would be a"):
        at(0, optimizer=ScheduleFree(), average=EMA())
    with pytest.raises(ValueError, match="FedLWS shrinks θ after the step, and ScheduleFree makes"):
        at(0, optimizer=ScheduleFree(), adapter=FedLWS())

    server = at(0, optimizer=ScheduleFree(), method=FedDyn(alpha=0.1).among(2).server)
    g: dict[str, Tensor] = {"w": torch.ones(1).double()}
    before = server.state_dict()["tensors"]["slots/z/w"]
    with pytest.raises(ValueError, match="the client method moves θ after the step, and Schedule"):
        server.step([Update(g, extra=g)])
    assert torch.equal(server.state_dict()["tensors"]["slots/z/w"], before)
    assert server.round == 0


def test_has_average():
    assert not at(0).has_average
    assert at(0, average=EMA()).has_average
    with pytest.raises(ValueError, match="this server keeps no average"):
        at(0).averaged  # noqa: B018
