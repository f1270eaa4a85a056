"""The rules that flag a round, and a client of it, by the updates alone. They need no labels.

`Alarm` judges a round by its GSI; `Trust` each of its clients by how its update lies to those of
the others, this round's and the last that is kept of everybody else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, cast

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


ENOUGH = 10  # clients seen twice, from which on one can be unlike the rest of them
COHORT = 4  # updates, from which on one of them can be long
SPREAD = 0.84  # a normal distribution's 80 % quantile in units of its standard deviation
LITTLE = 0.01  # c⁴ of a cosine of 0.32, which is added where there is little in common
LOWER = 4.5  # times the distance of 10 % and 30 % quantiles: 3.4 of its standard deviations
SQUARES = 1e-20, 1e30  # squares of lengths between which float32 computes them without loss
MOST = 1e15  # no number of a history is larger: what is counted or added up stays far below
FLAG_SETS = [
    tuple(flag for k, flag in enumerate(FLAGS) if code >> k & 1) for code in range(1 << len(FLAGS))
]


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
        rows, inverse = self.scaled()
        return rows * inverse[:, None]

    def scaled(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that point where those of the sample do, and what makes their lengths 1 (or 0)."""
        rows, (low, high) = self.sample, SQUARES
        squares = np.einsum("ij,ij->i", rows, rows)  # which does not warn of overflow
        usual = (squares > low) & (squares < high)
        if usual.all():
            return rows, 1 / np.sqrt(squares)
        rows, odd = rows.copy(), ~usual
        rows[odd] = _unit(rows[odd])
        squares[odd] = 1
        return rows, np.where(rows.any(axis=1), 1 / np.sqrt(squares), 0)

    @property
    def firsts(self) -> np.ndarray:
        """For every update the place of the first that is equal to it, norm and sample."""
        firsts, order = np.arange(len(self.norms)), np.argsort(self.norms, kind="stable")
        ordered = self.norms[order]
        same = ordered[1:] == ordered[:-1]
        if same.any():  # only they can be equal: nobody else's bytes are looked at
            first: dict[tuple[float, bytes], int] = {}
            for k in np.sort(order[np.append(same, False) | np.append(False, same)]).tolist():
                key = float(self.norms[k]), self.sample[k].tobytes()
                firsts[k] = first.setdefault(key, k)
        return firsts


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows with length 1, in float64, where no square of a float32 is too large or too small."""
    rows = rows.astype(float)
    rows[~np.isfinite(rows).all(axis=1)] = 0
    lengths = np.linalg.norm(rows, axis=1)
    return rows / np.where(lengths > 0, lengths, 1)[:, None]


class History(NamedTuple):
    """What is kept of one client.

    | field | meaning |
    |---|---|
    | `rounds`, `flagged` | in how many rounds it was seen, and in how many it was flagged |
    | `n` | its rounds, older ones counted less, as they are in the three sums that follow |
    | `signed`, `fourths` | of c\\|c\\| and of c⁴, with c as in `Trust` |
    | `loss` | of the logarithms of its loss over the round's median |

    >>> History(rounds=1, n=1).flagged
    0.0
    """

    rounds: float = 0.0
    flagged: float = 0.0
    n: float = 0.0
    signed: float = 0.0
    fourths: float = 0.0
    loss: float = 0.0


NEW = tuple(History())


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of clients from round to round, in the order in which they were last seen.

    | field | meaning |
    |---|---|
    | `clients` | {id: the numbers of its `History`} |
    | `samples` | the directions of the last of them, in the same order, as float16 |

    >>> kept = Kept.of([[7, [2, 0, 1.8, 0.3, 0.5, 0]]], np.array([[0.6, 0.8]]))
    >>> kept.history(7).rounds, kept.to_json()
    (2.0, [[7, [2.0, 0.0, 1.8, 0.3, 0.5, 0.0]]])
    """

    clients: dict[Client, tuple[float, ...]] = field(default_factory=dict[Client, Any])
    samples: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float16))

    def history(self, client: Client) -> History:
        """The client's history; one without rounds for a client that is not known."""
        return History(*self.clients.get(client, NEW))

    def to_json(self) -> list[list[Any]]:
        """All but the samples as JSON types; ids that are numbers stay numbers."""
        return [[client, list(history)] for client, history in self.clients.items()]

    @classmethod
    def of(cls, records: Sequence[Any], samples: np.ndarray) -> "Kept":
        """What `to_json` gave, with the samples that were saved apart; refuses what it cannot be.

        >>> Kept.of([[7, [2, 0, -1, 0, 0, 0]]], np.zeros((0, 0)))
        Traceback (most recent call last):
        ValueError: client 7 is kept with n=-1: must be from 0 to 1e+15
        """
        clients: dict[Client, tuple[float, ...]] = {}
        if not isinstance(records, list | tuple):
            raise ValueError(f"clients are kept as a {type(records).__name__}: must be a list")
        for record in records:
            if not isinstance(record, list | tuple) or len(cast(Any, record)) != 2:
                raise ValueError(f"{record!r:.80} is kept: must be a client's id and its history")
            client, numbers = cast(tuple[Any, Any], record)
            if isinstance(client, bool) or not isinstance(client, int | str):
                raise ValueError(f"client {client!r:.80} is kept: must be an int or a string")
            if client in clients:
                raise ValueError(f"client {client!r:.80} is kept twice")
            clients[client] = _checked_history(f"client {client!r:.80} is kept with", numbers)
        return cls(clients, _checked_samples(samples, len(clients)))

    def recent(self, n: int) -> list[Client]:
        """The n clients seen last, the very last at the end."""
        return list(islice(reversed(self.clients), n))[::-1]


