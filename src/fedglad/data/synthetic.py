"""Synthetic(α, β): logistic data for any number of clients, each made only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np

from fedglad.core.checks import check
from fedglad.data.validation import VALIDATION, HeldOut, check_share, held_out
from fedglad.rng import stream

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Every client labels its own kind of inputs with its own linear model.

    Client k draws u ~ N(0, α²), and every entry of W and b from N(u, 1), and labels its inputs
    y = argmax(W x + b). The inputs are x ~ N(v, Σ) with v_j ~ N(B, 1), B ~ N(0, β²) and
    Σ = diag(j^−1.2): β is how far the clients' inputs differ. Li et al. 2020, arXiv:1812.06127,
    section 5.1; Σ from Shamir et al. 2014.

    Mind: u adds the same number to all logits, so α, meant to say how far the clients' models
    differ, changes no label. It is kept because the recipe and its results are known by it.

    Nothing is kept of a client: it is drawn from its own stream each time, so a million clients
    cost as much as the few that are sampled.

    Differs from the paper: α and β are standard deviations, as in the authors' code, where the
    paper's N(0, α) may be read as a variance. Sizes are LEAF's, min(⌊LogNormal(3, 2)⌋ + 5, 1000);
    the authors' ⌊LogNormal(4, 2)⌋ + 50 has no bound, and the largest of a million clients would
    hold most of a gigabyte. Held-out samples, one for nine, come on top of these sizes.

    >>> Synthetic(clients=10**6, samples=16).client(999_999)[0].shape
    torch.Size([16, 60])
    """

    clients: Annotated[int, "N; nothing is stored for them"] = 100
    alpha: Annotated[float, "LEAF's α; changes no label"] = 1.0
    beta: Annotated[float, "LEAF's β: how much the inputs differ between clients"] = 1.0
    features: Annotated[int, "inputs"] = 60
    classes: Annotated[int, "labels"] = 10
    samples: Annotated[int | None, "of each client; by default LEAF's log-normal sizes"] = None
    test_clients: Annotated[int, "whose held-out samples are the test set"] = 100
    seed: Annotated[int, "of the data"] = 0
    validation: Annotated[float, VALIDATION] = 0.0

    added: ClassVar[Mapping[str, Any]] = {"validation": 0.0}

    def __post_init__(self) -> None:
        check_share(self, self.validation)
        check(
            self,
            clients=1,
            alpha=(0 <= self.alpha < np.inf, "0 or more, and finite"),
            beta=(0 <= self.beta < np.inf, "0 or more, and finite"),
            features=1,
            classes=2,
            samples=(self.samples is None or self.samples >= 1, "1 or more, or left out"),
            test_clients=1,
        )

    def load_federation(self) -> Self | HeldOut:
        """Itself, as there is nothing to load; with `validation` less that share of each client."""
        return held_out(self, self.validation, self.seed)

    def size(self, k: int) -> int:
        """How many training samples client k has."""
        self._known(k)
        return self._size(stream(self.seed, "synthetic", k))

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The training samples of client k."""
        return self._draw(k, held_out=False)

    def labels(self, k: int) -> np.ndarray:
        """How many training samples of each class client k has."""
        return np.bincount(self.client(k)[1].numpy(), minlength=self.classes)

    def test(self) -> tuple[Tensor, Tensor]:
        """Held-out samples of the first clients, pooled: one for nine training samples."""
        return self._test

    def client_test(self, k: int) -> tuple[Tensor, Tensor]:
        """Held-out samples of client k: one for nine training samples."""
        return self._draw(k, held_out=True)

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        import torch

        first = range(min(self.clients, self.test_clients))
        xs, ys = zip(*(self._draw(k, held_out=True) for k in first), strict=True)
        return torch.cat(xs), torch.cat(ys)

    def _known(self, k: int) -> None:
        if not 0 <= k < self.clients:
            raise IndexError(f"client {k}: there are clients 0 … {self.clients - 1}")

    def _size(self, rng: np.random.Generator) -> int:
        """The first draw of a client's stream, so that asking for a size draws no sample."""
        return self.samples or min(int(rng.lognormal(3, 2)) + 5, 1000)

    def _draw(self, k: int, *, held_out: bool) -> tuple[Tensor, Tensor]:
        import torch

        self._known(k)
        rng = stream(self.seed, "synthetic", k)
        n = self._size(rng)
        u, centre = rng.normal(0, self.alpha), rng.normal(0, self.beta)
        weight = rng.normal(u, 1, (self.features, self.classes))
        bias = rng.normal(u, 1, self.classes)
        mean = rng.normal(centre, 1, self.features)
        if held_out:
            rng, n = stream(self.seed, "synthetic-test", k), -(-n // 9)
        spread = np.arange(1, self.features + 1) ** -0.6
        x = (mean + spread * rng.standard_normal((n, self.features))).astype(np.float32)
        # In float64, so that no label depends on how a BLAS library orders its sums.
        y = np.argmax(x @ weight + bias, axis=1)
        return torch.from_numpy(x), torch.from_numpy(y)
