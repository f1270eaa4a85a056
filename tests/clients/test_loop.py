"""The training loop against torch.optim, and against numbers worked out by hand."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from run_support import packed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedglad.clients import loop
from fedglad.clients.local_optimizers import move, slot_names
from fedglad.clients.method import Memory, Plain
from fedglad.clients.workbench import Result, Workbench, length
from fedglad.rng import stream


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)).to(dtype)


def samples(n: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(8)
    x = torch.randn(n, 7, generator=rng, dtype=torch.float64).to(dtype)
    return x, torch.randint(5, (n,), generator=rng)


def ours(
    client: Plain,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    rng: np.random.Generator | None = None,
) -> tuple[dict[str, Tensor], Result]:
    """The model that one client returns, by name."""
    theta, buffers = packed(model)
    bench = Workbench(copy.deepcopy(model), loss)
    result = bench.train(client, theta, buffers, x, y, rng or stream(1, "client", 0, 0))
    trained = bench.layout.views(theta - result.delta)
    return {**{n: t.clone() for n, t in trained.items()}, **result.buffers}, result


def batches(client: Plain, n: int) -> list[np.ndarray]:
    """The batches that `ours` takes: its stream's first draw seeds torch."""
    rng = stream(1, "client", 0, 0)
    rng.integers(2**63)
    return list(client.batches(n, rng))


def theirs(
    client: Plain,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rate: Callable[[int], float] | None = None,
) -> tuple[dict[str, Tensor], float]:
    """The same round with torch.optim, as any script would write it; and its mean loss."""
    model = copy.deepcopy(model)
    torch.manual_seed(stream(1, "client", 0, 0).bit_generator.random_raw())
    parameters, lr, decay = list(model.parameters()), client.lr, client.weight_decay
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(parameters, lr, weight_decay=decay),
        "sgdm": lambda: torch.optim.SGD(parameters, lr, client.momentum, weight_decay=decay),
        "adam": lambda: torch.optim.Adam(
            parameters, lr, client.betas, client.eps, weight_decay=decay
        ),
        "adamw": lambda: torch.optim.AdamW(
            parameters, lr, client.betas, client.eps, weight_decay=decay
        ),
    }[client.optimizer]()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate) if rate else None
    losses: list[float] = []
    model.train()
    for batch in batches(client, len(y)):
        optimizer.zero_grad()
        loss = cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        if client.clip_norm:
            nn.utils.clip_grad_norm_(parameters, client.clip_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return {name: t.detach() for name, t in model.state_dict().items()}, float(np.mean(losses))


def check(client: Plain, rate: Callable[[int], float] | None = None, n: int = 37) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        model, (x, y) = two_layers(dtype), samples(n, dtype)
        found, result = ours(client, model, x, y)
        wanted, loss = theirs(client, model, x, y, rate)
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=tolerance)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.steps == len(batches(client, n))


# ---------------------------------------------------------------------------- against torch.optim


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["sgd", "sgdm", "adam", "adamw"])
def test_a_round_equals_torchs_optimizer(optimizer: Any, decay: float):
    check(Plain(optimizer=optimizer, lr=0.02, weight_decay=decay, batch_size=8, epochs=3))


@pytest.mark.parametrize("optimizer", ["sgd", "sgdm", "adam", "adamw"])
@pytest.mark.parametrize("clip", [1e-3, 0.5, 100.0])
def test_clipping_equals_torchs(optimizer: Any, clip: float):
    check(Plain(optimizer=optimizer, lr=0.05, batch_size=8, epochs=2, clip_norm=clip))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_betas_and_eps_are_torchs(optimizer: Any):
    check(Plain(optimizer=optimizer, lr=0.02, betas=(0.5, 0.9), eps=1e-2, batch_size=8, epochs=2))


