"""Server optimizers: from the mean difference ḡ to the next θ.

Each steps in place on a stretch of the flat vectors that shares one factor s: first moments see
s·ḡ, second moments ḡ. t counts the rounds that stepped before this one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from fedglad import schedules
from fedglad.core.checks import check

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.records import Statistics

Slots = dict[str, "Tensor"]
Numbers = Mapping[str, float]
Step = Callable[["Tensor", "Tensor", float, Slots, int], None]
FORM = (
    "authors: FedGLAD's code, bias-corrected, β .9 and .999, ε 1e-8; "
    "reddi: FedOpt's paper, not corrected, β .9 and .99, ε 1e-3"
)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """What all have in common: a rate, and as their state model-sized vectors (slots) and numbers.

    | schedule | the rate of round t |
    |---|---|
    | "constant" | η |
    | "linear" | η (1 − t/over), and 0 from round `over` on |
    | "cosine" | η (1 + cos(π t/over))/2, and 0 from round `over` on |
    | "step" | η drop^⌊t/over⌋ |
    | "exponential" | η drop^(t/over) |

    >>> class Sign(Optimizer):  # an own one: θ ← θ − η s sign(ḡ)
    ...     def step(self, theta, mean, s, slots, t):
    ...         theta.sub_(mean.sign(), alpha=self.rate(t) * s)
    >>> Sign(schedule="step", over=10, drop=0.5).rate(25)  # dropped twice
    0.25
    """

    reads_out: ClassVar[str | None] = None  # the slot that is deployed, as `Server.averaged`
    distance_from: ClassVar[str | None] = None  # a slot: ‖θ − slot‖² and ‖θ‖² are in Statistics

    judges_mean: ClassVar[bool] = False  # whether it is right only for a step by the cohort's mean

    lr: Annotated[float, "the server's rate"] = 1.0
    schedule: Annotated[str, schedules.SCHEDULE] = "constant"
    over: Annotated[int, schedules.OVER] = 0
    drop: Annotated[float, schedules.DROP] = 0.1

    def __post_init__(self) -> None:
        check(self, lr=(0 < self.lr <= 1e15, "positive and finite, up to 1e15"))
        schedules.require(self)

    def within(self, rounds: int) -> Self:
        """The same for a run of so many rounds: the end of a rate that falls to 0 at no set one."""
        return schedules.within(self, rounds)

    def rate(self, t: int) -> float:
        """The rate of round t: what the step is multiplied by; moments do not see it."""
        return self.lr * schedules.factor(self, t)

    def slots(self) -> Mapping[str, float | None]:
        """The slots it keeps, and the value each starts with; None: that of the model."""
        return {}

    def numbers(self) -> Numbers:
        """The numbers it keeps of the whole model, and the value each starts with."""
        return {}

    def prepare(self, stats: Statistics, numbers: Numbers, t: int) -> tuple[Step, Numbers]:
        """The step of a round, and the numbers after it, for a rule that looks at the cohort.

        With an estimator `mean_sq` is ‖ĝ‖², of what the step is by; the rest is the cohort's.
        Called once a round; the step is then called for stretches of the model.
        """
        return self.step, numbers

    @abstractmethod
    def step(self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int) -> None:
        """Moves theta and the slots in place by the mean ḡ, which it may overwrite, times s."""


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """FedAvg with a server rate (McMahan et al. 2017, arXiv:1602.05629): θ ← θ − η s ḡ.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, optimizer=SGD(lr=0.5))
    >>> record = server.step([{"w": torch.tensor([g])} for g in (1.0, 3.0)])
    >>> server.state["w"]  # −0.5 · (1 + 3)/2
    tensor([-1.])
    """

    def step(self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int) -> None:
        theta.sub_(mean, alpha=self.rate(t) * s)


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """FedAvgM (Hsu et al. 2019): m ← μm + (1−d) s ḡ, θ ← θ − ηm; Nesterov: θ − η(s ḡ + μm).

    With a constant local rate it is SlowMo too. arXiv:1909.06335.
    Differs from FedGLAD's Alg. 2: undampened (d = 0) by default, as in its published code.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(2)}, optimizer=Momentum(lr=0.5, momentum=0.9))
    >>> for _ in range(2):
    ...     record = server.step([{"w": torch.tensor([1.0, 2.0])}])
    >>> server.state["w"]  # −0.5 · (1 + 1.9), twice that
    tensor([-1.4500, -2.9000])
    """

    momentum: Annotated[float, "μ"] = 0.9
    dampening: Annotated[float, "d"] = 0.0
    nesterov: Annotated[bool, "Nesterov's form"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.momentum > 0 and self.dampening == 0
        check(
            self,
            momentum=(0 <= self.momentum < 1, "in [0, 1)"),
            dampening=(0 <= self.dampening < 1, "in [0, 1)"),
            nesterov=(plain or not self.nesterov, "without dampening, momentum > 0"),
        )

    def slots(self) -> dict[str, float]:
        return {"m": 0.0}

    def step(self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int) -> None:
        m = slots["m"].mul_(self.momentum).add_(mean, alpha=(1 - self.dampening) * s)
        rate = self.rate(t)
        if self.nesterov:
            theta.sub_(mean, alpha=rate * s).sub_(m, alpha=rate * self.momentum)
        else:
            theta.sub_(m, alpha=rate)


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """FedAdam: v ← β₂v + (1−β₂)ḡ², m ← β₁m + (1−β₁) s ḡ, θ ← θ − η c m/(√v + ε).

    | form | β | ε | v₀ | c |
    |---|---|---|---|---|
    | "authors" (FedGLAD's published code) | .9, .999 | 1e-8 | 0 | √(1−β₂^{t+1}) / (1−β₁^{t+1}) |
    | "reddi" (Reddi et al. 2021, Alg. 2, arXiv:2003.00295) | .9, .99 | 1e-3 | ε² | 1 |

    `betas` and `eps` override the form's own. torch.optim.Adam places ε differently.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(2)}, optimizer=Adam(lr=0.1))
    >>> record = server.step([{"w": torch.tensor([1.0, -20.0])}])
    >>> server.state["w"]  # the first step is as long as the rate, for small and large
    tensor([-0.1000,  0.1000])
    """

    lr: Annotated[float, "the server's rate"] = 0.01
    betas: Annotated[tuple[float, float] | None, "β₁ and β₂, instead of the form's"] = None
    eps: Annotated[float | None, "ε, instead of the form's"] = None
    form: Annotated[Literal["authors", "reddi"], FORM] = "authors"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            form=(self.form in ("authors", "reddi"), "'authors' or 'reddi'"),
            betas=(len(self.betas or (0, 0)) == 2, "two numbers"),
        )
        *betas, eps = self._settings
        for k, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"{type(self).__name__}(betas[{k}]={beta!r}): must be in [0, 1)")
        check(self, eps=(1e-30 <= eps <= 1e15, "positive, from 1e-30 to 1e15"))

    @property
    def _settings(self) -> tuple[float, float, float]:
        betas, eps = ((0.9, 0.999), 1e-8) if self.form == "authors" else ((0.9, 0.99), 1e-3)
        beta1, beta2 = self.betas or betas
        return beta1, beta2, eps if self.eps is None else self.eps

    def slots(self) -> dict[str, float]:
        return {"m": 0.0, "v": 0.0 if self.form == "authors" else self._settings[2] ** 2}

    def second_moment(self, v: Tensor, mean: Tensor, beta2: float) -> None:
        """Moves v by the square of the mean, in place."""
        v.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)

    def step(self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int) -> None:
        import torch

        beta1, beta2, eps = self._settings
        rate = self.rate(t)
        if self.form == "authors":
            rate *= math.sqrt(1 - beta2 ** (t + 1)) / (1 - beta1 ** (t + 1))
        if type(self) is Adam and theta.device.type == "cpu" and s > 0:
            pull = beta1 + (1 - beta1) * s
            if min((1 - beta1) * s / pull, 1 - beta2) > 1e-9:
                # One pass by torch's kernel, which knows no s: with the pull p, β₁m + (1−β₁) s ḡ
                # is p (β m + (1−β) ḡ) for β = β₁/p.
                torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
                    [theta],
                    [mean],
                    [slots["m"]],
                    [slots["v"]],
                    [],
                    [_long_ago()],
                    lr=rate * pull,
                    beta1=beta1 / pull,
                    beta2=beta2,
                    weight_decay=0.0,
                    eps=eps,
                    amsgrad=False,
                    maximize=False,
                )
                if pull != 1:
                    slots["m"].mul_(pull)
                return
        self.second_moment(slots["v"], mean, beta2)
        m = slots["m"].mul_(beta1).add_(mean, alpha=(1 - beta1) * s)
        root = torch.sqrt(slots["v"], out=mean).add_(eps)  # fresh memory would cost page faults
        theta.addcdiv_(m, root, value=-rate)


@cache
def _long_ago() -> Tensor:
    """A step so late that the bias corrections are 1."""
    import torch

    return torch.tensor(1e15)


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    """FedYogi: Adam with v ← v − (1−β₂) ḡ² sign(v − ḡ²) (Reddi et al. 2021, arXiv:2003.00295).

    >>> import fedglad, torch
    >>> yogi = Yogi(lr=1.0, betas=(0.5, 0.5), eps=1.0)
    >>> server = fedglad.Server({"w": torch.zeros(1)}, optimizer=yogi)
    >>> record = server.step([{"w": torch.tensor([2.0])}])
    >>> server.state["w"]  # −1/(√(1 + 2) + 1)
    tensor([-0.3660])
    """

    form: Annotated[Literal["authors", "reddi"], FORM] = "reddi"

    def second_moment(self, v: Tensor, mean: Tensor, beta2: float) -> None:
        square = mean.square()
        v.addcmul_(square, (v - square).sign(), value=beta2 - 1)


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """FedAdagrad (Reddi et al. 2021): v ← v + ḡ², θ ← θ − η s ḡ/(√v + ε), v₀ = ε².

    With `beta1` > 0 the step takes m ← β₁m + (1−β₁) s ḡ instead of s ḡ. arXiv:2003.00295.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, optimizer=Adagrad(lr=1.0, eps=1.0))
    >>> record = server.step([{"w": torch.tensor([1.0])}])
    >>> server.state["w"]  # −1/(√(1 + 1) + 1)
    tensor([-0.4142])
    """

    lr: Annotated[float, "the server's rate"] = 0.01
    beta1: Annotated[float, "β₁ of the first moment; 0: none"] = 0.0
    eps: Annotated[float, "ε, added to the root; v starts as its square"] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            beta1=(0 <= self.beta1 < 1, "in [0, 1)"),
            eps=(1e-30 <= self.eps <= 1e15, "positive, from 1e-30 to 1e15"),
        )

    def slots(self) -> dict[str, float]:
        return {"v": self.eps**2, **({"m": 0.0} if self.beta1 else {})}

    def step(self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int) -> None:
        slots["v"].addcmul_(mean, mean)
        root = slots["v"].sqrt().add_(self.eps)
        if self.beta1:
            m = slots["m"].mul_(self.beta1).add_(mean, alpha=(1 - self.beta1) * s)
            theta.addcdiv_(m, root, value=-self.rate(t))
        else:
            theta.addcdiv_(mean, root, value=-self.rate(t) * s)


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Optimizer):
    """Schedule-Free SGD: z ← z − η s ḡ, x ← x + (z − x)/(t+1), θ = (1−β)z + βx; x is deployed.

    Clients train on θ, which lies between z, the plain sequence of steps, and x, the mean of all z:
    a constant rate does what one that falls to 0 would, for any number of rounds. x is
    `Server.averaged`, and is tested as an average is, so there is no `[average]` beside it. Keeps
    two models. Defazio et al. 2024, arXiv:2405.15682.

    Buffers go with x as they are newest: clients measured them at θ, which for a β near 1 is near
    x; their mean over all rounds would lag behind both. θ_0 itself is not in the mean, as in the
    authors' code.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, optimizer=ScheduleFree(beta=0.5))
    >>> for g in (2.0, 4.0):  # z is −2 and −6, their mean −2 and −4
    ...     record = server.step([{"w": torch.tensor([g])}])
    >>> server.averaged["w"], server.state["w"]  # x, and half-way from z to x
    (tensor([-4.]), tensor([-5.]))
    """

    reads_out: ClassVar[str | None] = "x"

    beta: Annotated[float, "β: where clients train, from z (0) to x (1)"] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, beta=(0 <= self.beta < 1, "in [0, 1)"))

    def slots(self) -> Mapping[str, float | None]:
        return {"z": None, "x": None}

    def step(self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int) -> None:
        z = slots["z"].sub_(mean, alpha=self.rate(t) * s)
        x = slots["x"].lerp_(z, 1 / (t + 1))
        theta.copy_(z).lerp_(x, self.beta)


@dataclass(frozen=True, kw_only=True)
class DoG(Optimizer):
    """Distance over gradients: θ ← θ − η d/√G s ḡ, d = max ‖θ_i − θ_0‖, G = Σ ‖ḡ_i‖², i ≤ t.

    A rate that needs no tuning: how far one has come, over the root of what all updates add up to.
    d is at least r_ε = reach (1 + ‖θ_0‖), the length of the first step; η is 1 in the paper. The
    norms are of the whole model, before the step, of ḡ without s. Keeps one model, θ_0. It is meant
    to be read out as an average: `[average]` with name = "poly" and gamma = 8. Ivgi et al. 2023,
    arXiv:2302.12022.

    Differs from the paper: `reach` is 0.01, not 1e-6 or 1e-4, for a run has tens of rounds and not
    thousands of steps. As long as all updates are zero, nothing moves.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(1)}, optimizer=DoG(reach=0.5))
    >>> for _ in range(2):
    ...     record = server.step([{"w": torch.tensor([3.0])}])
    >>> server.state["w"]  # −0.5/3 · 3, then −0.5/√18 · 3 more
    tensor([-0.8536])
    """

    distance_from: ClassVar[str | None] = "start"

    reach: Annotated[float, "r_ε/(1 + ‖θ_0‖): how far the first step goes"] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, reach=(1e-15 <= self.reach <= 1e6, "from 1e-15 to 1e6"))

    def slots(self) -> Mapping[str, float | None]:
        return {"start": None}

    def numbers(self) -> Numbers:
        return {"distance": 0.0, "sum_sq": 0.0}

    def prepare(self, stats: Statistics, numbers: Numbers, t: int) -> tuple[Step, Numbers]:
        least = self.reach * (1 + math.sqrt(_whole(stats.model_sq)))
        distance = max(numbers["distance"] or least, math.sqrt(_whole(stats.moved_sq)))
        total = numbers["sum_sq"] + _whole(stats.mean_sq)
        ratio = distance / math.sqrt(total) if total else 0.0
        return partial(self.step, ratio=ratio), {"distance": distance, "sum_sq": total}

    def step(
        self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int, ratio: float = 1.0
    ) -> None:
        theta.sub_(mean, alpha=min(self.rate(t) * ratio, 1e15) * s)


@dataclass(frozen=True, kw_only=True)
class FedEve(Optimizer):
    """FedEve: a momentum whose weight is a Kalman gain, m ← m + K(s ḡ − m), θ ← θ − η m.

        Q = ‖ḡ‖²/r,  R = Σ‖g_k − ḡ‖²/r²,  σ ← σ + Q,  K = σ/(σ + R),  σ ← (1−K)σ

    A cohort that agrees (R small against Q) is followed, one that does not is distrusted in favour
    of the rounds before. m and σ start as 0; η is 1 in the paper. Keeps one model, m.
    Shen et al. 2025, arXiv:2508.14539.

    Differs from the paper: it divides Q and R by the number of parameters, which cancels in K. For
    unequal weights 1/r is Σw², and Σ‖g_k − ḡ‖²/r is Σw‖g_k‖² − ‖ḡ‖²: this form streams. K = 1
    where R = 0, as for one client, or updates that are all zero.

    >>> import fedglad, torch
    >>> server = fedglad.Server({"w": torch.zeros(2)}, optimizer=FedEve())
    >>> record = server.step([{"w": torch.tensor([1.0, g])} for g in (1.0, -1.0)])
    >>> server.state["w"]  # Q = 1/2, R = 2/4, K = 1/2
    tensor([-0.5000,  0.0000])
    """

    judges_mean: ClassVar[bool] = True

    def slots(self) -> Mapping[str, float | None]:
        return {"m": 0.0}

    def numbers(self) -> Numbers:
        return {"sigma": 0.0}

    def prepare(self, stats: Statistics, numbers: Numbers, t: int) -> tuple[Step, Numbers]:
        total = math.fsum(stats.weights)
        one_over_r = math.fsum(w * w for w in stats.weights) / total**2
        mean_sq = _whole(stats.mean_sq) / total**2
        spread = max(0.0, _whole(stats.sum_sq) / total - mean_sq)
        sigma, noise = numbers["sigma"] + one_over_r * mean_sq, one_over_r * spread
        gain = sigma / (sigma + noise) if noise else 1.0
        return partial(self.step, gain=gain), {"sigma": (1 - gain) * sigma}

    def step(
        self, theta: Tensor, mean: Tensor, s: float, slots: Slots, t: int, gain: float = 1.0
    ) -> None:
        m = slots["m"].mul_(1 - gain).add_(mean, alpha=gain * s)
        theta.sub_(m, alpha=self.rate(t))


def _whole(per_tensor: Mapping[str, float] | None) -> float:
    """A squared norm of the whole model."""
    if per_tensor is None:
        raise ValueError("a statistic the optimizer needs was not measured: see Statistics")
    return math.fsum(per_tensor.values())


REGISTRY = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
    "adagrad": Adagrad,
    "yogi": Yogi,
    "schedule-free": ScheduleFree,
    "dog": DoG,
    "fedeve": FedEve,
}
