"""Takes in a cohort, update by update in its order: validate, filter, aggregate."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedglad.core.aggregate import Sum, Updates, accumulate, larger, pack, totals_sq
from fedglad.core.gram import Gram, trimmed_mean
from fedglad.core.guard import MAX_NORM, Limits, Rejected
from fedglad.core.layout import Layout
from fedglad.core.validate import (
    BITS,
    LONGEST,
    WEIGHTS,
    Opened,
    as_number,
    have_padding,
    identity,
    is_counter,
    open_update,
)
from fedglad.filters import Filter
from fedglad.records import POSITIONS, Bundle, Failure, Several, Statistics, Update, indicator
from fedglad.server.estimated import Taking
from fedglad.server.scores import Scores
from fedglad.server.totals import Block, Totals, placed
from fedglad.weights import Client, Samples, WeightingState

STACKED = 1 << 20  # elements of small updates that are measured as one matrix
WINDOW = 1 << 31  # elements of a list's updates measured together: bounds the memory for row norms
LOSS = 1e100  # no loss is larger: the mean of such cannot overflow
EXTRA = 10.0  # times the usual length, over that of its update, that a method's tensors may have
RATIO = 10_000.0  # that length, as long as nothing is known
BATCHES = 10_000.0  # that a client's counters grow by, as long as nothing is known
STATISTICS = 10_000.0  # times that buffers grow in a first round: they may start far from the data


class Skipped(Exception):
    """The round cannot be stepped; the message is the reason kept in the record."""


class Outweighed(Skipped):
    """One update of a first round weighs too much, and it is too late to take it out again."""


@dataclass(eq=False, kw_only=True)
class Intake:
    """Takes in the updates of one round, and changes nothing of the server's but `total`.

    | field | meaning |
    |---|---|
    | `wants_extra`, `lengths` | what the server half of a client method asks for, see `Method` |
    | `wants_distances` | measure each update's distance from their mean |
    | `base`, `base_buffers` | the model as the clients received it |
    | `limits` | what norm and weight is usual; the server keeps it if the round steps |
    | `model_norm` | ‖θ‖, where no norm of an update is known yet |
    | `round`, `population` | rounds that stepped; the number of clients there are, if known |
    | `total` | Σ w g, and in the end the mean |
    | `scores` | what judges the clients, each by its update |
    | `taking` | what keeps the updates for an estimator |
    | `once` | a client has one update in a round, also where nothing else asks for that |
    | `entries` | the record's `clients`: one dict each, in the order of the updates |
    | `accepted` | the updates that are in the sums, without their tensors |
    | `buffers`, `extra` | what they sent beside the parameters: its mean, and its sum if wanted |
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
    base_buffers: Mapping[str, Tensor]
    limits: Limits
    model_norm: float
    total: Sum
    round: int = 0
    population: int | None = None
    scores: Scores | None = None
    taking: Taking | None = None
    once: bool = False
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    accepted: list[Opened] = field(default_factory=list[Opened])
    gsi_unfiltered: float | None = None
    distances: dict[Client, float] | None = None

    def __post_init__(self) -> None:
        self.total.clear()
        self._near = Totals(self.layout, self.total, self.filter.scales, self.wants_extra)
        self.buffers, self.extra = self._near.buffers, self._near.extra
        self._far: Totals | None = None  # of updates that are far from usual
        self._units: dict[tuple[bool, int], float] = {}  # of usual or far ones, by block
        self._ids: set[int | str] = set()
        self._counters = [name for name in self.base_buffers if is_counter(name)]
        self._others = [name for name in self.base_buffers if not is_counter(name)]
        self._names = self._counters + self._others
        self._ends = np.cumsum([0, *(self.base_buffers[name].numel() for name in self._names)])
        self._before = _flat(self.base_buffers, self._names)

    @property
    def unit(self) -> float:
        """The weight that those in the sums are relative to: the first usual one's."""
        return self._near.unit

    def new_buffers(self) -> dict[str, Tensor]:
        """The model's buffers after the round; a counter does not fall.

        One that most clients send as they received it, a table, a mask, is nothing that is learnt:
        it stays as it is.
        """
        mean = self.buffers.mean()
        changed = [update.changed for update in self.accepted if update.changed is not None]
        fewer = 2 * np.sum(changed, axis=0) < len(changed) if changed else []
        for name in compress(self._names, fewer):
            mean.pop(name, None)
        before = {name: self.base_buffers[name] for name in self._counters if name in mean}
        return {**mean, **{name: larger(old, mean[name]) for name, old in before.items()}}

    def take(self, updates: Iterable[Any]) -> Statistics:
        """Consumes the updates; raises Skipped if they make no round. The mean is in `total`."""
        parts = (self.filter, self.weighting)
        kept = self.wants_distances or any(part.keeps_updates for part in parts)
        stats = self._keep(updates) if kept else self._stream(updates)
        clients: list[Client] = [update.entry["id"] for update in self.accepted]
        self.weighting_state = self.weighting.remember(clients, self.weighting_state, self.round)
        return stats

    def _stream(self, updates: Iterable[Any]) -> Statistics:
        """Adds each update and lets it go.

        An iterator may reuse its memory, so each item is measured, judged, and added before the
        next is asked for; Several or a Bundle as a whole. A list can be read again: it is added
        while it is measured, and anew where some are rejected or cut. Same order, same bits.
        """
        filter = self.filter
        if isinstance(updates, Sequence):
            self._take_list(updates)
        else:
            for item in updates:
                self.absorb(item) if isinstance(item, Block) else self._take(_together(item))
                del item  # nothing is kept while the next is made
            self.settle()
            self.require_usual("weight", self.limits.heaviest, "cut")
        if not filter.scales:
            self.require_usual("norm", self.limits.farthest, "left out")
        self.require_usual("extra", EXTRA, "left out")
        self.require_usual("buffers", self.limits.farthest, "left out")
        self._require_enough()
        shares, factor = self.share([update.counted for update in self.accepted], self.unit)
        sq = np.array([update.sq for update in self.accepted])
        mean_sq = self.total.mean_sq(factor)
        if filter.scales:
            self.gsi_unfiltered = _gsi_all(sq, self._near.unfiltered.mean_sq(factor), shares)
            sq *= np.array([filter.scale(update.norm) for update in self.accepted])[:, None] ** 2
        return self._statistics(shares, sq, mean_sq)

    def _take(self, several: list[Any] | Bundle) -> None:
        opened = self.open(several)
        rows = None
        if isinstance(several, Bundle) and len(opened) == len(several.clients):
            rows = several.deltas
        squares = self.accumulate(opened if rows is None else rows)
        self.add(self._judged(opened, squares, rows))

    def block(self, groups: Iterable[Any]) -> Block:
        """The updates of one block, each judged and added, to be sent to whoever absorbs it."""
        failures: list[tuple[Any, str]] = []
        for several in map(_together, groups):
            if not isinstance(several, Bundle):
                failed = (item for item in several if isinstance(item, Failure))
                failures += [(failure.client, failure.detail) for failure in failed]
            self._take(several)
            del several
        return Block(
            entries=self.entries,
            accepted=self.accepted,
            near=self._near.added(),
            far=self._far.added() if self._far else None,
            samples=self.scores.samples() if self.scores else None,
            failures=failures,
        )

    def absorb(self, block: Block) -> None:
        """Takes in a block that was summed elsewhere."""
        if self.scores and block.samples is not None:
            self.scores.absorb(block.accepted, block.samples)
        self.entries += block.entries
        self.accepted += block.accepted
        self._near.absorb(block.near)
        if block.far:
            self._apart().absorb(block.far)

    def _apart(self) -> Totals:
        """The sums of updates that are far from usual."""
        if not self._far:
            total = Sum(self.layout)
            self._far = Totals(self.layout, total, self.filter.scales, self.wants_extra)
        return self._far

    def _take_list(self, updates: Sequence[Any]) -> None:
        opened = self.open(updates)
        if self.filter.scales or not opened:
            accepted = self._judged(opened, self.accumulate(opened))
            self._heed()
            self.add(accepted)
            self.settle()
            return
        weighed = [self.weighting.weigh(update.weight) * update.factor for update in opened]
        hoped, begins = placed(opened, weighed)
        factor = self._mean_of(_relative(weighed), weighed[0])
        into = [(self.total, hoped)]
        squares = self.accumulate(opened, into, begins=begins, factor=factor)
        accepted = self._judged(opened, squares)
        self._heed()
        same = placed(accepted, [update.counted for update in accepted]) == (hoped, begins)
        same = same and (self.weighting.normalises or accepted[0].unit == weighed[0])
        if same and all(update.clip == 1 and not update.far for update in accepted):
            self._add_rest(accepted, self._near, self._near.begins(accepted))
        else:
            self.total.clear()
            self.add(accepted)
        self.settle()

    def _heed(self) -> None:
        """Cuts weights that are too large a share of the round, where all of it is there."""
        usual = [update for update in self.accepted if not update.far]
        counted = self.accepted if 2 * len(usual) < len(self.accepted) else usual
        weights = self.limits.heed([update.raw for update in counted])
        for update, weight in zip(counted, weights, strict=True):
            self._cut_weight(update, weight)

    def _cut_weight(self, update: Opened, weight: float) -> None:
        if weight < update.raw:
            update.raw = weight
            update.entry["claimed"] = update.weight

    def settle(self) -> None:
        """Decides on updates that are far from usual: they count if more than half are so."""
        far = [update for update in self.accepted if update.far]
        if 2 * len(far) > len(self.accepted):
            if self._far:
                self._near.absorb(self._far.added())
            for update in far:
                update.far = ""
        else:
            for update in far:
                update.entry.pop("clipped", None)
                update.entry["rejected"] = update.far
            self.accepted = [update for update in self.accepted if not update.far]
        self._far = None
        self._near.close()
        for update in self.accepted:
            self.limits.remember(**update.lengths)
        if self.scores:
            self.scores.judge()

    def _judged(
        self, opened: Sequence[Opened], squares: np.ndarray, rows: Tensor | None = None
    ) -> list[Opened]:
        """Those that are accepted, or far; `rows` may be all of them as one matrix."""
        totals = totals_sq(squares)
        measured, most = zip(opened, squares, totals, strict=True), self.limits.ordinary
        if rows is not None and all(math.sqrt(total) <= most for total in totals):
            accepted = list(opened)  # as `judge` would say, at a quarter of its time
            for update, sq, total in measured:
                update.entry["sq_norm"] = total
                self._accept(update, sq, math.sqrt(total))
        else:
            accepted = [update for update, sq, total in measured if self.judge(update, sq, total)]
        if self.scores:
            matrix = rows if len(accepted) == len(opened) else None
            self.scores.see(accepted, self.base, matrix)
        if self.taking is not None:
            self.taking.see(accepted, self.base)
        return accepted

    def add(self, accepted: list[Opened]) -> None:
        """Adds accepted updates, by their weights relative to their block's first usual one, or far
        one: so one that is left out in the end has no part in the rounding of the others."""
        for far in (False, True):
            chosen = [update for update in accepted if bool(update.far) == far]
            if not chosen:
                continue
            totals = self._apart() if far else self._near
            begins = totals.begins(chosen)
            plain = [update.counted / update.unit * update.clip for update in chosen]
            into = [(totals.unfiltered, plain)]
            if self.filter.scales:
                pairs = zip(plain, chosen, strict=True)
                scaled = [weight * self.filter.scale(update.norm) for weight, update in pairs]
                into.append((totals.total, scaled))
            self.accumulate(chosen, into, begins=begins, measure=False)
            self._add_rest(chosen, totals, begins)

    def _keep(self, updates: Iterable[Any]) -> Statistics:
        """Keeps every update, for what needs the whole cohort; costs one model an update."""
        layout, filter = self.layout, self.filter
        for update in chain.from_iterable(map(self.open, map(_together, updates))):
            packed, sent = pack(layout, update, self.base), update.tensors
            update.tensors, update.trained = packed, False
            if update.extra:
                update.extra.tensors = pack(layout, update.extra, self.base)
            update.buffers = {name: value.clone() for name, value in update.buffers.items()}
            sq = self.accumulate([packed])
            if self.judge(update, sq[0], totals_sq(sq)[0], sent):
                if self.scores:
                    self.scores.see([update], self.base)
                if self.taking is not None:
                    self.taking.see([update], self.base)
                if filter.keeps_updates:
                    update.far = ""  # such a filter can do with it, and may count on it
                if update.clip < 1:
                    packed.mul_(update.clip)
            del update, sent, packed  # the memory they were sent in may be used again
        self._heed()
        self.settle()
        self.require_usual("extra", EXTRA, "left out")
        if not filter.keeps_updates:
            self.require_usual("buffers", self.limits.farthest, "left out")
        self._require_enough()
        kept = [cast(Tensor, update.tensors) for update in self.accepted]
        gram = Gram(layout, kept, max(update.norm for update in self.accepted))
        everyone = range(len(kept))
        raw = [update.counted for update in self.accepted]
        sq = np.array([update.sq for update in self.accepted])
        clips = np.array([filter.scale(update.norm) for update in self.accepted])
        shares, _ = self.share(raw)
        self.gsi_unfiltered = _gsi_all(sq, gram.mean_sq(shares), shares)

        if filter.robust:
            chosen = list(everyone)
            shares, factor = self.share([1.0] * len(kept))[0], 1.0
            trim = filter.trim(len(kept))
            squares = trimmed_mean(layout, kept, trim, self.total.flat)
            sq = np.broadcast_to(squares, sq.shape)
            self._robust_rest(trim)
        else:
            chosen = filter.select(gram.of(everyone, clips).distances_sq())
            self._leave_out(set(everyone) - set(chosen), f"left out by {filter}")
            flags = {k: self.accepted[k].entry.get("flags", ()) for k in chosen}
            chosen = [k for k in chosen if not filter.leaves_out(flags[k])]
            for k in flags.keys() - chosen:
                self._leave_out([k], f"left out by {type(filter).__name__}: {', '.join(flags[k])}")
            if not chosen:
                raise Skipped(f"{filter} left all updates out")
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
            self._add_rest(self.accepted, self._near, {}, shares.tolist())
            self._near.close()
        if self.wants_distances:
            apart = gram.of(chosen, clips).distances_to_mean().tolist()
            clients = [update.entry["id"] for update in self.accepted]
            self.distances = dict(zip(clients, apart, strict=True))
        mean_sq = self.total.mean_sq(factor)
        return self._statistics(shares, (sq * clips[:, None] ** 2)[chosen], mean_sq)

    def _robust_rest(self, trim: int) -> None:
        """Buffers, and what a client method sends, by the robust mean that the updates have."""
        n = len(self.accepted)
        if self.extra:
            sent = [update.extra for update in self.accepted if update.extra]
            extras = [cast(Tensor, extra.tensors).mul_(extra.clip) for extra in sent]
            trimmed_mean(self.layout, extras, trim, self.extra.flat)
            self.extra.flat.mul_(n)
        self.buffers.trimmed([update.buffers for update in self.accepted], trim)
        for update in self.accepted:
            update.tensors, update.buffers, update.extra = [], {}, None

    def _statistics(self, shares: np.ndarray, sq: np.ndarray, mean_sq: np.ndarray) -> Statistics:
        """The cohort in numbers; `sq` is ‖g_k‖² (k, tensor) as the updates entered the mean.

        Normalised updates get the length of the mean client's again: times τ = Σ w a.
        """
        if self.lengths is not None:
            steps = [update.steps for update in self.accepted if update.steps is not None]
            if len(steps) < len(self.accepted):
                raise Skipped("the method needs Update(steps=...), and there is one without")
            most = self.limits.longest(steps)
            for update in self.accepted:
                if update.steps is not None and update.steps > most:
                    update.entry["steps"] = update.steps  # as claimed
            tau = float((shares * self.lengths([min(count, most) for count in steps])).sum())
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
            opened, padded = [update for item in single if (update := self._open(item))], True
        if self.weighting.needs_client:
            for update in opened:
                client: Client = update.entry["id"]
                update.factor = self.weighting.factor(client, self.weighting_state, self.round)
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
            and self.taking is None  # which looks at every client's id
        )

    def _open_bundle(self, bundle: Bundle) -> list[Opened]:
        """What `_open` does, for many at once."""
        losses = (loss if math.isfinite(loss) else None for loss in bundle.losses)
        entries = map(_entry, bundle.clients, losses)
        rows = zip(entries, bundle.weights, bundle.deltas.unbind(), bundle.steps, strict=True)
        opened = [
            Opened(entry, float(w), delta, steps, position=position)
            for position, (entry, w, delta, steps) in enumerate(rows, len(self.entries))
        ]
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
        entry = _entry()
        self.entries.append(entry)
        try:
            return self._well_opened(item, entry)
        except Rejected as reason:
            entry["rejected"] = str(reason)
        except Exception as error:  # it is somebody else's object, and may do anything when read
            entry["rejected"] = f"it cannot be read: {type(error).__name__}: {error!s:.200}"
        return None

    def _well_opened(self, item: Any, entry: dict[str, Any]) -> Opened:
        update = Update(item) if isinstance(item, Mapping | Tensor) else item
        if isinstance(update, Failure):
            self._name(entry, update.client)
            raise Rejected(update.reason)
        if not isinstance(update, Update):
            raise Rejected(f"a {type(item).__name__} is neither an Update nor a dict of tensors")
        self._name(entry, update.client)
        loss = as_number(update.loss)
        entry["loss"] = loss if loss is not None and abs(loss) <= LOSS else None
        if self.weighting.needs_client and update.client is None:
            raise Rejected(f"{type(self.weighting).__name__} needs Update(client=...)")
        if self.taking is not None:
            self.taking.require(entry["id"])
        wants_steps = self.lengths is not None
        opened = open_update(
            update, self.layout, entry, wants_extra=self.wants_extra, wants_steps=wants_steps
        )
        opened.position = len(self.entries) - 1
        if opened.extra:
            sq = self.accumulate([opened.extra])[0]
            if not np.isfinite(sq).all():
                self._reject_values(sq, opened.extra.tensors, "extra ")
            opened.extra.norm = math.sqrt(float(sq.sum()))
        return opened

    def _name(self, entry: dict[str, Any], client: Any) -> None:
        """Notes whose update it is; a client has one in a round."""
        name = identity(client)
        if isinstance(name, str) and len(name) > LONGEST:
            entry["id"] = f"{name[:20]}…"
            raise Rejected(f"the client's id is longer than {LONGEST} characters")
        if isinstance(name, int) and name.bit_length() > BITS:
            raise Rejected(f"the client's id is a number of more than {BITS} bits")
        entry["id"] = name
        if name is None or not (self.limits.guard or self.taking is not None or self.once):
            return
        if name in self._ids:
            raise Rejected("the client has sent an update already")
        self._ids.add(name)

    def judge(
        self,
        update: Opened,
        sq: np.ndarray,
        norm_sq: float,
        sent: list[Tensor] | Tensor | None = None,
    ) -> bool:
        """Accepts an update by its weight and norm, or notes why not; `sent` is its first form."""
        update.entry["sq_norm"] = None if math.isnan(norm_sq) else norm_sq
        norm = math.sqrt(norm_sq)
        try:
            if math.isnan(norm_sq):
                self._reject_values(sq, update.tensors if sent is None else sent)
            update.clip = self._measure(update, "norm", norm, max(1.0, self.model_norm))
            self._judge_extra(update)
            self._judge_buffers(update)
        except Rejected as reason:
            update.entry["rejected"] = str(reason)
            return False
        self._accept(update, sq, norm)
        return True

    def _accept(self, update: Opened, sq: np.ndarray, norm: float) -> None:
        update.lengths["norm"] = norm
        update.sq, update.norm = sq, norm
        if update.clip < 1:
            update.sq, update.norm = sq * update.clip**2, norm * update.clip
        if (kept := update.clip * self.filter.scale(update.norm)) < 1:
            update.entry["clipped"] = kept
        update.raw = self.weighting.weigh(update.weight)
        update.lengths["weight"] = update.raw
        self._cut_weight(update, self.limits.cap(update.raw))
        key = bool(update.far), update.position // POSITIONS
        update.unit = self._units.setdefault(key, update.counted)
        self.accepted.append(update)

    def _measure(
        self, update: Opened, kind: str, length: float, start: float, most: float | None = None
    ) -> float:
        """What the guard multiplies a part of an update with."""
        clip, far = self.limits.measure(kind, length, start, most)
        update.lengths[kind] = length
        update.far = update.far or far
        return clip

    def _judge_extra(self, update: Opened) -> None:
        """What a client method sends is judged by its length over that of its update.

        It is never cut by itself: c would no longer be the mean of all c_k.
        """
        if update.extra:
            usual = self.limits.usual.get("norm", 0.0)
            length = update.entry["sq_norm"] ** 0.5
            ratio = update.extra.norm / max(length, usual, 1e-30)
            self._measure(update, "extra", min(ratio, MAX_NORM), RATIO, EXTRA)
            update.extra.clip = update.clip

    def _judge_buffers(self, update: Opened) -> None:
        """Buffers are cut by how far they moved from those that were sent out."""
        if not update.buffers or not self.limits.guard:
            return
        counted = int(self._ends[len(self._counters)])  # elements
        moved = _flat(update.buffers, self._names) - self._before
        changed = np.append(0, (moved != 0).cpu().numpy().cumsum())[self._ends]
        update.changed = changed[1:] > changed[:-1]
        if counted:
            grown = max(0.0, float(moved[:counted].max()))
            self._measure(update, "counters", grown, BATCHES)
        if len(moved) > counted:
            start = STATISTICS * max(1.0, float(self._before[counted:].norm()))
            clip = self._measure(update, "buffers", float(moved[counted:].norm()), start)
            if clip < 1:
                update.entry["buffers_clipped"] = clip
                for name in self._others:
                    before, value = self.base_buffers[name], update.buffers[name]
                    if value.is_floating_point():
                        between = before.double().lerp(value.double(), clip)
                        update.buffers[name] = between.to(value.dtype)

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

    def require_usual(self, kind: str, most: float, what: str) -> None:
        """In a first round nothing is known to judge an update by; afterwards it is too late."""
        if largest := self.limits.too_much(kind, most):
            raise Outweighed(
                f"{kind} {largest:.4g} is more than {most:g} times the median of the first "
                f"round's: it will be {what} from the next round on"
            )

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

    def share(self, weights: list[float], unit: float | None = None) -> tuple[np.ndarray, float]:
        """Weights, mostly of sum 1, noted in the record, and what the relative ones are times."""
        unit = weights[0] if unit is None else unit
        relative = [weight / unit for weight in weights]
        factor = self._mean_of(relative, unit)
        shares = np.array(relative) * factor
        for update, share in zip(self.accepted, shares.tolist(), strict=True):
            update.entry["weight"] = share
        return shares, factor

    def _mean_of(self, relative: list[float], unit: float) -> float:
        """What weights over `unit` are multiplied with to be those of the mean."""
        divisor = self.weighting.divisor(self.population)
        return 1 / math.fsum(relative) if divisor is None else unit / divisor

    def mean_loss(self) -> float | None:
        """The mean of the accepted clients' losses by their shares, of those that are known."""
        entries = [update.entry for update in self.accepted]
        known = [(entry["weight"], entry["loss"]) for entry in entries if entry["loss"] is not None]
        total = math.fsum(weight for weight, _ in known)
        return math.fsum(weight * loss for weight, loss in known) / total if known else None

    def _add_rest(
        self,
        updates: Sequence[Opened],
        totals: Totals,
        begins: Mapping[int, float],
        weights: Sequence[float] | None = None,
    ) -> None:
        """Adds what goes with the parameters, and lets go of the updates' memory."""
        for k, update in enumerate(updates):
            weight = update.counted if weights is None else weights[k]
            totals.add_buffers(update.buffers, weight, begins=k in begins)
            if totals.extra and update.extra:
                scale = update.extra.clip * self.filter.scale(update.norm)
                first = {0: 1.0} if k in begins else {}
                into = [(totals.extra, [scale])]
                self.accumulate([update.extra], into, begins=first, measure=False)
            update.tensors, update.buffers, update.extra = [], {}, None

    def accumulate(
        self,
        updates: Updates,
        into: Sequence[tuple[Sum, Sequence[float]]] = (),
        *,
        begins: Mapping[int, float] | None = None,
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
                self.total.finishing(factor)
            sums = [(total, weights[part]) for total, weights in into]
            first = {i - k: f for i, f in (begins or {}).items() if k <= i < part.stop}
            squares.append(
                accumulate(layout, updates[part], self.base, sums, begins=first, measure=measure)
            )
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


def _flat(buffers: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Buffers as one vector of float64."""
    parts = [buffers[name].reshape(-1).double() for name in names]
    return torch.cat(parts) if parts else torch.empty(0)


def _relative(weights: list[float]) -> list[float]:
    """Weights over the first of them: equal ones become 1, so that their sum loses no bits."""
    return [weight / weights[0] for weight in weights]


def _gsi_all(sq: np.ndarray, mean_sq: np.ndarray, shares: np.ndarray) -> float:
    sum_sq = (shares[:, None] * sq).sum(keepdims=True)[0]
    return float(indicator(sum_sq, mean_sq.sum(keepdims=True), shares)[0])
