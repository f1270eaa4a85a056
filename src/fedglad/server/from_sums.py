"""A round from sums alone: Σ w g and, per tensor, Σ w‖g‖². No update is looked at by itself.

Clients report the squared norms of their updates, so whoever adds up needs to see neither; see
docs/privacy.md.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedglad.core.aggregate import Sum
from fedglad.core.guard import MAX_NORM, Rejected
from fedglad.core.layout import Layout
from fedglad.core.validate import as_number, open_update
from fedglad.records import Arrays, Failure, Statistics, Update, weights_of
from fedglad.server.compatibility import refuse_sums
from fedglad.server.intake import Intake, Skipped, statistics

if TYPE_CHECKING:
    from fedglad.server.server import Server

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
    | `seen` | what the guard has measured of the updates; None: it looks at the round's mean |

    >>> from fedglad import Server
    >>> server = Server({"w": torch.zeros(1)})
    >>> sums = Sums(total={"w": torch.tensor([4.0])}, sum_sq={"w": 10.0}, weight=2, count=2)
    >>> server.step_sums(sums).gsi_all  # updates 1 and 3: √(2 · 10)/4
    1.118033988749895
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
    seen: Mapping[str, Sequence[float]] | None = None


class Collector:
    """Adds up a round's updates, one at a time, and measures none of them.

    An update is rejected, with the reason in its line of `entries`, for its form (names, shapes,
    dtypes, a weight that is not positive and finite) and for what it reports (a norm too few or too
    many, negative, not finite, or a weight or norm beyond the server's guard). Its values are not
    looked at. `entries` are the record's `clients`, `sq_norm` in them as reported.

    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)})
    >>> collector = Collector(server)
    >>> for g in (1.0, 3.0):
    ...     collector.take(Update({"w": torch.tensor([g])}), [g * g])
    >>> server.step_sums(collector.sums()).gsi_all
    1.118033988749895
    """

    def __init__(self, server: "Server") -> None:
        refuse_sums(server)
        self._intake = server.intake(Sum(server.layout))
        self.entries = self._intake.entries

    def take(self, update: Update | Failure, sq_norms: Sequence[float] | None) -> None:
        """Adds an update; `sq_norms` is its ‖g‖² per tensor, in the order of `layout.names`."""
        intake = self._intake
        for opened in intake.open([update]):
            try:
                sq = _reported(sq_norms, intake.layout.names)
            except Rejected as reason:
                opened.entry["rejected"] = str(reason)
                return
            if intake.judge(opened, sq, math.fsum(sq)):
                intake.add([opened])

    def sums(self) -> Sums:
        """What was added so far. `total` is the collector's own memory: the next `take` changes it.

        Weights are relative to the first: with them `step_sums` has the mean of `step` to the bit.
        """
        intake = self._intake
        intake.settle()
        layout, accepted, total = intake.layout, intake.accepted, intake.total.flat
        if not accepted:
            return Sums(total=total, sum_sq=dict.fromkeys(layout.names, 0.0), weight=0, count=0)
        unit = intake.unit
        intake.share([update.raw for update in accepted], unit)
        relative = np.array([update.raw / unit for update in accepted])
        by_weight = relative[:, None]
        sq = np.array([update.sq for update in accepted])
        return Sums(
            total=total,
            sum_sq=layout.named((by_weight * sq).sum(axis=0)),
            weight=math.fsum(relative),
            count=len(accepted),
            sum_sq2=layout.named((by_weight**2 * sq).sum(axis=0)),
            weight_sq=float(relative @ relative),
            buffers=intake.buffers.mean() or None,
            loss=intake.mean_loss(),
            unit=unit,
            seen=intake.limits.seen,
        )


def take_sums(sums: Sums, intake: Intake) -> Statistics:
    """Takes in a cohort that is a sum already; raises Skipped for what cannot be.

    The mean is then in the total of the intake, as after `Intake.take`.
    """
    count, layout = operator.index(sums.count), intake.layout
    if count < intake.min_clients:
        raise Skipped(f"{count} updates are in the sums, {intake.min_clients} are needed")
    if reason := intake.filter.needs(count):
        raise Skipped(reason)
    try:
        whole = Update(sums.total, weight=sums.weight, buffers=sums.buffers)
        opened = open_update(whole, layout, {}, wants_extra=False, wants_steps=False)
    except Rejected as reason:
        raise Skipped(f"the sums cannot be used: {reason}") from None
    weight = opened.weight
    sum_sq = _numbers("sum_sq", sums.sum_sq, layout.names)
    weight_sq, sum_sq2 = weight**2 / count, sum_sq * (weight / count)
    if sums.weight_sq is not None:
        weight_sq = _numbers("weight_sq", {"": sums.weight_sq}, ("",))[0]
    if sums.sum_sq2 is not None:
        sum_sq2 = _numbers("sum_sq2", sums.sum_sq2, layout.names)

    total = intake.total
    intake.accumulate([opened], [(total, [1.0])], measure=False)
    total.flat[layout.padding] = 0  # where masks of packed vectors leave crumbs
    mean_sq = total.mean_sq(1 / weight)
    _require_true(layout, count, weight, weight_sq, sum_sq, sum_sq2, mean_sq * weight**2)
    clip = _usual(intake, sums, weight / count, math.sqrt(math.fsum(sum_sq / weight)))
    if clip < 1:
        total.flat.mul_(clip)
    intake.buffers.add(opened.buffers, 1.0)
    share_sq = float(weight_sq / weight**2)
    weights = weights_of(count, share_sq)
    squares = (sum_sq / weight, sum_sq2 / weight**2, mean_sq)
    sum_sq, sum_sq2, mean_sq = (sq * clip**2 for sq in squares)
    made = statistics(layout, sum_sq, sum_sq2, mean_sq, weights)
    return replace(made, weight_sq=share_sq)


def _require_true(
    layout: Layout,
    count: int,
    weight: float,
    weight_sq: float,
    sum_sq: np.ndarray,
    sum_sq2: np.ndarray,
    total_sq: np.ndarray,  # ‖Σ w g‖²
) -> None:
    """Raises Skipped if no updates can have these sums: Cauchy's inequality broken."""
    names = layout.names
    if not np.isfinite(total_sq).all():
        first = names[int(np.flatnonzero(~np.isfinite(total_sq))[0])]
        raise Skipped(f"the sum of the updates is not finite in {first!r}")
    # Sums of very many equal updates lose more than SLACK to rounding.
    slack = max(SLACK, count * torch.finfo(layout.dtype).eps)
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


