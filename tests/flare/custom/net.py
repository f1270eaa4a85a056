"""A model with everything that travels: parameters, BatchNorm's statistics, a counter."""

import torch
from torch import nn


class Net(nn.Module):
    """The same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
