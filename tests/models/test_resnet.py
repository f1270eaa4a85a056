"""ResNets: sizes, names, starting values; against a plain reference; in the server and engines."""

import copy
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    adaptive_avg_pool2d,
    batch_norm,
    conv2d,
    cross_entropy,
    group_norm,
    linear,
    pad,
    relu,
)

from fedglad import Glad, Server, Update
from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.config.schema import load
from fedglad.core.layout import split
from fedglad.data.federation import Partitioned
from fedglad.models.networks.resnet import Basic, Bottleneck, ConvNorm, Moments
from fedglad.models.resnet import ResNet56, ResNet56Basic, ResNet56GroupNorm
from fedglad.records import Bundle
from fedglad.simulation.engines.base import Job
from fedglad.simulation.engines.settings import Batched, Serial

FULL = (ResNet56(), ResNet56Basic(), ResNet56GroupNorm())
SMALL = (
    ResNet56(blocks=(2, 1, 1), width=4),
    ResNet56Basic(blocks=(2, 1, 1), width=4),
    ResNet56GroupNorm(blocks=(2, 1, 1), width=4),
)
of_each_kind = pytest.mark.parametrize("chosen", SMALL, ids=lambda s: type(s).__name__)


def built(settings: ResNet56, seed: int = 0) -> nn.Module:
    """A model whose norms have moved from 1 and 0 and whose running statistics are its own."""
    torch.manual_seed(seed)
    model = settings.build()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name and value.is_floating_point():
                value.add_(torch.rand_like(value), alpha=0.5)
    return model


