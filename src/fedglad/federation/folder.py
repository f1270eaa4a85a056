"""The folder of a federation's run: the same files as the simulator's, and going on from them."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from fedglad.averages import NoAverage
from fedglad.config.keys import flat
from fedglad.config.schema import Config, ConfigError, load
from fedglad.core import files
from fedglad.core.checksums import toml_with_crc
from fedglad.federation.session import Session
from fedglad.runs.checkpoints import restore, save
from fedglad.runs.folder import Records, Run, RunError, locked, make_folder
from fedglad.runs.models import write_models
from fedglad.runs.summary import write_summary

WAY_OUT = "choose another checkpoint_dir, or remove this one"
MODELS = {
    "model.safetensors": "The newest model",
    "averaged.safetensors": "The average of the models, for deployment,",
}

Write = Callable[[dict[str, Any]], None]
"""Writes a round's record, and the checkpoint that makes it count."""


@contextmanager
def opened(
    path: str | PathLike[str] | None, session: Session, rounds: int, *, resumable: bool = True
) -> Generator[tuple[list[dict[str, Any]], Write]]:
    """Locks a run's folder and restores the session; gives the rounds there and writes new ones.

    Without a path, nothing is written. A run that is not resumable has no checkpoints: the
    strategy's state is not ours to save. When all has gone well, the result is written at the end.
    """
    if path is None:
        yield [], lambda record: None
        return
    folder, run = Path(path), Run(Path(path))
    make_folder(folder, WAY_OUT)
    with locked(folder, way_out=WAY_OUT):
        if not resumable and run.rounds():
            raise RunError(f"{folder} holds a run already: {WAY_OUT}")
        name = _describe(run, session, rounds)
        if resumable:
            (folder / "checkpoints").mkdir(exist_ok=True)
            restore(run, session, WAY_OUT, from_start=False, on_lost=session.lost)
            for model in MODELS if session.t < rounds else ():
                (folder / model).unlink(missing_ok=True)  # of a run that was shorter
        records = run.rounds()
        if records:
            session.info("Going on after round %d of %d in %s", len(records), rounds, folder)
        with Records(folder / "rounds.jsonl") as lines:

            def write(record: dict[str, Any]) -> None:
                with _writing(folder):
                    lines.write(record)
                    if resumable:
                        save(folder / "checkpoints", session, lines)

            yield records, write
        if rounds:
            with _writing(folder):
                models: dict[str, str] = {}
                if resumable:
                    models = write_models(folder, session.server, session.t, name)
                for model in models:
                    session.info("%s is %s", MODELS[model], folder / model)
                write_summary(run, models)


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    """While the folder is written: a full disk is a RunError that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{folder} could not be written: {error}. What was saved is intact: make room and "
            "start again"
        ) from error


def _describe(run: Run, session: Session, rounds: int) -> str:
    """Writes config.toml, or sees that the one there is of the same run; the run's hash."""
    config = session.describe(max(rounds, len(run.rounds()), 1))
    path = run.folder / "config.toml"
    try:
        text = config.to_toml()
        if path.is_file():
            theirs = load(path, trust_code=config.own_names().values())[1]
            there = path.read_text("utf-8")
            new = [name for name in ("guard", "trust") if f"[{name}]" not in there]
            later = {name: config.sections[name] for name in new}  # it had them, and did not say
            if isinstance(theirs.sections["average"], NoAverage):
                later["average"] = session.server.average  # training is the same with one
                if run.rounds() and not isinstance(session.server.average, NoAverage):
                    begin = len(run.rounds()) + 1
                    session.info(
                        "The run had no average: it is that of the models from %d on", begin
                    )
            theirs = replace(theirs, sections={**theirs.sections, **later}, rounds=config.rounds)
            if theirs.hash() != config.hash():
                raise RunError(
                    f"{run.folder} holds a run with other settings, {_difference(theirs, config)} "
                    f"(config.toml): {WAY_OUT}"
                )
        files.write_text(path, toml_with_crc(text))
        return config.hash()
    except (TypeError, ConfigError) as error:
        session.warn("%s cannot say all settings of this run: %s", path, error)
        return ""


def _difference(theirs: Config, ours: Config) -> str:
    """The first setting that two configurations do not share, with both values."""
    there, here = flat(theirs.to_dict()), flat(ours.to_dict())
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    # Trust moves no model, and of the task only clients know.
    key = next((key for key in keys if not key.startswith(("trust.", "task."))), "trust")
    return f"{key} = {there.get(key)!r} and here {here.get(key)!r}"
