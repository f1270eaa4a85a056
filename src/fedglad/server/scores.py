"""Samples a round's updates as they come in, and scores their clients when all are there."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedglad.core.layout import as_tensor
from fedglad.core.sampling import Coordinates
from fedglad.core.threads import threads
from fedglad.core.validate import Opened
from fedglad.trust import Kept, Seen, Trust


class Scores:
    """What `Trust` gets to see of one round; `kept` is what stays of it for the next."""

    def __init__(self, trust: Trust, coordinates: Coordinates, kept: Kept) -> None:
        self.trust, self.coordinates, self.kept = trust, coordinates, kept
        self._updates: list[Opened] = []
        self._samples: list[Tensor] = []

    def see(self, updates: Sequence[Opened], base: Tensor, rows: Tensor | None = None) -> None:
        """Takes samples of updates to the model `base`; `rows` are the same as one matrix."""
        self._updates += updates
        if rows is not None:
            self._samples.append(self.coordinates.of_rows(rows))
        else:
            self._samples += [self.coordinates.of(update, base) for update in updates]

    def samples(self) -> np.ndarray | None:
        """What was taken so far, one row an update."""
        return torch.cat(self._samples).cpu().numpy() if self._samples else None

    def absorb(self, updates: Sequence[Opened], samples: np.ndarray) -> None:
        """Takes over what was taken elsewhere of updates that were seen there."""
        self._updates += updates
        self._samples.append(as_tensor(samples).to(self.coordinates.flat.device))

    def judge(self) -> None:
        """Notes each client's score and flags in its line of the record; one left out has none."""
        accepted = [k for k, update in enumerate(self._updates) if not update.far]
        if not accepted:
            return
        entries = [self._updates[k].entry for k in accepted]
        samples = torch.cat(self._samples) if len(self._samples) > 1 else self._samples[0]
        if len(accepted) < len(samples):
            samples = samples[accepted]
        losses = [math.nan if entry["loss"] is None else entry["loss"] for entry in entries]
        seen = Seen(
            clients=[entry["id"] for entry in entries],
            norms=np.sqrt([entry["sq_norm"] for entry in entries]),
            losses=np.array(losses),
            sample=samples.cpu().numpy(),
        )
        with threads(1):  # it is small work
            verdicts, self.kept = self.trust.judge(seen, self.kept)
        for entry, verdict in zip(entries, verdicts, strict=True):
            entry["trust"] = round(verdict.score, 4)
            if verdict.flags:
                entry["flags"] = list(verdict.flags)
