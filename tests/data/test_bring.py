"""Federations of what users have: arrays and torch data sets."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedglad import simulate
from fedglad.core.batch import leaves
from fedglad.data import Digits, from_arrays, from_datasets, held_out

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 1, 0, 2, 1], np.int32)
TINY: dict[str, Any] = {"rounds": 1, "sampler": {"clients_per_round": 2}}


class Counting(Dataset):
    """Six samples; every read is written down with the process that does it."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return torch.from_numpy(X[i]), int(Y[i])


def items(n: int = 4) -> list[Any]:
    return [(np.full(2, k, np.float32), k % 2) for k in range(n)]


# Arrays


def test_arrays_become_clients():
    data: Any = from_arrays([(X[:2], Y[:2]), (X[2:], Y[2:])], test=(X, Y), names=["a", "b"])
    assert (data.clients, data.names) == (2, ("a", "b"))
    assert [data.size(k) for k in range(2)] == [2, 4]
    x, y = data.client(1)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.tolist() == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert y.tolist() == [1, 0, 2, 1]
    assert len(data.test()[1]) == 6
    # Labels 0, 1 | 1, 0, 2, 1: three classes
    assert data.classes == 3
    assert [data.labels(k).tolist() for k in range(2)] == [[1, 1, 0], [1, 2, 1]]
    assert data.validation_set() is None
    assert data.client_test(0) is None
    assert not hasattr(data, "prepare")


def test_a_class_that_only_the_test_has_counts():
    data: Any = from_arrays([(X[:2], Y[:2])], test=(X, Y))
    assert data.classes == 3
    assert data.labels(0).tolist() == [1, 1, 0]


def test_a_class_needs_no_type_of_numpy():
    data: Any = from_arrays(
        [(torch.zeros(2, 3), [0, 1])], test=(torch.zeros(1, 3), torch.tensor([1]))
    )
    assert data.labels(0).tolist() == [1, 1]
    assert data.client(0)[1].tolist() == [0, 1]


def test_arrays_of_the_right_types_are_not_copied():
    x, y = np.ones((2, 3), np.float32), np.array([0, 1])
    data = from_arrays([(x, y)], test=(x, y))
    x[0, 0] = 9
    y[0] = 4
    assert data.client(0)[0][0, 0] == 9
    assert data.client(0)[1][0] == 4


@pytest.mark.parametrize("y", [Y / 2, np.eye(6), -Y, np.array([True] * 6), None])
def test_targets_that_are_no_labels_are_not_counted(y):
    data = from_arrays([(X, y)], test=(X, y))
    assert data.labels(0) is None
    assert data.classes == 0


def test_several_inputs_and_inputs_by_keyword():
    pixels = np.zeros((6, 4), np.uint8)
    data = from_arrays([((pixels, X), Y)], test=((pixels, X), Y))
    x, _ = data.client(0)
    assert isinstance(x, tuple)
    assert [leaf.dtype for leaf in x] == [torch.uint8, torch.float32]
    data = from_arrays([({"ids": X, "labels": Y}, None)], test=({"ids": X, "labels": Y}, None))
    x, y = data.client(0)
    assert y is None
    assert {name: leaf.dtype for name, leaf in x.items()} == {
        "ids": torch.float32,
        "labels": torch.int64,
    }


def test_sequences_of_unequal_lengths_are_padded():
    ids = [np.array([5, 6, 7], np.int32), np.array([8], np.int32), np.array([], np.int32)]
    tags = [np.array([1, 0, 1], np.uint8), np.array([1], np.uint8), np.array([], np.uint8)]
    data = from_arrays([({"ids": ids}, tags)], test=({"ids": ids}, tags))
    x, y = data.client(0)
    assert data.size(0) == 3
    assert x["ids"].tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert y.tolist() == [[1, 0, 1], [1, -100, -100], [-100, -100, -100]]
    # A loss leaves the filled places out: that of the 4 tags alone is log 2
    scores = torch.zeros(9, 2)
    assert nn.functional.cross_entropy(scores, y.flatten()).item() == pytest.approx(np.log(2))


def test_padding_keeps_fractions_and_truth_values():
    data = from_arrays([([[1, 2], [0.5]], [[True, False], [True]])], test=(X, Y))
    x, y = data.client(0)
    assert x.tolist() == [[1, 2], [0.5, 0]]
    assert y.tolist() == [[1, 0], [1, -100]]


