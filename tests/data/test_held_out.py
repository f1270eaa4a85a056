"""The validation set: whose samples it is made of, that no client has them, what is refused."""

import math
from dataclasses import dataclass, fields
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, Watched, facts, play, tiny_data
from torch import Tensor

from fedglad import simulate
from fedglad.config.schema import Config, ConfigError, load
from fedglad.data import REGISTRY, Digits, Synthetic
from fedglad.data.digits import TRAIN
from fedglad.data.partition import REGISTRY as PARTITIONS
from fedglad.data.split import Split
from fedglad.data.validation import ASKED, HeldOut, held_out, taken, validation_of
from fedglad.records import Record, Round

LABELS = np.arange(1000) % 10
KEYS = np.repeat(np.arange(40), 25)


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A partition of a user, who counts samples by their place."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Any:
        assert len(labels) == 1000
        return [np.arange(500), np.arange(500, 1000)]


def split(tmp_path: Path, partition: str, **more: Any) -> Split:
    if partition == "natural":
        np.save(tmp_path / "keys.npy", KEYS)
        more["key"] = str(tmp_path / "keys.npy")
    clients = 2 if partition == "own" else 20
    name = f"{__name__}:Halves" if partition == "own" else partition
    return Split(clients=clients, partition=name, **more)


# ------------------------------------------------------------------------------------- a split's


@pytest.mark.parametrize("partition", [*PARTITIONS, "own"])
def test_every_sample_is_a_clients_or_for_validation_and_never_both(tmp_path: Path, partition: str):
    made = split(tmp_path, partition, validation=0.2)
    owners, validation = made.shares(LABELS)
    assert sorted(np.concatenate([*owners, validation]).tolist()) == list(range(1000))
    assert len(validation) == pytest.approx(200, abs=25)
    assert min(map(len, owners)) >= 1
    again, same = made.shares(LABELS)
    assert validation.tolist() == same.tolist()
    assert [rows.tolist() for rows in owners] == [rows.tolist() for rows in again]
    other = split(tmp_path, partition, validation=0.2, seed=7).shares(LABELS)[1]
    assert validation.tolist() != other.tolist()


@pytest.mark.parametrize("partition", [*PARTITIONS, "own"])
def test_without_one_the_owners_are_those_of_before(tmp_path: Path, partition: str):
    made = split(tmp_path, partition)
    owners, validation = made.shares(LABELS)
    assert not len(validation)
    assert [r.tolist() for r in owners] == [r.tolist() for r in made.owners(LABELS)]


def test_it_is_taken_out_before_the_partition_which_does_not_know_of_it():
    owners, validation = Split(clients=5, partition="iid", validation=0.3).shares(LABELS)
    rest = np.delete(np.arange(1000), validation)
    wanted = Split(clients=5, partition="iid").owners(LABELS[rest])
    assert [rows.tolist() for rows in owners] == [rest[rows].tolist() for rows in wanted]
    assert len(validation) == 300


def test_clients_that_are_there_before_give_a_share_each(tmp_path: Path):
    owners, validation = split(tmp_path, "natural", validation=0.2).shares(LABELS)
    assert [len(rows) for rows in owners] == [20] * 40  # 25 less a fifth
    assert np.bincount(KEYS[validation]).tolist() == [5] * 40


@pytest.mark.parametrize("name", [n for n in REGISTRY if n not in ("digits", "synthetic")])
def test_every_data_set_has_the_key(name: str):
    settings = load("digits", {"data.name": name, "data.validation": 0.1})[1].sections["data"]
    assert settings.validation == 0.1
    if name != "shakespeare":  # which has always had it
        assert type(settings).added == {"validation": 0.0}
    assert [f.default for f in fields(settings) if f.name == "validation"] == [0.0]


def test_the_digits_of_a_validation_set_are_no_clients_and_not_the_test_sets():
    whole = Digits(clients=10).load_federation()
    data = Digits(clients=10, validation=0.1).load_federation()
    x, y = validation_of(data) or (torch.empty(0), torch.empty(0))
    assert len(x) == len(y) == round(TRAIN / 10)
    assert torch.equal(data.test()[0], whole.test()[0])
    assert validation_of(whole) is None
    own = [data.client(k)[0] for k in range(10)]
    parts = [{row.numpy().tobytes() for row in part} for part in (torch.cat(own), x)]
    everything = {row.numpy().tobytes() for row in whole.x}
    assert parts[0] | parts[1] == everything
    assert sum(map(len, own)) + len(x) == TRAIN
    labels: Any = [data.labels(k) for k in range(10)]
    assert int(np.sum(labels)) == TRAIN - len(x)


