"""FedSGD: the gradient of all of a client's samples, and no local steps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from fedglad.clients.method import Local, Plain

FIXED = (
    *("optimizer", "lr", "batch_size", "epochs", "steps", "drop_last", "schedule", "warmup"),
    *("rounds_schedule", "personal"),
)


@dataclass(frozen=True, kw_only=True)
class FedSGD(Plain):
    """FedSGD (McMahan et al. 2017): g_k = ∇F_k(θ) over all of a client's samples, no local steps.

    With all clients and w_k = n_k/n the server's step is one of full-batch gradient descent, whose
    rate is the server's. A client's samples go through the model as one batch. arXiv:1602.05629.

    >>> [*FedSGD().batches(4, np.random.default_rng(1))]
    [array([0, 1, 2, 3])]
    """

    optimizer: Local = "sgd"
    lr: Annotated[float, "fixed at 1: the rate is the server's"] = 1.0
    batch_size: Annotated[int, "fixed at 0: all of a client's samples"] = 0

    whole: ClassVar[bool] = True
    fixed: ClassVar[Collection[str]] = (*FIXED, "clip_norm")

    def __post_init__(self) -> None:
        for name in FIXED:
            value = getattr(FedSGD, name)  # its default
            if getattr(self, name) != value:
                way_out = "set server.lr" if name == "lr" else "use plain for local steps"
                raise self.wrong(
                    name, f"one gradient of all samples has it fixed at {value!r}; {way_out}"
                )
        super().__post_init__()

    def batches(self, n: int, rng: np.random.Generator) -> Any:
        yield np.arange(n)

    def count(self, n: int) -> int:
        return 1
