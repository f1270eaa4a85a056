"""A model with everything that travels: parameters, BatchNorm's statistics, a counter."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """The same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Test:
    """A test at the server whose numbers can be worked out by hand."""

    def __call__(self, t: int, params: Mapping[str, Any]) -> dict[str, float]:
        """The loss is the mean of |θ|, the accuracy what is left of 1."""
        sizes = [float(np.abs(np.asarray(v)).mean()) for v in params.values()]
        return {"loss": sum(sizes), "accuracy": 1 / (1 + sum(sizes))}


class Large(nn.Module):
    """1.2 million parameters, for the benchmark."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(784, 1200), nn.Linear(1200, 200), nn.Linear(200, 10))
