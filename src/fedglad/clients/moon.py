"""MOON: features that are like the global model's, and unlike the client's own of before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from fedglad.clients.method import Batch, Memory, Plain, Trained
from fedglad.core.checks import check

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedglad.clients.local_model import LocalData, LocalModel


@dataclass(frozen=True, kw_only=True)
class MOON(Plain):
    """MOON (Li et al. 2021): the loss is F_k + μ ℓ, which contrasts features z, z_glob and z_prev.

    ℓ = −log(e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})), the mean over a
    batch, where z are the features of the model in training, z_glob those of θ, and z_prev those of
    the model that the client had after its last round. Features are what the last linear layer, or
    `layer`, is given. In a client's first round z_prev = z_glob, so that ℓ = log 2. A step costs
    two more forward passes, and each client keeps a model. arXiv:2103.16257.
    Differs from the paper: no projection head is added to the model.

    >>> import torch
    >>> z, glob, prev = (torch.tensor([v]) for v in ([1.0, 0.0], [1.0, 0.0], [0.0, 1.0]))
    >>> round(float(MOON(tau=0.5).contrast(z, glob, prev)), 4)  # log(1 + e^{(0 − 1)/0.5})
    0.1269
    """

    mu: Annotated[float, "μ, how much the contrast counts"] = 1.0
    tau: Annotated[float, "τ, the temperature of the contrast"] = 0.5
    layer: Annotated[str, "whose inputs are the features; empty: the last linear layer"] = ""

    remembers: ClassVar[tuple[str, ...]] = ("previous",)
    uncut: ClassVar[tuple[str, ...]] = ("previous",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            mu=(0 <= self.mu < math.inf, "0 or more, and finite"),
            tau=(0 < self.tau < math.inf, "positive and finite"),
        )

    def start(self, theta: Tensor, zeros: Tensor) -> Memory:
        return {"previous": theta}

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
        memory |= model.copied("previous")
        return trained

    def loss(
        self, model: LocalModel, batch: Batch, theta: Tensor, memory: Memory, t: int
    ) -> Tensor:
        import torch

        loss, z = model.loss_and_features(batch, self.layer)
        with torch.no_grad():
            buffers = model.buffers_in(memory, "previous")
            glob = model.at(theta).features(batch[0], self.layer)
            previous = model.at(memory["previous"], buffers).features(batch[0], self.layer)
        return loss + self.mu * self.contrast(z, glob, previous)

    def contrast(self, z: Tensor, glob: Tensor, previous: Tensor) -> Tensor:
        """ℓ of the features of a batch."""
        from torch.nn.functional import cosine_similarity, softplus

        near, far = (cosine_similarity(z.flatten(1), f.flatten(1)) for f in (glob, previous))
        return softplus((far - near) / self.tau).mean()
