"""Fixed point, Shamir's shares and masks, by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.secure import FixedPoint, Refused, masks, shamir
from fedglad.secure.fixed import as_bytes, from_bytes


def test_a_value_is_a_whole_number_of_steps():
    # 2 bits after the point: steps of 1/4. 1.3 is 5.2 steps, so 5; −0.75 is −3, or 2^64 − 3.
    point = FixedPoint(clients=1, fraction=2)
    coded = point.encode(np.array([1.3, -0.75]))
    assert coded.tolist() == [5, 2**64 - 3]
    assert point.decode(coded).tolist() == [1.25, -0.75]


def test_a_sum_cannot_wrap_around():
    # Of 3 clients each has at most (2^63 − 1)/3 = 3074457345618258602 steps, here whole ones.
    point = FixedPoint(clients=3, fraction=0)
    assert point.limit == 3074457345618258602
    most = 3.0744573456182e18
    for sign in (1, -1):
        total = sum(point.encode(np.array([sign * most])) for _ in range(3))
        assert point.decode(np.asarray(total)).tolist() == pytest.approx([3 * sign * most])
    with pytest.raises(Refused, match=r"'w' has a value of 3.075e\+18.*hold at most 3.074e\+18"):
        point.encode(np.array([0.0, -3.075e18]), "'w'")


@pytest.mark.parametrize("fraction", [0, 8, 32, 52, 62])
@pytest.mark.parametrize("clients", [1, 2, 3, 7, 1000])
def test_the_largest_value_that_is_taken_is_within_the_limit(clients: int, fraction: int):
    point = FixedPoint(clients=clients, fraction=fraction)
    value = point.limit / 2**fraction
    for _ in range(40):  # down from above the limit, by single floats
        try:
            integer = int(point.encode(np.array([value])).view(np.int64)[0])
        except Refused:
            value = float(np.nextafter(value, 0))
            continue
        assert abs(integer) * clients < 2**63
        return
    raise AssertionError("values well within the limit are refused")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float):
    point = FixedPoint(clients=2)
    with pytest.raises(Refused, match="'a' has NaN or inf"):
        point.encode(np.array([1.0, bad]), "'a'")
    with pytest.raises(Refused, match="norm is"):
        point.encode_numbers([bad], "norm")


def test_single_numbers_are_wide():
    # 1e18 and 1e-18 in one sum, each to 2^-128; the limit for 2 clients is 2^126.
    point = FixedPoint(clients=2)
    sums = [
        (a + b) % 2**256
        for a, b in zip(
            point.encode_numbers([1e18, 1e-18]), point.encode_numbers([-1.0, 1e-18]), strict=True
        )
    ]
    assert point.decode_numbers(sums) == [1e18 - 1, 2e-18]
    assert from_bytes(as_bytes(sums)) == sums
    with pytest.raises(
        Refused, match=r"is 1e\+38, and sums over 2 clients hold at most 8.507e\+37"
    ):
        point.encode_numbers([1e38])


def test_two_of_three_shares_are_a_line():
    # 5 + 7x at 1, 2, 3: 12, 19, 26; by 1 and 3: (3·12 − 1·26)/(3 − 1) = 5
    assert [shamir.polynomial([5, 7], x) for x in (1, 2, 3)] == [12, 19, 26]
    values = {1: (12).to_bytes(33, "big"), 3: (26).to_bytes(33, "big")}
    assert shamir.joined(values) == (5).to_bytes(32, "big")


def test_the_field_is_prime():
    # Fermat's test to 20 bases, and no smaller candidate above 2^256 passes two of them.
    p = shamir.PRIME
    assert all(pow(a, p - 1, p) == 1 for a in range(2, 22))
    below = range(2**256 + 1, p, 2)
    assert not [n for n in below if pow(2, n - 1, n) == 1 == pow(3, n - 1, n)]


@given(st.binary(min_size=32, max_size=32), st.data())
def test_any_t_shares_give_the_secret_and_fewer_do_not(secret: bytes, data: st.DataObject):
    n = data.draw(st.integers(2, 9))
    t = data.draw(st.integers(2, n))
    shares = shamir.split(secret, t, range(1, n + 1))
    chosen = data.draw(st.permutations(range(1, n + 1)))
    assert shamir.joined({k: shares[k] for k in chosen[:t]}) == secret
    assert shamir.joined({k: shares[k] for k in chosen[: t - 1]}) != secret


def test_fewer_shares_fit_any_secret():
    # With t − 1 = 2 shares of 3 needed, there is a third share for whatever secret one likes:
    # they say nothing. By Lagrange f(0) = 3 f(1) − 3 f(2) + f(3).
    shares = shamir.split(bytes(32), 3, [1, 2, 3])
    f1, f2 = (int.from_bytes(shares[k], "big") for k in (1, 2))
    for wanted in (0, 1, 2**256 - 1):
        third = (wanted - 3 * f1 + 3 * f2) % shamir.PRIME
        made = {1: shares[1], 2: shares[2], 3: third.to_bytes(33, "big")}
        assert shamir.joined(made) == wanted.to_bytes(32, "big")


def test_shares_differ_from_time_to_time():
    first, second = (shamir.split(bytes(32), 2, [1, 2]) for _ in range(2))
    assert not {*first.values()} & {*second.values()}


def test_bad_shares_are_refused():
    with pytest.raises(ValueError, match="31 bytes, not 32"):
        shamir.split(bytes(31), 2, [1, 2])
    with pytest.raises(ValueError, match="3 of 2 shares"):
        shamir.split(bytes(32), 3, [1, 2])
    for places in ([1, 1], [0, 1]):
        with pytest.raises(ValueError, match="differ"):
            shamir.weights_at_0(places)


def test_both_of_a_pair_have_one_key_for_one_purpose():
    a, b, c = (masks.new_key() for _ in range(3))
    key = masks.agree(a, masks.public(b), "x")
    assert key == masks.agree(b, masks.public(a), "x")
    others = [masks.agree(a, masks.public(b), "y"), masks.agree(a, masks.public(c), "x")]
    assert len({key, *others}) == 3
    for bad in (bytes(32), b"short"):  # the first makes every secret 0
        with pytest.raises(Refused, match="public key"):
            masks.agree(a, bad, "x")


def test_a_mask_is_the_keystream_of_aes_256():
    # NIST SP 800-38A F.5.5 has another counter; of a counter at 0, block k is AES(key, k), and
    # AES-256 of 0 under FIPS 197's key 00 01 … 1f is known from any implementation of ECB.
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import ECB

    key = bytes(range(32))
    fips = (
        Cipher(AES(key), ECB())
        .encryptor()
        .update(bytes.fromhex("00112233445566778899aabbccddeeff"))
    )
    assert fips.hex() == "8ea2b7ca516745bfeafc49904b496089"  # FIPS 197, C.3
    blocks = b"".join(k.to_bytes(16, "big") for k in range(4))
    stream = Cipher(AES(key), ECB()).encryptor().update(blocks)
    vector = masks.Vector.zeros(4, 1)
    vector.mask(key)
    assert vector.numbers == [int.from_bytes(stream[:32], "little")]
    assert vector.body.tobytes() == stream[32:]


@pytest.mark.parametrize("size", [0, 1, 7, masks.CHUNK // 8, masks.CHUNK // 8 + 1, 100_003])
def test_a_mask_comes_off_again(size: int):
    rng, key = np.random.default_rng(size), masks.new_key()
    body = rng.integers(0, 2**64, size, dtype=np.uint64)
    vector = masks.Vector(body.copy(), [5, 2**256 - 1])
    vector.mask(key)
    if size > 1:
        assert (vector.body != body).mean() > 0.99
    vector.mask(key, -1)
    assert (vector.body == body).all()
    assert vector.numbers == [5, 2**256 - 1]


def test_long_masks_repeat_nothing():
    vector = masks.Vector.zeros(3 * masks.CHUNK // 8, 0)
    vector.mask(masks.new_key())
    assert len(np.unique(vector.body)) == vector.body.size
    parts = np.split(vector.body, 3)
    assert all((a != b).all() for a, b in itertools.combinations(parts, 2))


def test_a_seal_is_bound_to_key_text_and_purpose():
    key = masks.new_key()
    sealed = masks.seal(key, b"text", "from 1 to 2")
    assert masks.unseal(key, sealed, "from 1 to 2") == b"text"
    changed = bytes([*sealed[:-1], sealed[-1] ^ 1])
    for args in (
        (masks.new_key(), sealed, "from 1 to 2"),
        (key, changed, "from 1 to 2"),
        (key, sealed, "from 2 to 1"),
        (key, b"", "from 1 to 2"),
    ):
        with pytest.raises(Refused, match="cannot be opened"):
            masks.unseal(*args)
