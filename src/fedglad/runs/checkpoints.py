"""A run's checkpoints: saving its state, and going back to the last one that can be read."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedglad.config.schema import FORMAT
from fedglad.core import checkpoint, checksums, files
from fedglad.core.memory import Memories
from fedglad.runs.folder import Records, Run, RunError
from fedglad.runs.line import number
from fedglad.runs.models import UNUSABLE, Best
from fedglad.runs.parts import cut
from fedglad.runs.reader import BULK, CLIENT_SCORES, ROUNDS_FILE, Lines, objects
from fedglad.server.migrating import migrated
from fedglad.simulation.driver import Driver
from fedglad.trust import Alarm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints of a run stay: the last, every k-th round's, the best round's.

    | argument | meaning |
    |---|---|
    | `last` | so many of the newest |
    | `every` | also those after each so many rounds; 0: none |
    | `best` | also that of the round with the best score |

    One before the last is there in case that is damaged. Rounds are counted from 1, as checkpoints
    are named. The best is that with the greatest score among those that have one; of equals, the
    first.

    >>> scores = {10: 0.5, 20: 0.75, 30: None, 40: 0.75, 50: 0.25, 60: 0.5}
    >>> sorted(Keep(last=2).of(scores)), sorted(Keep(last=1, every=30, best=True).of(scores))
    ([50, 60], [20, 30, 60])
    """

    last: int = 2
    every: int = 0
    best: bool = False

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"last={self.last}, every={self.every}: at least the last checkpoint stays, and "
                "every=0 keeps no others"
            )

    @property
    def lasting(self) -> bool:
        """Whether there are checkpoints that are meant to stay when others come."""
        return self.every > 0 or self.best

    def due(self, done: int) -> bool:
        """Whether the checkpoint after so many rounds is one of every k-th."""
        return self.every > 0 and done % self.every == 0

    def of(self, scores: Mapping[int, float | None]) -> set[int]:
        """Those that stay of the checkpoints after so many rounds, each with its score."""
        rounds = sorted(scores)
        tested = {done: v for done in rounds if (v := scores[done]) is not None}
        best = {max(tested, key=lambda done: tested[done])} if self.best and tested else set[int]()
        return {*rounds[-self.last :], *filter(self.due, rounds), *best}


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
    migrate: bool = False,
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
            _load(driver, {**meta, "tensors": tensors}, say if migrate else None)
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


def _load(driver: Driver, state: dict[str, Any], say: Callable[[str], None] | None) -> None:
    """Gives the server its state; with `say`, one of another model too, as far as it fits."""
    try:
        driver.server.load_state_dict(state)
    except checkpoint.OtherModel:
        if say is None:
            raise
        if driver.stores:
            raise RunError(
                "what is remembered of clients is of the model as it was, and cannot be migrated: "
                "begin a new run, with this one's model as its first"
            ) from None
        fitting, migration = migrated(state, driver.server)
        driver.server.load_state_dict(fitting)
        say(f"the model was changed: {migration.words}")


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
    *,
    keep: Keep = Keep(),  # noqa: B008 - it is frozen
    score: float | None = None,
) -> None:
    """The records first, then the tensors, last the small file that makes them a checkpoint.

    Then those are removed that `keep` does not name; `score` is that of the round, of which more is
    better, for a run that keeps its best.
    """
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
    if keep.best and score is not None and math.isfinite(score):
        state["score"] = score
    state["tensors"] = checkpoint.checksum(path.with_suffix(".safetensors"))
    files.write_text(path.with_suffix(".json"), checksums.json_with_crc(json.dumps(state)))
    there = {int(path.stem): path for path in _checkpoints(folder)}
    stay = keep.of({done: _score(path) if keep.best else None for done, path in there.items()})
    for done in sorted(there.keys() - stay):
        there[done].unlink()
        there[done].with_suffix(".safetensors").unlink(missing_ok=True)
    older, recent = sorted(stay)[: -keep.last], sorted(stay)[-keep.last :]
    for store in driver.stores:
        store.prune(recent[0], older)
    if best:
        best.prune(_checkpoints(folder))


def _score(path: Path) -> float | None:
    """The score that a checkpoint was saved with."""
    try:
        return number(json.loads(path.read_bytes())["score"])
    except UNUSABLE:
        return None