@pytest.mark.parametrize(("warmup", "warm"), [(0.0, 0), (0.2, 2), (0.25, 3), (0.5, 5)])
@pytest.mark.parametrize("optimizer", ["sgdm", "adamw"])
def test_the_linear_schedule_equals_the_usual_lambda(optimizer: Any, warmup: float, warm: int):
    """Rises over the first share of the round's steps, rounded up, then falls to 0: as in
    transformers' get_linear_schedule_with_warmup."""
    client = Plain(
        optimizer=optimizer,
        lr=0.05,
        batch_size=8,
        epochs=2,
        schedule="linear",
        warmup=warmup,
        weight_decay=0.1,
    )
    total = client.count(37)
    assert total == 10

    def rate(step: int) -> float:
        return step / warm if step < warm else max(0, total - step) / (total - warm)

    check(client, rate)


def test_a_short_round_with_the_papers_warm_up():
    # 4 steps, 6 % of them: 0.24, rounded up to 1, then down from 3/3 in three steps.
    client = Plain(lr=0.3, schedule="linear", warmup=0.06)
    assert [client.rate(k, 4) for k in range(4)] == pytest.approx([0, 0.3, 0.2, 0.1])


def test_a_long_gradients_norm_is_right_to_float32():
    # 22.7 million elements of 1 and 2 in turn: sqrt(11_350_000 · 1 + 11_350_000 · 4).
    gradient = torch.tensor([1.0, 2.0]).repeat(11_350_000)
    assert length(gradient) == pytest.approx(math.sqrt(5 * 11_350_000), rel=2e-6)
    short = gradient[:1_999_999]  # in one piece: torch's own number
    assert length(short) == float(torch.linalg.vector_norm(short))


@pytest.mark.parametrize(
    "client",
    [
        Plain(optimizer="sgd"),
        Plain(optimizer="sgdm", weight_decay=0.1),
        Plain(optimizer="adam", weight_decay=0.1, amsgrad=True),
        Plain(optimizer="adamw", weight_decay=0.1),
    ],
    ids=lambda client: client.optimizer,
)
def test_a_long_vector_is_stepped_by_spans_to_the_same_bits(
    client: Plain, monkeypatch: pytest.MonkeyPatch
):
    n = loop.LONG + 12_345

    def stepped() -> Tensor:
        torch.manual_seed(1)
        w, grad = torch.randn(n), torch.randn(n)
        slots = {name: torch.zeros(n) for name in slot_names(client)}
        for step in range(3):
            move(client, w, grad.clone(), slots, 0.1, step)
        return w

    by_spans = stepped()
    monkeypatch.setattr(loop, "SPAN", n)
    assert by_spans.equal(stepped())


def test_a_constant_rate_ignores_the_warm_up():
    assert [Plain(lr=0.3, warmup=0.5).rate(k, 4) for k in range(4)] == [0.3] * 4


@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.3, 0.37, 0.99, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_a_linear_rate_is_never_negative_nor_above_lr(warmup: float, total: int):
    client = Plain(lr=0.3, schedule="linear", warmup=warmup)
    rates = [client.rate(k, total) for k in range(total)]
    assert all(0 <= rate <= 0.3 * (1 + 1e-9) for rate in rates)
    top = rates.index(max(rates))
    assert all(a <= b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))


@pytest.mark.parametrize(
    ("settings", "n", "sizes"),
    [
        ({"epochs": 2}, 20, [8, 8, 4, 8, 8, 4]),
        ({"epochs": 2, "drop_last": True}, 20, [8, 8, 8, 8]),
        ({"epochs": 2, "drop_last": True}, 5, [5, 5]),  # all there is
        ({"epochs": 2, "drop_last": True}, 8, [8, 8]),
        ({"epochs": 9, "steps": 1}, 20, [8]),
        ({"steps": 5}, 20, [8, 8, 4, 8, 8]),
        ({"steps": 5, "drop_last": True}, 20, [8, 8, 8, 8, 8]),
        ({"steps": 3}, 1, [1, 1, 1]),
        ({"batch_size": 100}, 20, [20]),
    ],
)
def test_batches(settings: dict[str, Any], n: int, sizes: list[int]):
    settings = {"batch_size": 8, **settings}
    client = Plain(**settings)
    found = batches(client, n)
    assert [len(batch) for batch in found] == sizes
    assert client.count(n) == len(sizes)
    check(client, n=n)


