"""FedRep: a shared representation, and each client's own head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from fedglad.clients.method import Memory, Plain, Trained
from fedglad.core.checks import check

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from fedglad.clients.local_model import LocalData, LocalModel


@dataclass(frozen=True, kw_only=True)
class FedRep(Plain):
    """FedRep (Collins et al. 2021): the head is trained first and stays; then the body, averaged.

    In a round the client takes `head_epochs` over its samples with the body fixed, then `epochs`
    (or `steps`) with the head fixed, and sends g_k = θ − θ_k of the body, 0 of the head. Each
    client is tested with its own head (`eval_clients`); the server's stays as it began, so the test
    set says little. head_epochs = 0 leaves the head as it is. arXiv:2102.07078.
    FedPer (Arivazhagan et al. 2019, arXiv:1912.00818) trains both together: plain, with `personal`
    naming the head.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> sorted(FedRep().personal_names(model)), sorted(FedRep(head="0.*").personal_names(model))
    (['2.bias', '2.weight'], ['0.bias', '0.weight'])
    """

    head: Annotated[str, "names of the head's parameters; empty: the last linear layer"] = ""
    head_epochs: Annotated[int, "passes over the client's data for the head, before the body"] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, head_epochs=0)

    @property
    def has_personal(self) -> bool:
        return True

    def personal_names(self, model: nn.Module) -> set[str]:
        from fedglad.clients.local_model import last_linear

        head = self.head or f"{last_linear(model)}.*".removeprefix(".")
        patterns = ",".join(filter(None, (head, self.personal)))
        return set(Plain(personal=patterns).personal_names(model))

    def train(
        self,
        model: LocalModel,
        data: LocalData,
        theta: Tensor,
        memory: Memory,
        rng: np.random.Generator,
        t: int,
    ) -> Trained:
        head = set(self.personal_names(model.module))
        body = set(model.layout.names) - head
        trained = Trained(0, 0.0)
        if self.head_epochs:
            first = replace(self, epochs=self.head_epochs, steps=0)
            trained = model.fit(first, data, theta, memory, rng, t, only=head)
        return trained.also(model.fit(self, data, theta, memory, rng, t, only=body))
