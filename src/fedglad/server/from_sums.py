"""A round from sums alone: Σ w g and, per tensor, Σ w‖g‖². No update is looked at by itself.

Clients report the squared norms of their updates, so whoever adds up needs to see neither; see
docs/privacy.md.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad.core.aggregate import Sum
from fedglad.core.validate import MAX_NORM, Rejected, as_number, open_update
from fedglad.records import Arrays, Failure, Update
from fedglad.server.intake import Intake, Skipped, Taken
from fedglad.server.state import ServerState

SLACK = 1e-5
"""What a sum may miss of its bounds before somebody's report must be a lie."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """A cohort added up: all that `Server.step_sums` asks for. Weights may be in any unit.

    | field | meaning |
    |---|---|
    | `total` | Σ w g: {name: tensor} of every parameter, or one packed vector |
    | `sum_sq` | {tensor: Σ w‖g‖²}, from the norms that clients report |
    | `weight`, `count` | W = Σ w, and the number r of updates |
    | `sum_sq2`, `weight_sq` | {tensor: Σ w²‖g‖²} and Σ w², which `Pooled` asks for; |
    |                        | None: taken as for equal weights |
    | `buffers` | their weighted mean, the maximum of counters; None: they stay as they are |
    | `loss` | the mean training loss, where known |
    | `unit` | the weight that 1 stands for in these sums, so that the guard can compare rounds |
    """

    total: Arrays | Tensor
    sum_sq: Mapping[str, float]
    weight: float
    count: int
    sum_sq2: Mapping[str, float] | None = None
    weight_sq: float | None = None
    buffers: Arrays | None = None
    loss: float | None = None
    unit: float = 1.0


@dataclass(frozen=True)
class Totals:
    """What a step is made of, for weights of sum 1: the mean, and four numbers a tensor."""

    mean: Tensor
    mean_sq: np.ndarray  # ‖mean‖²
    sum_sq: np.ndarray  # Σ w‖g‖²
    sum_sq2: np.ndarray  # Σ w²‖g‖²
    moved: np.ndarray  # whether any update has it changed
    weights: tuple[float, ...]

    @classmethod
    def of(cls, taken: Taken) -> "Totals":
        """Those of updates that the server has measured."""
        shares, sq = taken.shares[:, None], taken.sq
        return cls(
            taken.mean,
            taken.mean_sq,
            (shares * sq).sum(axis=0),
            (shares**2 * sq).sum(axis=0),
            np.any(sq, axis=0),
            tuple(taken.shares.tolist()),
        )


class Collector:
    """Adds up a round's updates, one at a time, and measures none of them.

    An update is rejected, with the reason in its line of `entries`, for its form (names, shapes,
    dtypes, a weight that is not positive and finite) and for what it reports (a norm too few or too
    many, negative, not finite, or a weight or norm beyond the server's guard). Its values are not
    looked at. `entries` are the record's `clients`, `sq_norm` in them as reported.
    """

    def __init__(self, server: ServerState) -> None:
        require_sums(server)
        self._door = SumsDoor.of(server, Sum(server.layout))

    @property
    def entries(self) -> list[dict[str, Any]]:
        return self._door.entries

    def take(self, update: Update | Failure, sq_norms: Sequence[float] | None) -> None:
        """Adds an update; `sq_norms` is its ‖g‖² per tensor, in the order of `layout.names`."""
        self._door.add(update, sq_norms)

    def sums(self) -> Sums:
        """What was added so far. `total` is the collector's own memory: the next `take` changes it.

        Weights are relative to the first: with them `step_sums` has the mean of `step` to the bit.
        """
        return self._door.added()


class SumsDoor(Intake):
    """An Intake that goes by reported norms, or takes a cohort that is a sum already."""

    @classmethod
    def of(cls, server: ServerState, total: Sum) -> "SumsDoor":
        return server.door(cls, total)

    def add(self, update: Update | Failure, sq_norms: Sequence[float] | None) -> None:
        for entry, source in self._open_all([update]):
            try:
                sq = _reported(sq_norms, self.plan.layout.names)
            except Rejected as reason:
                entry["rejected"] = str(reason)
                return
            if member := self._judge(entry, source, sq, math.fsum(sq)):
                self._add([member], self.total)

    def added(self) -> Sums:
        names, members = self.plan.layout.names, self.members
        if not members:
            return Sums(total=self.total.flat, sum_sq=dict.fromkeys(names, 0.0), weight=0, count=0)
        self._share([member.weight for member in members])
        unit = members[0].weight
        relative = np.array([member.weight / unit for member in members])
        by_weight = relative[:, None]
        sq = np.array([member.sq for member in members])
        known = [
            (m.entry["weight"], m.entry["loss"]) for m in members if m.entry["loss"] is not None
        ]
        return Sums(
            total=self.total.flat,
            sum_sq=dict(zip(names, (by_weight * sq).sum(axis=0).tolist(), strict=True)),
            weight=math.fsum(relative),
            count=len(members),
            sum_sq2=dict(zip(names, (by_weight**2 * sq).sum(axis=0).tolist(), strict=True)),
            weight_sq=float(relative @ relative),
            buffers=self.buffers.mean() or None,
            loss=mean_loss(known),
            unit=unit,
        )

    def take_sums(self, sums: Sums) -> tuple[Totals, dict[str, Tensor]]:
        """The sums as a step wants them, and the buffers; raises Skipped for what cannot be."""
        count, layout = operator.index(sums.count), self.plan.layout
        if count < self.plan.min_clients:
            raise Skipped(f"{count} updates are in the sums, {self.plan.min_clients} are needed")
        if reason := self.plan.filter.needs(count):
            raise Skipped(reason)
        try:
            whole = Update(sums.total, weight=sums.weight, buffers=sums.buffers)
            source = open_update(whole, layout, wants_extra=False)
        except Rejected as reason:
            raise Skipped(f"the sums cannot be used: {reason}") from None
        weight = source.weight
        sum_sq = _numbers("sum_sq", sums.sum_sq, layout.names)
        weight_sq, sum_sq2 = weight**2 / count, sum_sq * (weight / count)
        if sums.weight_sq is not None:
            weight_sq = _numbers("weight_sq", {"": sums.weight_sq}, ("",))[0]
        if sums.sum_sq2 is not None:
            sum_sq2 = _numbers("sum_sq2", sums.sum_sq2, layout.names)

        self._sweep([source], [(self.total, [1.0])], measure=False)
        self.total.flat[layout.padding] = 0  # where masks of packed vectors leave crumbs
        mean_sq = self.total.mean_sq(1 / weight)
        self._require_true(count, weight, weight_sq, sum_sq, sum_sq2, mean_sq * weight**2)
        self._require_usual(sums.unit, weight / count, math.sqrt(math.fsum(sum_sq / weight)))
        totals = Totals(
            self.total.flat,
            mean_sq,
            sum_sq / weight,
            sum_sq2 / weight**2,
            sum_sq > 0,
            weights_of(count, weight_sq / weight**2),
        )
        return totals, source.buffers

    def _require_true(
        self,
        count: int,
        weight: float,
        weight_sq: float,
        sum_sq: np.ndarray,
        sum_sq2: np.ndarray,
        total_sq: np.ndarray,  # ‖Σ w g‖²
    ) -> None:
        """Raises Skipped if no updates can have these sums: Cauchy's inequality broken."""
        names = self.plan.layout.names
        if not np.isfinite(total_sq).all():
            first = names[int(np.flatnonzero(~np.isfinite(total_sq))[0])]
            raise Skipped(f"the sum of the updates is not finite in {first!r}")
        # Sums of very many equal updates lose more than SLACK to rounding.
        slack = max(SLACK, count * torch.finfo(self.plan.layout.dtype).eps)
        one = ("",)
        for named, least, small, most, large in (
            (names, total_sq, "‖Σwg‖²", weight * sum_sq, "W·Σw‖g‖²"),
            (names, total_sq, "‖Σwg‖²", count * sum_sq2, "r·Σw²‖g‖²"),
            (names, sum_sq2, "Σw²‖g‖²", weight * sum_sq, "W·Σw‖g‖²"),
            (one, np.array([weight**2]), "W²", np.array([count * weight_sq]), "r·Σw²"),
            (one, np.array([weight_sq]), "Σw²", np.array([weight**2]), "W²"),
        ):
            false = np.flatnonzero(most < least * (1 - slack))
            if len(false):
                name, at = named[int(false[0])], int(false[0])
                where = f" of {name!r}" if name else ""
                raise Skipped(
                    f"what was reported cannot be true: {large}{where} is {most[at]:.6g}, less "
                    f"than {small}, {least[at]:.6g}"
                )

    def _require_usual(self, unit: float, weight: float, norm: float) -> None:
        """The guard, for the round as a whole; remembers it as one update."""
        if (unit := as_number(unit) or 0.0) <= 0:
            raise Skipped("the unit of the weights is not a positive finite number")
        try:
            self.gate.check_weight(unit * weight)
            self.gate.check_norm(norm, self.model_norm)
        except Rejected as reason:
            raise Skipped(f"the mean client's {reason}") from None
        self.gate.let_in(unit * weight, norm)


def require_sums(server: ServerState) -> None:
    """Raises unless all parts of the server can do with sums."""
    filter, weighting = server.filter, server.weighting
    for part in (filter, weighting):
        if part.keeps_updates:
            raise ValueError(
                f"{type(part).__name__} compares the updates with each other, and there are only "
                f"their sums: use {'filter=None' if part is filter else 'Samples or Equal'}"
            )
    if filter.scales:
        raise ValueError(
            f"{type(filter).__name__} scales each update by its norm, and there are only their "
            "sums: let the clients clip (Flower's fixedclipping_mod), and use filter=None"
        )
    if not weighting.normalises:
        raise ValueError(
            f"the weights of {type(weighting).__name__} do not sum to 1: use Samples or Equal"
        )
    if server.method is not None:
        raise ValueError(
            "a client method's server half needs more than the sums of updates: use method=None"
        )
    if server.distances:
        raise ValueError("distances=True measures every update, and there are only their sums")


def mean_loss(known: Sequence[tuple[float, float]]) -> float | None:
    """The mean of (weight, loss) pairs, if there are any."""
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * loss for weight, loss in known) / total if known else None


