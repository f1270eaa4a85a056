"""Numbers as integers that can be masked: fixed point in Z_2^64, and wider for single numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

WIDE = 256  # bits of a single number: norms, weights and buffers are few, and differ in size
WIDE_FRACTION = 128  # bits of them after the point


class Refused(Exception):
    """What a client will not do, or cannot; the message says why."""


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """v as the integer round(v 2^f), for sums over `clients`; what could wrap around is refused.

    The sum of n integers of at most (2^63 − 1)/n is one of 64 bits with its sign, so it is the true
    sum. Each one is off by 2^-(f+1) at most.

    >>> point = FixedPoint(clients=2, fraction=1)
    >>> total = point.encode(np.array([1.5, -2.0])) + point.encode(np.array([-3.0, 0.2]))
    >>> total.tolist(), point.decode(total).tolist()  # 0.2 is 0.4 halves, that is 0
    ([18446744073709551613, 18446744073709551612], [-1.5, -2.0])
    """

    clients: int
    fraction: int = 32

    @property
    def limit(self) -> int:
        """What an integer may be at most."""
        return (2**63 - 1) // self.clients

    def encode(self, values: np.ndarray, name: str = "vector") -> np.ndarray:
        """Integers of 64 bits, modulo 2^64; raises Refused for what is too large or not finite."""
        largest = float(np.abs(values).max(initial=0.0))
        if not np.isfinite(largest):
            raise Refused(f"{name} has NaN or inf")
        # Half a float's distance below the limit: what is rounded up stays in it.
        if largest * 2.0**self.fraction > self.limit * (1 - 2.0**-50):
            raise Refused(
                f"{name} has a value of {largest:.4g}, weight included, and sums over "
                f"{self.clients} clients with {self.fraction} bits after the point hold at most "
                f"{self.limit / 2**self.fraction:.4g} of each: lower SecureSum(fraction=...)"
            )
        return np.rint(np.ldexp(values, self.fraction)).astype(np.int64).view(np.uint64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """The values that a sum of integers stands for."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.fraction)

    def encode_numbers(self, values: Iterable[float | int], name: str = "number") -> list[int]:
        """The same for single numbers, modulo 2^256, with 128 bits after the point.

        >>> FixedPoint(clients=3).encode_numbers([-1, 0.5]) == [2**256 - 2**128, 2**127]
        True
        """
        limit = (2 ** (WIDE - 1) - 1) // self.clients
        integers: list[int] = []
        for value in values:
            if not -np.inf < value < np.inf:
                raise Refused(f"{name} is {value}")
            integer = round(Fraction(value) * 2**WIDE_FRACTION)
            if abs(integer) > limit:
                raise Refused(
                    f"{name} is {value:.4g}, and sums over {self.clients} clients hold at most "
                    f"{limit / 2**WIDE_FRACTION:.4g} of each"
                )
            integers.append(integer % 2**WIDE)
        return integers

    @staticmethod
    def decode_numbers(totals: Sequence[int]) -> list[float]:
        """The numbers that sums of integers stand for, each rounded once."""
        half, whole = 2 ** (WIDE - 1), 2**WIDE
        return [(n - whole if n >= half else n) / 2**WIDE_FRACTION for n in totals]


def as_bytes(numbers: Iterable[int]) -> bytes:
    """Integers modulo 2^256, as they travel."""
    return b"".join(number.to_bytes(WIDE // 8, "little") for number in numbers)


def from_bytes(data: bytes) -> list[int]:
    """What `as_bytes` has written."""
    size = WIDE // 8
    return [int.from_bytes(data[k : k + size], "little") for k in range(0, len(data), size)]
