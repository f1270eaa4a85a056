"""Runs on digits in which some rounds are forced to be bad; what they are is said in alarm.py."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad.config.schema import load
from fedglad.data.digits import Digits
from fedglad.data.federation import Partitioned
from fedglad.records import Bundle, Several, Update
from fedglad.rng import stream
from fedglad.simulation.engines.base import Engine, Held, Job, Packed, Updates
from fedglad.simulation.simulation import Simulation

Array = np.ndarray
ROUNDS, FORCED, EARLIEST = 60, 6, 9
ORDINARY, CLASSES = 50, 10
PARTITIONS: dict[str, dict[str, Any]] = {
    "label skew 0.1": {"partition": "label-skew", "alpha": 0.1},
    "label skew 1.0": {"partition": "label-skew", "alpha": 1.0},
    "iid": {"partition": "iid"},
}
SERVERS = (("sgd", 5), ("adam", 5), ("sgd", 10))
SHARE = {"pure": 1.0, "mostly": 0.7}  # of the one class
FACTOR = {"permuted": 1.0, "flipped": -1.0, "boosted": 10.0}  # of the update
FORMS = {
    "one-sided": tuple(SHARE),
    "outlier": tuple(f"{form} {part} %" for part in (20, 40) for form in FACTOR),
}


@dataclass(frozen=True)
class Setting:
    """One run; `kind` is what its forced rounds are."""

    partition: str
    server: str
    cohort: int
    kind: str
    seed: int


@dataclass(frozen=True)
class Played:
    """A run's rounds: GSI, that of the median tensor, similarity of labels, what was forced."""

    setting: Setting
    gsi: list[float]
    median: list[float]
    similarity: list[float]
    truth: list[str]
    accuracy: float


