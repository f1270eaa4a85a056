"""The table of clients as the page has it: rows, and columns beside them that take little room."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedglad.analysis.per_client import ClientSummary
from fedglad.records import FLAGS
from fedglad.report.numbers import short

POINTS = 32  # of a line of scores; of more, the means of stretches of equal length
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a score's digit, from 0 to 1
TEXT = 40  # characters of a name or a reason that take as much room as another client


def listed(clients: Sequence[ClientSummary], most: int) -> list[ClientSummary]:
    """So many of them that the page stays small, the worst; the most sampled come first.

    Long names and reasons count as more than one.
    """
    kept: list[ClientSummary] = []
    room = most
    for client in clients:
        room -= 1 + len(client.reason or "") // TEXT + len(str(client.id)) // TEXT
        if room < 0:
            break
        kept.append(client)
    return sorted(kept, key=lambda one: (-one.rounds, isinstance(one.id, str), one.id))


def rows(kept: Sequence[ClientSummary]) -> list[list[Any]]:
    """Each client's id, times sampled, mean norm, rejections, last reason."""
    return [[one.id, one.rounds, short(one.norm), one.rejected, one.reason] for one in kept]


def columns(
    clients: Sequence[ClientSummary],
    kept: Sequence[ClientSummary],
    own: Mapping[int | str, float] | None = None,
) -> dict[str, Any]:
    """What else is known of those that are kept: a list for each column.

    `worst` are their places, the worst client first. A column of counts that are all zero is None,
    and so are those of trust if there is none in the records. `own` are clients' own scores, as
    they are shown.
    """
    scored = [short(own[one.id]) if own and one.id in own else None for one in kept]
    place = {one.id: k for k, one in enumerate(kept)}
    judged = any(one.scores for one in kept)
    trust: dict[str, Any] = {
        "trust": [short(one.trust, 3) for one in kept],
        "mean_trust": [short(one.mean_trust, 3) for one in kept],
        "scores": [line(one.scores) for one in kept],
        "judged": [len(one.scores) for one in kept],
        "flagged": [one.flagged for one in kept],
        "flags": [[one.flags.get(flag, 0) for flag in FLAGS] if one.flags else 0 for one in kept],
        "look": [int(one.to_look_at) for one in kept],
    }
    return {
        "worst": [place[one.id] for one in clients if one.id in place],
        "share": [short(one.share, 3) for one in kept],
        "loss": [short(one.loss, 4) for one in kept],
        "own": scored if any(score is not None for score in scored) else None,
        "ratio": [short(one.norm_ratio, 3) for one in kept],
        "left_out": _or_none([one.left_out for one in kept]),
        "clipped": _or_none([one.clipped for one in kept]),
        **(trust if judged else dict.fromkeys(trust)),
    }


def line(scores: Sequence[float]) -> str:
    """Scores from 0 to 1 as one letter or digit each, in base 36.

    >>> line([0, 0.5, 1]), len(line([0.5] * 500))
    ('0iz', 32)
    """
    n, many = min(len(scores), POINTS), len(scores)
    parts = [scores[k * many // n : (k + 1) * many // n] for k in range(n)]
    return "".join(LEVELS[round(35 * sum(part) / len(part))] for part in parts)


def mask(flags: Sequence[str]) -> int:
    """Flags as one number: 1 for the first of FLAGS, 2 for the second, 4, 8.

    >>> mask(["opposed", "copied"])
    10
    """
    return sum(1 << FLAGS.index(flag) for flag in flags)


def _or_none(counts: list[int]) -> list[int] | None:
    return counts if any(counts) else None
