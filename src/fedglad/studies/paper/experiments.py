"""The experiments of the paper by name, and one of ours that compares with a smaller rate.

What they show, and where the paper has them, stands in experiments.toml.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fedglad.studies.paper import settings
from fedglad.studies.paper.cells import Cell, Experiment, PaperError, cell, named
from fedglad.studies.paper.settings import ALPHAS, BILSTM, BILSTM_LR, DATA, GAMMAS, TABLES, Value

WITHOUT_AND_WITH = (False, True)
EXPLORED = ("cifar10", "20news")
AVERAGED = ("FedAvg", "FedAvgM")
ENDING = {0.1: "", 1.0: "-alpha1"}  # of a table's name


def _main(
    alpha: float, names: Iterable[str] = DATA, extra: Mapping[str, Any] | None = None
) -> Iterator[Cell]:
    methods = ("FedAvg", "FedProx", "FedAvgM", "FedAdam")
    for data, method, glad in product(names, methods, WITHOUT_AND_WITH):
        yield cell(data, method, glad, alpha=alpha, table=f"main{ENDING[alpha]}", extra=extra)


def _scaffold() -> Iterator[Cell]:
    for data, alpha, glad in product(("20news", "agnews", "mnist"), ALPHAS, WITHOUT_AND_WITH):
        yield cell(
            data,
            "SCAFFOLD",
            glad,
            alpha=alpha,
            table="scaffold",
            column=[alpha],
            detail=f"α = {alpha}",
            extra={"client.epochs": settings.SCAFFOLD_EPOCHS} if DATA[data].images else {},
        )


def _bilstm() -> Iterator[Cell]:
    for data, recipe in BILSTM.items():
        preset = f"{data}-bilstm"
        local = {f"client.{key}": value for key, value in recipe["client"].items()}
        value = TABLES["bilstm"][data, "Centralized", False]
        label = f"{DATA[data].title} BiLSTM centralised"
        yield replace(_alone(data, value, local), label=label, preset=preset)
        for method, glad in product(AVERAGED, WITHOUT_AND_WITH):
            extra = {**local, "server.lr": BILSTM_LR[data][method], "rounds": recipe["rounds"]}
            extra |= {"adapter.gamma": recipe["gamma"]} if glad else {}
            made = cell(data, method, glad, table="bilstm", detail="BiLSTM", extra=extra)
            yield replace(made, preset=preset)


def _alone(data: str, value: Value, extra: Mapping[str, Any] | None = None) -> Cell:
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
        ours=settings.UNPUBLISHED_EPOCHS,
    )


def _explored(
    table: str, key: str, columns: Mapping[Any, str], names: Sequence[str] = EXPLORED
) -> Iterator[Cell]:
    """FedAvg and FedAvgM with other values of a key; a column has one of them, and its text."""
    for data, column, method, glad in product(names, columns, AVERAGED, WITHOUT_AND_WITH):
        main = (key, column) == ("sampler.clients_per_round", settings.COHORT)
        yield cell(
            data,
            method,
            glad,
            table=table,
            column=[column],
            detail=columns[column],
            extra={key: column},
            ours=settings.RETUNED if key.startswith("sampler.") and not main else "",
        )


def _seeds() -> Iterator[Cell]:
    for alpha, data, method, glad in product(ALPHAS, DATA, AVERAGED, WITHOUT_AND_WITH):
        by_seed = TABLES[f"seeds{ENDING[alpha]}"]
        yield cell(
            data,
            method,
            glad,
            alpha=alpha,
            table=f"main{ENDING[alpha]}",
            detail=f"α = {alpha}",
            by_seed=tuple(by_seed[data, method, glad, seed].mean for seed in settings.SEEDS),
        )


def _gamma() -> Iterator[Cell]:
    for data, method, gamma in product(EXPLORED, AVERAGED, GAMMAS):
        # γ = 0 is no adaptation, bit for bit: the run of the main table.
        extra = {"adapter.gamma": gamma} if gamma else {}
        known = gamma in (0, settings.GAMMA)
        yield replace(
            cell(data, method, gamma > 0, table="main" if known else "", extra=extra),
            label=f"{named(data, method)}, γ = {'∞' if math.isinf(gamma) else f'{gamma:g}'}",
            baseline=f"{named(data, method)}, γ = 0" if gamma else None,
            ours="" if known or math.isinf(gamma) else settings.UNPUBLISHED_GAMMAS,
            x=gamma,
        )


def _groups() -> Iterator[Cell]:
    kinds = {"all": "universal", "layer": "layer-wise", "tensor": "group-wise"}
    for data, method in product(EXPLORED, AVERAGED):
        yield cell(data, method, False, table="main")
        for groups, words in kinds.items():
            table = "main" if groups == "tensor" else ""
            made = cell(data, method, True, table=table, extra={"adapter.groups": groups})
            yield replace(made, label=f"{made.label}, {words}")


def _bad_round() -> Iterator[Cell]:
    extra = {
        "sampler.name": "scripted",
        "sampler.cohorts": {str(settings.BAD_ROUND): list(settings.BAD_COHORT)},
    }
    ours = settings.UNPUBLISHED_COHORT
    for glad in WITHOUT_AND_WITH:
        yield cell("mnist", "FedAvg", glad, extra=extra, seeds=(1,), ours=ours)


def _plain(*names: str) -> Iterator[Cell]:
    """FedAvg of the main table, one seed; on MNIST it is ours."""
    for data in names:
        ours = "" if data in EXPLORED else "not in the paper; it costs no run of its own"
        yield cell(data, "FedAvg", False, seeds=(1,), ours=ours)


def _norm_ratio() -> Iterator[Cell]:
    for data, alpha, epochs in product(EXPLORED, ALPHAS, (1, 3, 5)):
        made = cell(
            data,
            "FedAvg",
            False,
            alpha=alpha,
            detail=f"α = {alpha}, E = {epochs}",
            extra={"client.epochs": epochs},
            seeds=(1,),
        )
        yield replace(made, published=TABLES["norm-ratio"][data, alpha, epochs])
    yield replace(*_plain("mnist"), label="MNIST FedAvg, α = 0.1, E = 5")


def _similarity() -> Iterator[Cell]:
    first, second = _plain("cifar10", "mnist")
    yield replace(first, published=settings.SIMILARITY)
    yield second


def _controls(
    controls: Mapping[str, Mapping[str, Any]], extra: Mapping[str, Any] | None = None
) -> Iterator[Cell]:
    """FedAvg on MNIST, with FedGLAD, and with other keys, each by what they add to the label."""
    plain, glad, *_ = _main(0.1, ["mnist"], extra)
    yield plain
    yield glad
    ours = {"baseline": plain.label, "published": None, "ours": "not in the paper"}
    for words, keys in controls.items():
        overrides = {**plain.overrides, **keys}
        yield replace(plain, label=f"{plain.label}{words}", overrides=overrides, **ours)


_CELLS: dict[str, Iterable[Cell]] = {
    "main": _main(0.1),
    "main-alpha1": _main(1.0),
    "scaffold": _scaffold(),
    "bilstm": _bilstm(),
    "centralised": (_alone(data, TABLES["centralised"][(data,)]) for data in DATA),
    "ratios": _explored("ratios", "sampler.clients_per_round", {5: "5 %", 10: "10 %", 20: "20 %"}),
    "strategies": _explored("strategies", "sampler.name", {"md": "MD", "adafl": "AdaFL"}),
    "epochs": _explored(
        "epochs", "client.epochs", {10: "E = 10", 20: "E = 20"}, ("cifar10", "mnist")
    ),
    "seeds": _seeds(),
    "gamma": _gamma(),
    "groups": _groups(),
    "bad-round": _bad_round(),
    "gsi-groups": _plain("cifar10", "20news", "mnist"),
    "norm-ratio": _norm_ratio(),
    "similarity": _similarity(),
    "draws": _main(0.1, ["mnist"], settings.THEIR_DRAWS),
    "averages": _controls(  # the cells of `draws`; all keep an average
        {
            ", factor 1.5": {"adapter.name": "fixed", "adapter.value": 1.5},
            " + FedVARP": {"estimator.name": "varp"},
        },
        {**settings.THEIR_DRAWS, "average.name": "ema"},
    ),
    "controls": _controls(
        {" + pooled": {"adapter.name": "pooled"}, ", server rate 0.8": {"server.lr": 0.8}}
    ),
}
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
EXPERIMENTS = {
    name: Experiment(name=name, cells=tuple(_CELLS[name]), **texts)
    for name, texts in _TEXTS.items()
}


def find(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(EXPERIMENTS)}"
        raise PaperError(f"unknown experiment {name!r}: {hint}  (fedglad paper list)")
    return EXPERIMENTS[name]
