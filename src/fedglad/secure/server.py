"""The server's half of a secure sum: it passes messages on, adds, and learns the sum alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedglad.secure import masks, shamir
from fedglad.secure.client import (
    SEALED,
    Message,
    listed,
    purpose,
    require_threshold,
)
from fedglad.secure.fixed import WIDE, FixedPoint, Refused, from_bytes

Replies = Mapping[int, Mapping[str, Any] | str]
"""By the clients' places, from 1 on: an answer, or the reason why there is none."""


class TooFew(Exception):
    """Fewer clients are left than it takes to see their sum; the message says who went and why."""


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """How a round is summed: who must stay, and how fine numbers are.

    | field | meaning |
    |---|---|
    | `threshold` | more than this share of a round's clients must stay to its end: t of n |
    | `fraction` | bits after the point: w·g of each client is off by 2^-(fraction+1) at most |

    Up to t − 1 clients that tell the server all they know do not help it to see another's update.

    >>> SecureSum().least(10), SecureSum(threshold=0.5).least(10)
    (7, 6)
    """

    threshold: float = 2 / 3
    fraction: int = 32

    def __post_init__(self) -> None:
        if not 0.5 <= self.threshold < 1:
            raise ValueError(
                f"threshold={self.threshold!r}: must be a share in [0.5, 1): with fewer than half "
                "of the clients a server that asks each for something else could see an update"
            )
        if not 0 <= self.fraction <= 62:
            raise ValueError(f"fraction={self.fraction!r}: must be from 0 to 62 bits")

    def least(self, clients: int) -> int:
        """t: how many of so many clients must stay."""
        return min(clients, math.floor(self.threshold * clients + 1e-9) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """The sum over `clients`, the places of those that are in it.

    >>> Total(body=np.array([4.0]), numbers=[40.0], clients=(1, 3)).clients
    (1, 3)
    """

    body: np.ndarray
    numbers: list[float]
    clients: tuple[int, ...]


class Round:
    """One sum over the clients 1 … n: five methods in order, dicts by place in and out.

    >>> from fedglad.secure import SecureClient
    >>> clients = {1: SecureClient(), 2: SecureClient(), 3: SecureClient()}
    >>> round = Round(SecureSum(threshold=0.5), "a run, round 1", 3)
    >>> asked = round.ask_keys()
    >>> asked = round.take_keys({k: c.keys(asked[k]) for k, c in clients.items()})
    >>> asked = round.take_shares({k: c.shares(asked[k]) for k, c in clients.items()})
    >>> for k in (1, 3):  # the second is gone by now
    ...     clients[k].receive(asked[k])
    ...     point = clients[k].point
    ...     body, numbers = point.encode(np.array([k, 0.5])), point.encode_numbers([10 * k])
    ...     body, numbers = clients[k].mask(body, numbers)
    ...     _ = round.take_masked(k, {"numbers": masks.as_bytes(numbers)}, body)
    >>> asked = round.ask_unmask()
    >>> total = round.unmask({k: clients[k].unmask(asked[k]) for k in (1, 3)})
    >>> total.body.tolist(), total.numbers, total.clients
    ([4.0, 1.0], [40.0], (1, 3))

    A client whose answer is missing or of no use is in `left_out`, with the reason. TooFew is
    raised as soon as fewer than t are left.
    """

    def __init__(self, settings: SecureSum, session: str, clients: int, *, least: int = 0) -> None:
        """`least` clients must stay, where that is more than the settings say."""
        self.session, self.clients = session, clients
        self.threshold = max(settings.least(clients), least)
        if clients < 2:
            raise TooFew(f"there is no sum of {clients} client: it would be seen by itself")
        if least > clients:
            raise TooFew(f"{clients} clients take part, {least} are needed")
        require_threshold(self.threshold, clients)
        self.point = FixedPoint(clients=clients, fraction=settings.fraction)
        self.left_out: dict[int, str] = {}
        self._mask_keys: dict[int, bytes] = {}
        self._share_keys: dict[int, bytes] = {}
        self._commitments: dict[int, bytes] = {}
        self._total: masks.Vector | None = None
        self._alive: list[int] = []

    def ask_keys(self) -> dict[int, Message]:
        """What everybody is asked first."""
        told = {
            "stage": "keys",
            "session": self.session,
            "clients": self.clients,
            "threshold": self.threshold,
            "fraction": self.point.fraction,
        }
        return {k: {**told, "place": k} for k in range(1, self.clients + 1)}

    def take_keys(self, replies: Replies) -> dict[int, Message]:
        """Everybody's public keys, for everybody."""
        for k, reply in sorted(replies.items()):
            if (answer := self._answer(k, reply)) is None:
                continue
            keys = answer.get("mask_key"), answer.get("share_key")
            if not all(isinstance(key, bytes) and len(key) == masks.KEY for key in keys):
                self.left_out[k] = "it sent no pair of public keys"
                continue
            taken = {*self._mask_keys.values(), *self._share_keys.values()}
            if keys[0] == keys[1] or {*keys} & taken:
                self.left_out[k] = "it sent a public key that is another's"
                continue
            self._mask_keys[k], self._share_keys[k] = keys  # pyright: ignore
        self._require("sent keys", len(self._mask_keys))
        told = {
            "stage": "shares",
            "session": self.session,
            "places": [*self._mask_keys],
            "mask_keys": [*self._mask_keys.values()],
            "share_keys": [*self._share_keys.values()],
        }
        return {k: dict(told) for k in self._mask_keys}

    def take_shares(self, replies: Replies) -> dict[int, Message]:
        """Each client's shares of the others' secrets; those who sent none are not masked with."""
        sealed: dict[int, dict[int, bytes]] = {}
        for k in self._mask_keys:
            if (answer := self._answer(k, replies.get(k, "no reply"))) is None:
                continue
            try:
                shares = dict(zip(answer.get("to") or (), listed(answer, "shares"), strict=True))
            except (Refused, ValueError, TypeError):
                shares = {}
            sizes = {len(share) for share in shares.values()}
            commitment = answer.get("commitment")
            if shares.keys() != self._mask_keys.keys() - {k} or sizes - {SEALED}:
                self.left_out[k] = "it did not send each of the others a share"
            elif not isinstance(commitment, bytes) or len(commitment) != masks.KEY:
                self.left_out[k] = "it did not commit itself to a seed"
            else:
                sealed[k], self._commitments[k] = shares, commitment  # pyright: ignore
        self._require("sent shares", len(sealed))
        asked: dict[int, Message] = {}
        for k in sealed:
            senders = [other for other in sealed if other != k]
            asked[k] = {
                "stage": "masked",
                "session": self.session,
                "senders": senders,
                "shares": [sealed[other][k] for other in senders],
            }
        return asked

    def take_masked(
        self, client: int, reply: Mapping[str, Any] | str, body: np.ndarray | None = None
    ) -> bool:
        """Adds a masked vector: noise, until the masks of all are gone. Whether it could be."""
        if client not in self._commitments or client in self._alive:
            raise ValueError(f"client {client} was not asked for a vector, or has sent it")
        if (answer := self._answer(client, reply)) is None:
            return False
        data = answer.get("numbers")
        reason = ""
        if body is None or body.dtype != np.uint64 or body.ndim != 1:
            reason = "its vector is not one of 64-bit integers"
        elif not isinstance(data, bytes) or len(data) % (WIDE // 8):
            reason = "its numbers are not of 256 bits"
        elif self._total and (
            body.size != self._total.body.size or len(data) != WIDE // 8 * len(self._total.numbers)
        ):
            reason = "its vector has not the size of the others'"
        if reason:
            self.left_out[client] = reason
            return False
        assert isinstance(data, bytes)
        assert body is not None
        numbers = from_bytes(data)
        if self._total is None:
            self._total = masks.Vector.zeros(body.size, len(numbers))
        self._total.add(body, numbers)
        self._alive.append(client)
        return True

    def ask_unmask(self) -> dict[int, Message]:
        """Who is in the sum and who is not, for those who are."""
        self._alive.sort()
        for k in self._commitments.keys() - self._alive - self.left_out.keys():
            self.left_out[k] = "no reply"
        self._require("sent a vector", len(self._alive))
        told = {
            "stage": "unmask",
            "session": self.session,
            "alive": [*self._alive],
            "dropped": self._dropped,
        }
        return {k: dict(told) for k in self._alive}

    @property
    def _dropped(self) -> list[int]:
        return sorted(self._commitments.keys() - {*self._alive})

    def unmask(self, replies: Replies) -> Total:
        """The sum, by shares of any t clients: seeds of those in it, keys of those who went."""
        held = sorted(self._commitments)
        shares: dict[int, list[bytes]] = {}
        silent: dict[int, str] = {}
        for k in self._alive:
            reply = replies.get(k, "no reply")
            if isinstance(reply, str) or reply.get("session") != self.session:
                silent[k] = reply if isinstance(reply, str) else "it answered another session"
                continue
            sent = reply.get("shares")
            good = isinstance(sent, list) and reply.get("of") == held
            if good and [len(part) for part in sent] == [shamir.SIZE] * len(held):  # pyright: ignore
                shares[k] = sent  # pyright: ignore
            else:
                silent[k] = "it did not send a share for each"
        if len(shares) < self.threshold:
            raise TooFew(self._few("helped to unmask", len(shares), {**self.left_out, **silent}))
        helpers = sorted(shares)[: self.threshold]
        weights = shamir.weights_at_0(helpers)
        total, self._total = self._total, None
        assert total is not None
        for at, client in enumerate(held):
            secret = shamir.joined({k: shares[k][at] for k in helpers}, weights)
            self._take_off(total, client, secret)
        return Total(
            body=self.point.decode(total.body),
            numbers=self.point.decode_numbers(total.numbers),
            clients=tuple(self._alive),
        )

    def _take_off(self, total: masks.Vector, client: int, secret: bytes | None) -> None:
        """Takes off the mask of a client in the sum, or what others share with one that went."""
        own = purpose(self.session, "seed", client)
        if client in self._alive:
            if secret is None or masks.commitment(secret, own) != self._commitments[client]:
                raise TooFew(self._lie(client))
            total.mask(masks.derived(secret, own), -1)
            return
        if secret is None or masks.public(secret) != self._mask_keys[client]:
            raise TooFew(self._lie(client))
        for k in self._alive:
            pair = purpose(self.session, "mask", client, k)
            key = masks.agree(secret, self._mask_keys[k], pair)
            total.mask(key, -1 if k < client else 1)

    def _lie(self, client: int) -> str:
        return (
            f"the shares of client {client}'s secret do not make what it is: that client, or one "
            "of those who hold them, does not keep to the protocol"
        )

    def _answer(self, client: int, reply: Mapping[str, Any] | str) -> Mapping[str, Any] | None:
        """The reply, unless it is a reason, which is noted, or of another session."""
        if isinstance(reply, str):
            self.left_out[client] = reply
        elif reply.get("session", self.session) != self.session:
            self.left_out[client] = "it answered another session"
        else:
            return reply
        return None

    def _require(self, done: str, count: int) -> None:
        if count < self.threshold:
            raise TooFew(self._few(done, count, self.left_out))

    def _few(self, done: str, count: int, reasons: Mapping[int, str]) -> str:
        first = next(iter(reasons.values()), "")
        return (
            f"{count} of {self.clients} clients {done}, {self.threshold} are needed to see a sum"
            + (f"; the first without: {first}" if first else "")
        )
