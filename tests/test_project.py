"""What holds for the project as a whole: names, imports and their direction, sizes, examples."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedglad

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedglad"
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = """
records rng
core
schedules secure
optimizers filters weights trust adapters averages estimators transforms privacy
server
data
tasks
samplers clients models
simulation
config
runs
analysis
report
federation
studies flower nvflare
cli
interactive
""".strip().splitlines()
"""Imports point one way, from a line to those above it, and never to another of the same line.

A new module or folder at the top of the package is put where it belongs.
"""

OUTSIDE = {"__init__", "__main__", "moved"}  # names that lead into the house

ONLY_IN = {
    "flwr": {"flower"},
    "nvflare": {"nvflare"},
    "matplotlib": {"report"},
    "transformers": {"models", "data"},
    "scipy": {"samplers"},
    "ray": {"core"},
    "datasets": {"data"},
    "flwr_datasets": {"data"},
    "pyarrow": {"data"},
    "dp_accounting": {"privacy"},
    "pandas": {"analysis"},
    "prometheus_client": {"report"},
    "cryptography": {"secure"},
    "submitit": {"runs"},
}
"""Heavy libraries, and the folders that may import them."""


def by_name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


every_file = pytest.mark.parametrize("path", FILES, ids=by_name)


def part_of(path: Path) -> str:
    """The module or folder under fedglad that a file belongs to."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The parts of fedglad that a file imports, anywhere in it."""
    return {name.split(".")[1] for name in _imports(path) if name.startswith("fedglad.")}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    package = ["fedglad", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


@every_file
def test_imports_point_one_way(path: Path):
    own = part_of(path)
    if own in OUTSIDE:
        return
    assert own in " ".join(LAYERS).split(), f"put {own} into LAYERS"
    above = " ".join(LAYERS[: next(k for k, line in enumerate(LAYERS) if own in line.split())])
    assert imported(path) - {own} <= {*above.split()}


def test_the_direction_test_sees_imports():
    assert {"adapters", "core", "records"} <= imported(SOURCE / "server" / "server.py")
    assert "fedglad" not in imported(SOURCE / "__init__.py")


def test_a_layer_has_a_folder_or_a_file():
    there = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")}
    assert {*" ".join(LAYERS).split(), *OUTSIDE} == there - {"__pycache__"}


@every_file
def test_heavy_libraries_stay_in_their_folders(path: Path):
    found = {name.partition(".")[0] for name in _imports(path)}
    assert not [name for name in found & ONLY_IN.keys() if part_of(path) not in ONLY_IN[name]]


@every_file
def test_the_library_prints_nothing(path: Path):
    calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


@every_file
def test_a_file_says_what_it_is_for(path: Path):
    said = ast.get_docstring(parsed(path))
    assert said
    assert said.splitlines()[0].endswith((".", ":"))


def test_importing_fedglad_loads_torch_and_numpy_only():
    script = """
import sys, torch, numpy
before = set(sys.modules)
import fedglad, fedglad.optimizers
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - {"fedglad"} - sys.stdlib_module_names))
heavy = "safetensors pydantic typer rich matplotlib flwr ray transformers pandas scipy datasets"
print(*sorted(set(heavy.split()) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_public_names_are_pinned():
    classes = ["Glad", "Guard", "Record", "Round", "Server", "Statistics", "Update"]
    pinned = [*classes, "load_runs", "run", "simulate"]
    assert fedglad.__all__ == pinned
    assert all(hasattr(fedglad, name) for name in pinned)


@pytest.mark.parametrize(
    "name", ["fedglad", *(m.name for m in pkgutil.walk_packages(fedglad.__path__, "fedglad."))]
)
def test_doctests_run(name: str):
    if name == "fedglad.nvflare.controller":
        pytest.importorskip("nvflare")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_doctests():
    finder = doctest.DocTestFinder()
    modules = ["fedglad.server.server", "fedglad.rng"]
    assert all(any(t.examples for t in finder.find(importlib.import_module(m))) for m in modules)


def test_the_first_code_in_the_readme_runs():
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
    )
    assert blocks, "README.md has no python code block"
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    updates = [
        {n: (k + 1) * torch.ones_like(p) for n, p in model.named_parameters()} for k in (0, 1)
    ]
    names: dict[str, Any] = {"model": model, "updates": updates}
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert names["record"].stepped
    for name, _ in model.named_parameters():
        assert not model.state_dict()[name].equal(before[name]), f"{name} has not moved"


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("sweep", "tasks", "runs"),
        ("compare", "compare", "analysis"),
        ("replay", "replay", "analysis"),
        ("sums", "Collector", "server"),
        ("recording", "read", "analysis.recording"),
        ("clients.loop", "Plain", "clients"),
        ("data.federation", "Partitioned", "data.federation"),
    ],
)
def test_names_that_have_moved_are_still_found(old: str, name: str, new: str):
    found, own = (importlib.import_module(f"fedglad.{module}") for module in (old, new))
    assert getattr(found, name) is getattr(own, name)
