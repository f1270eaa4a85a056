"""Runs in which some of the clients attack, and what a server may keep of their updates."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _forced import CLASSES, PARTITIONS, Array, Between, Putting
from torch import Tensor

from fedglad.config.schema import load
from fedglad.data.digits import Digits
from fedglad.data.federation import Partitioned
from fedglad.data.images import MNIST
from fedglad.records import Bundle, Several, Update
from fedglad.rng import stream
from fedglad.simulation.engines.base import Engine, Packed, Updates
from fedglad.simulation.simulation import Simulation
from fedglad.trust import Seen, Trust

ROUNDS, CLIENTS, COHORT = 40, 50, 10
MNIST_IMAGES, MNIST_TEST = 3_000, 1_000  # of 60,000 and 10,000: the first of them
DATA = ("digits", "mnist")
FACTOR = {"flipped": -1.0, "boosted": 10.0}  # of the client's honest update
Z, EPSILON = 1.5, 0.5  # of little-is-enough and of inner-product
ATTACKS = ("permuted", *FACTOR, "little-is-enough", "inner-product")
PARTS = (10, 20, 40)
NUMBERS = ("norms", "losses", "sample")


@dataclass(frozen=True)
class Setting:
    """One run; `part` is how many percent of the clients attack, in every round they take part."""

    data: str
    partition: str
    attack: str
    part: int
    seed: int

    @cached_property
    def attackers(self) -> list[int]:
        drawn = stream(self.seed, "attackers").permutation(CLIENTS)
        return sorted(drawn[: CLIENTS * self.part // 100].tolist())


@dataclass(frozen=True)
class Attacked:
    """A run: what the server saw in each round, and the flag that the round's alarm gave it."""

    setting: Setting
    rounds: list[Seen]
    alarms: list[str]
    accuracy: float


class Attack(Between):
    """The updates of attackers are replaced."""

    def __init__(self, inner: Engine, setting: Setting) -> None:
        super().__init__(inner)
        self.setting, self.attackers = setting, set(setting.attackers)
        self.rounds: list[Seen] = []

    def train(
        self, t: int, cohort: Sequence[int], packed: Packed, sent: dict[str, Tensor]
    ) -> Updates:
        others: list[int] = []
        if self.setting.attack == "little-is-enough":  # they know each other's data
            others = sorted(self.attackers - set(cohort))
        honest = list(self._honest(t, [*cohort, *others], packed, sent))
        updates = self._replaced(honest)[: len(cohort)]
        self.rounds.append(self._seen(updates))
        yield Several(updates)

    def _honest(
        self, t: int, cohort: Sequence[int], packed: Packed, sent: dict[str, Tensor]
    ) -> Iterator[Update]:
        for group in self.inner.train(t, cohort, packed, sent):
            for update in group.updates() if isinstance(group, Bundle) else group:
                assert isinstance(update, Update)
                yield replace(update, delta=vector(update).clone())

    def _replaced(self, honest: list[Update]) -> list[Update]:
        attack = self.setting.attack
        guilty = [k for k, update in enumerate(honest) if update.client in self.attackers]
        deltas = torch.stack([vector(update) for update in honest])
        if attack in FACTOR:
            deltas[guilty] *= FACTOR[attack]
        elif attack == "little-is-enough" and guilty:  # Baruch et al. 2019, arXiv:1902.06156
            own = deltas[guilty]
            deltas[guilty] = own.mean(dim=0) - Z * own.std(dim=0, correction=0)
        elif attack == "inner-product" and guilty:  # Xie et al. 2020, arXiv:1903.03936
            good = [k for k in range(len(honest)) if k not in guilty]
            deltas[guilty] = -EPSILON * deltas[good].mean(dim=0)
        return [replace(update, delta=row) for update, row in zip(honest, deltas, strict=True)]

    def _seen(self, updates: list[Update]) -> Seen:
        deltas = torch.stack([vector(update) for update in updates])
        losses = [np.nan if update.loss is None else update.loss for update in updates]
        return Seen(
            clients=[update.client for update in updates],
            norms=deltas.double().norm(dim=1).numpy(),
            losses=np.array(losses),
            sample=deltas[:, Trust().coordinates(deltas.shape[1])].numpy(),
        )


