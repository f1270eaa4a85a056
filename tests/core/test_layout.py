"""Blocks tile the flat vector, pieces tile every tensor, and nothing else lies in between."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedglad import Server
from fedglad.core.aggregate import norms_sq
from fedglad.core.layout import BLOCK, LARGE, LARGEST_ROW, ROWS, Layout, split

ROW = ROWS[1][1]

EDGES = sorted(
    {
        max(0, edge + step)
        for edge in (
            0,
            ROW,
            2 * ROW,
            LARGE,
            LARGE + ROW,
            BLOCK,
            BLOCK + LARGE,
            2 * BLOCK,
            3 * BLOCK,
        )
        for step in (-ROW, -1, 0, 1, ROW)
    }
)
sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 2 * LARGE))
shapes = st.one_of(
    st.just(()),
    sizes.map(lambda n: (n,)),
    st.tuples(st.integers(0, 300), st.integers(1, 300)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 4)),
)
models = st.lists(shapes, min_size=1, max_size=8).filter(lambda m: any(0 not in s for s in m))
small = st.lists(
    st.one_of(st.just(()), st.integers(0, 600).map(lambda n: (n,)), st.just((LARGE + 1,))),
    min_size=1,
    max_size=6,
).filter(lambda m: any(0 not in s for s in m))


def named(shapes: list[tuple[int, ...]], seed: int | None = None) -> dict[str, Tensor]:
    """Tensors of these shapes: uninitialised, or normal numbers."""
    if seed is None:
        return {f"t{i}": torch.empty(shape) for i, shape in enumerate(shapes)}
    rng = np.random.default_rng(seed)
    normal = (rng.standard_normal(shape) for shape in shapes)
    return {f"t{i}": torch.as_tensor(x, dtype=torch.float32) for i, x in enumerate(normal)}


def covered(slices: list[slice]) -> list[tuple[int, int]]:
    """The slices joined where they meet; an overlap stays visible."""
    joined: list[tuple[int, int]] = []
    for part in sorted(slices, key=lambda s: (s.start, s.stop)):
        if joined and joined[-1][1] == part.start:
            joined[-1] = (joined[-1][0], part.stop)
        else:
            joined.append((part.start, part.stop))
    return joined


@given(models)
@example([(n,) for n in EDGES])
@example([(n,) for n in reversed(EDGES)])
@settings(max_examples=300)
def test_blocks_tile_the_vector_and_pieces_tile_every_tensor(model: list[tuple[int, ...]]):
    layout = Layout(named(model), {})
    assert covered([block.span for block in layout.blocks]) == [(0, layout.size)]
    assert layout.size % layout.row == 0
    pieces: list[list[slice]] = [[] for _ in model]
    for block in layout.blocks:
        start = block.span.start
        assert block.size == block.span.stop - start <= BLOCK
        assert start % layout.row == 0
        places = [piece.place for piece in block.pieces]
        assert covered([*places, *block.gaps]) == [(0, block.size)]
        for piece in block.pieces:
            assert piece.place.start % layout.row == 0
            assert start + piece.place.start == layout.starts[piece.index] + piece.span.start
            assert piece.place.stop - piece.place.start == piece.span.stop - piece.span.start
            pieces[piece.index].append(piece.span)
        if block.whole is not None:
            assert block.pieces == (block.whole,)
            assert not block.gaps
    for numel, spans in zip(layout.numels, pieces, strict=True):
        assert covered(spans) == ([(0, numel)] if numel else [])


@given(models)
@settings(max_examples=100)
def test_rows_belong_to_one_tensor_each(model: list[tuple[int, ...]]):
    layout = Layout(named(model), {})
    counts = [-(-n // layout.row) for n in layout.numels]
    assert sum(counts) * layout.row == layout.size
    owners = np.repeat(np.arange(len(model)), counts).astype(float)
    assert layout.per_tensor(np.ones_like(owners)).tolist() == counts
    assert layout.per_tensor(owners).tolist() == [k * count for k, count in enumerate(counts)]


@given(small, st.integers(0, 2**32))
@example([(BLOCK + 1,), (0,), (), (2 * BLOCK + ROW,), (LARGE - 1,)], 0)
@settings(max_examples=100)
def test_packing_and_viewing_gives_the_tensors_back_and_norms_agree_with_numpy(
    model: list[tuple[int, ...]], seed: int
):
    tensors = named(model, seed)
    layout = Layout(tensors, {})
    flat = layout.pack(tensors)
    views = layout.views(flat)
    for name, tensor in tensors.items():
        assert views[name].equal(tensor)
        assert views[name].shape == tensor.shape
        views[name].zero_()
    assert not flat.any(), "the padding is zero"

    exact = [np.square(x.numpy().astype(np.float64)).sum() for x in tensors.values()]
    found = norms_sq(layout, layout.pack(tensors))
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e11])
def test_norms_of_tiny_and_large_numbers_agree_with_numpy(scale: float):
    tensors = {name: x * scale for name, x in named([(3,), (ROW + 1,), (LARGE + 5,)], 1).items()}
    exact = [np.square(x.numpy().astype(np.float64)).sum() for x in tensors.values()]
    layout = Layout(tensors, {})
    np.testing.assert_allclose(norms_sq(layout, layout.pack(tensors)), exact, rtol=1e-6)


def test_views_write_through_to_the_vector():
    layout = Layout(named([(2, 3), ()]), {})
    flat = layout.zeros()
    layout.views(flat)["t1"].fill_(7)
    assert flat.nonzero().tolist() == [[ROWS[0][1]]]
    assert flat[ROWS[0][1]] == 7


@pytest.mark.parametrize(
    ("dtypes", "working"),
    [
        ((torch.float32,), torch.float32),
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_the_working_precision_is_float32_or_better(dtypes: Any, working: torch.dtype):
    layout = Layout({str(dtype): torch.zeros(2, dtype=dtype) for dtype in dtypes}, {})
    assert layout.dtype == layout.zeros().dtype == working


class Tied(nn.Module):
    """The embedding and the output layer share one weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.output = nn.Linear(3, 4, bias=False)
        self.output.weight = self.embedding.weight


