"""What flows through a round: Update in, Statistics inside, Record out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Arrays = Mapping[str, Any]
"""Tensor name to torch tensor, numpy array or anything with `__array__` (a JAX array)."""

CANCELLED = 1000.0
"""A GSI from here on means that the updates cancel: r orthogonal updates give only sqrt(r)."""

POSITIONS = 16
"""So many consecutive positions of a cohort make a block: a block is summed by itself, in order,
and the blocks are added in order. So whoever sums a block, all come to the same bits."""

FLAGS = ("drifting", "opposed", "boosted", "copied")
"""What may be said of a client that is unlike the others; `fedglad.trust.Trust` says when."""


@dataclass(frozen=True, eq=False)
class Update:
    """One client's result: the difference θ − θ_k, or the trained state_dict θ_k.

    | argument | meaning |
    |---|---|
    | `delta`  | {name: θ − θ_k}, every parameter (buffers among them are not looked at); |
    |          | or one packed vector, `server.layout.pack({...})` |
    | `model`  | the trained state_dict, parameters and buffers; the server forms the difference |
    | `weight` | the client's weight in the mean, usually its number of samples |
    | `client` | who it was: an int or a string, kept in the record |
    | `steps`, `loss` | local steps taken, mean training loss: kept for methods and the record |
    | `extra`  | a second set of tensors some client methods send (SCAFFOLD's c_k⁺ − c_k) |
    | `buffers` | trained buffers that go with a `delta`; a `model` brings its own |

    The arrays are read, never written, and must stay as they are until `server.step` returns
    when a list is given; from an iterator, until the next item is asked for.

    >>> update = Update({"w": np.array([0.1, -0.2])}, weight=600, client="berlin", loss=0.7)
    """

    delta: Arrays | Tensor | None = None
    model: Arrays | None = None
    _: KW_ONLY
    weight: float = 1.0
    client: int | str | None = None
    steps: int | None = None
    loss: float | None = None
    extra: Arrays | Tensor | None = None
    buffers: Arrays | None = None

    def __post_init__(self) -> None:
        if (self.delta is None) == (self.model is None):
            given = "neither" if self.delta is None else "both"
            raise ValueError(
                f"an Update takes the difference or the trained model, got {given}: "
                "Update({name: theta - theta_k}) or Update(model=state_dict)"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Bundle:
    """Many clients' updates at once: the rows of one matrix, each a packed vector.

    >>> both = Bundle(deltas=np.eye(2), weights=[1, 1], clients=[4, 6], steps=[5, 5], losses=[1, 1])
    >>> [update.client for update in both.updates()]
    [4, 6]
    """

    deltas: Tensor
    weights: list[float]
    clients: list[int]
    steps: list[int]
    losses: list[float]

    def updates(self) -> list[Update]:
        """The same one by one."""
        rows = zip(self.deltas, self.weights, self.clients, self.steps, self.losses, strict=True)
        return [
            Update(delta, weight=weight, client=client, steps=steps, loss=loss)
            for delta, weight, client, steps, loss in rows
        ]


@dataclass(frozen=True)
class Failure:
    """In place of an Update: a client that was asked and has nothing, and why.

    >>> Failure("berlin", "timed out")
    Failure(client='berlin', reason='timed out', detail='')
    """

    client: int | str | None
    reason: str
    detail: str = ""  # a traceback, for the log


class Several(list[Update | Failure]):
    """Updates from an iterator that stay as they are until the next item is asked for.

    >>> both = Several([Update({"w": np.ones(1)}), Failure("berlin", "timed out")])
    """


@dataclass(frozen=True)
class Statistics:
    """A cohort in numbers, per parameter tensor: all that an adapter may look at.

    | field | meaning |
    |---|---|
    | `sum_sq`, `sum_sq2` | Σ w‖g‖² and Σ w²‖g‖² |
    | `mean_sq` | ‖ḡ‖² with ḡ = Σ w g, or the robust mean that took its place |
    | `weights` | w_k, summing to 1 unless an estimator says otherwise |
    | `weight_sq` | Σ w², where the server knows no more of the weights than their sums; |
    |             | `weights` then are some that have it |
    | `N` | the number of clients there are, where known |
    | `direction` | ⟨ḡ, m⟩ for an adapter that declares a running mean m of ḡ |
    | `model_sq` | ‖θ‖² before the step, for an adapter or optimizer that declares its need |
    | `moved_sq` | ‖θ − θ_0‖² before the step, for an optimizer that keeps such a θ_0 |

    >>> Statistics({"w": 5.0}, {"w": 2.5}, {"w": 1.25}, (0.5, 0.5)).gsi_all  # √(5/1.25)
    2.0
    """

    sum_sq: dict[str, float]
    sum_sq2: dict[str, float]
    mean_sq: dict[str, float]
    weights: tuple[float, ...]
    N: int | None = None
    direction: dict[str, float] | None = None
    model_sq: dict[str, float] | None = None
    weight_sq: float | None = None
    moved_sq: dict[str, float] | None = None

    @property
    def r(self) -> int:
        """The number of updates in the mean."""
        return len(self.weights)

    @property
    def gsi_all(self) -> float:
        """GSI over all parameters as one group."""
        sum_sq, mean_sq = (np.array([math.fsum(x.values())]) for x in (self.sum_sq, self.mean_sq))
        return float(indicator(sum_sq, mean_sq, self.weights)[0])


def indicator(sum_sq: np.ndarray, mean_sq: np.ndarray, weights: Iterable[float]) -> np.ndarray:
    """GSI = sqrt(W Σw‖g‖² / ‖Σwg‖²), W = Σw, per group (Yang et al. 2023, eq. 8).

    1 where all updates agree, or are zero, or there is only one; capped at 1000, where they
    cancel. Below 1 only for a robust mean.

    >>> indicator(np.array([5.0, 4.0]), np.array([1.25, 4.0]), (0.5, 0.5))
    array([2., 1.])
    """
    weights = tuple(weights)
    if len(weights) == 1:
        return np.ones_like(sum_sq)
    top = math.fsum(weights) * sum_sq
    floor = top / CANCELLED**2
    usable = (top > 0) & (mean_sq > floor)
    gsi = np.where(top > 0, CANCELLED, 1.0)
    return np.sqrt(np.divide(top, mean_sq, out=gsi**2, where=usable))


def weights_of(count: int, sum_of_squares: float) -> tuple[float, ...]:
    """Weights with a sum of 1 and this sum of squares: adapters look at nothing else of them.

    >>> weights_of(2, 0.5)
    (0.5, 0.5)
    """
    spread = max(0.0, count * sum_of_squares - 1)  # 0 for equal weights, r − 1 for a single one
    first = (1 + math.sqrt((count - 1) * spread)) / count
    return (first, *[(1 - first) / (count - 1)] * (count - 1)) if count > 1 else (1.0,)


@dataclass(frozen=True)
class Record:
    """What happened in one round: the server's answer to `step`.

    | field | meaning |
    |---|---|
    | `status`, `reason` | "stepped", or "skipped" and why (θ and all state are then unchanged) |
    | `clients` | one dict each: id, weight (share in the mean), loss, sq_norm; `rejected`: why |
    | `train_loss` | the mean of the clients' losses by their shares |
    | `gsi`, `baseline`, `scale` | {group: float}: the indicator, what it was compared with, s |
    | `gsi_all`, `gsi_unfiltered` | GSI over all parameters, after and before the filter |
    | `statistics` | the sums per tensor that all of it came from |
    | `distances` | {client: ‖g_k − ḡ‖} from the plain mean, if the server measures them |
    | `epsilon` | ε of all rounds so far, with privacy; GSI and statistics are then left out |

    >>> record = Record("stepped", clients=[{"id": 7, "rejected": "norm 1e+09 is above ..."}])
    >>> record.stepped, record.rejected
    (True, {7: 'norm 1e+09 is above ...'})
    """

    status: str
    reason: str | None = None
    clients: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gsi: dict[str, float] = field(default_factory=dict[str, float])
    baseline: dict[str, float] = field(default_factory=dict[str, float])
    scale: dict[str, float] = field(default_factory=dict[str, float])
    gsi_all: float | None = None
    gsi_unfiltered: float | None = None
    train_loss: float | None = None
    statistics: Statistics | None = None
    distances: dict[int | str | None, float] | None = None
    epsilon: float | None = None

    @property
    def stepped(self) -> bool:
        """Whether the model was moved."""
        return self.status == "stepped"

    @property
    def rejected(self) -> dict[int | str, str]:
        """{client: reason} of the updates that were left out; without an id, "#place"."""
        named = ((f"#{k}" if c["id"] is None else c["id"], c) for k, c in enumerate(self.clients))
        return {name: client["rejected"] for name, client in named if "rejected" in client}

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON types, in the fields of a run's `rounds.jsonl`."""
        tensors: dict[str, dict[str, float]] = {}
        if stats := self.statistics:
            parts = {"sum_sq": stats.sum_sq, "sum_sq2": stats.sum_sq2, "mean_sq": stats.mean_sq}
            tensors = {n: {key: part[n] for key, part in parts.items()} for n in stats.sum_sq}
        groups = {
            name: {"gsi": gsi, "baseline": self.baseline.get(name), "scale": self.scale[name]}
            for name, gsi in self.gsi.items()
        }
        return {
            "status": self.status,
            **({"reason": self.reason} if self.reason else {}),
            "clients": self.clients,
            "train_loss": self.train_loss,
            "gsi_all": self.gsi_all,
            "gsi_unfiltered": self.gsi_unfiltered,
            **({"population": stats.N} if stats and stats.N is not None else {}),
            **({"weight_sq": stats.weight_sq} if stats and stats.weight_sq is not None else {}),
            "tensors": tensors,
            "groups": groups,
            **({"epsilon": self.epsilon} if self.epsilon is not None else {}),
        }


SHARES = ("accuracy", "f1", "iou", "dice")
"""How the name of a metric ends that is a share of one, and is shown as a percentage."""

FALLING = ("loss", "error", "mae", "mse", "perplexity", "seconds", "skipped")
"""How the name of a number ends of which less is better, where a task does not say it."""

METRIC = re.compile("[a-z0-9_]{1,40}")
"""The name of a metric in records."""

_WORDS = {"mae": "MAE", "mse": "MSE", "rmse": "RMSE", "f1": "F1", "iou": "IoU", "r2": "R²"}


@dataclass(frozen=True)
class Score:
    """Which metric of a task tables, tuning and stopping look at, and whether more is better.

    >>> Score().text(0.8125), Score("perplexity", higher=False).text(4.5)
    ('81.2 %', '4.5')
    """

    name: str = "accuracy"
    higher: bool = True

    @property
    def share(self) -> bool:
        """Whether it is a share of one."""
        return self.name.endswith(SHARES)

    @property
    def unit(self) -> float:
        """What a value is multiplied with to be shown."""
        return 100.0 if self.share else 1.0

    @property
    def sign(self) -> int:
        """1 if more is better, −1 if less is."""
        return 1 if self.higher else -1

    @property
    def words(self) -> str:
        """Its name as people write it.

        >>> Score("mean_iou").words, Score("mae", higher=False).words
        ('mean IoU', 'MAE')
        """
        return " ".join(_WORDS.get(word, word) for word in self.name.split("_") if word) or "score"

    @property
    def title(self) -> str:
        """The same at the head of a line."""
        return f"{self.words[:1].upper()}{self.words[1:]}"

    def better(self, new: float, old: float) -> bool:
        """Whether the new one is better than the old."""
        return new > old if self.higher else new < old

    def text(self, value: float | None, digits: int = 1, sign: str = "") -> str:
        """The number as people read it; a share is a percentage with so many digits."""
        if value is None:
            return "–"
        return f"{self.figure(value, digits, sign)}{' %' if self.share else ''}"

    def figure(self, value: float, digits: int = 2, sign: str = "") -> str:
        """The same without its unit, as a table's column has it.

        >>> Score().figure(0.8125), Score("mae", higher=False).figure(-0.25, sign="+")
        ('81.25', '-0.25')
        """
        return f"{100 * value:{sign}.{digits}f}" if self.share else f"{value:{sign}.4g}"

    def of(self, metric: str) -> Score:
        """Another metric of the same task, and whether more of it is better, by its name.

        >>> Score().of("perplexity"), Score("r2").of("r2")
        (Score(name='perplexity', higher=False), Score(name='r2', higher=True))
        """
        return self if metric == self.name else Score(metric, not metric.endswith(FALLING))

    def to_dict(self) -> dict[str, Any]:
        """As a record has it."""
        return {"name": self.name, "higher": self.higher}

    @classmethod
    def read(cls, raw: Any) -> Score | None:
        """What `to_dict` gave; None for anything else.

        >>> Score.read({"name": "mae", "higher": False}), Score.read({"name": "<b>", "higher": 1})
        (Score(name='mae', higher=False), None)
        """
        if not isinstance(raw, Mapping):
            return None
        given = cast("Mapping[Any, Any]", raw)
        name, higher = given.get("name"), given.get("higher")
        if not isinstance(name, str) or not isinstance(higher, bool):
            return None
        return cls(name, higher) if METRIC.fullmatch(name) else None


ACCURACY = Score()
"""That of classification, which records do not name."""

READOUTS = ("test", "averaged", "validation", "averaged_validation")
"""The models and samples of a round that metrics are of: θ and the average on the test set, and
both on the validation set."""


@dataclass(frozen=True)
class ClientScores:
    """A model's score on the held-out samples of single clients; None for one that is left out.

    >>> scores = ClientScores(Score(), ids=(3, 5, 8), scores=(0.75, None, 0.25))
    >>> scores.to_dict()  # 5 has no such samples
    {'score': 'accuracy', 'count': 2, 'left_out': 1, 'mean': 0.5, 'worst_decile': 0.25, 'std': 0.25}
    """

    score: Score
    ids: tuple[int, ...]
    scores: tuple[float | None, ...]
    model: str = "server"  # whose was tested: the server's, or each client's "personal" one

    def to_dict(self) -> dict[str, Any]:
        """As a record has them: how many clients, their mean, the worst tenth's mean, the spread.

        The worst tenth is of one client at least; the standard deviation divides by their number.
        A figure that is not finite, or of no client, is None.
        """
        known = [score for score in self.scores if score is not None and not math.isnan(score)]
        left_out = len(self.scores) - len(known)
        mean = worst = spread = None
        if known:
            tenth = sorted(known, reverse=not self.score.higher)[: max(1, len(known) // 10)]
            mean, worst = _mean(known), _mean(tenth)
            spread = math.sqrt(_mean([(score - mean) ** 2 for score in known]))
        return {
            "score": self.score.name,
            **({"model": self.model} if self.model != "server" else {}),
            "count": len(known),
            **({"left_out": left_out} if left_out else {}),
            "mean": _finite(mean),
            "worst_decile": _finite(worst),
            "std": _finite(spread),
        }


@dataclass(frozen=True)
class Round:
    """One round of a run: who took part, what the server did, and how good the model is now.

    >>> Round(3, cohort=(5, 8), record=Record("stepped"), test_accuracy=0.81).to_dict()["round"]
    3
    """

    t: int
    cohort: tuple[int, ...]
    record: Record
    test_loss: float | None = None
    test_accuracy: float | None = None
    averaged_loss: float | None = None  # the same of the average of the server's past models
    averaged_accuracy: float | None = None
    validation_loss: float | None = None  # of a run with a validation set
    validation_accuracy: float | None = None
    averaged_validation_loss: float | None = None
    averaged_validation_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # others: test_perplexity
    score: Score = ACCURACY
    client_scores: ClientScores | None = None  # of a round in which single clients were tested
    averaged_client_scores: ClientScores | None = None
    label_similarity: float | None = None
    alarm: str | None = None  # "one-sided", "outlier": see trust.py
    bytes: dict[str, int] | None = None  # to all of the cohort (down) and from it (up)
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    warning: str = ""  # that training runs away: of the first such round alone

    @property
    def server(self) -> Any:
        """The server of the run that this round is from.

        It is the server itself, as it is now: after later rounds it is further, and its tensors are
        views of what these change. Copy what must stay. It is no part of the round: neither
        compared, nor pickled, nor copied. AttributeError if the round is from elsewhere.

        >>> from fedglad import simulate
        >>> (last,) = simulate("digits", {"rounds": 1, "client.epochs": 1})
        >>> sorted(last.server.state)[:2]
        ['conv1.bias', 'conv1.weight']
        """
        if (server := vars(self).get("_server")) is None:
            raise AttributeError(
                "this round has no server: only those that simulate yields, and those that "
                "callbacks get, have one, and a copy has none"
            )
        return server

    def with_server(self, server: Any) -> Round:
        """This round, which now has a server."""
        object.__setattr__(self, "_server", server)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_server"}

    def to_dict(self) -> dict[str, Any]:
        """One line of a run's `rounds.jsonl`."""
        further: dict[str, Any] = {}
        for which in READOUTS[1:]:
            loss, accuracy = self.metric(f"{which}_loss"), self.metric(f"{which}_accuracy")
            if loss is not None or accuracy is not None:
                further[f"{which}_loss"] = _finite(loss)
            if accuracy is not None:
                further[f"{which}_accuracy"] = accuracy
        further |= {name: _finite(value) for name, value in self.metrics.items()}
        if self.score != ACCURACY:
            further["score"] = self.score.to_dict()
        if self.client_scores:
            further["client_scores"] = self.client_scores.to_dict()
        if self.averaged_client_scores:
            further["averaged_client_scores"] = self.averaged_client_scores.to_dict()
        if self.warning:
            further["warning"] = self.warning
        return {
            "round": self.t,
            **self.record.to_dict(),
            "test_loss": _finite(self.test_loss),
            "test_accuracy": self.test_accuracy,
            **further,
            "label_similarity": self.label_similarity,
            "alarm": self.alarm,
            **({"bytes": self.bytes} if self.bytes is not None else {}),
            "seconds": self.seconds,
        }

    def client_line(self) -> dict[str, Any] | None:
        """One line of a run's `client_scores.jsonl`; None if no single client was tested."""
        if not self.client_scores:
            return None
        line: dict[str, Any] = {"round": self.t, "ids": list(self.client_scores.ids)}
        line["scores"] = [_finite(score) for score in self.client_scores.scores]
        if self.averaged_client_scores:
            averaged = self.averaged_client_scores.scores
            line["averaged_scores"] = [_finite(score) for score in averaged]
        return line

    def metric(self, name: str) -> float | None:
        """A metric by its name in the record, "test_accuracy"; None if it was not measured."""
        return self.metrics[name] if name in self.metrics else getattr(self, name, None)

    def scored(self, which: str = "test") -> float | None:
        """The task's score of one of READOUTS."""
        return self.metric(f"{which}_{self.score.name}")

    @classmethod
    def measured(cls, *args: Any, metrics: Mapping[str, float], **others: Any) -> Round:
        """A round with metrics by their names in the record."""
        known = {f"{which}_{name}" for which in READOUTS for name in ("loss", "accuracy")}
        named = {name: value for name, value in metrics.items() if name in known}
        further = {name: value for name, value in metrics.items() if name not in known}
        return cls(*args, **named, metrics=further, **others)


def _mean(values: list[float]) -> float:
    """Their mean; infinite if one of them is, NaN if there is no such number."""
    finite = all(map(math.isfinite, values))
    return math.fsum(values) / len(values) if finite else sum(values)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
