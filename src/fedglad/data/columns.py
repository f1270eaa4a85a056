"""Tables that users have already, as a federation: Hugging Face data sets and Flower's.

Which columns are a model's inputs is said in the same way for these and for files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np

from fedglad.core.batch import Tree
from fedglad.data.bring import (
    Collate,
    Source,
    SourceFederation,
    checked,
    inputs_and_targets,
    source_of,
)
from fedglad.rng import stream

Columns = str | list[str] | tuple[str, ...] | Mapping[str, str] | None


@dataclass(frozen=True)
class Choice:
    """Which columns of a table are inputs, and which are targets.

    | `inputs` or `target` | becomes |
    |---|---|
    | `"image"` | that column |
    | `["age", "height"]` | one array with a column for each, where all hold one number a row; |
    | | else a dict by their names: `model(**x)` |
    | `("image", "text")` | a tuple: `model(*x)` |
    | `{"input_ids": "tokens"}` | a dict by these keywords: `model(**x)` |
    | None, for inputs | a list of all columns that are not used otherwise; of one, this column |
    | None, for the target | no targets: they are among the inputs |
    """

    inputs: Columns
    target: Columns
    apart: tuple[str, ...] = ()  # columns that are never inputs unless they are named

    def needed(self, there: Sequence[str]) -> list[str]:
        """The columns to read, of those that are there; ValueError if one is missing."""
        named = dict.fromkeys([*_names(self.inputs), *_names(self.target)])
        for name in named:
            if name not in there:
                near = get_close_matches(name, there, 1)
                hint = f"did you mean {near[0]!r}?" if near else "name one with inputs= or target="
                raise ValueError(f"there is no column {name!r} among {', '.join(there)}: {hint}")
        return [*dict.fromkeys([*self._inputs(there), *_names(self.target)])]

    def choose(self, columns: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """The inputs and targets of columns that were read."""
        if self.inputs is None and len(names := self._inputs(list(columns))) == 1:
            column = columns[names[0]]
            return (_together([column]) if _is_flat(column) else column), self._targets(columns)
        inputs = self._inputs(list(columns)) if self.inputs is None else self.inputs
        return _chosen(inputs, columns), self._targets(columns)

    def _targets(self, columns: Mapping[str, Any]) -> Tree:
        return None if self.target is None else _chosen(self.target, columns)

    def _inputs(self, there: Sequence[str]) -> list[str]:
        if self.inputs is not None:
            return _names(self.inputs)
        others = [name for name in there if name not in (*_names(self.target), *self.apart)]
        if not others:
            raise ValueError(f"no column is left for inputs among {', '.join(there)}")
        return others


def _names(columns: Columns) -> list[str]:
    if columns is None:
        return []
    if isinstance(columns, str):
        return [columns]
    return list(columns.values() if isinstance(columns, Mapping) else columns)


def _chosen(names: Any, columns: Mapping[str, Any]) -> Tree:
    if isinstance(names, str):
        return columns[names]
    if isinstance(names, Mapping):
        return {keyword: columns[name] for keyword, name in names.items()}
    if isinstance(names, tuple):
        return tuple(columns[name] for name in names)
    parts = [columns[name] for name in names]
    if all(_is_flat(part) for part in parts):
        return _together(parts)
    return dict(zip(names, parts, strict=True))


def _is_flat(column: Any) -> bool:
    """Whether it holds one number a row."""
    return isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "fiub"


def _together(columns: list[Any]) -> Any:
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class Table:
    """Rows of a `datasets.Dataset`; None: all."""

    dataset: Any
    choice: Choice
    collate: Collate | None
    rows: np.ndarray | None = None

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.dataset) if self.rows is None else len(self.rows)

    def read(self) -> tuple[Tree, Tree]:
        """The inputs and targets of these rows."""
        table = self.dataset if self.rows is None else self.dataset.select(self.rows)
        if self.collate is not None:
            items = list(table.__getitems__(list(range(len(table)))))
            return inputs_and_targets(self.collate(items), "collate gave")
        if table.format["type"] == "custom":  # a transform of the user's
            columns = {name: _column(values) for name, values in table[:].items()}
            self.choice.needed(list(columns))
            return self.choice.choose(columns)
        names = self.choice.needed(table.column_names)
        columns = table.with_format("numpy", columns=names)[:]
        return self.choice.choose(columns)


def _column(values: Any) -> Any:
    """A list of numbers as an array: only so are several of them put side by side."""
    plain = isinstance(values, list) and all(isinstance(v, int | float) for v in values)
    return np.asarray(values) if plain else values


def _require_table(dataset: Any, called: str) -> None:
    if not (hasattr(dataset, "column_names") and hasattr(dataset, "select")):
        raise ValueError(
            f"{called} must be a datasets.Dataset, got {type(dataset).__name__}"
            + (": load it without streaming" if "Iterable" in type(dataset).__name__ else "")
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"{called} is a {type(dataset).__name__}: load it without streaming")


def _splits(dataset: Any) -> Mapping[str, Any] | None:
    """The splits of a DatasetDict; None if it is one data set."""
    return dataset if isinstance(dataset, Mapping) else None


def from_huggingface(
    dataset: Any,
    by: str,
    test: Any = None,
    inputs: Columns = None,
    target: Columns = "label",
    *,
    validation: Any = None,
    collate: Collate | None = None,
    prepare: Callable[[Any, bool], Any] | None = None,
    seed: int = 0,
) -> SourceFederation:
    """A federation of a Hugging Face `datasets.Dataset`: one client a value of the column `by`.

    Clients are in the order of these values, which are in `names`.

    | `test` | meaning |
    |---|---|
    | a data set | this one; also (x, y) |
    | a share, such as 0.2 | that share of each client's rows, drawn by `seed`: nobody trains on |
    | | them, and they are the client's own `client_test(k)` too |
    | None | the split `test` of a `DatasetDict`, whose split `train` has the clients |

    | `inputs` or `target` | becomes |
    |---|---|
    | `"image"` | that column |
    | `["age", "height"]` | one array with a column for each, where all hold one number a row; |
    | | else a dict by their names: `model(**x)` |
    | `("image", "text")` | a tuple: `model(*x)` |
    | `{"input_ids": "tokens"}` | a dict by these keywords: `model(**x)` |
    | None, for inputs | a list of all columns that are not used otherwise; of one, this column |
    | None, for the target | no targets: they are among the inputs |

    Lists of unequal lengths are padded: inputs with 0, targets with −100. A client's rows are read
    when it is trained, and with the data set's transform if it has one. `collate(rows)` makes
    (x, y) of a list of rows in another way.

    >>> from datasets import Dataset
    >>> rows = {"user": ["b", "a", "b"], "age": [31.0, 54.0, 23.0], "label": [1, 0, 0]}
    >>> data = from_huggingface(Dataset.from_dict(rows), by="user", test=Dataset.from_dict(rows))
    >>> data.names, data.size(1), data.client(1)
    (('a', 'b'), 2, (tensor([[31.],
            [23.]]), tensor([1, 0])))
    """
    if (splits := _splits(dataset)) is not None:
        if "train" not in splits:
            raise ValueError(f"the data set has the splits {', '.join(splits)}: give one of them")
        dataset, test = splits["train"], splits.get("test") if test is None else test
    _require_table(dataset, "dataset")
    if not len(dataset):
        raise ValueError("dataset has no rows")
    choice = Choice(inputs, target, (by,))
    Choice(by, None).needed(dataset.column_names)
    if collate is None and dataset.format["type"] != "custom":
        choice.needed(dataset.column_names)
    names, rows = _groups(dataset, by)
    held: list[np.ndarray] | None = None
    if isinstance(test, float | int):
        if not 0 < test < 1:
            raise ValueError(f"test = {test!r}: a share must be between 0 and 1")
        held = [_held(seed, k, len(of), test) for k, of in enumerate(rows)]
        tested = [of[out] for of, out in zip(rows, held, strict=True)]
        rows = [np.delete(of, out) for of, out in zip(rows, held, strict=True)]
        if not sum(map(len, tested)):
            raise ValueError(f"test = {test!r} of each client's rows is not one: raise it")
        test_source: Source = Table(dataset, choice, collate, np.concatenate(tested))
        own_tests = [Table(dataset, choice, collate, of) for of in tested]
    elif test is None:
        raise ValueError("give test=: a data set, or a share of each client's rows such as 0.2")
    else:
        test_source, own_tests = _held_set(test, "test", choice, collate), None
    targets, classes = None, 0
    if collate is None and isinstance(target, str) and dataset.format["type"] != "custom":
        targets, classes = _labels(dataset, target, rows)
    made = SourceFederation(
        [Table(dataset, choice, collate, of) for of in rows],
        test_source,
        validation=None
        if validation is None
        else _held_set(validation, "validation", choice, collate),
        client_tests=own_tests,
        names=names,
        prepare=prepare,
        classes=classes,
        targets=targets,
    )
    return checked(made)


def _held_set(given: Any, called: str, choice: Choice, collate: Collate | None) -> Source:
    if isinstance(given, tuple):
        return source_of(given, called)
    _require_table(given, called)
    return Table(given, choice, collate)


def _held(seed: int, client: int, n: int, share: float) -> np.ndarray:
    """Which of a client's n rows are for the test, ascending; one at least stays.

    There are n · share of them, rounded up or down at random so that small clients give theirs.
    """
    rng = stream(seed, "test", client)
    count = max(0, min(n - 1, int(n * share + rng.random())))
    return np.sort(rng.permutation(n)[:count])


def _groups(dataset: Any, by: str) -> tuple[list[Any], list[np.ndarray]]:
    """The values of a column in their order, and the rows of each, of which only it is read."""
    column = dataset.select_columns([by]).with_format("arrow")[:].column(by)
    if column.null_count:
        raise ValueError(f"column {by!r} is empty in {column.null_count} rows: fill or drop them")
    try:
        coded = column.combine_chunks().dictionary_encode()
        values: list[Any] = coded.dictionary.to_pylist()
        order = sorted(range(len(values)), key=values.__getitem__)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"column {by!r} holds {column.type}: it must hold names or numbers"
        ) from error
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    clients = place[coded.indices.to_numpy(zero_copy_only=False)]
    rows = np.argsort(clients, kind="stable")
    ends = np.cumsum(np.bincount(clients, minlength=len(values)))[:-1]
    return [values[i] for i in order], np.split(rows, ends)


@dataclass(frozen=True)
class _Labels:
    labels: np.ndarray
    rows: list[np.ndarray]

    def __call__(self, k: int) -> np.ndarray:
        return self.labels[self.rows[k]]


def _labels(dataset: Any, target: str, rows: list[np.ndarray]) -> tuple[_Labels | None, int]:
    """The labels of each client, of one column, and the number of classes."""
    column = dataset.select_columns([target]).with_format("arrow")[:].column(target)
    if not str(column.type).startswith(("int", "uint")) or column.null_count:
        return None, 0
    labels = column.to_numpy().astype(np.int64)
    if int(labels.min()) < 0:
        return None, 0
    classes = max(
        int(labels.max()) + 1, getattr(dataset.features[target], "num_classes", None) or 0
    )
    return _Labels(labels, rows), classes


@dataclass(frozen=True)
class Partition:
    """A partition of Flower's FederatedDataset; or, by its name, a whole split."""

    dataset: Any
    choice: Choice
    collate: Collate | None
    split: str
    number: int | None = None

    @property
    def size(self) -> int:
        """How many rows there are."""
        return self._table.size

    def read(self) -> tuple[Tree, Tree]:
        """The inputs and targets of these rows."""
        return self._table.read()

    @cached_property
    def _table(self) -> Table:
        if self.number is None:
            rows = self.dataset.load_split(self.split)
        else:
            rows = self.dataset.load_partition(self.number, self.split)
        return Table(rows, self.choice, self.collate)


