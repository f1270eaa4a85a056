"""FedBN: batch normalisation stays with each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from fedglad.clients.method import Plain

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class FedBN(Plain):
    """FedBN (Li et al. 2021): weights, biases and statistics of batch normalisation are personal.

    All else is averaged: g_k = θ − θ_k, and 0 for the normalisation layers, which are found by
    their type. So clients whose features are scaled or shifted differently can share a model. Each
    is tested with its own layers (`eval_clients`). arXiv:2102.07623.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    >>> sorted(FedBN().personal_names(model))[:3]
    ['1.bias', '1.num_batches_tracked', '1.running_mean']
    """

    norms: Annotated[
        Literal["batch", "all"], "which layers: batch normalisation, or all that normalise"
    ] = "batch"

    @property
    def has_personal(self) -> bool:
        return True

    def personal_names(self, model: nn.Module) -> set[str]:
        from torch import nn
        from torch.nn.modules.batchnorm import (
            _BatchNorm,  # pyright: ignore[reportPrivateUsage]
            _NormBase,  # pyright: ignore[reportPrivateUsage]
        )

        others = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
        kinds = others if self.norms == "all" else (_BatchNorm,)
        layers = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
        names = {
            f"{layer}.{name}".removeprefix(".")
            for layer, part in layers.items()
            for name in part.state_dict()
        }
        if not names:
            way_out = "set client.norms=all, or " if self.norms == "batch" else ""
            raise ValueError(
                f"FedBN(norms={self.norms!r}) found no such normalisation layer in the model: "
                f"{way_out}name what stays with the clients in client.personal"
            )
        return names | set(super().personal_names(model))
