"""Ditto: a personal model beside the global one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedglad.clients.fedprox import FedProx
from fedglad.clients.method import Buffers, Memory, Plain, Trained
from fedglad.core.checks import check

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedglad.clients.local_model import LocalData, LocalModel


@dataclass(frozen=True, kw_only=True)
class Ditto(Plain):
    """Ditto (Li et al. 2021): each client also has a model v_k, held near the global one by λ.

    The global model is trained as by plain. Then v_k takes as many steps, each of ∇F_k(v) +
    λ(v − θ), from where it was; in a client's first round from θ. Clients are tested with v_k
    (`eval_clients`), the test set with θ. λ = 0 trains each client for itself alone. A round costs
    twice the steps, and each client keeps a model. Nothing of v_k is sent. arXiv:2012.04221.
    Differs from the paper: it has a number of steps of its own for v_k.

    >>> import torch
    >>> grad, v, theta = torch.tensor([5.0]), torch.tensor([3.0]), torch.tensor([1.0])
    >>> Ditto(lam=0.5).pulled.correct(grad, v, theta, {}, {})
    >>> grad  # 5 + ½ (3 − 1)
    tensor([6.])
    """

    lam: Annotated[float, "λ, how near a client's own model is held to the global one"] = 0.1

    remembers: ClassVar[tuple[str, ...]] = ("own",)
    uncut: ClassVar[tuple[str, ...]] = ("own",)
    fixed: ClassVar[tuple[str, ...]] = ("personal",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, lam=(0 <= self.lam < math.inf, "0 or more, and finite"))
        if self.personal:
            raise self.wrong("personal", "each client has a whole model of its own: leave it empty")

    @property
    def pulled(self) -> FedProx:
        """What trains v_k: FedProx with the same settings and μ = λ."""
        shared = {field.name: getattr(self, field.name) for field in fields(Plain)}
        return FedProx(**shared, mu=self.lam)

    def start(self, theta: Tensor, zeros: Tensor) -> Memory:
        return {"own": theta}

    def train(
        self,
        model: LocalModel,
        data: LocalData,
        theta: Tensor,
        memory: Memory,
        rng: np.random.Generator,
        t: int,
    ) -> Trained:
        trained = model.fit(self, data, theta, memory, rng, t)
        with model.aside():
            model.put(memory["own"], model.buffers_in(memory, "own"))
            model.fit(self.pulled, data, theta, memory, rng, t)
            memory |= model.copied("own")
        return trained

    def personalised(
        self, theta: Tensor, buffers: Buffers, memory: Memory
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        from fedglad.clients.local_model import buffers_in

        return memory["own"], buffers_in(memory, "own", buffers)
