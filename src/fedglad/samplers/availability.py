"""Who can be reached in a round: models of clients that come and go.

Whether client k is reachable in round t depends on (seed, t, k) alone: every method meets the same
clients, and nothing of it needs to be saved.
"""

from typing import Any

import numpy as np

from fedglad.rng import stream


def bernoulli(t: int, clients: int, share: float, seed: int) -> np.ndarray:
    """Every client in every round with probability `share`, whatever was before."""
    return _draws(t, clients, seed) < share


def markov(
    t: int, clients: int, share: float, persistence: float, seed: int, memo: dict[Any, Any]
) -> np.ndarray:
    """On or off: with probability `persistence` as in the round before, else drawn anew.

    A drawn client is on with probability `share`. So it goes on with (1 − persistence) · share, off
    with (1 − persistence) · (1 − share), is on in that share of the rounds from round 0 on, and
    its states s rounds apart have the correlation persistence^s.

    A client's state is that of its last draw: the walk back ends when all have met theirs, after
    about ln N / (1 − persistence) rounds, or at the last round in `memo`, which is one step.
    """
    name = ("markov", clients, share, persistence, seed)
    known, before = memo.get(name, (-1, None))
    on = np.zeros(clients, dtype=bool)
    waiting = np.ones(clients, dtype=bool)
    for s in range(t, -1, -1):
        if s == known:
            on[waiting] = before[waiting]
            break
        draw = _draws(s, clients, seed)
        met = waiting if s == 0 else waiting & (draw >= persistence)
        # Given that a client is drawn anew, its number is uniform on what lies above persistence.
        bound = share if s == 0 else persistence + (1 - persistence) * share
        on[met] = draw[met] < bound
        waiting = waiting & ~met
        if not waiting.any():
            break
    memo[name] = t, on
    return on


def cyclic(t: int, clients: int, share: float, cycle: int) -> np.ndarray:
    """The first `share` of every `cycle` rounds; client k begins k rounds after client 0."""
    return (t - np.arange(clients)) % cycle < window(share, cycle)


def window(share: float, cycle: int) -> int:
    """How many rounds of a cycle a client is reachable in."""
    return round(share * cycle)


def _draws(t: int, clients: int, seed: int) -> np.ndarray:
    """A number in [0, 1) for each client, which does not depend on how many there are."""
    return stream(seed, "reachable", t).random(clients)
