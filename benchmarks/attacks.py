"""How far do hostile clients get? Attackers against every filter and the guard; no timing.

    python benchmarks/attacks.py

Ten clients take part in each round; each pulls θ half of the way to its own optimum, and the optima
lie around 1 with a deviation of 1 in each of 50 coordinates, anew in every round. So without attack
θ stays at a distance of about √(50/30) from 1. One or three of the ten are hostile and send

- boosted: 1,000 times their update,
- opposed: the opposite of their update, 99.9 times as long as usual, which they know,
- weighty: their update as it is, with 10,000 times the weight of others,
- drawn: a direction of their own, as long as what is usual, in every round.

The distance of θ from 1 after 10 and after 300 rounds, in multiples of that without attack; and
FedGLAD's largest factor s after round 10, of which the bound is 1 + γt = 7 at the end.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from _shared import machine, table
from torch import Tensor

from fedglad import Glad, Guard, Server, Update
from fedglad.filters import Filter, Krum, Median, MultiKrum, NormClip, TrimmedMean

CLIENTS, SIZE = 10, 50
SERVERS: dict[str, tuple[Filter, Guard | None]] = {
    "no guard": (Filter(), None),
    "the default": (Filter(), Guard()),
    "norm-clip 5": (NormClip(max_norm=5.0), None),
    "median": (Median(), None),
    "trimmed-mean 0.3": (TrimmedMean(beta=0.3), None),
    "krum f=3": (Krum(f=3), None),
    "multi-krum f=3": (MultiKrum(f=3), None),
    "median, default guard": (Median(), Guard()),
    "multi-krum f=3, default guard": (MultiKrum(f=3), Guard()),
}

Attack = Callable[[Tensor, float, Tensor], Update]


def _boosted(update: Tensor, usual: float, drawn: Tensor) -> Update:
    return Update({"w": 1000 * update})


def _opposed(update: Tensor, usual: float, drawn: Tensor) -> Update:
    return Update({"w": -99.9 * usual * update / update.norm()})


def _weighty(update: Tensor, usual: float, drawn: Tensor) -> Update:
    return Update({"w": update}, weight=10_000)


def _drawn(update: Tensor, usual: float, drawn: Tensor) -> Update:
    return Update({"w": usual * drawn})


ATTACKS: dict[str, Attack] = {
    "boosted": _boosted,
    "opposed": _opposed,
    "weighty": _weighty,
    "drawn": _drawn,
}


def play(name: str, attack: Attack | None, hostile: int, seed: int) -> tuple[float, float, float]:
    """The distances after 10 and 300 rounds, and the largest factor after the tenth."""
    filter, guard = SERVERS[name]
    rng = np.random.default_rng(seed)
    adapter = None if filter.leaves_one else Glad()
    server = Server({"w": torch.zeros(SIZE)}, adapter=adapter, filter=filter, guard=guard)
    drawn = torch.tensor(rng.normal(size=SIZE) / np.sqrt(SIZE), dtype=torch.float32)
    usual, early, largest = 1.0, 0.0, 0.0
    for t in range(300):
        theta = server.params["w"].clone()
        optima = torch.tensor(1 + rng.normal(size=(CLIENTS, SIZE)), dtype=torch.float32)
        updates = [Update({"w": (theta - optimum) / 2}) for optimum in optima]
        honest = [float(((theta - optimum) / 2).norm()) for optimum in optima]
        usual = float(np.median(honest))
        for k in range(hostile if attack else 0):
            assert attack
            updates[k] = attack((theta - optima[k]) / 2, usual, drawn)
        record = server.step(updates)
        if t >= 10:
            largest = max([largest, *record.scale.values()])
        if t == 9:
            early = float((server.params["w"] - 1).norm())
    return early, float((server.params["w"] - 1).norm()), largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="repetitions; the median is shown")
    seeds = range(parser.parse_args().seeds)
    print(machine())

    def middle(name: str, attack: Attack | None, hostile: int) -> list[float]:
        return np.median([play(name, attack, hostile, seed) for seed in seeds], axis=0).tolist()

    alone = {name: middle(name, None, 0) for name in SERVERS}
    for hostile in (1, 3):
        rows: list[list[object]] = []
        for name in SERVERS:
            cells: list[str] = []
            for attack in ATTACKS.values():
                early, late, s = middle(name, attack, hostile)
                ratios = [
                    now / before for now, before in zip((early, late), alone[name], strict=False)
                ]
                cells.append(" / ".join(_short(x) for x in ratios) + f", {s:.2f}")
            rows.append([name, *cells])
        print(
            f"\n{hostile} of {CLIENTS} hostile: after 10 / 300 rounds, times no attack; largest s"
        )
        table(["filter", *ATTACKS], rows)


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 1000 else f"{ratio:.0e}"


if __name__ == "__main__":
    main()
