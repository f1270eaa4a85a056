"""A user's own code, "package.module:Object": where it is looked for, and what it consists of.

It is looked for among everything that is installed, then in the working folder, and only when such
a name is asked for: no other import ever sees the working folder.
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_folders: list[str] = []  # working folders that have been looked in


class _FromSource(SourceFileLoader):
    """Loads what the source says, and no bytecode that may lie beside it and say otherwise."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


_LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (_FromSource, SOURCE_SUFFIXES))


def is_own(name: str) -> bool:
    """Whether a name is that of code outside of this library: all with a colon but our settings.

    >>> is_own("mine:Net"), is_own("os:system"), is_own("small-cnn")
    (True, True, False)
    >>> is_own("fedglad.samplers.uniform:Uniform"), is_own("fedglad.core.files:write_text")
    (False, True)
    """
    module, colon, attribute = name.partition(":")
    if not colon or module.partition(".")[0] != "fedglad":
        return bool(colon)
    try:
        thing = getattr(import_module(module), attribute)
    except Exception:
        return True
    return not (isinstance(thing, type) and hasattr(thing, "__dataclass_fields__"))


def load(name: str) -> Any:
    """The object of that name; what is wrong with it is raised as Python's import does."""
    module, _, attribute = name.partition(":")
    top = module.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        _look_in_working_folder()
    return getattr(import_module(module), attribute)


def fingerprint(name: str) -> str | None:
    """Of the files that importing this name would run first; None if they are not known.

    These are the module's and those of the packages that it is in. Nothing is imported for it.
    """
    places = files(name)
    if not places:
        return None
    digest = hashlib.sha256()
    for place in places:
        inside = Path(place).read_bytes() if os.path.isfile(place) else sys.version.encode()
        digest.update(hashlib.sha256(inside).digest())
    return digest.hexdigest()


def files(name: str) -> list[str]:
    """Where the module of that name is, after the packages that it is in; empty if not known."""
    module, places = name.partition(":")[0], list[str]()
    inside: Iterable[str] | None = None
    for k in range(len(parts := module.split("."))):
        full = ".".join(parts[: k + 1])
        spec = _installed(full) if inside is None else None
        for folder in [os.getcwd()] if inside is None else inside:
            spec = spec or FileFinder(folder, *_LOADERS).find_spec(full)
        if spec is None or (k + 1 < len(parts) and spec.submodule_search_locations is None):
            return []
        places += [spec.origin] if spec.origin else []  # a folder without __init__.py has none
        inside = list(spec.submodule_search_locations or ())
    return places


def _installed(top: str) -> ModuleSpec | None:
    """What Python's own import would take, which is not asked for modules that are loaded."""
    if not top:
        return None
    specs = (finder.find_spec(top, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec), None)


def _look_in_working_folder() -> None:
    """Puts the working folder behind all others, for the rest of the process."""
    folder = os.getcwd()
    if _from_source not in sys.path_hooks:
        sys.path_hooks.insert(0, _from_source)
    if folder not in _folders:
        _folders.append(folder)
        sys.path_importer_cache.pop(folder, None)
    if folder not in sys.path:
        sys.path.append(folder)


def _from_source(entry: str) -> FileFinder:
    """The finder of a folder whose nearest place on sys.path is a working folder of ours."""
    nearest = max((p for p in sys.path if p and Path(entry).is_relative_to(p)), key=len, default="")
    if nearest not in _folders or not os.path.isdir(entry):
        raise ImportError(f"{entry} is not in the working folder")
    return FileFinder(entry, *_LOADERS)
