"""Files that users have already, as a federation: one file a client.

How many samples a file has is said by its header, or by its number of lines; the rest is read when
the client is trained.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.core.batch import Tree
from fedglad.data.bring import Source, SourceFederation, checked, source_of
from fedglad.data.columns import Choice, Columns


@dataclass(frozen=True)
class File:
    """A client's file: what it holds is read when it is asked for."""

    path: Path
    choice: Choice
    size: int

    @classmethod
    def of(cls, path: Path, choice: Choice) -> File:
        """With its size, from its header; ValueError for one that cannot be read."""
        with _named(path):
            return cls(path, choice, FORMATS[path.suffix.lower()].size(path, choice))

    def read(self) -> tuple[Tree, Tree]:
        """The inputs and targets."""
        with _named(self.path):
            columns = FORMATS[self.path.suffix.lower()].read(self.path, self.choice)
            return self.choice.choose(columns)


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Errors of readers as one line with the file's name."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{path.name} needs the package {error.name}: pip install 'fedglad[data]'",
            name=error.name,
        ) from error
    except OSError as error:
        if type(error).__module__ == "builtins" and error.errno:  # of the disk: it says enough
            raise
        raise ValueError(f"{path.name} cannot be read: {_line(error)}") from error
    except Exception as error:  # safetensors, pyarrow and zipfile have errors of their own
        raise ValueError(f"{path.name}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _Npz:
    @staticmethod
    def size(path: Path, choice: Choice) -> int:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            with archive.open(f"{choice.needed(names)[-1]}.npy") as member:
                major, _ = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0
                shape = (read if major == 1 else np.lib.format.read_array_header_2_0)(member)[0]
        return _rows(shape)

    @staticmethod
    def read(path: Path, choice: Choice) -> dict[str, Any]:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in choice.needed(arrays.files)}


class _Safetensors:
    @staticmethod
    def size(path: Path, choice: Choice) -> int:
        from safetensors import safe_open

        with safe_open(path, "numpy") as tensors:
            name = choice.needed(list(tensors.keys()))[-1]
            return _rows(tensors.get_slice(name).get_shape())

    @staticmethod
    def read(path: Path, choice: Choice) -> dict[str, Any]:
        from safetensors import safe_open

        with safe_open(path, "pt") as tensors:  # which knows bfloat16
            names = choice.needed(list(tensors.keys()))
            return {name: _array(tensors.get_tensor(name)) for name in names}


def _array(tensor: Any) -> Any:
    """As an array where there is such a type: columns are put side by side as arrays."""
    import torch

    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _parquet() -> Any:
    return import_module("pyarrow.parquet")


class _Parquet:
    @staticmethod
    def size(path: Path, choice: Choice) -> int:
        with _parquet().ParquetFile(path) as file:
            choice.needed(file.schema_arrow.names)
            return file.metadata.num_rows

    @staticmethod
    def read(path: Path, choice: Choice) -> dict[str, Any]:
        with _parquet().ParquetFile(path) as file:
            names = choice.needed(file.schema_arrow.names)
            table = file.read(names, use_threads=False)  # a worker has one
        return {name: _arrow(table.column(name).combine_chunks(), name) for name in names}


def _arrow(column: Any, name: str) -> Any:
    """An array of a column; of lists of unequal lengths a list of arrays."""
    if column.null_count:
        raise ValueError(f"column {name!r} is empty in {column.null_count} rows: fill or drop them")
    kind = str(column.type)
    if not kind.startswith(("list", "large_list", "fixed_size_list")):
        return column.to_numpy(zero_copy_only=False)
    inner = _arrow(column.flatten(), name)
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    if isinstance(inner, np.ndarray) and len(lengths) and lengths.min() == lengths.max():
        return inner.reshape(len(lengths), int(lengths[0]), *inner.shape[1:])
    ends = np.cumsum(lengths)
    return [inner[end - n : end] for end, n in zip(ends, lengths, strict=True)]


class _Jsonl:
    @staticmethod
    def size(path: Path, choice: Choice) -> int:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())

    @staticmethod
    def read(path: Path, choice: Choice) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is a {type(row).__name__}, not an object")
                if rows and row.keys() != rows[0].keys():
                    raise ValueError(f"line {number} has other keys than the first line")
                rows.append(row)
        names = choice.needed(list(rows[0])) if rows else []
        return {name: _plain([row[name] for row in rows]) for name in names}


