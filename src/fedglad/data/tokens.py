"""Token ids of a text set: made once, then opened as memory-mapped arrays.

| array | what it has |
|---|---|
| `train_x`, `test_x` | int32 (n, length): ids, filled up at the end with the tokenizer's padding |
| `train_length`, `test_length` | int32 (n,): how many ids come before the padding |
| `train_y`, `test_y` | int64 (n,): labels |
"""

import re

import numpy as np

from fedglad.data import encoders, store, words
from fedglad.data.sources import Progress, joined, parted

WORDS = "words"
RULE = f"rare {words.RARE}"
FORMAT = 1  # of what is made here; raised when it changes
QUOTED = re.compile(r"writes in|writes:|wrote:|says:|said:|^In article|^Quoted from|^\||^>")


def load(
    name: str,
    *,
    tokenizer: str,
    length: int,
    strip: bool = False,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """The ids of the set `name`; `tokenizer` is "words" or a source of `fedglad.data.encoders`."""
    rule = RULE if tokenizer == WORDS else encoders.identity(tokenizer, progress=progress)
    settings = {"tokenizer": tokenizer, "length": length, "strip": strip}
    settings |= {"rule": rule, "format": FORMAT}

    def make(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made: dict[str, np.ndarray] = {}
        texts = {part: _texts(arrays, part, strip) for part in ("train", "test")}
        known = words.vocabulary(texts["train"]) if tokenizer == WORDS else []
        for part, some in texts.items():
            if tokenizer == WORDS:
                ids, lengths = words.encode(some, known, length)
            else:
                rows, pad = encoders.tokenise(tokenizer, some, length)
                ids, lengths = words.padded(rows, len(some), length, pad)
            made |= {f"{part}_x": ids, f"{part}_length": lengths, f"{part}_y": arrays[f"{part}_y"]}
        return made

    return store.derive(name, "tokens", settings, make, progress=progress)


def vocabulary(name: str, *, strip: bool = False, progress: Progress | None = None) -> list[str]:
    """The words of a set's training texts; the word k has the id k + 1."""

    def make(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        content, at = joined(words.vocabulary(_texts(arrays, "train", strip)))
        return {"words": content, "words_at": at}

    settings = {"strip": strip, "rule": RULE, "format": FORMAT}
    arrays = store.derive(name, "vocabulary", settings, make, progress=progress)
    return parted(arrays["words"], arrays["words_at"])


def stripped(post: str) -> str:
    r"""A post without its header, signature and quotes, as scikit-learn takes them off.

    >>> stripped("From: Ann\nSubject: ice\n\nBob writes:\n> Any ice?\nThere is.\n\n-- \nAnn")
    'There is.\n'
    """
    body = post.partition("\n\n")[2]
    lines = body.strip().split("\n")
    last = next((k for k in reversed(range(len(lines))) if not lines[k].strip().strip("-")), 0)
    kept = lines[:last] if last > 0 else body.split("\n")
    return "\n".join(line for line in kept if not QUOTED.search(line))


def _texts(arrays: dict[str, np.ndarray], part: str, strip: bool) -> list[str]:
    texts = parted(arrays[f"{part}_text"], arrays[f"{part}_at"])
    return [stripped(text) for text in texts] if strip else texts
