"""For the few methods that need all updates at once: keeps them, and their inner products."""

import math
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from fedglad.core.layout import Layout

NETWORK = 64  # up to so many rows a sorting network of whole-row minima and maxima beats a sort


class Gram:
    """⟨g_j, g_k⟩ of a cohort, r × r in float64, per tensor and in total.

    Row by row in float32, summed over rows in float64: each row's products are one small matrix
    product on one thread, so the bits do not depend on the number of threads. `largest` is the
    largest norm among them.
    """

    def __init__(self, layout: Layout, kept: list[Tensor], largest: float) -> None:
        r = len(kept)
        self.per_tensor = np.zeros((len(layout.names), r, r))
        # Float32 products of tiny updates would underflow: scale them up by a power of 2, exactly.
        # By no more than float32 holds, which is enough for the least number it has, 2⁻¹⁴⁹.
        tiny = 0 < largest < 1e-6
        scale = 2.0 ** min(-math.floor(math.log2(largest)), 126) if tiny else 1.0
        for block in layout.blocks:
            rows = torch.stack([x[block.span].view(-1, layout.row) for x in kept], dim=1).mul_(
                scale
            )
            parts = torch.bmm(rows, rows.transpose(1, 2)).double().cpu().numpy()
            for piece in block.pieces:
                first, last = piece.place.start // layout.row, -(-piece.place.stop // layout.row)
                self.per_tensor[piece.index] += parts[first:last].sum(axis=0)
        self.per_tensor /= scale**2
        self.total = self.per_tensor.sum(axis=0)

    def of(self, chosen: Sequence[int], scales: np.ndarray) -> "Gram":
        """The same for some of the updates, each multiplied by its scale."""
        part = copy(self)
        factors = np.outer(scales, scales)[np.ix_(chosen, chosen)]
        part.per_tensor = self.per_tensor[:, chosen][:, :, chosen] * factors
        part.total = self.total[np.ix_(chosen, chosen)] * factors
        return part

    def distances_sq(self) -> np.ndarray:
        """‖g_j − g_k‖² for all pairs."""
        sq = np.diag(self.total)
        return np.maximum(sq[:, None] + sq[None, :] - 2 * self.total, 0)

    def distances_to_mean(self) -> np.ndarray:
        """‖g_k − ḡ‖ with ḡ the plain mean: also ‖θ_k − θ̄‖."""
        to_mean = np.diag(self.total) - 2 * self.total.mean(axis=1) + self.total.mean()
        return np.sqrt(np.maximum(to_mean, 0))

    def angles_to_mean(self, shares: np.ndarray) -> np.ndarray:
        """The angle between g_k and ḡ = Σ w g, in radians; 0 where one of them is zero."""
        along = (self.total * shares).sum(axis=1)
        length = np.sqrt(np.diag(self.total) * max((shares * along).sum(), 0.0))
        cosine = np.divide(along, length, out=np.ones_like(along), where=length > 0)
        return np.arccos(np.clip(cosine, -1, 1))

    def mean_sq(self, shares: np.ndarray) -> np.ndarray:
        """‖Σ w g‖² per tensor."""
        return np.maximum((self.per_tensor * np.outer(shares, shares)).sum(axis=(1, 2)), 0)


def trimmed_mean(layout: Layout, kept: list[Tensor], trim: int, out: Tensor) -> np.ndarray:
    """Per coordinate, the mean without the `trim` smallest and the `trim` largest values.

    Returns, per tensor, the sum of the same trimmed means of the squares: at least the squared norm
    of what is in `out` (|x|, sorted, is nowhere below x, sorted), and a single long update cannot
    raise it.
    """
    rows: list[Tensor] = []
    for block in layout.blocks:
        values = [x[block.span] for x in kept]
        torch.mean(_middle(values, trim), dim=0, out=out[block.span])
        lengths = _middle([x.abs() for x in values], trim)
        squares = lengths.double().square_().mean(dim=0)
        rows.append(squares.view(-1, layout.row).sum(dim=1))
    return layout.per_tensor(torch.cat(rows).cpu().numpy())


def _middle(rows: list[Tensor], trim: int) -> Tensor:
    return torch.stack(_ordered(rows)[trim : len(rows) - trim])


def _ordered(rows: list[Tensor]) -> list[Tensor]:
    """The rows sorted coordinate by coordinate."""
    if len(rows) > NETWORK:
        return list(torch.stack(rows).sort(dim=0).values)
    rows = list(rows)
    for phase in range(len(rows)):
        for k in range(phase % 2, len(rows) - 1, 2):
            a, b = rows[k], rows[k + 1]
            rows[k], rows[k + 1] = torch.minimum(a, b), torch.maximum(a, b)
    return rows
