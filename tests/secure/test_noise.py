"""One masked update says nothing: it is as uniform noise is, whatever the update.

Keys are drawn from a fixed seed here, so that the tests pass or fail for good. Their hundred or so
bounds are at z = 6 standard deviations, or a p of 1e-9: one in four million seeds would fail.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from fedglad.secure import FixedPoint, masks
from fedglad.secure.client import purpose
from secure.support import Drive

SIZE = 1 << 17  # elements; a MB of bytes
Z = 6.0


def ramp() -> np.ndarray:
    """All but random: every element is the one before and a bit."""
    return np.linspace(-1e4, 1e4, SIZE)


UPDATES = {
    "zero": np.zeros(SIZE),
    "ramp": ramp(),
    "sparse": np.where(np.arange(SIZE) % 1000, 0.0, 1e5),
    "smallest": np.full(SIZE, 2.0**-32),
}


@pytest.fixture(scope="module", autouse=True)
def same_keys() -> Iterator[None]:
    rng = np.random.default_rng(20_17)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "new_key", lambda: rng.bytes(masks.KEY))
        yield


@pytest.fixture(scope="module", params=UPDATES)
def masked(request: pytest.FixtureRequest, same_keys: None) -> tuple[np.ndarray, list[np.ndarray]]:
    """An update, and what its client sent of it in two rounds, with others who sent it too."""
    update = UPDATES[request.param]
    sent: list[np.ndarray] = []
    for t in (1, 2):
        drive = Drive([update, update, update], session=f"run 7, round {t}")
        asked = drive.up_to_masked()
        sent.append(drive.masked[1])
        total = drive.round.unmask({k: drive.call("unmask", k, asked[k]) for k in asked})
        assert np.abs(total.body - 3 * update).max() < 1e-4, "the masks do not cancel"
    return update, sent


def z_of_chi_square(counts: np.ndarray, expected: float) -> float:
    """How far counts are from equal ones, in standard deviations (Wilson and Hilferty)."""
    freedom = counts.size - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def z_of_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Of independent vectors it is about normal."""
    return float(np.corrcoef(a, b)[0, 1]) * math.sqrt(a.size)


def test_the_test_sees_what_is_not_noise():
    plain = FixedPoint(clients=3).encode(ramp())
    data = np.frombuffer(plain.tobytes(), np.uint8)
    assert z_of_chi_square(np.bincount(data, minlength=256), data.size / 256) > 100
    assert z_of_correlation(plain.view(np.int64).astype(float), ramp()) > 100
    assert kolmogorov(plain) > 100


def test_every_byte_is_as_likely_as_any_other(masked):
    for sent in masked[1]:
        data = np.frombuffer(sent.tobytes(), np.uint8).reshape(-1, 8)
        for place in range(8):  # also the highest, where an update that is not masked has zeros
            counts = np.bincount(data[:, place], minlength=256)
            assert abs(z_of_chi_square(counts, SIZE / 256)) < Z


def kolmogorov(values: np.ndarray) -> float:
    """√n times the largest distance from the uniform distribution."""
    ordered = np.sort(values).astype(np.float64) / 2.0**64
    places = np.arange(1, values.size + 1) / values.size
    return math.sqrt(values.size) * float(np.abs(ordered - places).max())


def test_elements_are_uniform(masked):
    # Of uniform ones P(√n D > c) is about 2 exp(−2c²): 1e-9 at c = 3.27.
    assert all(kolmogorov(sent) < 3.27 for sent in masked[1])


def test_bits_are_even_and_neighbours_differ(masked):
    for sent in masked[1]:
        bits = np.unpackbits(np.frombuffer(sent.tobytes(), np.uint8))
        assert abs(bits.mean() - 0.5) < Z * 0.5 / math.sqrt(bits.size)
        noise = sent.astype(np.float64)
        assert abs(z_of_correlation(noise[1:], noise[:-1])) < Z


def test_it_has_nothing_to_do_with_the_update(masked):
    update, sent = masked
    for one in sent:
        signed = one.view(np.int64).astype(np.float64)
        assert abs(signed.mean()) < Z * 2.0**64 / math.sqrt(12 * SIZE), "it shows a constant"
        if update.std() > 0:
            assert abs(z_of_correlation(signed, update)) < Z
            assert abs(z_of_correlation(one.astype(np.float64), update)) < Z


def test_two_maskings_of_one_update_have_nothing_in_common(masked):
    _, (first, second) = masked
    assert abs(z_of_correlation(first.astype(float), second.astype(float))) < Z
    # The difference, in which the update would cancel, is noise as well.
    assert kolmogorov(first - second) < 3.27
    assert (first == second).sum() <= 1


def test_single_numbers_are_noise_too():
    drive = Drive([[0.0]] * 3)
    asked = drive.up_to_shares()
    client = drive.client(1)
    client.receive(asked[1])
    _, numbers = client.mask(np.zeros(1, np.uint64), [0] * 4096)
    data = np.frombuffer(masks.as_bytes(numbers), np.uint8)
    assert abs(z_of_chi_square(np.bincount(data, minlength=256), data.size / 256)) < Z


def test_without_one_of_its_masks_it_is_still_noise():
    """The server knows all but the self mask, as when all the others have left and said all."""
    update = np.zeros(SIZE)
    drive = Drive([update] * 3)
    asked = drive.up_to_shares()
    states = {k: dict(drive.states[k]) for k in (1, 2, 3)}
    _, sent = drive.mask(1, asked[1])
    vector = masks.Vector(sent, [])
    keys = dict(zip(states[1]["places"], states[1]["mask_keys"], strict=True))
    for k in (2, 3):
        pair = purpose(drive.round.session, "mask", 1, k)
        key = masks.agree(states[k]["mask_private"], keys[1], pair)
        stream = masks.Vector.zeros(SIZE, 1)
        stream.mask(key)
        vector.body -= stream.body  # client 1 adds, as it is the first of each pair
    assert kolmogorov(vector.body) < 3.27
    own = masks.Vector.zeros(SIZE, 1)
    own.mask(masks.derived(states[1]["seed"], purpose(drive.round.session, "seed", 1)))
    assert (vector.body == own.body).all(), "and the self mask is all that is left"
