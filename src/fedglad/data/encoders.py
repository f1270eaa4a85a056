"""Pretrained encoders: their files from the cache, and the tokenizers of all that can be named.

A source is `minilm`, which `fedglad data get` fetches; a folder with a tokenizer in it, as
transformers' `save_pretrained` leaves it; or a name on the model hub, which transformers fetches
once into a cache of its own. `tokenizers` and `transformers` (extra `text`) are imported on use.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedglad.data import store
from fedglad.data.sources import DataError, Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHED = ("minilm",)
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
)
CHUNK = 1000  # texts that are tokenised at once


@dataclass(frozen=True)
class Encoder:
    """An encoder's files: its configuration, its tensors by name, memory-mapped, its tokenizer."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokenizer_json: str

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """As the encoder was trained with, but it neither cuts nor pads."""
        made = _imported("tokenizers").Tokenizer.from_str(self.tokenizer_json)
        made.no_padding()
        made.no_truncation()
        return made


def open(name: str = "minilm") -> Encoder:
    """An encoder of the cache, fetched first if it is not there."""
    if name not in CACHED:
        raise DataError(f"unknown encoder {name!r}: the cache can have {', '.join(CACHED)}")
    arrays = store.load(name)
    tensors = {key: array for key, array in arrays.items() if key.startswith("tensor.")}
    return Encoder(
        config=json.loads(arrays["config.json"].tobytes()),
        tensors={key.removeprefix("tensor."): array for key, array in tensors.items()},
        tokenizer_json=arrays["tokenizer.json"].tobytes().decode(),
    )


def identity(source: str, *, progress: Progress | None = None) -> str:
    """What distinguishes a tokenizer from others of its name: a checksum if there are files."""
    if source in CACHED:
        return store.get(source, progress=progress).arrays["tokenizer.json"]["sha256"]
    if not (folder := Path(source).expanduser()).is_dir():
        return ""
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise DataError(f"{folder} holds no tokenizer: none of {', '.join(FILES)} is there")
    made = hashlib.sha256()
    for path in paths:
        made.update(f"{path.name}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return made.hexdigest()


def tokenise(source: str, texts: Sequence[str], length: int) -> tuple[Iterator[list[int]], int]:
    """The ids of each text, cut to `length`, and the id that pads."""
    encode, pad = _cached(source, length) if source in CACHED else _transformers(source, length)

    def rows() -> Iterator[list[int]]:
        for start in range(0, len(texts), CHUNK):
            yield from encode(list(texts[start : start + CHUNK]))
        # Its threads are gone in a forked process, which would wait for them, and says so.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    return rows(), pad


def _cached(source: str, length: int) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    encoder = open(source)
    tokenizer = encoder.tokenizer
    tokenizer.enable_truncation(max_length=length)

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts)]

    return encode, encoder.config["pad_token_id"]


def _transformers(source: str, length: int) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    local = (folder := Path(source).expanduser()).is_dir()
    transformers = _imported("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder) if local else source, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise DataError(
            f"no tokenizer {source!r}: {first}. It must be a folder, or a name on the model hub, "
            "which has to be within reach the first time; without a hub there are the presets "
            "20news-minilm and agnews-76k-minilm, and data.tokenizer = 'minilm' or 'words'"
        ) from None
    if tokenizer.pad_token_id is None:
        raise DataError(f"the tokenizer of {source} cannot pad: choose one of an encoder")

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, truncation=True, max_length=length)["input_ids"]

    return encode, tokenizer.pad_token_id


def _imported(module: str) -> Any:
    try:
        return __import__(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"texts need the package {error.name}: pip install 'fedglad[text]'"
        ) from None
