"""MNIST, Fashion-MNIST and CIFAR-10: their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fedglad.data import store
from fedglad.data.split import Split

if TYPE_CHECKING:
    from fedglad.data.federation import Partitioned


@dataclass(frozen=True, kw_only=True)
class MNIST(Split):
    """Handwritten digits (LeCun et al. 1998): 60,000 + 10,000 images of 1×28×28, in [0, 1].

    >>> MNIST(clients=50, partition="shards").words(classes=10)
    'shards, at most 2 classes per client'
    """

    samples: ClassVar[int | None] = 60_000
    kept_as: ClassVar[str] = "mnist"

    def load_federation(self) -> Partitioned:
        """The images with their owners; fetched and prepared when asked for the first time."""
        from fedglad.data.pixels import Pixels

        return self.partitioned(store.load(self.kept_as), Pixels())


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(MNIST):
    """Clothes of ten kinds (Xiao et al. 2017, arXiv:1708.07747): as MNIST, and harder.

    >>> FashionMNIST(alpha=1.0).words(classes=10)
    'label-skew, α = 1 in total (0.1 per class, as most other tools count it)'
    """

    kept_as: ClassVar[str] = "fashion-mnist"


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Split):
    """Photographs of ten kinds (Krizhevsky 2009): 50,000 + 10,000 images of 3×32×32, normalised.

    >>> CIFAR10(augment=False, partition="dirichlet", alpha=0.3).words(classes=10)
    'dirichlet, α = 0.3 per client, as most other tools count it'
    """

    samples: ClassVar[int | None] = 50_000

    augment: Annotated[bool, "crop, flip and Cutout in training, as in the paper's runs"] = True

    def load_federation(self) -> Partitioned:
        """The images with their owners; fetched and prepared when asked for the first time."""
        from fedglad.data.pixels import Pixels

        norm: dict[str, Any] = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
        augment: dict[str, Any] = {"shift": 4, "mirror": True, "cutout": 16} if self.augment else {}
        return self.partitioned(store.load("cifar10"), Pixels(**norm, **augment))
