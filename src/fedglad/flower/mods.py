"""For Flower clients: reports the norms of an update, so that the server needs only sums.

Imports NumPy alone, neither torch nor flwr: a client has only what its app installs.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from flwr.app import Array, Context, Message

NORMS = "fedglad-sq-norms"
"""The metric that holds ‖θ − θ_k‖² of every array, in the order in which they were sent."""

CHUNK = 1 << 20  # elements that are in memory in float64 at a time


def report_norms(
    msg: "Message", ctxt: "Context", call_next: "Callable[[Message, Context], Message]"
) -> "Message":
    """A mod that adds ‖θ − θ_k‖² of every array to the reply's metrics, for `report="norms"`.

    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp()
    >>> @app.train(mods=[report_norms])
    ... def train(message, context): ...

    It stands first, that is outermost, and so measures what is really sent, clipped and noisy as
    it may be. Arrays that are not floating point count as 0. A reply that is not one ArrayRecord of
    the arrays sent and one MetricRecord goes on as it is: the server records what is wrong with it.
    """
    if msg.metadata.message_type.partition(".")[0] != "train":
        return call_next(msg, ctxt)
    sent = [dict(record) for record in msg.content.array_records.values()]
    reply = call_next(msg, ctxt)
    if reply.has_error():
        return reply
    trained, metrics = reply.content.array_records, reply.content.metric_records
    if len(sent) == len(trained) == len(metrics) == 1:
        norms = _sq_norms(sent[0], next(iter(trained.values())))
        if norms is not None:
            next(iter(metrics.values()))[NORMS] = norms
    return reply


def _sq_norms(sent: "Mapping[str, Array]", trained: "Mapping[str, Array]") -> list[float] | None:
    """‖θ − θ_k‖² of each array in float64; None if the two are not of one form."""
    if sent.keys() != trained.keys():
        return None
    norms: list[float] = []
    for name, array in sent.items():
        try:
            before, after = array.numpy(), trained[name].numpy()
        except Exception:  # an array can be unreadable in more ways than NumPy names
            return None
        floating = np.issubdtype(before.dtype, np.floating)
        if before.shape != after.shape or floating != np.issubdtype(after.dtype, np.floating):
            return None
        norms.append(_distance_sq(before.reshape(-1), after.reshape(-1)) if floating else 0.0)
    return norms


def _distance_sq(a: np.ndarray, b: np.ndarray) -> float:
    total = 0.0
    with np.errstate(all="ignore"):  # NaN and inf are reported as they are
        for k in range(0, a.size, CHUNK):
            difference = a[k : k + CHUNK].astype(np.float64) - b[k : k + CHUNK]
            total += float(difference @ difference)
    return total
