"""Rounds bound by arithmetic, against two plain PyTorch loops (W1): `make bench BENCH=compute`.

The CNN of 1,199,882 parameters, 100 clients × 600 random images, 10 a round, batch 64, one epoch,
SGD with momentum, clipping, FedGLAD. The floor is what the machine gives to code that does nothing
but train: two processes with one thread each, side by side, each with half of a round's images and
the CNN as it is usually written. With our CNN instead, the same loops show the framework's share.

    python benchmarks/compute.py [--rounds 1] [--repeats 5] [--quick]
"""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import torch
from _shared import best, load, machine, options, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import fedglad
from fedglad.config.schema import Config
from fedglad.data.federation import Partitioned
from fedglad.models.cnn import FedOptCNN

CLIENTS, SAMPLES, COHORT, BATCH, LR, CLIP, CORES = 100, 600, 10, 64, 0.01, 1.0, 2
FLOOR, OUR_CNN, FEDGLAD = "two plain loops", "two plain loops, our CNN", "fedglad, `local`"


def draw(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 28, 28, generator=generator)
    return x, torch.randint(10, (n,), generator=generator)


def usual_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def plain_loop(pipe: Connection) -> None:
    """One of the two processes: a client after the other of its half of the cohort, when told."""
    torch.set_num_threads(1)
    models = {FLOOR: usual_cnn(), OUR_CNN: FedOptCNN().build()}
    clients = [draw(SAMPLES) for _ in range(COHORT // CORES)]
    while told := pipe.recv():
        model = models[told]
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, foreach=True)
        for x, y in clients:
            for batch in torch.randperm(SAMPLES).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
        pipe.send("done")


class Loops:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(CORES)]
        self.pipes = [ours for ours, _ in pairs]
        for _, theirs in pairs:
            context.Process(target=plain_loop, args=(theirs,), daemon=True).start()
            theirs.close()

    def run(self, model: str, rounds: int) -> None:
        for _ in range(rounds):
            for pipe in self.pipes:
                pipe.send(model)
            for pipe in self.pipes:
                pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def main() -> None:
    chosen = options("Rounds bound by arithmetic", rounds=1).parse_args()
    rounds, repeats = (1, 2) if chosen.quick else (chosen.rounds, chosen.repeats)
    print(f"{machine()}; load {load()}")
    x, y = draw(CLIENTS * SAMPLES)
    owners = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    config = Config.of(
        {
            "rounds": 10**9,
            "eval_every": 10**9,
            "model": {"name": "cnn"},
            "client": {"lr": LR, "batch_size": BATCH, "clip_norm": CLIP},
            "sampler": {"clients_per_round": COHORT},
            "adapter": {"name": "glad"},
            "engine": {"name": "local", "workers": CORES},
        }
    )
    data = Partitioned(x, y, x[:BATCH], y[:BATCH], list(owners))
    simulation = fedglad.simulate(config, data=data)
    loops = Loops()
    runs = {
        FLOOR: lambda: loops.run(FLOOR, rounds),
        FEDGLAD: lambda: [next(simulation) for _ in range(rounds)],
        OUR_CNN: lambda: loops.run(OUR_CNN, rounds),
    }
    for run in runs.values():
        run()
    seconds = best(runs, repeats)
    loops.close()
    rates = {name: rounds * COHORT * SAMPLES / taken for name, taken in seconds.items()}
    table(
        ("training", "samples/s", "× two plain loops"),
        [(name, f"{rate:,.0f}", f"{rate / rates[FLOOR]:.2f}") for name, rate in rates.items()],
    )
    print(f"\nbest of {repeats}, {rounds} rounds each; load {load()} after")


if __name__ == "__main__":
    main()
