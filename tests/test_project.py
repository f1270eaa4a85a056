"""What holds for the project as a whole: names, imports and their direction, sizes, examples."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedglad

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedglad"
FILES = sorted(SOURCE.rglob("*.py"))

BASE = {"records", "rng", "layout"}
ARITHMETIC = {"validate", "aggregate", "gram", "adapters", "optimizers", "filters", "weights"}
CORE = BASE | ARITHMETIC | {"cohort", "server"}
TRAINING = CORE | {"samplers", "clients", "engines", "memory"}
MAY_IMPORT: dict[str, set[str]] = {
    **{module: set() for module in (*BASE, "checkpoint", "checked", "heap", "presets", "trust")},
    **dict.fromkeys((*ARITHMETIC, "cohort"), BASE | ARITHMETIC),
    "combine": BASE | ARITHMETIC,
    "server_state": BASE | ARITHMETIC | {"cohort", "checkpoint", "combine"},
    "sums": BASE | ARITHMETIC | {"cohort", "server_state"},
    "server": CORE | {"checkpoint", "server_state", "sums"},
    **dict.fromkeys(("clients", "data"), BASE),
    "models": {"data"},  # where weights and vectors come from
    "samplers": BASE | {"weights"},
    "memory": BASE | {"checkpoint"},
    "engines": BASE | {"heap", "samplers", "clients", "memory"},
    "simulation": TRAINING | {"trust"},
    "fit": {"engines", "clients"},
    "config": TRAINING | {"combine", "simulation", "data", "models", "presets", "checked", "fit"},
    "runs": TRAINING | {"simulation", "config", "checkpoint", "heap"},
    "catalogue": {"config"},
    "curves": set(),
    "control": {"adapters", "layout", "checkpoint", "config", "runs"},
    "settings": {"config"},
    "compare": {"config", "presets", "runs", "control", "curves", "settings"},
    "sweep": TRAINING | {"config", "runs", "control", "settings"},
    "tune": {"config", "runs", "settings", "sweep"},
    "terminal": {"records", "runs", "compare", "settings", "sweep", "tune"},
    "cli_data": {"config", "data", "fit", "terminal"},
    "paper": {"config", "presets", "runs", "compare", "curves", "settings", "sweep"}
    | {"checkpoint", "data", "engines"},
    "flower": CORE
    | {"samplers", "runs", "config", "checkpoint", "sums", "trust", "rng", "combine", "memory"}
    | {"heap", "clients", "data", "models"},  # these for the template's app alone
    "cli_flower": {"flower", "terminal"},
    "recording": {"adapters", "checkpoint", "config", "layout", "records", "runs", "sums"},
    "replay": {"adapters", "config", "recording", "records"},
    "cli_replay": {"config", "settings", "recording", "replay", "sweep", "terminal"},
    "report": {
        "compare",
        "config",
        "control",
        "curves",
        "presets",
        "settings",
        "trust",
    },  # reads a run's folder, never trains
    "cli_report": {"report", "terminal"},
    "cli_track": {"report", "terminal"},
    "cli_paper": {"cli_data", "data", "paper", "runs", "settings", "sweep", "terminal"},
    "cli": TRAINING
    | {"simulation", "presets", "config", "runs", "sweep", "compare", "terminal", "cli_data"}
    | {"catalogue", "data", "tune", "paper", "cli_paper", "cli_flower"}
    | {"cli_report", "cli_replay", "cli_track", "settings"},
    "__main__": {"cli"},
    "__init__": {"adapters", "records", "server", "validate", "config"},
}
"""Imports point one way (DESIGN.md). A new module gets a row."""


def by_name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


every_file = pytest.mark.parametrize("path", FILES, ids=by_name)


def part_of(path: Path) -> str:
    """The module or folder under fedglad that a file belongs to."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The parts of fedglad that a file imports, anywhere in it."""
    found: set[str] = set()
    package = ["fedglad", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return {name.split(".")[1] for name in found if name.startswith("fedglad.")}


@every_file
def test_imports_point_one_way(path: Path):
    own = part_of(path)
    assert own in MAY_IMPORT, f"give {own} a row in MAY_IMPORT"
    assert imported(path) - {own} <= MAY_IMPORT[own]


def test_the_direction_test_sees_imports():
    assert {"adapters", "checkpoint", "cohort", "layout"} <= imported(SOURCE / "server.py")
    assert "fedglad" not in imported(SOURCE / "__init__.py")


@every_file
def test_a_file_is_not_longer_than_400_lines(path: Path):
    assert len(path.read_text("utf-8").splitlines()) <= 400


@every_file
def test_the_library_prints_nothing(path: Path):
    calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


@every_file
def test_a_file_says_what_it_is_for(path: Path):
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert said
    assert said.splitlines()[0].endswith((".", ":"))


def test_importing_fedglad_loads_torch_and_numpy_only():
    script = """
import sys, torch, numpy
before = set(sys.modules)
import fedglad, fedglad.optimizers
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - {"fedglad"} - sys.stdlib_module_names))
heavy = "safetensors pydantic typer rich matplotlib flwr ray transformers pandas scipy"
print(*sorted(set(heavy.split()) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_public_names_are_pinned():
    pinned = ["Glad", "Guard", "Record", "Round", "Server", "Statistics", "Update", "simulate"]
    assert fedglad.__all__ == pinned
    assert all(hasattr(fedglad, name) for name in pinned)


@pytest.mark.parametrize(
    "name", ["fedglad", *(m.name for m in pkgutil.walk_packages(fedglad.__path__, "fedglad."))]
)
def test_doctests_run(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_doctests():
    finder = doctest.DocTestFinder()
    modules = ["fedglad.server", "fedglad.rng"]
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
