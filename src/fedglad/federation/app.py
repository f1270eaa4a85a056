"""What a run remembers of its app: the files, and settings that TOML cannot hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedglad.core import files

NAME = "app.json"
NAMED = 8  # files in a sentence


def write(folder: Path, sent: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Keeps the app's fingerprints in a run's folder; returns what differs from those there.

    `settings` are those that config.toml cannot hold, as text.
    """
    ours: dict[str, Any] = {"files": dict(sent), "settings": dict(settings)}
    theirs = read(folder)
    if sent or settings or theirs:
        files.write_text(folder / NAME, json.dumps(ours, indent=1))
    return difference(theirs.get("files", {}), ours["files"])


def read(folder: Path) -> dict[str, Any]:
    """What `write` kept; {} if it is not there."""
    try:
        kept = json.loads((folder / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    parts = ("files", "settings")
    return kept if all(isinstance(kept.get(part), dict) for part in parts) else {}


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Which files differ, in words; empty if none do, or one side is not known.

    >>> difference({"a.py": "1", "b.py": "2", "c.py": "3"}, {"a.py": "1", "b.py": "5", "d.py": "3"})
    'b.py changed, c.py gone, d.py new'
    """
    if not there or not here:
        return ""
    words = {path: "changed" for path in there if path in here and there[path] != here[path]}
    words |= {path: "gone" for path in there if path not in here}
    words |= {path: "new" for path in here if path not in there}
    named = [f"{path} {word}" for path, word in words.items()]
    return ", ".join(named[:NAMED]) + (" …" if named[NAMED:] else "")