def test_synthetic_clients_have_less_by_their_share():
    whole, data = Synthetic(clients=30), Synthetic(clients=30, validation=0.25).load_federation()
    assert isinstance(data, HeldOut)
    for k in range(30):
        x, y = data.client(k)
        n = whole.size(k)
        assert len(x) == len(y) == data.size(k)
        assert n - data.size(k) in (math.floor(n / 4), math.ceil(n / 4))
        labels: Any = data.labels(k)
        assert labels.tolist() == np.bincount(y.numpy(), minlength=10).tolist()
        rows = taken(0, k, n, 0.25)
        assert torch.equal(x, whole.client(k)[0][np.delete(np.arange(n), rows)])
    held = [whole.client(k)[0][taken(0, k, whole.size(k), 0.25)] for k in range(30)]
    assert torch.equal(data.validation_set()[0], torch.cat(held))
    assert torch.equal(data.test()[0], whole.test()[0])
    assert data.classes == 10


def test_of_a_million_clients_a_thousand_are_asked():
    data = Synthetic(clients=10**6, samples=20, validation=0.1).load_federation()
    assert isinstance(data, HeldOut)
    assert len(data.giving) == ASKED
    assert len(data.validation_set()[1]) == 2 * ASKED
    giving = data.giving[3]
    other = next(k for k in range(ASKED) if k not in data.giving)
    assert (data.size(giving), data.size(other)) == (18, 20)
    assert len(data.client(giving)[1]) == 18
    labels: Any = data.labels(other)
    assert int(labels.sum()) == len(data.client(other)[1]) == 20


# ------------------------------------------------------------------------------ own federations


class Plain:
    """An own federation with nothing but what it must have."""

    clients = 4

    def size(self, k: int) -> int:
        return 10 + k

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(k)
        x = torch.from_numpy(rng.standard_normal((10 + k, 64)).astype(np.float32))
        return x, torch.arange(10 + k) % 10

    def test(self) -> tuple[Tensor, Tensor]:
        return self.client(0)


class Brings(Plain):
    def validation_set(self) -> tuple[Tensor, Tensor]:
        return self.client(1)


def own(share: float = 0.5) -> Plain:
    return Plain()


@dataclass(frozen=True, kw_only=True)
class Own:
    """Settings of a user without a field of that name."""

    seed: int = 3

    def load_federation(self) -> Plain:
        return Plain()


QUICK = {**TINY, "rounds": 2, "engine.name": "serial", "adapter.name": "none"}


def test_an_own_federation_gives_a_share_of_each_clients_samples():
    data = held_out(Plain(), 0.25, seed=3)
    assert [data.size(k) for k in range(4)] == [len(data.client(k)[1]) for k in range(4)]
    sizes = [10 + k - data.size(k) for k in range(4)]
    assert all(n in (2, 3, 4) for n in sizes)
    assert len(data.validation_set()[1]) == sum(sizes)
    assert not hasattr(data, "labels")
    assert not hasattr(data, "prepare")
    assert held_out(Plain(), 0.0).__class__ is Plain


@pytest.mark.parametrize("name", ["own", "Own"])
def test_its_name_takes_the_key_and_keeps_its_name_and_hash(name: str):
    source = f"{__name__}:{name}"
    given = load("digits", {**QUICK, "data.name": source, "data.validation": 0.25})[1]
    assert given.to_dict()["data"]["name"] == source
    assert given.sections["data"].validation == 0.25
    without = load("digits", {**QUICK, "data.name": source})[1]
    zero = load("digits", {**QUICK, "data.name": source, "data.validation": 0})[1]
    assert "validation" not in without.to_dict()["data"]
    assert without.hash() == zero.hash() != given.hash()
    again = Config.of(given.to_dict())
    assert again.hash() == given.hash()
    assert again.to_toml() == given.to_toml()
    rounds = [r.validation_accuracy for r in simulate(given)]
    assert len(rounds) == 2
    assert None not in rounds


def test_a_federation_in_the_place_of_the_configurations_has_one_too():
    settings = {**QUICK, "data.validation": 0.2}
    (first, _) = simulate("digits", settings, data=tiny_data(20, 30, 40))
    assert first.validation_loss is not None
    (first, _) = simulate("digits", QUICK, data=tiny_data(20, 30, 40))
    assert first.validation_loss is None


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_one_that_brings_a_validation_set_keeps_it(share: float):
    data = Brings()
    assert held_out(data, share) is data
    done = [*simulate("digits", {**QUICK, "data.validation": share}, data=data)]
    assert all(one.validation_accuracy is not None for one in done)


# ----------------------------------------------------------------------------------- the scores

FIELDS = ("validation_loss", "validation_accuracy")


@pytest.mark.parametrize("average", ["none", "ema"])
def test_all_engines_give_the_same_scores_which_are_those_of_the_samples(average: str):
    settings = {**QUICK, "data.validation": 0.1, "average.name": average}
    data = Digits(clients=12, validation=0.1).load_federation()
    found = {e: play({**settings, "engine.name": e}, data=data) for e in ("serial", "local")}
    assert found["serial"] == found["local"]
    rounds, state = found["serial"]
    assert data.validation is not None
    x, y = data.validation
    model = load("digits", settings)[1].sections["model"].build()
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    hits = (model(x).argmax(dim=1) == y).float().mean()
    assert rounds[-1]["validation_accuracy"] == pytest.approx(float(hits))
    averaged = {f"averaged_{name}" for name in FIELDS}
    assert averaged <= rounds[0].keys() if average == "ema" else not averaged & rounds[0].keys()
    batched, _ = play({**settings, "engine.name": "batched"}, data=data)
    for name in FIELDS:
        assert batched[0][name] == pytest.approx(rounds[0][name], rel=0.05)


