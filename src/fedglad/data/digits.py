"""Handwritten digits, small enough to travel with the library (Alpaydin & Kaynak 1998)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedglad.data.split import CLIENTS, Split
from fedglad.rng import stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedglad.data.federation import Partitioned

TRAIN = 1437  # of 1,797: four fifths


def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """1,797 images in [0, 1], shape (1797, 8, 8), and labels 0..9 (doi:10.24432/C50P49)."""
    packed = resources.files("fedglad.data").joinpath("digits.npz")
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = arrays["images"].astype(np.float32) / np.float32(16)
        return images, arrays["labels"].astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Digits(Split):
    """The bundled digits: 1,437 images of 1×8×8 pixels among the clients, 360 for the test.

    `seed` also says which images are for the test.

    >>> federation = Digits(clients=20, partition="iid").load_federation()
    >>> inputs, labels = federation.client(3)  # what client 3 trains on
    >>> inputs.shape, federation.size(3)
    (torch.Size([72, 1, 8, 8]), 72)
    """

    samples = TRAIN
    clients: Annotated[int, CLIENTS] = 50

    def load_federation(self) -> Partitioned:
        """The images with their owners; the same ones for the same seed."""
        images, labels = load()
        order = stream(self.seed, "split").permutation(len(labels))
        x, y = images[order, None], labels[order]
        train = {"train_x": x[:TRAIN], "train_y": y[:TRAIN]}
        return self.partitioned({**train, "test_x": x[TRAIN:], "test_y": y[TRAIN:]})
