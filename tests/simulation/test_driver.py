"""The driver of a round, without any transport: the simulator's and Flower's rounds are its own."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedglad import Glad, Server
from fedglad.clients.method import Plain
from fedglad.flower.session import Session
from fedglad.records import Bundle, Failure, Several, Update
from fedglad.rng import stream
from fedglad.samplers.adafl import AdaFL
from fedglad.samplers.base import Pool, Sampler
from fedglad.samplers.clustered import Clustered
from fedglad.samplers.uniform import Uniform
from fedglad.simulation import driver
from fedglad.simulation.driver import Arrival, Driver
from fedglad.simulation.simulation import Simulation

N = 12
SHAPES = {"a": (3,), "b": (2, 2)}


def serve(**settings: Any) -> Server:
    model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return Server(model, adapter=Glad(gamma=0.5), **settings)


LAYOUT = serve().layout


def pool(found: Driver) -> Pool:
    return Pool(N, lambda k: 5, lambda k: None, found.last)


def unasked(clients: list[int]) -> list[float]:
    raise AssertionError


def drive(sampler: Sampler, seed: int = 3, **more: Any) -> Driver:
    return Driver(serve(distances=sampler.distances), sampler, seed, **more)


def arrays(t: int, client: int) -> dict[str, Tensor]:
    rng = stream(7, "delta", t, client)
    drawn = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in SHAPES.items()}
    return {name: torch.from_numpy(value) for name, value in drawn.items()}


def delta(t: int, client: int) -> Tensor:
    return LAYOUT.pack(arrays(t, client))


def play(found: Driver, rounds: int) -> list[Any]:
    """Cohorts, flags and indicators of so many rounds more."""
    seen: list[Any] = []
    for t in range(found.t, found.t + rounds):
        cohort = found.draw(pool(found), unasked)
        updates = [Update(delta(t, k), client=k, weight=5) for k in cohort.ids]
        record, alarm = found.step(cohort.ids, iter(updates), population=N)
        found.t = t + 1
        seen.append((cohort, alarm, record.gsi_all))
    return seen


def test_simulator_and_session_are_drivers():
    assert issubclass(Simulation, Driver)
    assert issubclass(Session, Driver)
    for name in ("draw", "step", "judge", "last", "state", "restore"):
        assert name not in vars(Simulation) | vars(Session)


def test_it_knows_no_transport():
    tree = ast.parse(Path(str(driver.__file__)).read_text("utf-8"))
    names = [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [name for name in names if "flower" in name or "flwr" in name or "engines" in name]


@pytest.mark.parametrize(("given", "used"), [("round", 0), ("run", 3), (8, 8)])
def test_cohorts_are_drawn_by_seed_round_and_attempt(given: Any, used: int):
    found = drive(Uniform(clients_per_round=4, seed=given))
    found.t = 5
    names: list[tuple[int, ...]] = [(5,), (5, 1), (5, 2)]  # the first attempt has no number
    for attempt, name in enumerate(names):
        rng = stream(used, "cohort", *name)
        expected = tuple(rng.choice(N, 4, replace=False).tolist())
        assert found.draw(pool(found), unasked, attempt).ids == expected


@pytest.mark.parametrize(
    "sampler", [AdaFL(clients_per_round=4), Clustered(clients_per_round=4, by="similarity")]
)
def test_a_saved_state_goes_on_to_the_same_rounds(sampler: Sampler, tmp_path: Path):
    found = drive(sampler, memories=tmp_path)
    play(found, 9)
    for store in found.stores:
        store.sync()
    saved, tensors = json.loads(json.dumps(found.state())), found.server.state_dict()
    assert set(saved) == {"round", "sampler", "alarm", "transport"}
    assert saved["alarm"]["seen"] == saved["round"] == 9
    expected = play(found, 5)
    other = drive(sampler, memories=tmp_path)
    other.server.load_state_dict(tensors)
    other.restore(saved)
    for store in other.stores:
        store.restore(9)
    assert play(other, 5) == expected


def test_which_arithmetic_is_saved_if_there_were_two():
    found = drive(Uniform(clients_per_round=4))
    assert "arithmetic" not in found.state()
    found.arithmetic = 2
    assert found.state()["arithmetic"] == 2


def test_updates_of_every_form_are_kept_if_they_were_accepted():
    """Clients 0 to 5: a row, a vector, names, a whole model, another form, none at all."""
    found = drive(Clustered(clients_per_round=4, by="similarity"))
    vectors = [delta(0, k) for k in range(6)]

    def arrivals() -> Iterator[Arrival]:
        yield Bundle(deltas=vectors[0][None], weights=[5.0], clients=[0], steps=[1], losses=[0.5])
        yield Several([Update(vectors[1], weight=5, client=1)])
        yield Update(arrays(0, 2), weight=5, client=2)
        yield Update(model={n: -x for n, x in arrays(0, 3).items()}, weight=5, client=3)
        yield Update({"a": torch.zeros(3)}, weight=5, client=4)
        yield Failure(5, "the disk is full")

    record, _ = found.step((0, 1, 2, 3, 4, 5), arrivals(), population=N)
    assert record.stepped
    assert list(record.rejected) == [4, 5]
    for k in range(4):
        assert torch.equal(_last(found, k), vectors[k])
    assert found.last(4) is found.last(5) is found.last(6) is None
    found.t = 1
    bad = torch.full_like(vectors[0], torch.nan)
    record, flag = found.step((0,), iter([Update(bad, client=0)]), population=N)
    assert not record.stepped
    assert flag is None
    assert torch.equal(_last(found, 0), vectors[0])
    found.close()


def _last(found: Driver, client: int) -> Tensor:
    last = found.last(client)
    assert last is not None
    return last


def reported(update: Update | Failure) -> list[float]:
    assert isinstance(update.client, int)
    return [float(x.double().square().sum()) for x in arrays(0, update.client).values()]


def test_sums_and_updates_make_the_same_round():
    models, gsis = [], []
    for norms in (None, reported):
        found = drive(Uniform(clients_per_round=4))
        updates = [Update(delta(0, k), client=k, weight=k + 1) for k in range(4)]
        record, _ = found.step(tuple(range(4)), iter(updates), population=N, norms=norms)
        assert record.stepped
        assert found.alarm_state["seen"] == 1
        models.append(found.server.packed[0].clone())
        gsis.append(record.gsi_all)
    assert torch.equal(*models)
    assert gsis[0] == pytest.approx(gsis[1], rel=1e-6)


def test_an_iterator_that_raises_changes_nothing():
    found = drive(AdaFL(clients_per_round=4))

    def arrivals() -> Iterator[Arrival]:
        yield Update(delta(0, 0), client=0)
        raise ConnectionError("gone")

    before, state = found.server.packed[0].clone(), found.state()
    with pytest.raises(ConnectionError, match="gone"):
        found.step((0, 1), arrivals(), population=N)
    assert torch.equal(found.server.packed[0], before)
    assert found.state() == state


def test_a_driver_of_clients_without_a_memory_keeps_nothing():
    found = drive(Uniform(clients_per_round=4), client=Plain())
    assert found.memories is found.updates is None
    assert found.stores == []
