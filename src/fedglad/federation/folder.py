"""The folder of a federation's run: the same files as the simulator's, and going on from them."""

import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedglad.averages import NoAverage
from fedglad.config.keys import flat
from fedglad.config.schema import Config, ConfigError, load
from fedglad.core import files
from fedglad.core.checksums import toml_with_crc
from fedglad.federation import app as apps
from fedglad.federation.session import Session
from fedglad.federation.telling import Tell
from fedglad.runs.checkpoints import Keep, restore, save
from fedglad.runs.folder import Busy, Records, Run, RunError, locked, make_folder
from fedglad.runs.models import write_models
from fedglad.runs.summary import write_summary

RUN = "{run}"
WAY_OUT = "choose another checkpoint_dir, or remove this one"
PATIENCE = 10.0  # seconds for another run to end
NAMED = 8  # settings in a sentence
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MODELS = {
    "model.safetensors": "The newest model",
    "averaged.safetensors": "The average of the models, for deployment,",
}

Write = Callable[[dict[str, Any]], None]
"""Writes a round's record, and the checkpoint that makes it count."""


def run_folder(path: str | PathLike[str] | None, *, resume: bool = False) -> Path | None:
    """The folder of a run, an absolute path: "out/{run}" is out/1, out/2 …, a new one or the last.

    With `resume` it is the last that has a finished round, if there is one.
    """
    if path is None:
        return None
    folder = Path(path).absolute()
    if RUN not in str(folder):
        return folder
    if folder.name != RUN or RUN in str(folder.parent):
        raise ValueError(f"checkpoint_dir={str(path)!r}: {RUN} stands for the last folder alone")
    make_folder(folder.parent, WAY_OUT)
    numbers = sorted(int(one.name) for one in folder.parent.iterdir() if one.name.isdecimal())
    if resume:
        for number in reversed(numbers):
            if _begun(Run(folder.with_name(str(number)))):
                return folder.with_name(str(number))
    number = max(numbers, default=0) + 1
    while True:
        try:
            folder.with_name(str(number)).mkdir()
        except FileExistsError:  # by another run, just now
            number += 1
        except OSError as error:
            raise RunError(f"{folder.parent} cannot be written: {error}; {WAY_OUT}") from None
        else:
            return folder.with_name(str(number))


def _begun(run: Run) -> bool:
    """Whether it has a finished round: without one a folder is nobody's."""
    return bool(run.rounds()) or any((run.folder / "checkpoints").glob("*.json"))


@contextmanager
def opened(
    path: str | PathLike[str] | None,
    session: Session,
    rounds: int,
    *,
    tell: Tell = Tell(),  # noqa: B008 - frozen
    **how: Any,
) -> Generator[tuple[list[dict[str, Any]], Write]]:
    """`_opened`, and who is told of each round once it is written."""
    with (
        _opened(path, session, rounds, **how) as (records, write),
        tell.telling(session, records) as told,
    ):

        def both(record: dict[str, Any]) -> None:
            write(record)
            told(record)

        yield records, both


@contextmanager
def _opened(
    path: str | PathLike[str] | None,
    session: Session,
    rounds: int,
    *,
    resume: bool = True,
    resumable: bool = True,
    app: Mapping[str, str] = MappingProxyType({}),
    keep: Keep = Keep(),  # noqa: B008 - frozen
    migrate: bool = False,
) -> Generator[tuple[list[dict[str, Any]], Write]]:
    """Locks a run's folder and restores the session; gives the rounds there and writes new ones.

    Without a path, nothing is written. A run that is not resumable has no checkpoints: the
    strategy's state is not ours to save. When all has gone well, the result is written at the end.
    `app` are the fingerprints of its files, `keep` says which checkpoints stay. With `migrate` the
    model may be another one than the folder's: what fits goes on.
    """
    if path is None:
        yield [], lambda record: None
        return
    folder, run = Path(path), Run(Path(path))
    make_folder(folder, WAY_OUT)
    with locked(folder, _waiting(folder, session), way_out=WAY_OUT):
        _check_new(run, rounds, resume=resume, resumable=resumable)
        name = _describe(run, session, rounds, app, migrate=migrate)
        if resumable:
            (folder / "checkpoints").mkdir(exist_ok=True)
            restore(run, session, WAY_OUT, from_start=False, on_lost=session.lost, migrate=migrate)
            for model in MODELS if session.t < rounds else ():
                (folder / model).unlink(missing_ok=True)  # of a run that was shorter
        records = run.rounds()
        if records and session.t >= rounds:
            session.warn(
                "%s: finished already after %d rounds, nothing was trained. To go on, raise the "
                "number of rounds",
                folder,
                len(records),
            )
        elif records:
            session.info("Going on after round %d of %d in %s", len(records), rounds, folder)
        with Records(folder / "rounds.jsonl") as lines:

            def write(record: dict[str, Any]) -> None:
                with _writing(folder):
                    lines.write(record)
                    if resumable:
                        score = record.get(f"test_{session.score.name}")
                        signed = None if score is None else session.score.sign * score
                        save(folder / "checkpoints", session, lines, keep=keep, score=signed)

            yield records, write
        if rounds:
            with _writing(folder):
                models: dict[str, str] = {}
                if resumable:
                    models = write_models(folder, session.server, session.t, name)
                for model in models:
                    session.info("%s is %s", MODELS[model], folder / model)
                write_summary(run, models)


