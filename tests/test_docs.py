"""docs/api.md: every public name is in it, as the docstrings say it today."""

import ast
import doctest
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make", DOCS / "make.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make: Any = _make()
LACKING = {"fedglad.nvflare"} if importlib.util.find_spec("nvflare") is None else set[str]()
PLACES = [place for place in make.PLACES if place not in LACKING]
NAMES = [(place, name) for place in PLACES for name in make.public(place)]


@pytest.mark.skipif(bool(LACKING), reason="NVFlare is not installed")
def test_the_api_page_is_what_the_docstrings_say():
    page = (DOCS / "api.md").read_text("utf-8")
    assert page == make.api(), "the docstrings have changed: make docs"


@pytest.mark.parametrize(("place", "name"), NAMES, ids=lambda part: part)
def test_a_public_name_is_on_the_page_and_says_what_it_is(place: str, name: str):
    chapter = (DOCS / "api.md").read_text("utf-8").split(f"\n## {place}\n")[1].split("\n## ")[0]
    assert f"\n### {name}\n" in chapter
    thing = make.public(place)[name]
    first = inspect.cleandoc(thing.__doc__ or "").split("\n")[0]
    assert first
    assert first.endswith((".", ":"))
    assert not first.startswith(f"{name}(")  # which dataclasses write by themselves


@pytest.mark.parametrize(("place", "name"), NAMES, ids=lambda part: part)
def test_public_methods_say_what_they_do(place: str, name: str):
    thing = make.public(place)[name]
    if not isinstance(thing, type):
        return
    fields = getattr(thing, "__dataclass_fields__", {})
    members = {k: v for k, v in vars(thing).items() if not k.startswith("_") and k not in fields}
    functions = [k for k, v in members.items() if inspect.isfunction(v) or isinstance(v, property)]
    silent = [k for k in functions if not inspect.getdoc(getattr(thing, k))]
    assert silent == []


@pytest.mark.parametrize(("place", "name"), NAMES, ids=lambda part: part)
def test_a_public_name_has_an_example_that_runs(place: str, name: str):
    """With what the page says is imported, where tests/test_project.py has all of its module."""
    thing, module = make.public(place)[name], importlib.import_module(place)
    if isinstance(thing, type) and issubclass(thing, Exception):
        return
    offered = {n: getattr(module, n) for n in dir(module) if not n.startswith("_")}
    imported = {"np": numpy, "torch": torch, **offered}
    example = doctest.DocTestParser().get_doctest(thing.__doc__ or "", imported, name, place, 0)
    assert [line for line in example.examples if not line.options.get(doctest.SKIP)]
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


def test_names_that_users_type_are_public():
    for place, name in {
        "fedglad.samplers": "Uniform",
        "fedglad.clients": "Plain",
        "fedglad.data": "Partitioned",
        "fedglad.models": "SmallCNN",
        "fedglad.analysis": "compare",
        "fedglad.runs": "execute",
        "fedglad.server": "Collector",
    }.items():
        assert (place, name) in NAMES


CONTRIBUTING = (DOCS.parent / "CONTRIBUTING.md").read_text("utf-8")
SOURCE = DOCS.parent / "src" / "fedglad"


@pytest.mark.parametrize("station", re.findall(r"`([\w/]+\.py):(\w+)`", CONTRIBUTING))
def test_the_walk_through_a_run_names_what_is_there(station: tuple[str, str]):
    path, function = station
    tree = ast.parse((SOURCE / path).read_text("utf-8"))
    assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_the_walk_is_short():
    """Half of what it was: about sixty hops in thirteen stations."""
    walk = CONTRIBUTING.split("## One run")[1].split("## Adding")[0]
    assert len(re.findall(r"`[\w/]+\.py:\w+`", walk)) <= 30
    assert len(re.findall(r"^\d+\. ", walk, re.M)) <= 13


def test_the_tree_has_every_part_of_the_package():
    table = CONTRIBUTING.split("## The house")[1].split("`tests/` mirrors")[0]
    named = set(re.findall(r"`([\w]+)(?:\.py|/)`", table))
    there = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")}
    assert there - {"__init__", "__main__", "__pycache__"} <= named