def _checked_history(what: str, numbers: Any) -> tuple[float, ...]:
    if not isinstance(numbers, list | tuple) or len(cast(Any, numbers)) != len(NEW):
        raise ValueError(f"{what} {numbers!r:.80}: must be {len(NEW)} numbers")
    for name, value in zip(History._fields, cast(Any, numbers), strict=True):
        low = -MOST if name in ("signed", "loss") else 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{what} {name}={value!r:.80}: must be a number")
        if not low <= value <= MOST:
            raise ValueError(f"{what} {name}={value!r:.80}: must be from {low:g} to {MOST:g}")
    history = History(*map(float, cast(Any, numbers)))
    if history.flagged > history.rounds:
        raise ValueError(f"{what} flagged={history.flagged:g} and rounds={history.rounds:g}")
    return tuple(history)


def _checked_samples(samples: np.ndarray, clients: int) -> np.ndarray:
    if samples.ndim != 2 or samples.dtype.kind != "f":
        raise ValueError(
            f"samples are kept as {samples.dtype} of shape {samples.shape}: "
            "must be rows of floating-point numbers"
        )
    if len(samples) > clients:
        raise ValueError(f"{len(samples)} samples of {clients} clients are kept: at most one each")
    with np.errstate(over="ignore"):
        rows = samples.astype(np.float16)
    lengths = np.linalg.norm(rows.astype(np.float32), axis=1)
    if not ((abs(lengths - 1) < 0.01) | (lengths == 0)).all():  # float16 is good for 0.001
        raise ValueError("samples are kept that are not finite, or of another length than 1")
    return rows


