"""Steps of text models against the raw loop, one thread: `make bench BENCH=text`.

Batches of 32 texts. The raw loop is transformers' own classifier, padded to 128 tokens with its
attention mask, `torch.optim.AdamW(foreach=True)`, `clip_grad_norm_` and the linear schedule; and
`nn.LSTM` over packed sequences with `torch.optim.Adam`. Ours is the client's round that every
engine calls.

    fedglad data get minilm
    python benchmarks/text.py [--rounds 2] [--repeats 5] [--quick] [--profile]

`--rounds` counts local steps. `--profile` says where the time of one of our steps goes.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from _shared import best, load, machine, options, table
from steps import share
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.models.encoder import Encoder
from fedglad.models.networks.bilstm import TextLSTM
from fedglad.models.networks.encoder import TextEncoder
from fedglad.rng import stream

BATCH, LENGTH, WORDS, CLASSES = 32, 128, 30_000, 20
TEXTS = {"128 each": (128, 128), "20 to 128": (20, 128), "12 to 64": (12, 64)}

ENCODER = Plain(
    optimizer="adamw", lr=5e-5, batch_size=BATCH, clip_norm=1.0, schedule="linear", warmup=0.06
)
LSTM = Plain(optimizer="adam", lr=1e-3, amsgrad=True, weight_decay=1e-4, batch_size=BATCH)


def texts(n: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, most + 1, (n, 1), generator=generator)
    x = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    x = x.masked_fill(torch.arange(LENGTH) >= lengths, 0)
    return x.int(), torch.randint(CLASSES, (n,), generator=generator)


class Packed(nn.Module):
    """The BiLSTM as one writes it: the states at the last word, by packed sequences."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = vectors
        self.lstm = nn.LSTM(vectors.shape[1], 300, batch_first=True, bidirectional=True)
        self.dropout, self.dense = nn.Dropout(0.2), nn.Linear(600, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1)
        words = embedding(x, self.vectors)
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.dense(self.dropout(states[torch.arange(len(x)), lengths - 1]))


def raw_encoder(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def run() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 5e-5, weight_decay=0, foreach=True)
        steps = -(-len(y) // BATCH)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, steps)
        for batch in torch.randperm(len(y)).split(BATCH):
            ids = x[batch].long()
            optimizer.zero_grad()
            scores = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
            cross_entropy(scores, y[batch]).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    return run


def raw_lstm(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def run() -> None:
        optimizer = torch.optim.Adam(
            model.parameters(), 1e-3, amsgrad=True, weight_decay=1e-4, foreach=True
        )
        for batch in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    return run


def our_loop(model: nn.Module, client: Plain, x: Tensor, y: Tensor) -> Callable[[], Any]:
    bench = Workbench(model)
    theta = bench.w.clone()
    return lambda: bench.train(client, theta, {}, x, y, stream(1, "benchmark"))


def main() -> None:
    parser = options("Steps of text models against the raw loop", rounds=2)
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes")
    chosen = parser.parse_args()
    steps, repeats = (1, 2) if chosen.quick else (chosen.rounds, chosen.repeats)
    torch.set_num_threads(1)
    print(f"{machine()}, transformers {transformers.__version__}; one thread; load {load()}")

    encoder = Encoder(classes=CLASSES, mask=True).build()
    assert isinstance(encoder, TextEncoder)
    vectors = torch.randn(WORDS, 100, generator=torch.Generator().manual_seed(0))
    lstm = TextLSTM(vectors, 300, 0.2, CLASSES)
    rows: list[tuple[str, ...]] = []
    for told, (least, most) in TEXTS.items():
        for name, own, client, raw, usual in (
            ("MiniLM", encoder, ENCODER, raw_encoder, copy.deepcopy(encoder.model).train()),
            ("BiLSTM, 100d", lstm, LSTM, raw_lstm, Packed(vectors)),
        ):
            n = steps * (1 if own is encoder else 5)  # which takes a tenth of the time
            x, y = texts(n * BATCH, least, most)
            ours = our_loop(copy.deepcopy(own), client, x, y)
            runs = {"raw": raw(usual, x, y), "ours": ours}
            for run in runs.values():
                run()
            seconds = best(runs, repeats)
            theirs, mine = (n * BATCH / seconds[key] for key in ("raw", "ours"))
            rows.append(
                (name, told, f"{theirs:.1f}", f"{mine:.1f}", f"{mine / theirs:.2f}", load()[:4])
            )
            if chosen.profile:
                print(f"\n{name}, {told}, our steps:")
                share(ours)
    head = ("model", "words a text", "raw loop, texts/s", "ours, texts/s", "× raw loop", "load")
    table(head, rows)
    print(f"\nbest of {repeats}, in turn, {steps} steps each ({5 * steps} of the BiLSTM)")


if __name__ == "__main__":
    main()