def test_own_test_sets_and_a_validation_set():
    data: Any = from_arrays(
        [(X[:2], Y[:2]), (X[2:4], Y[2:4])],
        test=(X, Y),
        validation=(X[4:], Y[4:]),
        client_tests=[(X[4:5], Y[4:5]), None],
    )
    assert data.client_test(0)[1].tolist() == [2]
    assert data.client_test(1) is None
    assert data.validation_set()[1].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([], "needs at least one client"),
        ([(X, Y), (X[:0], Y[:0])], r"^client 1 has no samples: leave it out$"),
        ([(X, Y), (X, Y[:5])], "^client 1: 6 inputs, but 5 targets$"),
        ([((X, X[:4]), Y)], r"^client 0: \[0\] has 6 samples, but \[1\] has 4"),
        ([(X, np.array(["cat"] * 6))], r"^client 0: y holds text \(<U3\): make numbers of it$"),
        ([(X, ["cat"] * 6)], "^client 0: y holds text"),
        ({"a": (X, Y)}, r"^clients must be a list: give list\(clients\.values\(\)\), names="),
        ([X], r"^client 0 must be \(x, y\), got ndarray$"),
        ([5], r"^client 0 must be \(x, y\), got int$"),
    ],
)
def test_arrays_that_are_no_clients_are_refused(clients, said):
    with pytest.raises(ValueError, match=said):
        from_arrays(clients, test=(X, Y))


def test_errors_say_the_names_of_clients():
    with pytest.raises(ValueError, match=r"^client 1 \(lyon\): 6 inputs, but 5 targets$"):
        from_arrays([(X, Y), (X, Y[:5])], test=(X, Y), names=["bonn", "lyon"])
    with pytest.raises(ValueError, match="two clients have the name 'a'"):
        from_arrays([(X, Y), (X, Y)], test=(X, Y), names=["a", "a"])
    with pytest.raises(ValueError, match="2 clients, but 1 names"):
        from_arrays([(X, Y), (X, Y)], test=(X, Y), names=["a"])
    with pytest.raises(ValueError, match="1 clients, but 2 client_tests"):
        from_arrays([(X, Y)], test=(X, Y), client_tests=[None, None])
    with pytest.raises(ValueError, match=r"^test must be \(x, y\) or a data set, got ndarray$"):
        from_arrays([(X, Y)], test=X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(IndexError, match="client 1: there are clients 0 … 0"):
        from_arrays([(X, Y)], test=(X, Y)).client(1)


def test_missing_numbers_are_said_unless_something_fills_them_in():
    holes = X.copy()
    holes[1, 0] = holes[3, 1] = np.nan
    said = "^client 0: x has NaN in 2 of 6 samples: fill or drop them$"
    with pytest.raises(ValueError, match=said):
        from_arrays([(holes, Y)], test=(X, Y)).client(0)
    data = from_arrays([(holes, Y)], test=(X, Y), prepare=lambda x, training: x.nan_to_num())
    x, _ = data.client(0)
    assert data.prepare(x, True)[1].tolist() == [0, 3]
    with pytest.raises(ValueError, match="y has NaN in 1 of 2 samples"):
        from_arrays([(X[:2], np.array([np.nan, 1]))], test=(X, Y)).client(0)


def test_samples_of_unequal_shapes_need_a_collate():
    data = from_arrays([([np.ones((2, 3)), np.ones((3, 3))], Y[:2])], test=(X, Y))
    with pytest.raises(ValueError, match=r"^client 0: x has .* \(2, 3\) and \(3, 3\): give a coll"):
        data.client(0)
    data = from_arrays([([[1, 2], [[1], [2, 3]]], Y[:2])], test=(X, Y))
    with pytest.raises(ValueError, match="x has a sample with rows of unequal lengths"):
        data.client(0)


# Data sets


def test_items_are_read_when_a_client_is(tmp_path: Path):
    log = tmp_path / "log"
    data = from_datasets([Counting(log), Counting(log)], test=(X, Y))
    assert [data.size(k) for k in range(2)] == [6, 6]
    assert data.labels(0) is None
    assert data.classes == 0
    assert not log.exists()
    x, y = data.client(1)
    assert log.read_text().splitlines() == [str(os.getpid())] * 6
    assert x.dtype == torch.float32
    assert x.tolist() == X.tolist()
    assert y.tolist() == Y.tolist()


def test_items_are_read_in_the_process_that_trains(tmp_path: Path):
    logs = [tmp_path / f"{k}" for k in range(4)]
    data = from_datasets([Counting(log) for log in logs], test=(X, Y))
    settings = TINY | {"engine": {"name": "local", "workers": 2}}
    (only,) = simulate("digits", settings, model=nn.Linear(2, 3), data=data)
    read = [log for log in logs if log.exists()]
    assert {logs.index(log) for log in read} == {0, *only.cohort}
    for log in read:
        lines = log.read_text().splitlines()
        here = lines.count(str(os.getpid()))
        assert here == (6 if log.name == "0" else 0)  # a batch of the first is tried beforehand
        assert len(lines) - here == 6  # each item once a round


def test_the_test_set_is_read_once(tmp_path: Path):
    data = from_datasets([items()], test=Counting(tmp_path / "log"))
    for _ in range(3):
        data.test()
    assert len((tmp_path / "log").read_text().splitlines()) == 6


def test_items_may_have_several_inputs():
    three = [(np.ones(2), torch.tensor(k), k % 2) for k in range(3)]
    x, y = from_datasets([three], test=three).client(0)
    assert isinstance(x, tuple)
    assert x[1].tolist() == [0, 1, 2]
    assert y.tolist() == [0, 1, 0]
    nested = [(({"a": np.ones(2)}, k), {"even": k % 2, "large": k / 2}) for k in range(3)]
    x, y = from_datasets([nested], test=nested).client(0)
    assert x[0]["a"].shape == (3, 2)
    assert y["large"].tolist() == [0, 0.5, 1]
    lists = [[np.ones(2), k] for k in range(3)]
    x, y = from_datasets([lists], test=lists).client(0)
    assert (x.shape, y.tolist()) == ((3, 2), [0, 1, 2])


def test_items_may_be_dicts_with_their_targets():
    rows = [{"input_ids": [1, 2, 3][: k + 1], "labels": k} for k in range(3)]
    x, y = from_datasets([rows], test=rows).client(0)
    assert y is None
    assert x["input_ids"].tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert x["labels"].tolist() == [0, 1, 2]


def test_tensors_of_a_tensor_dataset_are_taken_as_they_are():
    x, y = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1])
    whole = TensorDataset(x, y)
    part = Subset(Subset(whole, [3, 2, 1]), [2, 0])  # rows 1 and 3
    data = from_datasets([whole, part], test=whole)
    assert data.client(0)[0].data_ptr() == x.data_ptr()
    assert [data.size(k) for k in range(2)] == [4, 2]
    assert data.client(1)[0].tolist() == [[2, 3], [6, 7]]
    assert data.client(1)[1].tolist() == [1, 1]