class Between:
    """An engine between another one's clients and the server, which changes what they send."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def train(
        self, t: int, cohort: Sequence[int], packed: Packed, sent: dict[str, Tensor]
    ) -> Updates:
        raise NotImplementedError

    def evaluate(self, packed: Packed, held: Held = "test") -> dict[str, float]:
        return self.inner.evaluate(packed, held)

    def losses(self, clients: Sequence[int], packed: Packed) -> list[float]:
        return self.inner.losses(clients, packed)

    def evaluate_clients(
        self, packed: Packed, clients: Sequence[int]
    ) -> list[dict[str, float] | None]:
        return self.inner.evaluate_clients(packed, clients)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Putting:
    """Settings of such an engine: those of the other one, and what is put between."""

    engine: Any
    between: Callable[[Engine], Between]

    def start(self, job: Job) -> Between:
        return self.between(self.engine.start(job))


class Tampered(Between):
    """Updates are multiplied, by round and client."""

    def __init__(self, inner: Engine, factors: Mapping[tuple[int, int], float]) -> None:
        super().__init__(inner)
        self.factors = factors

    def train(
        self, t: int, cohort: Sequence[int], packed: Packed, sent: dict[str, Tensor]
    ) -> Updates:
        for group in self.inner.train(t, cohort, packed, sent):
            updates = group.updates() if isinstance(group, Bundle) else group
            yield Several([self._sent(t, u) if isinstance(u, Update) else u for u in updates])

    def _sent(self, t: int, update: Update) -> Update:
        assert isinstance(update.client, int)
        assert isinstance(update.delta, Tensor)
        return replace(update, delta=update.delta * self.factors.get((t, update.client), 1.0))


def federation(setting: Setting) -> Partitioned:
    """The ordinary clients; then each one's twin with moved labels; then, pure and mostly so, as
    many of every class as a cohort has."""
    seed = setting.seed
    data = Digits(**PARTITIONS[setting.partition], clients=ORDINARY, seed=seed).load_federation()
    x, y, owned = data.locate(range(ORDINARY))
    moved, twins = y.clone(), [rows + len(y) for rows in owned]
    for k, rows in enumerate(owned):
        moved[rows] = (moved[rows] + int(stream(seed, "moved", k).integers(1, CLASSES))) % CLASSES
    alike: list[Array] = []
    for (form, part), c, j in itertools.product(
        SHARE.items(), range(CLASSES), range(setting.cohort)
    ):
        rng, n = stream(seed, form, c, j), len(y) // ORDINARY
        same, others = (np.flatnonzero((y.numpy() == c) == its) for its in (True, False))
        drawn = rng.choice(same, round(part * n), replace=False)
        alike.append(np.append(drawn, rng.choice(others, n - len(drawn), replace=False)))
    x, y = torch.cat([x, x]), torch.cat([y, moved])
    return Partitioned(x, y, data.test_x, data.test_y, [*owned, *twins, *alike])


def script(
    setting: Setting,
) -> tuple[dict[str, list[int]], dict[tuple[int, int], float], list[str]]:
    """Every round's cohort, what is multiplied, and what was forced."""
    seed, r = setting.seed, setting.cohort
    places = stream(seed, "places", setting.kind, setting.partition, setting.server, r)
    forced = sorted(places.choice(range(EARLIEST, ROUNDS), FORCED, replace=False).tolist())
    forms = dict(
        zip(forced, places.permutation(np.resize(FORMS[setting.kind], FORCED)), strict=True)
    )
    cohorts: dict[str, list[int]] = {}
    factors: dict[tuple[int, int], float] = {}
    truth = [""] * ROUNDS
    for t in range(ROUNDS):
        rng = stream(seed, "script", t)
        cohort = rng.choice(ORDINARY, r, replace=False).tolist()
        if t in forced:
            form = truth[t] = str(forms[t])
            if setting.kind == "one-sided":
                group = list(SHARE).index(form) * CLASSES + int(rng.integers(CLASSES))
                cohort = [2 * ORDINARY + r * group + j for j in range(r)]
            else:
                how, part, _ = form.split()
                for k in range(r * int(part) // 100):
                    cohort[k] += ORDINARY if how == "permuted" else 0
                    factors[t, cohort[k]] = FACTOR[how]
        cohorts[str(t)] = cohort
    return cohorts, factors, truth


def play(setting: Setting) -> Played:
    """Simulates one run."""
    cohorts, factors, truth = script(setting)
    overrides = {
        "rounds": ROUNDS,
        "seed": setting.seed,
        "eval_every": ROUNDS,
        "server.name": setting.server,
        "sampler.name": "scripted",
        "sampler.clients_per_round": setting.cohort,
        "sampler.cohorts": cohorts,
        "engine.name": "batched",
    }
    plan = load("digits", overrides)[1].plan(data=federation(setting))
    plan = replace(plan, engine=Putting(plan.engine, partial(Tampered, factors=factors)))
    with closing(Simulation(plan)) as simulation:
        rounds = list(simulation.rounds())
    assert all(done.record.stepped and not done.record.rejected for done in rounds)
    return Played(
        setting,
        [float(done.record.gsi_all or 0) for done in rounds],
        [float(np.median(list(done.record.gsi.values()))) for done in rounds],
        [float(done.label_similarity or 0) for done in rounds],
        truth,
        float(rounds[-1].test_accuracy or 0),
    )


def campaign(seeds: Sequence[int], keep: Path | None) -> list[Played]:
    settings = [
        Setting(partition, server, cohort, kind, seed)
        for seed, partition, (server, cohort), kind in itertools.product(
            seeds, PARTITIONS, SERVERS, FORMS
        )
    ]
    found: list[Played] = []
    for k, setting in enumerate(settings):
        print(f"\r{k + 1} of {len(settings)} runs", end="", file=sys.stderr, flush=True)
        name = "-".join(map(str, asdict(setting).values())).replace(" ", "-")
        path = keep and keep / f"{name}.json"
        if path and path.is_file():
            found.append(Played(setting, **json.loads(path.read_text())))
            continue
        found.append(play(setting))
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = {key: value for key, value in asdict(found[-1]).items() if key != "setting"}
            path.write_text(json.dumps(kept))
    print(file=sys.stderr)
    return found
