"""Settings are frozen, comparable, readable values; bad ones are refused with a way out."""

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest
import torch

from fedglad import (
    Guard,
    Server,
    Update,
    adapters,
    averages,
    estimators,
    filters,
    optimizers,
    weights,
)
from fedglad.adapters import Adapter, FedExP, Fixed, Glad
from fedglad.estimators import MIFA, VARP, Stale, Strat
from fedglad.filters import Krum, MultiKrum, NormClip, TrimmedMean
from fedglad.optimizers import SGD, Adagrad, Adam, DoG, FedEve, Momentum, ScheduleFree, Yogi
from fedglad.server.server import REGISTRIES
from fedglad.weights import FedAdp, FedAU, InverseDistance

from .support import ROWS, TELLING, Awkward

MODULES = {
    "optimizer": optimizers,
    "adapter": adapters,
    "filter": filters,
    "weighting": weights,
    "estimator": estimators,
    "average": averages,
}

every_row = pytest.mark.parametrize(
    ("role", "cls"), [pytest.param(role, REGISTRIES[role][name], id=name) for role, name in ROWS]
)


def test_the_servers_registries_are_the_modules_own():
    assert {role: module.REGISTRY for role, module in MODULES.items()} == REGISTRIES


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=list(REGISTRIES))
def test_a_registry_names_each_class_once_in_lower_case(registry: dict[str, type]):
    assert len(set(registry.values())) == len(registry)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in registry)


@every_row
def test_a_row_is_frozen_keyword_only_and_has_defaults(role: str, cls: type):
    settings = cls()
    assert dataclasses.is_dataclass(settings)
    for field in dataclasses.fields(settings):
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, field.name, getattr(settings, field.name))


@every_row
def test_a_row_says_what_it_is_in_the_first_line_of_its_docstring(role: str, cls: type):
    assert cls.__doc__
    first = cls.__doc__.splitlines()[0]
    assert first.endswith((".", ":")), first
    assert not first.startswith(f"{cls.__name__}("), "a docstring that dataclass made up"


@every_row
def test_a_row_can_be_read_from_its_repr_compared_and_hashed(role: str, cls: type):
    names = {field.name for field in dataclasses.fields(cls)}
    own = next((s for n, s in TELLING.items() if REGISTRIES[role].get(n) is cls), {})
    for settings in (cls(), cls(**own)):
        text = repr(settings)
        assert text.startswith(f"{cls.__name__}(")
        assert set(re.findall(r"(\w+)=", text)) == names
        again = eval(text, vars(MODULES[role]))
        assert again == settings
        assert hash(again) == hash(settings)
    assert cls(**own) != cls() or not own
    assert cls() != object()


@pytest.mark.parametrize("role", REGISTRIES)
def test_rows_of_a_registry_differ_from_each_other(role: str):
    rows = [cls() for cls in REGISTRIES[role].values()]
    assert len(set(rows)) == len(rows)