def test_a_subset_of_another_data_set_keeps_its_order():
    data = from_datasets([Subset(items(6), [4, 1])], test=items())  # pyright: ignore
    assert data.client(0)[0][:, 0].tolist() == [4, 1]


def _summed(batch: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor([x.sum() for x, _ in batch]), torch.tensor([y for _, y in batch])


def test_a_loader_gives_its_data_set_and_its_collate():
    plain = DataLoader(items(), batch_size=3, shuffle=True)  # pyright: ignore
    own = DataLoader(items(), batch_size=3, collate_fn=_summed)  # pyright: ignore
    data = from_datasets([plain, own], test=plain)
    assert [data.size(k) for k in range(2)] == [4, 4]
    assert data.client(0)[0].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert data.client(1)[0].tolist() == [0, 2, 4, 6]
    chosen = DataLoader(items(), sampler=SubsetRandomSampler([3, 1]))  # pyright: ignore
    data = from_datasets([chosen], test=plain)
    assert data.size(0) == 2
    assert data.client(0)[1].tolist() == [1, 1]


def test_a_collate_that_is_given_counts_for_all():
    loader = DataLoader(items())  # pyright: ignore
    data = from_datasets([items(3), loader], test=items(2), collate=_summed)
    assert data.client(0)[0].tolist() == [0, 2, 4]
    assert data.client(1)[0].tolist() == [0, 2, 4, 6]
    assert data.test()[0].tolist() == [0, 2]
    by_keyword = from_datasets(
        [items(3)], test=items(2), collate=lambda batch: {"n": torch.ones(len(batch))}
    )
    assert by_keyword.client(0)[1] is None


def test_a_collate_that_loses_items_is_refused():
    data = from_datasets([items(4)], test=items(), collate=lambda batch: _summed(batch[:3]))
    with pytest.raises(ValueError, match="client 0: 4 items became 3 samples: collate must"):
        data.client(0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(items())


SEQUENTIAL = BatchSampler(range(4), 2, False)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Stream(), r"^client 1 is a Stream, which cannot be .*: give a map-style data set"),
        (DataLoader(Stream()), "^client 1 is a Stream, which cannot"),
        ((k for k in range(3)), "^client 1 is a generator, which cannot"),
        ((X, Y), "^client 1 is a tuple, not a data set: arrays are for from_arrays$"),
        ({"train": items()}, "^client 1 is a dict, not a data set"),
        ([], "^client 1 has no samples: leave it out$"),
        (
            DataLoader(items(), sampler=WeightedRandomSampler([1] * 4, 4)),  # pyright: ignore
            r"DataLoader with a WeightedRandomSampler: give torch\.utils\.data\.Subset",
        ),
        (DataLoader(items(), batch_size=None), "DataLoader with batch_size=None"),  # pyright: ignore
        (
            DataLoader(items(), batch_sampler=SEQUENTIAL),  # pyright: ignore
            "DataLoader with its own batch_sampler",
        ),
    ],
)
def test_what_cannot_be_a_client_is_refused(one, said):
    with pytest.raises(ValueError, match=said):
        from_datasets([items(), one], test=items())


