"""The models that a run leaves: the last one, the average, and the best by a validation set.

A finished run has them beside summary.json, which names them and their checksums:

| file | what it holds |
|---|---|
| `model.safetensors` | θ after the last round: parameters and buffers by their names |
| `averaged.safetensors` | the average of past models, of a run that keeps one |
| `best.safetensors` | θ after the best round by the score on a validation set, if it has one |
| `best_averaged.safetensors` | the average after its own best round |

The best so far belongs to what a checkpoint commits: it lies in `best/` by its round, and the
checkpoint names it, so that a run that goes back to a checkpoint goes back to its best models too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedglad.core import checkpoint, files
from fedglad.runs.reader import BEST
from fedglad.runs.scores import score_of

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.records import Round
    from fedglad.server.server import Server

State = Mapping[str, "Tensor"]

UNUSABLE = (ValueError, OSError, LookupError, TypeError, AttributeError)
"""What is raised while a checkpoint is read that is damaged, or that anybody may have made."""

CHOSEN_BY = {"best": "validation", "best_averaged": "averaged_validation"}
"""The one of READOUTS whose score chooses each of the best models."""


def write_models(folder: Path, server: Server, done: int, run: str) -> dict[str, str]:
    """Writes a server's model, and its average if it keeps one, into a folder.

    `done` is the number of rounds behind it and `run` the hash of the run's configuration; both
    stand in the files' headers. Returns the checksum of each file by its name.
    """
    states: dict[str, State] = {"model": server.trained}
    if server.has_average:
        states["averaged"] = server.trained_average
    return dict(
        _write(folder / f"{which}.safetensors", which, state, done, run)
        for which, state in states.items()
    )


@dataclass(frozen=True)
class Candidate:
    """The best model so far: after how many rounds, with which score."""

    done: int
    value: float
    state: State


class Best:
    """The best models of a run so far, by the score on its validation set.

    The first of equals stays. One is kept by the scores of θ, another by those of the average.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.kept: dict[str, Candidate] = {}

    def look(self, played: Round, server: Server) -> None:
        """Keeps a copy of the model, or of the average, if it is the best so far."""
        for which, readout in CHOSEN_BY.items():
            value, before = played.scored(readout), self.kept.get(which)
            if value is None or not math.isfinite(value):
                continue
            if before is None or played.score.better(value, before.value):
                state = server.trained if which == "best" else server.trained_average
                copied = {name: tensor.clone() for name, tensor in state.items()}
                self.kept[which] = Candidate(played.t + 1, value, copied)

    def save(self) -> dict[str, list[Any]]:
        """Makes sure that each is on the disk; its round and checksum, for the checkpoint."""
        place = self.folder / BEST
        place.mkdir(exist_ok=True)
        saved: dict[str, list[Any]] = {}
        for which, one in self.kept.items():
            path = place / file_of(which, one.done)
            if not path.is_file():
                _write(path, which, one.state, one.done, self.run)
            saved[which] = [one.done, checkpoint.checksum(path)]
        return saved

    def restore(self, saved: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Goes back to those that a checkpoint names; raises if one of them cannot be had."""
        kept: dict[str, Candidate] = {}
        for which, (done, crc) in named(saved).items():
            path = self.folder / BEST / file_of(which, done)
            state, _ = checkpoint.read(path)
            if checkpoint.checksum(path) != crc:
                raise checkpoint.CheckpointError(f"{path} is not the one that it was saved with")
            field = f"{CHOSEN_BY[which]}_{score_of(records).name}"
            value = checkpoint.finite(records[done - 1][field])
            kept[which] = Candidate(done, value, state)
        self.kept = kept

    def prune(self, checkpoints: Sequence[Path]) -> None:
        """Removes what none of these checkpoints needs, and what a killed write has left."""
        place = self.folder / BEST
        needed = set[str]()
        for path in checkpoints:
            with suppress(*UNUSABLE):
                saved = json.loads(path.read_bytes())["best"]
                needed |= {file_of(which, done) for which, (done, _) in named(saved).items()}
        others = (path for path in place.glob("*.safetensors") if path.name not in needed)
        for path in [*others, *files.leftovers(place)]:
            path.unlink()

    def write(self) -> dict[str, str]:
        """Writes them beside the run's model; the checksum of each file by its name."""
        return dict(
            _write(self.folder / f"{which}.safetensors", which, one.state, one.done, self.run)
            for which, one in self.kept.items()
        )


def file_of(which: str, done: int) -> str:
    """The name of a best model's file in `best/`."""
    return f"{which}-{done:06d}.safetensors"


def named(saved: Any) -> dict[str, tuple[int, str]]:
    """The best models that a checkpoint names: after how many rounds, and the file's checksum.

    Raises ValueError, LookupError or TypeError for anything else.

    >>> named({"best": [7, "3141592653"]})
    {'best': (7, '3141592653')}
    """
    known: dict[str, tuple[int, str]] = {}
    for which, (done, crc) in dict(saved).items():
        if which not in CHOSEN_BY or checkpoint.whole_number(done) < 1:
            raise ValueError(f"its best models: {which!r} after round {done!r} is none")
        known[which] = done, str(crc)
    return known


def _write(path: Path, which: str, state: State, done: int, run: str) -> tuple[str, str]:
    meta = {"version": checkpoint.VERSION, "which": which, "round": done, "run": run}
    checkpoint.write(path, apart(state), meta)
    return path.name, checkpoint.checksum(path)


def apart(state: State) -> dict[str, Tensor]:
    """The same tensors where none shares its memory with another, as a file needs them.

    Tied parameters are one tensor under several names; each name gets it.
    """
    seen, copied = set[int](), dict[str, "Tensor"]()
    for name, tensor in state.items():
        own = tensor.detach().contiguous()
        copied[name] = own.clone() if own.data_ptr() in seen else own
        seen.add(own.data_ptr())
    return copied
