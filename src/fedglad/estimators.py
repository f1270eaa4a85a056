"""Estimators of the mean of all clients' updates, of which a round has only the cohort's.

With few clients a round the cohort's mean ḡ says much about who was drawn. An estimator remembers
what clients, or kinds of clients, sent before, and gives the server ĝ to step by in the place of ḡ.
GSI and the factors are those of the cohort's updates as before; the factors then scale ĝ.

What is remembered lies on disk, in a run's folder or a temporary one: single clients' updates, and
as confidential as these.

>>> import torch
>>> from fedglad import Server, Update
>>> server = Server({"w": torch.zeros(1)}, estimator=VARP())
>>> for client, g in ((0, 4.0), (1, 1.0), (0, 6.0)):
...     record = server.step([Update({"w": torch.tensor([g])}, client=client)], population=2)
>>> server.state["w"]  # −4, then −(4/2 + 1 − 0), then −((4 + 1)/2 + 6 − 4)
tensor([-11.5000])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Protocol, Self

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.core.layout import Layout

GB = 1e9  # bytes
STRETCH = 1 << 17  # elements that are worked on at a time, in the cache

Client = int | str | None
State = dict[str, "Tensor"]
"""What an estimator keeps in memory, by name; {} at first. It is saved with the server."""

DISK = "GB that updates kept on disk may take; what may need more is refused"
BIASED = "go on where who takes part is no fresh chance: the estimate may then be biased"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One update of a round, as it entered the mean.

    | field | meaning |
    |---|---|
    | `client` | whose it is |
    | `share` | w_k, its weight in the cohort's mean |
    | `weight` | a_k, its weight in the mean of all clients, in the unit of the updates' weights |
    | `vector()` | g_k, one packed vector, after the guard's and the filter's cut; read from disk |
    | `before()` | y_k and its a_k, of the client's last update; None: it has none |

    >>> Taken(client=3, share=0.5, weight=600, vector=list, before=lambda: None).before() is None
    True
    """

    client: Client
    share: float
    weight: float
    vector: Callable[[], Tensor]
    before: Callable[[], tuple[Tensor, float] | None]


class Part(NamedTuple):
    """A stretch of one update of a round, and of its client's last one.

    | field | meaning |
    |---|---|
    | `share`, `weight` | w_k and a_k, as in `Taken` |
    | `g` | of g_k; may be overwritten |
    | `before` | of y_k, and its a_k; None: it has none |

    >>> Part(0.5, 600, g=[1.0, 2.0], before=None).before is None
    True
    """

    share: float
    weight: float
    g: Tensor
    before: tuple[Tensor, float] | None


class Updates(Protocol):
    """The accepted updates of a round, in their order; may be gone through more than once.

    One is read at a time, so that a cohort of any size takes a model or two of memory.

    | member | meaning |
    |---|---|
    | `layout` | where each tensor lies in a packed vector |
    | `population` | N, the number of clients there are; None: not known |

    >>> def total_weight(updates: Updates) -> float:
    ...     return sum(update.weight for update in updates)
    """

    layout: Layout
    population: int | None

    @property
    def mean_weight(self) -> float:
        """The mean of a_k over all N clients where it is known, else over those seen before."""
        ...

    @property
    def weight(self) -> float:
        """Σ a_k of all clients that were seen, this round's among them."""
        ...

    def __iter__(self) -> Iterator[Taken]: ...

    def __len__(self) -> int: ...

    def stretches(self) -> Iterator[tuple[slice, list[Part]]]:
        """The updates stretch by stretch of the packed vectors, some updates at a time, in order.

        Of each update every stretch comes once, and after the same of the updates before it: as
        `for update in self` does it, in less memory and time. A vector that is given is overwritten
        later; that a file is damaged may be known, and raised, only after its last stretch.
        """
        ...

    def last(self, place: int) -> Tensor:
        """The vector that was kept at one of the estimator's places, 0 to 999."""
        ...

    def keep(self, place: int, vector: Tensor) -> None:
        """Keeps a packed vector at a place, on disk; it counts once the round has stepped."""
        ...