def test_one_data_set_is_no_list_of_clients():
    with pytest.raises(ValueError, match="list of data sets, one a client, got a TensorDataset"):
        from_datasets(TensorDataset(torch.ones(2)), test=items())  # pyright: ignore


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([torch.ones(2)] * 3, r"items are Tensor, not \(x, y\) or a dict: give a collate"),
        ([(torch.ones(2), "cat")] * 3, "y holds text"),
        ([{"a": 1}, {"b": 1}], "not all items have the keys a"),
        ([(1, 2), (1, 2, 3)], "not all items are tuples of 2"),
        ([(object(), 1)] * 2, "holds Python objects"),
    ],
)
def test_items_that_make_no_samples_are_refused(rows, said):
    data = from_datasets([rows], test=items(), names=["bonn"])
    with pytest.raises(ValueError, match=rf"^client 0 \(bonn\): .*{said}"):
        data.client(0)


# With the rest of the library


@pytest.mark.parametrize("engine", ["serial", "local", "batched"])
def test_a_run_is_that_of_the_same_samples_in_a_data_set_of_ours(engine):
    digits = Digits(clients=4).load_federation()
    parts = [digits.client(k) for k in range(4)]
    ours = from_arrays([(x.numpy(), y.numpy()) for x, y in parts], test=digits.test())
    sets = from_datasets([TensorDataset(*part) for part in parts], test=digits.test())
    settings = TINY | {"rounds": 2, "engine": {"name": engine}}
    runs: list[Any] = []
    for data in (digits, ours, sets):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        runs.append([*simulate("digits", settings, model=model, data=data)])
    expected = [(r.cohort, r.test_loss, r.test_accuracy) for r in runs[0]]
    assert [(r.cohort, r.test_loss, r.test_accuracy) for r in runs[1]] == expected
    assert [(r.cohort, r.test_loss, r.test_accuracy) for r in runs[2]] == expected
    assert runs[1][0].label_similarity == runs[0][0].label_similarity
    assert runs[2][0].label_similarity is None


def test_a_client_that_cannot_be_read_fails_alone(caplog: pytest.LogCaptureFixture):
    bad = X.copy()
    bad[0] = np.nan
    data = from_arrays([(X, Y), (bad, Y)], test=(X, Y), names=["bonn", "lyon"])
    settings = TINY | {"engine": {"name": "serial"}}
    (only,) = simulate("digits", settings, model=nn.Linear(2, 3), data=data)
    assert sorted(only.cohort) == [0, 1]
    assert "client 1 (lyon): x has NaN in 1 of 6 samples" in caplog.text
    assert [*only.record.rejected] == [1]


def test_a_share_can_be_held_out():
    data = held_out(from_arrays([(X, Y), (X, Y)], test=(X, Y)), 0.5)
    assert sum(data.size(k) for k in range(2)) + len(data.validation_set()[1]) == 12


def test_it_can_be_pickled():
    data = from_datasets([TensorDataset(torch.ones(2, 1), torch.tensor([0, 1]))], test=(X, Y))
    again = pickle.loads(pickle.dumps(data))
    assert again.client(0)[1].tolist() == [0, 1]
    again = pickle.loads(pickle.dumps(from_arrays([(X, Y)], test=(X, Y))))
    assert again.labels(0).tolist() == [2, 3, 1]


def test_nothing_of_a_tree_is_left_unconverted():
    data = from_arrays([((X, {"a": X, "b": [X[0]] * 6}), (Y, X))], test=(X, Y))
    assert all(isinstance(leaf, Tensor) for leaf in leaves(data.client(0)))
