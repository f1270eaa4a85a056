"""Partitions: which samples of a data set each client owns.

A partition is a function of the labels, the number of clients and a generator. It gives each index
to exactly one client, and each client at least one index. `base.py` has what they share.

| name | a client's labels | its size |
|---|---|---|
| `label-skew` | q ~ Dir(α·p), α the total concentration | equal |
| `fednlp` | the same, drawn as by the paper's authors | equal |
| `dirichlet` | for each class, the clients' shares ~ Dir_N(α) | what comes of it |
| `iid` | as the whole | equal |
| `shards` | at most k classes | nearly equal |
| `quantity` | as the whole | log-normal |
| `natural` | those of its samples in the data: a writer's, a user's | as in the data |
| `centralised` | the whole: one client | all |
"""

import difflib
from dataclasses import fields
from typing import Any

from fedglad.data.partition.base import Partition
from fedglad.data.partition.dirichlet import Dirichlet
from fedglad.data.partition.fednlp import FedNLP
from fedglad.data.partition.label_skew import LabelSkew
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


def named(name: str, **settings: Any) -> Partition:
    """The partition of that name; settings that it does not have are left out."""
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(REGISTRY)}"
        raise ValueError(f"unknown partition {name!r}: {hint}")
    kind = REGISTRY[name]
    own = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    return kind(**{key: value for key, value in settings.items() if key in own})
