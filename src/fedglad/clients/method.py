"""What a client does in a round, as settings: how it trains, and what a method changes of that.

A method corrects each minibatch gradient; it is not a loop. `workbench.py` has the only loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np

from fedglad import schedules
from fedglad.core.checks import check
from fedglad.rng import stream

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
Memory = dict[str, "Tensor"]
Pair = tuple[Memory, "Tensor | None"]
"""New memory or state, and what goes with it: what a client sends, or by how much θ is shifted."""
Prepare = Callable[["Tensor", bool], "Tensor"]
"""The model's inputs of a batch as it is stored; the flag says whether it is for training."""
Local = Annotated[
    Literal["sgd", "sgdm", "adam", "adamw"], "sgd, sgdm, adam or adamw; new every round"
]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """FedAvg (McMahan et al. 2017): local SGD and nothing else.

    Each step takes the minibatch gradient ∇, and the client sends g_k = θ − θ_k. arXiv:1602.05629.

    >>> Plain(batch_size=16, epochs=5).count(n=40)  # 5 epochs of 3 batches
    15
    """

    optimizer: Local = "sgdm"
    lr: Annotated[float, "the local rate"] = 0.01
    momentum: Annotated[float, "of sgdm"] = 0.9
    betas: Annotated[tuple[float, float], "of adam and adamw"] = (0.9, 0.999)
    eps: Annotated[float, "of adam and adamw"] = 1e-8
    amsgrad: Annotated[bool, "adam and adamw divide by the largest second moment so far"] = False
    weight_decay: Annotated[float, "decoupled for adamw, else added to the gradient"] = 0.0
    batch_size: Annotated[int, "samples a step"] = 64
    epochs: Annotated[int, "passes over the client's data"] = 1
    steps: Annotated[int, "if not 0, so many steps instead of epochs"] = 0
    drop_last: Annotated[bool, "leave out a last incomplete batch, unless it is all there is"] = (
        False
    )
    shuffle: Annotated[
        Literal["epoch", "once"], "a new order every epoch, or one for a client's every round"
    ] = "epoch"
    clip_norm: Annotated[float, "cut the gradient to this norm, after any correction; 0: never"] = (
        0.0
    )
    schedule: Annotated[Literal["constant", "linear"], "constant, or linear to 0 in the round"] = (
        "constant"
    )
    warmup: Annotated[float, "share of the round's steps in which a linear rate rises"] = 0.0
    rounds_schedule: Annotated[str, schedules.SCHEDULE] = "constant"
    over: Annotated[int, schedules.OVER] = 0
    drop: Annotated[float, schedules.DROP] = 0.1

    def __post_init__(self) -> None:
        check(
            self,
            lr=(0 < self.lr < math.inf, "positive and finite"),
            momentum=(0 <= self.momentum < 1, "in [0, 1)"),
            betas=(all(0 <= beta < 1 for beta in self.betas), "in [0, 1)"),
            eps=(0 <= self.eps < math.inf, "0 or more, and finite"),
            weight_decay=(0 <= self.weight_decay < math.inf, "0 or more"),
            batch_size=(self.batch_size >= 1 or self.whole, "1 or more"),
            epochs=1,
            steps=0,
            clip_norm=(self.clip_norm >= 0, "0 (never) or more"),
            warmup=(0 <= self.warmup <= 1, "a share in [0, 1]"),
        )
        schedules.require(self, "rounds_schedule")

    def wrong(self, name: str, why: str) -> ValueError:
        """The error for a setting that cannot be meant."""
        return ValueError(f"{type(self).__name__}({name}={getattr(self, name)!r}): {why}")

    # Fields that are younger than some results, and their defaults, which a run's hash leaves out:
    # those results keep their names.
    added: ClassVar[Mapping[str, Any]] = {
        **{"amsgrad": False, "shuffle": "epoch"},
        **{"rounds_schedule": "constant", "over": 0, "drop": 0.1},
    }
    # Whether a batch is all of the client's samples, whatever `batch_size` says.
    whole: ClassVar[bool] = False
    # Whether the server must take a weighted mean of the updates, with weights of sum 1.
    needs_mean: ClassVar[bool] = False
    # Whether the server must step by just that mean: SGD at rate 1, no update shortened.
    needs_plain_step: ClassVar[bool] = False
    # Fields that are not taken over from another method: its own defaults go with it.
    fixed: ClassVar[Collection[str]] = ()
    # Names of the vectors a client keeps from one of its rounds to the next; zeros at first.
    remembers: ClassVar[tuple[str, ...]] = ()
    # Names of vectors beside those in `memory` for the time of a round; zeros at its start.
    scratch: ClassVar[tuple[str, ...]] = ()
    # Names of the vectors of the server half's state that are sent with θ; zeros at first.
    hears: ClassVar[tuple[str, ...]] = ()
    # The server half, for a method that has one: (mean, extra_sum, count, state) -> state, shift.
    # With one, `finish` must return what the client sends beside its update, unless the half has
    # `wants_extra = False`.
    server: ClassVar[Any] = None
    # Whether a memory is completed by `settle`, once the server's half has seen the round.
    settles: ClassVar[bool] = False

    def among(self, clients: int) -> Self:
        """The same for a population of so many clients, where a method counts them."""
        return self

    def within(self, rounds: int) -> Self:
        """The same for a run of so many rounds, in none of which the rate may be 0."""
        if self.rounds_schedule == "constant":
            return self
        made = schedules.within(self, rounds, "rounds_schedule")
        for t in range(rounds):
            if not 0 < made.lr * schedules.factor(made, t, "rounds_schedule") < math.inf:
                way_out = f"set over={rounds}, or 0, for the whole run"
                raise made.wrong("over", f"clients would learn nothing in round {t}: {way_out}")
        return made

    def of_round(self, t: int) -> Self:
        """The same with the rate of round t as its `lr`."""
        if self.rounds_schedule == "constant":
            return self
        lr = self.lr * schedules.factor(self, t, "rounds_schedule")
        return replace(self, lr=lr, rounds_schedule="constant")

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        """Changes a minibatch gradient in place, before clipping.

        All are flat vectors. In the batched engine grad, w and what is in memory are matrices with
        a row for each client: write it elementwise, and reduce over the last dimension only.
        """

    def finish(self, delta: Tensor, steps: int, memory: Memory, sent: Memory) -> Pair:
        """The client's proposed new memory, and what it sends beside its update; as `correct`."""
        return {name: memory[name] for name in self.remembers}, None

    def settle(self, memory: Memory, state: Memory) -> Memory:
        """The memory of an accepted client, given the state of the server's half."""
        return memory

    def batches(self, n: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The indices of each batch, in an order that is drawn every epoch, or once."""
        size, per_epoch = min(self.batch_size, n), self._per_epoch(n)
        for step in range(self.steps or self.epochs * per_epoch):
            at = step % per_epoch
            if at == 0 and (step == 0 or self.shuffle == "epoch"):
                order = rng.permutation(n)
            yield order[at * size : (at + 1) * size]  # pyright: ignore[reportPossiblyUnboundVariable]

    def order(self, seed: int, client: int) -> np.random.Generator | None:
        """What a client's batches are drawn from, if that is the same in every round."""
        return stream(seed, "order", client) if self.shuffle == "once" else None

    def count(self, n: int) -> int:
        """How many local steps a client with n samples takes."""
        return self.steps or self.epochs * self._per_epoch(n)

    def _per_epoch(self, n: int) -> int:
        size = min(self.batch_size, n)
        return n // size if self.drop_last else -(-n // size)

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step within the round."""
        if self.schedule == "constant":
            return self.lr
        warm = math.ceil(self.warmup * total)  # whole steps, as in transformers
        return self.lr * (step / warm if step < warm else (total - step) / (total - warm))


@dataclass(frozen=True, kw_only=True)
class Counting(Plain):
    """What methods have in common whose server half divides by the number of all clients."""

    clients: Annotated[int, "N; 0: as many as the data has"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, clients=(self.clients >= 0, "0 (as many as the data has) or more"))

    def among(self, clients: int) -> Self:
        if self.clients not in (0, clients):
            raise self.wrong("clients", f"there are {clients} in the data, leave it at 0")
        return replace(self, clients=clients)

    @property
    def population(self) -> int:
        """N, once it is known."""
        if not self.clients:
            raise self.wrong("clients", "the server half must know how many there are")
        return self.clients


def require_plain_sgd(client: Plain, why: str) -> None:
    """Raises unless the way a client goes is exactly lr times the sum of its gradients."""
    for name, value in {"optimizer": "sgd", "schedule": "constant", "clip_norm": 0}.items():
        if getattr(client, name) != value:
            raise client.wrong(name, f"must be {value!r}: {why}")
