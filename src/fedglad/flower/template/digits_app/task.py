"""The model, the data and how a client trains: put your own here, the rest can stay as it is."""

import torch
from torch import Tensor, nn

from fedglad.clients import Plain
from fedglad.data import Digits
from fedglad.models import SmallCNN
from fedglad.rng import stream

# How a client trains in a round. `fedglad config` explains every field.
CLIENT = Plain(optimizer="sgdm", lr=0.05, batch_size=16, epochs=5, clip_norm=1.0)


def build_model(seed: int) -> nn.Module:
    """Your model; the same for the same seed. Any nn.Module will do."""
    torch.manual_seed(int(stream(seed, "model").integers(2**63)))
    return SmallCNN(channels=1, size=8, classes=10).build()


def load_client(partition: int, partitions: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one client.

    Here the bundled digits are dealt out to so many clients, some kinds to each: fewer the smaller
    alpha is. In a real federation: read the files that lie on this machine.
    """
    return Digits(clients=partitions, alpha=1.0).load_federation().client(partition)


def load_test() -> tuple[Tensor, Tensor]:
    """What the server tests the global model on. Without such data, see server_app.py."""
    return Digits().load_federation().test()
