"""A bidirectional LSTM over word vectors that are not trained.

Only the states at a text's last word are wanted, so only they are computed: the forward direction
up to the longest text of the batch, the backward one, which begins at the last word, for a step.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from fedglad.data import texts, vectors
from fedglad.models.networks.texts import Partial, ends, in_pieces


@lru_cache(maxsize=2)
def table(name: str, data: str, strip: bool) -> Tensor:
    """The vector of every id: zeros for 0, which is padding, and for words that have none."""
    words = texts.vocabulary(data, strip=strip)
    places, matrix = vectors.load(name)
    known = [(k, places[word]) for k, word in enumerate(words, 1) if word in places]
    if not known:
        raise ValueError(f"none of {data}'s {len(words):,} words has a vector in {name}")
    ids, rows = (np.array(part, dtype=np.int64) for part in zip(*known, strict=True))
    values = np.zeros((len(words) + 1, matrix.shape[1]), np.float32)
    values[ids] = matrix[rows]
    return torch.from_numpy(values)


class TextLSTM(Partial):
    """Takes ids (b, L), followed by zeros, and gives scores (b, classes)."""

    def __init__(self, vectors: Tensor, hidden: int, dropout: float, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(vectors.shape[1], hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(2 * hidden, classes)
        self.vectors: Tensor
        self.keep("vectors", vectors)

    def forward(self, x: Tensor) -> Tensor:
        return self._scores(x) if self.training else in_pieces(self._scores, x, ends(x))

    def _scores(self, x: Tensor) -> Tensor:
        last = ends(x) - 1
        x = x[:, : int(last.max()) + 1]
        words, rows = embedding(x, self.vectors), torch.arange(len(x), device=x.device)
        states = torch.cat([self._forward(words)[rows, last], self._step(words[rows, last])], 1)
        return self.dense(self.dropout(states))

    def _forward(self, words: Tensor) -> Tensor:
        """All states of the forward direction."""
        start = words.new_zeros(1, len(words), self.lstm.hidden_size)
        return torch.lstm(
            words, (start, start), self._weights(""), True, 1, 0.0, self.training, False, True
        )[0]

    def _step(self, word: Tensor) -> Tensor:
        """The state of the backward direction after its first word: its memory was zero."""
        weight, _, bias, more = self._weights("_reverse")
        i, _, g, o = (linear(word, weight, bias) + more).chunk(4, dim=1)
        return o.sigmoid() * (i.sigmoid() * g.tanh()).tanh()

    def _weights(self, direction: str) -> list[Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [getattr(self.lstm, f"{name}_l0{direction}") for name in names]
