"""Stored bytes to a model's inputs: by hand, against one image at a time, and in the long run."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedglad.data.images import CIFAR10, MNIST, FashionMNIST
from fedglad.data.pixels import Pixels

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def photographs(n: int, channels: int = 3, side: int = 32) -> Tensor:
    numbers = torch.Generator().manual_seed(7)
    shape = (n, channels, side, side)
    return torch.randint(1, 256, shape, generator=numbers, dtype=torch.uint8)


def test_bytes_become_numbers_between_0_and_1():
    x = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    # 51/255 = 0.2, 102/255 = 0.4
    for training in (True, False):
        assert torch.equal(Pixels()(x, training), torch.tensor([[[[0, 0.2], [0.4, 1]]]]))
    assert x.dtype == torch.uint8  # and is as it was


def test_normalised_channel_by_channel():
    x = torch.tensor([51, 102]).view(1, 2, 1, 1).to(torch.uint8)
    found = Pixels(mean=(0.1, 0.5), std=(0.5, 0.2))(x, False)
    # (0.2 − 0.1)/0.5 = 0.2, (0.4 − 0.5)/0.2 = −0.5
    torch.testing.assert_close(found.flatten(), torch.tensor([0.2, -0.5]))


def test_a_test_image_is_never_changed_and_draws_nothing():
    x = photographs(5)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = Pixels(mean=MEAN, std=STD, shift=4, mirror=True, cutout=16)(x, False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found, Pixels(mean=MEAN, std=STD)(x, True))


def one_by_one(x: Tensor, shift: int, cutout: int, seed: int) -> Tensor:
    """The same draws, used for one image after the other with plain slices."""
    torch.manual_seed(seed)
    n, _, height, width = x.shape
    tops, lefts = (torch.randint(2 * shift + 1, (n, 1)).flatten() for _ in range(2))
    mirrored = torch.randint(2, (n, 1)).flatten()
    rows, columns = (torch.randint(side, (n, 1)).flatten() for side in (height, width))
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (MEAN, STD))
    found: list[np.ndarray] = []
    for k in range(n):
        image = np.pad(x[k].numpy(), ((0, 0), (shift, shift), (shift, shift)))
        image = image[:, tops[k] : tops[k] + height, lefts[k] : lefts[k] + width]
        if mirrored[k]:
            image = image[:, :, ::-1]
        image = image.astype(np.float32) / np.float32(255)
        image = (image - mean) / std
        top, left = int(rows[k]) - cutout // 2, int(columns[k]) - cutout // 2
        image[:, max(top, 0) : top + cutout, max(left, 0) : left + cutout] = 0
        found.append(image)
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_is_augmented_as_its_images_one_by_one(seed: int):
    x = photographs(40)
    torch.manual_seed(seed)
    found = Pixels(mean=MEAN, std=STD, shift=4, mirror=True, cutout=16)(x, True)
    assert torch.equal(found, one_by_one(x, 4, 16, seed))


def test_images_need_not_be_square():
    x = photographs(6)[:, :, :20]
    torch.manual_seed(1)
    found = Pixels(mean=MEAN, std=STD, shift=2, mirror=True, cutout=6)(x, True)
    assert torch.equal(found, one_by_one(x, 2, 6, 1))


def test_every_shift_is_as_likely_and_half_are_mirrored():
    # One bright pixel in the middle of 9 × 9: where it lands tells the shift.
    n, x = 40_000, torch.zeros(40_000, 1, 9, 9, dtype=torch.uint8)
    x[:, :, 4, 4] = 255
    torch.manual_seed(0)
    landed = Pixels(shift=4)(x, True).sum(dim=0).squeeze()
    # 81 places, n/81 = 494 each, standard deviation 22; five of them are 111.
    assert (landed - n / 81).abs().max() < 111
    x.zero_()[:, :, 4, 0] = 255
    mirrored = Pixels(mirror=True)(x, True)[:, 0, 4, 8].sum()
    assert abs(mirrored - n / 2) < 5 * (n / 4) ** 0.5


def test_cutout_covers_what_it_should_in_the_mean():
    # A side of 32 pixels, a square of 16 around a pixel i: i = 0 covers rows 0 … 7, 8 of them;
    # i = 1 covers 9, … up to 16 for i = 8 … 24; i = 25 covers 17 … 31, 15, … i = 31 covers 9.
    # Sum over i: (8 + … + 15) + 17·16 + (15 + … + 9) = 92 + 272 + 84 = 448; the mean is 14.
    torch.manual_seed(0)
    cut = Pixels(cutout=16)(photographs(20_000, 1), True) == 0
    covered = cut.sum(dim=(1, 2, 3)).float()
    assert abs(covered.mean() / (14 * 14) - 1) < 0.01
    assert covered.max() == 256
    assert covered.min() == 64


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST, CIFAR10])
def test_settings_are_those_of_every_partitioned_set(cls: type):
    found = cls()
    assert (found.clients, found.partition, found.alpha, found.seed) == (100, "label-skew", 0.1, 0)
    with pytest.raises(ValueError, match="did you mean 'dirichlet'"):
        cls(partition="dirichlt")
