"""A run's folder that travels: all that the run has written as bytes, and into another folder."""

from contextlib import suppress
from pathlib import Path

from fedglad.core import files
from fedglad.runs.reader import CLIENT_SCORES, WRITTEN, WRITTEN_INTO

Files = dict[str, bytes]
"""What is in the files of a run, by their paths in its folder; without its log."""


def packed(folder: Path) -> Files:
    """The files of a run that nobody is writing."""
    return {path: (folder / path).read_bytes() for path in _written(folder)}


def packed_meanwhile(folder: Path) -> Files:
    """The same of a run that goes on; {} if it is just saving its state, or has saved none.

    What a checkpoint needs stays until the next one is there, so it is whole.
    """
    before = _checkpoints(folder)
    with suppress(FileNotFoundError):
        found = packed(folder)
        if before and before == _checkpoints(folder):
            return found
    return {}


def unpack(found: Files, folder: Path) -> None:
    """Makes these the files of the run in a folder, each whole or not there.

    In the order in which a run writes them: whatever happens meanwhile, the run in the folder goes
    on from a state that is whole, and is finished only when all of it is there.
    """
    for name in sorted(found, key=_rank):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name!r} is no file of the run in {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.is_file() and path.read_bytes() == found[name]):
            with files.replacing(path) as temporary:
                temporary.write_bytes(found[name])
    for name in _written(folder):
        if name not in found:
            (folder / name).unlink()


def _rank(name: str) -> int:
    """Tensors, then records, then what makes them a checkpoint, then the summary."""
    if name in ("rounds.jsonl", CLIENT_SCORES):
        return 1
    if name == "summary.json":
        return 3
    return 2 if name.startswith("checkpoints/") and name.endswith(".json") else 0


def _written(folder: Path) -> list[str]:
    inside = (path for name in WRITTEN_INTO for path in sorted((folder / name).rglob("*")))
    there = [path for path in (*(folder / name for name in WRITTEN), *inside) if path.is_file()]
    half = {path for place in {path.parent for path in there} for path in files.leftovers(place)}
    return [path.relative_to(folder).as_posix() for path in there if path not in half]


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*.json"))