def _waiting(folder: Path, session: Session) -> Busy:
    """Waits some seconds for a run that is just ending, then refuses."""
    begin: list[float] = []

    def busy() -> None:
        if not begin:
            begin.append(time.monotonic())
            session.info("Waiting for another run that writes %s", folder)
        if time.monotonic() - begin[0] >= PATIENCE:
            raise RunError(
                f"{folder} is being written by another run: Ctrl-C has ended its log, not the run. "
                f"`flwr list` shows it, `flwr stop RUN` ends it; or {WAY_OUT}"
            )
        time.sleep(0.5)

    return busy


def _check_new(run: Run, rounds: int, *, resume: bool, resumable: bool) -> None:
    """Refuses a folder that holds a run, unless that is to go on."""
    if not _begun(run) or (resume and resumable):
        return
    done = len(run.rounds())
    way_out = f"{WAY_OUT}; 'out/{RUN}' is a new one for every run"
    if not resumable:
        raise RunError(f"{run.folder} holds a run already: {way_out}")
    if done >= rounds:
        raise RunError(
            f"{run.folder}: finished already after {done} rounds, nothing was trained: {way_out}. "
            "resume=True, with more rounds, goes on with this one"
        )
    raise RunError(
        f"{run.folder} holds a run that ended after round {done} of {rounds}, and nothing was "
        f"trained now: resume=True goes on with it; or {way_out}"
    )


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


def _describe(
    run: Run, session: Session, rounds: int, app: Mapping[str, str], *, migrate: bool = False
) -> str:
    """Writes config.toml, or sees that the one there is of the same run; the run's hash.

    It also says what has changed in the app, which may train otherwise now.
    """
    begun = _begun(run)
    config = session.describe(max(rounds, len(run.rounds()), 1))
    path = run.folder / "config.toml"
    unsaid: dict[str, str] = {}
    name = ""
    try:
        text = config.to_toml()
        if begun and path.is_file():
            _compare(run, session, config, migrate=migrate)
        files.write_text(path, toml_with_crc(text))
        name = config.hash()
    except (TypeError, ConfigError) as error:
        unsaid = {section: ADDRESS.sub("", repr(one)) for section, one in config.sections.items()}
        there = apps.read(run.folder).get("settings", {}) if begun else {}
        if differing := [one for one in unsaid if one in there and there[one] != unsaid[one]]:
            what = "; ".join(f"{one}: {there[one]} and here {unsaid[one]}" for one in differing)
            raise RunError(
                f"{run.folder} holds a run with other settings, {what}: {WAY_OUT}"
            ) from (None)
        session.warn("%s cannot say all settings of this run: %s", path, error)
    if not begun:
        (run.folder / apps.NAME).unlink(missing_ok=True)
    if changed := apps.write(run.folder, app, unsaid):
        session.warn("The app is not the one that this run went by so far: %s", changed)
    return name


def _compare(run: Run, session: Session, config: Config, *, migrate: bool) -> None:
    """Refuses to go on with a run of other settings; of another model, unless it is to migrate."""
    path = run.folder / "config.toml"
    theirs = load(path, trust_code=config.own_names().values())[1]
    there = path.read_text("utf-8")
    new = [name for name in ("guard", "trust") if f"[{name}]" not in there]
    later = {name: config.sections[name] for name in new}  # it had them, and did not say
    if isinstance(theirs.sections["average"], NoAverage):
        later["average"] = session.server.average  # training is the same with one
        if run.rounds() and not isinstance(session.server.average, NoAverage):
            begin = len(run.rounds()) + 1
            session.info("The run had no average: it is that of the models from %d on", begin)
    if migrate:
        later["model"] = config.sections["model"]
    theirs = replace(theirs, sections={**theirs.sections, **later}, rounds=config.rounds)
    if theirs.hash() != config.hash():
        raise RunError(
            f"{run.folder} holds a run with other settings, {_difference(theirs, config)} "
            f"(config.toml): {WAY_OUT}"
        )


def _difference(theirs: Config, ours: Config) -> str:
    """The settings that two configurations do not share, with both values."""
    there, here = flat(theirs.to_dict()), flat(ours.to_dict())
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    # Trust moves no model, and of the task only clients know.
    keys = [key for key in keys if not key.startswith(("trust.", "task."))] or ["trust"]
    named = [f"{key} = {there.get(key)!r} and here {here.get(key)!r}" for key in keys[:NAMED]]
    return "; ".join(named) + (" …" if keys[NAMED:] else "")