def test_a_tied_parameter_exists_once_and_comes_back_under_both_names():
    model = Tied()
    layout, parameters, _ = split(model)
    assert layout.names == tuple(parameters) == ("embedding.weight", "norm.weight", "norm.bias")
    assert layout.aliases == {"output.weight": "embedding.weight"}
    server = Server(model)
    g = {name: torch.ones_like(x) for name, x in parameters.items()}
    g["output.weight"] = g["embedding.weight"]
    server.step([g, g])
    assert server.state.keys() == model.state_dict().keys()
    assert server.state["output.weight"].equal(model.embedding.weight.detach() - 1)
    assert server.state["output.weight"].equal(server.state["embedding.weight"])


def test_twins_that_differ_are_rejected():
    model = Tied()
    g = {name: torch.ones_like(x) for name, x in model.named_parameters()}
    record = Server(model).step([{**g, "output.weight": torch.zeros(4, 3)}])
    assert list(record.rejected.values()) == [
        "'output.weight' is tied to 'embedding.weight' and differs from it"
    ]


BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize("form", ["module", "dict", "numpy"])
def test_buffers_are_kept_apart_from_parameters(form: str):
    model: Any = Tied()
    if form != "module":
        model = {n: x.numpy() if form == "numpy" else x for n, x in model.state_dict().items()}
    layout, parameters, buffers = split(model)
    assert layout.buffers.keys() == buffers.keys() == BUFFERS
    assert layout.buffers["norm.num_batches_tracked"] == ((), torch.int64)
    assert not parameters.keys() & buffers.keys()


def test_a_module_decides_by_what_it_registered_not_by_names():
    model = nn.Module()
    model.register_parameter("running_mean", nn.Parameter(torch.ones(2)))
    model.register_buffer("weight", torch.ones(3))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    layout, _, buffers = split(model)
    assert layout.names == ("running_mean",)
    assert list(buffers) == ["weight"]


def test_names_of_buffers_override_what_would_be_guessed():
    state = {"w": torch.ones(2), "ema": torch.ones(2), "running_mean": torch.ones(2)}
    layout, _, buffers = split(state, buffers=["ema"])
    assert layout.names == ("w", "running_mean")
    assert list(buffers) == ["ema"]


@pytest.mark.parametrize(
    ("model", "buffers", "message"),
    [
        ({"w": torch.ones(2)}, ["v"], "buffers= names 'v', which the model does not have"),
        ({}, None, "the model has no parameters, so there is nothing to average"),
        ({"w": torch.ones(0)}, None, "the model has no parameters"),
        ({"running_mean": torch.ones(2)}, None, "(seen: ['running_mean'])"),
        ({"w": torch.ones(2, dtype=torch.int64)}, [], "parameter 'w' is torch.int64"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, None, "parameter 'w' is torch.complex64"),
    ],
)
def test_a_model_that_cannot_be_averaged_is_refused(model: Any, buffers: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        split(model, buffers)


def test_the_description_lists_every_tensor_as_json_types():
    layout, _, _ = split({"w": torch.ones(2, 3).half(), "n.num_batches_tracked": torch.tensor(1)})
    assert layout.describe() == [
        ["w", [2, 3], "float16", "parameter"],
        ["n.num_batches_tracked", [], "int64", "buffer"],
    ]


@pytest.mark.parametrize("shapes", [[(100, 640), (3,)], [(1000, 1001), (7,)], [(2100, 2003), (5,)]])
def test_the_larger_the_model_the_longer_its_rows_and_the_sums_hold(shapes: list[tuple[int, ...]]):
    tensors = named(shapes, 3)
    layout = Layout(tensors, {})
    total = sum(x.numel() for x in tensors.values())
    wanted = [row for most, row in ROWS if total < most] or [LARGEST_ROW]
    assert layout.row == wanted[0]
    assert layout.size - total < layout.row * len(shapes)
    exact = [np.square(x.numpy().astype(np.float64)).sum() for x in tensors.values()]
    np.testing.assert_allclose(norms_sq(layout, layout.pack(tensors)), exact, rtol=1e-6)
    updates = [{n: x * scale for n, x in tensors.items()} for scale in (1, 2, -3)]
    by_list, by_stream = Server(tensors), Server(tensors)
    by_list.step(updates)
    by_stream.step(iter(updates))
    for name, value in by_list.params.items():
        assert value.equal(by_stream.params[name])
