"""Shamir's shares of a secret of 32 bytes: any t of n give it back, t − 1 say nothing of it.

Written here, as it is a polynomial and its value at 0, and no library for it is both maintained
and common. Its time depends on the numbers, but who could measure it is not whom they are hidden
from: shares are made on the client's machine, and joined where all may be known.
"""

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297  # the smallest one above 2^256, so that every 32 bytes are one element
SIZE = 33  # bytes of a share


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """A share for each place: the value there of a random polynomial, the secret its value at 0."""
    if len(secret) != 32:
        raise ValueError(f"the secret has {len(secret)} bytes, not 32")
    if not 1 <= threshold <= len(places):
        raise ValueError(f"{threshold} of {len(places)} shares cannot be asked for")
    chosen = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    terms = [int.from_bytes(secret, "big"), *chosen]
    return {place: polynomial(terms, place).to_bytes(SIZE, "big") for place in places}


def polynomial(terms: Sequence[int], x: int) -> int:
    """a0 + a1 x + a2 x² + …, by Horner's rule.

    >>> polynomial([5, 3, 2], 10)
    235
    """
    value = 0
    for term in reversed(terms):
        value = (value * x + term) % PRIME
    return value


def weights_at_0(places: Sequence[int]) -> list[int]:
    """Lagrange's: the polynomial's value at 0 is Σ weight · value, over these places.

    >>> weights_at_0([1, 2])  # of a line: f(0) = 2 f(1) − f(2)
    [2, 115792089237316195423570985008687907853269984665640564039457584007913129640232]
    """
    if len({x % PRIME for x in places} - {0}) != len(places):
        raise ValueError(f"places must differ from each other and from 0: {list(places)}")
    weights: list[int] = []
    for x in places:
        above = below = 1
        for other in places:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def joined(shares: Mapping[int, bytes], weights: Sequence[int] | None = None) -> bytes | None:
    """The secret, by shares of as many places as its threshold; None if they cannot be its.

    `weights` are those at 0, where they are known already.
    """
    weights = weights or weights_at_0([*shares])
    values = [int.from_bytes(share, "big") for share in shares.values()]
    secret = sum(w * value for w, value in zip(weights, values, strict=True)) % PRIME
    return secret.to_bytes(32, "big") if secret < 2**256 else None
