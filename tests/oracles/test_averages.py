"""Averages of the server's past models, by hand and against float64."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedglad import Glad, Server, Update
from fedglad.averages import EMA, REGISTRY, Average, NoAverage, Poly, Window
from fedglad.clients import FedDyn
from fedglad.core.checkpoint import CheckpointError
from fedglad.optimizers import Adam, Momentum
from fedglad.server import Collector

ROWS = [cls for cls in REGISTRY.values() if cls is not NoAverage]
AVERAGES = [EMA(), EMA(beta=0.5), Poly(), Poly(gamma=0), Window(), Window(size=3)]


def w(server: Server) -> float:
    return float(server.averaged["w"])


def visit(server: Server, *places: float) -> list[float]:
    """Moves θ to one place after the other; what the average is at each."""
    seen: list[float] = []
    for place in places:
        at = float(server.params["w"])
        assert server.step([{"w": torch.tensor([at - place])}]).stepped
        seen.append(w(server))
    return seen


def at_zero(average: Average | None, **settings: Any) -> Server:
    return Server({"w": torch.zeros(1)}, average=average, guard=None, **settings)


def test_three_rounds_by_hand():
    # θ = 8, 4, 10
    # ema β = 0.6: a = 1, max(0.4, 1/2), max(0.4, 1/3): 8, 6, 0.6·6 + 0.4·10 = 7.6
    assert visit(at_zero(EMA(beta=0.6)), 8, 4, 10) == pytest.approx([8, 6, 7.6])
    # ema β = 0.9: the plain mean so far: 8, 6, 22/3
    assert visit(at_zero(EMA()), 8, 4, 10) == pytest.approx([8, 6, 22 / 3])
    # poly γ = 1: a = 1, 2/3, 2/4: 8, 8/3 + 8/3 = 16/3, 8/3 + 5 = 23/3
    assert visit(at_zero(Poly(gamma=1)), 8, 4, 10) == pytest.approx([8, 16 / 3, 23 / 3])
    # window of 2: 8, 6, 7
    assert visit(at_zero(Window(size=2)), 8, 4, 10) == pytest.approx([8, 6, 7])


def test_the_ema_forgets_after_its_first_rounds():
    # β = 0.5: from t = 1 on a = 1/2: 1, 1.5, 2.25, 3.125
    assert visit(at_zero(EMA(beta=0.5)), 1, 2, 3, 4) == [1, 1.5, 2.25, 3.125]


def test_poly_weighs_model_t_like_t_to_the_gamma():
    # γ = 2: model t counts (1−a_n)…(1−a_{t+1}) a_t ∝ (t+1)(t+2), that is 2, 6, 12, 20
    places, weights = np.array([3.0, -1.0, 4.0, 1.0]), np.array([2, 6, 12, 20])
    expected = (places * weights).sum() / weights.sum()
    assert visit(at_zero(Poly(gamma=2)), *places)[-1] == pytest.approx(expected, rel=1e-6)


def test_before_the_first_round_the_average_is_the_model():
    server = Server({"w": torch.tensor([5.0])}, average=EMA())
    assert w(server) == 5
    visit(server, 3)
    assert w(server) == 3  # where it began does not count


def test_a_skipped_round_moves_nothing():
    server = at_zero(EMA(), min_clients=2)
    g = {"w": torch.tensor([-2.0])}
    server.step([g, g])
    assert not server.step([g]).stepped
    server.step([g, g])
    assert w(server) == 3  # (2 + 4)/2: two models, not three


def test_without_an_average_it_is_said():
    with pytest.raises(ValueError, match=r"keeps no average.*average=EMA\(\)"):
        _ = at_zero(None).averaged


class Net(nn.Module):
    """Parameters over several dtypes and blocks, BatchNorm, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.big = nn.Parameter(torch.randn(300, 1000))
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.first.weight