BAD: list[tuple[type, dict[str, Any], str]] = [
    *(
        (cls, {"lr": lr}, "must be positive and finite")
        for cls in optimizers.REGISTRY.values()
        for lr in (0, 0.0, -1.0, math.nan, math.inf)
    ),
    (Momentum, {"momentum": 1.0}, r"must be in \[0, 1\)"),
    (Momentum, {"momentum": -0.1}, r"must be in \[0, 1\)"),
    (Momentum, {"momentum": math.nan}, r"must be in \[0, 1\)"),
    (Momentum, {"dampening": 1.5}, r"must be in \[0, 1\)"),
    (Momentum, {"nesterov": True, "dampening": 0.1}, "must be without dampening, momentum > 0"),
    (Momentum, {"nesterov": True, "momentum": 0.0}, "must be without dampening, momentum > 0"),
    (Adam, {"form": "torch"}, "must be 'authors' or 'reddi'"),
    (Adam, {"betas": (1.0, 0.9)}, r"must be in \[0, 1\)"),
    (Adam, {"betas": (0.9, math.nan)}, r"must be in \[0, 1\)"),
    (Adam, {"betas": (0.9,)}, "must be "),
    (Adam, {"eps": 0.0}, "must be positive"),
    (Yogi, {"eps": -1e-3}, "must be positive"),
    (Yogi, {"betas": (0.9, 1.0)}, r"must be in \[0, 1\)"),
    (ScheduleFree, {"beta": 1.0}, r"must be in \[0, 1\)"),
    (ScheduleFree, {"beta": math.nan}, r"must be in \[0, 1\)"),
    (DoG, {"reach": 0.0}, "must be from 1e-15 to 1e6"),
    (FedAU, {"cutoff": 0}, "must be from 1 to 1e9"),
    (Adagrad, {"beta1": 1.0}, r"must be in \[0, 1\)"),
    (Adagrad, {"eps": math.inf}, "must be positive"),
    *(
        (cls, {"groups": groups}, "choose 'tensor', 'layer', 'all' or a function")
        for cls in adapters.REGISTRY.values()
        for groups in ("tensors", None, 3)
    ),
    *((cls, {"min_group": 0}, "must be 1 or more") for cls in adapters.REGISTRY.values()),
    *((Stale, {"beta": beta}, "must be from 0 to 1") for beta in (-0.1, 1.1, math.nan)),
    *((cls, {"disk": 0.0}, "must be more than 0 GB") for cls in (VARP, Stale, MIFA, Strat)),
    (VARP, {"disk": math.nan}, "must be more than 0 GB"),
    (Strat, {"cosine": 1.5}, "must be from -1 to 1"),
    (Strat, {"most": 0}, "must be from 1 to 1000"),
    (Strat, {"strata": "own"}, "must be 'similar' or 'random'"),
    (Glad, {"gamma": -0.1}, "must be 0 or more, inf for no bounds"),
    (Glad, {"gamma": math.nan}, "must be 0 or more, inf for no bounds"),
    (Glad, {"beta": 1.0}, r"must be in \[0, 1\)"),
    (Glad, {"beta": math.nan}, r"must be in \[0, 1\)"),
    (FedExP, {"eps": -1.0}, "must be 0 or more"),
    (FedExP, {"eps": math.nan}, "must be 0 or more"),
    (Fixed, {"value": 0.0}, "must be positive and finite"),
    (Fixed, {"value": math.inf}, "must be positive and finite"),
    (NormClip, {"max_norm": 0.0}, "must be greater than 0"),
    (NormClip, {"max_norm": math.nan}, "must be greater than 0"),
    (MultiKrum, {"f": -1}, "the number of bad clients is 0 or more"),
    (MultiKrum, {"m": 0}, "at least one update must be kept"),
    (Krum, {"f": -2}, "the number of bad clients is 0 or more"),
    (Krum, {"m": 2}, "Krum keeps one update, use MultiKrum"),
    (TrimmedMean, {"beta": 0.5}, r"must be in \[0, 0.5\)"),
    (TrimmedMean, {"beta": -0.1}, r"must be in \[0, 0.5\)"),
    (FedAdp, {"alpha": 0.0}, "must be greater than 0"),
    (FedAdp, {"alpha": math.nan}, "must be greater than 0"),
    (InverseDistance, {"eps": 0.0}, "must be greater than 0"),
    (Guard, {"norm": 1.0}, "the factor must be greater than 1"),
    (Guard, {"weight": math.nan}, "the factor must be greater than 1"),
]


@pytest.mark.parametrize(
    ("cls", "bad", "way_out"), [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in BAD]
)
def test_a_bad_setting_is_refused_with_its_class_its_value_and_the_way_out(
    cls: type, bad: dict[str, Any], way_out: str
):
    with pytest.raises(ValueError, match=way_out) as refused:
        cls(**bad)
    name, value = next(iter(bad.items()))
    message = str(refused.value)
    assert re.match(rf"{cls.__name__}\({name}(\[\d\])?=", message), message
    parts = value if isinstance(value, tuple) else (value,)
    assert any(repr(part) in message for part in parts), message


