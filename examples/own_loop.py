"""Your own training loop, our server: FedAvg with and without FedGLAD in plain PyTorch.

    python examples/own_loop.py [--rounds 30] [--seed 1]

Nothing of the simulator is used but its digits and who holds which. What fedglad adds to a loop
that you have are the lines marked with <--.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad import Glad, Record, Server, Update
from fedglad.data import Digits
from fedglad.rng import stream

CLIENTS, PER_ROUND, EPOCHS, BATCH, RATE = 50, 5, 5, 14, 0.05

Samples = tuple[Tensor, Tensor]


def train(model: nn.Module, samples: Samples, rng: np.random.Generator) -> float:
    """A client: a few epochs of SGD in place; returns the mean loss."""
    images, labels = samples
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses: list[float] = []
    for _ in range(EPOCHS):
        for batch in torch.from_numpy(rng.permutation(len(labels))).split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return float(np.mean(losses))


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """In percent."""
    images, labels = samples
    return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


def federated(seed: int, rounds: int, adapter: Glad | None) -> Iterator[tuple[float, Record]]:
    """Test accuracy and the server's record, round by round."""
    data = Digits(clients=CLIENTS).load_federation()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    server = Server(model, adapter=adapter)  # <-- its optimizer is SGD(lr=1): FedAvg

    def updates(t: int, cohort: list[int]) -> Iterator[Update]:
        for k in cohort:
            model.load_state_dict(server.state)  # <-- what a client starts from
            loss = train(model, data.client(k), stream(seed, "batches", t, k))
            yield Update(model=model.state_dict(), weight=data.size(k), client=k, loss=loss)  # <--

    for t in range(rounds):
        cohort = stream(seed, "cohort", t).choice(CLIENTS, PER_ROUND, replace=False).tolist()
        record = server.step(updates(t, cohort))  # <-- trains client after client, keeps none
        model.load_state_dict(server.state)
        yield accuracy(model, data.test()), record


def main() -> None:
    parser = argparse.ArgumentParser(description="FedGLAD in an own training loop.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # for a model this small, more threads only wait for each other
    pair = [federated(args.seed, args.rounds, adapter) for adapter in (None, Glad())]
    print("       accuracy %           FedGLAD's\nround  FedAvg  FedGLAD    GSI  factor")
    for t, ((plain, _), (glad, record)) in enumerate(zip(*pair, strict=True), start=1):
        factor = float(np.mean(list(record.scale.values())))
        print(f"{t:5}  {plain:6.1f}  {glad:7.1f}  {record.gsi_all:5.2f}  {factor:6.2f}")


if __name__ == "__main__":
    main()