def reference(settings: ResNet56, state: Mapping[str, Tensor], x: Tensor, training: bool) -> Tensor:
    """The network as in the papers, from torch's functions in torch's own layout.

    Running statistics in `state` are updated, if training.
    """

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        x = conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        gamma, beta = state[f"{name}.norm.weight"], state[f"{name}.norm.bias"]
        if isinstance(settings, ResNet56GroupNorm):
            return group_norm(x, settings.groups, gamma, beta)
        if training:
            state[f"{name}.norm.num_batches_tracked"].add_(1)
        statistics = (state[f"{name}.norm.running_mean"], state[f"{name}.norm.running_var"])
        return batch_norm(x, *statistics, gamma, beta, training)

    x = relu(conv("stem", x))
    for k, count in enumerate(settings.blocks):
        for j in range(count):
            at, stride = f"stages.{k}.{j}", 2 if k > 0 and j == 0 else 1
            if settings.basic:
                out = conv(f"{at}.conv2", relu(conv(f"{at}.conv1", x, stride)))
                new = out.shape[1] - x.shape[1]
                shortcut = pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, new))
            else:
                out = relu(conv(f"{at}.conv1", x))
                out = conv(f"{at}.conv3", relu(conv(f"{at}.conv2", out, stride)))
                shortcut = x
                if f"{at}.shortcut.weight" in state:
                    shortcut = conv(f"{at}.shortcut", x, stride)
            x = relu(out + shortcut)
    return linear(adaptive_avg_pool2d(x, 1).flatten(1), state["dense.weight"], state["dense.bias"])


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def far(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its largest element."""
    assert found.keys() == wanted.keys()
    differences = [
        float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-12))
        for n in wanted
    ]
    assert not any(math.isnan(d) for d in differences)
    return max(differences)


# ----------------------------------------------------------------------- sizes, names and the start


@pytest.mark.parametrize(
    ("settings", "parameters", "tensors", "buffers"),
    [
        # Stem, 18 blocks of 3 convolutions, 3 shortcuts: 58 of a weight, scale and shift; dense.
        (ResNet56(), 591_322, 58 * 3 + 2, 58 * 3),
        # Stem and 27 blocks of 2: 55, and no shortcut has parameters.
        (ResNet56Basic(), 853_018, 55 * 3 + 2, 55 * 3),
        (ResNet56GroupNorm(), 591_322, 58 * 3 + 2, 0),
    ],
    ids=lambda s: type(s).__name__,
)
def test_published_sizes(settings: ResNet56, parameters: int, tensors: int, buffers: int):
    model = settings.build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
    assert len(list(model.buffers())) == buffers
    ends = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    assert ends == ({"running_mean", "running_var", "num_batches_tracked"} if buffers else set())


def test_names():
    model = ResNet56(blocks=(1,)).build()
    blocks = [f"stages.0.0.{name}" for name in ("conv1", "conv2", "conv3", "shortcut")]
    convolutions = ["stem", *blocks]
    parts = ("weight", "norm.weight", "norm.bias")
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert [name for name, _ in model.named_parameters()] == [
        *(f"{conv}.{part}" for conv in convolutions for part in parts),
        *("dense.weight", "dense.bias"),
    ]
    assert [name for name, _ in model.named_buffers()] == [
        f"{conv}.norm.{part}" for conv in convolutions for part in statistics
    ]


@pytest.mark.parametrize("settings", FULL, ids=lambda s: type(s).__name__)
def test_starting_values(settings: ResNet56):
    torch.manual_seed(0)
    model = settings.build()
    for module in model.modules():
        if isinstance(module, ConvNorm):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            values = module.weight.detach() / math.sqrt(2 / fan_out)
            # Of n normal values the mean deviates by 1/√n, the deviation by 1/√(2n): five of each.
            assert abs(float(values.mean())) < 5 / math.sqrt(values.numel())
            assert abs(float(values.std()) - 1) < 5 / math.sqrt(2 * values.numel())
            state = module.norm.state_dict()
            assert state["weight"].eq(1).all()
            assert state["bias"].eq(0).all()
    torch.manual_seed(0)
    assert not settings.build().state_dict()["dense.bias"].eq(0).any()  # torch's rule


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 9, 13), (3, 4, 4)], ids=str)
@of_each_kind
def test_any_image_fits(chosen: ResNet56, shape: tuple[int, ...]):
    model = replace(chosen, channels=shape[0], classes=7).build()
    assert model(torch.rand(3, *shape)).shape == (3, 7)
    assert model.eval()(torch.rand(1, *shape)).shape == (1, 7)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ResNet56, {"channels": 0}, r"ResNet56\(channels=0\): must be 1 or more"),
        (ResNet56, {"classes": 1}, r"ResNet56\(classes=1\): must be 2 or more"),
        (ResNet56, {"blocks": ()}, r"ResNet56\(blocks=\(\)\): must be one stage or more"),
        (ResNet56Basic, {"blocks": (3, 0)}, r"ResNet56Basic\(blocks=\(3, 0\)\): must be one stage"),
        (ResNet56, {"width": 0}, r"ResNet56\(width=0\): must be 1 or more"),
        (ResNet56GroupNorm, {"groups": 0}, r"groups=0\): must divide width = 16"),
        (ResNet56GroupNorm, {"groups": 3}, r"groups=3\): must divide width = 16"),
    ],
)
def test_wrong_settings_are_refused(kind: Any, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize("name", ["resnet56", "resnet56-basic", "resnet56-gn"])
def test_in_a_configuration(name: str):
    given = {"model.name": name, "model.channels": 1, "model.blocks": (1, 1), "model.width": 4}
    config = load("digits", given)[1]
    assert config.to_dict()["model"]["name"] == name
    model = config.plan().model
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


# ------------------------------------------------------------------------------ the same network


@pytest.mark.parametrize("training", [True, False], ids=["training", "at rest"])
@pytest.mark.parametrize("side", [8, 9])
@of_each_kind
def test_scores_gradients_and_statistics_equal_the_reference(
    chosen: ResNet56, side: int, training: bool
):
    """In double precision, where two orders of summing cannot differ by more than 1e-10."""
    model = built(chosen).double().train(training)
    x, y = torch.randn(5, 3, side, side).double(), torch.randint(10, (5,))
    state = copied(model)
    own = {name: state[name].requires_grad_() for name, _ in model.named_parameters()}
    wanted = reference(chosen, state, x, training)
    found = model(x)
    assert far({"scores": found.detach()}, {"scores": wanted.detach()}) < 1e-10
    expected = torch.autograd.grad(cross_entropy(wanted, y), list(own.values()))
    got = torch.autograd.grad(cross_entropy(found, y), list(model.parameters()))
    assert far(dict(zip(own, got, strict=True)), dict(zip(own, expected, strict=True))) < 1e-10
    after = {name: value.detach() for name, value in state.items()}
    assert far(copied(model), after) < 1e-12


@pytest.mark.parametrize(
    ("settings", "training", "most"),
    [
        *((settings, False, 1e-5) for settings in FULL),
        *((settings, True, 1e-5) for settings in (*SMALL, *FULL[1:])),
        # Deep and of small batches: torch itself is off by 1e-5 in its own layout, 3e-5 in ours.
        (FULL[0], True, 1e-4),
    ],
)
def test_single_precision(settings: ResNet56, training: bool, most: float):
    torch.manual_seed(0)
    model = settings.build().train(training)
    x = torch.randn(4, 3, 16, 16)
    state = copied(copy.deepcopy(model).double())
    with torch.no_grad():
        exact = reference(settings, state, x.double(), training)
        assert far({"scores": model(x)}, {"scores": exact}) < most


def test_norms_at_rest_in_a_model_that_trains():
    """A frozen BatchNorm (norm.eval()) uses its running statistics and leaves them alone."""
    settings = SMALL[0]
    model = built(settings).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    x, before = torch.randn(5, 3, 8, 8).double(), copied(model)
    wanted = reference(settings, copied(model), x, training=False)
    assert far({"scores": model(x).detach()}, {"scores": wanted}) < 1e-12
    assert far(copied(model), before) == 0


def test_the_gradient_of_moments():
    torch.manual_seed(0)
    x = torch.randn(7, 3).double().requires_grad_()
    mean, cov = Moments.apply(x)
    assert torch.allclose(mean, x.mean(0))
    assert torch.allclose(cov, x.T.cov(correction=0))
    assert torch.autograd.gradcheck(Moments.apply, x)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
def test_a_widening_convolution_stands_a_large_mean(offset: float):
    # Inputs near 1000 with deviation 1: E[x²] − E[x]² would lose 6 of float32's 7 digits.
    torch.manual_seed(0)
    layer = ConvNorm(4, 16, 1, nn.BatchNorm2d)
    x = torch.randn(8, 4, 6, 6) + offset
    found = layer(x)
    wanted = copy.deepcopy(layer).double()
    exact = wanted.norm(conv2d(x.double(), wanted.weight))
    # Rounding a sum of four terms near `offset` is 1e-7 of it; deviations are near 1.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * max(1, offset))


def test_a_dead_input():
    """Planes that are all zero have no variance: the output is the shift, and gradients finite."""
    layer = ConvNorm(2, 8, 1, nn.BatchNorm2d)
    nn.init.constant_(layer.norm.bias, 3.0)  # pyright: ignore[reportArgumentType]
    x = torch.zeros(4, 2, 3, 3, requires_grad=True)
    out = layer(x)
    assert out.eq(3).all()
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_one_value_a_plane_has_no_variance_and_is_refused():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SMALL[0].build()(torch.rand(1, 3, 4, 4))  # three stages: 4×4, 2×2, 1×1


@of_each_kind
def test_planes_lie_side_by_side_forth_and_back(chosen: ResNet56):
    """Otherwise a convolution turns its inputs around, and the step takes half as long again."""
    model = chosen.build()
    seen: list[int] = []

    def watch(module: nn.Module, inputs: Any, out: Tensor) -> None:
        seen.append(out.stride(1))
        out.register_hook(lambda grad: seen.append(grad.stride(1)))

    watched = [m for m in model.modules() if isinstance(m, (ConvNorm, Basic, Bottleneck))]
    for module in watched:
        module.register_forward_hook(watch)
    model(torch.rand(4, 3, 8, 8)).sum().backward()
    assert len(seen) == 2 * len(watched)
    assert set(seen) == {1}


# -------------------------------------------------------------------------- the server, the engines


def trained(model: nn.Module, seed: int, steps: int) -> dict[str, Tensor]:
    """A copy after some local steps on data of its own."""
    bench = Workbench(copy.deepcopy(model))
    torch.manual_seed(seed)
    x, y = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    client = Plain(lr=0.05, batch_size=8, steps=steps)
    bench.train(client, bench.w.clone(), buffers, x, y, np.random.default_rng(seed))
    return copied(bench.model)


def test_a_federation_of_resnets():
    """Weights 1 and 3: statistics are averaged by 1/4 and 3/4, counters are the larger one's."""
    torch.manual_seed(0)
    model = SMALL[0].build()
    frozen = "stages.1.0.conv2.weight"
    model.get_parameter(frozen).requires_grad_(False)
    before = model.get_parameter(frozen).detach().clone()
    parameters = [name for name, p in model.named_parameters() if p.requires_grad]
    server = Server(model, adapter=Glad(gamma=0.5))
    for t in range(3):
        first, second = trained(model, 2 * t, steps=1), trained(model, 2 * t + 1, steps=3)
        record = server.step([Update(model=first, weight=1), Update(model=second, weight=3)])
        assert record.stepped
        assert list(record.gsi) == list(record.scale) == parameters  # no buffer among them
        assert all(record.gsi[name] > 1 for name in parameters)
        for name, value in server.state.items():
            if name.endswith("num_batches_tracked"):
                assert int(value) == 3 * (t + 1)
            elif name.endswith(("running_mean", "running_var")):
                torch.testing.assert_close(value, first[name] / 4 + 3 * second[name] / 4)
                assert not value.equal(model.state_dict()[name])
        assert server.state[frozen].equal(before)
        model.load_state_dict(server.state)
    assert any(s != 1 for s in record.scale.values())  # pyright: ignore[reportPossiblyUnboundVariable]


@of_each_kind
def test_clients_side_by_side_train_as_one_after_the_other(chosen: ResNet56):
    """The engines `batched` (vmap) and `serial`: parameters, statistics and counters."""
    torch.manual_seed(0)
    small = replace(chosen, blocks=(1, 1, 1))
    model, x, y = built(small), torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
    data: Any = Partitioned(x, y, x[:4], y[:4], np.split(np.arange(32), 4))
    client = Plain(lr=0.05, batch_size=8, epochs=2, clip_norm=1.0)
    layout, parameters, buffers = split(model)
    theta = layout.pack(parameters)
    job = Job(model, data, client, cross_entropy, 1)
    brought: list[list[tuple[Tensor, dict[str, Tensor]]]] = []
    for settings in (Serial(), Batched()):
        with closing(settings.start(job)) as engine:
            found: list[tuple[Tensor, dict[str, Tensor]]] = []
            for group in engine.train(0, range(4), (theta, buffers), {}):
                for update in group.updates() if isinstance(group, Bundle) else group:
                    assert isinstance(update, Update), update
                    delta = torch.as_tensor(update.delta).clone()
                    own = {n: torch.as_tensor(b).clone() for n, b in (update.buffers or {}).items()}
                    found.append((delta, own))
            brought.append(found)
    assert len(brought[0]) == len(brought[1]) == 4
    for (delta, own), (wanted, theirs) in zip(brought[1], brought[0], strict=True):
        assert float(wanted.abs().max()) > 0.01
        torch.testing.assert_close(delta, wanted, rtol=0, atol=1e-4)
        assert own.keys() == theirs.keys() == buffers.keys()
        for name, value in theirs.items():
            assert not value.equal(buffers[name])
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-4)
