"""Which parts of a round cannot be combined: what would mean nothing is refused, and why."""

from typing import TYPE_CHECKING, Any

from fedglad.adapters import Adapter
from fedglad.averages import Average, NoAverage
from fedglad.estimators import Estimator, NoEstimator
from fedglad.filters import Filter
from fedglad.optimizers import SGD, Optimizer
from fedglad.transforms import NoTransform, Transform
from fedglad.weights import Samples

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
) -> None:
    """Raises for a combination that cannot mean anything.

    `server` is the optimizer; `client` and `sampler` are the settings of a client method
    (`fedglad.clients`) and of a sampler (`fedglad.samplers`), where they are known.
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
    if transform.sparse and filter.robust:
        raise ValueError(
            f"most elements of what {_name(transform)} sends are 0, and {_name(filter)} takes the "
            "middle of each, which would be 0: use filter.name = norm-clip, or transform.name = "
            "quantise"
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
