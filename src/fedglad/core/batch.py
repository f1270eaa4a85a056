"""Samples of several tensors: inputs or targets as a tensor, or a tuple, list or dict of them.

Such a structure is a tree: its leaves are tensors or NumPy arrays, and the first dimension of
every leaf counts the samples. None is a tree without leaves: the targets of a model that finds
them in its inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any
"""A tensor, a NumPy array, None, or a tuple, list or dict of trees."""

_PADDING = "pad them to one length: give a collate function, or a list of 1-D arrays"
_KEPT = (torch.uint8, torch.bool, torch.int64)


def tree_map(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same structure with fn(leaf) in the place of every leaf.

    >>> tree_map(len, {"ids": torch.zeros(2, 5), "more": (torch.ones(3), None)})
    {'ids': 2, 'more': (3, None)}
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: tree_map(fn, part) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a namedtuple
        return type(tree)(*(tree_map(fn, part) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(fn, part) for part in tree)
    return fn(tree)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree, in their order.

    >>> leaves({"ids": torch.tensor([1]), "more": (torch.tensor([2]), None)})
    [tensor([1]), tensor([2])]
    """
    return [leaf for _, leaf in _named(tree, "")]


def length(tree: Tree) -> int:
    """How many samples a tree has: the first dimension of its leaves, which must be the same.

    >>> length({"ids": torch.zeros(4, 7), "mask": torch.ones(4, 7)})
    4
    >>> length((torch.zeros(4, 7), torch.ones(3)))
    Traceback (most recent call last):
    ValueError: [0] has 4 samples, but [1] has 3: the first dimension of both must count the samples
    """
    if isinstance(tree, Tensor) and tree.dim():
        return len(tree)
    first: tuple[str, int] | None = None
    for name, leaf in _named(tree, ""):
        shape = np.shape(leaf) if not isinstance(leaf, Tensor) else leaf.shape
        if not len(shape):
            raise ValueError(
                f"{name or 'it'} is one number: the first dimension counts the samples"
            )
        n = int(shape[0])
        if first is None:
            first = name, n
        elif n != first[1]:
            raise ValueError(
                f"{first[0]} has {first[1]} samples, but {name} has {n}: the first dimension of "
                "both must count the samples"
            )
    if first is None:
        raise ValueError("there is no tensor in it, so it has no samples")
    return first[1]


def take(tree: Tree, rows: Any) -> Tree:
    """The samples of a tree of tensors that `rows` says: a tensor, an array or a list of numbers.

    >>> take((torch.tensor([5, 6, 7]), torch.eye(3)), [2, 0])
    (tensor([7, 5]), tensor([[0., 0., 1.],
            [1., 0., 0.]]))
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    return tree_map(lambda leaf: leaf.index_select(0, index.to(leaf.device)), tree)


def to(tree: Tree, device: torch.device | str) -> Tree:
    """The tree with its tensors on a device; what is there already is not copied.

    >>> to({"ids": torch.tensor([1])}, "cpu")
    {'ids': tensor([1])}
    """
    if isinstance(tree, Tensor):
        return tree.to(device)
    return tree_map(lambda leaf: leaf.to(device), tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """One tree of the samples of several, in their order.

    >>> concatenate([(torch.tensor([1, 2]), None), (torch.tensor([3]), None)])
    (tensor([1, 2, 3]), None)
    """
    if not trees:
        raise ValueError("there is nothing to concatenate")
    named = [dict(_named(tree, "")) for tree in trees]
    for parts in named:
        if parts.keys() != named[0].keys():
            raise ValueError(
                f"samples of different structures: {_listed(named[0])} and {_listed(parts)}"
            )
    joined = {name: torch.cat([parts[name] for parts in named]) for name in named[0]}
    names = iter(joined)
    return tree_map(lambda _: joined[next(names)], trees[0])


def rows_of(tree: Tree, part: Tensor | slice) -> Tree:
    """The samples of a tree of tensors in a slice, or those of an index on the same device.

    >>> rows_of(torch.tensor([5, 6, 7]), slice(1, 3))
    tensor([6, 7])
    """
    if isinstance(part, slice):
        return tree[part] if isinstance(tree, Tensor) else tree_map(lambda leaf: leaf[part], tree)
    if isinstance(tree, Tensor):
        return tree.index_select(0, part)
    return tree_map(lambda leaf: leaf.index_select(0, part), tree)


def samples(pair: Any, dtype: torch.dtype = torch.float32) -> tuple[Tree, Tree]:
    """A client's inputs and targets as trees of tensors for a model of a dtype, with one length.

    >>> samples((np.zeros((2, 3)), [0, 1]))
    (tensor([[0., 0., 0.],
            [0., 0., 0.]]), tensor([0, 1]))
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"the client has a {type(pair).__name__}, not a pair of inputs and targets (x, y)"
        )
    if _ready(pair[0], dtype) and _ready(pair[1], dtype) and len(pair[0]) == len(pair[1]):
        return pair[0], pair[1]  # as most data sets give them
    x = converted(pair[0], "x", dtype=dtype)
    y = converted(pair[1], "y", targets=True, dtype=dtype)
    n = length(x)
    if y is not None and length(y) != n:
        raise ValueError(f"the client has {n} inputs for {length(y)} targets")
    return x, y