@dataclass(frozen=True, kw_only=True)
class Estimator(ABC):
    """What all have in common. An own one has `estimate`.

    >>> class Half(Estimator):
    ...     remembers_clients = False
    ...     def estimate(self, mean, updates, state):
    ...         return mean / 2, state
    """

    disk: Annotated[float, DISK] = 10.0
    biased: Annotated[bool, BIASED] = False

    # Whether `population` must be known.
    needs_population: ClassVar[bool] = False
    # Whether it is right only if the cohort's mean is, in expectation, that of all clients.
    needs_unbiased: ClassVar[bool] = True
    # Whether each client's last update is kept on disk, for `Taken.before`.
    remembers_clients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, disk=(self.disk > 0, "more than 0 GB"))

    @property
    def needs_client(self) -> bool:
        """Whether an update must say whose it is."""
        return self.remembers_clients

    @abstractmethod
    def estimate(self, mean: Tensor, updates: Updates, state: State) -> tuple[Tensor, State]:
        """ĝ and the new state; changes neither `mean`, ḡ as one packed vector, nor `state`."""

    def keeps(self, clients: int) -> int:
        """How many updates it remembers at most, if so many clients have taken part.

        A run's last two checkpoints may hold on to those before them, too.
        """
        return clients

    def fit(self, layout: Layout) -> Self:
        """Itself, for a model of this layout; raises ValueError if it cannot work on one."""
        return self

    def restored(self, state: State, layout: Layout) -> State:
        """A state that a file had; raises ValueError if it cannot be one."""
        return state

    def require_room(
        self, clients: int, update_bytes: int, free: float = math.inf, versions: int = 1
    ) -> None:
        """Raises if the updates of so many clients need more disk than it may take, or is free.

        In a run's folder an update may lie there in 3 versions: of its last two checkpoints, and
        the newest. What a cohort sends lies beside them until its round is done.

        >>> VARP(disk=1.0).require_room(1000, update_bytes=800_000)  # 0.8 GB
        """
        count = self.keeps(clients)
        needed = count * versions * update_bytes / GB
        if needed > min(self.disk, free / GB):
            limit = f"disk={self.disk:g}" if needed > self.disk else f"the {free / GB:.4g} GB free"
            often = f", each in up to {versions} versions" if versions > 1 else ""
            way_out = "raise it" if needed > self.disk else "choose another disk"
            raise ValueError(
                f"{type(self).__name__} keeps up to {count} updates of {update_bytes:.4g} bytes on "
                f"disk{often}, {needed:.4g} GB, which is more than {limit}: {way_out}, or take a "
                "smaller model or fewer clients"
            )


@dataclass(frozen=True, kw_only=True)
class NoEstimator:
    """None: the server steps by the cohort's mean ḡ.

    >>> from fedglad.config import load
    >>> load("mnist")[1].sections["estimator"]
    NoEstimator()
    """


@dataclass(frozen=True, kw_only=True)
class _LastUpdates(Estimator):
    """What those share whose state is Y = Σ a_k y_k, of all clients' last updates."""

    def restored(self, state: State, layout: Layout) -> State:
        if not state:
            return state
        total = state["total"]
        if total.shape != (layout.size,):
            shape = tuple(total.shape)
            raise ValueError(f"a sum of shape {shape} is not that of the model's updates")
        _require_finite(total)
        return {"total": total.to(layout.device)}


