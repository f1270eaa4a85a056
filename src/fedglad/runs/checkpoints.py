"""A run's checkpoints: saving its state, and going back to the last one that can be read."""

import json
import logging
import os
from pathlib import Path
from typing import Any, TextIO

from fedglad.config.schema import FORMAT
from fedglad.core import checkpoint, files
from fedglad.runs.folder import Run, RunError
from fedglad.simulation.driver import Driver
from fedglad.trust import Alarm

KEPT = 2  # checkpoints: the last, and one before it in case the last is damaged

WAY_OUT = "choose another --out, or replace the run with --force"


def check_format(run: Run, saved: dict[str, Any], way_out: str = WAY_OUT) -> None:
    """Refuses a run of a version of fedglad that gave other results."""
    if saved.get("format", 1) != FORMAT:
        raise RunError(
            f"{run.folder} holds a run of another version of fedglad, which gave other results: "
            f"{way_out}"
        )


def restore(run: Run, driver: Driver, way_out: str = WAY_OUT, *, from_start: bool = True) -> None:
    """Goes back to the newest checkpoint that can be read, and cuts the records to it.

    If there are checkpoints and none can be, to the start, or not at all.
    """
    folder = run.folder / "checkpoints"
    tensors_only = (p for p in folder.glob("*.safetensors") if not p.with_suffix(".json").exists())
    for left in [*files.leftovers(run.folder), *files.leftovers(folder), *tensors_only]:
        left.unlink()  # by a run that was killed
    records = run.rounds()
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            saved = json.loads(path.read_text())
            state = _present_form(saved, records)
            tensors, meta = checkpoint.read(path.with_suffix(".safetensors"))
            driver.server.load_state_dict({**meta, "tensors": tensors})
            check_format(run, saved, way_out)
        except checkpoint.OtherModel as error:  # the code of a user's model was changed
            raise RunError(f"{run.folder} cannot be continued: {error}; {way_out}") from None
        except (ValueError, OSError, KeyError, TypeError) as error:
            logging.getLogger("fedglad").warning(
                "checkpoint %s is not usable: %s", path.name, error
            )
            continue
        if saved.get("arithmetic", 1) != driver.arithmetic:
            raise RunError(
                f"{run.folder} was begun by another version of fedglad, which may have added up "
                "this model's sums in another order, to other bits: finish it with that version, "
                f"{way_out}"
            )
        driver.restore(state)
        break
    else:
        if not from_start and any(folder.glob("*.json")):
            raise RunError(
                f"{run.folder}: none of its checkpoints can be used (log.txt); {way_out}"
            )
    for store in driver.stores:
        store.restore(driver.t)
    if len(records) < driver.t:
        raise RunError(f"{run.folder}/rounds.jsonl lacks rounds: {way_out}")
    text = "".join(f"{json.dumps(record)}\n" for record in records[: driver.t])
    files.write_text(run.folder / "rounds.jsonl", text)


def _present_form(saved: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint saved of a driver, also one that was written before there was a driver.

    Then "sampler" held all that a session of Flower saves, or the sampler's state alone, and the
    alarm's state was that after the records.
    """
    t, sampler = int(saved["round"]), dict(saved["sampler"])
    alarm: dict[str, Any] = {}
    transport: dict[str, Any] = {}
    if "alarm" in saved:
        alarm, transport = dict(saved["alarm"]), dict(saved["transport"])
    elif sampler.keys() == {"sampler", "alarm", "nodes", "usual"}:
        transport = sampler
        sampler, alarm = dict(transport.pop("sampler")), dict(transport.pop("alarm"))
    else:
        for record in records[:t]:
            gsi = record.get("gsi_all") if record.get("status") == "stepped" else None
            _, alarm = Alarm().judge(gsi, alarm)
    return {"round": t, "sampler": sampler, "alarm": alarm, "transport": transport}


def save(folder: Path, driver: Driver, records: TextIO) -> None:
    """The records first, then the tensors, last the small file that makes them a checkpoint."""
    os.fsync(records.fileno())
    for store in driver.stores:
        store.sync()
    path = folder / f"{driver.t:06d}"
    driver.server.save(path.with_suffix(".safetensors"))
    state = {"format": FORMAT, **driver.state()}
    files.write_text(path.with_suffix(".json"), json.dumps(state))
    *old, oldest = sorted(folder.glob("*.json"))[: -KEPT + 1] or [path]
    for past in old:
        past.unlink()
        past.with_suffix(".safetensors").unlink(missing_ok=True)
    for store in driver.stores:
        store.prune(int(oldest.stem))
