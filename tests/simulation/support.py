"""Client methods that no library has: each shows one thing that an engine must do for a method.

In the batched engine what they are given are matrices of a row a client, and the same lines hold.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedglad.clients.method import Memory, Plain
from fedglad.clients.scaffold import Scaffold


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
