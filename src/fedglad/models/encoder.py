"""Pretrained encoders of Hugging Face's transformers, with a head that classifies texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fedglad.core.checks import check
from fedglad.data import encoders

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A Hugging Face encoder and a classification head: DistilBERT, MiniLM or any other.

    22,720,916 parameters in 105 tensors for MiniLM and 20 classes; DistilBERT's encoder has
    66,362,880. The head starts at random. With `lora` (Hu et al. 2021, arXiv:2106.09685) a matrix
    W of queries or values becomes W + BA, with B and A of that rank; only they and the head are
    trained, all else is constant, and not sent. A folder has config.json and weights; `random`
    weights need its config.json alone.

    >>> Encoder().needs, Encoder(source="distilbert-base-uncased", lora=8).reads  # cache, data
    (('minilm',), {'tokenizer': 'distilbert-base-uncased'})
    """

    source: Annotated[str, "minilm, a name of the Hugging Face hub, or a folder"] = "minilm"
    classes: Annotated[int, "outputs"] = 20
    mask: Annotated[bool, "leave padding out; false: it is attended, as in the paper's runs"] = (
        False
    )
    lora: Annotated[int, "train only adapters of this rank, and the head; 0: everything"] = 0
    weights: Annotated[Literal["pretrained", "random"], "where the encoder starts"] = "pretrained"

    parameters: ClassVar[int] = 22_720_916
    """Of the defaults: to count them, nobody need have the weights."""

    def __post_init__(self) -> None:
        check(
            self,
            source=(bool(self.source), "a name or a folder"),
            classes=2,
            lora=(self.lora >= 0, "0 (no adapters) or more"),
        )

    def build(self) -> nn.Module:
        """The model; what is not pretrained starts as transformers has it."""
        from fedglad.models.networks.encoder import build

        return build(self)

    @property
    def arithmetic(self) -> int:
        """2: since a batch without padding is trained in pieces of like length, to other bits."""
        return 2 if self.mask else 1

    @property
    def needs(self) -> tuple[str, ...]:
        """What has to be in the cache."""
        return tuple({self.source} & {*encoders.CACHED})

    @property
    def reads(self) -> dict[str, Any]:
        """What the settings of its data should be."""
        return {"tokenizer": self.source}
