"""Running a configuration in its folder, from the start or from its last checkpoint."""

import json
import logging
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from fedglad.config.schema import Config, load
from fedglad.core import checksums, files, malloc
from fedglad.core.interruptible import interruptible
from fedglad.records import Round
from fedglad.runs.checkpoints import check_format, restore, save
from fedglad.runs.folder import Busy, Interrupted, Records, Run, RunError, locked, make_folder
from fedglad.runs.models import Best, write_models
from fedglad.runs.reader import CLIENT_SCORES
from fedglad.runs.summary import summary_damage, write_summary
from fedglad.runs.trusted_code import remember, trusted
from fedglad.simulation.simulation import Simulation

OnRound = Callable[[Round], str | None]
"""Called with each round, which has its `server`; a text ends the run, and is the reason for it."""


def execute(
    name: str,
    config: Config,
    *,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    trust_code: bool = False,
    on_round: OnRound | None = None,
    busy: Busy | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> Run:
    """Runs a configuration in its folder, from the start or from its last checkpoint.

    A finished run of the same configuration is left as it is. A folder that another process is
    writing is refused, unless `busy` waits for it. Code that a run's folder names, and `load` has
    therefore not loaded, is run only if it was trusted for this folder before: `trust_code` trusts
    it. What is damaged of an unfinished run is said to `on_lost`, and the run goes on from the last
    state that is whole. `on_round` is called with each round; if it raises, what is done is saved.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = execute(*load("digits", {"rounds": 2, "client.epochs": 1}), out=folder)
    >>> [line["status"] for line in run.rounds()]
    ['stepped', 'stepped']
    """
    default = Path("runs") / f"{name}-{config.hash()}"
    config = trusted(config, out or default, trust_code=trust_code)
    run = Run(out or Path("runs") / f"{name}-{config.hash()}")
    path = run.folder / "config.toml"
    if not force and path.is_file():
        config = config.as_begun(path.read_text("utf-8", errors="replace"))
    if not force and _finished(run, config):
        return run
    if path.is_file() and not (resume or force):
        with locked(run.folder, busy):
            raise RunError(
                f"{run.folder} holds an unfinished run: go on with --resume, or replace it with "
                "--force"
            )
    malloc.keep()
    plan, text = config.plan(), config.to_toml()
    # If it cannot start, nothing is touched.
    with (
        interruptible() as asked_to_stop,
        closing(Simulation(plan, run.folder / "memories")) as simulation,
    ):
        make_folder(run.folder)
        with locked(run.folder, busy):
            if not force and _finished(run, config):  # by another process, meanwhile
                return run
            try:
                if force:
                    run.clear()
                # A file that is the same already stays: its time is that of the run's start.
                there = path.read_text("utf-8", errors="replace") if path.is_file() else None
                if there not in (text, checked := checksums.toml_with_crc(text)):
                    files.write_text(path, checked)
                if simulation.counts is not None:
                    counts = simulation.counts.astype(int).tolist()  # (client, class), for reports
                    labels = checksums.json_with_crc(json.dumps({"counts": counts}))
                    files.write_text(run.folder / "labels.json", labels)
                remember(config, run.folder)
                best = Best(run.folder, config.hash()) if simulation.validates else None
                restore(run, simulation, on_lost=on_lost, best=best)
                _play(run, config, simulation, on_round or (lambda _: None), asked_to_stop, best)
            except OSError as error:
                raise RunError(
                    f"{run.folder} could not be written: {error}. What was saved is intact: "
                    "make room and go on with --resume"
                ) from error
    return run


def _finished(run: Run, config: Config) -> bool:
    """Whether there is nothing to do; what else is in the folder must be the same run."""
    path = run.folder / "config.toml"
    if not path.is_file():
        return False
    if load(path, trust_code=config.own_names().values())[1].hash() != config.hash():
        raise RunError(
            f"{run.folder} holds a run with another configuration: choose another --out, or "
            "replace it with --force"
        )
    summary = run.summary
    if summary is None:
        return False
    versions = summary.get("versions")
    check_format(run, versions if isinstance(versions, dict) else {})
    if damage := summary_damage(summary):
        raise RunError(
            f"{run.folder}/summary.json is damaged: {damage}. Remove that file and go on with "
            "--resume, which writes it anew"
        )
    return True


def _play(
    run: Run,
    config: Config,
    simulation: Simulation,
    on_round: OnRound,
    asked_to_stop: Callable[[], bool],
    best: Best | None,
) -> None:
    folder = run.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    if asked_to_stop():
        raise Interrupted(f"stopped before a round began: go on with --resume (in {run.folder})")
    simulation.recall(run.rounds())
    tables = Records(run.folder / CLIENT_SCORES) if simulation.tested_clients else None
    with Records(run.folder / "rounds.jsonl") as records, tables or nullcontext():
        for played in simulation.rounds():
            records.write(played.to_dict())
            if tables and (table := played.client_line()):
                tables.write(table)
            if best:
                best.look(played, simulation.server)
            for client, reason in played.record.rejected.items():
                log = logging.getLogger("fedglad")
                log.warning("round %d: client %s left out: %s", played.t, client, reason)
            try:
                simulation.stopping.asked = on_round(played) or ""
            except Exception:
                save(folder, simulation, records, best, tables)
                raise
            stop = asked_to_stop()
            done = simulation.t == config.rounds or bool(simulation.stopping.reason)
            if stop or done or simulation.t % config.checkpoint_every == 0:
                save(folder, simulation, records, best, tables)
            if stop and not done:
                raise Interrupted(
                    f"stopped after {simulation.t} of {config.rounds} rounds, all saved: go on "
                    f"with --resume (in {run.folder})"
                )
    kept = write_models(run.folder, simulation.server, simulation.t, config.hash())
    more: dict[str, Any] = {"update_bytes": simulation.update_bytes}
    if (epsilon := simulation.server.epsilon) is not None:
        more["epsilon"] = epsilon
    if simulation.t < config.rounds:
        more["stopped"] = simulation.stopping.reason
    write_summary(run, kept | (best.write() if best else {}), more)