def test_every_epoch_is_a_new_order_of_all_samples():
    first, second = np.split(np.concatenate(batches(Plain(batch_size=8, epochs=2), 50)), 2)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()


def test_epochs_and_the_same_number_of_steps_are_the_same():
    model, (x, y) = two_layers(), samples()
    by_epochs, _ = ours(Plain(batch_size=8, epochs=3), model, x, y)
    by_steps, _ = ours(Plain(batch_size=8, steps=15), model, x, y)
    assert all(by_epochs[name].equal(by_steps[name]) for name in by_epochs)


# --------------------------------------------------------------------------------------- by hand


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


HAND_X = torch.tensor([1.0, 2.0], dtype=torch.float64)
HAND_Y = torch.tensor([3.0, 2.0], dtype=torch.float64)


def test_two_steps_of_linear_regression_by_hand():
    # y = w x, both samples in a batch, w = 1, rate 0.1. Loss ½·((w − 3)² + (2w − 2)²), whose
    # gradient is ½·(2(w − 3) + 2·2(2w − 2)) = (w − 3) + 2(2w − 2) = 5w − 7.
    # w = 1:   loss ½·(4 + 0) = 2,        gradient −2,  w → 1 + 0.2 = 1.2
    # w = 1.2: loss ½·(3.24 + 0.16) = 1.7, gradient −1,  w → 1.2 + 0.1 = 1.3
    client = Plain(optimizer="sgd", lr=0.1, batch_size=2, epochs=2)
    found, result = ours(client, Scale(), HAND_X, HAND_Y, mse_loss)
    assert found["w"].item() == pytest.approx(1.3, abs=1e-15)
    assert result.delta.sum().item() == pytest.approx(-0.3, abs=1e-15)  # θ − θ_k
    assert result.loss == pytest.approx((2 + 1.7) / 2, rel=1e-6)
    assert result.steps == 2


def test_two_steps_with_momentum_weight_decay_and_clipping_by_hand():
    # As above, gradient 5w − 7, momentum 0.5, decay 0.1, clip 1.5, rate 0.1.
    # w = 1:    gradient −2, cut to −1.5;   + 0.1·1 = −1.4;     v = −1.4;            w → 1.14
    # w = 1.14: gradient −1.3, not cut;     + 0.114 = −1.186;   v = −0.7 − 1.186 = −1.886;
    #           w → 1.14 + 0.1886 = 1.3286
    # (1e-6 is added to the norm that divides, as torch does: hence the tolerance.)
    client = Plain(lr=0.1, momentum=0.5, weight_decay=0.1, clip_norm=1.5, batch_size=2, epochs=2)
    found, _ = ours(client, Scale(), HAND_X, HAND_Y, mse_loss)
    assert found["w"].item() == pytest.approx(1.3286, abs=1e-6)


def test_one_step_of_adam_by_hand():
    # The first step of Adam is lr · g/(|g| + eps), whatever the betas: 1 + 0.01 · 2/(2 + 1) with
    # eps = 1. AdamW with decay 0.5 first shrinks w to 1 − 0.01·0.5 = 0.995.
    one = Plain(optimizer="adam", lr=0.01, eps=1.0, batch_size=2)
    assert ours(one, Scale(), HAND_X, HAND_Y, mse_loss)[0]["w"].item() == pytest.approx(
        1 + 0.02 / 3, abs=1e-14
    )
    one = replace(one, optimizer="adamw", weight_decay=0.5)
    assert ours(one, Scale(), HAND_X, HAND_Y, mse_loss)[0]["w"].item() == pytest.approx(
        0.995 + 0.02 / 3, abs=1e-14
    )


# --------------------------------------------------------------------------------------- the hook


