"""Small federations that can be learnt, one a task, and the score of the best constant guess."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fedglad.core import batch
from fedglad.tasks import Task

SIZES = (9, 20, 9, 14, 20, 9)
"""Samples of the clients: some are equal, and the batches of eight are not."""

TEST = 40

SETTINGS: dict[str, Any] = {
    "rounds": 6,
    "sampler.clients_per_round": 4,
    "client.batch_size": 8,
    "client.epochs": 2,
    "client.optimizer": "sgd",
    "server.name": "sgd",
    "server.lr": 1.0,
    "average.name": "none",
    "engine.name": "serial",
}


class Own:
    """A federation of any trees: it has nothing but what it must have."""

    def __init__(self, x: Any, y: Any, sizes: Sequence[int] = SIZES) -> None:
        ends = np.cumsum(sizes)
        self.clients = len(sizes)
        self.parts = [slice(int(e) - n, int(e)) for e, n in zip(ends, sizes, strict=True)]
        self.held = slice(int(ends[-1]), None)
        self.x, self.targets = x, y

    def size(self, k: int) -> int:
        return self.parts[k].stop - self.parts[k].start

    def client(self, k: int) -> tuple[Any, Any]:
        return self._rows(self.parts[k])

    def test(self) -> tuple[Any, Any]:
        return self._rows(self.held)

    def _rows(self, part: slice) -> tuple[Any, Any]:
        x, y = (batch.tree_map(lambda leaf: leaf[part], t) for t in (self.x, self.targets))
        return x, y


N = sum(SIZES) + TEST


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plane() -> tuple[Tensor, Tensor]:
    x = drawn(1, N, 5)
    return x, x @ drawn(2, 5, 3)


def classes() -> Own:
    x, scores = plane()
    return Own(x, scores.argmax(dim=1))


def several() -> Own:
    x, scores = plane()
    return Own(x, (scores > 0.5).long())


def numbers() -> Own:
    x, scores = plane()
    return Own(x, scores[:, 0] + 3)


def pixels() -> Own:
    x = drawn(3, N, 1, 4, 4)
    y = (x[:, 0] > -0.5).long() + (x[:, 0] > 0.5).long()
    y[:, 0, 0] = 255  # a corner that nobody has named
    return Own(x, y)


def sequences(length: int = 7, tokens: int = 6) -> Tensor:
    """Each token but one in ten follows from the one before it."""
    rng = np.random.default_rng(4)
    rows = [rng.integers(tokens, size=N)]
    for _ in range(length - 1):
        chance = rng.integers(tokens, size=N)
        rows.append(np.where(rng.random(N) < 0.1, chance, (rows[-1] * 5 + 1) % tokens))
    return torch.from_numpy(np.stack(rows, axis=1))


def characters() -> Own:
    ids = sequences()
    y = ids[:, 1:].clone()
    y[::5, 4:] = -100  # padding
    return Own(ids[:, :-1], y)


def ids_alone() -> Own:
    return Own(sequences(), None)


def masked_ids() -> Own:
    ids, mask = sequences(), torch.ones(N, 7, dtype=torch.int64)
    mask[::5, 4:] = 0
    return Own({"input_ids": ids, "attention_mask": mask}, None)


def pairs() -> Own:
    x, scores = plane()
    return Own((x[:, :2], x[:, 2:].numpy().astype(np.float64)), scores.argmax(dim=1).to(torch.int8))


def named() -> Own:
    (left, right), y = (lambda own: (own.x, own.targets))(pairs())
    return Own({"left": left, "right": right}, y)


class Two(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.dense(torch.cat([left, right], dim=1))


class Bigram(nn.Module):
    """Scores of the next token by the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense = nn.Embedding(6, 8), nn.Linear(8, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.embed(ids))


class Characters(nn.Module):
    """An LSTM over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(6, 8), nn.LSTM(8, 16, batch_first=True)
        self.dense = nn.Linear(16, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.lstm(self.embed(ids))[0])


def one() -> nn.Module:
    return nn.Linear(5, 1)


def three() -> nn.Module:
    return nn.Linear(5, 3)


def convolution() -> nn.Module:
    return nn.Conv2d(1, 3, 1)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 6, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # Written out, attention can also be put side by side.
    given: dict[str, Any] = {**sizes, **drops, "attn_implementation": "eager"}
    return GPT2LMHeadModel(GPT2Config(**given))


def lora() -> nn.Module:
    """The base is frozen, and only the adapters train."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), config)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class Doubled(Task):
    """An own task: it calls the model as it likes."""

    score = "error"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(2 * model(x).squeeze(1), y)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return {"error": (float((2 * model(x).squeeze(1) - y).abs().sum()), len(y))}


def majority(y: Tensor) -> float:
    counts = y[y >= 0].bincount()
    return int(counts.max()) / int(counts.sum())


def median(y: Tensor) -> float:
    return float((y - y.median()).abs().mean())


def everything(y: Tensor) -> float:
    """Micro-F1 of always saying yes: all that is there is TP, and the others are FP."""
    share = float(y.double().mean())
    return 2 * share / (1 + share)


def largest(y: Tensor) -> float:
    """Mean IoU of the most frequent class everywhere: that of the others is 0."""
    counted = y[y != 255]
    return majority(counted) / len(counted.unique())


def unigram(y: Tensor) -> float:
    """Perplexity of the tokens' own frequencies."""
    p = y[:, 1:].flatten().bincount().double()
    p = p[p > 0] / p.sum()
    return math.exp(-float((p * p.log()).sum()))


@dataclass(frozen=True)
class Case:
    data: Callable[[], Own]
    model: Callable[[], nn.Module]
    guess: Callable[[Tensor], float]
    task: Any = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batched: bool = True


CASES = {
    "classification": Case(classes, lambda: nn.Linear(5, 3), majority),
    "tuple": Case(pairs, Two, majority),
    "dict": Case(named, Two, majority),
    "multilabel": Case(
        several, lambda: nn.Linear(5, 3), everything, overrides={"task.name": "multilabel"}
    ),
    "regression": Case(
        numbers,
        one,
        median,
        overrides={"task.name": "regression", "client.lr": 0.1},
    ),
    "huber": Case(
        numbers,
        one,
        median,
        overrides={"task.name": "regression", "task.kind": "huber"},
    ),
    "segmentation": Case(
        pixels,
        convolution,
        largest,
        overrides={"task.name": "segmentation", "task.ignore": 255, "client.lr": 2.0},
    ),
    "next-token": Case(
        characters, Bigram, majority, overrides={"task.name": "next-token", "client.lr": 1.0}
    ),
    "lstm": Case(
        characters,
        Characters,
        majority,
        overrides={"task.name": "next-token", "client.lr": 2.0},
        batched=False,
    ),
    "gpt2": Case(
        ids_alone,
        gpt2,
        unigram,
        overrides={"task.name": "causal-lm", "client.lr": 0.5},
    ),
    "own": Case(numbers, one, median, task=Doubled()),
    "function": Case(
        lambda: (lambda own: Own(own.x, own.targets.unsqueeze(1)))(numbers()),
        one,
        median,
        task=mse_loss,
    ),
}
