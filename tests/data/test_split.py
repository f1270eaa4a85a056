"""Split: the fields a data set inherits, what they are checked for, and the owners they give."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np
import pytest

from fedglad.data.digits import Digits
from fedglad.data.partition import REGISTRY, named
from fedglad.data.split import Split
from fedglad.rng import stream

LABELS = stream(0, "labels").integers(0, 10, 2000)


@dataclass(frozen=True, kw_only=True)
class Small(Split):
    """A data set of its own, with a field more and another default."""

    samples = 30
    clients: int = 7
    blur: Annotated[bool, "an own field"] = False


def test_the_fields_come_in_the_order_of_a_printed_configuration():
    names = ["clients", "partition", "alpha", "classes_per_client", "sigma", "key", "seed"]
    names += ["partition_settings", "validation"]
    assert [field.name for field in fields(Split)] == names
    assert [field.name for field in fields(Digits)] == names
    assert [field.name for field in fields(Small)] == [*names, "blur"]
    assert (Split().clients, Small().clients, Digits().clients) == (100, 7, 50)


def test_every_field_says_what_it_means():
    hints = get_type_hints(Split, include_extras=True)
    told = {field.name: get_args(hints[field.name])[1] for field in fields(Split)}
    assert all(told.values())
    assert "0.1 here is 0.01 per class in most other tools" in told["alpha"]
    assert all(name in told["partition"] for name in REGISTRY)


@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - {"natural", "centralised"}))
def test_owners_are_those_of_the_partition_with_its_settings(name):
    given: dict[str, Any] = {"alpha": 0.7, "classes_per_client": 3, "sigma": 0.4}
    owners = Split(clients=12, partition=name, seed=5, **given).owners(LABELS)
    expected = named(name, seed=5, **given).split(LABELS, 12, stream(5, "partition"))
    assert [part.tolist() for part in owners] == [part.tolist() for part in expected]


@pytest.mark.parametrize("clients", [0, 1, 100, 10**9])
def test_centralised_is_one_client_whatever_clients_says(clients):
    (part,) = Small(partition="centralised", clients=clients).owners(LABELS)
    assert part.tolist() == list(range(2000))


def test_natural_has_as_many_clients_as_keys_whatever_clients_says(tmp_path: Path):
    np.save(tmp_path / "writers.npy", np.arange(2000) % 3)
    owners = Split(partition="natural", key=str(tmp_path / "writers.npy")).owners(LABELS)
    assert [part[:2].tolist() for part in owners] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 0}, r"Small\(clients=0\): must be in 1 … 30, one training sample each"),
        ({"clients": 31}, r"Small\(clients=31\): must be in 1 … 30, one training sample each"),
        ({"partition": "shard"}, "unknown partition 'shard': did you mean 'shards'"),
        ({"alpha": -1.0}, r"LabelSkew\(alpha=-1.0\): must be above 0"),
        ({"partition": "dirichlet", "alpha": 0.0}, r"Dirichlet\(alpha=0.0\): must be above 0"),
        ({"partition": "shards", "classes_per_client": 0}, r"classes_per_client=0\): must be 1"),
        ({"partition": "quantity", "sigma": -1.0}, r"Quantity\(sigma=-1.0\): must be in 0"),
        ({"partition": "natural"}, "natural needs a key for each sample: set key to a file"),
    ],
)
def test_wrong_settings_are_refused_at_birth(settings, message):
    with pytest.raises(ValueError, match=message):
        Small(**settings)


def test_the_number_of_samples_need_not_be_known():
    with pytest.raises(ValueError, match=r"Split\(clients=0\): must be 1 or more"):
        Split(clients=0)
    with pytest.raises(ValueError, match="3000 clients cannot share 2000 samples"):
        Split(clients=3000).owners(LABELS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "label-skew, α = 0.1 in total (0.005 per class, as most other tools count it)"),
        (
            {"partition": "fednlp"},
            "fednlp, α = 0.1 in total (0.005 per class, as most other tools count it)",
        ),
        ({"partition": "dirichlet"}, "dirichlet, α = 0.1 per client, as most other tools count it"),
        ({"partition": "iid"}, "iid"),
        ({"partition": "shards"}, "shards, at most 2 classes per client"),
        ({"partition": "quantity"}, "quantity, log-normal sizes with σ = 1"),
        ({"partition": "natural", "key": "a.npy"}, "natural, by the keys in a.npy"),
        ({"partition": "centralised"}, "centralised"),
    ],
)
def test_words_name_the_setting_and_the_convention(settings, words):
    # label-skew: a total of 0.1 over 20 classes is 0.1/20 = 0.005 each.
    assert Split(**settings).words(classes=20) == words


def test_digits_are_one_client_when_centralised():
    data = Digits(partition="centralised").load_federation()
    assert (data.clients, data.size(0)) == (1, 1437)
