"""MNIST: 70,000 handwritten digits of 28×28 grey pixels (LeCun, Cortes & Burges 1998)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedglad.data.sources import DataError


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Images as uint8 (n, 1, 28, 28), labels as int64."""
    arrays: dict[str, np.ndarray] = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_x"] = read_idx(raw / f"{prefix}-images-idx3-ubyte")[:, None]
        arrays[f"{part}_y"] = read_idx(raw / f"{prefix}-labels-idx1-ubyte").astype(np.int64)
    return arrays


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The bytes of an idx file in its shape.

    The header is two zeros, the type (8: unsigned bytes), the number of dimensions, and each
    dimension as a big-endian 32-bit integer.
    """
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) < 4 or content[:3].tolist() != [0, 0, 8]:
        raise DataError(f"{path} is no idx file of bytes: it starts with {bytes(content[:4])!r}")
    start = 4 + 4 * int(content[3])
    shape = content[4:start].view(">u4").tolist()
    if len(content) != start + int(np.prod(shape)):
        raise DataError(f"{path} has {len(content)} bytes, which the shape {shape} does not fill")
    return content[start:].reshape(shape)
