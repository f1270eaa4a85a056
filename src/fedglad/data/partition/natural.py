"""The partition that the data came with."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedglad.data.partition.base import Partition, check, ranks


@dataclass(frozen=True, kw_only=True, eq=False)
class Natural(Partition):
    """The clients that the data came from: every distinct key is one, in the order of the keys.

    `key` has one key a sample (a writer, a user, a hospital): an array, or a file, .npy or else
    text with one key a line. Keys in a text are sorted as text, so 10 comes before 2.

    >>> parts = Natural(key=np.array(["eve", "bob", "eve"])).split(np.array([7, 8, 9]), 0, None)
    >>> [part.tolist() for part in parts]
    [[1], [0, 2]]
    """

    counts_clients = True
    key: np.ndarray | str | Path = ""

    def __post_init__(self) -> None:
        if isinstance(self.key, str) and not self.key:
            raise ValueError(
                "natural needs a key for each sample: set key to a file, .npy or text with one "
                "key a line"
            )

    def split(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator | None
    ) -> list[np.ndarray]:
        """The indices of each key's samples, ascending; `clients` is the number of keys, or 0."""
        keys = self.key if isinstance(self.key, np.ndarray) else _read_keys(Path(self.key))
        check(labels, 1)
        if keys.shape != labels.shape:
            raise ValueError(f"{len(labels)} samples need as many keys, got the shape {keys.shape}")
        codes, sizes = ranks(keys)
        if clients not in (0, len(sizes)):
            raise ValueError(
                f"clients={clients}, but there are {len(sizes)} distinct keys, and each is a "
                f"client: set clients to {len(sizes)}, or to 0 for as many as there are"
            )
        return np.split(np.argsort(codes, kind="stable"), np.cumsum(sizes)[:-1])


def _read_keys(path: Path) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        with path.open(encoding="utf-8-sig") as lines:
            keys = [line.strip() for line in lines]
    except (OSError, ValueError) as error:
        raise ValueError(f"the keys in {path} cannot be read: {error}") from None
    if "" in keys:
        raise ValueError(f"line {keys.index('') + 1} of {path} is empty: every sample needs a key")
    return np.array(keys)
