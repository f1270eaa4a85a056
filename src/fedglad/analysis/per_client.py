"""What a run's records say of each client: how often it took part, its trust and its flags."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedglad.analysis.statistics import known
from fedglad.records import FLAGS, Record, Round
from fedglad.runs.line import by_design, number
from fedglad.runs.reader import Run, RunView

LEAST = 2  # judged rounds, from which on a client can be one to look at
SHARE = 0.5  # of them, in which it was flagged


@dataclass(frozen=True, kw_only=True)
class ClientSummary:
    """One client over all its rounds; means are over those that have the number.

    | field | meaning |
    |---|---|
    | `id`, `rounds` | who it is, and in how many rounds it was asked |
    | `share` | its mean share in the mean update, 0 where its update was left out |
    | `trust`, `mean_trust` | its last and its mean score, from 0 to 1, like the others; or None |
    | `scores` | the scores of all rounds that judged it, in their order |
    | `flagged`, `flags` | in how many rounds it was flagged, and how often by which flag |
    | `rejected`, `reason` | how many updates were rejected, and why the last one |
    | `left_out` | how many updates a filter or weighting left out by design |
    | `clipped` | how many updates a filter shortened |
    | `loss` | its mean training loss |
    | `norm`, `norm_ratio` | mean of ‖g‖, and of ‖g‖ over the round's median without the rejected |

    >>> ClientSummary(id=7, rounds=2, scores=(0.25, 0.125), flagged=2, flags={"opposed": 2}).doubt
    'opposed in 2 of 2 rounds'
    """

    id: int | str
    rounds: int
    share: float | None = None
    scores: tuple[float, ...] = ()
    flagged: int = 0
    flags: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected: int = 0
    reason: str | None = None
    left_out: int = 0
    clipped: int = 0
    loss: float | None = None
    norm: float | None = None
    norm_ratio: float | None = None

    @property
    def trust(self) -> float | None:
        """The score of the last round that judged it."""
        return self.scores[-1] if self.scores else None

    @property
    def mean_trust(self) -> float | None:
        """The mean of its scores."""
        return _mean(self.scores)

    @property
    def to_look_at(self) -> bool:
        """Whether at least half of the rounds that judged it, and two or more did, flagged it."""
        return len(self.scores) >= LEAST and self.flagged >= SHARE * len(self.scores)

    @property
    def doubt(self) -> str:
        """Its flags in words, the most frequent first; empty if it has none."""
        often = sorted(self.flags.items(), key=lambda one: (-one[1], one[0]))
        told = ", ".join(f"{flag} in {count}" for flag, count in often)
        return f"{told} of {len(self.scores)} rounds" if told else ""


def clients(
    run: str | Path | Run | RunView | Iterable[Mapping[str, Any] | Record | Round],
) -> list[ClientSummary]:
    """Every client of a run, the worst first: what the report's table of clients shows.

    `run` is a run's folder, finished or not, or records: lines of a `rounds.jsonl`, or what
    `server.step` and `fedglad.simulate` give. First come those to look at, which were flagged in
    at least half of two or more rounds; then the order is by the share of rounds in which they were
    flagged or rejected, and by mean trust. Clients without an id cannot be told apart: they are
    left out.

    >>> def member(client, trust, *flags):
    ...     return {"id": client, "weight": 0.5, "sq_norm": 4.0, "trust": trust, "flags": flags}
    >>> rounds = [
    ...     {"clients": [member("oslo", 0.25, "opposed"), member("rome", 0.9)]},
    ...     {"clients": [member("rome", 1.0), member("oslo", 0.25, "opposed", "boosted")]},
    ... ]
    >>> for client in clients(rounds):
    ...     print(client.id, client.mean_trust, client.doubt or "like the others")
    oslo 0.25 opposed in 2, boosted in 1 of 2 rounds
    rome 0.95 like the others
    """
    seen: dict[int | str, list[tuple[Mapping[str, Any], float | None]]] = {}
    if isinstance(run, str | Path):
        run = Run(Path(run))
    if isinstance(run, Run):
        run = run.read()
    for one in run.rounds if isinstance(run, RunView) else run:
        record = one.record if isinstance(one, Round) else one
        entries = record.clients if isinstance(record, Record) else record.get("clients") or ()
        norms = known(norm_of(entry) for entry in entries if not is_rejected(entry))
        usual = median(norms) if norms else None
        for entry in entries:
            if (name := entry.get("id")) is not None:
                norm = norm_of(entry)
                ratio = norm / usual if usual and norm is not None else None
                seen.setdefault(name, []).append((entry, ratio))
    return sorted((_summary(name, theirs) for name, theirs in seen.items()), key=_worst_first)


def worst(clients: Iterable[ClientSummary], most: int) -> str:
    """Those to look at in words, not more than so many by name; empty if there are none.

    >>> often = ClientSummary(id=7, rounds=6, scores=(0.4,) * 6, flagged=5, flags={"opposed": 5})
    >>> worst([often, ClientSummary(id=8, rounds=1)], 5)
    '7 (opposed in 5 of 6 rounds)'
    """
    found = [client for client in clients if client.to_look_at]
    named = ", ".join(f"{client.id} ({client.doubt})" for client in found[:most])
    return f"{named} and {len(found) - most} more" if len(found) > most else named


def _summary(
    name: int | str, theirs: Sequence[tuple[Mapping[str, Any], float | None]]
) -> ClientSummary:
    entries = [entry for entry, _ in theirs]
    reasons = [entry["rejected"] for entry in entries if is_rejected(entry)]
    flags = Counter(flag for entry in entries for flag in entry.get("flags") or ())
    return ClientSummary(
        id=name,
        rounds=len(entries),
        share=_mean(number(entry.get("weight")) for entry in entries),
        scores=tuple(known(number(entry.get("trust"), 0, 1) for entry in entries)),
        flagged=sum(bool(entry.get("flags")) for entry in entries),
        flags={flag: flags[flag] for flag in FLAGS if flag in flags},
        rejected=len(reasons),
        reason=reasons[-1] if reasons else None,
        left_out=sum(by_design(entry.get("rejected")) for entry in entries),
        clipped=sum("clipped" in entry for entry in entries),
        loss=_mean(number(entry.get("loss")) for entry in entries),
        norm=_mean(map(norm_of, entries)),
        norm_ratio=_mean(ratio for _, ratio in theirs),
    )


def _worst_first(client: ClientSummary) -> tuple[Any, ...]:
    mean = client.mean_trust
    bad = (client.flagged + client.rejected) / client.rounds  # what is rejected is not judged
    trust = 1.0 if mean is None else mean
    return not client.to_look_at, -bad, trust, -client.rounds, isinstance(client.id, str), client.id


def is_rejected(entry: Mapping[str, Any]) -> bool:
    """Whether something is wrong with the update: no filter or weighting left it out by design."""
    return "rejected" in entry and not by_design(entry["rejected"])


def norm_of(entry: Mapping[str, Any]) -> float | None:
    """‖g‖ of an update that was measured."""
    squared = number(entry.get("sq_norm"), 0)
    return None if squared is None else math.sqrt(squared)


def _mean(values: Iterable[float | None]) -> float | None:
    there = known(values)
    return fmean(there) if there else None
