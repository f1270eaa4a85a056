"""One client from each of r groups, so that a cohort looks more like the population."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from fedglad.samplers.base import Ask, Cohort, Pool, Sampler, State

if TYPE_CHECKING:
    from torch import Tensor

GIB = 1 << 30
COLUMNS = 1 << 16  # of the updates that are multiplied at a time
BY = "size; similarity: of the clients' last updates, which are kept for it"


@dataclass(frozen=True)
class Bins:
    """r distributions W_j as one line of length r·n: the j-th is the j-th stretch of length n.

    Client `ids[i]` has `masses[i]` of it, in whole numbers: Σ_j W_jk is r·n_k/n exactly.
    """

    ids: np.ndarray
    masses: np.ndarray
    r: int

    @property
    def n(self) -> int:
        return int(self.masses.sum()) // self.r

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One client from each distribution."""
        points = np.arange(self.r) * self.n + rng.integers(self.n, size=self.r)
        return self.ids[np.searchsorted(np.cumsum(self.masses), points, side="right")]


@dataclass(frozen=True, kw_only=True)
class Clustered(Sampler):
    """One draw from each of r distributions W_j with Σ_j W_jk = r n_k/n, then the plain mean.

    E[w_k] = n_k/n as for `md`, with less variance. By size: r·n_k of each client, the largest
    first, is poured into r bins of capacity n. By similarity: Ward's tree of the clients' last
    updates is cut so that no cluster exceeds a bin; the r largest seed the bins and the rest is
    poured in. A client of more than n/r samples has bins of its own first. Who has no update yet
    counts as the zero vector. A client that is drawn m times trains once, with weight m/r.
    Fraboni et al. 2021, arXiv:2105.05883, algorithms 1 and 2.

    All N sizes are asked for once in a run. By size, a round costs O(N log N); by similarity
    N² products of updates, and one update a client seen on disk and, for a moment, in memory.

    Differs from the authors' code: Ward's distances are those of the updates, where theirs are of
    the rows of a similarity matrix.

    >>> from fedglad.rng import stream
    >>> pool = Pool(clients=4, size=[30, 10, 10, 10].__getitem__, labels=lambda k: None)
    >>> chosen = Clustered(clients_per_round=2)  # client 0, and one of the others
    >>> chosen.sample(stream(1, "cohort", 0), 0, {}, pool, list)
    Cohort(ids=(0, 1), weights=(0.5, 0.5))
    """

    by: Annotated[Literal["size", "similarity"], BY] = "size"
    memory_limit: Annotated[float, "similarity: GiB that the updates may take"] = 2.0

    own_weights: ClassVar[bool] = True
    needs_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory_limit > 0:
            raise ValueError(f"memory_limit={self.memory_limit!r}: must be more than 0 GiB")

    @property
    def keeps_updates(self) -> bool:
        return self.by == "similarity"

    def draw(self, rng: np.random.Generator, t: int, state: State, pool: Pool, ask: Ask) -> Cohort:
        r, sizes = self.clients_per_round, pool.sizes
        if self.by == "size":
            line = by_size(sizes, r)
        else:
            ids = range(pool.clients) if pool.ids is None else pool.ids.tolist()
            line = by_similarity(sizes, _tree(self._last_updates(ids, pool)), r)
        places = line.draw(rng)
        return Cohort.of_draws(places if pool.ids is None else pool.ids[places])

    def check(self, pool: Pool) -> None:
        """Raises if the updates would not fit, or scipy is not installed."""
        super().check(pool)
        if self.by == "similarity":
            self._fit(pool, pool.update_bytes)
            _scipy()

    def _last_updates(self, ids: Sequence[int], pool: Pool) -> Tensor:
        """A row each; those of clients without an update are zero."""
        import torch

        rows: Tensor | None = None
        for row, client in enumerate(ids):
            if (update := pool.last(client)) is None:
                continue
            if rows is None:
                self._fit(pool, update.nbytes)
                rows = update.new_zeros(len(ids), len(update))
            rows[row] = update
        return torch.zeros(len(ids), 1) if rows is None else rows

    def _fit(self, pool: Pool, update_bytes: int) -> None:
        n = pool.clients
        needed = (n * update_bytes + 4 * 8 * n**2) / GIB  # the updates, and all pairs' distances
        if needed > self.memory_limit:
            raise ValueError(
                f"clustering {n} clients by similarity takes {needed:.1f} GiB, more than "
                f'memory_limit={self.memory_limit:g}: raise it, or cluster by = "size"'
            )


def by_size(sizes: np.ndarray, r: int) -> Bins:
    """r·n_k of each client, the largest first."""
    order = np.argsort(-sizes, kind="stable")
    return Bins(order, r * sizes[order], r)


def by_similarity(sizes: np.ndarray, tree: np.ndarray, r: int) -> Bins:
    """The clusters of a tree, as scipy gives it, in bins: the r largest first, the rest after."""
    n = int(sizes.sum())
    bins: list[list[tuple[int, int]]] = []
    groups: list[list[tuple[int, int]]] = []
    for members in _cut(tree, (r * sizes).tolist(), n):
        group = [(k, r * int(sizes[k])) for k in sorted(members)]
        if len(group) == 1:  # perhaps more than a bin
            k, mass = group[0]
            bins += [[(k, n)]] * (mass // n)
            group = [(k, mass % n)] if mass % n else []
        groups += [group] if group else []
    groups.sort(key=lambda group: (-_mass(group), group[0]))
    seeds = r - len(bins)
    rest = [piece for group in groups[seeds:] for piece in group][::-1]
    for group in groups[:seeds]:
        room = n - _mass(group)
        while room:
            k, mass = rest.pop()
            poured = min(mass, room)
            group.append((k, poured))
            room -= poured
            if mass > poured:
                rest.append((k, mass - poured))
        bins.append(group)
    ids, masses = np.array([piece for group in bins for piece in group]).T
    return Bins(ids, masses, r)


def _mass(group: list[tuple[int, int]]) -> int:
    return sum(mass for _, mass in group)


def _cut(tree: np.ndarray, masses: list[int], capacity: int) -> list[list[int]]:
    """The largest subtrees whose mass is at most the capacity; a leaf may be heavier."""
    whole = {k: [k] for k in range(len(masses))}
    masses = list(masses)
    for node, (a, b) in enumerate(tree[:, :2].astype(int).tolist(), start=len(masses)):
        masses.append(masses[a] + masses[b])
        if masses[node] <= capacity:
            whole[node] = whole.pop(a) + whole.pop(b)
    return list(whole.values())


def _tree(updates: Tensor) -> np.ndarray:
    """Ward's tree of the rows."""
    import torch

    from fedglad.core.threads import threads

    if len(updates) == 1:
        return np.empty((0, 4))
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    with threads(1):  # a product's bits may depend on them, and a cohort on the bits
        for part in updates.split(COLUMNS, dim=1):
            exact = part.double()
            gram += exact @ exact.T
    squares = gram.diag()
    apart = (squares[:, None] + squares - 2 * gram).clamp_(min=0).sqrt_().numpy()
    return _scipy().linkage(apart[np.triu_indices(len(apart), 1)], "ward")


def _scipy() -> Any:
    try:
        from scipy.cluster import hierarchy  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise ValueError(
            "clustering by similarity needs scipy: pip install 'fedglad[clustered]', or cluster "
            'by = "size"'
        ) from None
    return hierarchy
