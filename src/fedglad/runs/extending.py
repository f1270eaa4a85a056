"""A run that goes on for more rounds than it was begun with.

    fedglad run mine.toml --resume --set rounds=100

The rounds that are done are what the first of the longer run would have been, to the bit, so its
state is taken over. A folder that is named by its settings, NAME-HASH, stays what it is, and the
longer run has its own; one that was named by hand (`--out`) becomes the longer run.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedglad.config.schema import Config, ConfigError, load
from fedglad.core import files
from fedglad.core.given import Given
from fedglad.runs.folder import locked
from fedglad.runs.own_code import folder_of, other_code
from fedglad.runs.parts import copy_lines
from fedglad.runs.pruning import BEST, CHECKPOINTS, MEMORIES
from fedglad.runs.reader import CLIENT_SCORES, ROUNDS_FILE, Run, RunError

ENDS: Mapping[str, Any] = {"rounds": 1, "stop_after": 0, "max_seconds": 0.0}
"""The keys that say when a run ends: no round before that depends on them."""

KEEP = "--keep-state (keep_state=True from Python) keeps it when a run finishes"


def is_longer(begun: Config, wanted: Config) -> bool:
    """Whether `wanted` is the run that was `begun`, with another end that is not earlier.

    RunError if only a rate stands in the way that falls with the number of rounds.

    >>> begun, wanted = (load("digits", {"rounds": n})[1] for n in (60, 100))
    >>> is_longer(begun, wanted), is_longer(wanted, begun)
    (True, False)
    """
    if wanted.rounds < begun.rounds or wanted.hash() == begun.hash():
        return False
    if _endless(_within(begun)).hash() == _endless(_within(wanted)).hash():
        return True
    if _endless(begun).hash() != _endless(wanted).hash():
        return False
    parts = wanted.sections.items()
    falling = {name: part for name, part in parts if _of_rounds(part, begun.rounds) is not part}
    fall = " and ".join(f"{name}.{_scheduled(part)}" for name, part in falling.items())
    raise RunError(
        f"{fall} {'fall' if len(falling) > 1 else 'falls'} over all rounds of a run: the first "
        f"{begun.rounds} of {wanted.rounds} would have had other rates. "
        f"{_rate_at_end(falling, begun.rounds, wanted.rounds)}un all rounds anew, without --resume"
    )


def shorter(name: str, config: Config, root: Path = Path("runs")) -> Path | None:
    """The run among those in `root` that this one can begin from: the longest; None if none can.

    RunError if there is one, and what it needs to go on was removed.
    """
    found: list[tuple[int, str, Path]] = []
    lacking = ""
    for folder in sorted(root.glob(f"{name}-*")):
        if (begun := begun_as(folder, config)) is None or not is_longer(begun, config):
            continue
        if other_code(folder, config):
            continue
        if usable := _usable(folder, begun):
            found.append((usable[-1], folder.name, folder))
        elif Run(folder).summary is not None:
            lacking = _no_state(folder)
    if not found and lacking:
        raise RunError(lacking)
    return max(found)[2] if found else None


def place_among(
    name: str,
    config: Config,
    *,
    resume: bool = False,
    force: bool = False,
    accept_old: bool = False,
    root: Path = Path("runs"),
) -> tuple[Path, Path | None]:
    """Where a run goes among others, named by its settings, and the shorter one it begins from.

    >>> from fedglad.config import load
    >>> place_among(*load("digits"))[0].as_posix()
    'runs/digits-87db667e5b'
    """
    default = root / f"{name}-{config.hash()}"
    folder = default if force or accept_old else folder_of(name, config, root)
    begun = is_stateful(folder) or (folder / "summary.json").is_file()
    return folder, shorter(name, config, root) if resume and not force and not begun else None


def is_stateful(folder: Path) -> bool:
    """Whether a folder has a checkpoint to go on from."""
    return any((folder / CHECKPOINTS).glob("*.json"))


def place_of(folder: Path, config: Config, *, resume: bool) -> tuple[Path, Path | None]:
    """Where a run goes that was asked for by the folder of another, and what it begins from.

    That is the folder itself, unless the run is longer and the folder is named by its settings:
    then one beside it.
    """
    begun = begun_as(folder, config)
    if not resume or begun is None or not is_longer(begun, config):
        return folder, None
    name, found, _ = folder.resolve().name.partition(f"-{begun.hash()}")
    return (folder_of(name, config, folder.parent), folder) if found else (folder, None)


def begun_as(folder: Path, config: Config) -> Config | None:
    """The configuration that a folder's run was begun with; None where it cannot be read.

    Of the code that it names only that of `config` is loaded.
    """
    try:
        return load(folder / "config.toml", trust_code=config.own_names().values())[1]
    except (ConfigError, ValueError, OSError):
        return None


def require_state(source: Path, config: Config) -> None:
    """RunError unless a longer run can begin from what is there."""
    begun = begun_as(source, config)
    if begun is None or not is_longer(begun, config):
        raise RunError(f"{source} is no run that this one, with other settings, could go on from")
    if not _usable(source, begun):
        raise RunError(_no_state(source))


def begin_from(source: Path, folder: Path, config: Config) -> str:
    """Puts the state of another run into a folder that has none; a sentence on it.

    The files are shared by links where the disk can do that: none of them is ever changed.
    """
    begun = begun_as(source, config)
    assert begun is not None
    with locked(source, way_out="leave --resume out"):
        require_state(source, config)
        rounds = _usable(source, begun)
        for part in (MEMORIES, BEST):
            if (source / part).is_dir():
                shutil.rmtree(folder / part, ignore_errors=True)
                shutil.copytree(source / part, folder / part, copy_function=_share)
        for name in (ROUNDS_FILE, CLIENT_SCORES):
            if (source / name).is_file():
                copy_lines(source / name, folder / name)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        for done in rounds:  # the small file makes it a checkpoint
            for kind in (".safetensors", ".json"):
                _share(*((one / CHECKPOINTS / f"{done:06d}{kind}") for one in (source, folder)))
        files.sync(folder / CHECKPOINTS)
    end = rounds[-1]
    return f"going on after round {end} of {source}, which stays as it is{_twice(begun, end)}"


def reopen(run: Run, config: Config) -> str:
    """Makes a finished run one that is not, so that it can go on in its folder; a sentence on it.

    Its records, state and models stay. For the one who has the folder's lock.
    """
    begun = begun_as(run.folder, config)
    assert begun is not None
    if not (rounds := _usable(run.folder, begun)):
        raise RunError(_no_state(run.folder))
    for path in (run.folder / CHECKPOINTS).glob("*.json"):
        if int(path.stem) > rounds[-1]:
            path.unlink()
            path.with_suffix(".safetensors").unlink(missing_ok=True)
    (run.folder / "summary.json").unlink(missing_ok=True)
    files.sync(run.folder)
    return f"going on after round {rounds[-1]}{_twice(begun, rounds[-1])}"


def _within(config: Config) -> Config:
    """The same with rates that do not ask how many rounds there are."""
    parts = {name: _of_rounds(part, config.rounds) for name, part in config.sections.items()}
    return replace(config, sections=parts)


def _of_rounds(part: Any, rounds: int) -> Any:
    """A section with rates that end after so many rounds; itself if that changes nothing."""
    thing = part.thing if isinstance(part, Given) else part
    if not callable(getattr(thing, "within", None)) or (made := thing.within(rounds)) == thing:
        return part
    return replace(part, thing=made) if isinstance(part, Given) else made


def _scheduled(part: Any) -> str:
    """The key and the value of a section's schedule over rounds."""
    thing = part.thing if isinstance(part, Given) else part
    key = "rounds_schedule" if hasattr(thing, "rounds_schedule") else "schedule"
    return f"{key} = {getattr(thing, key, '')!r}"


