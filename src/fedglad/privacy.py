"""Differential privacy: what the released models may tell of any one client, as a number.

>>> from fedglad.config import load
>>> load("mnist")[1].sections["privacy"]
NoPrivacy()

Central: the server is trusted, clips each update, and adds noise to their mean. What comes of that
mean, every model after every round, is (ε, δ)-private; records, which have norms and losses of
single clients, are not. docs/privacy.md says what is refused beside it, and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from fedglad.core.checks import check

LACKING = "ε is computed by dp-accounting, which is not installed: pip install 'fedglad[privacy]'"

Releases = Mapping[tuple[float, int, int], int]
"""How many rounds there were, by (σ, r, N)."""


@dataclass(frozen=True, kw_only=True)
class NoPrivacy:
    """None: updates count as they are.

    >>> NoPrivacy()
    NoPrivacy()
    """


@dataclass(frozen=True, kw_only=True)
class Central:
    """Noise on the mean of clipped updates: ḡ = (Σ_S g_k min(1, C/‖g_k‖) + N(0, σ²C²))/r.

    So the noise of the mean has the standard deviation σC/r in every coordinate. The r of N clients
    are drawn uniformly without replacement, and r is fixed: an update that is rejected or does not
    come counts as 0. McMahan et al. 2018, arXiv:1710.06963.

    ε is that of replacing one client's data by any other's, with N known to all: two such sums are
    up to 2C apart, so that σ counts as σ/2. By Rényi divergences of sampling without replacement
    (Wang et al. 2019, arXiv:1808.00087), as dp-accounting adds them up.

    Differs from the paper: it draws each client by itself, divides by qN, and counts σ for clients
    that come or go.

    >>> Central(clip=0.5, noise=2.0).deviation(cohort=10)
    0.1
    """

    clip: Annotated[float, "C: no update counts as longer"] = 1.0
    noise: Annotated[float, "σ: the standard deviation of the sum's noise, over C"] = 1.0
    delta: Annotated[float, "δ, for which ε is said: well below one over the number of clients"] = (
        1e-5
    )

    def __post_init__(self) -> None:
        check(
            self,
            clip=(0 < self.clip < 1e12, "greater than 0, and below 1e12"),
            noise=(1e-3 <= self.noise <= 1e6, "from 1e-3 to 1e6"),
            delta=(0 < self.delta < 1, "greater than 0, and less than 1"),
        )

    def deviation(self, cohort: int) -> float:
        """The standard deviation of the noise in each coordinate of the mean."""
        return self.noise * self.clip / cohort

    def epsilon(self, rounds: int, cohort: int, population: int) -> float:
        """ε after so many rounds with r of N clients: the price of a run, before it is run."""
        return epsilon({(self.noise, cohort, population): rounds}, self.delta)

    def require(self) -> None:
        """Raises ValueError if there is nothing to compute ε with."""
        try:
            import dp_accounting.rdp  # noqa: F401  # pyright: ignore
        except ImportError as error:
            raise ValueError(f"{LACKING} ({error})") from None


def epsilon(releases: Releases, delta: float) -> float:
    """ε of some rounds together, for replacing one client's data by any other's.

    >>> epsilon({(1.0, 10, 1000): 0}, delta=1e-5)
    0.0
    """
    if not any(releases.values()):
        return 0.0
    Central().require()
    from dp_accounting.rdp import compute_epsilon  # pyright: ignore

    total: Any = 0.0
    for (noise, cohort, population), rounds in releases.items():
        orders, divergences = _of_a_round(noise, cohort, population)
        total = total + rounds * divergences
    return float(compute_epsilon(orders, total, delta)[0])  # pyright: ignore


@lru_cache(maxsize=64)
def _of_a_round(noise: float, cohort: int, population: int) -> tuple[Any, Any]:
    """The orders that are looked at, and the Rényi divergence of one round for each."""
    import dp_accounting  # pyright: ignore

    if not 1 <= cohort <= population:
        raise ValueError(f"a cohort of {cohort} cannot be drawn from {population} clients")
    module: Any = dp_accounting
    accountant = module.rdp.RdpAccountant(
        neighboring_relation=module.NeighboringRelation.REPLACE_ONE
    )
    accountant.compose(
        module.SampledWithoutReplacementDpEvent(
            source_dataset_size=population,
            sample_size=cohort,
            # Over the sensitivity: replacing a client moves the sum of clipped updates by up to 2C.
            event=module.GaussianDpEvent(noise / 2),
        )
    )
    return accountant.orders, accountant.rdp


def text(epsilon: float) -> str:
    """ε as people read it, never less than it is.

    >>> text(3.14159), text(0.01234), text(math.inf)
    ('3.15', '0.0124', 'inf')
    """
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    digits = max(0, 2 - math.floor(math.log10(epsilon)))
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:.{digits}f}"


REGISTRY: dict[str, type] = {"none": NoPrivacy, "central": Central}
