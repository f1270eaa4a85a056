"""What a client does in a round, as settings: how it trains, and what a method changes of that.

Most methods correct each minibatch gradient. Others have a loss of their own, compute the gradient
elsewhere, or train in several passes of the loop, of which `workbench.py` has the only one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from fedglad import schedules
from fedglad.core.checks import check
from fedglad.rng import stream

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedglad.clients.local_model import LocalData, LocalModel

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
Memory = dict[str, "Tensor"]
Pair = tuple[Memory, "Tensor | None"]
"""New memory or state, and what goes with it: what a client sends, or by how much θ is shifted."""
Prepare = Callable[["Tensor", bool], "Tensor"]
"""The model's inputs of a batch as it is stored; the flag says whether it is for training."""
Batch = tuple[Any, Any]
"""Inputs and targets of a step, ready for the model."""
Buffers = Mapping[str, "Tensor"]
Local = Annotated[
    Literal["sgd", "sgdm", "adam", "adamw"], "sgd, sgdm, adam or adamw; new every round"
]


PERSONAL = "personal/"
"""Before a tensor's name in a client's memory, where it is one that stays with the client."""

HOOKS = ("loss", "step", "train")
"""What a class may put in the place of a part of the loop, beside `correct`."""


class Trained(NamedTuple):
    """How many steps a client took, and their mean loss.

    >>> Trained(steps=10, loss=0.25).also(Trained(steps=30, loss=0.05))
    Trained(steps=40, loss=0.1)
    """

    steps: int
    loss: float

    def also(self, other: Trained) -> Trained:
        """Both together."""
        steps = self.steps + other.steps
        total = self.steps * self.loss + other.steps * other.loss
        return Trained(steps, total / max(steps, 1))


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
    personal: Annotated[
        str, "names of parameters and buffers that stay with each client: 'head.*, *.norm?.*'"
    ] = ""
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
        **{"amsgrad": False, "shuffle": "epoch", "personal": ""},
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
    # Names of the vectors a client keeps from one of its rounds to the next; see `start`.
    remembers: ClassVar[tuple[str, ...]] = ()
    # Those of them that are the client's own business: of a client whose update the server took
    # in part, they are kept whole, where the others go the same part of their way.
    uncut: ClassVar[tuple[str, ...]] = ()
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

    def at_round(self, t: int) -> Self:
        """The method as it is in round t, for one whose settings change: `replace(self, mu=…)`."""
        return self

    def of_round(self, t: int) -> Self:
        """What the clients of round t are given: `at_round`, with that round's rate as its `lr`."""
        made = self.at_round(t)
        if made.rounds_schedule == "constant":
            return made
        lr = made.lr * schedules.factor(made, t, "rounds_schedule")
        return replace(made, lr=lr, rounds_schedule="constant")

    @property
    def own_hooks(self) -> tuple[str, ...]:
        """What of the local training is the class's own, beside `correct`; and "personal"."""
        own = (name for name in HOOKS if getattr(type(self), name) is not getattr(Plain, name))
        return *own, *(["personal"] if self.has_personal else [])

    @property
    def has_personal(self) -> bool:
        """Whether some parameters or buffers stay with each client."""
        return bool(self.personal)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept with each client from one of its rounds to the next."""
        return bool(self.remembers) or self.has_personal

    def keeps_whole(self, name: str) -> bool:
        """Whether a client keeps this of its memory whole, if its update was cut; see `uncut`."""
        return name.startswith(PERSONAL) or name.partition("/")[0] in self.uncut

    @property
    def tests_own(self) -> bool:
        """Whether each client is tested with a model of its own."""
        return self.has_personal or type(self).personalised is not Plain.personalised

    def personal_names(self, model: nn.Module) -> Collection[str]:
        """The names of a model's parameters and buffers that stay with each client.

        Those that match a pattern of `personal`, in which * is any text, ? one character. Raises
        ValueError for a pattern that matches none.
        """
        names = list(dict(model.named_parameters(remove_duplicate=False))) + list(
            dict(model.named_buffers(remove_duplicate=False))
        )
        found: set[str] = set()
        for pattern in filter(None, map(str.strip, self.personal.split(","))):
            if not (matching := {name for name in names if fnmatchcase(name, pattern)}):
                raise ValueError(
                    f"client.personal: {pattern!r} matches no parameter and no buffer of the "
                    f"model; there are {', '.join(names[:6])}{', …' if names[6:] else ''}"
                )
            found |= matching
        return found

    def personalised(
        self, theta: Tensor, buffers: Buffers, memory: Memory
    ) -> tuple[Tensor, Buffers]:
        """The model that a client is tested with, of the server's and what the client remembers.

        The client's personal parameters are in θ already.
        """
        return theta, buffers

    def start(self, theta: Tensor, zeros: Tensor) -> Memory:
        """What a client remembers before its first round, in which it received θ: zeros."""
        return dict.fromkeys(self.remembers, zeros)

    def train(
        self,
        model: LocalModel,
        data: LocalData,
        theta: Tensor,
        memory: Memory,
        rng: np.random.Generator,
        t: int,
    ) -> Trained:
        """The whole local training of round t: moves `model` from θ, and may put into `memory`.

        By default one pass of the loop. It is `model.fit`, which goes as often as one likes, with
        any method's settings; another loop may go over `data.batches`. What `memory` then has of
        the names in `remembers`, and below them ("name/more"), is kept.
        """
        return model.fit(self, data, theta, memory, rng, t)

    def step(
        self,
        gradient: Callable[[], Tensor],
        model: LocalModel,
        theta: Tensor,
        memory: Memory,
        t: int,
    ) -> Tensor:
        """The loss of a step, whose gradient it leaves in `model.grad`.

        `gradient()` gives the loss of the batch at `model.w`, and puts its gradient into
        `model.grad`. Then come `correct`, clipping and the local optimizer.
        """
        return gradient()

    def loss(
        self, model: LocalModel, batch: Batch, theta: Tensor, memory: Memory, t: int
    ) -> Tensor:
        """The loss of a batch that is differentiated: the task's, `model.loss(batch)`.

        It may also ask for other models, `model.at(theta)`, and for features before the last layer.
        """
        return model.loss(batch)

    def correct(self, grad: Tensor, w: Tensor, theta: Tensor, memory: Memory, sent: Memory) -> None:
        """Changes a minibatch gradient in place, before clipping.

        All are flat vectors. In the batched engine grad, w and what is in memory are matrices with
        a row for each client: write it elementwise, and reduce over the last dimension only.
        """

    def finish(self, delta: Tensor, steps: int, memory: Memory, sent: Memory) -> Pair:
        """The client's proposed new memory, and what it sends beside its update; as `correct`."""
        kept = self.remembers
        return {n: v for n, v in memory.items() if n in kept or n.partition("/")[0] in kept}, None

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