def _plain(values: list[Any]) -> Any:
    """Numbers as an array; sequences and text as they are."""
    if all(isinstance(value, int | float) for value in values):
        return np.asarray(values)
    if missing := sum(value is None for value in values):
        raise ValueError(f"{missing} of {len(values)} values are null: fill or drop them")
    return values


class _Csv:
    @staticmethod
    def size(path: Path, choice: Choice) -> int:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines)
            choice.needed(next(rows, []))
            return sum(1 for row in rows if row)

    @staticmethod
    def read(path: Path, choice: Choice) -> dict[str, Any]:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines)
            head = next(rows, [])
            cells = [row for row in rows if row]
        for number, row in enumerate(cells, 1):
            if len(row) != len(head):
                raise ValueError(
                    f"row {number} has {len(row)} cells, but there are {len(head)} names"
                )
        at = {name: head.index(name) for name in choice.needed(head)}
        return {name: _numbers([row[i] for row in cells], name) for name, i in at.items()}


def _numbers(cells: list[str], name: str) -> np.ndarray:
    for kind in (int, float):
        try:
            return np.array([kind(cell) for cell in cells])
        except (ValueError, OverflowError):
            continue
    wrong = next(cell for cell in cells if not _is_number(cell))
    raise ValueError(f"column {name!r} holds {wrong!r}: make a number of it, or leave it out")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _rows(shape: Sequence[int]) -> int:
    if not len(shape):
        raise ValueError("it holds one number: the first dimension counts the samples")
    return int(shape[0])


FORMATS: dict[str, Any] = {
    ".parquet": _Parquet,
    ".npz": _Npz,
    ".safetensors": _Safetensors,
    ".jsonl": _Jsonl,
    ".csv": _Csv,
}


def from_folder(
    path: str | Path,
    test: Any = None,
    inputs: Columns = None,
    target: Columns = "y",
    *,
    validation: Any = None,
    prepare: Callable[[Any, bool], Any] | None = None,
) -> SourceFederation:
    """A federation of a folder: one file a client, in the order of their names.

    | file | what it holds | its size is known from |
    |---|---|---|
    | `.npz` | arrays by name | a header |
    | `.safetensors` | tensors by name | the header |
    | `.parquet` | columns; needs pyarrow | the file's metadata |
    | `.jsonl` | an object a line | the number of lines |
    | `.csv` | numbers, with the columns' names first | the number of rows |

    The files' names without their endings are in `names`. A file `test.*` is the test set and a
    file `validation.*` the validation set, unless `test` and `validation` give them: another
    file, or (x, y). `inputs` and `target` choose columns as in `from_huggingface`; by default the
    target is `y`, and all others are inputs.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for n, name in enumerate(["bonn", "lyon", "test"], 2):
    ...     np.savez(folder / name, x=np.ones((n, 4)), y=np.zeros(n, int))
    >>> data = from_folder(folder)
    >>> data.names, data.size(1), data.client(1)[0].shape
    (('bonn', 'lyon'), 3, torch.Size([3, 4]))
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in FORMATS and not file.name.startswith(".") and file.is_file()
    ]
    choice = Choice(inputs, target)
    held: dict[str, Source | None] = {}
    for what, given in (("test", test), ("validation", validation)):
        own = [file for file in files if file.stem == what]
        files = [file for file in files if file.stem != what]
        if given is None and len(own) > 1:
            raise ValueError(f"{folder} has {len(own)} files {what}.*: give {what}=")
        held[what] = _held(given if given is not None else next(iter(own), None), what, choice)
    if not files:
        raise ValueError(f"{folder} has no file of a client: *{', *'.join(FORMATS)}")
    if (tested := held["test"]) is None:
        raise ValueError(f"{folder} has no file test.*: give test=, a file or (x, y)")
    made = SourceFederation(
        [File.of(file, choice) for file in files],
        tested,
        validation=held["validation"],
        names=[file.stem for file in files],
        prepare=prepare,
    )
    return checked(made)


def _held(given: Any, what: str, choice: Choice) -> Source | None:
    if not isinstance(given, str | Path):
        return None if given is None else source_of(given, what)
    if Path(given).suffix.lower() not in FORMATS:
        raise ValueError(f"{what} = {str(given)!r}: must be one of *{', *'.join(FORMATS)}")
    return File.of(Path(given), choice)
