"""Keys, masks and sealed shares by `cryptography`: X25519, HKDF, AES-CTR, ChaCha20-Poly1305."""

import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedglad.secure.fixed import WIDE, Refused, as_bytes, from_bytes

KEY = 32  # bytes of a key, private or public
CHUNK = 1 << 18  # bytes of a mask at a time: they stay in the cache
ZEROS = bytes(CHUNK)
NONCE = 12


def new_key() -> bytes:
    """A private key, or any other 32 bytes that nobody can guess."""
    return os.urandom(KEY)


def public(private: bytes) -> bytes:
    """The public key that belongs to a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, other: bytes, purpose: str) -> bytes:
    """The key that two clients share and nobody else has, for one purpose."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(other)
        )
    except ValueError as error:  # a key of the wrong length, or one that makes all secrets equal
        raise Refused(f"a public key cannot be used: {error}") from None
    return derived(secret, purpose)


def derived(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose, by HKDF."""
    info = f"fedglad secure sum, {purpose}".encode()
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=info).derive(secret)


def commitment(seed: bytes, purpose: str) -> bytes:
    """What tells later whether a seed is the one, and until then nothing."""
    return derived(seed, f"commitment, {purpose}")


class Vector:
    """What is summed: `body`, of Z_2^64, and `numbers`, of Z_2^256."""

    def __init__(self, body: np.ndarray, numbers: list[int]) -> None:
        self.body, self.numbers = body, numbers

    @classmethod
    def zeros(cls, size: int, numbers: int) -> "Vector":
        return cls(np.zeros(size, np.uint64), [0] * numbers)

    def add(self, body: np.ndarray, numbers: list[int], sign: int = 1) -> None:
        """Adds in place, or takes away."""
        (np.add if sign > 0 else np.subtract)(self.body, body, out=self.body)
        pairs = zip(self.numbers, numbers, strict=True)
        self.numbers = [(a + sign * b) % 2**WIDE for a, b in pairs]

    def mask(self, key: bytes, sign: int = 1) -> None:
        """Adds the mask of a key, or takes it away: the stream of AES-256 in counter mode.

        The counter begins at 0, as a key has one mask in its life.
        """
        # 15 more bytes, as `update_into` asks for them.
        stream, buffer = Cipher(AES(key), CTR(bytes(16))).encryptor(), bytearray(CHUNK + 15)
        numbers = from_bytes(stream.update(bytes(WIDE // 8 * len(self.numbers))))
        pairs = zip(self.numbers, numbers, strict=True)
        self.numbers = [(a + sign * b) % 2**WIDE for a, b in pairs]
        operation = np.add if sign > 0 else np.subtract
        step = CHUNK // 8
        for k in range(0, self.body.size, step):
            part = self.body[k : k + step]
            stream.update_into(ZEROS[: 8 * part.size], buffer)
            operation(part, np.frombuffer(buffer, "<u8", part.size), out=part)

    def numbers_as_bytes(self) -> bytes:
        return as_bytes(self.numbers)


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """Encrypts for who has the key; `about` is bound to it."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    """The text; raises Refused if it is not what was sealed with that key, about that."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], about.encode())
    except (InvalidTag, ValueError):
        raise Refused(f"the {about} cannot be opened: not sealed for this, or changed") from None
