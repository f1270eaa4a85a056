"""The experiments of the paper by name, and one of ours that tells a gain from a smaller rate."""

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fedglad.studies.paper import published, settings
from fedglad.studies.paper.cells import Cell, Experiment, PaperError, cell, named
from fedglad.studies.paper.settings import ALPHAS, BILSTM, DATA, GAMMAS

WITHOUT_AND_WITH = (False, True)
EXPLORED = ("cifar10", "20news")
AVERAGED = ("FedAvg", "FedAvgM")
OWN_SEEDS = "the paper's seeds are other random draws than ours: only the differences compare"
NOT_IN_PAPER = "not in the paper; it costs no run of its own"


def _main(alpha: float, *names: str, extra: Mapping[str, Any] | None = None) -> Iterator[Cell]:
    for data in names or DATA:
        for method in ("FedAvg", "FedProx", "FedAvgM", "FedAdam"):
            for glad in WITHOUT_AND_WITH:
                value = published.MAIN[alpha].of(method, glad, data)
                yield cell(data, method, glad, alpha=alpha, published=value, extra=extra)


def _scaffold() -> Iterator[Cell]:
    for data in ("20news", "agnews", "mnist"):
        extra = {"client.epochs": settings.SCAFFOLD_EPOCHS} if DATA[data].images else {}
        for alpha in ALPHAS:
            for glad in WITHOUT_AND_WITH:
                value = published.SCAFFOLD.of("SCAFFOLD", glad, data, alpha)
                yield cell(
                    data,
                    "SCAFFOLD",
                    glad,
                    alpha=alpha,
                    published=value,
                    detail=f"α = {alpha}",
                    extra=extra,
                )


def _bilstm() -> Iterator[Cell]:
    for data, recipe in BILSTM.items():
        preset = f"{data}-bilstm"
        own: dict[str, Any] = {
            "client.optimizer": recipe.optimizer,
            "client.lr": recipe.lr,
            "client.batch_size": recipe.batch_size,
            "client.epochs": recipe.epochs,
            "client.clip_norm": recipe.clip_norm,
        }
        value = published.BILSTM.of("Centralized", False, data)
        label = f"{DATA[data].title} BiLSTM centralised"
        yield replace(_alone(data, value, own), label=label, preset=preset)
        for method in AVERAGED:
            for glad in WITHOUT_AND_WITH:
                extra = {**own, "server.lr": recipe.server_lr[method], "rounds": recipe.rounds}
                told = cell(
                    data,
                    method,
                    glad,
                    detail="BiLSTM",
                    published=published.BILSTM.of(method, glad, data),
                    extra=extra | ({"adapter.gamma": recipe.gamma} if glad else {}),
                )
                yield replace(told, preset=preset)


def _alone(data: str, value: published.Value, extra: Mapping[str, Any] | None = None) -> Cell:
    """Centralised training: one client with all samples, an epoch a round."""
    overrides = {
        "data.partition": "centralised",
        "server.name": "sgd",
        "server.lr": 1.0,
        "adapter.name": "none",
        "client.epochs": 1,
        "rounds": settings.CENTRALISED_EPOCHS[data],
    }
    return Cell(
        label=f"{DATA[data].title} centralised",
        data=data,
        preset=data,
        overrides={**(extra or {}), **overrides},
        published=value,
        ours=settings.UNTOLD_EPOCHS,
    )


def _explored(of: published.Published, key: str, columns: Mapping[Any, str]) -> Iterator[Cell]:
    """FedAvg and FedAvgM with another sampler."""
    for data in EXPLORED:
        for column, words in columns.items():
            for method in AVERAGED:
                for glad in WITHOUT_AND_WITH:
                    main = (key, column) == ("sampler.clients_per_round", settings.COHORT)
                    yield cell(
                        data,
                        method,
                        glad,
                        detail=words,
                        published=of.of(data, method, glad, column),
                        extra={key: column},
                        ours="" if main else settings.RETUNED,
                    )


def _epochs() -> Iterator[Cell]:
    for data in ("cifar10", "mnist"):
        for epochs in (10, 20):
            for method in AVERAGED:
                for glad in WITHOUT_AND_WITH:
                    yield cell(
                        data,
                        method,
                        glad,
                        detail=f"E = {epochs}",
                        published=published.EPOCHS.of(method, glad, data, epochs),
                        extra={"client.epochs": epochs},
                    )


