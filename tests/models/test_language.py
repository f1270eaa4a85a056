"""Models of language: shapes, what is trained, and that no position sees the next."""

import copy
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.models.language import CharLSTM, TinyGPT

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None,
    reason="transformers and peft are not installed",
)
LSTM = CharLSTM(vocabulary=11, embedding=3, hidden=8)
GPT = TinyGPT(vocabulary=11, length=6, width=8, heads=2)
IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [10, 9, 8, 0, 0, 0]])


def scores(given: object) -> Tensor:
    return given if isinstance(given, Tensor) else given.logits  # pyright: ignore


def loss(given: object, y: Tensor) -> Tensor:
    return cross_entropy(scores(given).flatten(0, 1), y.flatten(), ignore_index=-100)


@needs_transformers
@pytest.mark.parametrize("settings", [LSTM, GPT, TinyGPT(**vars(GPT) | {"lora_rank": 2})])
def test_every_position_is_scored_by_what_stands_before_it(settings: CharLSTM | TinyGPT):
    model = settings.build().eval()
    whole = scores(model(IDS))
    assert whole.shape == (2, 6, 11)
    other = IDS.clone()
    other[:, 4:] = 7
    changed = (scores(model(other)) - whole).abs().amax(dim=(0, 2))
    assert changed[:4].max() == 0
    assert changed[4:].min() > 1e-6


def test_an_lstm_is_its_equations():
    torch.manual_seed(0)
    model = CharLSTM(vocabulary=5, embedding=2, hidden=3, layers=1).build()
    named = dict(model.named_parameters())
    w, u, b, c = (
        named[f"lstm.{part}_l0"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    state, memory = torch.zeros(3), torch.zeros(3)
    expected: list[Tensor] = []
    for k in (4, 1):
        i, f, g, o = (w @ named["embedding.weight"][k] + b + u @ state + c).chunk(4)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        state = o.sigmoid() * memory.tanh()
        expected.append(named["dense.weight"] @ state + named["dense.bias"])
    assert torch.allclose(model(torch.tensor([[4, 1]]))[0], torch.stack(expected), atol=1e-6)


def test_padding_has_a_vector_of_zeros_that_is_never_trained():
    model = LSTM.build()
    bench = Workbench(model, loss=loss)
    theta, rng = bench.w.clone(), np.random.default_rng(0)
    y = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], 1)
    result = bench.train(
        Plain(optimizer="sgd", lr=0.5, batch_size=2, steps=3), theta, {}, IDS, y, rng
    )
    moved = bench.layout.views(result.delta)["embedding.weight"]
    assert moved[0].abs().max() == 0
    assert moved[1:5].abs().amin(1).min() > 0
    assert moved[7].abs().max() == 0  # an id that is not there
    assert bench.layout.views(theta)["embedding.weight"][0].abs().max() == 0


def test_many_texts_are_scored_in_pieces_to_the_same_numbers():
    model = LSTM.build().eval()
    x = torch.randint(0, 11, (600, 6), generator=torch.Generator().manual_seed(0))
    apart = torch.cat([model(part) for part in x.split(1)])
    assert torch.allclose(model(x), apart, atol=1e-6)


@needs_transformers
def test_a_gpt_gives_what_transformers_gives():
    model = GPT.build()
    kind = type(model(IDS)).__name__
    assert kind == "CausalLMOutputWithCrossAttentions"
    mask = (IDS != 0).long()
    named = model(**{"input_ids": IDS, "attention_mask": mask}).logits
    assert torch.allclose(named[0], model(IDS).logits[0], atol=1e-6)
    # 11·8 + 6·8 + 2 layers of (16 + 8·24 + 24 + 8·8 + 8 + 16 + 8·32 + 32 + 32·8 + 8) + 16
    assert sum(p.numel() for p in model.parameters()) == 88 + 48 + 2 * 872 + 16


@needs_transformers
def test_of_a_gpt_with_adapters_only_they_are_trained_and_sent():
    torch.manual_seed(0)
    model = TinyGPT(**vars(GPT) | {"lora_rank": 2}).build()
    torch.manual_seed(0)
    bare = GPT.build()
    # B starts at zero, so that the model starts as the one without; 2 layers of A (2, 8), B (24, 2)
    assert torch.equal(model(IDS).logits, bare(IDS).logits)
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sorted(sizes.values()) == [(2, 8), (2, 8), (24, 2), (24, 2)]
    assert all(".c_attn.lora_" in name for name in sizes)
    assert len(list(model.buffers())) == 0
    before = copy.deepcopy(model)
    bench = Workbench(model, loss=loss)
    theta, rng = bench.w.clone(), np.random.default_rng(0)
    client = Plain(optimizer="sgd", lr=0.5, batch_size=2, steps=3)
    result = bench.train(client, theta, {}, IDS, IDS.roll(-1, 1), rng)
    assert result.delta.abs().max() > 0
    assert sum(bench.layout.numels) == 2 * (2 * 8 + 24 * 2)
    for name, value in model.kept().items():  # pyright: ignore
        assert value.equal(before.kept()[name])  # pyright: ignore


@needs_transformers
def test_adapters_learn():
    torch.manual_seed(0)
    bench = Workbench(TinyGPT(**vars(GPT) | {"lora_rank": 4}).build(), loss=loss)
    x = torch.arange(6).repeat(8, 1) + 1
    client = Plain(optimizer="adam", lr=0.1, batch_size=8, steps=1)
    theta, rng = bench.w.clone(), np.random.default_rng(0)
    losses: list[float] = []
    for _ in range(40):
        result = bench.train(client, theta, {}, x, x + 1, rng)
        theta = theta - result.delta
        losses.append(result.loss)
    assert losses[-1] < losses[0] - 0.05  # little, as what they adapt is untrained


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CharLSTM(vocabulary=1), r"\(vocabulary=1\): must be 2 or more"),
        (lambda: CharLSTM(layers=0), r"\(layers=0\): must be 1 or more"),
        (lambda: TinyGPT(width=10), r"\(width=10\): must be a multiple of heads = 4"),
        (lambda: TinyGPT(heads=0), r"\(heads=0\): must be 1 or more"),
        (lambda: TinyGPT(lora_rank=-1), r"\(lora_rank=-1\): must be 0"),
    ],
)
def test_mistakes_in_settings(make: object, said: str):
    with pytest.raises(ValueError, match=said):
        make()  # pyright: ignore


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError, match=r"tiny-gpt needs transformers: pip install 'fedglad\[text\]'"
    ):
        GPT.build()


@needs_transformers
def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora_rank needs peft: pip install 'fedglad\[text\]'"):
        TinyGPT(lora_rank=2).build()


def test_an_lstm_loads_no_transformers():
    code = (
        "import sys; from fedglad.models.language import CharLSTM; CharLSTM().build(); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
