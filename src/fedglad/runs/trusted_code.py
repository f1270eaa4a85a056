"""Whether the code that a run's folder names may be run: only if its user has said so.

Which code was trusted for which folder lies in the user's own state folder, never in the run's,
whose author could write it there.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedglad.config.schema import Config, load
from fedglad.core import user_code
from fedglad.core.files import write_text
from fedglad.runs.reader import RunError

VARIABLE = "FEDGLAD_STATE"


def state_folder() -> Path:
    """Where what a user has trusted is kept."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser().absolute()
    from platformdirs import user_state_path

    return user_state_path("fedglad", appauthor=False)


def load_trusted(
    source: str | Path, overrides: Mapping[str, Any] | None = None, *, trust_code: bool = False
) -> tuple[str, Config]:
    """As `load`, to be run: also with the code that a run's folder names, if it is trusted."""
    name, config = load(source, overrides)
    if not config.own_names(loaded=False):
        return name, config
    _require_trust(load(source)[1], Path(source).parent, trust_code)  # what its author has written
    return name, Config.of(config.to_tree())


def trusted(config: Config, folder: Path, *, trust_code: bool = False) -> Config:
    """The configuration of a run's folder with the code that it names loaded.

    RunError if there is such code and it is not the same that was trusted for this folder before;
    `trust_code` trusts it from now on.
    """
    if not config.own_names(loaded=False):
        return config
    _require_trust(config, folder, trust_code)
    return Config.of(config.to_tree())


def _require_trust(config: Config, folder: Path, trust_code: bool) -> None:
    names = config.own_names(loaded=False)
    now, before = _fingerprint(config, names), _remembered(folder)
    if not trust_code and (now is None or now != before):
        places = (
            f"{key} = {name!r} ({next(reversed(user_code.files(name)), 'no such module here')})"
            for key, name in names.items()
        )
        changed = "; it is not what you have trusted before" if before and now else ""
        raise RunError(
            f"{folder}/config.toml names code that is not fedglad's: {', '.join(places)}{changed}. "
            "Running it runs that code with all your rights. Read it, and if you trust it add "
            "--trust-code (trust_code=True from Python), which holds for this folder until the "
            "code or its settings change"
        )
    _remember(folder, now)


def remember(config: Config, folder: Path) -> None:
    """Notes that a user has begun a run with own code here: it can go on without a question."""
    if names := config.own_names():
        _remember(folder, _fingerprint(config, names))


def forget(folder: Path) -> None:
    """Removes what is noted of a folder that is there no more."""
    with suppress(OSError):
        _note(folder).unlink(missing_ok=True)


def _fingerprint(config: Config, names: Mapping[str, str]) -> str | None:
    """Of the code and of what it is called with; None if some of the code cannot be seen."""
    code = {key: user_code.fingerprint(name) for key, name in names.items()}
    if None in code.values():
        return None
    tree = config.to_dict()
    sections = {key.partition(".")[0]: tree[key.partition(".")[0]] for key in names}
    text = json.dumps([code, sections], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _remembered(folder: Path) -> str | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return json.loads(_note(folder).read_text("utf-8"))["code"]
    return None


def _remember(folder: Path, code: str | None) -> None:
    if code is None or code == _remembered(folder):
        return
    note = _note(folder)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps({"folder": str(folder.resolve()), "code": code}) + "\n")
    except OSError as error:
        logging.getLogger("fedglad").warning(
            "that the code of %s is trusted could not be noted: %s", folder, error
        )


def _note(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return state_folder() / "trusted" / f"{name}.json"