def converted(
    tree: Tree, name: str = "x", targets: bool = False, dtype: torch.dtype | None = torch.float32
) -> Tree:
    """The tree with tensors of the types that a model of a dtype is trained with as its leaves.

    | stored as | becomes |
    |---|---|
    | a NumPy array | a tensor, of the same memory where it can be |
    | a list of numbers | a tensor |
    | 64-bit and 32-bit floats | the model's of these; an error if a number is beyond its range |
    | all other floats, complex numbers, bool | the same |
    | uint8 | the same, as pixels are; with `targets`, int64 |
    | all other integers | int64; an error if a number is beyond its range |

    Without a dtype, floats stay as they are. What cannot be a tensor raises ValueError, with the
    place in the tree, of which `name` is the root.

    >>> converted({"pixels": np.zeros((2, 3), np.uint8), "age": np.array([31.0, 54.0])})
    {'pixels': tensor([[0, 0, 0],
            [0, 0, 0]], dtype=torch.uint8), 'age': tensor([31., 54.])}
    >>> converted(np.array([3, 1], np.uint8), "y", targets=True)
    tensor([3, 1])
    >>> converted((np.zeros(2), np.array(["a", "b"])))
    Traceback (most recent call last):
    ValueError: x[1] holds text (<U1): make numbers of it
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(f"{name} has keys that are not text, got {list(tree)}")
        parts = {
            key: converted(part, f"{name}[{key!r}]", targets, dtype) for key, part in tree.items()
        }
        return parts
    if isinstance(tree, list | tuple) and not _numbers(tree):
        parts = [converted(part, f"{name}[{i}]", targets, dtype) for i, part in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    return _tensor(tree if isinstance(tree, Tensor) else _array(tree, name), name, targets, dtype)


def _ready(tree: Tree, dtype: torch.dtype) -> bool:
    """Whether it is one tensor that `converted` would leave as it is."""
    if not isinstance(tree, Tensor) or tree.dtype not in (dtype, torch.int64):
        return False
    strided = tree.layout == torch.strided and not tree.is_nested
    return strided and not tree.requires_grad and tree.dim() > 0


def _tensor(leaf: Tensor, name: str, targets: bool, dtype: torch.dtype | None) -> Tensor:
    if leaf.is_nested:
        raise ValueError(f"{name} is a nested tensor, of unequal lengths: {_PADDING}")
    if leaf.layout != torch.strided:
        raise ValueError(f"{name} is a sparse tensor: give its to_dense()")
    leaf = leaf.detach() if leaf.requires_grad else leaf
    doubles = (torch.float64, torch.float32)
    if dtype in doubles and leaf.dtype in doubles:
        made = leaf.to(dtype)
        if leaf.dtype != dtype and bool((made.isinf() & leaf.isfinite()).any()):
            raise _beyond(name, "float32", leaf)
        return made
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype in _KEPT:
        return leaf.to(torch.int64) if targets and leaf.dtype == torch.uint8 else leaf
    made = leaf.to(torch.int64)
    if leaf.dtype == torch.uint64 and bool((made < 0).any()):
        raise _beyond(name, "int64", leaf)
    return made


def _array(leaf: Any, name: str) -> Tensor:
    """A tensor of an array or of numbers, of the same memory where torch can use it."""
    try:
        array = np.asarray(leaf)
    except (ValueError, TypeError) as error:  # NumPy refuses ragged lists
        raise ValueError(f"{name} has rows of unequal lengths: {_PADDING}") from error
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise ValueError(f"{name} is an array with masked numbers: fill them, as with .filled(0)")
    kind = array.dtype.kind
    if kind in "USTa":
        raise ValueError(f"{name} holds text ({array.dtype}): make numbers of it")
    if kind == "O":
        held = type(array.flat[0] if array.size else leaf).__name__
        if held == "str":
            raise ValueError(f"{name} holds text: make numbers of it")
        raise ValueError(
            f"{name} holds Python objects ({held}), not numbers: if they are of unequal lengths, "
            f"{_PADDING}"
        )
    if kind not in "fciub":
        raise ValueError(f"{name} holds {array.dtype}: make numbers of it")
    if kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()  # torch can neither protect memory nor walk it backwards
    return torch.from_numpy(array)


def _beyond(name: str, kind: str, leaf: Tensor) -> ValueError:
    numbers = leaf.cpu().numpy()
    largest = np.abs(numbers[np.isfinite(numbers)]).max()
    return ValueError(f"{name} holds {largest:g}, beyond the range of {kind}: scale it down")


def _numbers(items: Sequence[Any]) -> bool:
    """Whether a list is one of plain numbers, which is a leaf, and not a list of trees."""
    kinds = (bool, int, float, np.number, np.bool_)
    return len(items) > 0 and all(isinstance(item, kinds) for item in items)


def _named(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their places in it: ["ids"], [0]."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _named(part, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            yield from _named(part, f"{name}[{i}]")
    elif tree is not None:
        yield name, tree


def _listed(parts: Mapping[str, Any]) -> str:
    return ", ".join(name or "one tensor" for name in parts) or "nothing"
