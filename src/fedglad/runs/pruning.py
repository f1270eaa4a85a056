"""What a run keeps to go on from, and removing it when there is nothing to go on to.

That is its state: checkpoints with the server's moments, what is remembered of clients, and the
best models so far. Records, summary and the models of a finished run are no part of it.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedglad.core import checksums, files
from fedglad.runs.folder import Busy, locked
from fedglad.runs.reader import BEST, MODELS, Run, RunError, require_run

CHECKPOINTS, MEMORIES = "checkpoints", "memories"
PARTS = {CHECKPOINTS: "checkpoints", MEMORIES: "client memories", BEST: "copies of best models"}
"""The folders that a state consists of, in the order in which they are removed."""

SMALL = 32_000_000
"""Bytes of state that a finished run keeps unless it is asked to keep none."""

KEPT_KEY = "state_kept"
"""In summary.json: whether the run kept its state when it finished; "models" if the clients'
memories are models of their own."""


@dataclass(frozen=True)
class Prunable:
    """What a run's folder would free, in bytes by folder; `reason` says why nothing.

    >>> from pathlib import Path
    >>> Prunable(Path("runs/a"), {"memories": 2_500_000_000}).words
    '2,500.0 MB of client memories'
    """

    folder: Path
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    reason: str = ""

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """What it is, for a person."""
        shown = [f"{size / 1e6:,.1f} MB of {PARTS[part]}" for part, size in self.parts.items()]
        return ", ".join(shown) or self.reason

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {**asdict(self), "folder": str(self.folder), "bytes": self.bytes}


def prunable(folder: Path, *, unfinished: bool = False) -> Prunable:
    """What `prune` would remove of a run's folder; nothing is changed.

    Of a run that is not finished it is nothing, unless that is asked for: then it can only be
    started anew. Nothing is removed either where a model would be lost with it.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> run = execute(*load("digits", {"rounds": 1}), out=Path(tempfile.mkdtemp()))
    >>> list(prunable(run.folder).parts)
    ['checkpoints']
    """
    require_run(folder)
    run, sizes = Run(folder), state_sizes(folder)
    try:
        finished = run.summary is not None
    except RunError:
        return Prunable(folder, reason="summary.json is damaged")
    if not finished and not unfinished:
        return Prunable(folder, reason="not finished")
    if finished and sizes.get(CHECKPOINTS) and not _has_models(run):
        return Prunable(folder, reason="its only model is in a checkpoint: fedglad export takes it")
    if finished and MEMORIES in sizes and (run.summary or {}).get(KEPT_KEY) == "models":
        return Prunable(folder, reason="its client memories are the clients' own models")
    return Prunable(folder, sizes, "" if sizes else "nothing to remove")


def prune(folder: Path, *, unfinished: bool = False, busy: Busy | None = None) -> Prunable:
    """Removes a run's state, and says what it was: never models, records or the summary.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> run = execute(*load("digits", {"rounds": 1}), out=Path(tempfile.mkdtemp()))
    >>> done = prune(run.folder)
    >>> sorted(path.name for path in run.folder.glob("*"))[:4]
    ['averaged.safetensors', 'config.toml', 'labels.json', 'log.txt']
    """
    if not prunable(folder, unfinished=unfinished).parts:
        return prunable(folder, unfinished=unfinished)
    with locked(folder, busy, "leave it"):
        there = prunable(folder, unfinished=unfinished)  # as it is now that nobody writes it
        if there.parts:
            try:
                remove_state(folder)
            except OSError as error:
                raise RunError(f"{folder}: not all could be removed: {error}") from error
    return there


def state_sizes(folder: Path) -> dict[str, int]:
    """The bytes of a run's state by folder, as far as it is there; links are not followed."""
    sizes = dict[str, int]()
    for part in PARTS:
        place = folder / part
        if place.is_dir() and not place.is_symlink():
            files_ = [path for path in place.rglob("*") if path.is_file()]
            sizes[part] = sum(path.lstat().st_size for path in files_)
    return sizes


def remove_state(folder: Path) -> None:
    """Removes a run's state, so that at no moment a checkpoint is there without what it needs.

    First go the small files that make checkpoints of tensors, the newest last.
    """
    places = [folder / part for part in PARTS if (folder / part).is_dir()]
    small = sorted((folder / CHECKPOINTS).glob("*.json"))
    for path in small:
        path.unlink()
    if small:
        files.sync(folder / CHECKPOINTS)
    for place in places:
        shutil.rmtree(place)


def keeps(folder: Path, client: Any, asked: bool | None) -> bool | str:
    """Whether a run that is finished keeps its state, as `KEPT_KEY` has it.

    If nothing is asked, it does if that is small and no client's memory. Where each client has a
    model of its own (`tests_own`), the memories are models, and stay in any case.
    """
    sizes = state_sizes(folder)
    if MEMORIES in sizes and getattr(client, "tests_own", False):
        return "models"
    if asked is not None:
        return asked
    return MEMORIES not in sizes and sum(sizes.values()) <= SMALL


def tidy(run: Run, busy: Busy | None = None) -> None:
    """Removes what a finished run was about to remove when it was killed."""
    if (run.summary or {}).get(KEPT_KEY) is False and state_sizes(run.folder):
        with locked(run.folder, busy):
            remove_state(run.folder)


def _has_models(run: Run) -> bool:
    """Whether the models that the summary names are there, each as it was written."""
    named = (run.summary or {}).get("models")
    if not isinstance(named, dict) or MODELS[0] not in named:
        return False
    with suppress(OSError, ValueError):
        return all(checksums.verify_tensors(run.folder / n)[1] == crc for n, crc in named.items())
    return False
