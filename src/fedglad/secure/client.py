"""A client's half of a secure sum: it keeps its keys, masks its vector and opens nothing twice."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedglad.secure import masks, shamir
from fedglad.secure.fixed import FixedPoint, Refused

Message = dict[str, Any]
"""Integers, texts, bytes, and lists of one of them: what a Flower ConfigRecord can hold."""

SEALED = masks.NONCE + 2 * shamir.SIZE + 16  # bytes of two shares, sealed


class SecureClient:
    """One client in one round: `keys`, `shares`, `receive`, `mask`, `unmask`, each once, in order.

    | message | the server says | the client answers |
    |---|---|---|
    | `keys` | the session, its place, n, t, the fixed point | two public keys |
    | `shares` | everybody's public keys | sealed shares of its two secrets, one pair a client |
    | `receive`, `mask` | the others' sealed shares | its vector, masked |
    | `unmask` | who has sent a vector and who has not | a share of *one* secret of each |

    `state` is what it must know again at the next message, as bytes, integers and lists of them; a
    client made with it goes on. After `unmask` there is none. What a client will not do is
    Refused. `session` names run, round and attempt: it is in all keys, and a message of
    another one is not answered.

    >>> client, told = SecureClient(), {"session": "a run, round 1", "place": 1, "fraction": 32}
    >>> sorted(client.keys({**told, "clients": 10, "threshold": 7}))
    ['mask_key', 'session', 'share_key']
    >>> client.state["stage"]  # what comes next; `Round` is the other role
    'shares'
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state: Message = dict(state or {})

    def keys(self, asked: Mapping[str, Any]) -> Message:
        """Begins a session and forgets any other: two new pairs of keys, whose public halves go."""
        n, t, place = (whole(asked, name) for name in ("clients", "threshold", "place"))
        session, fraction = asked.get("session"), whole(asked, "fraction")
        if not isinstance(session, str) or not session:
            raise Refused(f"there is no session: {str(session)[:40]!r}")
        require_threshold(t, n)
        if not 1 <= place <= n or not 0 <= fraction <= 62:
            raise Refused(f"place {place} of {n} with {fraction} bits after the point cannot be")
        self.state = {
            "stage": "shares",
            "session": session,
            "place": place,
            "clients": n,
            "threshold": t,
            "fraction": fraction,
            "mask_private": masks.new_key(),
            "share_private": masks.new_key(),
        }
        return {
            "session": session,
            "mask_key": masks.public(self.state["mask_private"]),
            "share_key": masks.public(self.state["share_private"]),
        }

    @property
    def point(self) -> FixedPoint:
        """How this session encodes values."""
        return FixedPoint(clients=self.state["clients"], fraction=self.state["fraction"])

    def shares(self, asked: Mapping[str, Any]) -> Message:
        """A sealed share of the mask's key and of the seed for every other client."""
        state = self._at("shares", asked)
        places, mask_keys = places_of(asked, "places"), listed(asked, "mask_keys")
        share_keys = listed(asked, "share_keys")
        if not len(places) == len(mask_keys) == len(share_keys) == len(set(mask_keys)):
            raise Refused(f"{len(places)} clients have {len(set(mask_keys))} different mask keys")
        if len(set(share_keys)) != len(places) or set(share_keys) & set(mask_keys):
            raise Refused("two clients have the same public key")
        me, t = state["place"], state["threshold"]
        if me not in places or max(places) > state["clients"]:
            raise Refused(f"place {me} is not among the clients {shown(places)}")
        if len(places) < t:
            raise Refused(f"{len(places)} clients sent keys, {t} are needed")
        at = places.index(me)
        mine = masks.public(state["mask_private"]), masks.public(state["share_private"])
        if (mask_keys[at], share_keys[at]) != mine:
            raise Refused("the keys that the server tells as this client's are not its own")
        seed = masks.new_key()
        halves = (
            shamir.split(state["mask_private"], t, places),
            shamir.split(seed, t, places),
        )
        others = [(k, key) for k, key in zip(places, share_keys, strict=True) if k != me]
        sealed = [
            masks.seal(self._share_key(me, k, key), halves[0][k] + halves[1][k], self._about(me, k))
            for k, key in others
        ]
        self.state = {
            **state,
            "stage": "masked",
            "seed": seed,
            "places": places,
            "mask_keys": mask_keys,
            "share_keys": share_keys,
            "own": halves[0][me] + halves[1][me],
        }
        return {
            "session": state["session"],
            "to": [k for k, _ in others],
            "shares": sealed,
            "commitment": masks.commitment(seed, self._purpose("seed", me)),
        }

    def receive(self, asked: Mapping[str, Any]) -> None:
        """Opens the others' shares of their secrets: those it is masked with, if it goes on."""
        state = self._at("masked", asked)
        senders, sealed = places_of(asked, "senders"), listed(asked, "shares")
        me, places = state["place"], state["places"]
        if len(senders) != len(sealed) or me in senders or not {*senders} <= {*places}:
            raise Refused(f"{len(sealed)} shares came from the clients {shown(senders)}")
        if len(senders) + 1 < state["threshold"]:
            need = state["threshold"]
            raise Refused(f"{len(senders) + 1} clients sent shares, {need} are needed")
        opened = {me: state["own"]}
        keys = dict(zip(places, state["share_keys"], strict=True))
        for k, text in zip(senders, sealed, strict=True):
            opened[k] = masks.unseal(self._share_key(k, me, keys[k]), text, self._about(k, me))
            if len(opened[k]) != 2 * shamir.SIZE:
                raise Refused(f"client {k} sent no pair of shares")
        held = dict(sorted(opened.items()))
        self.state = {**state, "stage": "mask", "held": [*held], "held_shares": [*held.values()]}

    def mask(self, body: np.ndarray, numbers: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """The vector plus its own mask and those it shares with the others; `body` is overwritten.

        Of two clients the first adds what the second takes away.
        """
        if self.state.get("stage") != "mask":
            raise Refused("there is nothing to mask now: the shares of the others come first")
        state, me = self.state, self.state["place"]
        keys = dict(zip(state["places"], state["mask_keys"], strict=True))
        vector = masks.Vector(body, [*numbers])
        vector.mask(masks.derived(state["seed"], self._purpose("seed", me)))
        for k in state["held"]:
            if k != me:
                key = masks.agree(state["mask_private"], keys[k], self._purpose("mask", me, k))
                vector.mask(key, 1 if me < k else -1)
        kept = ("session", "place", "threshold", "held", "held_shares")
        self.state = {"stage": "unmask", **{name: state[name] for name in kept}}
        return vector.body, vector.numbers

    def unmask(self, asked: Mapping[str, Any]) -> Message:
        """A share of the seed of those who sent a vector, of the mask's key of those who did not.

        Never both of one client: with them its update could be seen.
        """
        state = self._at("unmask", asked)
        alive, dropped = places_of(asked, "alive"), places_of(asked, "dropped", empty=True)
        if both := {*alive} & {*dropped}:
            raise Refused(f"both secrets of client {min(both)} are asked for: never both")
        if {*alive} | {*dropped} != {*state["held"]}:
            raise Refused(
                f"{shown(sorted({*alive} | {*dropped}))} are not the clients that shared secrets, "
                f"{shown(state['held'])}"
            )
        if state["place"] not in alive:
            raise Refused("the server says that this client has sent no vector, and it has")
        if len(alive) < state["threshold"]:
            need = state["threshold"]
            raise Refused(f"{len(alive)} clients are left, {need} are needed to see a sum")
        self.state = {}
        shares: list[bytes] = []
        for k, pair in zip(state["held"], state["held_shares"], strict=True):
            shares.append(pair[shamir.SIZE :] if k in alive else pair[: shamir.SIZE])
        return {"session": state["session"], "of": state["held"], "shares": shares}

    def _at(self, stage: str, asked: Mapping[str, Any]) -> Message:
        """The state, if the message is of its session and comes in its turn."""
        session = asked.get("session")
        if not self.state:
            raise Refused(f"no session is open here, and {str(session)[:80]!r} asks for {stage}")
        if session != self.state["session"]:
            raise Refused(
                f"the message is of session {str(session)[:80]!r}, not {self.state['session']!r}"
            )
        if self.state["stage"] != stage:
            raise Refused(f"{stage} is asked for where {self.state['stage']} comes next")
        return self.state

    def _purpose(self, what: str, *places: int) -> str:
        return purpose(self.state["session"], what, *places)

    def _share_key(self, sender: int, receiver: int, other: bytes) -> bytes:
        named = f"shares from {sender} to {receiver}, {self.state['session']}"
        return masks.agree(self.state["share_private"], other, named)

    def _about(self, sender: int, receiver: int) -> str:
        return f"shares from client {sender} to {receiver} in {self.state['session']}"


def purpose(session: str, what: str, *places: int) -> str:
    """What a key is for: both clients of a pair say the same."""
    return f"{what} of {' and '.join(map(str, sorted(places)))}, {session}"


def require_threshold(threshold: int, clients: int) -> None:
    """Raises Refused unless t of n is more than half, and more than one.

    With at most half, a server could have one secret of a client from some, the other from others.
    """
    if clients < 2 or not clients / 2 < threshold <= clients:
        raise Refused(
            f"a threshold of {threshold} of {clients} clients: it must be more than half of them, "
            "and there must be two"
        )


def whole(message: Mapping[str, Any], name: str) -> int:
    """A whole number in a message; raises Refused."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{name} is {str(value)[:40]!r}, not a whole number")
    return value


def listed(message: Mapping[str, Any], name: str) -> list[bytes]:
    """A list of bytes in a message; raises Refused."""
    value = message.get(name)
    if not isinstance(value, list) or not all(isinstance(part, bytes) for part in value):
        raise Refused(f"{name} is {str(value)[:40]!r}, not a list of bytes")
    return value


def places_of(message: Mapping[str, Any], name: str, *, empty: bool = False) -> list[int]:
    """Different places in order; raises Refused."""
    value = message.get(name)
    if isinstance(value, list) and all(isinstance(k, int) and k > 0 for k in value):
        places: list[int] = value
        if places == sorted({*places}) and (places or empty):
            return places
    raise Refused(f"{name} is {str(value)[:40]}, not a list of different places in order")


def shown(places: Sequence[int]) -> str:
    """Places, for a message to people."""
    return ", ".join(map(str, places[:10])) + (" …" if len(places) > 10 else "")
