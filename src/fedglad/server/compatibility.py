"""Which parts of a round cannot be combined: what would mean nothing is refused, and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedglad.adapters import Adapter, Fixed
from fedglad.averages import Average, NoAverage
from fedglad.core.guard import NoGuard
from fedglad.estimators import Estimator, NoEstimator
from fedglad.filters import Filter
from fedglad.optimizers import SGD, Optimizer
from fedglad.privacy import Central
from fedglad.transforms import NoTransform, Transform
from fedglad.trust import NoTrust
from fedglad.weights import Equal, Samples

if TYPE_CHECKING:
    from fedglad.server.server import Server


def refuse(
    adapter: Adapter,
    filter: Filter,
    weighting: Samples,
    *,
    client: Any = None,
    sampler: Any = None,
    server: Optimizer | None = None,
    estimator: Estimator | NoEstimator | None = None,
    average: Average | NoAverage | None = None,
    transform: Transform | NoTransform | None = None,
    engine: Any = None,
) -> None:
    """Raises for a combination that cannot mean anything.

    `server` is the optimizer; `client`, `sampler` and `engine` are the settings of a client method
    (`fedglad.clients`), of a sampler (`fedglad.samplers`) and of an engine, where they are known.
    """
    if sampler is not None:
        if sampler.own_weights and weighting != Samples():
            raise ValueError(
                f"the weights of sampler {_name(sampler)} are part of it, and {_name(weighting)} "
                "would replace them: use weighting.name = samples"
            )
        if sampler.own_weights and filter.robust:
            raise ValueError(
                f"{_name(filter)} ignores weights, and the weights of sampler {_name(sampler)} are "
                "part of it: use sampler.name = uniform, or filter.name = multi-krum"
            )
        if reason := filter.needs(sampler.largest_cohort):
            raise ValueError(reason)
        weighting = sampler.weighting or weighting
    if adapter.compares and filter.leaves_one:
        raise ValueError(
            f"{_name(filter)} leaves one update, so GSI is always 1 and "
            f"{_name(adapter)} has nothing to compare: use MultiKrum with m > 1"
        )
    if filter.robust and (weighting.keeps_updates or not weighting.normalises):
        raise ValueError(
            f"{_name(filter)} ignores weights, so {_name(weighting)} would have no "
            "effect: use Equal or Samples"
        )
    if server is not None and server.reads_out:  # it makes θ anew from its slots in every round
        if not isinstance(average, NoAverage | None):
            raise ValueError(
                f"{_name(server)} keeps an average itself, which is read out as `averaged`, and "
                f"{_name(average)} would be a second one: use average.name = none"
            )
        if adapter.shrinks:
            raise ValueError(
                f"{_name(adapter)} shrinks θ after the step, and {_name(server)} makes θ anew from "
                "what it keeps, so that nothing would be left of it: use server.name = sgd"
            )
    refuse_transform(transform, filter, client)
    if client is not None:
        _refuse_client(client, filter, weighting, server or SGD())
        if engine is not None:
            refuse_training(client, engine)
    if estimator is not None and not isinstance(estimator, NoEstimator):
        if server is not None and server.judges_mean:
            raise ValueError(
                f"{_name(server)} follows the cohort's mean by how much its updates disagree, and "
                f"that says nothing of what {_name(estimator)} puts in its place: use "
                "estimator.name = none, or another server.name"
            )
        refuse_estimator(estimator, filter, weighting, client=client, sampler=sampler)


def _refuse_client(client: Any, filter: Filter, weighting: Samples, server: Optimizer) -> None:
    if client.needs_mean and filter.robust:
        raise ValueError(
            f"{_name(client)} is right for a mean of the updates, and {_name(filter)} takes "
            "another value: use filter.name = multi-krum or none"
        )
    if client.needs_mean and not weighting.normalises:
        raise ValueError(
            f"{_name(client)} is right for a mean of the updates, and the weights of "
            f"{_name(weighting)} do not sum to 1: use another sampler or weighting"
        )
    if client.needs_plain_step and filter.scales:
        raise ValueError(
            f"{_name(client)} moves θ by the whole updates once more, past {_name(filter)}: "
            "use filter.name = multi-krum or none"
        )
    plain = type(server) is SGD and server.lr == 1 and server.schedule == "constant"
    if client.needs_plain_step and not plain:
        raise ValueError(
            f"{_name(client)} sets θ to the mean of the clients' models less its own term, which "
            f"is a step of plain SGD at rate 1, not of {server}: "
            "set server.name=sgd, server.lr=1 and server.schedule=constant"
        )


def needs_updates(*parts: Any) -> bool:
    """Whether one of these parts of a round looks at single updates, so that sums will not do.

    A class counts if its objects look at them, be it in some settings only.

    >>> from fedglad.filters import Filter, Krum
    >>> needs_updates(Filter(), Samples()), needs_updates(Krum(f=1), None)
    (False, True)
    """
    return any(map(_looks_at_updates, parts))


def _looks_at_updates(part: Any) -> bool:
    kind: type = part if isinstance(part, type) else type(part)
    keeps: Any = getattr(part, "keeps_updates", False)
    if isinstance(keeps, property):
        keeps = "keeps_updates" in vars(kind)
    single = issubclass(kind, Estimator | Transform | Central)
    return single or bool(keeps) or bool(getattr(part, "distances", False))


def refuse_training(client: Any, engine: Any) -> None:
    """Raises for local training of an own kind in an engine that has only the usual one."""
    if getattr(engine, "trains_alike", False) and (own := client.own_hooks):
        kinds = {"personal": "personal parameters"}
        parts = [kinds.get(hook, f"a {hook} of its own") for hook in own]
        raise ValueError(
            f"{_name(client)} has {' and '.join(parts)}, and engine.name = "
            f"{_name(engine).lower()} can only correct gradients, with all clients side by side: "
            "use engine.name = local, which can"
        )


def refuse_estimator(
    estimator: Estimator,
    filter: Filter,
    weighting: Samples,
    *,
    client: Any = None,
    sampler: Any = None,
) -> None:
    """Raises if what the server would step by were no estimate of the mean of all clients."""
    name = _name(estimator)
    if not isinstance(estimator, Estimator):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} is not derived from fedglad.estimators.Estimator")
    if filter.robust or (filter.keeps_updates and not filter.needs_trust):
        raise ValueError(
            f"{name} estimates the mean of all clients' updates, and {_name(filter)} takes those "
            "that are like each other: use filter.name = norm-clip, distrust or none"
        )
    if not weighting.unbiased:
        raise ValueError(
            f"{name} estimates the mean of all clients' updates, and {_name(weighting)} weighs "
            "them by what they are, or how often they come: use weighting.name = samples or equal"
        )
    if client is not None and client.needs_mean:
        raise ValueError(
            f"{_name(client)} is right for a step by the mean of the cohort's updates, and {name} "
            "takes another value: use estimator.name = none"
        )
    if sampler is None or not estimator.needs_unbiased or estimator.biased:
        return
    if not sampler.unbiased:
        raise ValueError(
            f"{name} is right for cohorts whose mean is that of all clients in expectation, and "
            f"sampler {_name(sampler)} prefers some: use sampler.name = uniform, estimator.name = "
            "mifa, which asks for no chance, or accept it with estimator.biased = true"
        )
    if sampler.availability in ("markov", "cyclic"):
        raise ValueError(
            f"{name} is right for cohorts drawn anew in every round, and with availability = "
            f"{sampler.availability!r} who can be reached depends on the round before: use "
            "sampler.availability = bernoulli, estimator.name = mifa, which asks for no chance, or "
            "accept it with estimator.biased = true"
        )


def refuse_transform(
    transform: Transform | NoTransform | None, filter: Filter, client: Any = None
) -> None:
    """Raises for a transform of updates that would gain nothing, or leave nothing."""
    if transform is None or isinstance(transform, NoTransform):
        return
    if client is not None and _sends_extra(client):
        raise ValueError(
            f"{_name(client)} sends a second vector beside its update, as long as the model, which "
            f"{_name(transform)} would not shorten: use transform.name = none, or a client.name "
            "that sends its update alone"
        )
    if client is not None and client.has_personal:
        raise ValueError(
            f"{_name(client)} keeps some parameters with each client, and {_name(transform)} "
            "counts the whole model: use transform.name = none, or a client.name and "
            "client.personal that keep nothing back"
        )
    if transform.sparse and filter.robust:
        raise ValueError(
            f"most elements of what {_name(transform)} sends are 0, and {_name(filter)} takes the "
            "middle of each, which would be 0: use filter.name = norm-clip, or transform.name = "
            "quantise"
        )


def refuse_privacy(
    *,
    adapter: Adapter,
    filter: Filter,
    weighting: Samples,
    server: Optimizer,
    estimator: Any = None,
    guard: Any = None,
    trust: Any = None,
    client: Any = None,
    sampler: Any = None,
    transform: Any = None,
    method: Any = None,
    distances: bool = False,
    min_clients: int = 1,
    buffers: Sequence[str] = (),
    validates: bool = False,
) -> None:
    """Raises for whatever reads single updates, so that the ε of their noised mean would be wrong.

    The message has the first reason, and all that is to be set.
    """
    wrong: list[tuple[str, str]] = []

    def unless(good: bool, reason: str, way_out: str) -> None:
        if not good:
            wrong.append((reason, way_out))

    unless(
        type(adapter) in (Adapter, Fixed),
        f"{_name(adapter)} scales the step by what the updates are, which the noise is to hide",
        "adapter.name = none",
    )
    unless(
        type(filter) is Filter,
        f"{_name(filter)} treats a client by what others sent, or clips a second time",
        "filter.name = none",
    )
    unless(
        type(weighting) is Equal,
        f"{_name(weighting)} gives some clients more than the r-th part that the noise is for",
        "weighting.name = equal",
    )
    unless(
        not server.judges_mean,
        f"{_name(server)} steps by how much the updates disagree, which the noise is to hide",
        "another server.name",
    )
    unless(
        not isinstance(estimator, Estimator),
        f"{_name(estimator)} keeps single updates and steps by them again in later rounds",
        "estimator.name = none",
    )
    unless(
        guard is None or isinstance(guard, NoGuard),
        "the guard cuts and rejects a client by what others have sent",
        "guard.name = none",
    )
    unless(
        trust is None or isinstance(trust, NoTrust),
        f"{_name(trust)} judges clients by each other's updates, and keeps those judgements",
        "trust.name = none",
    )
    if client is not None:
        unless(
            client.server is None and not client.remembers,
            f"{_name(client)} sends, or keeps with clients, more than the update that is clipped",
            "client.name = plain or fedprox",
        )
        unless(
            not client.has_personal,
            f"{_name(client)} keeps some parameters with each client, which at the server would be "
            "noise alone, and clients would begin with that",
            "a client.name and client.personal that keep nothing back",
        )
    if transform is not None:
        unless(
            not getattr(transform, "keeps", False),
            f"{_name(transform)} sends later what is left of the updates of earlier rounds",
            "transform.name = none or quantise",
        )
    if sampler is not None:
        unless(
            # Not of a class above it: another `draw` may be anything.
            vars(type(sampler)).get("uniform", False) and sampler.availability == "always",
            "ε is that of cohorts in which every client is as likely as any other",
            "sampler.name = uniform, always available",
        )
        unless(
            sampler.seed != "round",
            "the cohorts of sampler.seed = round are the same in every run, for all to know, and "
            "ε counts on their being secret",
            "sampler.seed = run",
        )
    unless(
        method is None,
        "the method's server half reads what clients send beside their clipped updates",
        "method = None",
    )
    unless(not distances, "distances tell how far single updates are", "distances = False")
    unless(
        min_clients == 1,
        "whether a round is skipped would tell how many updates are good",
        "min_clients = 1",
    )
    unless(
        not buffers,
        f"the model's buffers, {', '.join(map(repr, buffers[:1]))} among them, are averages of "
        "clients' data without noise",
        "a model without them (GroupNorm in the place of BatchNorm)",
    )
    unless(
        not validates,
        "the validation set is made of clients' own samples, and the best round would be chosen by "
        "it without noise",
        "data.validation = 0 and stop_after = 0",
    )
    if wrong:
        (reason, first), *others = wrong
        more = f"; also {', '.join(way_out for _, way_out in others)}" if others else ""
        raise ValueError(
            f"central differential privacy is not what it says with this: {reason}; use "
            f"{first}{more}"
        )


def _sends_extra(client: Any) -> bool:
    return client.server is not None and getattr(client.server, "wants_extra", True)


def refuse_shift(server: Optimizer) -> None:
    """Raises for an optimizer that would undo what a client method's server half adds to θ."""
    if server.reads_out:
        raise ValueError(
            f"the client method moves θ after the step, and {_name(server)} makes θ anew from "
            "what it keeps, so that nothing would be left of it: use optimizer=SGD()"
        )