def vector(update: Update) -> Tensor:
    assert isinstance(update.delta, Tensor)
    return update.delta


@cache
def mnist() -> Partitioned:
    return MNIST(clients=1, partition="iid").load_federation()


def federation(setting: Setting) -> Partitioned:
    """The clients' samples; permuted: those of attackers have labels moved by a number each."""
    split: dict[str, Any] = {**PARTITIONS[setting.partition], "clients": CLIENTS}
    if setting.data == "digits":
        data = Digits(**split, seed=setting.seed).load_federation()
        x, y, owned = data.locate(range(CLIENTS))
    else:
        whole = mnist()
        x, y = whole.x[:MNIST_IMAGES], whole.y[:MNIST_IMAGES]
        owned = MNIST(**split, seed=setting.seed).owners(y.numpy())
        test = whole.test_x[:MNIST_TEST], whole.test_y[:MNIST_TEST]
        data = Partitioned(x, y, *test, owned, whole.transform)
    if setting.attack == "permuted":
        y = y.clone()
        for k in setting.attackers:
            by = int(stream(setting.seed, "moved", k).integers(1, CLASSES))
            y[owned[k]] = (y[owned[k]] + by) % CLASSES
    return Partitioned(x, y, data.test_x, data.test_y, owned, data.transform)


MODELS: dict[str, dict[str, Any]] = {
    "digits": {"model.name": "small-cnn"},
    "mnist": {"model.name": "mlp", "model.hidden": [32]},
}


def play(setting: Setting) -> Attacked:
    """Simulates one run."""
    overrides = {
        **MODELS[setting.data],
        "rounds": ROUNDS,
        "seed": setting.seed,
        "eval_every": ROUNDS,
        "sampler.clients_per_round": COHORT,
        "client.epochs": 2,
        "engine.name": "batched",
    }
    plan = load("digits", overrides)[1].plan(data=federation(setting))
    plan = replace(plan, engine=Putting(plan.engine, partial(Attack, setting=setting)))
    with closing(Simulation(plan)) as simulation:
        rounds = list(simulation.rounds())
        assert isinstance(simulation.engine, Attack)
        seen = simulation.engine.rounds
    alarms = [done.alarm or "" for done in rounds]
    assert not any(done.record.rejected for done in rounds)
    return Attacked(setting, seen, alarms, float(rounds[-1].test_accuracy or 0))


def settings(seeds: Sequence[int], parts: Sequence[int] = PARTS) -> list[Setting]:
    """Every attack at every share of attackers, and one run without any, on each data and split."""
    forms = [("none", 0), *itertools.product(ATTACKS, parts)]
    return [
        Setting(data, partition, attack, part, seed)
        for seed, data, partition, (attack, part) in itertools.product(
            seeds, DATA, PARTITIONS, forms
        )
    ]


def campaign(seeds: Sequence[int], parts: Sequence[int], keep: Path | None) -> Iterator[Attacked]:
    """The runs one by one: all that the server saw in them is too much to hold."""
    chosen = settings(seeds, parts)
    for k, setting in enumerate(chosen):
        print(f"\r{k + 1} of {len(chosen)} runs", end="", file=sys.stderr, flush=True)
        name = "-".join(map(str, asdict(setting).values())).replace(" ", "-")
        path = keep and keep / f"{name}.npz"
        if path and path.is_file():
            yield _read(setting, path)
            continue
        run = play(setting)
        if path:
            _write(run, path)
        yield run
    print(file=sys.stderr)


def _write(run: Attacked, path: Path) -> None:
    arrays: dict[str, Any] = {
        name: np.stack([getattr(seen, name) for seen in run.rounds])
        for name in ("clients", *NUMBERS)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays, alarms=run.alarms, accuracy=run.accuracy)
    part.rename(path)


def _read(setting: Setting, path: Path) -> Attacked:
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, Array] = dict(file)
    rounds = [
        Seen(clients=ids, **{name: arrays[name][t] for name in NUMBERS})
        for t, ids in enumerate(arrays["clients"].tolist())
    ]
    return Attacked(setting, rounds, arrays["alarms"].tolist(), float(arrays["accuracy"]))