def _rate_at_end(falling: Mapping[str, Any], begun: int, wanted: int) -> str:
    """How to go on with the rates that a run had at its end, if that can be; and "or r", or "R"."""
    try:  # clients may have no rate of 0
        for part in falling.values():
            _of_rounds(_of_rounds(part, begun), wanted)
    except ValueError:
        return "R"
    keys = " and ".join(f"{name}.over={begun}" for name in falling)
    return f"Set {keys} to go on with the rate at its end, or r"


def _endless(config: Config) -> Config:
    return replace(config, **ENDS)


def _usable(folder: Path, begun: Config) -> list[int]:
    """The checkpoints of a run from which a longer one can go on, ascending.

    In the last round of a run everything is tested, as it would not be if there were more: where
    that makes a difference, the checkpoint before it is better, if there is one.
    """
    done = sorted(
        int(path.stem)
        for path in (folder / CHECKPOINTS).glob("*.json")
        if path.stem.isdecimal() and path.with_suffix(".safetensors").is_file()
    )
    return [t for t in done if not _extra(begun, t, done[-1])] or done


def _extra(begun: Config, t: int, last: int) -> bool:
    """Whether round t was tested only because it was the last."""
    if t != last or t < begun.rounds:
        return False
    every = [begun.eval_every, *([begun.eval_clients_every] if begun.eval_clients else [])]
    return any(t % often for often in every)


def _twice(begun: Config, t: int) -> str:
    if not _extra(begun, t, t):
        return ""
    return f" (round {t} was tested as the last one, and its record says so)"


def _no_state(folder: Path) -> str:
    return (
        f"{folder} is finished and kept no state to go on from: {KEEP}. All rounds are run anew "
        "without --resume, or with --force"
    )


def _share(source: Any, target: Any) -> None:
    """The same file under another name, or a copy of it."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
