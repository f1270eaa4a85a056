"""Takes in a cohort, update by update in its order: validate, filter, aggregate."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from fedglad.core.aggregate import BufferMean, Sum, pack, sweep, totals_sq
from fedglad.core.gram import Gram, trimmed_mean
from fedglad.core.layout import Layout
from fedglad.core.validate import (
    MAX_NORM,
    WEIGHTS,
    Content,
    Gate,
    Rejected,
    Source,
    as_number,
    have_padding,
    identity,
    open_update,
)
from fedglad.filters import Filter
from fedglad.records import Bundle, Failure, Several, Update, indicator
from fedglad.weights import Client, Samples, State

STACKED = 1 << 20  # elements of small updates that are measured as one matrix
WINDOW = 1 << 31  # elements of a list's updates measured together: bounds the memory for row norms


class Skipped(Exception):
    """The round cannot be stepped; the message is the reason kept in the record."""


@dataclass(frozen=True)
class Plan:
    """What stays the same from round to round."""

    layout: Layout
    filter: Filter
    weighting: Samples
    wants_extra: bool
    min_clients: int
    distances: bool = False  # from the mean of each update, which asks for all of them at once

    @property
    def keeps_updates(self) -> bool:
        return self.distances or self.filter.keeps_updates or self.weighting.keeps_updates


@dataclass(slots=True)
class Member:
    """An accepted update: its line in the record, its raw weight and ‖g‖² of each tensor."""

    entry: dict[str, Any]
    weight: float
    sq: np.ndarray
    norm: float
    steps: int | None
    source: Source | None  # None once it is in the sums


@dataclass(frozen=True)
class Taken:
    """A cohort that was added up."""

    mean: Tensor
    shares: np.ndarray  # the weights in the mean, (k,)
    sq: np.ndarray  # ‖g_k‖² of each tensor, (k, tensors), as they entered the mean
    mean_sq: np.ndarray  # ‖mean‖² of each tensor
    gsi_unfiltered: float | None  # None: no filter changed anything
    distances: dict[Client, float] | None = None  # ‖g_k − ḡ‖ from the plain mean, where wanted


class Intake:
    """One round's door. It changes nothing of the server's: a copy of the gate, sums of its own."""

    def __init__(
        self, plan: Plan, base: Tensor, gate: Gate, model_norm: float, total: Sum, state: State
    ) -> None:
        self.plan = plan
        self.base = base  # θ as the clients received it
        self.gate = gate.copy()
        self.model_norm = model_norm
        self.total = total
        self.weighting_state = state
        self.entries: list[dict[str, Any]] = []
        self.members: list[Member] = []
        self.buffers = BufferMean(plan.layout)
        self.extra = Sum(plan.layout) if plan.wants_extra else None
        total.clear()

    def take(self, updates: Iterable[Any]) -> Taken:
        """Consumes the updates; raises Skipped if they make no round."""
        return self._keep(updates) if self.plan.keeps_updates else self._stream(updates)

    def _stream(self, updates: Iterable[Any]) -> Taken:
        """Adds each update and lets it go.

        An iterator may reuse its memory, so each item is measured, judged, and added before the
        next is asked for; Several or a Bundle as a whole. A list can be read again: it is added
        while it is measured, and anew where some are rejected. Same order, same bits.
        """
        filter = self.plan.filter
        unfiltered = Sum(self.plan.layout) if filter.scales else self.total
        if isinstance(updates, Sequence):
            self._take_list(updates, unfiltered)
        else:
            for group in _groups(updates):
                opened = self._open_all(group)
                sources: Sequence[Source] | Tensor = [source for _, source in opened]
                if isinstance(group, Bundle) and len(sources) == len(group.clients):
                    sources = group.deltas
                squares = self._sweep(sources)
                self._add(self._judged(opened, squares), unfiltered)
                del group, opened, sources  # nothing is kept while the next is made
        self._require_enough()
        shares, factor = self._share([m.weight for m in self.members])
        sq = np.array([m.sq for m in self.members])
        mean_sq = self.total.mean_sq(factor)
        gsi = None
        if filter.scales:
            gsi = _gsi_all(sq, unfiltered.mean_sq(factor), shares)
            sq *= np.array([filter.scale(m.norm) for m in self.members])[:, None] ** 2
        return Taken(self.total.flat, shares, sq, mean_sq, gsi)

    def _take_list(self, updates: Sequence[Any], unfiltered: Sum) -> None:
        opened = self._open_all(updates)
        sources = [source for _, source in opened]
        if self.plan.filter.scales or not sources:
            self._add(self._judged(opened, self._sweep(sources)), unfiltered)
            return
        hoped = _relative([self.plan.weighting.weigh(source.weight) for source in sources])
        squares = self._sweep(sources, [(self.total, hoped)], factor=1 / math.fsum(hoped))
        members = self._judged(opened, squares)
        if len(members) == len(sources):
            for member in members:
                self._add_rest(member, member.weight)
        else:
            self.total.clear()
            self._add(members, unfiltered)

    def _judged(
        self, opened: Sequence[tuple[dict[str, Any], Source]], squares: np.ndarray
    ) -> list[Member]:
        pairs = zip(opened, squares, totals_sq(squares), strict=True)
        judged = (self._judge(*found, sq, norm_sq) for found, sq, norm_sq in pairs)
        return [member for member in judged if member]

    def _add(self, members: list[Member], unfiltered: Sum) -> None:
        """Adds updates that were let in, by their weights relative to the round's first."""
        if not members:
            return
        plain = [m.weight / self.members[0].weight for m in members]
        into = [(unfiltered, plain)]
        if unfiltered is not self.total:
            norms = zip(plain, members, strict=True)
            into.append((self.total, [w * self.plan.filter.scale(m.norm) for w, m in norms]))
        self._sweep([m.source for m in members if m.source], into, measure=False)
        for member in members:
            self._add_rest(member, member.weight)

    def _keep(self, updates: Iterable[Any]) -> Taken:
        """Keeps every update, for what needs the whole cohort; costs one model an update."""
        layout, filter = self.plan.layout, self.plan.filter
        kept: list[Tensor] = []
        for entry, source in chain.from_iterable(map(self._open_all, _groups(updates))):
            packed = pack(layout, source, self.base)
            extra = source.extra and Source(1.0, pack(layout, source.extra, self.base))
            own = replace(source, tensors=packed, trained=False, extra=extra)
            own.buffers = {name: value.clone() for name, value in source.buffers.items()}
            sq = self._sweep([packed])
            if self._judge(entry, own, sq[0], totals_sq(sq)[0], source.tensors):
                kept.append(packed)
        self._require_enough()
        gram = Gram(layout, kept, max(m.norm for m in self.members))
        everyone = range(len(kept))
        raw = [m.weight for m in self.members]
        sq = np.array([m.sq for m in self.members])
        clips = np.array([filter.scale(m.norm) for m in self.members])
        shares, _ = self._share(raw)
        gsi_unfiltered = _gsi_all(sq, gram.mean_sq(shares), shares)

        if filter.robust:
            chosen = list(everyone)
            shares, factor = self._share([1.0] * len(kept))[0], 1.0
            trimmed_mean(layout, kept, filter.trim(len(kept)), self.total.flat)
        else:
            chosen = filter.select(gram.of(everyone, clips).distances_sq())
            self._leave_out(set(everyone) - set(chosen), f"left out by {filter}")
            clients: list[Client] = [self.members[k].entry["id"] for k in chosen]
            given, self.weighting_state = self.plan.weighting.reweigh(
                np.array(raw)[chosen], gram.of(chosen, clips), clients, self.weighting_state
            )
            weights = {k: float(w) for k, w in zip(chosen, given, strict=True) if w > 0}
            self._leave_out(set(chosen) - weights.keys(), f"left out by {self.plan.weighting}")
            chosen = list(weights)
            if not chosen:
                raise Skipped(f"{self.plan.weighting} left all updates out")
            self.members = [self.members[k] for k in chosen]
            shares, factor = self._share([*weights.values()])
            clipped = (np.array(_relative([*weights.values()])) * clips[chosen]).tolist()
            self._sweep([kept[k] for k in chosen], [(self.total, clipped)], measure=False)
        for member, share in zip(self.members, shares, strict=True):
            self._add_rest(member, float(share))
        mean_sq = self.total.mean_sq(factor)
        clipped_sq = (sq * clips[:, None] ** 2)[chosen]
        apart = gram.of(chosen, clips).distances_to_mean().tolist() if self.plan.distances else None
        named = apart and {m.entry["id"]: d for m, d in zip(self.members, apart, strict=True)}
        return Taken(self.total.flat, shares, clipped_sq, mean_sq, gsi_unfiltered, named)

    def _leave_out(self, places: Iterable[int], why: str) -> None:
        for k in places:
            self.members[k].entry |= {"weight": 0.0, "rejected": why}

    def _open_all(self, items: Iterable[Any] | Bundle) -> list[tuple[dict[str, Any], Source]]:
        """Those of the updates whose form is right."""
        if isinstance(items, Bundle) and self._well_formed(items):
            opened = self._open_bundle(items)
            padded = have_padding(self.plan.layout, items.deltas)
        else:
            single = items.updates() if isinstance(items, Bundle) else items
            opened = [found for item in single if (found := self._open(item))]
            parts = [p for _, s in opened for p in (s, s.extra) if p]
            vectors = [p.tensors for p in parts if isinstance(p.tensors, Tensor)]
            padded = any(have_padding(self.plan.layout, vector) for vector in vectors)
        return [found for found in opened if not self._padded(*found)] if padded else opened

    def _well_formed(self, bundle: Bundle) -> bool:
        deltas, layout = bundle.deltas, self.plan.layout
        least, most = WEIGHTS
        return (
            deltas.shape == (len(bundle.clients), layout.size)
            and (deltas.dtype, deltas.device) == (layout.dtype, layout.device)
            and deltas.is_contiguous()
            and all(least <= weight <= most for weight in bundle.weights)
            and not self.plan.wants_extra
        )

    def _open_bundle(self, bundle: Bundle) -> list[tuple[dict[str, Any], Source]]:
        """What `_open` does, for many at once."""
        losses = (loss if math.isfinite(loss) else None for loss in bundle.losses)
        told = zip(bundle.clients, losses, bundle.weights, bundle.steps, strict=True)
        rows = zip(told, bundle.deltas.unbind(), strict=True)
        opened = [(_entry(c, loss), Source(float(w), delta, k)) for (c, loss, w, k), delta in rows]
        self.entries += [entry for entry, _ in opened]
        return opened

    def _padded(self, entry: dict[str, Any], source: Source) -> bool:
        for what, part in (("delta", source), ("extra", source.extra)):
            vector = part.tensors if part else None
            if isinstance(vector, Tensor) and have_padding(self.plan.layout, vector):
                entry["rejected"] = f"{what} is a packed vector whose padding is not zero"
                return True
        return False

    def _open(self, item: Any) -> tuple[dict[str, Any], Source] | None:
        """The update's line in the record and its content, unless its form is wrong."""
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
            if self.plan.weighting.needs_client and update.client is None:
                raise Rejected(f"{type(self.plan.weighting).__name__} needs Update(client=...)")
            source = open_update(update, self.plan.layout, wants_extra=self.plan.wants_extra)
            if source.extra:
                sq = self._sweep([source.extra])[0]
                if not np.isfinite(sq).all():
                    self._reject_values(sq, source.extra.tensors, "extra ")
                if (norm := math.sqrt(float(sq.sum()))) > MAX_NORM:
                    raise Rejected(f"extra has norm {norm:.3g}, above {MAX_NORM:.0e}")
        except Rejected as reason:
            entry["rejected"] = str(reason)
            return None
        return entry, source

    def _judge(
        self,
        entry: dict[str, Any],
        source: Source,
        sq: np.ndarray,
        norm_sq: float,
        sent: Content | None = None,
    ) -> Member | None:
        """Lets an update in by its weight and norm, or notes why not; `sent` is its first form."""
        entry["sq_norm"] = None if math.isnan(norm_sq) else norm_sq
        weight = self.plan.weighting.weigh(source.weight)
        member = Member(entry, weight, sq, math.sqrt(norm_sq), source.steps, source)
        try:
            if math.isnan(norm_sq):
                self._reject_values(sq, source.tensors if sent is None else sent)
            self.gate.check_weight(source.weight)
            self.gate.check_norm(member.norm, self.model_norm)
        except Rejected as reason:
            entry["rejected"] = str(reason)
            return None
        self.gate.let_in(source.weight, member.norm)
        self.members.append(member)
        return member

    def _reject_values(self, sq: np.ndarray, tensors: Content, what: str = "") -> None:
        """Says which tensor it was that has no finite norm."""
        first = int(np.flatnonzero(~np.isfinite(sq))[0])
        name = f"{what}{self.plan.layout.names[first]!r}"
        tensor = tensors[first] if isinstance(tensors, list) else tensors
        if bool(tensor.double().isfinite().all()):
            raise Rejected(f"{name} has values too large for a norm below 1e12")
        raise Rejected(f"{name} holds NaN or inf")

    def _require_enough(self) -> None:
        n, least = len(self.members), self.plan.min_clients
        if n < least:
            reasons = [entry["rejected"] for entry in self.entries if "rejected" in entry]
            why = f"; the first rejected: {reasons[0]}" if reasons else ""
            why += "" if self.entries else ": nobody took part"
            raise Skipped(
                f"{n} of {len(self.entries)} updates were accepted, {least} are needed{why}"
            )
        if reason := self.plan.filter.needs(n):
            raise Skipped(reason)

    def _share(self, weights: list[float]) -> tuple[np.ndarray, float]:
        """Weights, mostly of sum 1, noted in the record, and what the relative ones are times."""
        relative = _relative(weights)
        factor = 1 / math.fsum(relative) if self.plan.weighting.normalises else weights[0]
        shares = np.array(relative) * factor
        for member, share in zip(self.members, shares.tolist(), strict=True):
            member.entry["weight"] = share
        return shares, factor

    def _add_rest(self, member: Member, weight: float) -> None:
        """What travels beside the parameters of an update that is in; then lets it go."""
        source, member.source = member.source, None
        assert source
        if source.buffers:
            self.buffers.add(source.buffers, weight)
        if self.extra and source.extra:
            self._sweep([source.extra], [(self.extra, [1.0])], measure=False)

    def _sweep(
        self,
        sources: Sequence[Source | Tensor] | Tensor,
        into: Sequence[tuple[Sum, Sequence[float]]] = (),
        *,
        measure: bool = True,
        factor: float | None = None,
    ) -> np.ndarray:
        layout = self.plan.layout
        squares = [np.empty((0, len(layout.names)))]
        window = max(1, (STACKED if len(layout.blocks) == 1 else WINDOW) // layout.size)
        for k in range(0, len(sources), window):
            part = slice(k, k + window)
            if factor is not None and part.stop >= len(sources):
                self.total.factor = factor
            sums = [(total, weights[part]) for total, weights in into]
            squares.append(sweep(layout, sources[part], self.base, sums, measure=measure))
        return np.concatenate(squares)


def _groups(items: Iterable[Any]) -> Iterator[list[Any] | Bundle]:
    """Updates that are there together: an engine may hand over many small ones at once."""

    def group(item: Any) -> list[Any] | Bundle:
        return item if isinstance(item, Several | Bundle) else [item]

    return map(group, items)  # a generator would keep an item while the next is made


def _entry(client: Client = None, loss: float | None = None) -> dict[str, Any]:
    """A client's line in the record before its update is known."""
    return {"id": client, "weight": 0.0, "loss": loss, "sq_norm": None}


def _relative(weights: list[float]) -> list[float]:
    """Weights over the first of them: equal ones become 1, so that their sum loses no bits."""
    return [weight / weights[0] for weight in weights]


def _gsi_all(sq: np.ndarray, mean_sq: np.ndarray, shares: np.ndarray) -> float:
    sum_sq = (shares[:, None] * sq).sum(keepdims=True)[0]
    return float(indicator(sum_sq, mean_sq.sum(keepdims=True), shares)[0])
