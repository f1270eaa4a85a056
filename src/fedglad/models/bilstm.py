"""A bidirectional LSTM over word vectors that are not trained: its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class BiLSTM:
    """A BiLSTM over frozen GloVe vectors: both states at a text's last word, dropout, dense.

    The second model of FedGLAD's text experiments. As with packed sequences, padding is never
    read. A word without a vector is zeros. 1,456,820 parameters in 10 tensors for vectors of 300
    numbers and 20 classes; the vectors are not among them, and are not sent.

    >>> BiLSTM(data="agnews", classes=4).reads  # what its data must be
    {'source': 'agnews', 'tokenizer': 'words', 'strip': False}
    """

    vectors: Annotated[str, "of the words: glove-6b-300d, or others of `fedglad data list`"] = (
        "glove-6b-300d"
    )
    data: Annotated[str, "the data set whose vocabulary it knows"] = "20news"
    strip: Annotated[bool, "whether data.strip is set"] = False
    hidden: Annotated[int, "numbers in the state of a direction"] = 300
    dropout: Annotated[float, "before the last layer"] = 0.2
    classes: Annotated[int, "outputs"] = 20

    parameters: ClassVar[int] = 1_456_820
    """Of the defaults: to count them, nobody need have the vectors."""

    def __post_init__(self) -> None:
        dropout = (0 <= self.dropout < 1, "a share in [0, 1)")
        check(self, hidden=1, dropout=dropout, classes=2)

    def build(self) -> nn.Module:
        """The model, initialised by torch's own rules."""
        from fedglad.models.networks.bilstm import TextLSTM, table

        vectors = table(self.vectors, self.data, self.strip)
        return TextLSTM(vectors, self.hidden, self.dropout, self.classes)

    @property
    def needs(self) -> tuple[str, ...]:
        """What has to be in the cache."""
        return (self.vectors,)

    @property
    def reads(self) -> dict[str, Any]:
        """What the settings of its data must be: an id is a word of one vocabulary."""
        return {"source": self.data, "tokenizer": "words", "strip": self.strip}
