"""Models of language, which score the next token at each position: their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class CharLSTM:
    """An embedding, two layers of LSTM, dense: scores (n, L, vocabulary) of ids (n, L).

    LEAF's model for its Shakespeare, Caldas et al. 2018, arXiv:1812.01097, after McMahan et al.
    2017, but for the vocabulary, which has an id for padding. Its vector is zeros and stays so.

    >>> parameters = [p.numel() for p in CharLSTM().build().parameters()]
    >>> len(parameters), sum(parameters)  # 81 · 8 + 4 · 256 · (8 + 256 + 2 + 512 + 2) + 257 · 81
    (11, 820185)
    """

    vocabulary: Annotated[int, "ids, that of padding, 0, among them; shakespeare has 81"] = 81
    embedding: Annotated[int, "numbers for an id"] = 8
    hidden: Annotated[int, "numbers in the state of a layer"] = 256
    layers: Annotated[int, "of LSTM"] = 2

    def __post_init__(self) -> None:
        check(self, vocabulary=2, embedding=1, hidden=1, layers=1)

    def build(self) -> nn.Module:
        """The model, initialised by torch's own rules."""
        from fedglad.models.networks.language import Characters

        return Characters(self)


@dataclass(frozen=True, kw_only=True)
class TinyGPT:
    """A transformer of GPT-2's kind, small and untrained: transformers' own, and its output.

    Radford et al. 2019, built from a configuration: nothing is downloaded. The scores are
    `.logits` of what it gives, (n, L, vocabulary) of ids (n, L); it also takes `input_ids` and
    `attention_mask` by name. With `lora_rank` (Hu et al. 2021, arXiv:2106.09685) the matrices
    c_attn of all layers become W + BA, with B and A of that rank; only they are trained, all else
    is constant, and not sent. What they adapt is untrained, so they learn little: this is for
    trying things out. No dropout.

    >>> model = TinyGPT(vocabulary=10, length=8, width=8, heads=2).build()
    >>> import torch
    >>> model(torch.arange(8).view(1, 8)).logits.shape
    torch.Size([1, 8, 10])
    """

    vocabulary: Annotated[int, "ids; shakespeare has 81"] = 81
    length: Annotated[int, "ids of an input at most"] = 80
    layers: Annotated[int, "of attention"] = 2
    width: Annotated[int, "numbers for an id, a multiple of heads"] = 64
    heads: Annotated[int, "of a layer"] = 4
    lora_rank: Annotated[int, "train only adapters of this rank; 0: everything"] = 0

    def __post_init__(self) -> None:
        width = (
            self.width >= 1 and not self.width % max(self.heads, 1),
            f"a multiple of heads = {self.heads}",
        )
        rank = (self.lora_rank >= 0, "0 (no adapters) or more")
        check(self, vocabulary=2, length=1, layers=1, heads=1, width=width, lora_rank=rank)

    def build(self) -> nn.Module:
        """The model, initialised by transformers' own rules."""
        from fedglad.models.networks.gpt import GPT

        return GPT(self)
