"""The rules that flag a round, and a client of it, by the updates alone. They need no labels.

`Alarm` judges a round by its GSI; `Trust` each of its clients by how its update lies to those of
the others, this round's and the last that is kept of everybody else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from fedglad.core.checks import check
from fedglad.records import FLAGS
from fedglad.rng import stream

Client = int | str | None


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Flags a round by q = GSI/B over all parameters, B the running mean of GSI before it.

    | flag | rule | it means |
    |---|---|---|
    | `one-sided` | q < `low` | the updates agree more than usual: the cohort may be all alike |
    | `outlier` | q > `high` | they disagree more: some are unlike the others, or all are mixed |

    B ← β B + (1 − β) GSI with bias correction, over the rounds that stepped; the first `warmup` of
    them are not judged.

    The defaults were chosen on runs with forced bad rounds; how many of others they find, and how
    many alarms are false, is in docs/trust.md.

    >>> alarm, state = Alarm(warmup=1), {}
    >>> for gsi in (2.0, 2.1, 1.2):
    ...     flag, state = alarm.judge(gsi, state)
    >>> flag  # 1.2 is less than 0.75 of what was usual
    'one-sided'
    """

    low: Annotated[float, "GSI/B below which a round is one-sided"] = 0.75
    high: Annotated[float, "GSI/B above which a round has outliers"] = 1.45
    beta: Annotated[float, "how much of the history stays from round to round"] = 0.9
    warmup: Annotated[int, "rounds that are not judged"] = 5

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 < self.high:
            raise ValueError(
                f"Alarm(low={self.low!r}, high={self.high!r}): low must be in (0, 1), high above 1"
            )
        check(self, beta=(0 <= self.beta < 1, "in [0, 1)"))
        if self.warmup < 1:
            raise ValueError(
                f"Alarm(warmup={self.warmup!r}): there must be a round to compare with"
            )

    def usual(self, state: Mapping[str, Any]) -> float | None:
        """B, which the next round's GSI will be compared with; None during the warm-up."""
        seen = int(state.get("seen", 0))
        return float(state["mean"]) / (1 - self.beta**seen) if seen >= self.warmup else None

    def judge(
        self, gsi: float | None, state: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, Any]]:
        """The flag of a round, None for a usual one, and the state after it; {} at first.

        A round that was skipped has no GSI and changes nothing, nor does one whose GSI is no
        number.
        """
        if gsi is None or not math.isfinite(gsi):
            return None, dict(state)
        usual, flag = self.usual(state), None
        if usual is not None:
            flag = "one-sided" if gsi < self.low * usual else None
            flag = "outlier" if gsi > self.high * usual else flag
        seen, mean = int(state.get("seen", 0)), float(state.get("mean", 0.0))
        return flag, {"seen": seen + 1, "mean": self.beta * mean + (1 - self.beta) * gsi}


NEW: Mapping[str, float] = {
    "rounds": 0,
    "flagged": 0,
    "n": 0.0,
    "signed": 0.0,
    "all": 0.0,
    "loss": 0.0,
}
"""A client's record before its first round; see `Kept`."""

