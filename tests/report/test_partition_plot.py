"""The picture of a partition: a real PNG, and its colours."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedglad.data.split import Split
from fedglad.report.plots.partition import png

COUNTS = np.array([[8, 0, 0], [4, 4, 0], [1, 1, 2]])


def skewed(clients: int, classes: int) -> np.ndarray:
    labels = np.repeat(np.arange(classes), 60_000 // classes)
    owners = Split(clients=clients).owners(labels)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in owners])


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (100, 10), (2500, 10), (20, 100)])
def test_a_png_is_drawn(tmp_path: Path, clients, classes):
    from matplotlib.image import imread

    path = tmp_path / "picture"
    png(skewed(clients, classes), path, title=r"natural, by the keys in $a\keys\x$.txt")
    image = imread(path, format="png")
    assert image.shape[1] == 1500
    assert len(np.unique(image[..., 0])) > 20  # shades of the colour bar, at least


def test_darker_cells_have_larger_shares(tmp_path: Path):
    from matplotlib.image import imread

    png(np.array([[10, 0], [0, 10]]), tmp_path / "a.png")
    blue = imread(tmp_path / "a.png")[..., :3]
    dark = np.argwhere(np.abs(blue - np.array([8, 48, 107]) / 255).max(axis=2) < 0.02)
    # Client 0's class 0 is above on the left, client 1's class 1 below on the right; the colour
    # bar stands to the right of both.
    left, right = (dark[(dark[:, 1] > low) & (dark[:, 1] < low + 400)] for low in (200, 800))
    assert left[:, 0].max() <= right[:, 0].min()


def test_without_matplotlib_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"plots need matplotlib: pip install 'fedglad"):
        png(COUNTS, tmp_path / "a.png")
