"""FedAvg with and without FedGLAD on handwritten digits: your own training loop, our server.

    python examples/digits.py [--seeds 5] [--rounds 60] [--out out]

Fifty clients hold 28 images each, mostly of one or two digits; five of them train in a round.
Halfway one round is forced on both methods: five clients that hold almost only one digit, the
same. Both methods start from the same weights and meet the same clients and batches, so that they
differ in nothing else. The local rate was chosen for FedAvg, on other seeds than those run here.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import digits_show as show
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad import Glad, Record, Server, Update
from fedglad.data import digits
from fedglad.rng import stream

METHODS = {"FedAvg": None, "FedGLAD": Glad()}  # the one difference: Server(adapter=...)

CLIENTS, PER_ROUND = 50, 5
EPOCHS, BATCH, RATE, MOMENTUM, CLIP = 5, 14, 0.1, 0.9, 1.0
TRAIN = 1400  # of 1,797 images; the other 397 are the test set

Samples = tuple[Tensor, Tensor]


# 1. The data: who holds what.


def label_skew(labels: np.ndarray, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    """Equally many samples a client, its mix of classes drawn from Dir(α·p), p the class shares.

    α is the total concentration: 0.1 here is 0.01 per class in most other tools. Simplified from
    the paper's: where a class has run out, the one with most samples left fills the gap.
    """
    left = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(10)]
    shares = np.bincount(labels) / len(labels)
    size = len(labels) // CLIENTS
    clients: list[list[int]] = []
    for _ in range(CLIENTS):
        wanted = rng.multinomial(size, rng.dirichlet(alpha * shares))
        own = [left[c].pop() for c in range(10) for _ in range(min(wanted[c], len(left[c])))]
        while len(own) < size:
            own.append(max(left, key=len).pop())
        clients.append(own)
    return clients


def load(seed: int) -> tuple[list[Samples], Samples]:
    """Each client's images and labels, and the test set."""
    images, labels = digits.load()
    order = stream(seed, "split").permutation(len(labels))
    x, y = torch.from_numpy(images[order]).flatten(1), torch.from_numpy(labels[order])
    parts = label_skew(labels[order[:TRAIN]], 0.1, stream(seed, "partition"))
    return [(x[part], y[part]) for part in parts], (x[TRAIN:], y[TRAIN:])


def one_digit_cohort(clients: list[Samples]) -> list[int]:
    """The five clients that come closest to holding one digit only, the same digit for all."""
    counts = np.array([np.bincount(y, minlength=10) for _, y in clients])
    digit = np.sort(counts, axis=0)[-PER_ROUND:].sum(axis=0).argmax()
    return np.argsort(-counts[:, digit], kind="stable")[:PER_ROUND].tolist()


# 2. A client: plain PyTorch, nothing to do with fedglad.


def train(model: nn.Module, samples: Samples, rng: np.random.Generator) -> float:
    """A few epochs of SGD in place; returns the mean loss."""
    images, labels = samples
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses: list[float] = []
    for _ in range(EPOCHS):
        for batch in torch.from_numpy(rng.permutation(len(labels))).split(BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.item())
    return float(np.mean(losses))


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """In percent."""
    images, labels = samples
    return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


# 3. The rounds: this is where fedglad comes in.


def federated(seed: int, adapter: Glad | None, rounds: int) -> Iterator[tuple[float, Record]]:
    """Yields test accuracy and the server's record, round by round."""
    clients, test = load(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    server = Server(model, adapter=adapter)  # the optimizer is SGD(lr=1): FedAvg

    def train_cohort(t: int, cohort: list[int]) -> Iterator[Update]:
        for k in cohort:
            model.load_state_dict(server.state)
            loss = train(model, clients[k], stream(seed, "batches", t, k))
            size = len(clients[k][1])
            yield Update(model=model.state_dict(), weight=size, client=k, loss=loss)

    for t in range(rounds):
        cohort = stream(seed, "cohort", t).choice(CLIENTS, PER_ROUND, replace=False).tolist()
        if t == rounds // 2:
            cohort = one_digit_cohort(clients)
        record = server.step(train_cohort(t, cohort))  # trains client after client, keeps none
        model.load_state_dict(server.state)
        yield accuracy(model, test), record


def main() -> None:
    parser = argparse.ArgumentParser(description="FedAvg with and without FedGLAD on digits.")
    parser.add_argument("--seeds", type=int, default=5, help="repetitions (default 5)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each (default 60)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    args = parser.parse_args()
    if args.seeds < 1 or args.rounds < 4:
        parser.error("needs --seeds of at least 1 and --rounds of at least 4")
    args.out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # for a model this small, more threads only wait for each other
    runs: dict[str, list[show.Run]] = {name: [] for name in METHODS}
    with show.Progress(args.seeds * args.rounds * len(METHODS)) as progress:
        for seed in range(1, args.seeds + 1):
            for name, adapter in METHODS.items():
                run = show.Run(seed)
                for percent, record in federated(seed, adapter, args.rounds):
                    run.add(percent, record)
                    progress.step(name, run)
                progress.finish(name, run)
                runs[name].append(run)
    show.summary(runs["FedAvg"], runs["FedGLAD"], forced=args.rounds // 2)
    show.plot(runs["FedAvg"], runs["FedGLAD"], args.rounds // 2, args.out / "digits.png")


if __name__ == "__main__":
    main()
