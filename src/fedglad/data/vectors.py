"""Word vectors: GloVe, from the cache."""

import numpy as np
from numpy.typing import NDArray

from fedglad.data import store
from fedglad.data.sources import RECIPES, DataError, parted

NAMES = tuple(name for name in RECIPES if name.startswith("glove-"))


def load(name: str) -> tuple[dict[str, int], NDArray[np.float32]]:
    """Each word's row, and the rows, memory-mapped; fetched first if they are not here.

    Words are lower-case and in the order of their frequency where the vectors were trained. A place
    may have the frequent words alone: `len` of the first is their number.
    """
    if name not in NAMES:
        raise DataError(f"unknown word vectors {name!r}: choose from {', '.join(NAMES)}")
    arrays = store.load(name)
    words = parted(arrays["words"], arrays["words_at"])
    return {word: row for row, word in enumerate(words)}, arrays["vectors"]