ENOUGH = 10  # clients seen twice, from which on one can be unlike the rest of them
COHORT = 4  # updates, from which on one of them can be long
SPREAD = 0.84  # a normal distribution's 80 % quantile in units of its standard deviation
LOWER = 4.5  # times the distance of 10 % and 30 % quantiles: 3.4 of its standard deviations


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What a server keeps of a round's updates, each of which is gone when the next comes in.

    | field | meaning |
    |---|---|
    | `clients` | their ids; None: unknown, judged by this round alone |
    | `norms` | ‖g‖ of the whole updates, before they are clipped |
    | `losses` | as the clients say; NaN where there is none |
    | `sample` | (client, coordinate): the same coordinates of everybody, see `Trust.coordinates` |

    >>> seen = Seen(clients=["a", "b"], norms=[5, 0], losses=[0.1, np.nan], sample=[[3, 4], [0, 0]])
    >>> seen.directions
    array([[0.6, 0.8],
           [0. , 0. ]], dtype=float32)
    """

    clients: Sequence[Client]
    norms: np.ndarray
    losses: np.ndarray
    sample: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("norms", float), ("losses", float), ("sample", np.float32)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        r, shapes = len(self.clients), (self.norms.shape, self.losses.shape, self.sample.shape[:1])
        if self.sample.ndim != 2 or any(shape != (r,) for shape in shapes):
            raise ValueError(
                f"Seen of {r} clients has norms {self.norms.shape}, losses {self.losses.shape} and "
                f"sample {self.sample.shape}: give one norm, one loss and one row for each"
            )
        if not ((self.norms >= 0) & (self.norms < math.inf)).all():
            raise ValueError(f"norms {self.norms}: only updates with a finite norm are judged")

    @property
    def directions(self) -> np.ndarray:
        """The rows of the sample with length 1; zeros for one that is zero or not finite."""
        rows = self.sample.astype(float)
        lengths = np.linalg.norm(rows, axis=1)
        good = np.isfinite(lengths) & (lengths > 0)
        scaled = np.divide(rows, lengths[:, None], out=np.zeros_like(rows), where=good[:, None])
        return scaled.astype(np.float32)

    @property
    def firsts(self) -> np.ndarray:
        """For every update the place of the first that is equal to it, norm and sample."""
        first: dict[tuple[float, bytes], int] = {}
        keys = zip(self.norms.tolist(), map(np.ndarray.tobytes, self.sample), strict=True)
        return np.array([first.setdefault(key, k) for k, key in enumerate(keys)], int)


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of clients from round to round, in the order in which they were last seen.

    | field | meaning |
    |---|---|
    | `clients` | {id: record}: its `rounds`, in how many it was `flagged`, and four running sums |
    | `samples` | the directions of the last of them, in the same order |

    >>> kept = Kept.of([[7, {**NEW, "rounds": 2}]], np.zeros((1, 3)))
    >>> kept.to_json()[0][0], kept.clients[7]["rounds"]
    (7, 2)
    """

    clients: Mapping[Client, Mapping[str, float]] = field(default_factory=dict[Client, Any])
    samples: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def to_json(self) -> list[list[Any]]:
        """All but the samples as JSON types; ids that are numbers stay numbers."""
        return [[client, dict(record)] for client, record in self.clients.items()]

    @classmethod
    def of(cls, records: Sequence[Any], samples: np.ndarray) -> "Kept":
        """What `to_json` gave, with the samples that were saved apart."""
        return cls(dict(records), np.asarray(samples, np.float32))

    def recent(self, n: int) -> list[Client]:
        """The n clients seen last, the very last at the end."""
        return list(self.clients)[len(self.clients) - n :]


