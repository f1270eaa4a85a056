"""The model, the data and how a client trains: put your own here, the rest can stay as it is."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedglad.clients import Plain
from fedglad.data import Digits
from fedglad.federation.client import score
from fedglad.models import SmallCNN
from fedglad.rng import stream

SEED = 1
SITES = 6  # named site-1, site-2, … as NVFlare's simulator names them

# How a client trains in a round. `fedglad config` explains every field.
CLIENT = Plain(optimizer="sgdm", lr=0.05, batch_size=16, epochs=5, clip_norm=1.0)


class Net(nn.Module):
    """Your model; the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(stream(SEED, "model").integers(2**63)))
        self.net = SmallCNN(channels=1, size=8, classes=10).build()

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the classes."""
        return self.net(x)


def partition_of(site: str) -> int:
    """Which part of the digits a site has: site-1 the first."""
    return int(site.rpartition("-")[2]) - 1


def load_client(site: str) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one site.

    Here the bundled digits are dealt out to so many sites, mostly one or two kinds to each. In a
    real federation: read the files that lie on this machine.
    """
    return Digits(clients=SITES).load_federation().client(partition_of(site))


class Test:
    """What the server tests the global model on. Without such data, leave out `evaluate`."""

    def __init__(self) -> None:
        self.model = Net()
        self.x, self.y = Digits().load_federation().test()

    def __call__(self, t: int, params: Mapping[str, Any]) -> dict[str, float]:
        """The metrics after t rounds, of the newest model and of the average."""
        self.model.load_state_dict({name: torch.as_tensor(v) for name, v in params.items()})
        loss, accuracy = score(self.model, self.x, self.y)
        return {"loss": loss, "accuracy": accuracy}
