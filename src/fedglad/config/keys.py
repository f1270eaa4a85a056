"""Settings with dotted keys, as the command line takes them."""

import json
from collections.abc import Mapping
from typing import Any

SEEDS = ("seed", "data.seed")
"""What repetitions of a run differ in."""


def label(settings: Mapping[str, Any]) -> str:
    """Settings in one line, as the command line takes them.

    >>> label({"adapter.name": "glad", "adapter.gamma": 0.02})
    'adapter.name=glad adapter.gamma=0.02'
    """
    return " ".join(f"{key}={shown(value)}" for key, value in settings.items())


def shown(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys; a table inside a section stays a value."""
    keys: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            keys |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            keys[key] = value
    return keys
