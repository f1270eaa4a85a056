"""What a server knows of a round before its updates come, so that others can judge and add them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedglad.core.aggregate import Sum
from fedglad.core.guard import Guard, Limits
from fedglad.core.layout import Layout
from fedglad.core.sampling import Coordinates
from fedglad.filters import Filter
from fedglad.server.intake import Intake
from fedglad.server.scores import Scores
from fedglad.server.totals import Block
from fedglad.trust import Kept, Trust
from fedglad.weights import Samples, WeightingState


@dataclass(frozen=True, kw_only=True)
class Rule:
    """All that judging and adding up a block of updates takes, beside the model; can be sent.

    | field | meaning |
    |---|---|
    | `weights` | of each client of the cohort, for a sampler that gives them |
    | `wants_steps` | an update must say how many local steps it took |
    | others | as in `Intake` |
    """

    filter: Filter
    weighting: Samples
    weighting_state: WeightingState
    wants_extra: bool
    wants_steps: bool
    guard: Guard | None
    usual: Mapping[str, float]
    model_norm: float
    round: int
    trust: Trust | None
    weights: Mapping[int, float] | None = None

    def block(
        self,
        updates: Iterable[Any],
        layout: Layout,
        base: Tensor,
        base_buffers: Mapping[str, Tensor],
    ) -> Block:
        """The sums of a block's updates to the model `base`, as the server would add them up."""
        scores = None
        if self.trust:
            scores = Scores(self.trust, Coordinates(layout, self.trust.coordinates), Kept())
        intake = Intake(
            layout=layout,
            filter=self.filter,
            weighting=self.weighting,
            weighting_state=self.weighting_state,
            min_clients=1,
            wants_extra=self.wants_extra,
            lengths=_ones if self.wants_steps else None,
            wants_distances=False,
            base=base,
            base_buffers=base_buffers,
            limits=Limits(self.guard, self.usual),
            model_norm=self.model_norm,
            round=self.round,
            total=Sum(layout),
            scores=scores,
        )
        return intake.block(updates)


def _ones(steps: Sequence[int]) -> np.ndarray:
    return np.ones(len(steps))
