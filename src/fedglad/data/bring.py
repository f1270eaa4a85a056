"""Data that users have already, as a federation: arrays, or one torch data set a client.

A client's samples are read when it is trained, in the process that trains it; before that only
their number is asked for. `columns` does the same for tables, `folder` for files.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    sampler,
)

from fedglad.core.batch import Tree, converted, leaves, length, tree_map

Collate = Callable[[list[Any]], Any]
"""Makes (x, y) of a list of items; or a dict that holds the targets too."""

PAD_INPUTS, PAD_TARGETS = 0, -100
"""What fills sequences up to the longest: a loss ignores targets of −100."""


class Source(Protocol):
    """Samples that can be read."""

    @property
    def size(self) -> int:
        """How many there are, without reading them."""
        ...

    def read(self) -> tuple[Tree, Tree]:
        """The inputs and targets of all; lists are lists of samples."""
        ...


class SourceFederation:
    """A federation of sources, one a client.

    `names` are the clients' names: those of files, or the values of a column; else their numbers.
    """

    def __init__(
        self,
        clients: Sequence[Source],
        test: Source,
        *,
        validation: Source | None = None,
        client_tests: Sequence[Source | None] | None = None,
        names: Iterable[Any] | None = None,
        prepare: Callable[[Any, bool], Any] | None = None,
        classes: int = 0,
        targets: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """`targets(k)` are client k's labels where these can be known without reading inputs."""
        if not clients:
            raise ValueError("a federation needs at least one client, got none")
        self.sources, self._test, self._validation = clients, test, validation
        self.clients, self.classes, self._targets = len(clients), classes, targets
        self.names: tuple[Any, ...] = tuple(range(self.clients) if names is None else names)
        if len(self.names) != self.clients:
            raise ValueError(f"{self.clients} clients, but {len(self.names)} names")
        if len(set(self.names)) < self.clients:
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"two clients have the name {twice!r}: names must differ")
        if client_tests is not None and len(client_tests) != self.clients:
            raise ValueError(f"{self.clients} clients, but {len(client_tests)} client_tests")
        self._client_tests = client_tests
        self._prepares = prepare is not None
        if prepare:
            self.prepare = prepare

    def size(self, k: int) -> int:
        """How many samples client k has."""
        n = self.sources[self._known(k)].size
        if not n:
            raise ValueError(f"{self._called(k)} has no samples: leave it out")
        return n

    def client(self, k: int) -> tuple[Tree, Tree]:
        """The inputs and targets of client k, read now."""
        return self._read(self.sources[self._known(k)], self._called(k))

    def client_test(self, k: int) -> tuple[Tree, Tree] | None:
        """The samples that client k alone is tested on, read now; None if it has none."""
        source = self._client_tests[self._known(k)] if self._client_tests else None
        if source is None or not source.size:
            return None
        return self._read(source, f"the test set of {self._called(k)}")

    def test(self) -> tuple[Tree, Tree]:
        """The inputs and targets of the test set, read once."""
        return self._test_set

    def validation_set(self) -> tuple[Tree, Tree] | None:
        """The inputs and targets of the validation set, read once; None if there is none."""
        return self._validation_samples

    def labels(self, k: int) -> np.ndarray | None:
        """How many samples of each class client k has; None where that is not known."""
        self._known(k)
        if self._targets is None:
            return None
        return np.bincount(self._targets(k), minlength=self.classes)

    @cached_property
    def _test_set(self) -> tuple[Tree, Tree]:
        return self._read(self._test, "the test set")

    @cached_property
    def _validation_samples(self) -> tuple[Tree, Tree] | None:
        source = self._validation
        return None if source is None else self._read(source, "the validation set")

    def _known(self, k: int) -> int:
        if not 0 <= k < self.clients:
            raise IndexError(f"client {k}: there are clients 0 … {self.clients - 1}")
        return k

    def _called(self, k: int) -> str:
        name = self.names[k]
        return f"client {k}" if isinstance(name, int) and name == k else f"client {k} ({name})"

    def _read(self, source: Source, called: str) -> tuple[Tree, Tree]:
        try:
            x, y = source.read()
            x = converted(stacked(x, PAD_INPUTS, "x"), "x")
            y = converted(stacked(y, PAD_TARGETS, "y"), "y", targets=True)
            n = check_lengths(x, y)
            if not n:
                raise ValueError("there are no samples")
            if n != source.size:
                raise ValueError(f"{source.size} items became {n} samples: collate must keep all")
            if not self._prepares:  # which may be what fills them in
                _require_numbers(x, "x")
            _require_numbers(y, "y")
        except ValueError as error:
            raise ValueError(f"{called}: {error}") from error
        return x, y