def from_flower(
    dataset: Any,
    test: Any = "test",
    inputs: Columns = None,
    target: Columns = "label",
    *,
    split: str | None = None,
    validation: Any = None,
    collate: Collate | None = None,
    prepare: Callable[[Any, bool], Any] | None = None,
) -> SourceFederation:
    """A federation of a `FederatedDataset` of flwr-datasets: its partition k is client k.

    `split` is the partitioned split, where there are several. `test` and `validation` are names
    of splits, data sets, or (x, y). `inputs`, `target` and `collate` are as in `from_huggingface`.
    A partition is looked up when its size or its samples are asked for.

    >>> import json, pathlib, tempfile
    >>> from datasets import disable_progress_bars
    >>> from flwr_datasets import FederatedDataset
    >>> disable_progress_bars()
    >>> folder, cache = pathlib.Path(tempfile.mkdtemp()), tempfile.mkdtemp()
    >>> lines = [json.dumps({"pixels": [k, k], "label": k % 2}) for k in range(6)]
    >>> for name in ("train.jsonl", "test.jsonl"):
    ...     _ = (folder / name).write_text("\\n".join(lines))
    >>> parts = FederatedDataset(
    ...     dataset=str(folder), partitioners={"train": 3}, shuffle=False, cache_dir=cache
    ... )
    >>> data = from_flower(parts)
    >>> data.clients, data.size(1), data.client(1)[1]
    (3, 2, tensor([0, 1]))
    """
    if not (hasattr(dataset, "load_partition") and hasattr(dataset, "partitioners")):
        raise ValueError(f"dataset must be a FederatedDataset, got {type(dataset).__name__}")
    partitioners: Mapping[str, Any] = dataset.partitioners
    if split is None:
        if len(partitioners) > 1:
            raise ValueError(f"the splits {', '.join(partitioners)} are partitioned: give split=")
        (split,) = partitioners
    if split not in partitioners:
        raise ValueError(f"split {split!r} is not partitioned, but {', '.join(partitioners)}")
    choice = Choice(inputs, target)

    def held(given: Any, called: str) -> Source:
        if isinstance(given, str):
            return Partition(dataset, choice, collate, given)
        return _held_set(given, called, choice, collate)

    clients = partitioners[split].num_partitions
    made = SourceFederation(
        [Partition(dataset, choice, collate, split, k) for k in range(clients)],
        held(test, "test"),
        validation=None if validation is None else held(validation, "validation"),
        prepare=prepare,
    )
    made.size(0)  # a partitioner that cannot do its work says so here
    return made