def _seeds() -> Iterator[Cell]:
    for alpha in ALPHAS:
        for data in DATA:
            for method in AVERAGED:
                for glad in WITHOUT_AND_WITH:
                    values = [
                        published.SEEDS[alpha].of(data, method, glad, seed).mean
                        for seed in settings.SEEDS
                    ]
                    yield cell(
                        data,
                        method,
                        glad,
                        alpha=alpha,
                        detail=f"α = {alpha}",
                        published=published.MAIN[alpha].of(method, glad, data),
                        by_seed=tuple(values),
                    )


def _gamma() -> Iterator[Cell]:
    for data in EXPLORED:
        for method in AVERAGED:
            for gamma in GAMMAS:
                # γ = 0 is no adaptation, bit for bit: the run of the main table.
                own = {"adapter.gamma": gamma} if gamma else {}
                known = gamma in (0, settings.GAMMA)
                words = "γ = ∞" if math.isinf(gamma) else f"γ = {gamma:g}"
                yield replace(
                    cell(data, method, gamma > 0, extra=own),
                    label=f"{named(data, method)}, {words}",
                    baseline=f"{named(data, method)}, γ = 0" if gamma else None,
                    published=published.MAIN[0.1].of(method, gamma > 0, data) if known else None,
                    ours="" if known or math.isinf(gamma) else settings.UNTOLD_GAMMAS,
                    x=gamma,
                )


def _groups() -> Iterator[Cell]:
    kinds = {"all": "universal", "layer": "layer-wise", "tensor": "group-wise"}
    for data in EXPLORED:
        for method in AVERAGED:
            value = published.MAIN[0.1].of(method, False, data)
            yield cell(data, method, False, published=value)
            for groups, words in kinds.items():
                value = published.MAIN[0.1].of(method, True, data)
                yield replace(
                    cell(data, method, True, extra={"adapter.groups": groups}),
                    label=f"{named(data, method)} + FedGLAD, {words}",
                    published=value if groups == "tensor" else None,
                )


def _bad_round() -> Iterator[Cell]:
    extra = {
        "sampler.name": "scripted",
        "sampler.cohorts": {str(settings.BAD_ROUND): list(settings.BAD_COHORT)},
    }
    for glad in WITHOUT_AND_WITH:
        yield cell("mnist", "FedAvg", glad, extra=extra, seeds=(1,), ours=settings.UNTOLD_COHORT)


def _plain(*names: str) -> Iterator[Cell]:
    """FedAvg of the main table, one seed; on MNIST it is ours."""
    for data in names:
        ours = "" if data in EXPLORED else NOT_IN_PAPER
        yield cell(data, "FedAvg", False, seeds=(1,), ours=ours)


def _norm_ratio() -> Iterator[Cell]:
    for data in EXPLORED:
        for alpha in ALPHAS:
            for epochs in (1, 3, 5):
                yield cell(
                    data,
                    "FedAvg",
                    False,
                    alpha=alpha,
                    detail=f"α = {alpha}, E = {epochs}",
                    published=published.NORM_RATIO.of(data, alpha, epochs),
                    extra={"client.epochs": epochs},
                    seeds=(1,),
                )
    yield replace(*_plain("mnist"), label="MNIST FedAvg, α = 0.1, E = 5")


def _similarity() -> Iterator[Cell]:
    first, second = _plain("cifar10", "mnist")
    yield replace(first, published=published.SIMILARITY)
    yield second


def _controls() -> Iterator[Cell]:
    plain, glad = (
        cell("mnist", "FedAvg", glad, published=published.MAIN[0.1].of("FedAvg", glad, "mnist"))
        for glad in WITHOUT_AND_WITH
    )
    yield plain
    yield glad
    ours = {"baseline": plain.label, "published": None, "ours": "not in the paper"}
    pooled = {**plain.overrides, "adapter.name": "pooled"}
    yield replace(plain, label=f"{plain.label} + pooled", overrides=pooled, **ours)
    smaller = {**plain.overrides, "server.lr": 0.8}
    yield replace(plain, label=f"{plain.label}, server rate 0.8", overrides=smaller, **ours)


