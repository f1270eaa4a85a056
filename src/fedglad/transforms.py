"""Transforms: what becomes of a client's update on its way to the server, and how many bytes it is.

>>> import numpy as np, torch
>>> from fedglad.core.layout import split
>>> layout, *_ = split({"w": torch.zeros(1000)})
>>> [made.size(layout) for made in (NoTransform(), Quantise(), TopK(share=0.01))]
[4000, 1004, 80]

A transform gives what the server receives, decoded. Validation, guard, filter and GSI see that, and
a method's clients know of it only what a transform keeps for them. A simulation applies it in every
engine alike, drawing by (seed, round, client).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.core.layout import Layout

CHUNK = 1 << 20  # elements that are quantised at a time: their draws are float64


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """What all have in common. An own one has `apply` and `size`.

    >>> class Signs(Transform):  # each element ±1: a bit
    ...     def apply(self, update, layout, rng, kept=None):
    ...         return update.sign(), None
    ...     def size(self, layout):
    ...         return sum(-(-n // 8) for n in layout.numels)
    >>> import torch
    >>> from fedglad.core.layout import split
    >>> layout, *_ = split({"w": torch.zeros(3)})
    >>> sent, _ = Signs().apply(layout.pack({"w": torch.tensor([2.0, -0.5, 0.0])}), layout, None)
    >>> layout.views(sent)["w"], Signs().size(layout)
    (tensor([ 1., -1.,  0.]), 1)
    """

    remembers: ClassVar[bool] = False  # whether a client keeps a vector from round to round

    @property
    def keeps(self) -> bool:
        """Whether these settings keep a vector with each client, on disk."""
        return self.remembers

    @property
    def sparse(self) -> bool:
        """Whether most elements of what is sent are 0."""
        return False

    @abstractmethod
    def apply(
        self,
        update: Tensor,
        layout: Layout,
        rng: np.random.Generator,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the server receives of a packed update, and what the client keeps if it is accepted.

        `kept` is what it kept last. `update` is not changed; what is not a number stays so.
        """

    @abstractmethod
    def size(self, layout: Layout) -> int:
        """The bytes of one update as it is sent."""


@dataclass(frozen=True, kw_only=True)
class NoTransform:
    """None: updates are sent as they are.

    >>> import torch
    >>> from fedglad.core.layout import split
    >>> NoTransform().size(split({"w": torch.zeros(10)})[0])  # float32
    40
    """

    def size(self, layout: Layout) -> int:
        """The bytes of one update as it is sent."""
        return sum(layout.numels) * layout.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Quantise(Transform):
    """Stochastic quantisation: per tensor q = ⌊L x/s + u⌋, s = max |x|; received is s q/L.

    u is uniform in [0, 1) for each element, so that what is received is x in expectation, and
    L = 2^(bits−1) − 1, so that q fits `bits` bits: 127 for 8. Each tensor is sent as its q and its
    s. No element is off by more than s/L. Alistarh et al. 2017, arXiv:1610.02132.

    Differs from the paper: s is the largest element, not the norm, as its experiments have it, and
    q is counted in whole bits, without entropy coding.

    >>> import numpy as np, torch
    >>> from fedglad.core.layout import split
    >>> layout, *_ = split({"w": torch.zeros(3)})
    >>> update = layout.pack({"w": torch.tensor([-1.0, 0.5, 0.0])})
    >>> sent, _ = Quantise(bits=2).apply(update, layout, np.random.default_rng(1))
    >>> layout.views(sent)["w"]  # 0.5 becomes 0 or 1
    tensor([-1.,  1.,  0.])
    """

    bits: Annotated[int, "of an element, its sign among them"] = 8

    def __post_init__(self) -> None:
        check(self, bits=(2 <= self.bits <= 16, "from 2 to 16"))

    def apply(
        self,
        update: Tensor,
        layout: Layout,
        rng: np.random.Generator,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        sent = torch.zeros_like(update)
        levels = 2 ** (self.bits - 1) - 1
        for start, count in zip(layout.starts, layout.numels, strict=True):
            x, out = update[start : start + count], sent[start : start + count]
            scale = x.abs().max() if count else x.new_zeros(())
            if not bool(scale.isfinite()):
                out.copy_(x)  # the server says what is wrong with it
            elif float(scale):
                for part, made in zip(x.split(CHUNK), out.split(CHUNK), strict=True):
                    u = torch.from_numpy(rng.random(len(part))).to(part.device)
                    q = (part.double() / scale.double()).mul_(levels).add_(u).floor_()
                    q.clamp_(-levels, levels)  # L + u may be rounded to L + 1
                    made.copy_(q.mul_(scale.double() / levels))
        return sent, None

    def size(self, layout: Layout) -> int:
        return sum(-(-n * self.bits // 8) + layout.dtype.itemsize for n in layout.numels if n)


@dataclass(frozen=True, kw_only=True)
class TopK(Transform):
    """Top-k with error feedback: of v = g + e the k largest |v_i| are sent, and e ← v − sent.

    k is `share` of all parameters, of the whole model. e, what was never sent, is kept with each
    client on disk, 0 at first; it stays as it was if the update is not accepted, and moves by as
    much of the way as the server took of the update, where that was cut. Of equal ones the first
    are sent. Stich et al. 2018, arXiv:1809.07599.

    Differs from the paper: e is per client, and waits for its next round (as in Karimireddy et al.
    2019, arXiv:1901.09847). An element is sent as its value and its place, 4 bytes up to 2³²
    parameters. Sparse updates hardly overlap, so GSI is near √r whatever the clients hold.

    >>> import numpy as np, torch
    >>> from fedglad.core.layout import split
    >>> layout, *_ = split({"w": torch.zeros(4)})
    >>> update = layout.pack({"w": torch.tensor([3.0, -4.0, 1.0, 2.0])})
    >>> rng = np.random.default_rng()
    >>> sent, kept = TopK(share=0.25).apply(update, layout, rng)
    >>> layout.views(sent)["w"], layout.views(kept)["w"]
    (tensor([ 0., -4.,  0.,  0.]), tensor([3., 0., 1., 2.]))
    >>> sent, kept = TopK(share=0.25).apply(update, layout, rng, kept)
    >>> layout.views(sent)["w"]  # 3 + 3
    tensor([6., 0., 0., 0.])
    """

    share: Annotated[float, "of all parameters that are sent; at least one is"] = 0.01
    feedback: Annotated[bool, "whether what was not sent is added to the next update"] = True

    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, share=(0 < self.share <= 1, "in (0, 1]"))

    @property
    def keeps(self) -> bool:
        return self.feedback

    @property
    def sparse(self) -> bool:
        return self.share < 0.5

    def count(self, layout: Layout) -> int:
        """k: how many elements are sent."""
        return max(1, math.floor(self.share * sum(layout.numels)))

    def apply(
        self,
        update: Tensor,
        layout: Layout,
        rng: np.random.Generator,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        v = update if kept is None else update + kept
        if not bool(v.isfinite().all()):
            return update, kept  # the server says what is wrong with it
        size, k = v.abs(), self.count(layout)
        size[layout.padding] = -1.0
        least = torch.topk(size, k).values[-1]
        chosen = size > least
        equal = torch.nonzero(size == least).flatten()[: k - int(chosen.sum())]
        chosen[equal] = True
        sent = torch.where(chosen, v, torch.zeros_like(v))
        return sent, v - sent if self.feedback else None

    def size(self, layout: Layout) -> int:
        whole = sum(layout.numels)
        place = 4 if whole <= 2**32 else 8
        return self.count(layout) * (layout.dtype.itemsize + place)


REGISTRY: dict[str, type] = {
    "none": NoTransform,
    "quantise": Quantise,
    "topk": TopK,
}
