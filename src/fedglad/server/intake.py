"""Takes in a cohort, update by update in its order: validate, filter, aggregate."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from fedglad.core.aggregate import BufferMean, Sum, accumulate, pack, totals_sq
from fedglad.core.gram import Gram, trimmed_mean
from fedglad.core.layout import Layout
from fedglad.core.validate import (
    MAX_NORM,
    WEIGHTS,
    Limits,
    Opened,
    Rejected,
    as_number,
    have_padding,
    identity,
    open_update,
)
from fedglad.filters import Filter
from fedglad.records import Bundle, Failure, Several, Statistics, Update, indicator
from fedglad.weights import Client, Samples, WeightingState

STACKED = 1 << 20  # elements of small updates that are measured as one matrix
WINDOW = 1 << 31  # elements of a list's updates measured together: bounds the memory for row norms


class Skipped(Exception):
    """The round cannot be stepped; the message is the reason kept in the record."""


@dataclass(eq=False, kw_only=True)
class Intake:
    """Takes in the updates of one round, and changes nothing of the server's but `total`.

    | field | meaning |
    |---|---|
    | `wants_extra`, `lengths` | what the server half of a client method asks for, see `Method` |
    | `wants_distances` | measure each update's distance from their mean |
    | `base` | θ as the clients received it |
    | `limits` | what norm and weight is usual; the server keeps it if the round steps |
    | `model_norm` | ‖θ‖, where no norm of an update is known yet |
    | `total` | Σ w g, and in the end the mean |
    | `entries` | the record's `clients`: one dict each, in the order of the updates |
    | `accepted` | the updates that are in the sums, without their tensors |
    | `gsi_unfiltered` | GSI before the filter; None: no filter changed anything |
    | `distances` | {client: ‖g_k − ḡ‖} from the plain mean, where wanted |
    """

    layout: Layout
    filter: Filter
    weighting: Samples
    weighting_state: WeightingState
    min_clients: int
    wants_extra: bool
    lengths: Callable[[Sequence[int]], np.ndarray] | None
    wants_distances: bool
    base: Tensor
    limits: Limits
    model_norm: float
    total: Sum
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    accepted: list[Opened] = field(default_factory=list[Opened])
    gsi_unfiltered: float | None = None
    distances: dict[Client, float] | None = None

    def __post_init__(self) -> None:
        self.buffers = BufferMean(self.layout)
        self.extra = Sum(self.layout) if self.wants_extra else None
        self.total.clear()

    def take(self, updates: Iterable[Any]) -> Statistics:
        """Consumes the updates; raises Skipped if they make no round. The mean is in `total`."""
        parts = (self.filter, self.weighting)
        if self.wants_distances or any(part.keeps_updates for part in parts):
            return self._keep(updates)
        return self._stream(updates)

    def _stream(self, updates: Iterable[Any]) -> Statistics:
        """Adds each update and lets it go.

        An iterator may reuse its memory, so each item is measured, judged, and added before the
        next is asked for; Several or a Bundle as a whole. A list can be read again: it is added
        while it is measured, and anew where some are rejected. Same order, same bits.
        """
        filter = self.filter
        unfiltered = Sum(self.layout) if filter.scales else self.total
        if isinstance(updates, Sequence):
            self._take_list(updates, unfiltered)
        else:
            for several in map(_together, updates):  # a generator would keep what it gave out
                opened = self.open(several)
                rows: Sequence[Opened] | Tensor = opened
                if isinstance(several, Bundle) and len(opened) == len(several.clients):
                    rows = several.deltas
                self.add(self._judged(opened, self.accumulate(rows)), unfiltered)
                del several, opened, rows  # nothing is kept while the next is made
        self._require_enough()
        shares, factor = self.share([update.raw for update in self.accepted])
        sq = np.array([update.sq for update in self.accepted])
        mean_sq = self.total.mean_sq(factor)
        if filter.scales:
            self.gsi_unfiltered = _gsi_all(sq, unfiltered.mean_sq(factor), shares)
            sq *= np.array([filter.scale(update.norm) for update in self.accepted])[:, None] ** 2
        return self._statistics(shares, sq, mean_sq)

    def _take_list(self, updates: Sequence[Any], unfiltered: Sum) -> None:
        opened = self.open(updates)
        if self.filter.scales or not opened:
            self.add(self._judged(opened, self.accumulate(opened)), unfiltered)
            return
        hoped = _relative([self.weighting.weigh(update.weight) for update in opened])
        squares = self.accumulate(opened, [(self.total, hoped)], factor=1 / math.fsum(hoped))
        accepted = self._judged(opened, squares)
        if len(accepted) == len(opened):
            for update in accepted:
                self._add_rest(update, update.raw)
        else:
            self.total.clear()
            self.add(accepted, unfiltered)

    def _judged(self, opened: Sequence[Opened], squares: np.ndarray) -> list[Opened]:
        measured = zip(opened, squares, totals_sq(squares), strict=True)
        return [update for update, sq, norm_sq in measured if self.judge(update, sq, norm_sq)]

    def add(self, accepted: list[Opened], unfiltered: Sum) -> None:
        """Adds accepted updates, by their weights relative to the round's first."""
        if not accepted:
            return
        plain = [update.raw / self.accepted[0].raw for update in accepted]
        into = [(unfiltered, plain)]
        if unfiltered is not self.total:
            pairs = zip(plain, accepted, strict=True)
            into.append((self.total, [w * self.filter.scale(update.norm) for w, update in pairs]))
        self.accumulate(accepted, into, measure=False)
        for update in accepted:
            self._add_rest(update, update.raw)

    def _keep(self, updates: Iterable[Any]) -> Statistics:
        """Keeps every update, for what needs the whole cohort; costs one model an update."""
        layout, filter = self.layout, self.filter
        kept: list[Tensor] = []
        for update in chain.from_iterable(map(self.open, map(_together, updates))):
            packed, sent = pack(layout, update, self.base), update.tensors
            update.tensors, update.trained = packed, False
            if update.extra:
                update.extra.tensors = pack(layout, update.extra, self.base)
            update.buffers = {name: value.clone() for name, value in update.buffers.items()}
            sq = self.accumulate([packed])
            if self.judge(update, sq[0], totals_sq(sq)[0], sent):
                kept.append(packed)
            del update, sent  # the memory they were sent in may be used again
        self._require_enough()
        gram = Gram(layout, kept, max(update.norm for update in self.accepted))
        everyone = range(len(kept))
        raw = [update.raw for update in self.accepted]
        sq = np.array([update.sq for update in self.accepted])
        clips = np.array([filter.scale(update.norm) for update in self.accepted])
        shares, _ = self.share(raw)
        self.gsi_unfiltered = _gsi_all(sq, gram.mean_sq(shares), shares)

        if filter.robust:
            chosen = list(everyone)
            shares, factor = self.share([1.0] * len(kept))[0], 1.0
            trimmed_mean(layout, kept, filter.trim(len(kept)), self.total.flat)
        else:
            chosen = filter.select(gram.of(everyone, clips).distances_sq())
            self._leave_out(set(everyone) - set(chosen), f"left out by {filter}")
            clients: list[Client] = [self.accepted[k].entry["id"] for k in chosen]
            given, self.weighting_state = self.weighting.reweigh(
                np.array(raw)[chosen], gram.of(chosen, clips), clients, self.weighting_state
            )
            weights = {k: float(w) for k, w in zip(chosen, given, strict=True) if w > 0}
            self._leave_out(set(chosen) - weights.keys(), f"left out by {self.weighting}")
            chosen = list(weights)
            if not chosen:
                raise Skipped(f"{self.weighting} left all updates out")
            self.accepted = [self.accepted[k] for k in chosen]
            shares, factor = self.share([*weights.values()])
            clipped = (np.array(_relative([*weights.values()])) * clips[chosen]).tolist()
            self.accumulate([kept[k] for k in chosen], [(self.total, clipped)], measure=False)
        for update, share in zip(self.accepted, shares, strict=True):
            self._add_rest(update, float(share))
        if self.wants_distances:
            apart = gram.of(chosen, clips).distances_to_mean().tolist()
            clients = [update.entry["id"] for update in self.accepted]
            self.distances = dict(zip(clients, apart, strict=True))
        mean_sq = self.total.mean_sq(factor)
        return self._statistics(shares, (sq * clips[:, None] ** 2)[chosen], mean_sq)

    def _statistics(self, shares: np.ndarray, sq: np.ndarray, mean_sq: np.ndarray) -> Statistics:
        """The cohort in numbers; `sq` is ‖g_k‖² (k, tensor) as the updates entered the mean.

        Normalised updates get the length of the mean client's again: times τ = Σ w a.
        """
        if self.lengths is not None:
            steps = [update.steps for update in self.accepted if update.steps is not None]
            if len(steps) < len(self.accepted):
                raise Skipped("the method needs Update(steps=...), and there is one without")
            tau = float((shares * self.lengths(steps)).sum())
            self.total.flat.mul_(tau)
            sq, mean_sq = sq * tau**2, mean_sq * tau**2
        by_share = shares[:, None]
        sum_sq, sum_sq2 = (by_share * sq).sum(axis=0), (by_share**2 * sq).sum(axis=0)
        return statistics(self.layout, sum_sq, sum_sq2, mean_sq, tuple(shares.tolist()))

    def _leave_out(self, places: Iterable[int], why: str) -> None:
        for k in places:
            self.accepted[k].entry |= {"weight": 0.0, "rejected": why}

    def open(self, items: Iterable[Any] | Bundle) -> list[Opened]:
        """Those of the updates whose form is right."""
        if isinstance(items, Bundle) and self._well_formed(items):
            opened = self._open_bundle(items)
            padded = have_padding(self.layout, items.deltas)
        else:
            single = items.updates() if isinstance(items, Bundle) else items
            opened = [update for item in single if (update := self._open(item))]
            parts = [part for update in opened for part in (update, update.extra) if part]
            vectors = [part.tensors for part in parts if isinstance(part.tensors, Tensor)]
            padded = any(have_padding(self.layout, vector) for vector in vectors)
        return [update for update in opened if not self._padded(update)] if padded else opened

    def _well_formed(self, bundle: Bundle) -> bool:
        deltas, layout = bundle.deltas, self.layout
        least, most = WEIGHTS
        return (
            deltas.shape == (len(bundle.clients), layout.size)
            and (deltas.dtype, deltas.device) == (layout.dtype, layout.device)
            and deltas.is_contiguous()
            and all(least <= weight <= most for weight in bundle.weights)
            and not self.wants_extra
        )

    def _open_bundle(self, bundle: Bundle) -> list[Opened]:
        """What `_open` does, for many at once."""
        losses = (loss if math.isfinite(loss) else None for loss in bundle.losses)
        entries = map(_entry, bundle.clients, losses)
        rows = zip(entries, bundle.weights, bundle.deltas.unbind(), bundle.steps, strict=True)
        opened = [Opened(entry, float(w), delta, steps) for entry, w, delta, steps in rows]
        self.entries += [update.entry for update in opened]
        return opened

    def _padded(self, update: Opened) -> bool:
        for what, part in (("delta", update), ("extra", update.extra)):
            vector = part.tensors if part else None
            if isinstance(vector, Tensor) and have_padding(self.layout, vector):
                update.entry["rejected"] = f"{what} is a packed vector whose padding is not zero"
                return True
        return False

    def _open(self, item: Any) -> Opened | None:
        """The update, unless its form is wrong; either way it has a line in the record."""
        update = Update(item) if isinstance(item, Mapping | Tensor) else item
        entry = _entry()
        self.entries.append(entry)
        try:
            if isinstance(update, Failure):
                entry["id"] = identity(update.client)
                raise Rejected(update.reason)
            if not isinstance(update, Update):
                raise Rejected(
                    f"a {type(item).__name__} is neither an Update nor a dict of tensors"
                )
            entry["id"], entry["loss"] = identity(update.client), as_number(update.loss)
            if self.weighting.needs_client and update.client is None:
                raise Rejected(f"{type(self.weighting).__name__} needs Update(client=...)")
            opened = open_update(update, self.layout, entry, wants_extra=self.wants_extra)
            if opened.extra:
                sq = self.accumulate([opened.extra])[0]
                if not np.isfinite(sq).all():
                    self._reject_values(sq, opened.extra.tensors, "extra ")
                if (norm := math.sqrt(float(sq.sum()))) > MAX_NORM:
                    raise Rejected(f"extra has norm {norm:.3g}, above {MAX_NORM:.0e}")
        except Rejected as reason:
            entry["rejected"] = str(reason)
            return None
        return opened

    def judge(
        self,
        update: Opened,
        sq: np.ndarray,
        norm_sq: float,
        sent: list[Tensor] | Tensor | None = None,
    ) -> bool:
        """Accepts an update by its weight and norm, or notes why not; `sent` is its first form."""
        update.entry["sq_norm"] = None if math.isnan(norm_sq) else norm_sq
        update.sq, update.norm = sq, math.sqrt(norm_sq)
        update.raw = self.weighting.weigh(update.weight)
        try:
            if math.isnan(norm_sq):
                self._reject_values(sq, update.tensors if sent is None else sent)
            self.limits.check_weight(update.weight)
            self.limits.check_norm(update.norm, self.model_norm)
        except Rejected as reason:
            update.entry["rejected"] = str(reason)
            return False
        self.limits.remember(update.weight, update.norm)
        self.accepted.append(update)
        return True

    def _reject_values(
        self, sq: np.ndarray, tensors: list[Tensor] | Tensor, what: str = ""
    ) -> None:
        """Raises Rejected, with the tensor that has no finite norm."""
        first = int(np.flatnonzero(~np.isfinite(sq))[0])
        name = f"{what}{self.layout.names[first]!r}"
        tensor = tensors[first] if isinstance(tensors, list) else tensors
        if bool(tensor.double().isfinite().all()):
            raise Rejected(f"{name} has values too large for a norm below 1e12")
        raise Rejected(f"{name} holds NaN or inf")

    def _require_enough(self) -> None:
        n, least = len(self.accepted), self.min_clients
        if n < least:
            reasons = [entry["rejected"] for entry in self.entries if "rejected" in entry]
            why = f"; the first rejected: {reasons[0]}" if reasons else ""
            why += "" if self.entries else ": nobody took part"
            raise Skipped(
                f"{n} of {len(self.entries)} updates were accepted, {least} are needed{why}"
            )
        if reason := self.filter.needs(n):
            raise Skipped(reason)

    def share(self, weights: list[float]) -> tuple[np.ndarray, float]:
        """Weights, mostly of sum 1, noted in the record, and what the relative ones are times."""
        relative = _relative(weights)
        factor = 1 / math.fsum(relative) if self.weighting.normalises else weights[0]
        shares = np.array(relative) * factor
        for update, share in zip(self.accepted, shares.tolist(), strict=True):
            update.entry["weight"] = share
        return shares, factor

    def mean_loss(self) -> float | None:
        """The mean of the accepted clients' losses by their shares, of those that are known."""
        entries = [update.entry for update in self.accepted]
        known = [(entry["weight"], entry["loss"]) for entry in entries if entry["loss"] is not None]
        total = math.fsum(weight for weight, _ in known)
        return math.fsum(weight * loss for weight, loss in known) / total if known else None

    def _add_rest(self, update: Opened, weight: float) -> None:
        """Adds what goes with the parameters, and lets go of the update's memory."""
        if update.buffers:
            self.buffers.add(update.buffers, weight)
        if self.extra and update.extra:
            self.accumulate([update.extra], [(self.extra, [1.0])], measure=False)
        update.tensors, update.buffers, update.extra = [], {}, None

    def accumulate(
        self,
        updates: Sequence[Opened | Tensor] | Tensor,
        into: Sequence[tuple[Sum, Sequence[float]]] = (),
        *,
        measure: bool = True,
        factor: float | None = None,
    ) -> np.ndarray:
        """`core.aggregate.accumulate` in windows; `factor` makes a mean of `total` at the end."""
        layout = self.layout
        squares = [np.empty((0, len(layout.names)))]
        window = max(1, (STACKED if len(layout.blocks) == 1 else WINDOW) // layout.size)
        for k in range(0, len(updates), window):
            part = slice(k, k + window)
            if factor is not None and part.stop >= len(updates):
                self.total.factor = factor
            sums = [(total, weights[part]) for total, weights in into]
            squares.append(accumulate(layout, updates[part], self.base, sums, measure=measure))
        return np.concatenate(squares)


def _together(item: Any) -> list[Any] | Bundle:
    """Updates that are there at the same time: an engine may hand over many small ones at once."""
    return item if isinstance(item, Several | Bundle) else [item]


def statistics(
    layout: Layout,
    sum_sq: np.ndarray,
    sum_sq2: np.ndarray,
    mean_sq: np.ndarray,
    weights: tuple[float, ...],
) -> Statistics:
    """The numbers by the tensors' names; raises Skipped if the mean is not finite."""
    if not np.isfinite(mean_sq).all():
        raise Skipped("the mean of the updates is not finite")
    return Statistics(layout.named(sum_sq), layout.named(sum_sq2), layout.named(mean_sq), weights)


def _entry(client: Client = None, loss: float | None = None) -> dict[str, Any]:
    """A client's line in the record before its update is known."""
    return {"id": client, "weight": 0.0, "loss": loss, "sq_norm": None}


def _relative(weights: list[float]) -> list[float]:
    """Weights over the first of them: equal ones become 1, so that their sum loses no bits."""
    return [weight / weights[0] for weight in weights]


def _gsi_all(sq: np.ndarray, mean_sq: np.ndarray, shares: np.ndarray) -> float:
    sum_sq = (shares[:, None] * sq).sum(keepdims=True)[0]
    return float(indicator(sum_sq, mean_sq.sum(keepdims=True), shares)[0])
