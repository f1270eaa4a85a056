"""Client methods for the tests: real ones, small enough to be worked out by hand.

Each is a correction. In the batched engine what is given are
matrices of a row a client, and the same lines hold.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedglad.clients.method import Memory, Plain

Local = Annotated[Literal["sgd", "sgdm", "adam", "adamw"], "the local optimizer"]


@dataclass(frozen=True, kw_only=True)
class FedProx(Plain):
    """∇ + μ(w − θ) (Li et al. 2020): no memory, no server half."""

    mu: Annotated[float, "the pull back to θ"] = 0.1

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.add_(w - theta, alpha=self.mu)


@dataclass(frozen=True, kw_only=True)
class Scaffold(Plain):
    """∇ − c_k + c (Karimireddy et al. 2020), second variant.

    c_k⁺ = c_k − c + (θ − w_k)/(K lr), and c += (1/N) Σ (c_k⁺ − c_k).
    """

    optimizer: Local = "sgd"
    clients: Annotated[int, "N"] = 50

    remembers: ClassVar[tuple[str, ...]] = ("c_k",)
    hears: ClassVar[tuple[str, ...]] = ("c",)

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.add_(sent["c"] - memory["c_k"])

    def finish(
        self, delta: Tensor, steps: int, memory: Memory, sent: Memory
    ) -> tuple[Memory, Tensor | None]:
        new = memory["c_k"] - sent["c"] + delta / (steps * self.lr)
        return {"c_k": new}, new - memory["c_k"]

    def server(  # type: ignore[override]
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> tuple[Memory, Tensor | None]:
        return {"c": state.get("c", torch.zeros_like(mean)) + extra_sum / self.clients}, None


@dataclass(frozen=True, kw_only=True)
class FedDyn(Plain):
    """∇ − λ_k + α(w − θ) (Acar et al. 2021); the server shifts θ by −h/α.

    λ_k −= α(w_k − θ), h −= (α/N) Σ (w_k − θ), so that h is always the mean of all λ_k.
    """

    optimizer: Local = "sgd"
    alpha: Annotated[float, "of the quadratic term"] = 0.1
    clients: Annotated[int, "N"] = 50

    remembers: ClassVar[tuple[str, ...]] = ("lambda_k",)

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.add_(w - theta, alpha=self.alpha).sub_(memory["lambda_k"])

    def finish(
        self, delta: Tensor, steps: int, memory: Memory, sent: Memory
    ) -> tuple[Memory, Tensor | None]:
        return {"lambda_k": memory["lambda_k"] + self.alpha * delta}, -delta

    def server(  # type: ignore[override]
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> tuple[Memory, Tensor | None]:
        before = state.get("h", torch.zeros_like(mean))
        h = before - (self.alpha / self.clients) * extra_sum
        return {"h": h}, -h / self.alpha


@dataclass(frozen=True, kw_only=True)
class Tally(Plain):
    """Remembers how often the client took part, in every element; trains as Plain does."""

    remembers: ClassVar[tuple[str, ...]] = ("rounds",)

    def finish(
        self, delta: Tensor, steps: int, memory: Memory, sent: Memory
    ) -> tuple[Memory, Tensor | None]:
        return {"rounds": memory["rounds"] + 1}, None


@dataclass(frozen=True, kw_only=True)
class Pair(Plain):
    """Remembers two vectors and, as Plain.finish does, gives back what it was given."""

    remembers: ClassVar[tuple[str, ...]] = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Echo(Scaffold):
    """Scaffold that keeps, beside c_k, the c it last heard, which is the same for all clients."""

    remembers: ClassVar[tuple[str, ...]] = ("c_k", "heard")

    def finish(
        self, delta: Tensor, steps: int, memory: Memory, sent: Memory
    ) -> tuple[Memory, Tensor | None]:
        kept, extra = super().finish(delta, steps, memory, sent)
        return {**kept, "heard": sent["c"]}, extra


@dataclass(frozen=True, kw_only=True)
class Sends(Plain):
    """Sends its update once more beside it, the very tensor; the server half adds all of them."""

    def finish(
        self, delta: Tensor, steps: int, memory: Memory, sent: Memory
    ) -> tuple[Memory, Tensor | None]:
        return memory, delta

    def server(  # type: ignore[override]
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> tuple[Memory, Tensor | None]:
        return {"sum": state.get("sum", 0) + extra_sum}, None


@dataclass(frozen=True, kw_only=True)
class Late(Sends):
    """Hears a vector that its server half, which has a state from the first, has only later."""

    hears: ClassVar[tuple[str, ...]] = ("drift",)

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        grad.add_(sent["drift"], alpha=0.3)

    def server(
        self, mean: Tensor, extra_sum: Tensor, count: int, state: Memory
    ) -> tuple[Memory, Tensor | None]:
        later = {"drift": extra_sum / count} if state else {}
        return {**super().server(mean, extra_sum, count, state)[0], **later}, None
