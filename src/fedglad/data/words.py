"""Texts as words: lower-case, without stop words and words that are rare in the training texts."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

RARE = 5  # words with fewer occurrences in the training texts are left out
WORD = re.compile(r"[^\W_]+")
STOP = frozenset(
    WORD.findall("""
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she
    her hers herself it its itself they them their theirs themselves what which who whom this that
    these those am is are was were be been being have has had having do does did doing a an the and
    but if or because as until while of at by for with about against between into through during
    before after above below to from up down in out on off over under again further then once here
    there when where why how all any both each few more most other some such no nor not only own
    same so than too very s t can will just don should now d ll m o re ve y ain aren couldn didn
    doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn
    """)
)
"""English words without a topic, as in NLTK; of "don't" the halves: an apostrophe parts words."""


def words(text: str) -> Iterator[str]:
    """The words of a text that are no stop words: runs of letters and digits.

    >>> list(words("It's the NHL's 2nd goal -- don't_ask!"))
    ['nhl', '2nd', 'goal', 'ask']
    """
    return (word for word in WORD.findall(text.lower()) if word not in STOP)


def vocabulary(texts: Iterable[str], *, rare: int = RARE) -> list[str]:
    """The words that occur `rare` times or more, the most frequent first, equals by the alphabet.

    >>> vocabulary(["goal puck goal", "Puck orbit zebra apple", "apple zebra"], rare=2)
    ['apple', 'goal', 'puck', 'zebra']
    """
    counts = Counter(word for text in texts for word in words(text))
    kept = [(word, count) for word, count in counts.items() if count >= rare]
    return [word for word, _ in sorted(kept, key=lambda item: (-item[1], item[0]))]


def encode(
    texts: Sequence[str], known: Sequence[str], length: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids of each text's first `length` known words, padded with 0, and how many there are.

    The word k of the vocabulary has the id k + 1; words out of it are left out.

    >>> ids, lengths = encode(["puck goal orbit puck", ""], ["goal", "puck"], 4)
    >>> ids.tolist(), lengths.tolist()
    ([[2, 1, 2, 0], [0, 0, 0, 0]], [3, 0])
    """
    index = {word: k for k, word in enumerate(known, start=1)}
    rows = ([index[word] for word in words(text) if word in index][:length] for text in texts)
    return padded(rows, len(texts), length, 0)


def padded(
    rows: Iterable[Sequence[int]], count: int, length: int, pad: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows of ids of at most `length`, filled up at the end, and how long each was."""
    ids = np.full((count, length), pad, dtype=np.int32)
    lengths = np.zeros(count, dtype=np.int32)
    for k, row in enumerate(rows):
        ids[k, : len(row)] = row
        lengths[k] = len(row)
    return ids, lengths