def _reported(sq_norms: Any, names: Sequence[str]) -> np.ndarray:
    """The squared norms that a client says its update has; raises Rejected."""
    if sq_norms is None:
        raise Rejected("no squared norms are reported: the client needs the mod report_norms")
    if not isinstance(sq_norms, Sequence) or isinstance(sq_norms, str | bytes):
        raise Rejected(f"the reported squared norms are a {type(sq_norms).__name__}, not a list")
    if len(sq_norms) != len(names):
        raise Rejected(f"{len(sq_norms)} squared norms are reported for {len(names)} tensors")
    for name, value in zip(names, sq_norms, strict=True):
        number = as_number(value)
        if number is None or not 0 <= number <= MAX_NORM**2:
            raise Rejected(f"the reported squared norm of {name!r} is {str(value)[:40]}")
    return np.array([float(value) for value in sq_norms])


def _numbers(what: str, given: Mapping[str, float], names: Sequence[str]) -> np.ndarray:
    """A finite number, 0 or more, for each of the names; raises Skipped."""
    if odd := given.keys() ^ set(names):
        raise Skipped(f"{what} and the model do not have the same tensors: {min(odd)!r}")
    found = [as_number(given[name]) for name in names]
    good = [number for number in found if number is not None and number >= 0]
    if len(good) < len(found):
        name = next(n for n, v in zip(names, found, strict=True) if v is None or v < 0)
        where = f" of {name!r}" if name else ""
        raise Skipped(f"{what}{where} is {given[name]}, not a finite number, 0 or more")
    return np.array(good)


def weights_of(count: int, sum_of_squares: float) -> tuple[float, ...]:
    """Weights with a sum of 1 and this sum of squares: adapters look at nothing else of them."""
    spread = max(0.0, count * sum_of_squares - 1)  # 0 for equal weights, r − 1 for a single one
    first = (1 + math.sqrt((count - 1) * spread)) / count
    return (first, *[(1 - first) / (count - 1)] * (count - 1)) if count > 1 else (1.0,)