@dataclass(frozen=True, kw_only=True)
class Pulled(Plain):
    """A correction like FedProx's: towards what the server sent."""

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.add_(w - theta, alpha=10.0).add_(sent.get("shift", torch.zeros(())))

    def finish(
        self, delta: Tensor, steps: int, memory: Memory, sent: Memory
    ) -> tuple[Memory, Tensor | None]:
        return {"rounds": memory.get("rounds", torch.zeros(())) + 1}, delta * steps


def test_a_correction_comes_before_clipping():
    # Gradient 5w − 7, correction + 10 (w − 1), clip 1, rate 0.1, two steps.
    # w = 1:   −2 + 0 = −2, cut to −1:              w → 1.1
    # w = 1.1: −1.5 + 1 = −0.5, not cut:            w → 1.15
    # Clipped first, the second step would be −1 + 1 = 0 and leave w at 1.1.
    client = Pulled(optimizer="sgd", lr=0.1, batch_size=2, epochs=2, clip_norm=1.0)
    found, result = ours(client, Scale(), HAND_X, HAND_Y, mse_loss)
    assert found["w"].item() == pytest.approx(1.15, abs=1e-6)
    assert result.extra is not None
    assert result.extra.sum().item() == pytest.approx(-0.3, abs=1e-6)
    assert result.memory["rounds"].item() == 1


def test_the_hook_sees_what_the_server_sent_and_its_memory():
    bench = Workbench(Scale(), mse_loss)
    theta, buffers = packed(Scale())
    sent = {"shift": torch.tensor(2.0, dtype=torch.float64)}
    memory = {"rounds": torch.tensor(4.0)}
    client = Pulled(optimizer="sgd", lr=0.1, batch_size=2)
    result = bench.train(
        client, theta, buffers, HAND_X, HAND_Y, stream(1, "x"), memory=memory, sent=sent
    )
    assert result.delta[0].item() == pytest.approx(0.0, abs=1e-15)  # −2 + 2
    assert result.memory["rounds"].item() == 5
    assert memory["rounds"].item() == 4  # a proposal: the old one is as it was


# --------------------------------------------------------------------- buffers, dropout, tied, …


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(7, 9)
        self.norm = nn.BatchNorm1d(9)
        self.dropout = nn.Dropout(0.4)
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def test_batchnorm_buffers_come_back_and_dropout_draws_from_the_stream():
    """torch draws the same masks: both are seeded by the stream's first number."""
    model, (x, y) = Normed(), samples(40)
    client = Plain(batch_size=8, epochs=2)
    found, result = ours(client, model, x, y)
    wanted, _ = theirs(client, model, x, y)
    assert result.buffers.keys() == dict(model.named_buffers()).keys()
    assert result.buffers["norm.num_batches_tracked"].item() == 10
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-6)
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.item() == 0  # the global model is as it was


def test_dropout_depends_on_the_stream_alone():
    model, (x, y) = Normed(), samples(40)

    def once(index: int, global_seed: int) -> Tensor:
        torch.manual_seed(global_seed)
        return ours(Plain(), model, x, y, rng=stream(1, "client", index))[1].delta

    assert once(0, 1).equal(once(0, 2))
    assert not once(0, 1).equal(once(1, 1))


def test_a_bench_carries_nothing_from_one_client_to_the_next():
    model, (x, y) = Normed(), samples(40)
    theta, buffers = packed(model)
    client = Plain(batch_size=8, epochs=2)

    def once(bench: Workbench, k: int) -> Result:
        part = slice(10 * k, 10 * k + 10)
        return bench.train(client, theta, buffers, x[part], y[part], stream(1, "c", k))

    shared = Workbench(copy.deepcopy(model))
    for k in (0, 1, 2, 0):
        alone, after_others = once(Workbench(copy.deepcopy(model)), k), once(shared, k)
        assert alone.delta.equal(after_others.delta)
        assert alone.loss == after_others.loss
        assert all(alone.buffers[n].equal(after_others.buffers[n]) for n in alone.buffers)