@dataclass(frozen=True, kw_only=True)
class Stale(_LastUpdates):
    """FedStale: ĝ = βȳ + Σ_S w_k (g_k − β y_k), between FedAvg at β = 0 and FedVARP at β = 1.

    y_k is client k's last update, 0 before its first, and ȳ the mean of y_k over all N clients. ĝ
    has the expectation of ḡ whatever the y_k are; the better they tell the g_k, the less it varies.
    Rodio & Neglia 2024, arXiv:2405.04171.

    By equal weights ȳ = (1/N) Σ y_k. By unequal ones a_k (samples) it is Σ a_k y_k / (N ā), with ā
    the mean weight of the clients seen so far, or of all where a sampler knows it. A client's last
    update lies on disk, ȳ in memory. With all clients in every round it is FedAvg.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)}, estimator=Stale(beta=0.5))
    >>> for client, g in ((0, 4.0), (1, 1.0)):
    ...     record = server.step([Update({"w": torch.tensor([g])}, client=client)], population=2)
    >>> server.state["w"]  # −4, then −(0.5 · 4/2 + 1 − 0)
    tensor([-6.])
    """

    beta: Annotated[float, "β: how much of the memory counts"] = 0.5

    needs_population: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, beta=(0 <= self.beta <= 1, "from 0 to 1"))

    def estimate(self, mean: Tensor, updates: Updates, state: State) -> tuple[Tensor, State]:
        return _corrected(mean, updates, state, self.beta)


@dataclass(frozen=True, kw_only=True)
class VARP(_LastUpdates):
    """FedVARP: ĝ = ȳ + Σ_S w_k (g_k − y_k), then y_k ← g_k for the cohort S.

    `stale` with β = 1, which see. Jhunjhunwala et al. 2022, arXiv:2207.14130.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)}, estimator=VARP())
    >>> for client, g in ((0, 4.0), (1, 1.0)):
    ...     record = server.step([Update({"w": torch.tensor([g])}, client=client)], population=2)
    >>> server.state["w"]  # −4, then −(4/2 + 1 − 0)
    tensor([-7.])
    """

    needs_population: ClassVar[bool] = True

    def estimate(self, mean: Tensor, updates: Updates, state: State) -> tuple[Tensor, State]:
        return _corrected(mean, updates, state, 1.0)


@dataclass(frozen=True, kw_only=True)
class MIFA(_LastUpdates):
    """MIFA: the mean of the last updates of all clients seen so far, this round's among them.

    y_k ← g_k for the cohort, then ĝ = Σ a_k y_k / Σ a_k, with weights a_k equal or samples. It asks
    nothing of chance: who takes part may be anybody, also those that happen to be reachable. The
    price is that old updates count in full. Gu et al. 2021, arXiv:2106.04159.

    Differs from the paper: clients not seen yet are left out until they are, where it waits for all
    in its first round.

    >>> import torch
    >>> from fedglad import Server, Update
    >>> server = Server({"w": torch.zeros(1)}, estimator=MIFA())
    >>> for client, g in ((0, 4.0), (1, 1.0), (0, 6.0)):
    ...     record = server.step([Update({"w": torch.tensor([g])}, client=client)])
    >>> server.state["w"]  # −4, then −(4 + 1)/2, then −(6 + 1)/2
    tensor([-10.])
    """

    needs_unbiased: ClassVar[bool] = False

    def estimate(self, mean: Tensor, updates: Updates, state: State) -> tuple[Tensor, State]:
        import torch

        state = _followed(updates, state, mean)
        estimate = torch.empty_like(mean)
        for made, total in _parts(estimate, state["total"]):
            made.copy_(total / updates.weight)
        return estimate, state


