"""Drives the roles of a secure sum in one process, with clients that leave at any stage."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedglad.secure import Refused, Round, SecureClient, SecureSum, Total
from fedglad.secure.fixed import as_bytes

STAGES = ("keys", "shares", "masked", "unmask")


def answered(asked: Mapping[int, Any], gone: Collection[int], call: Any) -> dict[int, Any]:
    replies: dict[int, Any] = {}
    for k, message in asked.items():
        if k in gone:
            replies[k] = "gone"
            continue
        try:
            replies[k] = call(k, message)
        except Refused as reason:
            replies[k] = str(reason)
    return replies


class Drive:
    """Clients 1 … n with vectors; `leaves` maps a client to the stage in which it is gone.

    Between any two messages a client is only its `state`, as in Flower.
    """

    def __init__(
        self,
        vectors: Sequence[Sequence[float] | np.ndarray],
        settings: SecureSum | None = None,
        leaves: Mapping[int, str] | None = None,
        session: str = "run 7, round 1, attempt 0",
    ) -> None:
        self.vectors = {k: np.asarray(v, float) for k, v in enumerate(vectors, 1)}
        self.settings = settings or SecureSum(threshold=0.5)
        self.leaves = dict(leaves or {})
        self.states: dict[int, dict[str, Any]] = {k: {} for k in self.vectors}
        self.round = Round(self.settings, session, len(vectors))
        self.masked: dict[int, np.ndarray] = {}
        self.bytes = 0

    def gone(self, stage: str) -> set[int]:
        until = STAGES[: STAGES.index(stage) + 1]
        return {k for k, at in self.leaves.items() if at in until}

    def client(self, k: int) -> SecureClient:
        return SecureClient(self.states[k])

    def call(self, name: str, k: int, message: Any) -> Any:
        client = self.client(k)
        reply = getattr(client, name)(message)
        self.states[k] = client.state
        return reply

    def up_to_shares(self) -> dict[int, Any]:
        asked = self.round.ask_keys()
        replies = answered(asked, self.gone("keys"), lambda k, m: self.call("keys", k, m))
        asked = self.round.take_keys(replies)
        replies = answered(asked, self.gone("shares"), lambda k, m: self.call("shares", k, m))
        return self.round.take_shares(replies)

    def mask(self, k: int, message: Any) -> tuple[dict[str, Any], np.ndarray]:
        client = self.client(k)
        client.receive(message)
        client = SecureClient(client.state)
        values, point = self.vectors[k], client.point
        body, numbers = client.mask(point.encode(values), point.encode_numbers([values.sum()]))
        self.states[k] = client.state
        return {"session": self.round.session, "numbers": as_bytes(numbers)}, body

    def up_to_masked(self) -> dict[int, Any]:
        asked = self.up_to_shares()
        replies = answered(asked, self.gone("masked"), self.mask)
        for k, reply in replies.items():
            if isinstance(reply, str):
                self.round.take_masked(k, reply)
            else:
                self.masked[k] = reply[1].copy()
                self.round.take_masked(k, *reply)
        return self.round.ask_unmask()

    def run(self) -> Total:
        asked = self.up_to_masked()
        unmask = answered(asked, self.gone("unmask"), lambda k, m: self.call("unmask", k, m))
        return self.round.unmask(unmask)
