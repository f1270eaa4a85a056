"""The app that Flower runs, as files: which were changed since, and which are not the ones sent."""

import hashlib
from pathlib import Path

from flwr.common.config import get_project_dir
from flwr.serverapp import Grid

from fedglad.federation.app import difference
from fedglad.flower.transport import is_simulated

MADE = ("uv.lock", "__pycache__")  # by others, when the app is run


def fingerprints(grid: Grid) -> dict[str, str]:
    """{path: hash} of the app's files as they were sent; {} where Flower has none."""
    folder = _folder(grid)
    return {} if folder is None else _hashes(folder)


def shadowed(grid: Grid) -> str:
    """What a simulation's workers would import in place of the app that was sent; mostly nothing.

    They look first into the folder in which Flower's local SuperLink was started: another app may
    lie there, with a package of the same name.
    """
    sent = _folder(grid) if is_simulated(grid) else None
    if sent is None:
        return ""
    try:
        here = Path.cwd()
    except OSError:
        return ""  # it was removed: nothing is imported from there
    for package in (path.parent for path in sorted(sent.glob("*/__init__.py"))):
        there = here / package.name
        if there.is_dir() and (what := difference(_hashes(package), _hashes(there))):
            return f"{there} ({what})"
    return ""


def _folder(grid: Grid) -> Path | None:
    try:
        run = grid.run
        folder = get_project_dir(run.fab_id, run.fab_version, run.fab_hash)
    except (ValueError, AttributeError):
        return None
    return folder if folder.is_dir() else None


def _hashes(folder: Path) -> dict[str, str]:
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    kept = [path for path in found if not any(_is_private(part) for part in path.parts)]
    return {path.as_posix(): _hash(folder / path) for path in kept}


def _is_private(part: str) -> bool:
    return part.startswith(".") or part in MADE


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
