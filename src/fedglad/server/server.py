"""The server: one round is validate ▸ filter ▸ aggregate ▸ estimate ▸ adapt ▸ step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from os import PathLike
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedglad import adapters, averages, estimators, filters, optimizers, weights
from fedglad import privacy as private
from fedglad.adapters import Adapter, Factors
from fedglad.averages import Average, NoAverage
from fedglad.core import checkpoint
from fedglad.core.aggregate import Sum, norms_sq, products
from fedglad.core.checkpoint import CheckpointError
from fedglad.core.guard import Guard, Limits
from fedglad.core.layout import Block, as_tensor, frozen, rounded, split, stretches
from fedglad.core.memory import Memories
from fedglad.core.sampling import Coordinates
from fedglad.core.threads import share
from fedglad.core.validate import as_number
from fedglad.estimators import Estimator, NoEstimator
from fedglad.filters import Filter
from fedglad.optimizers import SGD, Optimizer, Step
from fedglad.privacy import Central, NoPrivacy
from fedglad.records import Record, Statistics, Update
from fedglad.server.averaged import Averaged
from fedglad.server.compatibility import (
    needs_updates,
    refuse,
    refuse_privacy,
    refuse_shift,
    refuse_sums,
)
from fedglad.server.estimated import Estimated, Taking
from fedglad.server.from_sums import Sums, take_sums
from fedglad.server.intake import Intake, Outweighed, Skipped
from fedglad.server.private import take_private
from fedglad.server.rule import Rule
from fedglad.server.scores import Scores
from fedglad.trust import Kept, Trust
from fedglad.weights import Samples, WeightingState

REGISTRIES: dict[str, dict[str, type]] = {
    "optimizer": optimizers.REGISTRY,
    "adapter": adapters.REGISTRY,
    "filter": filters.REGISTRY,
    "weighting": weights.REGISTRY,
    "estimator": estimators.REGISTRY,
    "average": averages.REGISTRY,
}

YOUNGER = {"estimator": "NoEstimator", "average": "NoAverage"}
"""Parts that states of before do not have, and what they stand for then."""


class Method(Protocol):
    """The server's half of a client method (SCAFFOLD's c, FedDyn's h).

    Called between aggregate and adapt with packed vectors: the mean ḡ, the sum of the clients'
    `extra`, how many there were, and its own state (named packed vectors, {} at first). Returns the
    new state and a shift that is added to θ after the step, or None.

    | optional member | meaning |
    |---|---|
    | `wants_extra` | False: clients send no `extra`, and it is not called; True by default |
    | `lengths(steps) -> a` | for clients that send updates divided by a (FedNova): the mean is |
    |                       | multiplied by Σ w a |

    >>> import fedglad, torch
    >>> def halved(mean, extra_sum, count, state):  # what clients send moves θ as well
    ...     return state, -0.5 * extra_sum / count
    >>> server = Server({"w": torch.zeros(1)}, method=halved)
    >>> record = server.step([fedglad.Update({"w": torch.ones(1)}, extra={"w": torch.ones(1)})])
    >>> server.state["w"]
    tensor([-1.5000])
    """

    def __call__(
        self, mean: Tensor, extra_sum: Tensor, count: int, state: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]: ...


class Server:
    """Holds the global model and moves it by the clients' updates, round by round.

    >>> import torch
    >>> server = Server(torch.nn.Linear(2, 1))
    >>> g = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    >>> server.step([g, g]).gsi
    {'weight': 1.0, 'bias': 1.0}

    | argument | meaning |
    |---|---|
    | `model` | a module, or a state_dict (torch or numpy); it is copied, never changed |
    | `optimizer` | `SGD(lr=1.0)`, that is FedAvg, unless given |
    | `adapter`, `filter`, `weighting` | none, none, and by the updates' own weights |
    | `estimator` | of the mean of all clients' updates, to step by instead of the cohort's |
    | `average` | of the models after every round, to be read as `averaged`; none unless given |
    | `method` | the server's half of a client method |
    | `buffers` | names that are buffers, where they cannot be known from a plain dict |
    | `min_clients` | with fewer accepted updates the round is skipped |
    | `guard` | rejects what is out of all proportion; None to switch it off |
    | `distances` | measures each update's distance from their mean; keeps all of them for it |
    | `trust` | scores and flags each client in the record; None to switch it off |
    | `privacy` | noise on the mean of clipped updates: central differential privacy |

    `params` and `state` are views of the server's memory where the dtype allows: a step changes
    them, and writing into them changes the model. Clone what must not change.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        *,
        optimizer: Optimizer | None = None,
        adapter: Adapter | None = None,
        filter: Filter | None = None,
        weighting: Samples | None = None,
        estimator: Estimator | None = None,
        average: Average | None = None,
        method: Method | None = None,
        buffers: Iterable[str] | None = None,
        min_clients: int = 1,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        distances: bool = False,
        trust: Trust | None = Trust(),  # noqa: B008 - frozen
        privacy: Central | NoPrivacy | None = None,
    ) -> None:
        if min_clients < 1:
            raise ValueError(f"min_clients={min_clients!r}: a round needs at least one client")
        self.optimizer = optimizer or SGD()
        self.adapter = adapter or Adapter()
        self.filter = filter or Filter()
        self.weighting = weighting or Samples()
        self.estimator = estimator or NoEstimator()
        self.average = average or NoAverage()
        self.method = method
        self.min_clients = min_clients
        self.guard = guard
        self.distances = distances
        self.trust = trust
        self.privacy = privacy if isinstance(privacy, Central) else None
        refuse(
            self.adapter,
            self.filter,
            self.weighting,
            server=self.optimizer,
            estimator=self.estimator,
            average=self.average,
        )
        if self.filter.needs_trust and not trust:
            raise ValueError(
                f"{self.filter} leaves out whom Trust flags, and trust=None flags nobody"
            )
        self.optimizer.rate(0)  # raises for a schedule without an end

        self.layout, parameters, named_buffers = split(model, buffers)
        constants = frozen(model) if isinstance(model, nn.Module) else {}
        self._constants = {name: value.detach() for name, value in constants.items()}
        if self.privacy:
            refuse_privacy(
                adapter=self.adapter,
                filter=self.filter,
                weighting=self.weighting,
                server=self.optimizer,
                estimator=self.estimator,
                guard=guard,
                trust=trust,
                method=method,
                distances=distances,
                min_clients=min_clients,
                buffers=list(named_buffers),
            )
            self.privacy.require()
        self._releases: dict[tuple[float, int, int], int] = {}
        self.round = 0
        self._theta = self.layout.pack(parameters)
        self._buffers = {name: value.clone() for name, value in named_buffers.items()}
        self._total = Sum(self.layout)
        self._slots = {
            name: self._theta.clone() if value is None else self.layout.zeros().fill_(value)
            for name, value in self.optimizer.slots().items()
        }
        self._numbers = dict(self.optimizer.numbers())
        self._groups = self.adapter.group(
            dict(zip(self.layout.names, self.layout.numels, strict=True))
        )
        self._adapter_state = self.adapter.start(self._groups)
        self._direction = self.layout.zeros() if self.adapter.direction is not None else None
        self._averaged = self._new_average()
        self._estimated = self._new_memory()
        self._limits = Limits(guard)
        self._kept = Kept()
        self._coordinates = Coordinates(self.layout, trust.coordinates) if trust else None
        self._weighting_state: WeightingState = {}
        self._method_state: dict[str, Tensor] = {}
        # A method may be a plain function, without the two members that `Method` calls optional.
        self._wants_extra = method is not None and getattr(method, "wants_extra", True)
        self._lengths = getattr(method, "lengths", None)
        if self._estimated and self._lengths:
            raise ValueError(
                f"{self.estimator} remembers updates, and those of this method are of another "
                "length in every round: use estimator=None"
            )

    def __repr__(self) -> str:
        parts = f"{self.optimizer}, {self.adapter}, {self.filter}, {self.weighting}"
        return f"Server({len(self.layout.names)} tensors, round {self.round}, {parts})"

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters, in their own dtypes."""
        return self._named(self._theta)

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers, as `model.load_state_dict` takes them.

        Those parameters of a module that are not trained are the module's own.
        """
        return {**self._constants, **self._whole(self._theta, self._buffers)}

    @property
    def trained(self) -> dict[str, Tensor]:
        """The same without the parameters that are not trained: what clients get and send."""
        return self._whole(self._theta, self._buffers)

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The average of the models so far, as `model.load_state_dict` takes it.

        Before the first round that steps it is the model itself. An optimizer may keep one itself
        (`ScheduleFree`): then it is that, with the newest buffers.
        """
        return {**self._constants, **self._whole(*self._read_out)}

    @property
    def trained_average(self) -> dict[str, Tensor]:
        """The same without the parameters that are not trained."""
        return self._whole(*self._read_out)

    @property
    def has_average(self) -> bool:
        """Whether there is an average to read, of `average` or of the optimizer itself."""
        return self._averaged is not None or self.optimizer.reads_out is not None

    @property
    def packed(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The parameters as clients have them, one flat vector, and the buffers."""
        return self._received(self._theta), self._buffers

    @property
    def packed_average(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of the average."""
        flat, buffers = self._read_out
        return self._received(flat), buffers

    @property
    def _has_own_parts(self) -> bool:
        """Whether a class of somebody's own steps θ: it need not expect several threads."""
        known = {*optimizers.REGISTRY.values(), *averages.REGISTRY.values()}
        return not {type(self.optimizer), type(self.average)} <= known

    @property
    def _read_out(self) -> tuple[Tensor, dict[str, Tensor]]:
        if self.optimizer.reads_out is not None:
            return self._slots[self.optimizer.reads_out], self._buffers
        if self._averaged is None:
            raise ValueError("this server keeps no average: give it one, Server(average=EMA())")
        return self._averaged.x, self._averaged.buffers

    def _new_average(self) -> Averaged | None:
        if isinstance(self.average, NoAverage):
            return None
        return Averaged(self.average, self.layout, self._theta, self._buffers)

    def _new_memory(self) -> Estimated | None:
        if not isinstance(self.estimator, Estimator):
            return None
        return Estimated(self.estimator.fit(self.layout), self.layout)

    def keep_updates_in(self, store: Memories, t: int) -> None:
        """Has the estimator keep its updates there, numbered from round t on.

        Who gives the store also saves it: `save` then leaves the updates out.
        """
        if self._estimated:
            self._estimated.keep_in(store, t)

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        views = self.layout.views(flat)
        dtypes = zip(views.items(), self.layout.dtypes, strict=True)
        return {name: rounded(view, dtype) for (name, view), dtype in dtypes}

    def _whole(self, flat: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        params = self._named(flat)
        tied = {alias: params[name] for alias, name in self.layout.aliases.items()}
        return {**params, **tied, **buffers}

    @property
    def epsilon(self) -> float | None:
        """ε of all rounds so far, at the δ of `privacy`; None without it."""
        return self.privacy and private.epsilon(self._releases, self.privacy.delta)

    @property
    def sent(self) -> dict[str, Tensor]:
        """What clients are sent beside the parameters: the state of the method's server half."""
        return self._method_state

    def step(
        self,
        updates: Iterable[Any],
        *,
        population: int | None = None,
        importance: Mapping[Any, float] | None = None,
        cohort: int | None = None,
        noise: np.random.Generator | None = None,
    ) -> Record:
        """One round: consumes the updates in their order and moves the model.

        Each is an `Update` or a plain {name: θ − θ_k}. `population` is the number N of clients
        there are, for adapters, weightings and estimators that use it. Whatever is wrong with an
        update is in the record; if the updates' iterator raises, nothing has changed.

        `importance` is for an estimator and a cohort whose weights are those of its draw: what each
        of its clients counts in the mean of all, 1 on average, as N n_k/n.

        With `privacy`, `cohort` is how many clients were drawn, of which some may have failed, and
        `noise` what the noise is drawn from; without it, a generator that nobody can foresee.
        """
        if isinstance(updates, Update | Mapping | Tensor):
            raise TypeError(
                f"step takes an iterable of updates, got one {type(updates).__name__}: "
                "put it in a list"
            )
        if self.privacy:
            return self._private_step(self.privacy, updates, population, cohort, noise)
        scores = None
        if self.trust and self._coordinates:
            scores = Scores(self.trust, self._coordinates, self._kept)
        taking = self._estimated and Taking(self._estimated, population, importance)
        intake = self.intake(self._total, scores, taking, population)
        try:
            return self._advance(intake, intake.take(updates), population)
        except Skipped as reason:
            if isinstance(reason, Outweighed):
                self._limits = intake.limits.next()
            return Record("skipped", str(reason), intake.entries)
        finally:
            if taking is not None:
                taking.drop()

    def _private_step(
        self,
        privacy: Central,
        updates: Iterable[Any],
        population: int | None,
        cohort: int | None,
        noise: np.random.Generator | None,
    ) -> Record:
        """`step` with noise; what the record has of the updates as a whole is left out of it."""
        if population is None or cohort is None or not 1 <= cohort <= population:
            raise ValueError(
                f"{privacy} must know r and N, got cohort={cohort}, population={population}: "
                "server.step(updates, cohort=r, population=N)"
            )
        key = privacy.noise, cohort, population
        releases = {**self._releases, key: self._releases.get(key, 0) + 1}
        epsilon = private.epsilon(releases, privacy.delta)
        intake = self.intake(self._total)
        rng = np.random.default_rng() if noise is None else noise
        stats = take_private(intake, updates, privacy, cohort, rng)
        record = self._advance(intake, stats, population)
        self._releases = releases
        return Record(
            record.status,
            clients=record.clients,
            train_loss=record.train_loss,
            epsilon=epsilon,
        )

    def step_sums(
        self,
        sums: Sums,
        *,
        population: int | None = None,
        clients: list[dict[str, Any]] | None = None,
    ) -> Record:
        """One round from sums alone: the factors and the step of `step`, and no update seen.

        `clients` is what is known of them, for the record: `Collector.entries`. The round is
        skipped if the sums are not finite, hold too few updates, break the guard, or cannot be
        those of any updates, because somebody's report is a lie: W·Σw‖g‖² < ‖Σwg‖². The guard
        compares the root of the mean of ‖g‖² and the mean weight with those of past rounds.
        Raises if a part of the server needs the updates themselves.
        """
        refuse_sums(self)
        entries = [] if clients is None else clients
        intake = self.intake(self._total)
        try:
            record = self._advance(intake, take_sums(sums, intake), population)
        except Skipped as reason:
            if isinstance(reason, Outweighed):
                self._limits = intake.limits.next()
            rejected = [entry["rejected"] for entry in entries if "rejected" in entry]
            why = f"; the first rejected: {rejected[0]}" if rejected else ""
            return Record("skipped", f"{reason}{why}", entries)
        return replace(record, clients=entries, train_loss=as_number(sums.loss))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the state and the settings to one file, atomically."""
        checkpoint.write(path, *self._snapshot())

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: nn.Module | Mapping[str, Any], **given: Any
    ) -> Self:
        """The saved server, for a model of the same layout.

        Settings come from the file. What a file cannot hold (your own classes, a function for
        `groups`, a `method`) is given again: `Server.load(path, model, adapter=MyRule())`.
        """
        tensors, meta = checkpoint.read(path)
        with checkpoint.reading(str(path)):
            for role, registry in REGISTRIES.items():
                if role not in given and (role not in YOUNGER or role in meta):
                    settings = meta[role]["settings"]
                    if settings is None:
                        raise CheckpointError(
                            f"{path} was saved with an own {role} ({meta[role]['class']}): "
                            f"pass it again, Server.load(path, model, {role}=...)"
                        )
                    given[role] = checkpoint.build(settings, registry)
            given.setdefault("min_clients", checkpoint.whole_number(meta["min_clients"]))
            given.setdefault("guard", meta["guard"] and Guard(**meta["guard"]))
            if "privacy" in meta and "privacy" not in given:
                given["privacy"] = Central(**meta["privacy"]["settings"])
                given.setdefault("trust", None)
            names = [name for name, *_, kind in meta["layout"] if kind == "buffer"]
        known: dict[str, Any] = {"buffers": names, **given}
        try:
            server = cls(model, **known)
        except (ValueError, TypeError):  # another model: what is below names the first difference
            with checkpoint.reading(str(path)):
                server = cls(model, **given)
        server.load_state_dict({**meta, "tensors": tensors})
        return server

    def state_dict(self) -> dict[str, Any]:
        """Everything that a round changes, copied: JSON types, and `tensors` by name."""
        tensors, meta = self._snapshot()
        return {**meta, "tensors": {name: value.clone() for name, value in tensors.items()}}

    def put(self, model: Mapping[str, Any]) -> bool:
        """Goes on from another model of the same form, in place; whether it is another.

        Names that the server does not have are not looked at, and its other state stays.
        """
        there, new = self._tensors(average=False), dict[str, Tensor]()
        for name, value in model.items():
            tensor = as_tensor(value)
            for part in (f"params/{name}", f"buffers/{name}"):
                if part in there and tensor.shape != there[part].shape:
                    shapes = f"{tuple(tensor.shape)} where {tuple(there[part].shape)} was"
                    raise ValueError(f"{name!r} has shape {shapes}")
                if part in there:
                    new[part] = tensor
        sent = self.trained
        parts = [(part, part.partition("/")[2]) for part in new]
        changed = [
            part
            for part, name in parts
            if not torch.equal(sent[name], new[part].to(sent[name].device, sent[name].dtype))
        ]
        for part in changed:
            there[part].copy_(new[part])
        return bool(changed)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state_dict of a server of the same make; anything else changes nothing."""
        with checkpoint.reading("the state"):  # all of it, before anything is changed
            self._require_same_make(saved)
            tensors = saved["tensors"]
            method_state = {
                key: self.layout.pack({n: tensors[f"method/{key}/{n}"] for n in self.layout.names})
                for key in _method_keys(tensors)
            }
            done = checkpoint.whole_number(saved["round"])
            adapter_state = {k: np.array(v) for k, v in saved["adapter"]["state"].items()}
            for name, array in adapter_state.items():
                if array.dtype.kind not in "biuf":
                    raise CheckpointError(f"the adapter's {name!r} does not hold numbers")
            limits = Limits.of(self.guard, saved["gate"])
            kept = Kept()
            if self._coordinates and "trust/samples" in tensors:
                samples = tensors["trust/samples"].numpy()
                if samples.shape[1:] == self._coordinates.flat.shape:  # of the same settings
                    kept = Kept.of(saved["trust"], samples)
            weighting = saved["weighting"]["state"].items()
            weighting_state = self.weighting.restored(
                {key: checkpoint.numbers(values) for key, values in weighting}
            )
            given = saved["optimizer"].get("numbers", {})
            if given.keys() != self._numbers.keys():
                ours = [*self._numbers]
                raise CheckpointError(f"the optimizer's numbers are {[*given]}, not {ours}")
            numbers = {name: checkpoint.finite(value) for name, value in given.items()}
            began = "average" in saved and "count" in saved["average"]
            count = checkpoint.whole_number(saved["average"]["count"]) if began else 0
            releases = self._released(saved)
            memory = self._new_memory()
            if self._estimated and "apart" in saved.get("estimator", {}):
                memory = self._estimated.restored(tensors, saved["estimator"])
        for name, view in self._tensors(average=began).items():
            view.copy_(tensors[name])
        if self._averaged and not began:
            self._averaged = self._new_average()
        elif self._averaged:
            self._averaged.count = count
        self.round, self._limits, self._kept = done, limits, kept
        self._estimated, self._releases = memory, releases
        self._method_state, self._adapter_state = method_state, adapter_state
        self._weighting_state, self._numbers = weighting_state, numbers

    def intake(
        self,
        total: Sum,
        scores: Scores | None = None,
        taking: Taking | None = None,
        population: int | None = None,
    ) -> Intake:
        """What takes in the next round's updates, and adds them to `total`."""
        return Intake(
            layout=self.layout,
            filter=self.filter,
            weighting=self.weighting,
            weighting_state=self._weighting_state,
            min_clients=self.min_clients,
            wants_extra=self._wants_extra,
            lengths=self._lengths,
            wants_distances=self.distances,
            base=self._received(self._theta),
            base_buffers=self._buffers,
            limits=self._limits.copy(),
            round=self.round,
            population=population,
            scores=scores,
            taking=taking,
            once=self.privacy is not None,
            model_norm=self._model_norm(),
            total=total,
        )

    def rule(self, weights: Mapping[int, float] | None = None) -> Rule | None:
        """What it takes to add up a part of the next round elsewhere; None if that cannot be.

        `weights` are those of the cohort's clients, where a sampler gives them.
        """
        if needs_updates(self.filter, self.weighting, self.estimator, self.privacy):
            return None
        if self.distances:
            return None
        return Rule(
            filter=self.filter,
            weighting=self.weighting,
            weighting_state=self._weighting_state if self.weighting.needs_client else {},
            wants_extra=self._wants_extra,
            wants_steps=self._lengths is not None,
            guard=self.guard,
            usual=self._limits.usual,
            model_norm=self._model_norm(),
            round=self.round,
            trust=self.trust,
            weights=weights,
        )

    def _model_norm(self) -> float:
        """‖θ‖, as long as no norm of an update is known."""
        if "norm" in self._limits.usual:
            return 0.0
        return math.sqrt(float(norms_sq(self.layout, self._theta).sum()))

    def _advance(self, intake: Intake, stats: Statistics, population: int | None) -> Record:
        """The rest of a round, from its numbers and the mean, which is in `_total`, to the record.

        Raises Skipped before anything has changed.
        """
        layout, mean = self.layout, self._total.flat
        direction = model_sq = moved_sq = None
        if self._direction is not None:
            direction = layout.named(products(layout, mean, self._direction))
        if self.adapter.needs_model or self.optimizer.distance_from:
            model_sq = layout.named(norms_sq(layout, self._theta))
        if self.optimizer.distance_from:
            moved = self._theta - self._slots[self.optimizer.distance_from]
            moved_sq = layout.named(norms_sq(layout, moved))
        stats = replace(
            stats, N=population, direction=direction, model_sq=model_sq, moved_sq=moved_sq
        )
        method_state, shift = self._method_state, None
        if self.method is not None and intake.extra is not None:
            count = len(intake.accepted)
            method_state, shift = self.method(mean, intake.extra.flat, count, method_state)
        if shift is not None:
            refuse_shift(self.optimizer)
        factors, adapter_state = self.adapter.adapt(
            stats, self._groups, self._adapter_state, self.round
        )
        _require_factors(self.adapter, factors.scale, len(self._groups.labels))
        if not np.isfinite(factors.scale).all():
            raise Skipped(f"{self.adapter} gave a factor that is not finite")
        estimate = self._estimate(intake, shift)
        seen = stats
        if estimate is not None and type(self.optimizer).prepare is not Optimizer.prepare:
            seen = replace(stats, mean_sq=layout.named(norms_sq(layout, estimate)))
        step, numbers = self.optimizer.prepare(seen, self._numbers, self.round)

        if self._direction is not None and self.adapter.direction is not None:
            self._direction.lerp_(mean, 1 - self.adapter.direction)
        if intake.taking is not None and estimate is not None:
            intake.taking.commit()
            mean.copy_(estimate)
        self._move(stats, factors, shift, step)
        self._numbers = dict(numbers)
        self._buffers.update(intake.new_buffers())
        if self._averaged:
            self._averaged.finish(self._buffers)
        self._limits = intake.limits.next()
        self._kept = intake.scores.kept if intake.scores else self._kept
        self._weighting_state = intake.weighting_state
        self._method_state = method_state
        self._adapter_state = adapter_state
        self.round += 1
        return self._record(intake, stats, factors)

    def _estimate(self, intake: Intake, shift: Tensor | None) -> Tensor | None:
        """What the estimator makes of the mean; None without one."""
        if intake.taking is None:
            return None
        if shift is not None:
            raise ValueError(
                f"the method moves θ by the cohort's updates, past {self.estimator}: use "
                "estimator=None, or a method that returns no shift"
            )
        try:
            return intake.taking.estimate(self._total.flat, intake.accepted, self.filter)
        except ArithmeticError as error:
            raise Skipped(str(error)) from None

    def _move(self, stats: Statistics, factors: Factors, shift: Tensor | None, step: Step) -> None:
        """The optimizer's step, block by block in the cache."""
        mean = self._total.flat
        scale = factors.scale[self._groups.index].tolist()
        shrink = None
        if factors.shrink is not None:
            moved = [sq > 0 for sq in stats.sum_sq.values()]  # a frozen tensor stays
            shrink = np.where(moved, factors.shrink[self._groups.index], 1.0).tolist()

        def one(block: Block) -> None:
            for span, s in stretches(block, scale):
                slots = {name: slot[span] for name, slot in self._slots.items()}
                step(self._theta[span], mean[span], s, slots, self.round)
            if shrink is not None:
                for span, s in stretches(block, shrink):
                    self._theta[span].mul_(s)
            if shift is not None:
                self._theta[block.span] += shift[block.span]
            if self._averaged:
                self._averaged.follow(self._theta, block.span)

        share(self.layout.blocks, lambda: one, alone=self._has_own_parts)

    def _record(self, intake: Intake, stats: Statistics, factors: Factors) -> Record:
        labels, gsi_all = self._groups.labels, stats.gsi_all
        unfiltered = intake.gsi_unfiltered
        return Record(
            "stepped",
            clients=intake.entries,
            gsi=dict(zip(labels, factors.gsi.tolist(), strict=True)),
            baseline={n: b for n, b in zip(labels, factors.baseline.tolist(), strict=True) if b},
            scale=dict(zip(labels, factors.scale.tolist(), strict=True)),
            gsi_all=gsi_all,
            gsi_unfiltered=gsi_all if unfiltered is None else unfiltered,
            train_loss=intake.mean_loss(),
            statistics=stats,
            distances=intake.distances,
        )

    def _received(self, flat: Tensor) -> Tensor:
        """A model as clients have it: rounded to each parameter's own dtype."""
        return flat if self.layout.exact else self.layout.pack(self._named(flat))

    def _tensors(self, *, average: bool = True) -> dict[str, Tensor]:
        """Every tensor of the state as a named live view, the method's apart."""
        flats = {"params": self._theta, **{f"slots/{n}": slot for n, slot in self._slots.items()}}
        if self._direction is not None:
            flats["direction"] = self._direction
        views = self.layout.views_of(flats)
        views |= {f"buffers/{name}": value for name, value in self._buffers.items()}
        return views | (self._averaged.tensors() if self._averaged and average else {})

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        method = {f"method/{key}": flat for key, flat in self._method_state.items()}
        adapter = {name: values.tolist() for name, values in self._adapter_state.items()}
        meta: dict[str, Any] = {
            "version": checkpoint.VERSION,
            "layout": self.layout.describe(),
            **({"aliases": self.layout.aliases} if self.layout.aliases else {}),
            "round": self.round,
            "min_clients": self.min_clients,
            "guard": self.guard and asdict(self.guard),
            "gate": self._limits.usual,
            "trust": self._kept.to_json(),
            **{
                role: {
                    "class": type(getattr(self, role)).__name__,
                    "settings": checkpoint.settings(getattr(self, role), registry),
                }
                for role, registry in REGISTRIES.items()
            },
        }
        if self._numbers:
            meta["optimizer"] |= {"numbers": self._numbers}
        meta["adapter"] |= {"groups": list(self._groups.labels), "state": adapter}
        meta["weighting"] |= {"state": self._weighting_state}
        if self._averaged:
            meta["average"] |= {"count": self._averaged.count}
        if self.privacy:
            releases = [[*key, rounds] for key, rounds in self._releases.items()]
            meta["privacy"] = {"settings": asdict(self.privacy), "releases": releases}
        remembered: dict[str, Tensor] = {}
        if self._estimated:
            meta["estimator"] |= self._estimated.described()
            remembered = self._estimated.tensors()
        samples = self._kept.samples
        kept = {"trust/samples": torch.from_numpy(samples)} if samples.size else {}
        return {**self._tensors(), **self.layout.views_of(method), **kept, **remembered}, meta

    def _released(self, saved: Mapping[str, Any]) -> dict[tuple[float, int, int], int]:
        """The rounds of which a state says that their noised means were released."""
        if ("privacy" in saved) != (self.privacy is not None):
            with_or_not = "with" if "privacy" in saved else "without"
            raise CheckpointError(
                f"the state was saved {with_or_not} privacy, and its ε would not be known: this "
                f"server has privacy={self.privacy}"
            )
        whole, releases = checkpoint.whole_number, dict[tuple[float, int, int], int]()
        for noise, cohort, population, rounds in saved.get("privacy", {}).get("releases", []):
            key = Central(noise=checkpoint.finite(noise)).noise, whole(cohort), whole(population)
            if not 1 <= key[1] <= key[2]:
                raise ValueError(f"a cohort of {cohort} cannot be drawn from {population} clients")
            releases[key] = whole(rounds)
        return releases

    def _require_same_make(self, saved: Mapping[str, Any]) -> None:
        if saved.get("version") != checkpoint.VERSION:
            version = f"version {saved.get('version')!r}"
            raise CheckpointError(
                f"the state has {version}, this fedglad reads {checkpoint.VERSION}"
            )
        for key in ("layout", "tensors", "round", "gate", "optimizer", "adapter", "weighting"):
            if key not in saved:
                raise CheckpointError(f"the state has no {key!r}")
        checkpoint.require_same_layout(saved["layout"], self.layout.describe())
        for role in ("optimizer", "adapter", "weighting", *YOUNGER):
            ours = type(getattr(self, role)).__name__
            none = YOUNGER.get(role, ours)
            theirs = saved.get(role, {"class": none})["class"]
            if theirs not in (none, ours):
                raise CheckpointError(
                    f"the state was saved with {role} {theirs}, this server has {ours}"
                )
        averaged = saved.get("average", {}).get("class") == type(self.average).__name__
        if tuple(saved["adapter"]["groups"]) != self._groups.labels:
            raise CheckpointError(
                f"the state was saved with other groups: {saved['adapter']['groups'][:3]} ... "
                f"where this server has {list(self._groups.labels[:3])} ..."
            )
        method = {f"method/{key}": self._theta for key in _method_keys(saved["tensors"])}
        tensors = self._tensors(average=averaged) | self.layout.views_of(method)
        checkpoint.require_same_tensors(saved["tensors"], tensors)
        theirs = {name: len(values) for name, values in saved["adapter"]["state"].items()}
        ours = {name: len(values) for name, values in self._adapter_state.items()}
        if theirs != ours:
            raise CheckpointError(f"the adapter's state is {theirs}, not {ours}")
        if self.method is None and method:
            raise CheckpointError(
                "the state has a client method's vectors: give this server its method="
            )


def _method_keys(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the vectors that a client method's server half keeps."""
    names = (name for name in tensors if name.startswith("method/"))
    return [*dict.fromkeys(name.split("/", 2)[1] for name in names)]


def _require_factors(adapter: Adapter, scale: Any, groups: int) -> None:
    """Raises ValueError for what an adapter of a user's own gave, if it is no number a group."""
    if isinstance(scale, np.ndarray) and scale.shape == (groups,) and scale.dtype.kind in "fiu":
        return
    given = f"a {type(scale).__name__}"
    if isinstance(scale, np.ndarray):
        given = f"an array of {scale.dtype} of the shape {scale.shape}"
    raise ValueError(
        f"{type(adapter).__name__} gave {given} for the factors: it must be a NumPy vector with "
        f"one number for each of the {groups} groups"
    )
