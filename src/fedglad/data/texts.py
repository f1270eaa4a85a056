"""20 Newsgroups and AG News: texts as token ids, tokenised once (`tokens.py`).

A sample is int32 (length,): the ids of a text's first tokens, filled up at the end with padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedglad.core.checks import check
from fedglad.data import encoders, tokens
from fedglad.data.sources import DataError, Progress
from fedglad.data.split import Split

if TYPE_CHECKING:
    import numpy as np

    from fedglad.data.federation import Partitioned


@dataclass(frozen=True, kw_only=True)
class Texts(Split):
    """What the text sets have in common: `tokenizer`, and the `length` to which texts are cut."""

    source: ClassVar[str] = ""
    """The set's name in the cache."""

    tokenizer: Annotated[
        str, "the model's: minilm, words (for bilstm), a folder, or a name on the model hub"
    ] = "minilm"
    length: Annotated[int, "tokens of a text that are kept, those that frame it among them"] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, length=(self.length >= 3, "3 or more: two tokens frame a text"))
        if not self.tokenizer:
            raise ValueError(f"{type(self).__name__}(tokenizer=''): name one, such as minilm")

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be in the cache for it, by name."""
        return (self.source, *({self.tokenizer} & {*encoders.CACHED}))

    def arrays(self, *, progress: Progress | None = None) -> dict[str, np.ndarray]:
        """Ids, their number in each text, and labels, as `fedglad.data.tokens` has them."""
        return tokens.load(
            self.source,
            tokenizer=self.tokenizer,
            length=self.length,
            strip=getattr(self, "strip", False),
            progress=progress,
        )

    def load_federation(self) -> Partitioned:
        """The ids with their owners; fetched and tokenised when asked for the first time."""
        return self.partitioned(self.arrays())


@dataclass(frozen=True, kw_only=True)
class TwentyNews(Texts):
    """Usenet posts of 1993 in 20 groups (Lang 1995): 11,314 + 7,532 texts.

    >>> TwentyNews(tokenizer="words", strip=True).needs  # what is fetched: no encoder's tokenizer
    ('20news',)
    """

    samples: ClassVar[int | None] = 11_314
    source: ClassVar[str] = "20news"

    strip: Annotated[
        bool, "headers, quotes and signatures taken off, which tell the group by themselves"
    ] = False


@dataclass(frozen=True, kw_only=True)
class AGNews(Texts):
    """Short news in four classes (Zhang et al. 2015): 120,000 + 7,600 texts, title and all.

    >>> AGNews(clients=1000).needs  # what is fetched
    ('agnews', 'minilm')
    """

    samples: ClassVar[int | None] = 120_000
    source: ClassVar[str] = "agnews"


@dataclass(frozen=True, kw_only=True)
class AGNews76k(Texts):
    """A part of AG News, no uniform sample: 76,306 of 120,000 + 7,600 texts; not its results.

    >>> AGNews76k.samples, AGNews76k().needs  # what is fetched
    (76306, ('agnews-76k', 'minilm'))
    """

    samples: ClassVar[int | None] = 76_306
    source: ClassVar[str] = "agnews-76k"


SETS: dict[str, type[Texts]] = {cls.source: cls for cls in (TwentyNews, AGNews, AGNews76k)}


def vocabulary(set_name: str, *, strip: bool = False) -> list[str]:
    """The words that the tokenizer `words` knows of a set; the word k has the id k + 1.

    They are those of the training texts, stop words and rare words left out, most frequent first.
    """
    if set_name not in SETS:
        raise DataError(f"{set_name!r} has no words: choose from {', '.join(SETS)}")
    return tokens.vocabulary(set_name, strip=strip)
