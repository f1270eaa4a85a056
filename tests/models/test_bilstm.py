"""The BiLSTM against torch's own over packed sequences; its vectors are constants."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedglad import Glad, Server
from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.core.layout import split
from fedglad.models.bilstm import BiLSTM
from fedglad.models.networks import bilstm
from fedglad.models.networks.bilstm import TextLSTM
from fedglad.models.networks.texts import PIECE, Partial, ends, in_pieces
from fedglad.rng import stream

WORDS, NUMBERS, HIDDEN, CLASSES, LENGTH = 50, 9, 7, 4, 24


def made(seed: int = 0, dropout: float = 0.2) -> TextLSTM:
    torch.manual_seed(seed)
    vectors = torch.randn(WORDS + 1, NUMBERS)
    vectors[0] = 0
    return TextLSTM(vectors, HIDDEN, dropout, CLASSES)


def texts(n: int, longest: int = LENGTH, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Texts of 1 to `longest` words, padded to LENGTH; the first has `longest`."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n, 1), generator=rng)
    lengths[0] = longest
    x = torch.randint(1, WORDS + 1, (n, LENGTH), generator=rng)
    x = x * (torch.arange(LENGTH) < lengths)
    return x.to(torch.int32), torch.randint(CLASSES, (n,), generator=rng)


class PlainLSTM(nn.Module):
    """As any script has it: packed, both directions all the way, the output at the last word."""

    def __init__(self, vectors: Tensor, hidden: int, dropout: float, classes: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding.from_pretrained(vectors)
        self.lstm = nn.LSTM(vectors.shape[1], hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(dim=1)
        packed = pack_padded_sequence(
            self.vectors(x), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.dense(self.dropout(states[torch.arange(len(x)), lengths - 1]))


def plain(model: TextLSTM) -> PlainLSTM:
    other = PlainLSTM(model.vectors, HIDDEN, model.dropout.p, CLASSES)
    other.load_state_dict({**model.state_dict(), "vectors.weight": model.vectors})
    return other


@pytest.mark.parametrize("longest", [LENGTH, 11, 1])
def test_scores_and_gradients_are_torchs(longest: int):
    model, (x, y) = made(dropout=0.0), texts(13, longest)
    other = plain(model)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(model.eval()(x), other.eval()(x), rtol=0, atol=1e-6)
    model.train()
    cross_entropy(model(x), y).backward()
    cross_entropy(other.train()(x), y).backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        assert wanted is not None
        if name == "lstm.weight_hh_l0_reverse":  # of a memory that is zero at the last word
            assert wanted.eq(0).all()
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-6)


def test_a_clients_round_is_torchs():
    """With dropout, drawn alike, and the paper's optimizer: Adam, amsgrad, weight decay 1e-4."""
    model, (x, y) = made(), texts(20)
    other = plain(model)
    client = Plain(
        optimizer="adam", lr=1e-3, amsgrad=True, weight_decay=1e-4, batch_size=8, epochs=2
    )
    bench = Workbench(copy.deepcopy(model))
    theta = bench.w.clone()
    bench.train(client, theta, {}, x, y, stream(1, "c"))
    rng = stream(1, "c")
    torch.manual_seed(rng.bit_generator.random_raw())
    optimizer = torch.optim.Adam(
        (p for p in other.parameters() if p.requires_grad), 1e-3, weight_decay=1e-4, amsgrad=True
    )
    other.train()
    for batch in client.batches(len(y), rng):
        optimizer.zero_grad()
        cross_entropy(other(x[batch]), y[batch]).backward()
        optimizer.step()
    theirs = dict(other.named_parameters())
    for name, value in bench.layout.views(bench.w).items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=0, atol=1e-5)
        assert not value.equal(model.state_dict()[name]), name


def test_a_batch_cut_to_its_longest_text_is_the_whole_one():
    model, (x, _) = made().eval(), texts(13, 9)
    whole = torch.cat([x, x.new_zeros(13, 100)], dim=1)
    torch.testing.assert_close(model(whole), model(x[:, :9]), rtol=0, atol=1e-6)
    alone = torch.cat([model(x[k : k + 1]) for k in range(13)])  # with no neighbours
    torch.testing.assert_close(model(x), alone, rtol=0, atol=1e-6)


def test_evaluation_by_length_gives_every_text_its_own_scores():
    model, (x, _) = made(), texts(3 * PIECE + 5)
    wanted = plain(model).eval()(x)
    torch.testing.assert_close(model.eval()(x), wanted, rtol=0, atol=1e-6)
    seen: list[Tensor] = []

    def watched(part: Tensor) -> Tensor:
        seen.append(ends(part))
        return part[:, :1].float()

    assert in_pieces(watched, x, ends(x)).equal(x[:, :1].float())
    assert [len(lengths) for lengths in seen] == [PIECE] * 3 + [5]
    assert torch.cat(seen).equal(ends(x).sort().values)
    assert in_pieces(watched, x).equal(x[:, :1].float())


def test_a_text_without_words_is_one_padding():
    model = made().eval()
    x = torch.zeros(2, LENGTH, dtype=torch.int32)
    x[1, 0] = 3
    word = embedding(x[:, :1], model.vectors)
    states = model.lstm(word)[0][:, 0]
    torch.testing.assert_close(model(x), model.dense(states), rtol=0, atol=1e-6)


