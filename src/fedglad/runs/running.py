"""A run's folder: config.toml, labels.json, rounds.jsonl, checkpoints/, summary.json, log.txt."""

import fcntl
import json
import logging
import math
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import numpy as np
import torch

from fedglad.config.schema import FORMAT, Config, load
from fedglad.core import checkpoint, malloc
from fedglad.records import Round
from fedglad.server.server import Server
from fedglad.simulation.simulation import Simulation

KEPT = 2  # checkpoints: the last, and one before it in case the last is damaged

WAY_OUT = "choose another --out, or replace the run with --force"

OnRound = Callable[[Round], None]
Busy = Callable[[], None]
"""Called while another process has the folder: waits a moment, or raises."""


class RunError(RuntimeError):
    """A run that cannot start or go on; the message says what to do."""


class Progress(Protocol):
    """A run as its folder knows it: what a checkpoint saves."""

    server: Server
    t: int
    stores: list[Any]

    @property
    def sampler_state(self) -> dict[str, Any]: ...
    @sampler_state.setter
    def sampler_state(self, saved: dict[str, Any]) -> None: ...


class Interrupted(RunError):
    """Stopped by Ctrl-C with everything saved."""


@dataclass(frozen=True)
class Run:
    """A folder that holds a run, or will."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, once the run is finished."""
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
            if not isinstance(found, dict):
                raise ValueError(f"{found!r} is no summary")
        except ValueError as error:
            raise RunError(
                f"{path} is damaged: {error}. Remove that file and go on with --resume, which "
                "writes it anew"
            ) from None
        return found

    @property
    def skipped(self) -> str:
        """That at least half of the rounds were skipped, and why the last one; empty if not."""
        summary = self.summary or {}
        skipped, rounds = summary.get("skipped", 0), summary.get("rounds", 0)
        if not skipped or 2 * skipped < rounds:
            return ""
        reasons = [found.get("reason") for found in self.rounds() if found["status"] == "skipped"]
        return f"{skipped} of {rounds} rounds were skipped: {reasons[-1] if reasons else 'unknown'}"

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds recorded so far; a line cut off by a crash is left out."""
        path = self.folder / "rounds.jsonl"
        return parse(path.read_text("utf-8", errors="replace")) if path.is_file() else []

    def clear(self) -> None:
        """Removes what a run writes, and nothing else; the log, which may be locked, is emptied."""
        if (self.folder / "log.txt").is_file():
            os.truncate(self.folder / "log.txt", 0)
        for name in ("config.toml", "labels.json", "rounds.jsonl", "summary.json"):
            (self.folder / name).unlink(missing_ok=True)
        for name in ("checkpoints", "memories"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def parse(lines: str) -> list[dict[str, Any]]:
    """The rounds of rounds.jsonl up to the first line that is none."""
    found: list[dict[str, Any]] = []
    for line in lines.splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):  # also a number too long, or lists too deep
            break
    return found


def execute(
    name: str,
    config: Config,
    *,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    on_round: OnRound | None = None,
    busy: Busy | None = None,
) -> Run:
    """Runs a configuration in its folder, from the start or from its last checkpoint.

    A finished run of the same configuration is left as it is. A folder that another process is
    writing is refused, unless `busy` waits for it.
    """
    run = Run(out or Path("runs") / f"{name}-{config.hash()}")
    if not force and _finished(run, config):
        return run
    if (run.folder / "config.toml").is_file() and not (resume or force):
        with locked(run.folder, busy):
            raise RunError(
                f"{run.folder} holds an unfinished run: go on with --resume, or replace it with "
                "--force"
            )
    malloc.keep()
    plan = config.plan()
    # If it cannot start, nothing is touched.
    with (
        patient() as asked_to_stop,
        closing(Simulation(plan, run.folder / "memories")) as simulation,
    ):
        make_folder(run.folder)
        with locked(run.folder, busy):
            if not force and _finished(run, config):  # by another process, meanwhile
                return run
            try:
                if force:
                    run.clear()
                _write_config(run, config)
                _write_labels(run, simulation)
                restore(run, simulation)
                simulation.recall(run.rounds())
                _play(run, config, simulation, on_round or (lambda _: None), asked_to_stop)
            except OSError as error:
                raise RunError(
                    f"{run.folder} could not be written: {error}. What was saved is intact: "
                    "make room and go on with --resume"
                ) from error
    return run


def make_folder(folder: Path, way_out: str = "choose another --out") -> None:
    """Makes sure that it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the folder {folder} cannot be made: {error.strerror}; {way_out}") from None


def _finished(run: Run, config: Config) -> bool:
    """Whether there is nothing to do; what else is in the folder must be the same run."""
    path = run.folder / "config.toml"
    if not path.is_file():
        return False
    if load(path)[1].hash() != config.hash():
        raise RunError(
            f"{run.folder} holds a run with another configuration: choose another --out, or "
            "replace it with --force"
        )
    if run.summary is not None:
        _check_format(run, run.summary.get("versions", {}))
    return run.summary is not None


