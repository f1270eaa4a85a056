"""A server's state on disk: one safetensors file with JSON in its header. Loading runs no code."""

from __future__ import annotations

import json
import math
import os
import reprlib
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedglad.core.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1


class CheckpointError(ValueError):
    """A saved state that cannot be used here; the message says what differs."""


class OtherModel(CheckpointError):
    """A saved state that is good, and of another model."""


def write(
    path: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    sync: bool = True,
) -> None:
    """Writes to a temporary file, syncs it, renames it: the file is whole or not there."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = json.dumps(meta)
    header = {"fedglad": text, "crc32": str(_crc32(tensors, text))}
    with replacing(Path(path), durable=sync) as temporary:
        try:
            save_file(tensors, temporary, metadata=header)
            if sync:  # the many memories of clients are written as fast as can be
                _in_order(temporary)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _in_order(path: Path) -> None:
    """Sorts the header's entries, which the library writes in any order: same state, same bytes."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:  # as the library writes it
            file.seek(8)
            file.write(text.ljust(length))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON of a saved state, checked against its checksum."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no saved state at {path}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = header.get("fedglad", "null")
        meta: Any = json.loads(text)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, use an earlier one: {error}") from error
    if "fedglad" not in header:
        raise CheckpointError(f"{path} is not a state saved by fedglad")
    version = meta.get("version") if isinstance(meta, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise CheckpointError(f"{path} has format version {version}, this fedglad reads {VERSION}")
    if str(_crc32(tensors, text)) != header.get("crc32"):
        raise CheckpointError(f"{path} is damaged, use an earlier one: its checksum does not match")
    return tensors, meta


def checksum(path: str | os.PathLike[str]) -> str:
    """The checksum in the header of a saved state, of which nothing else is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return str((file.metadata() or {}).get("crc32"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged, use an earlier one: {error}") from error


@contextmanager
def reading(what: str) -> Generator[None]:
    """While a state is taken apart that anybody may have made: whatever is missing in it, or of
    another type, is a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{what} cannot be used: {missing}") from error


def whole_number(value: Any) -> int:
    """A number of rounds; raises for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ValueError(f"{reprlib.repr(value)} is not a number of rounds")
    return value


def finite(value: Any) -> float:
    """A finite number; raises for anything else."""
    (number,) = numbers([value])
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def numbers(values: Any) -> list[float]:
    """A list of numbers that a float can hold; raises for anything else."""
    if not isinstance(values, list):
        raise TypeError(f"{reprlib.repr(values)} is not a list of numbers")
    given = cast(list[Any], values)
    for value in given:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{reprlib.repr(value)} is not a number")
        float(value)
    return [*given]


def _crc32(tensors: dict[str, Tensor], text: str) -> int:
    import torch

    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = zlib.crc32(data.numpy().data, zlib.crc32(name.encode(), crc))
    return crc


def settings(component: Any, registry: dict[str, type]) -> dict[str, Any] | None:
    """`name` and fields of a component as JSON types; None if a file cannot hold it."""
    names = {cls: name for name, cls in registry.items()}
    if type(component) not in names or not is_dataclass(component):
        return None
    fields = asdict(component)  # type: ignore[arg-type]
    if any(callable(value) for value in fields.values()) or _names_code(fields):
        return None
    return {"name": names[type(component)], **fields}


def build(saved: dict[str, Any], registry: dict[str, type]) -> Any:
    """The component of `settings`."""
    fields = {n: tuple(v) if isinstance(v, list) else v for n, v in saved.items() if n != "name"}
    if _names_code(fields):
        raise CheckpointError(f"it names code, {fields['schedule']!r}, which no file may do")
    return registry[saved["name"]](**fields)


def _names_code(fields: Mapping[str, Any]) -> bool:
    """Whether a schedule is somebody's own class: reading a file runs no code."""
    return ":" in str(fields.get("schedule", ""))


def require_same_tensors(saved: dict[str, Tensor], present: dict[str, Tensor]) -> None:
    """Raises unless every present tensor was saved, in the same shape and dtype."""
    for name, ours in present.items():
        if name not in saved:
            raise CheckpointError(f"the state has no tensor {name!r}")
        theirs = saved[name]
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            raise CheckpointError(
                f"the state's {name!r} is {tuple(theirs.shape)} {theirs.dtype}, "
                f"not {tuple(ours.shape)} {ours.dtype}"
            )


def require_same_layout(saved: list[list[Any]], present: list[list[Any]]) -> None:
    """Raises with the first tensor that differs between two layouts."""
    for theirs, ours in zip_longest(saved, present):
        if theirs == ours:
            continue
        if theirs and ours:
            differs = f"it has {_tensor(theirs)} where this model has {_tensor(ours)}"
        else:
            whose = "the saved state" if theirs else "this model"
            differs = f"only {whose} has {_tensor(theirs or ours)}"
        raise OtherModel(f"the saved state is of another model: {differs}")


def _tensor(described: list[Any]) -> str:
    name, shape, dtype, kind = described
    return f"{kind} {name!r} {tuple(shape)} {dtype}"