@dataclass(frozen=True, kw_only=True)
class Strat(Estimator):
    """Strata by likeness: ĝ = Σ_j p_j y_j over kinds of clients instead of single ones (ours).

    p_j is stratum j's share of all participations so far, and y_j the weighted mean of its members'
    updates in this round, or in the last round that had any. A client's stratum is that of the
    nearest direction of its output layer's update: online spherical k-means, in which a cosine
    below `cosine` opens a new stratum as long as there are fewer than `most`. Post-stratification
    as surveys know it (Holt & Smith 1979). It keeps one update a stratum on disk, and needs no ids.

    `strata = "random"` gives each client one of `most` strata by its id: if that gains as much, it
    is not likeness that does. By unequal weights a participation counts r w_k.

    >>> import torch
    >>> from fedglad import Server
    >>> server = Server({"w": torch.zeros(1, 2)}, estimator=Strat())
    >>> for g in ([2.0, 0.0], [0.0, 4.0], [1.0, 0.0]):
    ...     record = server.step([{"w": torch.tensor([g])}])
    >>> server.state["w"]  # −(2, 0), −(2, 4)/2, and −(2·(1, 0) + (0, 4))/3
    tensor([[-3.6667, -3.3333]])
    """

    cosine: Annotated[float, "likeness to the nearest stratum below which a new one is opened"] = (
        0.6
    )
    most: Annotated[int, "how many strata there may be"] = 20
    layer: Annotated[str, 'whose update is compared; "": the last with 2 or more dimensions'] = ""
    strata: Annotated[Literal["similar", "random"], "similar; random: by the client's id"] = (
        "similar"
    )
    seed: Annotated[int, "of random strata"] = 0

    remembers_clients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            cosine=(-1 <= self.cosine <= 1, "from -1 to 1"),
            most=(1 <= self.most <= 1000, "from 1 to 1000"),
            strata=(self.strata in ("similar", "random"), "'similar' or 'random'"),
        )

    @property
    def needs_client(self) -> bool:
        return self.strata == "random"

    def keeps(self, clients: int) -> int:
        return min(self.most, clients)

    def fit(self, layout: Layout) -> Self:
        known = layout.index.keys() | layout.aliases.keys()
        if self.layer and self.layer not in known:
            raise ValueError(
                f"Strat(layer={self.layer!r}): the model has no such parameter, but "
                f"{', '.join(map(repr, layout.names[-3:]))} and others"
            )
        return self

    def estimate(self, mean: Tensor, updates: Updates, state: State) -> tuple[Tensor, State]:
        import torch

        span = self._span(updates.layout)
        wide = span.stop - span.start if self.strata == "similar" else 0
        state = dict(state) or {
            "directions": torch.zeros(0, wide, dtype=torch.float64),
            "weights": torch.zeros(0, dtype=torch.float64),
        }
        members: dict[int, list[Taken]] = {}
        for update in updates:
            j, state = self._assigned(update, span, state)
            state["weights"][j] += update.share * len(updates)
            members.setdefault(j, []).append(update)
        shares = state["weights"] / state["weights"].sum()
        estimate = torch.zeros_like(mean, dtype=torch.float64)
        for j, share in enumerate(shares.tolist()):
            if j in members:
                y = _weighted_mean(members[j], mean)
                updates.keep(j, y)
            elif share:
                y = updates.last(j)
            else:
                continue  # a random stratum that nobody was in yet
            _add(estimate, y, share)
        return estimate.to(mean.dtype), state

    def restored(self, state: State, layout: Layout) -> State:
        if not state:
            return state
        span = self._span(layout)
        wide = span.stop - span.start if self.strata == "similar" else 0
        directions, weights = state["directions"], state["weights"]
        if len(weights) > self.most or directions.shape != (len(weights), wide):
            raise ValueError(f"strata of shape {tuple(directions.shape)} cannot be")
        _require_finite(directions, weights)
        if not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
            raise ValueError("the strata's weights are not those of participations")
        return state

    def _span(self, layout: Layout) -> slice:
        """Where the layer lies in a packed vector."""
        filled = [n for n, size in zip(layout.names, layout.numels, strict=True) if size]
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        wide = [name for name in filled if len(shapes[name]) > 1]
        name = layout.aliases.get(self.layer, self.layer) or (wide or filled)[-1]
        k = layout.index[name]
        return slice(layout.starts[k], layout.starts[k] + layout.numels[k])

    def _assigned(self, update: Taken, span: slice, state: State) -> tuple[int, State]:
        """The update's stratum, and the strata with its direction in them."""
        import torch

        from fedglad.core.threads import threads

        if self.strata == "random":
            return self._drawn(update.client), _grown(state, self.most)
        direction = update.vector()[span].cpu().double()
        with threads(1):  # a product's bits may depend on them
            length = float(torch.linalg.vector_norm(direction))
            if length:
                direction /= length
            sums = state["directions"]
            norms = torch.linalg.vector_norm(sums, dim=1).clamp(min=1e-300)
            cosines = (sums @ direction) / norms
        count = len(cosines)
        j = int(cosines.argmax()) if count else 0
        if not count or (length and float(cosines[j]) < self.cosine and count < self.most):
            j = count
        state = _grown(state, max(count, j + 1))
        state["directions"][j] += direction
        return j, state

    def _drawn(self, client: Client) -> int:
        from fedglad.rng import stream

        assert client is not None
        return int(stream(self.seed, "stratum", client).integers(self.most))


