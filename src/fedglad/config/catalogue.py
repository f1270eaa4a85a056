"""What there is to choose from, by the classes' docstrings: `fedglad list`, docs/methods.md."""

import inspect
import re
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from fedglad.config.schema import REGISTRIES, find, meanings
from fedglad.server.compatibility import needs_updates

FAMILIES = {
    "task": "Tasks",
    "client": "Client methods",
    "sampler": "Samplers",
    "transform": "Transforms of updates",
    "filter": "Filters and robust means",
    "weighting": "Weightings",
    "estimator": "Estimators",
    "guard": "Guards",
    "trust": "Trust in clients",
    "privacy": "Differential privacy",
    "server": "Server optimizers",
    "adapter": "Adapters",
    "average": "Averages",
}
"""The sections of a configuration that are methods, in the order data goes through them."""

_ARXIV = re.compile(r"arXiv:\s*(\d{4}\.\d{4,5})")
_AUTHORS = re.compile(r"([A-Z][\w’'-]+(?: et al\.| & [A-Z][\w’'-]+)?),? (\d{4})")

HEAD = """# Methods

Every method of a round, with its formula, its source and its settings: the text of the classes
themselves, written by `make docs`. In a configuration a section is `name` and these settings;
`--set adapter.name=pooled --set adapter.beta=0.8` sets them on top. In an example the class is
imported already; [api.md](api.md) says from where.
"""


def lines(section: str) -> dict[str, str]:
    """Each name of a section's registry with what it is, and where it comes from."""
    described: dict[str, str] = {}
    for name in REGISTRIES[section]:
        about, source = text(section, name).splitlines()[0], reference(text(section, name))
        named = source.split(",")[0] in about
        described[name] = about if named else f"{about.removesuffix('.')} ({source})."
    return described


def engines() -> dict[str, dict[str, Any]]:
    """What there is to know of each engine before one is chosen.

    `exact`: it gives the bits of `serial`. `sums`: it has whole blocks of a cohort summed where
    they were trained, but with one of `single_updates`, which look at each update.
    """
    parts = {
        section: [name for name in REGISTRIES[section] if needs_updates(find(section, name))]
        for section in ("sampler", "transform", "filter", "weighting", "estimator", "privacy")
    }
    return {
        name: {
            "about": about,
            "exact": getattr(find("engine", name), "exact", True),
            "sums": (sums := getattr(find("engine", name), "sums", False)),
            **({"single_updates": parts} if sums else {}),
        }
        for name, about in lines("engine").items()
    }


def markdown() -> str:
    """The whole of docs/methods.md."""
    parts = [HEAD]
    for section, title in FAMILIES.items():
        parts.append(f"## {title}: `[{section}]`\n")
        parts += [_chapter(section, name) for name in REGISTRIES[section]]
    return "\n".join(parts)


def text(section: str, name: str) -> str:
    """The class's own docstring: one that it inherits speaks of another."""
    return inspect.cleandoc(find(section, name).__doc__ or name)


def paragraphs(docstring: str) -> list[str]:
    """A docstring's paragraphs in Markdown: an example becomes a block of code."""
    parts = inspect.cleandoc(docstring).split("\n\n")
    return [f"```python\n{p}\n```" if p.startswith(">>>") else p for p in parts]


def reference(text: str) -> str:
    """The first authors and year, and the arXiv number, that a docstring names."""
    matches = [_AUTHORS.search(text), _ARXIV.search(text)]
    return ", ".join(" ".join(match.group(0).split()) for match in matches if match)


def settings(cls: type, common: Collection[str] = ()) -> list[str]:
    """The table of a class's fields, without the rows that are common to others."""
    texts = meanings(cls)
    rows = [
        f"| `{f.name}` | {_default(f)} | {texts.get(f.name, '').replace('|', '/')} |"
        for f in fields(cls)
    ]
    rows = [row for row in rows if row not in common]
    return ["| setting | default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def _chapter(section: str, name: str) -> str:
    first = next(iter(REGISTRIES[section]))
    common = [] if name == first else settings(find(section, first))
    table = settings(find(section, name), common)
    said = "\n\n".join(paragraphs(text(section, name)))
    parts = [f"### {name}", "", said, "", *table]
    if common:
        parts += [f"{'Else' if table else 'Settings'} as `{first}`.", ""]
    return "\n".join(parts)


def _default(field: Any) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    return "" if value is None or value == "" else f"`{value}`"
