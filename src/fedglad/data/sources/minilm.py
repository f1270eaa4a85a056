"""MiniLM-L6 (Wang et al. 2020), trained on for sentences: an encoder of 22.7 million parameters."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

WEIGHTS = "model.safetensors"
TEXTS = ("config.json", "tokenizer.json", "vocab.txt")


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Every tensor under its name with "tensor." before it; the other files as bytes."""
    texts = {name: np.fromfile(raw / name, dtype=np.uint8) for name in TEXTS}
    tensors = load_file(raw / WEIGHTS)
    return texts | {f"tensor.{name}": tensor for name, tensor in tensors.items()}