def _check_format(run: Run, saved: dict[str, Any], way_out: str = WAY_OUT) -> None:
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
    for left in [*checkpoint.leftovers(run.folder), *checkpoint.leftovers(folder), *tensors_only]:
        left.unlink()  # by a run that was killed
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            saved = json.loads(path.read_text())
            t, sampler_state = int(saved["round"]), dict(saved["sampler"])
            tensors, meta = checkpoint.read(path.with_suffix(".safetensors"))
            simulation.server.load_state_dict({**meta, "tensors": tensors})
            _check_format(run, saved, way_out)
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
    checkpoint.write_text(run.folder / "rounds.jsonl", text)


def _write_config(run: Run, config: Config) -> None:
    """A file that says it already stays: its time is that of the run's start."""
    path, text = run.folder / "config.toml", config.to_toml()
    if not path.is_file() or path.read_text("utf-8", errors="replace") != text:
        checkpoint.write_text(path, text)


def _write_labels(run: Run, simulation: Simulation) -> None:
    """How many samples of each class every client has, for reports; where it is known."""
    if simulation.counts is not None:
        counts = simulation.counts.astype(int).tolist()
        checkpoint.write_text(run.folder / "labels.json", json.dumps({"counts": counts}))


def _play(
    run: Run,
    config: Config,
    simulation: Simulation,
    on_round: OnRound,
    asked_to_stop: Callable[[], bool],
) -> None:
    folder = run.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    if asked_to_stop():
        raise Interrupted(f"stopped before a round began: go on with --resume (in {run.folder})")
    with open(run.folder / "rounds.jsonl", "a") as records:
        for played in simulation.rounds():
            records.write(json.dumps(played.to_dict(), allow_nan=False) + "\n")
            records.flush()
            for client, reason in played.record.rejected.items():
                log = logging.getLogger("fedglad")
                log.warning("round %d: client %s left out: %s", played.t, client, reason)
            on_round(played)
            stop = asked_to_stop()
            done = simulation.t == config.rounds
            if stop or done or simulation.t % config.checkpoint_every == 0:
                save(folder, simulation, records)
            if stop and not done:
                raise Interrupted(
                    f"stopped after {simulation.t} of {config.rounds} rounds, all saved: go on "
                    f"with --resume (in {run.folder})"
                )
    checkpoint.write_text(
        run.folder / "summary.json", json.dumps(summarise(run.rounds()), indent=2)
    )


def save(folder: Path, simulation: Progress, records: TextIO) -> None:
    """The records first, then the tensors, last the small file that makes them a checkpoint."""
    os.fsync(records.fileno())
    for store in simulation.stores:
        store.sync()
    path = folder / f"{simulation.t:06d}"
    simulation.server.save(path.with_suffix(".safetensors"))
    state = {"format": FORMAT, "round": simulation.t, "sampler": simulation.sampler_state}
    checkpoint.write_text(path.with_suffix(".json"), json.dumps(state))
    *old, oldest = sorted(folder.glob("*.json"))[: -KEPT + 1] or [path]
    for past in old:
        past.unlink()
        past.with_suffix(".safetensors").unlink(missing_ok=True)
    for store in simulation.stores:
        store.prune(int(oldest.stem))


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a finished run; a figure that was never measured is None."""
    tested = [r["test_accuracy"] for r in rounds if r["test_accuracy"] is not None]
    return {
        "last10_accuracy": math.fsum(tested[-10:]) / len(tested[-10:]) if tested else None,
        "final_accuracy": tested[-1] if tested else None,
        "rounds": len(rounds),
        "skipped": sum(r["status"] == "skipped" for r in rounds),
        "seconds": math.fsum(s for r in rounds for s in r["seconds"].values()),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "format": FORMAT,
        },
        "machine": machine(),
    }


def machine() -> str:
    """What kind of machine this is."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


@contextmanager
def patient() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C is noted, for the end of the round; the second stops at once."""
    asked: list[float] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(time.monotonic())

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, which alone hears of Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def locked(
    folder: Path, busy: Busy | None = None, way_out: str = "choose another --out"
) -> Generator[None]:
    """The run's log; the lock on it lets one process at a time write the folder."""
    logger = logging.getLogger("fedglad")
    try:
        handler = logging.FileHandler(folder / "log.txt")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}; {way_out}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        while not _locked(handler):
            if busy is None:
                raise RunError(
                    f"{folder} is being written by another process: wait for it, or {way_out}"
                )
            busy()
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        handler.close()


def _locked(handler: logging.FileHandler) -> bool:
    try:
        fcntl.flock(cast(TextIO, handler.stream), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
