"""Handwritten digits, small enough to travel with the library (Alpaydin & Kaynak 1998)."""

from importlib import resources

import numpy as np
from numpy.typing import NDArray


def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """1,797 images in [0, 1], shape (1797, 8, 8), and labels 0..9 (doi:10.24432/C50P49)."""
    packed = resources.files("fedglad.data").joinpath("digits.npz")
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = arrays["images"].astype(np.float32) / np.float32(16)
        return images, arrays["labels"].astype(np.int64)
