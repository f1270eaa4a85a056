"""What a partition is, and what the partitions have in common."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from fedglad.core import checks


class Partition(Protocol):
    """The settings of a partition, and the partition itself."""

    counts_clients: ClassVar[bool] = False
    """Whether it knows itself how many clients there are; `split` then also takes 0 of them."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The indices of each client's samples."""
        ...


def ranks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers in the order of the values, and how often each distinct value is there.

    Unsigned 16-bit ones where that is enough: NumPy sorts them in linear time.
    """
    if values.dtype.kind in "iu" and len(values):
        low, high = values.min(), values.max()
        if int(high) - int(low) < 1 << 16:  # counting is faster than sorting
            # 127 − (−128) is no 8-bit number; an unsigned one is never below its minimum.
            wide = np.int64 if values.dtype.kind == "i" else values.dtype
            codes = (values.astype(wide, copy=False) - low.astype(wide)).astype(np.uint16)
            sizes = np.bincount(codes)
            return codes, sizes[sizes > 0]
    if values.dtype.kind == "U":  # hashing texts is 5 times as fast as sorting them
        texts = values.tolist()
        rank = {text: i for i, text in enumerate(sorted(set(texts)))}
        codes = np.fromiter(map(rank.__getitem__, texts), np.int64, len(texts))
        sizes = np.bincount(codes)
    else:
        _, codes, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return codes.astype(np.uint16) if len(sizes) <= 1 << 16 else codes, sizes


def grouped(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """All indices, class after class, shuffled within each; and the classes' sizes."""
    codes, sizes = ranks(labels)
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(codes[shuffled], kind="stable")], sizes


def deal(by_class: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Each client's indices: of every class in turn the next counts[client, class] ones."""
    # Client k's samples of class c lie together, after those of the clients before it: so the
    # blocks are moved from class order to client order with one shift each.
    source = np.cumsum(counts.T).reshape(counts.T.shape).T - counts
    target = np.cumsum(counts).reshape(counts.shape) - counts
    shift = np.repeat((target - source).T.ravel(), counts.T.ravel())
    shift += np.arange(len(by_class))
    by_client = np.empty_like(by_class)
    by_client[shift] = by_class
    return np.split(by_client, np.cumsum(counts.sum(axis=1))[:-1])


def check(labels: np.ndarray, clients: int) -> int:
    """The number of samples, if it is enough for so many clients."""
    if labels.ndim != 1:
        raise ValueError(f"labels must be one vector, got the shape {labels.shape}")
    if clients < 1:
        raise ValueError(f"clients={clients}: a partition needs at least one client")
    if clients > len(labels):
        raise ValueError(
            f"{clients} clients cannot share {len(labels)} samples: lower clients to at most "
            f"{len(labels)}"
        )
    return len(labels)


def check_parts(parts: Sequence[Any], samples: int, clients: int) -> list[np.ndarray]:
    """What the partition of a user gave, if it is right; `clients` is 0 if any number is right."""
    arrays = [np.asarray(part) for part in parts]
    if clients and len(arrays) != clients:
        raise ValueError(f"split gave {len(arrays)} parts, and there are {clients} clients")
    for k, part in enumerate(arrays):
        if part.ndim != 1 or part.dtype.kind not in "iu" or not len(part):
            raise ValueError(
                f"split gave client {k} the shape {part.shape} of {part.dtype}: it must be one "
                "vector of integers, the places of its samples, and not empty"
            )
        if part.min() < 0 or part.max() >= samples:
            raise ValueError(f"split gave client {k} places outside of 0 … {samples - 1}")
    times = np.bincount(np.concatenate(arrays), minlength=samples)
    if times.max() > 1:
        raise ValueError(f"split gave sample {times.argmax()} away {times.max()} times")
    return arrays


def check_alpha(settings: Partition, alpha: float) -> None:
    must = "above 0 and finite, in 1e-100 … 1e100; small values are skewed, large ones near to iid"
    good = 1e-100 <= alpha <= 1e100  # beyond, α·p could underflow to 0 or overflow
    checks.check(settings, alpha=(good, must))