class Tied(nn.Module):
    """An embedding that is also the last layer, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(5, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)).tanh())


def test_tied_weights_stay_tied_and_get_both_gradients():
    x = torch.randint(5, (30,), generator=torch.Generator().manual_seed(1))
    y = (x + 1) % 5
    client = Plain(optimizer="adam", lr=0.01, batch_size=8, epochs=3)
    found, _ = ours(client, Tied(), x, y)
    wanted, _ = theirs(client, Tied(), x, y)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "sgdm", "adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_frozen_parameters_do_not_move(optimizer: Any, decay: float):
    """torch.optim leaves out what has no gradient, from weight decay too."""
    model, (x, y) = two_layers(), samples()
    next(model.parameters()).requires_grad_(False)
    client = Plain(optimizer=optimizer, weight_decay=decay, batch_size=8, epochs=2)
    found, _ = ours(client, model, x, y)
    wanted, _ = theirs(client, model, x, y)
    assert wanted.keys() - found.keys() == {"0.weight"}  # which is not sent
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-6)


def test_a_parameter_that_the_loss_does_not_use_stays():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(7, 5), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unused()
    found, _ = ours(Plain(batch_size=8, epochs=2), model, *samples())
    assert found["unused.weight"].equal(model.unused.weight)
    assert not found["used.weight"].equal(model.used.weight)


def test_the_clients_data_and_the_global_model_are_never_changed():
    model, (x, y) = Normed(), samples(40)
    theta, buffers = packed(model)
    kept = [t.clone() for t in (x, y, theta, *buffers.values())]
    bench = Workbench(copy.deepcopy(model))
    bench.train(Plain(epochs=3, clip_norm=0.1), theta, buffers, x, y, stream(1, "c"))
    assert all(a.equal(b) for a, b in zip(kept, (x, y, theta, *buffers.values()), strict=True))


def test_the_result_stays_as_it_was_while_the_next_client_trains():
    model, (x, y) = Normed(), samples(40)
    theta, buffers = packed(model)
    bench = Workbench(copy.deepcopy(model))
    first = bench.train(Plain(), theta, buffers, x[:20], y[:20], stream(1, "c", 0))
    kept = [first.delta.clone(), *(b.clone() for b in first.buffers.values())]
    bench.train(Plain(), theta, buffers, x[20:], y[20:], stream(1, "c", 1))
    assert all(
        a.equal(b) for a, b in zip(kept, (first.delta, *first.buffers.values()), strict=True)
    )


def test_the_difference_is_written_where_it_is_wanted():
    model, (x, y) = two_layers(), samples()
    theta, buffers = packed(model)
    bench = Workbench(copy.deepcopy(model))
    out = torch.full_like(theta, math.nan)
    result = bench.train(Plain(), theta, buffers, x, y, stream(1, "c"), out=out)
    assert result.delta.data_ptr() == out.data_ptr()
    assert out.equal(bench.train(Plain(), theta, buffers, x, y, stream(1, "c")).delta)


def test_parameters_of_several_dtypes_are_refused():
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="one dtype, float32 or float64"):
        Workbench(model)
    with pytest.raises(ValueError, match="one dtype, float32 or float64"):
        Workbench(two_layers(torch.bfloat16))


BAD: Iterable[tuple[str, Any]] = [
    *(("lr", value) for value in (0.0, -1.0, math.inf, math.nan)),
    *(("momentum", value) for value in (-0.1, 1.0, math.nan)),
    *(("betas", value) for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan))),
    *(("eps", value) for value in (-1e-8, math.inf, math.nan)),
    *(("weight_decay", value) for value in (-1.0, math.inf, math.nan)),
    *(("clip_norm", value) for value in (-1.0, math.nan)),
    *(("batch_size", 0), ("epochs", 0), ("steps", -1), ("warmup", 1.1), ("warmup", -0.1)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_settings_that_cannot_be_meant_are_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"Plain\({name}=.*\): must be"):
        Plain(**{name: value})