@dataclass(frozen=True)
class Verdict:
    """What is thought of one client after a round.

    | field | meaning |
    |---|---|
    | `client` | its id |
    | `score` | in [0, 1]: 1 is like the others, below 0.5 is flagged |
    | `flags` | some of drifting, opposed, boosted, copied |
    | `agreement` | in (−1, 1): how far others' updates point where its own do, over its rounds |
    | `drift` | by how many spreads that and its loss are worse than other clients' |
    | `length` | its norm over the median of the round's |

    >>> Verdict(7, 0.1, ("boosted",), agreement=0.4, drift=0.0, length=10.0).flags
    ('boosted',)
    """

    client: Client
    score: float
    flags: tuple[str, ...]
    agreement: float
    drift: float
    length: float


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Scores every client of a round, and flags those that are unlike the others.

    | flag | rule | judged by |
    |---|---|---|
    | `drifting` | agreement A and loss are worse than other clients' by so many spreads | rounds, |
    | | | from the second on |
    | `opposed` | A < −`opposed` | all its rounds |
    | `boosted` | its norm is so many times the round's median, far outside the spread | this one |
    | `copied` | another client of the round sent the same update | this one |

    With c the cosines between samples, of a client's update with the others' of the round and
    with the last one that is kept of each other client,

        A = Σ c|c| / Σ c² · n/(n + 1)

    both sums over a client's rounds, older ones less by `memory` each, and n their number counted
    likewise. Squares let those count who have much in common: under label skew most clients have
    little to do with each other, but one whose update is turned around is the opposite of those
    that hold what it holds. Equal updates of a round are one voice, and none for each other.

    A client's score is 1/(1 + e²), e being the largest of what its flags compare, each over its
    threshold. The defaults were chosen on runs with attackers; what they find in others, and where
    they find nothing, is in docs/trust.md.

    >>> sample = [[1, 0], [1, 0.1], [1, -0.1], [-1, 0]]
    >>> seen = Seen(clients=[3, 5, 8, 9], norms=[1, 1, 1, 1], losses=[1, 1, 1, 1], sample=sample)
    >>> verdicts, kept = Trust().judge(seen, Kept())
    >>> [verdict.flags for verdict in verdicts]
    [(), (), (), ('opposed',)]
    """

    opposed: Annotated[float, "agreement below minus this is opposed"] = 0.18
    drifting: Annotated[float, "spreads by which agreement and loss are worse than usual"] = 4.5
    boosted: Annotated[float, "times the median norm that an update may have"] = 3.0
    memory: Annotated[float, "how much of a client's record stays from one round of it on"] = 0.8
    sample: Annotated[int, "coordinates kept of every update; all of a smaller model"] = 4096
    samples: Annotated[int, "clients of whom the last update's sample is kept"] = 200
    clients: Annotated[int, "clients of whom the record is kept"] = 5000
    floor: Annotated[float, "no spread of agreement or log loss is taken for less"] = 0.15

    def __post_init__(self) -> None:
        check(
            self,
            opposed=(0 < self.opposed < 1, "in (0, 1)"),
            drifting=(0 < self.drifting < math.inf, "greater than 0"),
            boosted=(1 < self.boosted < math.inf, "greater than 1"),
            memory=(0 <= self.memory <= 1, "in [0, 1]"),
            sample=(self.sample >= 1, "1 or more"),
            samples=(self.samples >= 0, "0 or more"),
            clients=(self.clients >= self.samples, "at least as many as samples"),
            floor=(0 < self.floor < math.inf, "greater than 0"),
        )

    def coordinates(self, size: int) -> np.ndarray:
        """Which of a packed vector's coordinates make the sample, in rising order.

        >>> Trust(sample=3).coordinates(3), len(Trust(sample=3).coordinates(1000))
        (array([0, 1, 2]), 3)
        """
        if size <= self.sample:
            return np.arange(size)
        return np.sort(stream(0, "sample").choice(size, self.sample, replace=False))

    def judge(self, seen: Seen, kept: Kept) -> tuple[list[Verdict], Kept]:
        """The verdicts in the order of the clients, and what is kept after the round."""
        directions, firsts = seen.directions, seen.firsts
        moved = directions.any(axis=1)
        copied = moved & (np.bincount(firsts, minlength=len(firsts))[firsts] > 1)
        lengths = _over_median(seen.norms, nothing=-math.inf)
        records = self._records(seen, directions, firsts, kept)
        agreement = np.array([_mean(record, "signed") for record in records])
        drift = self._worse(seen, records, kept)
        evidence = {
            "drifting": drift / self.drifting,
            "opposed": -agreement / self.opposed,
            "boosted": lengths.clip(0) / self._limit(lengths),
            "copied": np.where(copied, math.inf, 0.0),
        }
        verdicts: list[Verdict] = []
        for k, (client, record) in enumerate(zip(seen.clients, records, strict=True)):
            found = {flag: float(evidence[flag][k]) for flag in FLAGS}
            flags = tuple(flag for flag in FLAGS if found[flag] > 1)
            most = max(0.0, *found.values())
            score, length = 1 / (1 + most * most), math.exp(min(lengths[k], 100.0))
            facts = float(agreement[k]), float(drift[k]), length
            verdicts.append(Verdict(client, score, flags, *facts))
            record["rounds"] += 1
            record["flagged"] += bool(flags)
        return verdicts, self._keep(seen, records, directions, kept)

    def _records(
        self, seen: Seen, directions: np.ndarray, firsts: np.ndarray, kept: Kept
    ) -> list[dict[str, float]]:
        """The clients' records with this round in their sums; an update of zeros adds nothing."""
        signed, both = self._voices(seen, directions, firsts, kept)
        losses = _over_median(seen.losses, nothing=0.0)
        records: list[dict[str, float]] = []
        for k, client in enumerate(seen.clients):
            record = dict(kept.clients.get(client, NEW) if client is not None else NEW)
            if directions[k].any():
                new = {"n": 1.0, "signed": signed[k], "all": both[k], "loss": losses[k]}
                record |= {name: self.memory * record[name] + float(new[name]) for name in new}
            records.append(record)
        return records

    def _voices(
        self, seen: Seen, directions: np.ndarray, firsts: np.ndarray, kept: Kept
    ) -> tuple[np.ndarray, np.ndarray]:
        """The means of c|c| and of c² over the others, for every client."""
        ids, r, size = seen.clients, len(seen.clients), directions.shape[1]
        present, recent = set(ids), kept.recent(len(kept.samples))
        absent = [k for k, client in enumerate(recent) if client not in present]
        cosines = directions @ directions.T
        if absent:
            if kept.samples.shape[1] != size:
                raise ValueError(
                    f"samples of {kept.samples.shape[1]} coordinates are kept, these have {size}: "
                    "begin with Kept() when the model or Trust(sample=...) changes"
                )
            cosines = np.hstack([cosines, (directions @ kept.samples.T)[:, absent]])
        cosines = cosines.astype(float)
        voice = np.ones_like(cosines)
        voice[:, :r] = (firsts[:, None] != firsts) / np.bincount(firsts, minlength=r)[firsts]
        for k, client in enumerate(ids):  # several updates under one id, and no id
            voice[k, :r] *= [client is None or client != other for other in ids]
        signed, count = voice * cosines * abs(cosines), np.maximum(voice.sum(axis=1), 1e-12)
        return signed.sum(axis=1) / count, abs(signed).sum(axis=1) / count

    def _worse(self, seen: Seen, records: Sequence[Mapping[str, float]], kept: Kept) -> np.ndarray:
        """By how many spreads agreement is lower, and by how many loss is higher, than usual."""
        now = dict(zip(seen.clients, records, strict=True))
        before = {client: kept.clients[client] for client in kept.recent(len(kept.samples))}
        known = [record for client, record in (before | now).items() if client is not None]
        known = [record for record in known if record["n"] > 1]
        if len(known) < ENOUGH:
            return np.zeros(len(records))
        sums = np.zeros(len(records))
        for name, sign in (("signed", -1.0), ("loss", 1.0)):
            middle, best = np.quantile([sign * _mean(record, name) for record in known], (0.5, 0.2))
            spread = max((middle - best) / SPREAD, self.floor)
            worse = np.array([sign * _mean(record, name) for record in records]) - middle
            sums += worse.clip(0) / spread
        return np.where([record["n"] > 1 for record in records], sums, 0.0)

    def _limit(self, lengths: np.ndarray) -> float:
        """The logarithm of the norm, over the round's median, from which on an update is long.

        Its spread is that of the shorter ones, which long ones cannot widen.
        """
        finite = lengths[np.isfinite(lengths)]
        if len(finite) < COHORT:
            return math.inf
        low, high = np.quantile(finite, (0.1, 0.3))
        return max(math.log(self.boosted), LOWER * float(high - low))

    def _keep(
        self,
        seen: Seen,
        records: Sequence[Mapping[str, float]],
        directions: np.ndarray,
        kept: Kept,
    ) -> Kept:
        """The round's clients after all others; those seen longest ago are forgotten."""
        now = {client: k for k, client in enumerate(seen.clients) if client is not None}
        recent = kept.recent(len(kept.samples))
        rows = [k for k, client in enumerate(recent) if client not in now]
        fresh = directions[list(now.values())]
        samples = np.concatenate([kept.samples[rows], fresh]) if rows else fresh
        clients = {client: kept.clients[client] for client in kept.clients if client not in now}
        clients |= {client: records[k] for client, k in now.items()}
        forgotten = max(0, len(clients) - self.clients)
        return Kept(
            dict(list(clients.items())[forgotten:]), samples[max(0, len(samples) - self.samples) :]
        )


def _mean(record: Mapping[str, float], name: str) -> float:
    """A running sum as a mean, drawn to zero while there are few rounds; agreement is one of c²."""
    n = record["n"]
    if name == "loss":
        return record[name] / (n + 1)
    return record[name] / record["all"] * n / (n + 1) if record["all"] else 0.0


def _over_median(values: np.ndarray, nothing: float) -> np.ndarray:
    """Logarithms less their median; `nothing` where a value has none."""
    good = np.isfinite(values) & (values > 0)
    logs = np.log(values, out=np.full(len(values), nothing), where=good)
    return np.where(good, logs - np.median(logs[good]), nothing) if good.any() else logs
