"""FedSAM: local steps towards flat minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedglad.clients.method import Memory, Plain
from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.clients.local_model import LocalModel


@dataclass(frozen=True, kw_only=True)
class FedSAM(Plain):
    """FedSAM (Qu et al. 2022): each step takes the gradient at w + ρ ∇/‖∇‖, of the same batch.

    So it goes towards minima around which the loss is flat. A step costs two passes; the loss in
    the record is that at w. ρ = 0 is plain, bit for bit. arXiv:2206.02618; found at the same time
    by Caldarola et al. 2022, arXiv:2203.11834.
    Differs from the paper: buffers, such as those of batch normalisation, see the pass at w alone.

    >>> import torch
    >>> from fedglad.clients import Workbench
    >>> from fedglad.rng import stream
    >>> bench = Workbench(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss)
    >>> theta = bench.layout.pack({"weight": torch.ones(1, 1)})
    >>> client = FedSAM(rho=0.5, optimizer="sgd", lr=0.25)
    >>> x, y = torch.ones(1, 1), torch.zeros(1, 1)
    >>> delta = bench.train(client, theta, {}, x, y, stream(1, "a")).delta
    >>> bench.layout.views(delta)["weight"]  # ¼ · 2 (1 + ½)
    tensor([[0.7500]])
    """

    rho: Annotated[float, "ρ, how far from w the gradient is taken"] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, rho=(0 <= self.rho < math.inf, "0 or more, and finite"))

    def step(
        self,
        gradient: Callable[[], Tensor],
        model: LocalModel,
        theta: Tensor,
        memory: Memory,
        t: int,
    ) -> Tensor:
        from fedglad.clients.workbench import length

        loss = gradient()
        if self.rho and (norm := length(model.grad)):
            with model.aside():
                model.w.add_(model.grad, alpha=self.rho / norm)
                gradient()
        return loss
