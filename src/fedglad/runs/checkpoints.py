"""A run's checkpoints: saving its state, and going back to the last one that can be read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedglad.config.schema import FORMAT
from fedglad.core import checkpoint, checksums, files
from fedglad.core.memory import Memories
from fedglad.runs.folder import Records, Run, RunError
from fedglad.runs.models import UNUSABLE, Best
from fedglad.runs.parts import cut
from fedglad.runs.reader import BULK, CLIENT_SCORES, ROUNDS_FILE, Lines, objects
from fedglad.simulation.driver import Driver
from fedglad.trust import Alarm

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2  # checkpoints: the last, and one before it in case the last is damaged

WAY_OUT = "choose another --out, or replace the run with --force"


def check_format(run: Run, saved: dict[str, Any], way_out: str = WAY_OUT) -> None:
    """Refuses a run of a version of fedglad that gave other results."""
    if saved.get("format", 1) != FORMAT:
        raise RunError(
            f"{run.folder} holds a run of another version of fedglad, which gave other results: "
            f"{way_out}"
        )


def restore(
    run: Run,
    driver: Driver,
    way_out: str = WAY_OUT,
    *,
    from_start: bool = True,
    on_lost: Callable[[str], None] | None = None,
    best: Best | None = None,
) -> None:
    """Goes back to the newest state that is whole, and cuts the records to it.

    That is a checkpoint with its tensors, the memories it needs, the best models up to it, for a
    run that keeps them, and the records of its rounds; if there are checkpoints and none is whole,
    the start, or none at all. `on_lost` is called with a sentence on each that could not be used.
    """
    folder = run.folder / "checkpoints"
    tensors_only = (p for p in folder.glob("*.safetensors") if not p.with_suffix(".json").exists())
    for left in [*files.leftovers(run.folder), *files.leftovers(folder), *tensors_only]:
        left.unlink()  # by a run that was killed

    def say(lost: str) -> None:
        logging.getLogger("fedglad").warning("%s", lost)
        if on_lost:
            on_lost(lost)

    lines, lacking, memories = run.lines(without=BULK), "", dict[str, Any]()
    by_client = run.lines(CLIENT_SCORES)
    records, beginning = objects(lines.records), driver.state()
    paths = _checkpoints(folder)
    for path in reversed(paths):
        try:
            saved = _read(path)
            if len(records) < saved["round"]:
                lacking = lines.damage or f"rounds.jsonl has {len(records)} rounds"
                raise checkpoint.CheckpointError(lacking)
            if problem := _client_problem(by_client, records[: saved["round"]]):
                raise checkpoint.CheckpointError(problem)
            state = _present_form(saved, records)
            memories = saved.get("memories", {})
            for place, store in _places(run.folder, driver).items():
                if problem := store.problem(memories.get(place, {})):
                    raise checkpoint.CheckpointError(problem)
            if best:
                best.restore(saved.get("best", {}), records)
            tensors, meta = checkpoint.read(path.with_suffix(".safetensors"))
            check_format(run, saved, way_out)
            if saved.get("arithmetic", 1) != driver.arithmetic:
                raise RunError(
                    f"{run.folder} was begun by another version of fedglad, which may have added "
                    "up this model's sums in another order, to other bits: finish it with that "
                    f"version, {way_out}"
                )
            with checkpoint.reading("its state"):
                driver.server.weighting.restored(meta["weighting"]["state"])
                driver.restore(state)
            driver.server.load_state_dict({**meta, "tensors": tensors})
            break
        except checkpoint.OtherModel as error:  # the code of a user's model was changed
            raise RunError(f"{run.folder} cannot be continued: {error}; {way_out}") from None
        except (*UNUSABLE, ArithmeticError) as error:
            say(f"checkpoint {path.name} is not usable: {error}")
    else:
        if lacking:
            raise RunError(f"{run.folder}: {lacking}, so it lacks rounds: {way_out}")
        if not from_start and paths:
            raise RunError(
                f"{run.folder}: none of its checkpoints can be used (log.txt); {way_out}"
            )
        driver.restore(beginning)  # the last one may have been good but for the server's state
        if best:
            best.restore({}, records)
    if paths and driver.t < int(paths[-1].stem):
        say(f"going on after round {driver.t}" if driver.t else "going on from the start")
    places = {store: place for place, store in _places(run.folder, driver).items()}
    for store in driver.stores:
        store.restore(driver.t, memories.get(places.get(store, "")) if driver.t else None)
    cut(run.folder / ROUNDS_FILE, driver.t)
    if os.path.lexists(run.folder / CLIENT_SCORES):
        cut(run.folder / CLIENT_SCORES, len(_client_rounds(records[: driver.t])))
    for path in paths:  # those that are not usable: else they would count among those to be kept
        if int(path.stem) > driver.t:
            path.unlink()
            path.with_suffix(".safetensors").unlink(missing_ok=True)
    if best:
        best.prune(_checkpoints(folder))


def _client_rounds(records: list[dict[str, Any]]) -> list[int]:
    """The rounds in which single clients were tested."""
    return [record["round"] for record in records if "client_scores" in record]


def _client_problem(by_client: Lines, records: list[dict[str, Any]]) -> str:
    """Which scores of single clients are lacking for these records; empty if none are."""
    needed = _client_rounds(records)
    there = [line.get("round") for line in objects(by_client.records)][: len(needed)]
    if there == needed:
        return ""
    return by_client.damage or f"{CLIENT_SCORES} lacks rounds in which clients were tested"


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """The server's state in a run's newest checkpoint that is whole: tensors, JSON, and the file.

    RunError says that there is none, and what is wrong with the last one.
    """
    wrong = ""
    for path in reversed(_checkpoints(folder / "checkpoints")):
        try:
            _read(path)
            source = path.with_suffix(".safetensors")
            return (*checkpoint.read(source), source)
        except UNUSABLE as error:
            wrong = wrong or f" that can be read: {path.name} is not usable, {error}"
    raise RunError(f"{folder} has no checkpoint{wrong}")


def _checkpoints(folder: Path) -> list[Path]:
    """The small files of all checkpoints, the oldest first."""
    return sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())


def _places(folder: Path, driver: Driver) -> dict[str, Memories]:
    """What is remembered of clients in a run's folder, by where that is."""
    inside = [store for store in driver.stores if store.folder.is_relative_to(folder)]
    return {store.folder.relative_to(folder).as_posix(): store for store in inside}


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint's small file; raises if it is damaged, or its tensors are of another one."""
    data = path.read_bytes()
    saved = json.loads(data.decode("utf-8"))
    if checksums.verify(data) == "damaged":
        raise checkpoint.CheckpointError("its checksum does not match")
    if checkpoint.whole_number(saved["round"]) != int(path.stem):
        raise checkpoint.CheckpointError(f"it is that of round {saved['round']}")
    tensors = saved.get("tensors")
    if tensors is not None and tensors != checkpoint.checksum(path.with_suffix(".safetensors")):
        raise checkpoint.CheckpointError("its tensors are those of another checkpoint")
    return saved


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


def save(
    folder: Path,
    driver: Driver,
    records: Records,
    best: Best | None = None,
    by_client: Records | None = None,
) -> None:
    """The records first, then the tensors, last the small file that makes them a checkpoint."""
    records.sync()
    if by_client:
        by_client.sync()
    for store in driver.stores:
        store.sync()
    path = folder / f"{driver.t:06d}"
    driver.server.save(path.with_suffix(".safetensors"))
    state = {"format": FORMAT, **driver.state()}
    if places := _places(folder.parent, driver):
        state["memories"] = {place: store.needed() for place, store in places.items()}
    if best:
        state["best"] = best.save()
    state["tensors"] = checkpoint.checksum(path.with_suffix(".safetensors"))
    files.write_text(path.with_suffix(".json"), checksums.json_with_crc(json.dumps(state)))
    *old, oldest = _checkpoints(folder)[: -KEPT + 1] or [path]
    for past in old:
        past.unlink()
        past.with_suffix(".safetensors").unlink(missing_ok=True)
    for store in driver.stores:
        store.prune(int(oldest.stem))
    if best:
        best.prune(_checkpoints(folder))
