"""How many rounds, and how many bytes, a run took to a score."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedglad.records import Score


@dataclass(frozen=True)
class Reached:
    """The first tested round whose score is as good as a target, counted from 1.

    `sent` and `received` are the bytes that the server sent to clients and received from them up
    to there, all rounds together; None if a client's bytes are not known.
    """

    round: int
    score: float
    sent: int | None = None
    received: int | None = None

    @property
    def bytes(self) -> int | None:
        """Both together."""
        if self.sent is None or self.received is None:
            return None
        return self.sent + self.received


def target_of(given: float | str, score: Score) -> float:
    """A target as somebody writes it, in the score's own unit; of a share also as a percentage.

    >>> target_of("0.8", Score()), target_of("80 %", Score()), target_of(2, Score("mae", False))
    (0.8, 0.8, 2.0)
    """
    text = str(given).strip()
    percent = text.endswith("%") and score.share
    try:
        value = float(text.removesuffix("%") if percent else text)
    except ValueError:
        value = math.nan
    value = value / 100 if percent else value
    if not math.isfinite(value) or (score.share and not 0 <= value <= 1):
        wanted = "a share from 0 to 1, such as 0.8 or 80%" if score.share else "a number"
        raise ValueError(f"the target {text!r} cannot be reached: {score.words} is {wanted}")
    return value


def rounds_to(
    records: Sequence[Mapping[str, Any]],
    score: Score,
    target: float,
    *,
    which: str = "test",
    update_bytes: Mapping[str, int] | None = None,
) -> Reached | None:
    """When the records of a run first reach a target; None if they never do.

    `which` is one of `fedglad.records.READOUTS`. The bytes are those that the records have. For
    records of before `update_bytes` is that of the run's summary: what one client receives (`down`)
    and sends (`up`) in a round. Everybody in a cohort is sent the model; what was rejected has been
    sent all the same, unless the client had neither a loss nor an update.

    >>> records = [{"clients": [{"id": 4}, {"id": 7}], "test_accuracy": a} for a in (0.5, 0.75)]
    >>> rounds_to(records, Score(), 0.7, update_bytes={"down": 100, "up": 10})
    Reached(round=2, score=0.75, sent=400, received=40)
    """
    sent: int | None = 0
    received: int | None = 0
    for t, record in enumerate(records):
        bytes = _bytes(record, update_bytes)
        sent = None if sent is None or bytes is None else sent + bytes[0]
        received = None if received is None or bytes is None else received + bytes[1]
        value = record.get(f"{which}_{score.name}")
        if value is not None and (value == target or score.better(value, target)):
            return Reached(t + 1, value, sent, received)
    return None


def _bytes(
    record: Mapping[str, Any], update_bytes: Mapping[str, int] | None
) -> tuple[int, int] | None:
    """What the server sent and received in a round; None if that is not known."""
    there: Any = record.get("bytes")
    if isinstance(there, Mapping):
        down, up = (cast("Mapping[str, Any]", there).get(name) for name in ("down", "up"))
        if type(down) is int and type(up) is int and min(down, up) >= 0:
            return down, up
    if update_bytes is None:
        return None
    clients = record.get("clients", [])
    return len(clients) * update_bytes["down"], sum(map(_arrived, clients)) * update_bytes["up"]


def _arrived(client: Mapping[str, Any]) -> bool:
    known = client.get("loss") is not None or client.get("sq_norm") is not None
    return known or "rejected" not in client
