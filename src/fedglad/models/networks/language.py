"""An LSTM over characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedglad.models.networks.texts import PIECE, in_pieces

if TYPE_CHECKING:
    from fedglad.models.language import CharLSTM


class Characters(nn.Module):
    """Takes ids (n, L), in which 0 is padding, and gives scores (n, L, vocabulary)."""

    def __init__(self, settings: CharLSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.embedding, padding_idx=0)
        self.lstm = nn.LSTM(settings.embedding, settings.hidden, settings.layers, batch_first=True)
        self.dense = nn.Linear(settings.hidden, settings.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self._scores(x) if self.training else in_pieces(self._scores, x, piece=4 * PIECE)

    def _scores(self, x: Tensor) -> Tensor:
        return self.dense(self.lstm(self.embedding(x))[0])