def _usual(intake: Intake, sums: Sums, weight: float, norm: float) -> float:
    """The guard, for the round as a whole: what its mean is to be multiplied with."""
    if (unit := as_number(sums.unit) or 0.0) <= 0:
        raise Skipped("the unit of the weights is not a positive finite number")
    if sums.seen is not None:
        intake.limits.seen = {kind: [*values] for kind, values in sums.seen.items()}
        intake.require_usual("weight", intake.limits.heaviest, "cut")
        return 1.0
    try:
        clip, _ = intake.limits.measure("norm", norm, max(1.0, intake.model_norm))
    except Rejected as reason:
        raise Skipped(f"the mean client's {reason}") from None
    intake.limits.remember(norm=norm, weight=unit * weight)
    return clip


def _reported(sq_norms: Any, names: Sequence[str]) -> np.ndarray:
    """The squared norms that a client reports of its update; raises Rejected."""
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
    numbers = [as_number(given[name]) for name in names]
    good = [number for number in numbers if number is not None and number >= 0]
    if len(good) < len(numbers):
        name = next(n for n, v in zip(names, numbers, strict=True) if v is None or v < 0)
        where = f" of {name!r}" if name else ""
        raise Skipped(f"{what}{where} is {given[name]}, not a finite number, 0 or more")
    return np.array(good)
