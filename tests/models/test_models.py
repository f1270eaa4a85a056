"""Models: sizes, starting values, and the fast CNNs against their plain forms."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy, max_pool2d, relu

from fedglad.clients.workbench import Workbench
from fedglad.data.digits import Digits
from fedglad.models import REGISTRY
from fedglad.models.cnn import FedOptCNN, SmallCNN
from fedglad.models.mlp import MLP
from fedglad.models.networks.cnn import ByteDropout, channels_last
from fedglad.models.softmax import SoftmaxRegression

SIZES = {
    "softmax": (610, 2),
    "mlp": (199_210, 6),
    "cnn": (1_199_882, 8),
    "small-cnn": (9_930, 6),
    "resnet56": (591_322, 176),
    "resnet56-basic": (853_018, 167),
    "resnet56-gn": (591_322, 176),
    "char-lstm": (820_185, 11),
    "tiny-gpt": (110_400, 28),
}
TEXTS = ("encoder", "bilstm")  # they need files, and have tests of their own


def settings(name: str):
    module, _, kind = REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), kind)()


def test_every_model_is_tested():
    assert set(REGISTRY) == {*SIZES, *TEXTS}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_its_published_size(name):
    parameters = list(settings(name).build().parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == SIZES[name]


@pytest.mark.parametrize("name", SIZES)
def test_the_start_depends_on_torchs_generator_alone(name):
    def start(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(settings(name).build().parameters())

    assert start(1).equal(start(1))
    assert name == "softmax" or not start(1).equal(start(2))


def test_softmax_regression_starts_at_zero_and_flattens():
    model = SoftmaxRegression(features=64).build()
    assert model(torch.rand(3, 1, 8, 8)).equal(torch.zeros(3, 10))


def test_an_mlp_without_hidden_layers_is_linear():
    assert [type(m) for m in MLP(features=4, hidden=(), classes=3).build()] == [  # pyright: ignore
        nn.Flatten,
        nn.Linear,
    ]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """The textbook order, in torch's default layout: conv, ReLU, conv, ReLU, pool, dense."""
    layers = dict(model.named_children())
    x = max_pool2d(relu(layers["conv2"](relu(layers["conv1"](x)))), 2).flatten(1)
    if "dense" in layers:
        return layers["dense"](x)
    return layers["dense2"](relu(layers["dense1"](x)))


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize(
    "chosen",
    [
        FedOptCNN(),
        FedOptCNN(channels=3, size=32, classes=7),
        FedOptCNN(size=13, dropout=(0.0, 0.0)),
        SmallCNN(),
        SmallCNN(channels=2, size=9, classes=3),
    ],
    ids=repr,
)
def test_the_fast_form_equals_the_plain_one(chosen):
    torch.manual_seed(0)
    model = chosen.build().eval()
    x = torch.rand(6, chosen.channels, chosen.size, chosen.size)
    x[:, :, : chosen.size // 2] = 0  # equal windows: the pooling has to break ties the same way
    y = torch.randint(chosen.classes, (6,))
    # Equal windows give equal sums only in exact arithmetic: compare in double precision.
    model, x = model.double(), x.double().requires_grad_()
    wanted = [*model.parameters(), x]
    fast, slow = model(x), plain(model, x)
    assert relative(fast, slow) < 1e-12
    got = torch.autograd.grad(cross_entropy(fast, y), wanted)
    expected = torch.autograd.grad(cross_entropy(slow, y), wanted)
    assert max(relative(g, e) for g, e in zip(got, expected, strict=True)) < 1e-12


def test_the_fast_form_equals_the_plain_one_in_single_precision():
    torch.manual_seed(0)
    model = FedOptCNN().build().eval()
    x, y = torch.rand(16, 1, 28, 28), torch.randint(10, (16,))
    x[:, :, :10] = 0
    fast, slow = model(x), plain(model, x)
    assert (fast - slow).abs().max() < 1e-6
    parameters = list(model.parameters())
    got = torch.autograd.grad(cross_entropy(fast, y), parameters)
    expected = torch.autograd.grad(cross_entropy(slow, y), parameters)
    assert max(float((g - e).abs().max()) for g, e in zip(got, expected, strict=True)) < 1e-6


def test_gradients_reach_flat_vectors_as_the_training_loop_binds_them():
    torch.manual_seed(0)
    model = SmallCNN().build()
    x, y = torch.rand(5, 1, 8, 8), torch.randint(10, (5,))
    expected = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    bench = Workbench(model)
    cross_entropy(model(x), y).backward()
    views = bench.layout.views(bench.grad).values()
    assert all(torch.allclose(v, e, atol=1e-7) for v, e in zip(views, expected, strict=True))


@pytest.mark.parametrize("chosen", [FedOptCNN(size=8, dropout=(0.0, 0.0)), SmallCNN()], ids=repr)
def test_many_models_at_once_equal_one_after_the_other(chosen):
    torch.manual_seed(0)
    models = [chosen.build() for _ in range(3)]
    x, y = torch.rand(3, 4, 1, 8, 8), torch.randint(10, (3, 4))
    stacked, _ = stack_module_state(models)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(models[0], parameters, (x,)), y)

    together = vmap(grad(loss))(stacked, x, y)
    for k, model in enumerate(models):
        cross_entropy(model(x[k]), y[k]).backward()
        for name, parameter in model.named_parameters():
            assert torch.allclose(together[name][k], parameter.grad, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_changes_strides_and_no_value(channels):
    x = torch.rand(2, channels, 5, 4)
    turned = channels_last(x)
    assert turned.equal(x)
    assert turned.stride() == (20 * channels, 1, 4 * channels, channels)
    assert nn.Conv2d(channels, 8, 3)(turned).stride()[1] == 1


@pytest.mark.parametrize("p", [0.25, 0.5, 0.1])
def test_dropout_leaves_out_the_right_share(p):
    torch.manual_seed(0)
    drop = ByteDropout(p)
    out = drop(torch.ones(999, 1001))
    assert out.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    dropped = out == 0
    # A standard deviation is below 0.0005 overall, 0.016 for a row or column.
    assert float(dropped.float().mean()) == pytest.approx(p, abs=0.002)
    assert all((dropped.float().mean(dim=d) - p).abs().max() < 0.08 for d in (0, 1))
    # Each byte of a draw counts, and neighbours are independent.
    by_byte = dropped.view(-1)[: 999 * 1001 // 8 * 8].view(-1, 8).float()
    assert (by_byte.mean(0) - p).abs().max() < 0.007
    assert (torch.corrcoef(by_byte.T) - torch.eye(8)).abs().max() < 0.015


def test_dropout_repeats_with_the_seed_and_rests_in_evaluation():
    drop, x = ByteDropout(0.25), torch.rand(13, 7)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(drop(x))
    assert masks[0].equal(masks[1])
    assert not masks[0].equal(masks[2])
    assert drop.eval()(x) is x
    assert ByteDropout(0.0)(x) is x


def test_dropout_passes_gradients_where_it_passed_values():
    x = torch.ones(50, requires_grad=True)
    out = ByteDropout(0.5)(x)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(out.detach())


def test_dropout_differs_between_models_trained_at_once():
    out = vmap(ByteDropout(0.5), randomness="different")(torch.ones(4, 100))
    assert len({tuple(row.tolist()) for row in out}) == 4


def test_the_small_cnn_learns_the_digits():
    torch.manual_seed(0)
    data = Digits(clients=1).load_federation()
    (x, y), (test_x, test_y) = data.client(0), data.test()
    model = SmallCNN().build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(10):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        assert float((model(test_x).argmax(1) == test_y).float().mean()) > 0.96


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftmaxRegression(features=0), r"SoftmaxRegression\(features=0\): must be 1 or"),
        (lambda: MLP(hidden=(3, 0)), r"MLP\(hidden=\(3, 0\)\): must be widths of 1 or more"),
        (lambda: MLP(classes=1), r"MLP\(classes=1\): must be 2 or more"),
        (lambda: FedOptCNN(size=5), r"FedOptCNN\(size=5\): must be 6 or more"),
        (lambda: FedOptCNN(dropout=(0.5, 1.0)), r"FedOptCNN\(dropout=\(0.5, 1.0\)\): must be two"),
        (lambda: SmallCNN(channels=0), r"SmallCNN\(channels=0\): must be 1 or more"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
