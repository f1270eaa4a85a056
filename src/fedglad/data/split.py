"""How a data set is shared out among clients: the settings that every partitioned data set has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from fedglad.core.checks import check
from fedglad.data.partition import REGISTRY, Partition, named
from fedglad.data.partition.base import check_parts
from fedglad.data.validation import VALIDATION, check_share, dealt, taken
from fedglad.rng import stream

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.data.federation import Partitioned

CLIENTS = "N; natural and centralised have their own number"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Who owns which samples; a data set inherits these fields and asks for its `owners`.

    `partition` may also be a user's class, "package.module:Class". The partitions that have `alpha`
    count it differently: see `words`.

    >>> owners = Split(clients=3, partition="iid").owners(np.zeros(7))
    >>> [len(indices) for indices in owners]
    [3, 2, 2]
    """

    samples: ClassVar[int | None] = None
    """Training samples, if they are known before they are loaded: more clients are refused then."""

    added: ClassVar[Mapping[str, Any]] = {"validation": 0.0}

    clients: Annotated[int, CLIENTS] = 100
    partition: Annotated[str, ", ".join(REGISTRY)] = "label-skew"
    alpha: Annotated[
        float,
        "label-skew, fednlp: total concentration, 0.1 here is 0.01 per class in most other tools; "
        "dirichlet: per client, as in other tools",
    ] = 0.1
    classes_per_client: Annotated[int, "shards: at most so many"] = 2
    sigma: Annotated[float, "quantity: sizes are log-normal; 0 is equal ones"] = 1.0
    key: Annotated[str, "natural: a file with one key a sample, .npy or lines of text"] = ""
    seed: Annotated[int, "of the split and the partition"] = 0
    partition_settings: Annotated[
        Mapping[str, Any] | None, "further fields of the partition, of an own one above all"
    ] = None
    validation: Annotated[float, VALIDATION] = 0.0

    def __post_init__(self) -> None:
        check_share(self, self.validation)
        if not _counts_clients(self._chosen()):
            known, share = self.samples, self.validation
            most = self.clients if known is None else known - round(share * known)
            limit = "1 or more" if known is None else f"in 1 … {most}, one training sample each"
            check(self, clients=(1 <= self.clients <= most, limit))

    def owners(self, labels: np.ndarray) -> list[np.ndarray]:
        """The indices of each client's samples; the same ones for the same labels and seed."""
        chosen = self._chosen()
        number = 0 if _counts_clients(chosen) else self.clients
        parts = chosen.split(labels, number, stream(self.seed, "partition"))
        if self.partition in REGISTRY:
            return parts
        try:
            return check_parts(parts, len(labels), number)
        except ValueError as error:
            raise ValueError(f"partition = {self.partition!r}: {error}") from None

    def partitioned(
        self,
        arrays: Mapping[str, np.ndarray],
        transform: Callable[[Tensor, bool], Tensor] | None = None,
    ) -> Partitioned:
        """The arrays `train_x`, `train_y`, `test_x` and `test_y`, shared out among the clients."""
        import torch

        from fedglad.data.federation import Partitioned

        names = ("train_x", "train_y", "test_x", "test_y")
        x, y, test_x, test_y = (torch.from_numpy(arrays[name]) for name in names)
        owners, validation, whose = self._shared(arrays["train_y"])
        return Partitioned(x, y, test_x, test_y, owners, transform, validation, whose)

    def shares(self, labels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """The indices of each client's samples, and of the validation set, which no client has.

        It is taken out first, so that the partition does not know of it. Where the clients are
        there before the samples are shared out, or a user's class may count samples by their
        place, each client gives a share of its samples instead.

        >>> split = Split(clients=3, partition="iid", validation=0.3)
        >>> owners, validation = split.shares(np.ones(10))
        >>> [len(indices) for indices in owners], len(validation)
        ([3, 2, 2], 3)
        """
        return self._shared(labels)[:2]

    def _shared(self, labels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """The same, and the client that each validation sample is tested for; −1: for none."""
        if not self.validation:
            return self.owners(labels), np.arange(0), np.arange(0)
        if self.partition in REGISTRY and not _counts_clients(self._chosen()):
            order = stream(self.seed, "validation").permutation(len(labels))
            count = round(self.validation * len(labels))
            validation, rest = np.sort(order[:count]), np.sort(order[count:])
            owners = [rest[indices] for indices in self.owners(labels[rest])]
            whose = dealt(labels, owners, validation, self.seed)
        else:
            whole = self.owners(labels)
            out = [taken(self.seed, k, len(rows), self.validation) for k, rows in enumerate(whole)]
            validation = np.concatenate([rows[held] for rows, held in zip(whole, out, strict=True)])
            owners = [np.delete(rows, held) for rows, held in zip(whole, out, strict=True)]
            whose = np.repeat(np.arange(len(whole)), [len(held) for held in out])
        if not len(validation):
            raise ValueError(
                f"validation = {self.validation} of {len(labels)} samples is not one: raise it"
            )
        return owners, validation, whose

    def words(self, classes: int) -> str:
        """The partition with the setting it uses, and whose convention its α is.

        >>> print(Split(alpha=0.1).words(classes=10))
        label-skew, α = 0.1 in total (0.01 per class, as most other tools count it)
        """
        others = "as most other tools count it"
        total = f"α = {self.alpha:g} in total ({self.alpha / classes:g} per class, {others})"
        further = "".join(f", {k} = {v}" for k, v in (self.partition_settings or {}).items())
        known = {
            "label-skew": f"label-skew, {total}",
            "fednlp": f"fednlp, {total}",
            "dirichlet": f"dirichlet, α = {self.alpha:g} per client, {others}",
            "shards": f"shards, at most {self.classes_per_client} classes per client",
            "quantity": f"quantity, log-normal sizes with σ = {self.sigma:g}",
            "natural": f"natural, by the keys in {self.key}",
        }
        return known.get(self.partition, self.partition) + further

    def _chosen(self) -> Partition:
        shared = {field.name: getattr(self, field.name) for field in fields(Split)}
        further = shared.pop("partition_settings")
        return named(self.partition, further, **shared)


def _counts_clients(partition: Partition) -> bool:
    return getattr(partition, "counts_clients", False)  # a user's need not inherit it
