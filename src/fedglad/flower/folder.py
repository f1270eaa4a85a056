"""The folder of a run with Flower: the same files as the simulator's, and going on from them."""

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from fedglad.config.schema import Config, ConfigError, load
from fedglad.core import files
from fedglad.flower import log
from fedglad.flower.session import Session
from fedglad.flower.settings import Arrays, ClientApp, Engine, Nodes
from fedglad.runs.checkpoints import restore, save
from fedglad.runs.folder import Run, RunError, locked, make_folder
from fedglad.runs.summary import summarise

WAY_OUT = "choose another checkpoint_dir, or remove this one"


class Folder:
    """Where rounds are written as they are done; without a path, nowhere.

    One that is not resumable has no checkpoints: the strategy's state is not ours to save.
    """

    def __init__(self, path: str | PathLike[str] | None = None, *, resumable: bool = True) -> None:
        self.run = None if path is None else Run(Path(path))
        self.resumable = resumable
        self._records: TextIO | None = None

    @contextmanager
    def open(self, session: Session, rounds: int) -> Generator[list[dict[str, Any]]]:
        """Locks the folder and restores the session; gives the rounds that are there."""
        if self.run is None:
            yield []
            return
        make_folder(self.run.folder, WAY_OUT)
        with locked(self.run.folder, way_out=WAY_OUT):
            if not self.resumable and self.run.rounds():
                raise RunError(f"{self.run.folder} holds a run already: {WAY_OUT}")
            self._describe(self.run.folder, session, rounds)
            if self.resumable:
                (self.run.folder / "checkpoints").mkdir(exist_ok=True)
                restore(self.run, session, WAY_OUT, from_start=False)
            records = self.run.rounds()
            if records:
                log.info(
                    "Going on after round %d of %d in %s", len(records), rounds, self.run.folder
                )
            with open(self.run.folder / "rounds.jsonl", "a", encoding="utf-8") as self._records:
                try:
                    yield records
                finally:
                    self._records = None

    def write(self, record: dict[str, Any], session: Session) -> None:
        """One round: its line first, then the checkpoint that makes it count."""
        if self.run is None or self._records is None:
            return
        try:
            self._records.write(json.dumps(record, allow_nan=False) + "\n")
            self._records.flush()
            if self.resumable:
                save(self.run.folder / "checkpoints", session, self._records)
        except OSError as error:
            raise RunError(
                f"{self.run.folder} could not be written: {error}. What was saved is intact: make "
                "room and start again"
            ) from error

    def finish(self) -> None:
        """The result of the whole run."""
        if self.run is not None:
            text = json.dumps(summarise(self.run.rounds()), indent=2)
            files.write_text(self.run.folder / "summary.json", text)

    def _describe(self, folder: Path, session: Session, rounds: int) -> None:
        """Writes config.toml, or sees that the one there is of the same run."""
        config = describe(session, max(rounds, len(Run(folder).rounds()), 1))
        path = folder / "config.toml"
        try:
            text = config.to_toml()
            if path.is_file():
                theirs = load(path)[1]
                if replace(theirs, rounds=config.rounds).hash() != config.hash():
                    raise RunError(
                        f"{folder} holds a run with other settings (config.toml): {WAY_OUT}"
                    )
            files.write_text(path, text)
        except (TypeError, ConfigError) as error:
            log.warn("%s cannot say all settings of this run: %s", path, error)


def describe(session: Session, rounds: int) -> Config:
    """The configuration of a run, as far as the server's side knows it."""
    server = session.server
    return Config(
        rounds=rounds,
        seed=session.seed,
        checkpoint_every=1,
        sections={
            "data": Nodes(told_apart_by=session.directory.setting),
            "model": Arrays(tensors=len(server.layout.names), parameters=sum(server.layout.numels)),
            "client": ClientApp(),
            "sampler": session.sampler,
            "filter": server.filter,
            "weighting": session.weighting,
            "server": session.optimizer,
            "adapter": server.adapter,
            "engine": Engine(
                report=session.report,
                weighted_by=session.weight_key,
                min_clients=server.min_clients,
                guard_norm=server.guard.norm if server.guard else math.inf,
                guard_weight=server.guard.weight if server.guard else math.inf,
            ),
        },
    )
