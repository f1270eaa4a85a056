"""Trees of tensors: their leaves, samples and types."""

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedglad.core.batch import concatenate, converted, leaves, length, take, to, tree_map


class Pair(NamedTuple):
    left: Any
    right: Any


def test_a_tree_keeps_its_structure():
    tree = {"a": torch.tensor([1]), "b": [torch.tensor([2]), (torch.tensor([3]), None)]}
    made = tree_map(lambda leaf: int(leaf) * 10, tree)
    assert made == {"a": 10, "b": [20, (30, None)]}
    assert [int(leaf) for leaf in leaves(tree)] == [1, 2, 3]


def test_a_namedtuple_and_a_mapping_of_another_class_are_trees_too():
    made = tree_map(lambda leaf: leaf + 1, Pair(torch.tensor([1]), UserDict(z=torch.tensor([2]))))
    assert isinstance(made, Pair)
    assert made.left.item() == 2
    assert type(made.right) is dict
    assert made.right["z"].item() == 3
    assert isinstance(converted(Pair(np.ones(1), None)), Pair)


def test_none_has_no_leaves_and_stays_none():
    assert tree_map(len, None) is None
    assert leaves((None, {"a": None})) == []
    assert converted(None) is None
    with pytest.raises(ValueError, match="no tensor in it"):
        length(None)


def test_the_length_is_that_of_every_leaf():
    assert length((np.zeros((3, 2)), torch.zeros(3), None)) == 3
    assert length(torch.zeros(0, 4)) == 0
    with pytest.raises(ValueError, match=r"^\['ids'\] has 3 samples, but \['mask'\]\[0\] has 2"):
        length({"ids": torch.zeros(3), "mask": (torch.zeros(2),)})
    with pytest.raises(ValueError, match="it is one number"):
        length(torch.tensor(1.0))


@pytest.mark.parametrize("rows", [[2, 0], np.array([2, 0], np.int32), torch.tensor([2, 0])])
def test_samples_are_taken_from_every_leaf(rows):
    x = {"ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "weight": torch.tensor([0.1, 0.2, 0.3])}
    made = take((x, None), rows)
    assert made[1] is None
    assert made[0]["ids"].tolist() == [[5, 6], [1, 2]]
    assert made[0]["weight"].tolist() == torch.tensor([0.3, 0.1]).tolist()


def test_moving_to_the_same_device_copies_nothing():
    x = torch.zeros(2)
    assert to((x,), "cpu")[0] is x
    assert to({"x": x}, "meta")["x"].device.type == "meta"


def test_trees_are_concatenated_leaf_by_leaf():
    made = concatenate([{"a": torch.tensor([1]), "b": (torch.tensor([[2.0]]), None)}] * 2)
    assert made["a"].tolist() == [1, 1]
    assert made["b"][0].tolist() == [[2.0], [2.0]]
    assert made["b"][1] is None
    with pytest.raises(ValueError, match=r"different structures: \['a'\] and one tensor"):
        concatenate([{"a": torch.zeros(1)}, torch.zeros(1)])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        concatenate([])


@pytest.mark.parametrize(
    ("stored", "input_type", "target_type"),
    [
        (np.float64, torch.float32, torch.float32),
        (np.longdouble, torch.float32, torch.float32),
        (np.float32, torch.float32, torch.float32),
        (np.float16, torch.float16, torch.float16),
        (np.dtype(">f4"), torch.float32, torch.float32),
        (np.dtype(">i2"), torch.int64, torch.int64),
        (np.uint8, torch.uint8, torch.int64),
        (np.int8, torch.int64, torch.int64),
        (np.int16, torch.int64, torch.int64),
        (np.uint16, torch.int64, torch.int64),
        (np.int32, torch.int64, torch.int64),
        (np.uint32, torch.int64, torch.int64),
        (np.int64, torch.int64, torch.int64),
        (np.uint64, torch.int64, torch.int64),
        (np.bool_, torch.bool, torch.bool),
        (np.complex64, torch.complex64, torch.complex64),
    ],
)
def test_types_become_those_of_training(stored, input_type, target_type):
    array = np.array([0, 1, 1]).astype(stored)
    assert converted(array).dtype == input_type
    assert converted(array, targets=True).dtype == target_type
    assert converted(array).tolist() == [0, 1, 1]
    if array.dtype.isnative and array.dtype != np.longdouble:
        tensor = torch.from_numpy(array)
        assert converted(tensor).dtype == input_type
        assert converted(tensor, targets=True).dtype == target_type


def test_bfloat16_stays():
    assert converted(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_needs_no_change_is_not_copied():
    array, tensor = np.ones(3, np.float32), torch.ones(3)
    made = converted((array, tensor))
    array[0] = 7
    assert made[0][0] == 7
    assert made[1].data_ptr() == tensor.data_ptr()
    assert not converted(torch.ones(2, requires_grad=True)).requires_grad


def test_read_only_and_reversed_arrays_are_copied():
    array = np.arange(3.0, dtype=np.float32)
    array.flags.writeable = False
    assert converted(array).tolist() == [0, 1, 2]
    assert converted(np.arange(3)[::-1]).tolist() == [2, 1, 0]


def test_an_array_that_masks_nothing_is_one_of_numbers():
    assert converted(np.ma.masked_array([1.0, 2.0], [False, False])).tolist() == [1, 2]


def test_numbers_in_a_list_are_a_tensor():
    assert converted([1, 0, 2]).dtype == torch.int64
    assert converted((0.5, np.float64(1))).tolist() == [0.5, 1]
    assert [type(one) for one in converted([np.ones(1), np.ones(1)])] == [Tensor, Tensor]


def test_infinity_and_nan_stay_what_they_are():
    made = converted(np.array([np.inf, -np.inf, np.nan]))
    assert made[:2].tolist() == [float("inf"), float("-inf")]
    assert made[2].isnan()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (np.array([1.0, -4e38]), r"^x holds 4e\+38, beyond the range of float32: scale it down$"),
        (torch.tensor([4e38], dtype=torch.float64), "beyond the range of float32"),
        (np.array([2**63], np.uint64), "beyond the range of int64"),
        (np.array(["cat", "dog"]), r"^x holds text \(<U3\): make numbers of it$"),
        (np.array(["cat", "dog"], object), "^x holds text: make numbers of it$"),
        ({"a": "cat"}, r"^x\['a'\] holds text"),
        (np.array([np.ones(2), np.ones(3)], object), "objects .ndarray.*unequal.*collate function"),
        ([[1, 2], ["a"]], r"^x\[1\]\[0\] holds text"),
        (np.array(["2024-01-01"], "M8[D]"), r"^x holds datetime64\[D\]"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "^x is an array with masked numbers"),
        (object(), r"^x holds Python objects \(object\)"),
        (torch.eye(2).to_sparse(), "sparse tensor: give its to_dense"),
        ({1: np.ones(2)}, r"keys that are not text, got \[1\]"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        converted(bad)
