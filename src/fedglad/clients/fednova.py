"""FedNova: updates of clients that took different numbers of steps, made comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedglad.clients.method import Memory, Pair, Plain

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FedNova(Plain):
    """FedNova (Wang et al. 2020): d_k = g_k/a_k, so that more steps are not more say.

    The update is τ_eff Σ w_k d_k with τ_eff = Σ w_k a_k. After τ steps a = τ for SGD, and
    [τ − ρ(1−ρ^τ)/(1−ρ)]/(1−ρ) for momentum ρ. Clients take different numbers of steps if `steps` is
    0 and their sizes differ; with equal ones it is FedAvg. GSI and filters see d_k, and so does
    `sq_norm` in the record. arXiv:2007.07481.

    >>> FedNova(optimizer="sgdm", momentum=0.5).server.lengths([1, 2])  # a: 1, and 1.5 + 1
    array([1. , 2.5])
    """

    needs_mean: ClassVar[bool] = True
    wants_extra: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        way_out = "known for sgd and sgdm at a constant rate, without weight decay"
        if self.optimizer not in ("sgd", "sgdm"):
            raise self.wrong("optimizer", f"a_k is {way_out}")
        if self.weight_decay:
            raise self.wrong("weight_decay", f"a_k is {way_out}: set it to 0")
        if self.schedule != "constant":
            raise self.wrong("schedule", f"a_k is {way_out}: set it to 'constant'")

    @property
    def server(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Itself: the mean of the normalised updates is multiplied by τ_eff, by the `lengths`."""
        return self

    def lengths(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """a of so many local steps: the sum of the factors with which gradients enter g_k/lr.

        Where the settings say how many steps a client takes, no more are believed.
        """
        rho = self.momentum if self.optimizer == "sgdm" else 0.0
        tau = np.minimum(np.asarray(steps, dtype=float), self.steps or np.inf)
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)

    def finish(self, delta: Tensor, steps: int, memory: Memory, sent: Memory) -> Pair:
        delta.div_(float(self.lengths([steps])[0]))
        return {}, None