def check_lengths(x: Tree, y: Tree) -> int:
    """How many samples there are; ValueError if inputs and targets are not as many."""
    n = length(x)
    if y is not None and length(y) != n:
        raise ValueError(f"{n} inputs, but {length(y)} targets")
    return n


def _require_numbers(tree: Tree, name: str) -> None:
    for leaf in leaves(tree):
        if leaf.is_floating_point() and bool((missing := leaf.isnan()).any()):
            rows = int(missing.flatten(1).any(dim=1).sum()) if leaf.dim() > 1 else missing.sum()
            raise ValueError(
                f"{name} has NaN in {int(rows)} of {len(leaf)} samples: fill or drop them"
            )


def stacked(tree: Tree, padding: int, name: str = "x") -> Tree:
    """The tree with every list, which is one of samples, as one array or tensor.

    Samples of one shape are put side by side; of unequal 1-D ones all get the length of the
    longest.

    >>> stacked([np.array([1, 2, 3]), [4]], padding=-100)
    tensor([[   1,    2,    3],
            [   4, -100, -100]])
    """
    if isinstance(tree, Mapping):
        return {key: stacked(part, padding, f"{name}[{key!r}]") for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(stacked(part, padding, f"{name}[{i}]") for i, part in enumerate(tree))
    if isinstance(tree, list):
        return _stack(tree, padding, name)
    if isinstance(tree, np.ndarray) and tree.dtype == object and tree.ndim == 1:
        return _stack(list(tree), padding, name)
    return tree


def _stack(samples: list[Any], padding: int, name: str) -> Any:
    if not samples:
        raise ValueError(f"{name} is an empty list")
    if all(isinstance(sample, int | float | np.number) for sample in samples):
        return np.asarray(samples)
    parts: list[Any] = _regular(samples, name)
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) == 1:
        return torch.stack(parts) if isinstance(parts[0], Tensor) else np.stack(parts)
    if {len(shape) for shape in shapes} != {1}:
        some = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise ValueError(f"{name} has samples of shapes {some}: give a collate that pads them")
    tensors = [converted(part, name, targets=padding < 0) for part in parts]
    full = [tensor for tensor in tensors if len(tensor)]  # an empty one has no type of its own
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in full])
    if padding < 0 and dtype == torch.bool:
        dtype = torch.int64
    tensors = [tensor.to(dtype) for tensor in tensors]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


def _regular(samples: list[Any], name: str) -> list[Any]:
    """All samples as tensors, or all as arrays."""
    if isinstance(samples[0], Tensor):
        return [torch.as_tensor(sample) for sample in samples]
    try:
        return [np.asarray(sample) for sample in samples]
    except ValueError as error:
        raise ValueError(
            f"{name} has a sample with rows of unequal lengths: give a collate that pads them"
        ) from error


@dataclass(frozen=True)
class Arrays:
    """Inputs and targets in memory."""

    x: Tree
    y: Tree

    @property
    def size(self) -> int:
        """How many samples there are."""
        return check_lengths(_counted(self.x), _counted(self.y))

    def read(self) -> tuple[Tree, Tree]:
        """The inputs and targets."""
        return self.x, self.y


