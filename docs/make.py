"""Writes docs/methods.md and docs/api.md from the docstrings: `make docs`."""

import importlib
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fedglad.config.catalogue import markdown, paragraphs, settings
from fedglad.data import Split

HERE = Path(__file__).parent

PLACES = {
    "fedglad": "the names that most programs need",
    "fedglad.server": "the server, and rounds from sums alone",
    "fedglad.records": "what flows through a round",
    "fedglad.optimizers": "from the mean update to the next model",
    "fedglad.schedules": "how a rate changes over the rounds",
    "fedglad.adapters": "rules that scale the server's step",
    "fedglad.estimators": "from the cohort's mean to that of all clients",
    "fedglad.averages": "averages of the server's past models: what one deploys",
    "fedglad.filters": "what happens to updates before they are measured",
    "fedglad.weights": "how much an update counts",
    "fedglad.samplers": "who takes part in a round",
    "fedglad.clients": "what a client does in a round",
    "fedglad.transforms": "what becomes of an update on its way to the server",
    "fedglad.privacy": "what the released models may tell of a client",
    "fedglad.secure": "sums of masked updates, without a network",
    "fedglad.trust": "which rounds, and which clients, to distrust",
    "fedglad.rng": "named randomness",
    "fedglad.data": "data sets and how clients come to their samples",
    "fedglad.models": "models by their settings",
    "fedglad.config": "TOML, presets and dotted keys",
    "fedglad.runs": "runs on disk: one, many, tuning",
    "fedglad.analysis": "what finished runs say",
    "fedglad.interactive": "runs from Python, and their data frames",
    "fedglad.flower": "FedGLAD inside Flower",
    "fedglad.nvflare": "FedGLAD inside NVFlare",
}
"""Where users import from; what is not listed is private."""

HEAD = """# API

Every public name, by the place that it is imported from: the docstrings themselves, written by
`make docs`. Settings of methods (optimizers, adapters, samplers, …) with their formulas are in
[methods.md](methods.md). In an example the names of its own place are imported already
(`from fedglad.optimizers import Adam`), and so are `numpy as np` and `torch`.
"""


def public(place: str) -> dict[str, Any]:
    """The classes and functions that a place offers, by name."""
    module = importlib.import_module(place)
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    offered = {name: getattr(module, name) for name in names}
    return {
        name: thing
        for name, thing in offered.items()
        if isinstance(thing, type | FunctionType) and _is_at_home(thing, module)
    }


def _is_at_home(thing: Any, module: ModuleType) -> bool:
    """Whether a name is from this place, and not only used there."""
    return hasattr(module, "__all__") or thing.__module__.startswith(module.__name__)


def api() -> str:
    """The whole of docs/api.md."""
    parts = [HEAD]
    parts += [
        f"* [`{place}`](#{place.replace('.', '')}): {about}" for place, about in PLACES.items()
    ]
    for place, about in PLACES.items():
        parts += ["", f"## {place}", "", f"{about[0].upper()}{about[1:]}.", ""]
        parts += [f"{part}\n" for part in _parts(importlib.import_module(place)) if _is_code(part)]
        for name, thing in sorted(public(place).items(), key=lambda pair: pair[0].lower()):
            if place != "fedglad" and name in public("fedglad"):
                parts.append(f"### {name}\n\nSee `fedglad.{name}`.\n")
            else:
                parts.append(_entry(name, thing))
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, thing: Any) -> str:
    lines = [f"### {name}", "", f"    {name}{_signature(thing)}", "", _text(thing), ""]
    if isinstance(thing, type):
        ours = thing.__module__.startswith(("fedglad.models.", "fedglad.data."))
        if ours and is_dataclass(thing):  # what is a method is in methods.md
            shared = issubclass(thing, Split) and thing is not Split
            table = settings(thing, settings(Split) if shared else ())
            rest = [f"{'Else' if table else 'Settings'} as `Split`.", ""]
            lines += table + rest * shared
        for method, function in sorted(vars(thing).items()):
            if method.startswith("_") or not (text := _method_text(function)):
                continue
            called = _signature(function) if callable(function) else ""
            lines += [f"* `{method}{called}`: {text}"]
        lines += [""] if lines[-1] else []
    return "\n".join(lines)


def _signature(thing: Any) -> str:
    try:
        found = inspect.signature(thing)
    except (ValueError, TypeError):
        return ""
    parameters = [
        p.replace(annotation=p.empty)
        for n, p in found.parameters.items()
        if n not in ("self", "cls")
    ]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<function (\w+) at \w+>", r"\1", text).replace("=<factory>", "=…")


def _text(thing: Any) -> str:
    return "\n\n".join(_parts(thing))


def _parts(thing: Any) -> list[str]:
    return paragraphs(thing.__doc__ or "")


def _is_code(part: str) -> bool:
    return part.startswith("```python")


def _method_text(function: Any) -> str:
    target = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
    text = inspect.getdoc(target) if callable(target) else None
    return " ".join((text or "").split("\n\n")[0].split())


if __name__ == "__main__":
    (HERE / "methods.md").write_text(markdown(), "utf-8")
    (HERE / "api.md").write_text(api(), "utf-8")
