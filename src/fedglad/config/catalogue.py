"""What there is to choose from, told by the classes themselves: `fedglad list`, docs/methods.md."""

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from fedglad.config.schema import REGISTRIES, find, meanings

FAMILIES = {
    "client": "Client methods",
    "sampler": "Samplers",
    "filter": "Filters and robust means",
    "weighting": "Weightings",
    "server": "Server optimizers",
    "adapter": "Adapters",
}
"""The sections of a configuration that are methods, in the order data goes through them."""

_ARXIV = re.compile(r"arXiv:\s*(\d{4}\.\d{4,5})")
_AUTHORS = re.compile(r"([A-Z][\w’'-]+(?: et al\.| & [A-Z][\w’'-]+)?),? (\d{4})")

HEAD = """# Methods

Every method of a round, with its formula, its source and its settings: the text of the classes
themselves, written by `make docs`. In a configuration a section is `name` and these settings;
`--set adapter.name=pooled --set adapter.beta=0.8` sets them on top.
"""


@dataclass(frozen=True)
class Row:
    """A name in a registry, in words."""

    section: str
    name: str
    about: str
    reference: str

    @property
    def line(self) -> str:
        """What it is, and where it comes from."""
        if self.reference.split(",")[0] in self.about:
            return self.about
        return f"{self.about.removesuffix('.')} ({self.reference})."


def rows(section: str) -> list[Row]:
    """The rows of a section's registry."""
    return [_row(section, name) for name in REGISTRIES[section]]


def markdown() -> str:
    """The whole of docs/methods.md."""
    parts = [HEAD]
    for section, title in FAMILIES.items():
        parts.append(f"## {title}: `[{section}]`\n")
        parts += [_chapter(section, name) for name in REGISTRIES[section]]
    return "\n".join(parts)


def _row(section: str, name: str) -> Row:
    text = _text(section, name)
    return Row(section, name, text.splitlines()[0], _reference(text))


def _text(section: str, name: str) -> str:
    """The class's own docstring: one that it inherits speaks of another."""
    return inspect.cleandoc(find(section, name).__doc__ or name)


def _reference(text: str) -> str:
    """The first authors and year, and the arXiv number, that a docstring names."""
    found = [_AUTHORS.search(text), _ARXIV.search(text)]
    return ", ".join(" ".join(m.group(0).split()) for m in found if m)


def _chapter(section: str, name: str) -> str:
    first = next(iter(REGISTRIES[section]))
    common = [] if name == first else _settings(section, first)
    own = [line for line in _settings(section, name) if line not in common]
    lines = [f"### {name}", "", _text(section, name), ""]
    if own:
        lines += ["| setting | default | meaning |", "|---|---|---|", *own, ""]
    if common:
        lines += [f"{'Else' if own else 'Settings'} as `{first}`.", ""]
    return "\n".join(lines)


def _settings(section: str, name: str) -> list[str]:
    """The rows of the table of a class's fields."""
    cls = find(section, name)
    told = meanings(cls)
    return [
        f"| `{f.name}` | {_default(f)} | {told.get(f.name, '').replace('|', '/')} |"
        for f in fields(cls)
    ]


def _default(field: Any) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    return "" if value is None else f"`{value}`"