class Verdict(NamedTuple):
    """What is thought of one client after a round.

    | field | meaning |
    |---|---|
    | `client` | its id |
    | `score` | in [0, 1]: 1 is like the others, below 0.5 is flagged |
    | `flags` | some of drifting, opposed, boosted, copied |
    | `agreement` | A: how far others' updates point where its own do, over its rounds |
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
    | `drifting` | A and loss are worse than other clients' by so many spreads | all its rounds, |
    | | | from the second on |
    | `opposed` | A < −`opposed` | all its rounds |
    | `boosted` | its norm is so many times the round's median, far outside the spread | this one |
    | `copied` | another client of the round sent the same update | this one |

    With c the cosines between samples, of a client's update with the others' of the round and
    with the last one that is kept of each other client,

        A = Σ c|c| / √(Σ c⁴ + 0.01)

    both sums over others and over the client's rounds, older ones less by `memory` each. Squares
    let those count who have much in common: under label skew most clients have little to do with
    each other, but one whose update is turned around is the opposite of those that hold what it
    holds. The root is what the sum would be about if the signs of the cosines were chance: A is
    never below −1 by one cosine alone, and near 0 where all of them are small. Equal updates of a
    round are one voice, and none for each other.

    An update is compared with at most `samples` others, the round's first: of a larger cohort
    that many, evenly spaced, then those that were kept last of clients that are absent.

    A client's score is 1/(1 + e²), e being the largest of what its flags compare, each over its
    threshold. The defaults were chosen on runs with attackers; what they find in others, and where
    they find nothing, is in docs/trust.md.

    >>> sample = [[1, 0], [1, 0.1], [1, -0.1], [-1, 0]]
    >>> seen = Seen(clients=[3, 5, 8, 9], norms=[1, 1, 1, 1], losses=[1, 1, 1, 1], sample=sample)
    >>> verdicts, kept = Trust().judge(seen, Kept())
    >>> [verdict.flags for verdict in verdicts]
    [(), (), (), ('opposed',)]
    """

    opposed: Annotated[float, "agreement below minus this is opposed"] = 1.0
    drifting: Annotated[float, "spreads by which agreement and loss are worse than usual"] = 4.0
    boosted: Annotated[float, "times the median norm that an update may have"] = 3.0
    memory: Annotated[float, "how much of a client's record stays from one round of it on"] = 0.8
    sample: Annotated[int, "coordinates kept of every update; all of a smaller model"] = 4096
    samples: Annotated[int, "updates compared with; clients whose last one's sample is kept"] = 64
    clients: Annotated[int, "clients of whom the record is kept"] = 5000
    floor: Annotated[float, "no spread of log loss is taken for less"] = 0.15

    def __post_init__(self) -> None:
        check(
            self,
            opposed=(0 < self.opposed < math.inf, "greater than 0"),
            drifting=(0 < self.drifting < math.inf, "greater than 0"),
            boosted=(1 < self.boosted < math.inf, "greater than 1"),
            memory=(0 <= self.memory <= 1, "in [0, 1]"),
            sample=1,
            samples=0,
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
        (rows, inverse), firsts, r = seen.scaled(), seen.firsts, len(seen.clients)
        # The last place of every client; those without an id are like nobody else and not kept.
        now: dict[Client, int] = {c: k for k, c in enumerate(seen.clients) if c is not None}
        recent = kept.recent(len(kept.samples))
        absent = [k for k, client in enumerate(recent) if client not in now]
        if absent and kept.samples.shape[1] != rows.shape[1]:
            raise ValueError(
                f"samples of {kept.samples.shape[1]} coordinates are kept, these have "
                f"{rows.shape[1]}: begin with Kept() when the model or Trust(sample=...) changes"
            )
        places = np.arange(r) if r <= self.samples else np.arange(self.samples) * r // self.samples
        others = _last(absent, self.samples - len(places))
        cosines = _cosines(rows, inverse, places, kept.samples[others])
        codes = np.arange(r)  # of the clients
        if len(now) < r:
            codes = np.array([k if c is None else now[c] for k, c in enumerate(seen.clients)])
        new, moved = _voices(cosines, codes, firsts, places), inverse > 0
        histories = [kept.clients.get(client, NEW) for client in seen.clients]
        histories += [kept.clients[recent[k]] for k in others]
        flat = np.fromiter(chain.from_iterable(histories), float, len(NEW) * len(histories))
        everyone = flat.reshape(-1, len(NEW)).T.copy()  # a column each, the round's clients first
        sums = everyone[:, :r]
        sums[2:] *= np.where(moved, self.memory, 1)  # an update of zeros adds nothing
        sums[2] += moved
        sums[3:5] += new
        sums[5] += moved * _over_median(seen.losses, nothing=0.0)
        agreement = _agreement(sums)
        drift = self._drift(everyone, r, np.append(places, np.arange(r, len(histories))))
        lengths = _over_median(seen.norms, nothing=-math.inf)
        evidence = np.empty((len(FLAGS), r))  # in their order
        evidence[0] = drift / self.drifting
        evidence[1] = -agreement / self.opposed
        evidence[2] = lengths.clip(0) / self._limit(lengths)
        evidence[3] = np.where(moved & (np.bincount(firsts)[firsts] > 1), math.inf, 0)
        found = (1 << np.arange(len(FLAGS))) @ (evidence > 1)
        most = evidence.max(axis=0, initial=0)
        sums[0] += 1
        sums[1] += found > 0
        columns = (
            seen.clients,
            (1 / (1 + most * most)).tolist(),
            [FLAG_SETS[flags] for flags in found.tolist()],
            agreement.tolist(),
            drift.tolist(),
            np.exp(np.minimum(lengths, 100.0)).tolist(),
        )
        verdicts = list(map(partial(tuple.__new__, Verdict), zip(*columns, strict=True)))
        return verdicts, self._keep(now, sums, kept, absent, rows, inverse)

    def _drift(self, everyone: np.ndarray, r: int, compared: np.ndarray) -> np.ndarray:
        """By how many spreads the first r have lower agreement, and higher loss, than others."""
        n, drift = everyone[2], np.zeros(r)
        known = compared[n[compared] > 1]
        if len(known) < ENOUGH:
            return drift
        steady = -_agreement(everyone) / np.sqrt(np.maximum(n, 1))  # does not grow with the rounds
        worse = np.array([steady, everyone[5] / (n + 1)])
        usual, floors = np.sort(worse[:, known]).tolist(), (1.0, self.floor)
        for own, ordered, floor in zip(worse[:, :r], usual, floors, strict=True):
            middle, best = _quantile(ordered, 0.5), _quantile(ordered, 0.2)
            drift += (own - middle).clip(0) / max((middle - best) / SPREAD, floor)
        return drift * (n[:r] > 1)

    def _limit(self, lengths: np.ndarray) -> float:
        """The logarithm of the norm, over the round's median, from which on an update is long.

        Its spread is that of the shorter ones, which long ones cannot widen.
        """
        finite = np.sort(lengths[lengths > -math.inf]).tolist()
        if len(finite) < COHORT:
            return math.inf
        spread = _quantile(finite, 0.3) - _quantile(finite, 0.1)
        return max(math.log(self.boosted), LOWER * spread)

    def _keep(
        self,
        now: Mapping[Client, int],
        sums: np.ndarray,
        kept: Kept,
        absent: list[int],
        rows: np.ndarray,
        inverse: np.ndarray,
    ) -> Kept:
        """The round's clients after all others; those seen longest ago are forgotten."""
        clients = dict(kept.clients)
        for client in now:
            clients.pop(client, None)
        histories = list(map(tuple, sums.T.tolist()))
        clients.update((client, histories[k]) for client, k in now.items())
        for client in list(islice(clients, max(0, len(clients) - self.clients))):
            del clients[client]
        fresh = _last(list(now.values()), self.samples)
        stay = _last(absent, self.samples - len(fresh))
        samples = np.empty((len(stay) + len(fresh), rows.shape[1]), np.float16)
        if stay:
            np.take(kept.samples, stay, axis=0, out=samples[: len(stay)], mode="clip")
        # Where all clients are known and different, these are the last rows: no copy is needed.
        chosen = slice(len(rows) - len(fresh), None) if len(now) == len(rows) else fresh
        _convert(rows[chosen] * inverse[chosen, None], samples[len(stay) :])
        return Kept(clients, samples)


@dataclass(frozen=True, kw_only=True)
class NoTrust:
    """Nobody is judged, as in a simulation whose clients are all one's own.

    >>> from fedglad.config import load
    >>> load("mnist")[1].sections["trust"]
    NoTrust()
    """


REGISTRY: dict[str, type] = {"none": NoTrust, "clients": Trust}


def _last(places: list[int], n: int) -> list[int]:
    return places[max(0, len(places) - n) :]


def _cosines(
    rows: np.ndarray, inverse: np.ndarray, places: np.ndarray, absent: np.ndarray
) -> np.ndarray:
    """(compared with, client): those with some of the round, then those with absent clients."""
    from torch import from_numpy

    p = len(places)
    compared = np.empty((p + len(absent), rows.shape[1]), np.float32)
    np.multiply(rows[places], inverse[places, None], out=compared[:p])
    if len(absent):
        _convert(absent, compared[p:])
    # Not by NumPy: the threads of its library and those of torch would wait for each other.
    products = from_numpy(compared) @ from_numpy(rows).T
    return products.numpy() * inverse


def _voices(
    cosines: np.ndarray, codes: np.ndarray, firsts: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of c|c| and of c⁴ over the others, for every client."""
    p, own = len(places), np.arange(len(codes))
    voice = np.ones(len(cosines), np.float32)
    if (codes == own).all() and (firsts == own).all():
        cosines[own[:p], places] = 0
    else:
        equal = firsts[places]
        cosines[:p][(codes[places, None] == codes) | (equal[:, None] == firsts)] = 0
        voice[:p] = 1 / np.bincount(equal, minlength=1)[equal]
    signed = cosines * np.abs(cosines)
    return voice @ signed, voice @ (signed * signed)


def _agreement(sums: np.ndarray) -> np.ndarray:
    """A, of histories as columns."""
    return sums[3] / np.sqrt(sums[4] + LITTLE)


def _over_median(values: np.ndarray, nothing: float) -> np.ndarray:
    """Logarithms less their median; `nothing` where a value has none."""
    good = (values > 0) & (values < math.inf)
    if not good.all():
        result = np.full(len(values), nothing)
        if good.any():
            result[good] = _over_median(values[good], nothing)
        return result
    logs = np.log(values)
    return logs - _quantile(np.sort(logs).tolist(), 0.5) if len(logs) else logs


def _quantile(ordered: list[float], q: float) -> float:
    """np.quantile of values in order, in a hundredth of its time."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _convert(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes rows into `out`, of another precision: twenty times as fast as NumPy with float16."""
    from torch import from_numpy

    from_numpy(out).copy_(from_numpy(rows))
