"""Own code as a part of a run's identity: what it was when the run was made, and what it is today.

A run's hash is that of its settings, in which own code is a name. So that an edited method is not
taken for the one that a finished run had, config.toml and summary.json say what the source was, as
a fingerprint; the hash stays. Reading it imports nothing.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedglad.config.schema import Config
from fedglad.core import user_code
from fedglad.runs.reader import RunError

_LINE = re.compile(r"^# code of ([\w.-]+): ([0-9a-f+]+)$", re.M)


def code_of(config: Config) -> dict[str, str]:
    """The fingerprint of today's own code by the key that names it; {} for a run without any.

    Code whose source cannot be seen is left out.

    >>> from fedglad.config import load
    >>> code_of(load("digits")[1])
    {}
    """
    try:
        made = {k: user_code.source_fingerprint(name) for k, name in config.own_names().items()}
    except ValueError as error:
        raise RunError(str(error)) from None
    return {key: one for key, one in made.items() if one}


def recorded_code(folder: Path) -> dict[str, str]:
    """The same as it was when the run in a folder was made, as far as its config.toml says.

    A run that was begun with one code and went on with another has both: "1f…+e2…". One that has
    no round yet was made with none.
    """
    path = folder / "config.toml"
    if not path.is_file() or not _has_rounds(folder):
        return {}
    return dict(_LINE.findall(path.read_text("utf-8", errors="replace")))


def _has_rounds(folder: Path) -> bool:
    path = folder / "rounds.jsonl"
    return path.is_file() and path.stat().st_size > 0


def with_code(text: str, code: Mapping[str, str]) -> str:
    """The text of config.toml with the fingerprints, as comments."""
    return text + "".join(f"# code of {key}: {one}\n" for key, one in code.items())


def continued(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What a run is made of that goes on with today's code; what was not noted stays so.

    >>> continued({"adapter.name": "1f"}, {"adapter.name": "e2"})
    {'adapter.name': '1f+e2'}
    """
    return {
        key: one if one.rpartition("+")[2] == now.get(key, one) else f"{one}+{now[key]}"
        for key, one in before.items()
    }


def other_code(folder: Path, config: Config) -> str:
    """The own code that is another one than the run in a folder was made with; empty if none is.

    Where the folder does not say, as one of an older version, it is taken for the same.
    """
    before, now, names = recorded_code(folder), code_of(config), config.own_names()
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    return ", ".join(dict.fromkeys(names[key] for key in changed))


def unnoted_code(folder: Path, config: Config) -> str:
    """The own code of which the run in a folder does not say what it was; empty if none."""
    if not (folder / "config.toml").is_file() or not _has_rounds(folder):
        return ""
    before, names = recorded_code(folder), config.own_names()
    return ", ".join(dict.fromkeys(names[key] for key in code_of(config) if key not in before))


def folder_of(name: str, config: Config, root: Path = Path("runs")) -> Path:
    """Where a run of this configuration belongs among others: NAME-HASH.

    If a run with other own code is there, it stays, and the new one goes to NAME-HASH-CODE.

    >>> from fedglad.config import load
    >>> folder_of(*load("digits")).as_posix()
    'runs/digits-87db667e5b'
    """
    folder = root / f"{name}-{config.hash()}"
    if not other_code(folder, config):
        return folder
    text = json.dumps(code_of(config), sort_keys=True)
    return folder.with_name(f"{folder.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def said_of(folder: Path, config: Config) -> str:
    """A sentence on the run that is beside this one and has other code; empty if there is none."""
    other = folder.with_name(folder.name.rpartition("-")[0])
    if not other.name.endswith(f"-{config.hash()}") or not (names := other_code(other, config)):
        return ""
    return f"{other} was made with other code of {names}, and is not used: this run is {folder}"


def said_of_all(folders: Iterable[tuple[Path, Config]]) -> str:
    """The same of many runs in one sentence."""
    said = [text for folder, config in folders if (text := said_of(folder, config))]
    more = f" (and so for {len(said) - 1} more)" if len(said) > 1 else ""
    return said[0] + more if said else ""


def refusal(folder: Path, names: str, *, finished: bool) -> str:
    """Why a run is neither reused nor gone on with, and the ways out."""
    done, then = ("made", "takes it as it is") if finished else ("begun", "goes on with it")
    return (
        f"{folder} was {done} with other code of {names}: --force replaces it, --accept-old {then}"
        "; another --out leaves it"
    )