def refuse_sums(server: "Server") -> None:
    """Raises unless all parts of a server can do with sums of the updates."""
    filter, weighting = server.filter, server.weighting
    if server.privacy:
        raise ValueError(
            f"{_name(server.privacy)} clips each update, and there are only their sums: use "
            "privacy=None, or server.step"
        )
    if isinstance(server.estimator, Estimator):
        raise ValueError(
            f"{_name(server.estimator)} remembers single updates, and there are only their sums: "
            "use estimator=None"
        )
    for part in (filter, weighting):
        if part.keeps_updates:
            raise ValueError(
                f"{type(part).__name__} compares the updates with each other, and there are only "
                f"their sums: use {'filter=None' if part is filter else 'Samples or Equal'}"
            )
    if filter.scales:
        raise ValueError(
            f"{type(filter).__name__} scales each update by its norm, and there are only their "
            "sums: let the clients clip (Flower's fixedclipping_mod), and use filter=None"
        )
    if not weighting.normalises:
        raise ValueError(
            f"the weights of {type(weighting).__name__} do not sum to 1: use Samples or Equal"
        )
    if server.method is not None:
        raise ValueError(
            "a client method's server half needs more than the sums of updates: use method=None"
        )
    if server.distances:
        raise ValueError("distances=True measures every update, and there are only their sums")


def _name(part: Any) -> str:
    return type(part).__name__