FIGURE = "a figure: its source has no numbers"
_ALL = (
    Experiment(
        name="main",
        about="four methods with and without FedGLAD, four data sets, α = 0.1",
        where="Table 1",
        cells=tuple(_main(0.1)),
    ),
    Experiment(
        name="main-alpha1",
        about="the same with milder skew, α = 1.0: FedGLAD should gain less",
        where="Table 7",
        cells=tuple(_main(1.0)),
    ),
    Experiment(
        name="scaffold",
        about="SCAFFOLD with and without FedGLAD; E = 1 on images",
        where="Table 8",
        cells=tuple(_scaffold()),
        notes=("on CIFAR-10 the paper's SCAFFOLD did not converge: it has no cell",),
    ),
    Experiment(
        name="bilstm",
        about="a model that is not pre-trained; γ = 0.01 and 200 rounds on 20NewsGroups",
        where="Tables 9, 17",
        cells=tuple(_bilstm()),
    ),
    Experiment(
        name="centralised",
        about="all samples in one place: what federated training is measured against",
        where="Table 6",
        cells=tuple(_alone(data, published.CENTRALISED.of(data)) for data in DATA),
        notes=("a round is an epoch; the local optimizer's momentum starts anew in each",),
    ),
    Experiment(
        name="ratios",
        about="5, 10 and 20 % of the clients a round: FedGLAD should gain most with few",
        where="Table 2",
        cells=tuple(
            _explored(
                published.RATIOS,
                "sampler.clients_per_round",
                {5: "5 %", 10: "10 %", 20: "20 %"},
            )
        ),
    ),
    Experiment(
        name="strategies",
        about="with other samplers: multinomial (MD) and AdaFL",
        where="Table 3",
        cells=tuple(
            _explored(published.STRATEGIES, "sampler.name", {"md": "MD", "adafl": "AdaFL"})
        ),
        notes=(
            "MD: a client drawn twice trains once with twice the weight, the authors' twice",
            "AdaFL: cohorts depend on the training, so the two methods meet other cohorts",
        ),
    ),
    Experiment(
        name="epochs",
        about="10 and 20 local epochs",
        where="Table 10",
        cells=tuple(_epochs()),
    ),
    Experiment(
        name="seeds",
        about="FedAvg and FedAvgM seed by seed",
        where="Tables 11, 12",
        cells=tuple(_seeds()),
        reading="seeds",
        notes=(OWN_SEEDS,),
    ),
    Experiment(
        name="gamma",
        about="how fast the bounds open: γ from 0 to ∞, and its effect on the deviation",
        where="Figure 7",
        cells=tuple(_gamma()),
        reading="gamma",
        notes=(f"{FIGURE}; what is published for γ = 0 and 0.02 stands in Table 1",),
    ),
    Experiment(
        name="groups",
        about="one factor for all parameters, for each layer, or for each tensor",
        where="Figure 5",
        cells=tuple(_groups()),
        notes=(f"{FIGURE}; what is published stands in Table 1",),
    ),
    Experiment(
        name="bad-round",
        about="a 40th round whose clients hold almost only one digit",
        where="Figure 4",
        cells=tuple(_bad_round()),
        reading="bad-round",
        least_rounds=settings.BAD_ROUND + 1,
        notes=(FIGURE, "94.6 % of the bad cohort's images are zeros"),
    ),
    Experiment(
        name="gsi-groups",
        about="how differently GSI fluctuates in the model's tensors",
        where="Figures 3, 6",
        cells=tuple(_plain("cifar10", "20news", "mnist")),
        reading="gsi-groups",
        notes=(FIGURE,),
    ),
    Experiment(
        name="norm-ratio",
        about="how much the norms of a round's updates differ: std/mean of their squares",
        where="Table 4",
        cells=tuple(_norm_ratio()),
        reading="norm-ratio",
    ),
    Experiment(
        name="similarity",
        about="the correlation of GSI with how much the cohort's labels look like everybody's",
        where="Figure 8",
        cells=tuple(_similarity()),
        reading="similarity",
    ),
    Experiment(
        name="draws",
        about="MNIST, α = 0.1, with the very clients and cohorts of the authors' code",
        where="Table 1",
        cells=tuple(_main(0.1, "mnist", extra=settings.THEIR_DRAWS)),
        notes=("main has clients and cohorts of our own generators, drawn by the same rules",),
    ),
    Experiment(
        name="controls",
        about="FedGLAD against a smaller constant rate and the adapter pooled, on MNIST (ours)",
        where="not in the paper",
        cells=tuple(_controls()),
    ),
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}


def find(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(EXPERIMENTS)}"
        raise PaperError(f"unknown experiment {name!r}: {hint}  (fedglad paper list)")
    return EXPERIMENTS[name]
