"""A run's checkpoints: saving its state, and going back to the last one that can be read."""

import json
import logging
import os
from pathlib import Path
from typing import Any, Protocol, TextIO

from fedglad.config.schema import FORMAT
from fedglad.core import checkpoint, files
from fedglad.runs.folder import Run, RunError
from fedglad.server.server import Server

KEPT = 2  # checkpoints: the last, and one before it in case the last is damaged

WAY_OUT = "choose another --out, or replace the run with --force"


class Progress(Protocol):
    """A run as its folder knows it: what a checkpoint saves."""

    server: Server
    t: int
    stores: list[Any]

    @property
    def sampler_state(self) -> dict[str, Any]: ...
    @sampler_state.setter
    def sampler_state(self, saved: dict[str, Any]) -> None: ...


def check_format(run: Run, saved: dict[str, Any], way_out: str = WAY_OUT) -> None:
    if saved.get("format", 1) != FORMAT:
        raise RunError(
            f"{run.folder} holds a run of another version of fedglad, which gave other results: "
            f"{way_out}"
        )


def restore(
    run: Run, simulation: Progress, way_out: str = WAY_OUT, *, from_start: bool = True
) -> None:
    """Goes back to the newest checkpoint that can be read, and cuts the records to it.

    If there are checkpoints and none can be, to the start, or not at all.
    """
    folder = run.folder / "checkpoints"
    tensors_only = (p for p in folder.glob("*.safetensors") if not p.with_suffix(".json").exists())
    for left in [*files.leftovers(run.folder), *files.leftovers(folder), *tensors_only]:
        left.unlink()  # by a run that was killed
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            saved = json.loads(path.read_text())
            t, sampler_state = int(saved["round"]), dict(saved["sampler"])
            tensors, meta = checkpoint.read(path.with_suffix(".safetensors"))
            simulation.server.load_state_dict({**meta, "tensors": tensors})
            check_format(run, saved, way_out)
        except checkpoint.OtherModel as error:  # an own model's code was changed
            raise RunError(f"{run.folder} cannot be continued: {error}; {way_out}") from None
        except (ValueError, OSError, KeyError, TypeError) as error:
            logging.getLogger("fedglad").warning(
                "checkpoint %s is not usable: %s", path.name, error
            )
            continue
        simulation.t, simulation.sampler_state = t, sampler_state
        break
    else:
        if not from_start and any(folder.glob("*.json")):
            raise RunError(
                f"{run.folder}: none of its checkpoints can be used (log.txt); {way_out}"
            )
    for store in simulation.stores:
        store.restore(simulation.t)
    lines = [json.dumps(found) for found in run.rounds()[: simulation.t]]
    if len(lines) < simulation.t:
        raise RunError(f"{run.folder}/rounds.jsonl lacks rounds: {way_out}")
    text = "".join(f"{line}\n" for line in lines)
    files.write_text(run.folder / "rounds.jsonl", text)


def save(folder: Path, simulation: Progress, records: TextIO) -> None:
    """The records first, then the tensors, last the small file that makes them a checkpoint."""
    os.fsync(records.fileno())
    for store in simulation.stores:
        store.sync()
    path = folder / f"{simulation.t:06d}"
    simulation.server.save(path.with_suffix(".safetensors"))
    state = {"format": FORMAT, "round": simulation.t, "sampler": simulation.sampler_state}
    files.write_text(path.with_suffix(".json"), json.dumps(state))
    *old, oldest = sorted(folder.glob("*.json"))[: -KEPT + 1] or [path]
    for past in old:
        past.unlink()
        past.with_suffix(".safetensors").unlink(missing_ok=True)
    for store in simulation.stores:
        store.prune(int(oldest.stem))
