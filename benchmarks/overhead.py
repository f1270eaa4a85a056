"""Rounds bound by what a framework does around a client (W2): `make bench BENCH=overhead`.

Softmax regression 64 → 10, 1,000 clients × 16 samples, 100 a round, one step of SGD each, FedGLAD.
The raw loop is what one writes by hand, on one thread: load θ into a module, one step, add the
difference; it draws no cohort, checks nothing, measures nothing and keeps no record.

    python benchmarks/overhead.py [--rounds 20] [--repeats 5] [--quick]
"""

from collections.abc import Iterator

import numpy as np
import torch
from _shared import best, load, machine, options, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedglad
from fedglad.config.schema import Config
from fedglad.data.federation import Partitioned
from fedglad.simulation.engines import REGISTRY as ENGINES

CLIENTS, SAMPLES, COHORT, FEATURES, CLASSES, LR = 1000, 16, 100, 64, 10, 0.1
RAW = "raw loop, one thread"
SETTINGS = {"serial": {}, "local": {"workers": 2}, "batched": {}}


def raw_rounds(x: Tensor, y: Tensor) -> Iterator[None]:
    model = nn.Linear(FEATURES, CLASSES)
    theta = {name: value.clone() for name, value in model.state_dict().items()}
    clients = list(zip(x.split(SAMPLES), y.split(SAMPLES), strict=True))
    while True:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for data, labels in clients[:COHORT]:
            model.load_state_dict(theta)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            cross_entropy(model(data), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in model.state_dict().items():
                total[name] += (theta[name] - value) / COHORT
        theta = {name: value - total[name] for name, value in theta.items()}
        torch.set_num_threads(threads)
        yield


def main() -> None:
    chosen = options("Rounds bound by overhead", rounds=20).parse_args()
    rounds, repeats = (1, 2) if chosen.quick else (chosen.rounds, chosen.repeats)
    print(f"{machine()}; load {load()}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (CLIENTS * SAMPLES,), generator=generator)
    owners = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    data = Partitioned(x, y, x[:SAMPLES], y[:SAMPLES], list(owners))
    tree = {
        "rounds": 10**9,
        "eval_every": 10**9,
        "model": {"name": "softmax", "features": FEATURES, "classes": CLASSES},
        "client": {"optimizer": "sgd", "lr": LR, "batch_size": SAMPLES},
        "sampler": {"clients_per_round": COHORT},
        "adapter": {"name": "glad"},
    }
    simulations: dict[str, Iterator[object]] = {RAW: raw_rounds(x, y)}
    for name in [name for name in SETTINGS if name in ENGINES]:
        config = Config.of({**tree, "engine": {"name": name, **SETTINGS[name]}})
        simulations[f"fedglad, `{name}`"] = fedglad.simulate(config, data=data)

    def run(simulation: Iterator[object]) -> None:
        for _ in range(rounds):
            next(simulation)

    runs = {name: lambda own=own: run(own) for name, own in simulations.items()}
    for start in runs.values():
        start()
    seconds = best(runs, repeats)
    table(
        ("round", "ms a client", "× raw loop"),
        [
            (name, f"{1000 * taken / (rounds * COHORT):.3f}", f"{taken / seconds[RAW]:.2f}")
            for name, taken in seconds.items()
        ],
    )
    print(f"\nbest of {repeats}, {rounds} rounds each; load {load()} after")


if __name__ == "__main__":
    main()