# ----------------------------------------------------------------------- the vectors are constants


def test_the_vectors_are_not_in_the_layout():
    model = made()
    names = [
        *(f"lstm.{w}_l0{d}" for d in ("", "_reverse") for w in WEIGHTS),
        *("dense.weight", "dense.bias"),
    ]
    assert list(model.state_dict()) == [n for n, _ in model.named_parameters()] == names
    assert list(model.buffers()) == []
    layout, _, buffers = split(model)
    assert list(layout.names) == names
    assert buffers == {}
    assert model.constants == ("vectors",)


WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def test_the_published_size():
    model = TextLSTM(torch.zeros(2, 300), 300, 0.2, 20)
    # Each direction: 4·300 gates of 300 numbers, of 300 states and two biases; then 600·20 + 20.
    wanted = 2 * (1200 * 300 + 1200 * 300 + 2 * 1200) + 600 * 20 + 20
    assert sum(p.numel() for p in model.parameters()) == wanted == BiLSTM.parameters == 1_456_820


def test_copies_share_the_vectors_and_nothing_else():
    model, (x, _) = made(), texts(5)
    twin = copy.deepcopy({"here": [model]})["here"][0]
    assert twin.vectors is model.vectors
    before = model.eval()(x)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert model(x).equal(before)
    assert not twin.eval()(x).equal(before)


def test_the_vectors_follow_the_module():
    model, (x, _) = made(), texts(5)
    double = copy.deepcopy(model).double().eval()
    assert double.vectors.dtype == double(x).dtype == torch.float64
    assert model.vectors.dtype == torch.float32
    assert copy.deepcopy(model).to("meta").vectors.device.type == "meta"
    assert copy.deepcopy(model).to("cpu").vectors is model.vectors


def test_a_pickled_model_computes_the_same():
    model, (x, _) = made().eval(), texts(5)
    again = pickle.loads(pickle.dumps(model))
    assert again(x).equal(model(x))
    assert again.constants == ("vectors",)


class Tied(Partial):
    """Frozen, trained and tied tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)
        self.freeze()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))


def test_tied_constants_stay_one_tensor():
    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["middle.weight", "middle.bias"]
    for found in (model, copy.deepcopy(model), copy.deepcopy(model).double()):
        assert found.head.weight is found.embed.weight
        assert found(torch.tensor([1, 4])).shape == (2, 5)


# ------------------------------------------------------------------------- in the server, by hand


def test_the_indicator_has_the_trained_tensors_alone():
    """GSI of a group of two updates g, −g/2 is √(2 (|g|² + |g|²/4)) / |g − g/2| = √10."""
    model = made()
    server = Server(model, adapter=Glad())
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    record = server.step([update, {name: -value / 2 for name, value in update.items()}])
    assert list(record.gsi) == list(update)
    # W Σ w|g|² / |Σ w g|² with w = 1/2: (1 + 1/4)/2 / (1/4)² = 10
    assert list(record.gsi.values()) == pytest.approx([10**0.5] * len(update))
    after = model.state_dict()
    for name, value in server.state.items():
        torch.testing.assert_close(value, after[name] - 0.25, rtol=0, atol=1e-6)
    model.load_state_dict(server.state)


# -------------------------------------------------------------------------------- words to vectors


def test_the_table_has_each_word_its_vector(monkeypatch: pytest.MonkeyPatch):
    matrix = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    places = {"goal": 2, "puck": 0, "orbit": 3}
    known = {False: ["puck", "zebra", "orbit"], True: ["orbit"]}

    def vocabulary(name: str, *, strip: bool) -> list[str]:
        assert name == "20news"
        return known[strip]

    monkeypatch.setattr(bilstm.texts, "vocabulary", vocabulary)
    monkeypatch.setattr(bilstm.vectors, "load", lambda name: (places, matrix))
    bilstm.table.cache_clear()
    try:
        found = bilstm.table("glove", "20news", False)
        assert found.tolist() == [[0, 0, 0], [1, 2, 3], [0, 0, 0], [10, 11, 12]]
        assert bilstm.table("glove", "20news", True).tolist() == [[0, 0, 0], [10, 11, 12]]
        model: Any = BiLSTM(vectors="glove", hidden=5).build()
        assert model.vectors is found  # once for all models of a process
        assert model(torch.tensor([[1, 3, 2, 0]])).shape == (1, 20)
        known[False] = ["zebra"]
        bilstm.table.cache_clear()
        with pytest.raises(ValueError, match="none of 20news's 1 words has a vector in glove"):
            BiLSTM(vectors="glove").build()
    finally:
        bilstm.table.cache_clear()


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("hidden", 0, "1 or more"),
        ("dropout", 1.0, r"a share in \[0, 1\)"),
        ("dropout", -0.1, r"a share in \[0, 1\)"),
        ("classes", 1, "2 or more"),
    ],
)
def test_wrong_settings_are_refused(field: str, value: Any, must: str):
    with pytest.raises(ValueError, match=rf"BiLSTM\({field}={value}\): must be {must}"):
        BiLSTM(**{field: value})
