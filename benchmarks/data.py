"""Opening a data set, dividing it, and what augmentation costs: `make bench BENCH=data`.

python benchmarks/data.py [--rounds 1] [--repeats 5] [--quick]
"""

import numpy as np
import torch
from _shared import best, load, machine, options, table
from torch import Tensor

from fedglad.clients.method import Plain, Prepare
from fedglad.clients.workbench import Workbench, as_stored
from fedglad.config.schema import load as load_config
from fedglad.data import partition, store
from fedglad.data.federation import Partitioned
from fedglad.data.images import CIFAR10, MNIST

BATCH = 64
MANY = 10_000_000, 10_000  # samples, clients
SETTINGS = {"alpha": 0.1, "classes_per_client": 2, "sigma": 1.0}
SPLITS = ("label-skew", "dirichlet", "iid", "shards", "quantity")


def opening(repeats: int) -> None:
    sets = {"mnist": MNIST(), "cifar10": CIFAR10()}
    for name in sets:
        store.load(name)
    arrays = best({name: lambda name=name: store.load(name) for name in sets}, repeats)
    whole = best({name: settings.load_federation for name, settings in sets.items()}, repeats)
    rows = [(n, f"{1e3 * arrays[n]:.1f}", f"{1e3 * whole[n]:.0f}") for n in sets]
    table(("data set", "ms to open", "ms with the partition of 100 clients"), rows)


def dividing(repeats: int, samples: int, clients: int) -> None:
    mnist = np.array(store.load("mnist")["train_y"])
    many = np.random.default_rng(0).integers(10, size=samples)

    def split(name: str, labels: np.ndarray, count: int) -> None:
        partition.named(name, **SETTINGS).split(labels, count, np.random.default_rng(0))

    small = best({n: lambda n=n: split(n, mnist, 100) for n in SPLITS}, repeats)
    large = best({n: lambda n=n: split(n, many, clients) for n in SPLITS}, min(repeats, 2))
    rows = [(n, f"{1e3 * small[n]:.1f}", f"{large[n]:.2f}") for n in SPLITS]
    head = ("partition", "ms, MNIST, 100 clients", f"s, {samples:,} samples, {clients:,} clients")
    table(head, rows)


def augmented(preset: str, repeats: int, steps: int) -> tuple[object, ...]:
    """Steps of the preset's model on one thread, with the batch as stored bytes, and as numbers."""
    torch.set_num_threads(1)
    plan = load_config(preset)[1].plan()
    assert isinstance(plan.data, Partitioned)
    bench, client = Workbench(plan.model), Plain(batch_size=BATCH, steps=steps, clip_norm=1.0)
    theta, prepare = bench.w.clone(), plan.data.prepare
    buffers = {name: getattr(*place).clone() for name, place in bench.buffers.items()}
    x, y = plan.data.client(0)
    ready = prepare(x, False)

    def train(inputs: Tensor, how: Prepare) -> None:
        bench.train(client, theta, buffers, inputs, y, np.random.default_rng(0), prepare=how)

    runs = {
        "numbers": lambda: train(ready, as_stored),
        "bytes": lambda: train(x, prepare),
        "alone": lambda: [prepare(x[:BATCH], True) for _ in range(steps)],
    }
    each = {name: 1e3 * seconds / steps for name, seconds in best(runs, repeats).items()}
    row = (f"{each['bytes']:.1f}", f"{each['numbers']:.1f}", f"{each['alone']:.2f}")
    return (preset, *row, f"{100 * each['alone'] / each['bytes']:.1f} %")


def main() -> None:
    chosen = options("Opening, dividing, augmenting", rounds=10).parse_args()
    repeats, steps = (2, 1) if chosen.quick else (chosen.repeats, chosen.rounds)
    print(f"{machine()}; load {load()}")
    opening(repeats)
    dividing(repeats, *((100_000, 100) if chosen.quick else MANY))
    head = ("preset", "ms a step", "ms, inputs ready", "ms to prepare a batch", "share")
    table(head, [augmented(preset, repeats, steps) for preset in ("mnist", "cifar10")])
    print(f"\nload {load()}")


if __name__ == "__main__":
    main()