@pytest.mark.parametrize("cls", [cls for role, n in ROWS for cls in [REGISTRIES[role][n]]])
def test_an_unknown_setting_is_refused(cls: type):
    with pytest.raises(TypeError, match="gama"):
        cls(gama=1)


EDGE: list[tuple[str, Any, dict[str, Any]]] = [
    ("optimizer", SGD, {"lr": 1e39}),
    ("optimizer", Momentum, {"lr": 1e-46}),
    ("optimizer", Adam, {"eps": 1e-50}),
    ("optimizer", Adam, {"eps": 1e39}),
    ("optimizer", Yogi, {"eps": 1e-50}),
    ("optimizer", Adagrad, {"eps": 1e-50}),
    ("optimizer", Adagrad, {"eps": 1e30}),
    ("optimizer", DoG, {"lr": 1e15, "reach": 1e6}),
    ("optimizer", DoG, {"lr": 1e-46}),
    ("optimizer", FedEve, {"lr": 1e15}),
    ("optimizer", ScheduleFree, {"lr": 1e15}),
    ("weighting", FedAU, {"cutoff": 10**9}),
    ("weighting", FedAU, {"cutoff": 1}),
    ("adapter", Fixed, {"value": 1e300}),
    ("adapter", Fixed, {"value": 5e-324}),
    ("adapter", FedExP, {"eps": math.inf}),
    ("adapter", FedExP, {"eps": 0.0}),
    ("adapter", Glad, {"gamma": math.inf}),
    ("adapter", Glad, {"gamma": 1e308}),
    ("filter", NormClip, {"max_norm": 5e-324}),
    ("filter", NormClip, {"max_norm": math.inf}),
    ("filter", MultiKrum, {"f": 0.5}),
    ("filter", MultiKrum, {"m": 1.5}),
    ("weighting", FedAdp, {"alpha": 1000.0}),
    ("weighting", FedAdp, {"alpha": math.inf}),
    ("weighting", InverseDistance, {"eps": 5e-324}),
    ("weighting", InverseDistance, {"eps": math.inf}),
    ("guard", Guard, {"norm": math.inf, "weight": math.inf}),
]


@pytest.mark.parametrize(
    ("role", "cls", "extreme"),
    [pytest.param(*row, id=f"{row[1].__name__}-{row[2]}") for row in EDGE],
)
def test_an_extreme_setting_is_refused_at_birth_or_harmless(
    role: str, cls: Any, extreme: dict[str, Any]
):
    """Float32 cannot hold what a setting may say: no NaN may come of it in the middle of a run."""
    try:
        settings = cls(**extreme)
    except ValueError as refused:
        assert cls.__name__ in str(refused)  # noqa: PT017 - either way is fine
        return
    server = Server({"x": torch.ones(2), "y": torch.zeros(1)}, **{role: settings})
    step = {"x": torch.tensor([0.5, -0.5]), "y": torch.zeros(1)}
    still = {"x": torch.zeros(2), "y": torch.zeros(1)}
    for deltas in ([step] * 6, [still] * 6, [step, still, step, still, still, step]):
        server.step([Update(g, client=k) for k, g in enumerate(deltas)])
        for name, tensor in server.state_dict()["tensors"].items():
            assert tensor.isfinite().all(), name


@pytest.mark.parametrize("min_clients", [0, -1])
def test_a_server_without_clients_is_refused(min_clients: int):
    with pytest.raises(ValueError, match=f"min_clients={min_clients}: a round needs at least one"):
        Server(Awkward(), min_clients=min_clients)


def test_a_grouping_function_must_give_names():
    with pytest.raises(TypeError, match=r"groups\('temperature'\) returned None: it must be a str"):
        Server(Awkward(), adapter=Adapter(groups=lambda name: None))  # type: ignore[arg-type]


def test_the_servers_settings_are_keyword_only():
    parameters = list(inspect.signature(Server).parameters.values())
    assert parameters[0].name == "model"
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[1:])