def _counted(tree: Tree) -> Tree:
    """The tree with an empty array in the place of every list, of as many samples."""
    return _over_lists(lambda samples: np.empty((len(samples), 0)), lambda leaf: leaf, tree)


def _first(tree: Tree) -> Tree:
    """The first sample alone."""
    return _over_lists(lambda samples: samples[:1], lambda leaf: leaf[:1], tree)


def _over_lists(on_list: Callable[[Any], Any], on_leaf: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _over_lists(on_list, on_leaf, part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_over_lists(on_list, on_leaf, part) for part in tree)
    return on_list(tree) if isinstance(tree, list) else tree_map(on_leaf, tree)


@dataclass(frozen=True)
class Items:
    """The items of a map-style data set, and how they become inputs and targets."""

    dataset: Any
    collate: Collate | None
    size: int

    def read(self) -> tuple[Tree, Tree]:
        """Every item is read, and all are collated at once."""
        dataset, rows = self.dataset, None
        if self.collate is None:
            while type(dataset) is Subset:
                chosen = np.asarray(dataset.indices, dtype=np.int64)
                dataset, rows = dataset.dataset, chosen if rows is None else chosen[rows]
            if type(dataset) is TensorDataset:
                tensors = dataset.tensors
                if rows is not None:
                    index = torch.from_numpy(rows)
                    tensors = tuple(tensor.index_select(0, index) for tensor in tensors)
                return inputs_and_targets(tensors)
        items = _items(self.dataset, self.size)
        if not items:
            raise ValueError("there are no items")
        if self.collate is not None:
            return inputs_and_targets(self.collate(items), "collate gave")
        items = [tuple(item) if isinstance(item, list) else item for item in items]
        if not isinstance(items[0], tuple | Mapping):
            return inputs_and_targets(items[0])  # which raises
        return inputs_and_targets(_gathered(items))


def _items(dataset: Any, n: int) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # many at once, as torch's own loader asks for them
        return list(dataset.__getitems__(list(range(n))))
    return [dataset[i] for i in range(n)]


def _gathered(items: list[Any]) -> Any:
    """Items of one structure as this structure of lists of samples."""
    first = items[0]
    if isinstance(first, Mapping):
        if any(not isinstance(item, Mapping) or item.keys() != first.keys() for item in items):
            raise ValueError(f"not all items have the keys {', '.join(map(str, first))}")
        return {key: _gathered([item[key] for item in items]) for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(item, tuple) or len(item) != len(first) for item in items):
            raise ValueError(f"not all items are tuples of {len(first)}")
        return tuple(_gathered([item[i] for item in items]) for i in range(len(first)))
    return items  # also lists: within an item a list is a sequence


def inputs_and_targets(batch: Any, said: str = "items are") -> tuple[Tree, Tree]:
    """(x, y) of what was collated: the last of a tuple is the targets; a dict holds them."""
    if isinstance(batch, Mapping):
        return dict(batch), None
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        *inputs, targets = batch
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets
    raise ValueError(
        f"{said} {type(batch).__name__}, not (x, y) or a dict: give a collate(items) -> (x, y)"
    )


def items_of(given: Any, called: str, collate: Collate | None) -> Items:
    """The items of a torch data set or loader; ValueError for one that can only be iterated."""
    dataset: Any = given
    if isinstance(given, DataLoader):
        loader: Any = given
        dataset = loader.dataset
        rows = None if isinstance(dataset, IterableDataset) else _rows(loader, called)
        if collate is None and loader.collate_fn not in (default_collate, default_convert):
            collate = loader.collate_fn
        if rows is not None:
            dataset = Subset(dataset, rows)
    if isinstance(dataset, tuple | str | Mapping | np.ndarray | Tensor):
        raise ValueError(
            f"{called} is a {type(dataset).__name__}, not a data set: arrays are for from_arrays"
        )
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not map_style:
        raise ValueError(
            f"{called} is a {type(dataset).__name__}, which cannot be asked for its length and its "
            "items: give a map-style data set (__len__ and __getitem__), such as a list of items"
        )
    return Items(dataset, collate, len(dataset))


def _rows(loader: Any, called: str) -> list[int] | None:
    """Which items a loader loads; None: all."""
    way_out = "give torch.utils.data.Subset(dataset, indices) in its place"
    if loader.batch_size is None:
        kind = "batch_size=None" if loader.batch_sampler is None else "its own batch_sampler"
        raise ValueError(f"{called} is a DataLoader with {kind}: {way_out}")
    drawn: Any = loader.sampler
    if type(drawn) is sampler.SubsetRandomSampler:
        return [operator.index(i) for i in drawn.indices]
    whole = type(drawn) is sampler.SequentialSampler or (
        type(drawn) is sampler.RandomSampler
        and not drawn.replacement
        and drawn.num_samples == len(loader.dataset)
    )
    if not whole:
        raise ValueError(f"{called} is a DataLoader with a {type(drawn).__name__}: {way_out}")
    return None


def source_of(given: Any, called: str, collate: Collate | None = None) -> Source:
    """A source of (x, y), of a data set or of a loader."""
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(f"{called} must be (x, y), got {len(given)} parts")
        return _arrays(given, called)
    if isinstance(given, Tensor | np.ndarray | Mapping) or given is None:
        raise ValueError(f"{called} must be (x, y) or a data set, got {type(given).__name__}")
    return items_of(given, called, collate)


def _arrays(given: Any, called: str) -> Arrays:
    """Checked as far as their shapes and types say something."""
    try:
        x, y = given
    except (TypeError, ValueError):
        raise ValueError(f"{called} must be (x, y), got {type(given).__name__}") from None
    made = Arrays(x, y)
    try:
        n = made.size
        if n:
            converted(stacked(_first(x), PAD_INPUTS, "x"), "x")
            converted(stacked(_first(y), PAD_TARGETS, "y"), "y")
    except ValueError as error:
        raise ValueError(f"{called}: {error}") from error
    return made


def _named(k: int, names: Sequence[Any] | None) -> str:
    return f"client {k}" if names is None or k >= len(names) else f"client {k} ({names[k]})"


def from_datasets(
    datasets: Sequence[Any],
    test: Any,
    validation: Any = None,
    collate: Collate | None = None,
    prepare: Callable[[Any, bool], Any] | None = None,
    *,
    client_tests: Sequence[Any] | None = None,
    names: Sequence[Any] | None = None,
) -> SourceFederation:
    """A federation of torch data sets, one a client: map-style ones, lists of items, or loaders.

    | an item | inputs and targets |
    |---|---|
    | `(x, y)` | x and y; each may be a number, an array, a tensor, a tuple or a dict of them |
    | `(a, b, y)` | the model gets two inputs: `model(a, b)` |
    | a dict | the model gets it by keywords, the targets too; y is None |

    Items are put side by side, 1-D ones of unequal lengths padded: inputs with 0, targets with
    −100, which a loss ignores. `collate(items)` makes (x, y) of all items of a client in another
    way. Of a loader its data set is used, and its `collate_fn` if it is not torch's. `test`,
    `validation` and `client_tests`, one a client or None, are data sets too, or (x, y).
    `prepare(x, training)` makes the model's inputs of a batch.

    Only lengths are asked for at first: items are read when a client is trained, in the process
    that trains it, and every time that it is.

    >>> from torch.utils.data import TensorDataset
    >>> parts = [TensorDataset(torch.full((4, 2), float(k)), torch.arange(4) % 2) for k in (1, 2)]
    >>> data = from_datasets(parts, test=parts[0])
    >>> data.clients, data.size(1), data.client(1)[1]
    (2, 4, tensor([0, 1, 0, 1]))
    >>> words = from_datasets([[([5, 6, 7], 0), ([8], 1)]], test=parts[0])
    >>> words.client(0)[0]
    tensor([[5, 6, 7],
            [8, 0, 0]])
    """
    if isinstance(datasets, Dataset | DataLoader):
        raise ValueError(
            f"datasets must be a list of data sets, one a client, got a {type(datasets).__name__}"
        )
    sources = [items_of(given, _named(k, names), collate) for k, given in enumerate(datasets)]
    made = SourceFederation(
        sources,
        source_of(test, "test", collate),
        validation=None if validation is None else source_of(validation, "validation", collate),
        client_tests=_tests(client_tests, collate),
        names=names,
        prepare=prepare,
    )
    return checked(made)


def from_arrays(
    clients: Sequence[tuple[Any, Any]],
    test: tuple[Any, Any],
    validation: tuple[Any, Any] | None = None,
    prepare: Callable[[Any, bool], Any] | None = None,
    *,
    client_tests: Sequence[Any] | None = None,
    names: Sequence[Any] | None = None,
) -> SourceFederation:
    """A federation of arrays in memory: (x, y) of every client.

    | x or y | meaning |
    |---|---|
    | a NumPy array or a tensor | its first dimension counts the samples |
    | a tuple | several inputs: `model(*x)` |
    | a dict | inputs by keyword: `model(**x)` |
    | a list | one entry a sample; 1-D ones of unequal lengths are padded |
    | None, for y | the targets are among the inputs |

    64-bit floats become 32-bit ones and integers int64, but for pixels of uint8, when a client is
    trained. Sequences in lists are padded with 0, those of targets with −100, which a loss
    ignores. `client_tests` has an (x, y) for each client, or None.

    >>> x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 1, 0, 2, 1])
    >>> data = from_arrays([(x[:2], y[:2]), (x[2:], y[2:])], test=(x, y), names=["a", "b"])
    >>> data.size(1), data.labels(1), data.client(0)[0]
    (4, array([1, 2, 1]), tensor([[0., 1.],
            [2., 3.]]))
    """
    if isinstance(clients, Mapping):
        raise ValueError("clients must be a list: give list(clients.values()), names=list(clients)")
    sources = [_arrays(given, _named(k, names)) for k, given in enumerate(clients)]
    tested = source_of(test, "test")
    counted = [_labels(source.y) for source in sources]
    labelled = bool(counted) and all(y is not None for y in counted)
    known = [y for y in (*counted, _labels(getattr(tested, "y", None))) if y is not None and len(y)]
    made = SourceFederation(
        sources,
        tested,
        validation=None if validation is None else source_of(validation, "validation"),
        client_tests=_tests(client_tests, None),
        names=names,
        prepare=prepare,
        classes=max((int(y.max()) + 1 for y in known), default=0) if labelled else 0,
        targets=_Labels(sources) if labelled else None,
    )
    return checked(made)


@dataclass(frozen=True)
class _Labels:
    sources: Sequence[Arrays]

    def __call__(self, k: int) -> np.ndarray:
        labels = _labels(self.sources[k].y)
        assert labels is not None
        return labels


def _labels(y: Tree) -> np.ndarray | None:
    """One-dimensional targets that are labels 0, 1, …; None if they are not."""
    if isinstance(y, list) and not all(isinstance(label, int | np.integer) for label in y):
        return None
    if not isinstance(y, list | np.ndarray | Tensor):
        return None
    array = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and int(array.min()) < 0):
        return None
    return array.astype(np.int64, copy=False)


def _tests(given: Sequence[Any] | None, collate: Collate | None) -> list[Source | None] | None:
    if given is None:
        return None
    return [
        None if one is None else source_of(one, f"client_tests[{k}]", collate)
        for k, one in enumerate(given)
    ]


def checked(made: SourceFederation) -> SourceFederation:
    """The same federation; ValueError for a client without samples."""
    for k in range(made.clients):
        made.size(k)
    return made
