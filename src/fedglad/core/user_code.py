"""A user's own code, "package.module:Object": where it is looked for, and what it consists of.

It is looked for among everything that is installed, then in the working folder, and only when such
a name is asked for: no other import ever sees the working folder.
"""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

_folders: list[str] = []  # working folders that have been looked in
_loaded: dict[str, tuple[Any, str]] = {}  # modules' specs, and their source when they were loaded


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
    there = import_module(module)
    if _loaded.get(module, (None,))[0] is not there.__spec__:
        _changed(_sources(module))
    return getattr(there, attribute)


def own_modules(things: Iterable[Any]) -> list[ModuleType]:
    """The modules that these objects' classes, and functions among them, come from, if they are
    users' own: what another machine does not have."""
    names = {getattr(thing, "__module__", type(thing).__module__) for thing in things}
    found: list[ModuleType] = []
    for name in sorted(names - {"__main__", "builtins"}):
        module = sys.modules.get(name)
        place = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if module and place and top != "fedglad" and not _is_library(place):
            found.append(module)
    return found


def source_fingerprint(name: str) -> str | None:
    """Of the source of the own code that has this name; None if it cannot be seen.

    That is the module's file, those of the packages that it is in, and of modules that they import
    by a statement, if these are the user's own too: nothing of Python's library, nor of what is
    installed. Line ends, places and times do not count, so that it is the same on every machine.
    Objects that no file names have `core.given.fingerprint`.

    ValueError if a file is another one than when this process loaded it: then what runs here is
    not what it says.

    >>> source_fingerprint("fedglad.trust:Trust") == source_fingerprint("fedglad.trust:NoTrust")
    True
    >>> source_fingerprint("no_such_module:Thing")
    """
    sources = _sources(name.partition(":")[0])
    if changed := _changed(sources):
        raise ValueError(
            f"{changed} was changed after this process had loaded it, so what runs here is not "
            "what the file says: start Python anew, or importlib.reload it"
        )
    if not sources:
        return None
    digest = hashlib.sha256()
    for module, source in sorted(sources.items()):
        digest.update(f"{module} {source}\n".encode())
    return digest.hexdigest()[:16]


def _changed(sources: dict[str, str]) -> str:
    """The first module whose source is another one than when it was loaded; notes new ones."""
    for module, source in sources.items():
        spec = getattr(sys.modules.get(module), "__spec__", None)
        if spec is None:
            continue
        before = _loaded.get(module)
        if before is None or before[0] is not spec:  # it was loaded, or reloaded, just now
            _loaded[module] = spec, source
        elif before[1] != source:
            return module
    return ""


def _sources(module: str) -> dict[str, str]:
    """A digest of the source of each module that this one consists of, by name."""
    return {name: hashlib.sha256(text).hexdigest() for name, _, text in _consists_of(module)}


def own_files(names: Iterable[str]) -> dict[str, bytes]:
    """The files of users' own that these names need, by where they lie below a folder of modules.

    On a machine that has none of them they can be put into such a folder.
    """
    files = dict[str, bytes]()
    for name, place, text in (m for one in names for m in _consists_of(one.partition(":")[0])):
        if not _is_library(place) and os.path.isfile(place):
            folders = name.split(".")
            if Path(place).stem != "__init__":
                folders.pop()
            files["/".join([*folders, Path(place).name])] = text
    return files


def _consists_of(module: str) -> Iterator[tuple[str, str, bytes]]:
    """The modules that this one consists of: their names, places and sources."""
    seen = set[str]()
    waiting, inside = [module], not any(_is_library(place) for _, place in _places(module))
    while waiting:
        for name, place in _places(waiting.pop()):
            if name in seen or (_is_library(place) and inside):
                continue
            seen.add(name)
            known = os.path.isfile(place)
            text = Path(place).read_bytes() if known else sys.version.encode()
            if place.endswith(".py"):
                text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield name, place, text
            if inside and place.endswith(".py"):
                package = name if Path(place).stem == "__init__" else name.rpartition(".")[0]
                waiting += [one for one in _imported(text, package) if one not in seen]


def _imported(source: bytes, package: str) -> Iterator[str]:
    """The modules, or what may be ones, that a source imports by statements."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # importing it says so
        return
    for node in ast.walk(tree):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package or None)
            except ImportError:
                continue
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] not in (*sys.stdlib_module_names, "fedglad"):
                yield name


def _is_library(place: str) -> bool:
    """Whether a file is Python's own, or of a package that is installed."""
    path = Path(place)
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return True
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return not path.is_absolute() or any(path.is_relative_to(one) for one in folders if one)


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
    return [place for _, place in _places(name.partition(":")[0])]


def _places(module: str) -> list[tuple[str, str]]:
    """The same with the names of the modules."""
    places = list[tuple[str, str]]()
    inside: Iterable[str] | None = None
    for k in range(len(parts := module.split("."))):
        full = ".".join(parts[: k + 1])
        spec = _installed(full) if inside is None else None
        for folder in [os.getcwd()] if inside is None else inside:
            spec = spec or FileFinder(folder, *_LOADERS).find_spec(full)
        if spec is None or (k + 1 < len(parts) and spec.submodule_search_locations is None):
            return []
        places += (
            [(full, spec.origin)] if spec.origin else []
        )  # a folder without __init__.py has none
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
