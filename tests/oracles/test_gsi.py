"""The gradient similarity indicator and its statistics, by hand.

GSI = sqrt(W Σw‖g‖² / ‖Σwg‖²), W = Σw; weights are normalised to sum 1, so W = 1.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedglad import Glad, Record, Server, Statistics, Update
from fedglad.adapters import Adapter
from fedglad.filters import Median, NormClip


def step(*updates: tuple[float, ...], weights: tuple[float, ...] = (), **settings: Any) -> Record:
    """One round of a model with one tensor, in which all is zero."""
    server = Server({"w": torch.zeros(len(updates[0]))}, guard=None, **settings)
    each = weights or (1.0,) * len(updates)
    pairs = zip(updates, each, strict=True)
    return server.step([Update({"w": torch.tensor(g)}, weight=w) for g, w in pairs])


def test_two_orthogonal_updates_of_equal_length_give_the_root_of_two():
    # w = 1/2: Σw‖g‖² = 9; ḡ = (1.5, 1.5), ‖ḡ‖² = 4.5; sqrt(9 / 4.5)
    record = step((3.0, 0.0), (0.0, 3.0))
    assert record.gsi["w"] == pytest.approx(math.sqrt(2))
    assert record.gsi_all == pytest.approx(math.sqrt(2))


def test_equal_updates_give_one():
    # Σw‖g‖² = ‖g‖² = ‖ḡ‖²
    assert step(*[(1.0, 2.0, -0.5)] * 4).gsi["w"] == 1.0
    assert step(*[(0.1, 0.7, 1.3)] * 7).gsi["w"] == pytest.approx(1, abs=1e-6)


def test_opposite_updates_of_unequal_length():
    # 3 and -1: Σw‖g‖² = (9 + 1)/2 = 5; ḡ = 1; sqrt(5)
    assert step((3.0,), (-1.0,)).gsi["w"] == pytest.approx(math.sqrt(5))


def test_a_weighted_cohort():
    # w = 1/4, 3/4; g = (2, 0), (2, 2), so ‖g‖² = 4, 8
    # Σw‖g‖² = 1 + 6 = 7; Σw²‖g‖² = 4/16 + 8·9/16 = 4.75; ḡ = (2, 1.5), ‖ḡ‖² = 6.25
    record = step((2.0, 0.0), (2.0, 2.0), weights=(1, 3))
    assert isinstance(record.statistics, Statistics)
    assert record.statistics.sum_sq == pytest.approx({"w": 7})
    assert record.statistics.sum_sq2 == pytest.approx({"w": 4.75})
    assert record.statistics.mean_sq == pytest.approx({"w": 6.25})
    assert record.statistics.weights == (0.25, 0.75)
    assert record.gsi["w"] == pytest.approx(math.sqrt(7 / 6.25))


def test_a_client_of_weight_three_counts_as_three_clients():
    # The same sums: Σw‖g‖² = (1 + 3·4)/4 = 3.25; ḡ = (1 - 3·2)/4 = -1.25, ‖ḡ‖² = 1.5625
    expected = math.sqrt(3.25 / 1.5625)
    assert step((1.0,), (-2.0,), weights=(1, 3)).gsi["w"] == pytest.approx(expected)
    assert step((1.0,), (-2.0,), (-2.0,), (-2.0,)).gsi["w"] == pytest.approx(expected)


@pytest.mark.parametrize("filter", [None, NormClip(max_norm=0.3), Median()], ids=repr)
@pytest.mark.parametrize("scale", [0.1, 0.7, 1.3, 1.9])
def test_one_client_gives_exactly_one(filter: Any, scale: float):
    # ‖g‖² and ‖ḡ‖² are the same number; clipped, c²‖g‖² and ‖c·g‖² differ in their last bits
    record = step((scale, 0.7, 1.3), weights=(7,), filter=filter)
    assert (record.gsi["w"], record.gsi_all, record.gsi_unfiltered) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6])
@pytest.mark.parametrize("filter", [None, NormClip(max_norm=1e9), Median()])
def test_the_scale_of_the_updates_does_not_matter(scale: float, filter: Any):
    # (1, 0), (0, 1): sqrt(1 / (1/4 + 1/4)) before the filter; no clip binds, and the median of
    # two is their mean, so after it too
    record = step((scale, 0.0), (0.0, scale), filter=filter)
    found = [record.gsi["w"], record.gsi_all, record.gsi_unfiltered]
    assert found == pytest.approx([math.sqrt(2)] * 3, rel=1e-6)


def test_a_million_squares_that_float32_cannot_hold():
    # Each square of 3·2⁻⁷³ is 9·2⁻¹⁴⁶, a whole multiple of 2⁻¹⁴⁹, the least number that float32
    # has; that of 3·2⁻⁷⁵ is 9·2⁻¹⁵⁰, half of one between two such
    for k in (73, 75):
        server = Server({"w": torch.zeros(2**20)})
        record = server.step([{"w": torch.full((2**20,), 3 * 2.0**-k)}])
        assert record.clients[0]["sq_norm"] == 9 * 2.0 ** (20 - 2 * k)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_scale_of_the_weights_does_not_matter(scale: float):
    # as in test_a_weighted_cohort
    record = step((2.0, 0.0), (2.0, 2.0), weights=(scale, 3 * scale))
    assert record.gsi["w"] == pytest.approx(math.sqrt(7 / 6.25))
    assert [c["weight"] for c in record.clients] == pytest.approx([0.25, 0.75])


SIZES = {"fc.weight": 2, "fc.bias": 1, "out.weight": 2}
TWO = (
    {"fc.weight": [1.0, 0.0], "fc.bias": [1.0], "out.weight": [4.0, 0.0]},
    {"fc.weight": [0.0, 1.0], "fc.bias": [1.0], "out.weight": [2.0, 0.0]},
)
# Per tensor, Σw‖g‖² and ‖ḡ‖²:  fc.weight 1, 1/2;  fc.bias 1, 1;  out.weight (16 + 4)/2 = 10, 9.


@pytest.mark.parametrize(
    ("settings", "squares"),
    [
        ({}, {"fc.weight": 1 / 0.5, "fc.bias": 1, "out.weight": 10 / 9}),
        ({"groups": "tensor"}, {"fc.weight": 1 / 0.5, "fc.bias": 1, "out.weight": 10 / 9}),
        ({"groups": "layer"}, {"fc": 2 / 1.5, "out": 10 / 9}),
        ({"groups": "all"}, {"all": 12 / 10.5}),
        (
            {"groups": lambda name: name.rpartition(".")[2]},
            {"weight": 11 / 9.5, "bias": 1},
        ),
        # fc.bias has 1 element, fewer than 2: it joins its layer; out.weight has 2
        ({"min_group": 2}, {"fc": 2 / 1.5, "out.weight": 10 / 9}),
        ({"min_group": 3}, {"fc": 2 / 1.5, "out": 10 / 9}),
        ({"min_group": 2, "groups": "all"}, {"all": 12 / 10.5}),
    ],
)
@pytest.mark.parametrize("adapter", [Adapter, Glad])
def test_a_group_sums_over_its_tensors(adapter: Any, settings: Any, squares: dict[str, float]):
    model = {name: torch.zeros(size) for name, size in SIZES.items()}
    updates = [{name: torch.tensor(v) for name, v in g.items()} for g in TWO]
    record = Server(model, adapter=adapter(**settings)).step(updates)
    assert record.gsi == pytest.approx({name: math.sqrt(sq) for name, sq in squares.items()})
    assert record.gsi_all == pytest.approx(math.sqrt(12 / 10.5))


def test_a_layer_is_a_module():
    # nn.Sequential names its tensors 0.weight, 0.bias, 2.weight, 2.bias
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert Server(model, adapter=Glad(groups="layer")).step([update]).gsi == {"0": 1, "2": 1}


@pytest.mark.parametrize("settings", [{"groups": "layer"}, {"min_group": 2}])
def test_the_tensors_of_the_outermost_module_are_a_layer_too(settings: Any):
    # weight (1, 0), (0, 1) and bias 1, 1: 1 + 1 over 1/2 + 1 in one group
    updates = [
        {"weight": torch.tensor([[1.0, 0.0]]), "bias": torch.tensor([1.0])},
        {"weight": torch.tensor([[0.0, 1.0]]), "bias": torch.tensor([1.0])},
    ]
    record = Server(nn.Linear(2, 1), adapter=Glad(**settings)).step(updates)
    assert list(record.gsi.values()) == pytest.approx([math.sqrt(2 / 1.5)])


def test_the_statistics_are_kept_per_tensor_whatever_the_groups():
    # w = 1/2: Σw²‖g‖² is half of Σw‖g‖²
    model = {name: torch.zeros(size) for name, size in SIZES.items()}
    updates = [{name: torch.tensor(v) for name, v in g.items()} for g in TWO]
    record = Server(model, adapter=Glad(groups="all")).step(updates, population=50)
    tensors = record.to_dict()["tensors"]
    assert list(tensors) == ["fc.weight", "fc.bias", "out.weight"]
    assert tensors["fc.weight"] == pytest.approx({"sum_sq": 1, "sum_sq2": 0.5, "mean_sq": 0.5})
    assert tensors["fc.bias"] == pytest.approx({"sum_sq": 1, "sum_sq2": 0.5, "mean_sq": 1})
    assert tensors["out.weight"] == pytest.approx({"sum_sq": 10, "sum_sq2": 5, "mean_sq": 9})
    assert record.statistics is not None
    assert (record.statistics.r, record.statistics.N) == (2, 50)


def test_the_record_says_what_each_client_brought():
    # weights 1 and 3: shares 1/4 and 3/4; ‖(3, 4)‖² = 25; train_loss = (1·4 + 3·2)/4 = 2.5;
    # both point the same way (cosine 3/5), so there is nothing against either: trust 1
    server = Server({"w": torch.zeros(2)})
    record = server.step(
        [
            Update({"w": torch.tensor([3.0, 4.0])}, client="a", weight=1, loss=4.0),
            Update({"w": torch.tensor([1.0, 0.0])}, client=7, weight=3, loss=2.0),
        ]
    )
    assert record.clients == [
        {"id": "a", "weight": 0.25, "loss": 4.0, "sq_norm": 25.0, "trust": 1.0},
        {"id": 7, "weight": 0.75, "loss": 2.0, "sq_norm": 1.0, "trust": 1.0},
    ]
    assert record.train_loss == 2.5


def test_a_tensor_of_many_blocks_is_measured_whole():
    # n = 2·150,001 elements; one update is 1 in the even places, the other in the odd ones:
    # Σw‖g‖² = 150,001; ḡ = 1/2 everywhere, ‖ḡ‖² = 300,002/4 = 75,000.5; sqrt(2)
    even = torch.arange(300_002) % 2 == 0
    server = Server({"w": torch.zeros(300_002)}, guard=None)
    record = server.step([{"w": even.float()}, {"w": (~even).float()}])
    assert record.statistics is not None
    assert record.statistics.sum_sq["w"] == pytest.approx(150_001, rel=1e-6)
    assert record.statistics.mean_sq["w"] == pytest.approx(75_000.5, rel=1e-6)
    assert record.gsi["w"] == pytest.approx(math.sqrt(2), rel=1e-6)
    assert torch.equal(server.params["w"], torch.full((300_002,), -0.5))