def trained(server: Server, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moved: dict[str, Tensor] = {}
    for name, value in server.state.items():
        noise = torch.randn(value.shape, generator=generator)
        moved[name] = value + (noise.to(value.dtype) if value.is_floating_point() else seed)
    moved["norm.running_var"] = moved["norm.running_var"].abs()
    moved["tied.weight"] = moved["first.weight"]
    return moved


def models(average: Average | None, rounds: int = 13, **settings: Any) -> Any:
    """A server after some rounds, and the models that it has been."""
    server, past = Server(Net(), average=average, **settings), list[dict[str, Tensor]]()
    for t in range(rounds):
        updates = [
            Update(model=trained(server, 10 * t + k), client=k, weight=k + 1) for k in range(3)
        ]
        assert server.step(updates).stepped
        past.append({name: value.clone() for name, value in server.state.items()})
    return server, past


def weights_of(average: Average, n: int) -> list[float]:
    """What each of n models counts, in float64."""
    if isinstance(average, Window):
        return [0.0] * max(0, n - average.size) + [1 / min(n, average.size)] * min(n, average.size)
    assert isinstance(average, EMA | Poly)
    counts = [0.0] * n
    for t in range(n):
        a = average.share(t)
        counts = [count * (1 - a) for count in counts]
        counts[t] = a
    return counts


@pytest.mark.parametrize("average", AVERAGES, ids=str)
def test_every_tensor_is_averaged_alike(average: Average):
    server, past = models(average, optimizer=Adam(lr=0.05), adapter=Glad())
    counts = weights_of(average, len(past))
    assert math.isclose(sum(counts), 1)
    for name, value in server.averaged.items():
        if value.is_floating_point():
            pairs = zip(counts, past, strict=True)
            expected = sum(count * model[name].double() for count, model in pairs)
            loose = 0.02 if value.dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(value.double(), expected, rtol=loose, atol=loose)
        else:
            assert torch.equal(value, past[-1][name])  # counters are the newest
    assert server.averaged.keys() == server.state.keys()
    assert server.averaged["tied.weight"].data_ptr() == server.averaged["first.weight"].data_ptr()
    Net().load_state_dict(server.averaged)


@pytest.mark.parametrize("average", [EMA(beta=0), Window(size=1)], ids=str)
def test_an_average_of_one_is_the_model_bit_for_bit(average: Average):
    server, _ = models(average, optimizer=Momentum())
    for name, value in server.state.items():
        assert torch.equal(server.averaged[name], value), name


@pytest.mark.parametrize("average", AVERAGES, ids=str)
def test_training_does_not_notice(average: Average):
    with_it, without = models(average, rounds=4)[0], models(None, rounds=4)[0]
    for name, value in without.state.items():
        assert torch.equal(with_it.state[name], value)


def test_it_follows_after_a_methods_shift():
    """FedDyn moves θ once more after the step: the average is of what clients get."""
    server = Server({"w": torch.zeros(2)}, average=EMA(), method=FedDyn(clients=4).server)
    past: list[Tensor] = []
    for t in range(3):
        g = torch.tensor([1.0, -2.0]) * (t + 1)
        server.step([Update({"w": g}, extra={"w": 0.3 * g})])
        past.append(server.params["w"].clone())
    torch.testing.assert_close(server.averaged["w"], torch.stack(past).mean(dim=0))


def test_a_round_from_sums_is_averaged_too():
    server = at_zero(EMA())
    for _ in range(2):
        collector = Collector(server)
        for _ in range(2):
            collector.take(Update({"w": torch.tensor([-4.0])}), [16.0])
        server.step_sums(collector.sums())
    assert w(server) == 6  # (4 + 8)/2


@pytest.mark.parametrize("average", AVERAGES, ids=str)
def test_it_goes_through_a_file_exactly(average: Average, tmp_path: Path):
    server, _ = models(average, rounds=5, optimizer=Adam())
    server.save(tmp_path / "state")
    again = Server.load(tmp_path / "state", Net())
    assert again.average == average
    for each in (server, again):
        each.step([Update(model=trained(each, 99), client=1)])
    for name, value in server.averaged.items():
        assert torch.equal(again.averaged[name], value), name


def test_a_state_of_before_begins_an_average():
    old = at_zero(None)
    old.step([{"w": torch.tensor([-4.0])}])
    saved = old.state_dict()
    del saved["average"]  # as files of before
    server = at_zero(EMA())
    visit(server, 100)
    server.load_state_dict(saved)
    assert w(server) == 4
    assert visit(server, 6, 8) == [6, 7]


def test_another_average_is_refused_and_nothing_changes():
    saved = models(EMA(), rounds=2)[0].state_dict()
    for other in (None, Poly(), Window()):
        server = Server(Net(), average=other)
        before = server.state_dict()["tensors"]
        with pytest.raises(CheckpointError, match="saved with average EMA"):
            server.load_state_dict(saved)
        assert all(torch.equal(v, before[k]) for k, v in server.state_dict()["tensors"].items())


@dataclass(frozen=True, kw_only=True)
class Slowest(Average):
    """An own one: the largest that each coordinate has been."""

    def follow(self, x: Tensor, theta: Tensor, past: list[Tensor], t: int) -> None:
        x.copy_(theta if t == 0 else torch.maximum(x, theta))


def test_an_own_average():
    assert visit(at_zero(Slowest()), -3, 5, 1) == [-3, 5, 5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EMA(beta=1), "EMA(beta=1): must be in [0, 1)"),
        (lambda: Poly(gamma=-1), "Poly(gamma=-1)"),
        (lambda: Window(size=0), "Window(size=0)"),
    ],
)
def test_nonsense_is_refused(make: Any, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_the_errors_of_the_model_grow_with_the_rate_and_those_of_an_average_do_not():
    """θ' = θ − η(Hθ + ξ), stationary: var θ ≈ η var ξ/(2H), var x ≈ var ξ/(H² W) for any η."""
    h, rounds, width = 1.0, 4000, 64
    errors: dict[float, tuple[float, float]] = {}
    for rate in (0.05, 0.2, 0.8):
        rng = np.random.default_rng(7)
        server = Server({"w": torch.zeros(width)}, average=Poly(gamma=1), guard=None, trust=None)
        for _ in range(rounds):
            noise = torch.tensor(rng.normal(size=width), dtype=torch.float32)
            server.step([{"w": rate * (h * server.params["w"] + noise)}])
        raw, averaged = (
            state["w"].square().mean().item() for state in (server.state, server.averaged)
        )
        errors[rate] = raw, averaged
    raw, averaged = zip(*errors.values(), strict=True)
    assert raw[1] > 2 * raw[0]
    assert raw[2] > 2 * raw[1]  # η/(2 − η): 0.026, 0.111, 0.667
    assert max(averaged) < 2 * min(averaged)
    assert max(averaged) < min(raw) / 5
