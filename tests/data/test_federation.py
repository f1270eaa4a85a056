"""Partitioned: who owns which rows; and the bundled digits as a federation."""

import pickle

import numpy as np
import pytest
import torch

from fedglad.data.digits import Digits, load
from fedglad.data.federation import Federation, Partitioned

X, Y = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 1, 0, 2, 0])


def make(indices: list[list[int]], y=Y) -> Partitioned:
    return Partitioned(X, y, X[:1], torch.tensor([3]), [np.array(rows) for rows in indices])


def test_a_client_has_its_rows_in_order():
    data: Federation = make([[5, 0], [1, 4, 2]])
    x, y = data.client(1)
    assert x.tolist() == [[2, 3], [8, 9], [4, 5]]
    assert y.tolist() == [1, 2, 1]
    assert (data.clients, data.size(0), data.size(1)) == (2, 2, 3)


def test_labels_are_counted_over_all_classes():
    # The test set's only label, 3, makes a fourth class.
    data = make([[5, 0], [1, 4, 2]])
    assert data.classes == 4
    counts = data.labels(1)
    assert counts is not None
    assert counts.tolist() == [0, 2, 1, 0]


def test_targets_that_are_not_labels_have_no_counts():
    data = make([[0, 1]], y=Y.double())
    assert data.labels(0) is None
    assert data.classes == 0


def test_changing_a_clients_data_does_not_change_the_set():
    data = make([[0, 1]])
    data.client(0)[0].zero_()
    assert data.client(0)[0].tolist() == [[0, 1], [2, 3]]


def test_it_survives_pickling():
    data = pickle.loads(pickle.dumps(make([[5, 0], [1]])))
    assert data.client(0)[0].tolist() == [[10, 11], [0, 1]]


@pytest.mark.parametrize("k", [-1, 2])
def test_an_unknown_client_is_refused(k):
    with pytest.raises(IndexError, match=rf"client {k}: there are clients 0 … 1"):
        make([[0], [1]]).client(k)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([], "at least one client"),
        ([[0], []], "client 1 has no samples"),
        ([[0, 6]], "integers in 0 … 5"),
        ([[-1, 2]], "integers in 0 … 5"),
        ([[0.5]], "integers in 0 … 5"),
    ],
)
def test_wrong_indices_are_refused(indices, message):
    with pytest.raises(ValueError, match=message):
        make(indices)


def test_inputs_without_targets_are_refused():
    with pytest.raises(ValueError, match="6 training inputs, but 5 targets"):
        make([[0]], y=Y[:5])


def rows(x: torch.Tensor) -> list[bytes]:
    return sorted(image.numpy().tobytes() for image in x)


@pytest.mark.parametrize("name", ["label-skew", "iid"])
def test_every_digit_is_in_one_place(name):
    data = Digits(partition=name).load_federation()
    parts = [data.client(k)[0] for k in range(data.clients)]
    x, y = data.test()
    assert (data.clients, data.classes, len(y)) == (50, 10, 360)
    assert sum(map(len, parts)) == 1437
    assert x.shape[1:] == (1, 8, 8)
    assert x.dtype == torch.float32
    assert rows(torch.cat([*parts, x])) == rows(torch.from_numpy(load()[0][:, None]))


def test_digits_keep_their_labels():
    images, labels = load()
    label = {image.tobytes(): int(y) for image, y in zip(images, labels, strict=True)}
    data = Digits(clients=3, alpha=1.0).load_federation()
    for x, y in [data.test(), *(data.client(k) for k in range(3))]:
        assert [label[image.numpy().tobytes()] for image in x] == y.tolist()


def test_the_test_set_does_not_depend_on_the_partition():
    one, other = Digits(clients=7, partition="iid"), Digits(clients=50)
    assert one.load_federation().test()[0].equal(other.load_federation().test()[0])
    assert not Digits(seed=1).load_federation().test()[1].equal(other.load_federation().test()[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 0}, r"Digits\(clients=0\): must be in 1 … 1437"),
        ({"clients": 1438}, r"Digits\(clients=1438\): must be in 1 … 1437"),
        ({"partition": "idd"}, "unknown partition 'idd': did you mean 'iid'"),
        ({"alpha": 0.0}, r"alpha=0.0\): must be above 0"),
    ],
)
def test_wrong_settings_are_refused_at_birth(settings, message):
    with pytest.raises(ValueError, match=message):
        Digits(**settings)
