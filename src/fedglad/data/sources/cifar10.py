"""CIFAR-10: 60,000 colour photographs of 32×32 pixels in 10 classes (Krizhevsky 2009)."""

import json
from pathlib import Path

import numpy as np

from fedglad.data.sources import DataError

ROW = 1 + 3 * 32 * 32  # a label, then the red, green and blue pixels


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Images as uint8 (n, 3, 32, 32), labels as int64."""
    arrays: dict[str, np.ndarray] = {}
    for part, batches in (("train", "data_batch_*.bin"), ("test", "test_batch.bin")):
        paths = sorted(raw.glob(batches))
        rows = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, ROW)
        arrays[f"{part}_x"] = np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32)
        arrays[f"{part}_y"] = rows[:, 0].astype(np.int64)
    return arrays


def batches_of_png(folder: Path) -> None:
    """Lays the package's pictures, one image a row of 1,024 pixels, as the official batches."""
    labels = {
        part: json.loads((folder / f"{part}_lables.json").read_text()) for part in ("train", "test")
    }
    for path in sorted(folder.glob("*_batch*.png")):
        pixels = _pixels(path)
        left = labels["test" if path.stem == "test_batch" else "train"]
        y = np.array(left[: len(pixels)], dtype=np.uint8)
        del left[: len(pixels)]
        if len(y) != len(pixels):
            raise DataError(f"{path.name} has {len(pixels)} images, but there are {len(y)} labels")
        rows = np.concatenate([y[:, None], pixels.transpose(0, 2, 1).reshape(-1, ROW - 1)], 1)
        path.with_suffix(".bin").write_bytes(rows.tobytes())
        path.unlink()


def _pixels(path: Path) -> np.ndarray:
    """The pixels of a picture, (rows, columns, red green blue)."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise DataError(f"{path.name} cannot be decoded: {error}") from None
