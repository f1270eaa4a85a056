"""Partitions: which samples of a data set each client owns.

A partition is a function of the labels, the number of clients and a generator. It gives each index
to exactly one client, and each client at least one index. `base.py` has what they share,
docs/partitions.md a table of them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from fedglad.core import user_code
from fedglad.core.build import build
from fedglad.data.partition.base import Partition
from fedglad.data.partition.dirichlet import Dirichlet
from fedglad.data.partition.label_skew import FedNLP, LabelSkew
from fedglad.data.partition.natural import Natural
from fedglad.data.partition.shards import Shards
from fedglad.data.partition.sizes import Centralised, Iid, Quantity

REGISTRY: dict[str, type[Partition]] = {
    "label-skew": LabelSkew,
    "fednlp": FedNLP,
    "dirichlet": Dirichlet,
    "iid": Iid,
    "shards": Shards,
    "quantity": Quantity,
    "natural": Natural,
    "centralised": Centralised,
}


def named(name: str, further: Mapping[str, Any] | None = None, /, **settings: Any) -> Partition:
    """The partition of that name; of `settings`, those that it does not have are left out.

    `name` may also be that of a user's class, "package.module:Class". `further` are settings under
    names that only this partition has, and are checked against its fields.
    """
    kind = _class(name)
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    for key in further or {}:
        if key in settings:
            raise ValueError(f"partition_settings.{key}: give it as {key}, which all of them have")
        if key not in known:
            there = ", ".join(sorted(known - settings.keys())) or "none of its own"
            raise ValueError(f"unknown key 'partition_settings.{key}': {name} has {there}")
    values = {key: value for key, value in settings.items() if key in known}
    if name in REGISTRY and not further:
        return kind(**values)
    try:
        return build(kind, {**values, **(further or {})}, "partition_settings")
    except ValueError as error:
        raise ValueError(str(error).removeprefix("[partition_settings] ")) from None


def _class(name: str) -> type[Partition]:
    if name in REGISTRY:
        return REGISTRY[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(REGISTRY)}"
        raise ValueError(f"unknown partition {name!r}: {hint}")
    try:
        kind: Any = user_code.load(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"partition = {name!r} cannot be loaded: {error}") from None
    if not (is_dataclass(kind) and isinstance(kind, type) and hasattr(kind, "split")):
        raise ValueError(
            f"partition = {name!r} is not a dataclass with split(labels, clients, rng)"
        )
    return cast(type[Partition], kind)