def _followed(updates: Updates, state: State, like: Tensor, off: Tensor | None = None) -> State:
    """Y = Σ a_k y_k after y_k ← g_k.

    From `off`, where it is given, Σ w_k y_k of the y_k before is taken. In float64: Y is never made
    anew, and what is lost of large early updates would stay in it.
    """
    import torch

    from fedglad.core.threads import threads

    total = state["total"].clone() if state else torch.zeros_like(like, dtype=torch.float64)
    with threads(1):  # others read: to share out one short stretch after the other costs more
        for span, parts in updates.stretches():
            here = total[span]
            for part in parts:
                if part.before is not None:
                    y, a = part.before[0].double(), part.before[1]
                    if off is not None:
                        off[span].sub_(y, alpha=part.share)
                    here.sub_(y, alpha=a)
                here.add_(part.g, alpha=part.weight)
    return {"total": total}


def _corrected(mean: Tensor, updates: Updates, state: State, beta: float) -> tuple[Tensor, State]:
    """ḡ + β(ȳ − Σ_S w_k y_k), and the memory after the round."""
    import torch

    assert updates.population is not None
    if not state or not beta:
        return mean, _followed(updates, state, mean)
    correction = state["total"] / (updates.population * updates.mean_weight)
    state = _followed(updates, state, mean, off=correction)
    estimate = torch.empty_like(mean)
    for made, part, cohort in _parts(estimate, correction, mean):
        made.copy_(part.mul_(beta).add_(cohort))
    return estimate, state


def _parts(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one size stretch by stretch: what is made of them in between is small."""
    return zip(*(vector.split(STRETCH) for vector in vectors), strict=True)


def _add(total: Tensor, vector: Tensor, factor: float) -> None:
    """total += factor · vector, without a float64 copy of the whole vector."""
    for here, part in _parts(total, vector):
        here.add_(part, alpha=factor)


def _require_finite(*values: Tensor) -> None:
    import torch

    for value in values:
        if value.dtype != torch.float64 or not bool(value.isfinite().all()):
            raise ValueError("what the estimator remembers is not finite numbers")


def _grown(state: State, count: int) -> State:
    """A copy of the strata, and empty ones after them so that there are so many."""
    import torch

    lacking = count - len(state["weights"])
    return {
        name: torch.cat([value, value.new_zeros(lacking, *value.shape[1:])])
        for name, value in state.items()
    }


def _weighted_mean(members: list[Taken], like: Tensor) -> Tensor:
    import torch

    whole = math.fsum(update.share for update in members)
    mean = torch.zeros_like(like, dtype=torch.float64)
    for update in members:
        _add(mean, update.vector(), update.share / whole)
    return mean.to(like.dtype)


REGISTRY: dict[str, type] = {
    "none": NoEstimator,
    "varp": VARP,
    "stale": Stale,
    "mifa": MIFA,
    "strat": Strat,
}
