"""A round with central differential privacy: each update clipped, noise on their sum, r fixed.

All in float64, and with nothing of one client in what becomes of another: an update is taken or
rejected, and clipped, by itself alone.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad.core.aggregate import pack, totals_sq
from fedglad.core.layout import Layout
from fedglad.privacy import Central
from fedglad.records import Bundle, Several, Statistics
from fedglad.server.intake import Intake, statistics


def take_private(
    intake: Intake,
    updates: Iterable[Any],
    privacy: Central,
    cohort: int,
    rng: np.random.Generator,
) -> Statistics:
    """Consumes the updates; the noised mean is in `intake.total`.

    The statistics are those of the noised mean, as of a single update: whatever is made of them
    tells no more than it does. There is always a round, however many updates are accepted.
    """
    layout = intake.layout
    total = torch.zeros(layout.size, dtype=torch.float64, device=layout.device)
    arrived = 0
    for several in updates:
        group = several if isinstance(several, Several | Bundle) else [several]
        arrived += len(group.clients) if isinstance(group, Bundle) else len(group)
        if arrived > cohort:
            raise ValueError(
                f"more than {cohort} updates came for a cohort of {cohort}: ε is that of a fixed "
                "number, give step the cohort that was drawn"
            )
        opened = intake.open(group)
        squares = intake.accumulate(opened)
        for update, sq, norm_sq in zip(opened, squares, totals_sq(squares), strict=True):
            if intake.judge(update, sq, norm_sq):
                clipped, factor = shortened(pack(layout, update, intake.base), privacy.clip)
                total.add_(clipped)
                update.entry["weight"] = 1 / cohort
                if factor < 1:
                    update.entry["clipped"] = factor
            update.tensors = []
        del several, group, opened  # nothing is kept while the next is made
    total.add_(noise(layout, rng), alpha=privacy.noise * privacy.clip).div_(cohort)
    intake.total.flat.copy_(total)
    intake.total.empty = False
    mean_sq = intake.total.mean_sq(1.0)
    return statistics(layout, mean_sq, mean_sq, mean_sq, (1.0,))


def shortened(vector: Tensor, longest: float) -> tuple[Tensor, float]:
    """The vector in float64, no longer than `longest`, and what it was multiplied with."""
    vector = vector.double()
    # By NumPy, which adds up in one order, whatever the number of threads.
    norm = float(np.sqrt(np.square(vector.cpu().numpy()).sum()))
    if norm <= longest:
        return vector, 1.0
    return vector.mul_(longest / norm), longest / norm


def noise(layout: Layout, rng: np.random.Generator) -> Tensor:
    """Standard normal numbers in float64 where there are parameters, and 0 in the padding."""
    flat = torch.zeros(layout.size, dtype=torch.float64)
    for start, count in zip(layout.starts, layout.numels, strict=True):
        flat[start : start + count] = torch.from_numpy(rng.standard_normal(count))
    return flat.to(layout.device)