def test_the_tests_scores_are_those_of_the_same_training_without_it():
    data = tiny_data(40, 40, 40)
    held = held_out(data, 0.25)

    class Fewer:
        """The same clients, and no validation set."""

        clients, test, size, client, labels = 3, held.test, held.size, held.client, held.labels

    with_it, _ = play({**QUICK, "average.name": "ema"}, data=held)
    without, _ = play({**QUICK, "average.name": "ema"}, data=Fewer())
    kept = [{k: v for k, v in one.items() if "validation" not in k} for one in with_it]
    assert kept == without
    assert with_it != without


def test_only_tested_rounds_have_scores():
    settings = {**QUICK, "data.validation": 0.1, "eval_every": 2, "rounds": 3}
    done = [one.to_dict() for one in simulate("digits", settings)]
    assert ["validation_loss" in one for one in done] == [False, True, True]
    assert "validation_loss" not in Round(0, (), Record("stepped")).to_dict()


def test_a_loss_that_is_not_finite_is_none():
    found = Round(0, (), Record("stepped"), validation_loss=math.inf, validation_accuracy=0.1)
    assert found.to_dict()["validation_loss"] is None
    assert found.to_dict()["validation_accuracy"] == 0.1


def test_the_number_of_workers_changes_nothing():
    settings = {**QUICK, "data.validation": 0.1, "engine.name": "local", "engine.workers": 1}
    first = [facts(one) for one in simulate("digits", settings)]
    second = [facts(one) for one in simulate("digits", {**settings, "engine.workers": 3})]
    assert first == second


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, math.nan])
@pytest.mark.parametrize("name", ["digits", "synthetic", f"{__name__}:Own"])
def test_a_share_outside_of_0_to_1_is_refused(name: str, share: float):
    with pytest.raises(ConfigError, match=r"\(validation=.*\): must be in \[0, 1\)"):
        load("digits", {"data.name": name, "data.validation": share})


def test_a_share_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"data.validation = 'many': must be a number"):
        load("digits", {"data.validation": "many"})


def test_more_clients_than_samples_that_are_left_are_refused():
    with pytest.raises(ConfigError, match=r"clients=1000\): must be in 1 … 719, one training"):
        load("digits", {"data.clients": 1000, "data.validation": 0.5})


def test_a_share_of_no_sample_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"validation = 0.0001 of 1000 samples is not one: raise"):
        split(tmp_path, "iid", validation=0.0001).shares(LABELS)
    with pytest.raises(ValueError, match=r"data.validation = 0.5 of each client's samples is not"):
        held_out(tiny_data(1, 1, 1), 0.5)


def test_a_client_keeps_a_sample_whatever_the_share():
    data = held_out(tiny_data(1, 2, 3), 0.99)
    assert [data.size(k) for k in range(3)] == [1, 1, 1]
    assert len(taken(0, 0, 0, 0.5)) == 0


def test_a_federation_that_lacks_something_is_said_as_before():
    with pytest.raises(ValueError, match="without clients, size"):
        next(simulate("digits", {**QUICK, "data.validation": 0.1}, data=object()))


def test_clients_that_fail_fail_as_before_where_they_train():
    def fails(k: int, attempt: int) -> None:
        if k == 3 and attempt > 2:  # it was asked for its validation samples, and for its labels
            raise KeyError("lost")

    settings = {**QUICK, "data.validation": 0.1, "sampler.clients_per_round": 12}
    (first, _) = simulate("digits", settings, data=Watched(12, fails))
    assert first.record.rejected == {3: "KeyError: 'lost'"}


@pytest.mark.parametrize("with_targets", [True, False])
def test_samples_of_several_tensors_are_split_together(with_targets: bool):
    class Several:
        clients = 2

        def size(self, k: int) -> int:
            return 20

        def client(self, k: int) -> Any:
            ids = np.arange(20) + 100 * k
            return {"ids": ids, "twice": 2.0 * ids}, ids if with_targets else None

        test = partialmethod(client, 0)

    data = held_out(Several(), 0.25)
    for x, y in (*map(data.client, range(2)), data.validation_set()):
        assert x["twice"].tolist() == (2 * x["ids"]).tolist()
        assert (y is None) != with_targets
        assert y is None or y.tolist() == x["ids"].tolist()
    kept = [number for k in range(2) for number in data.client(k)[0]["ids"].tolist()]
    taken = data.validation_set()[0]["ids"].tolist()
    assert sorted(kept + taken) == [*range(20), *range(100, 120)]
    assert len(taken) == 10
