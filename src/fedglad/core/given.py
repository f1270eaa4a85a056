"""Objects that are given from Python in the place of a section, and what tells them apart.

A file cannot hold a module or a class of a notebook's cell. It can say that there was one, of which
class, with which plain settings, and a fingerprint by which the same object is known again.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import numpy as np

from fedglad.core.user_code import is_own

KEY = "from_python"
"""The key of a section that says what was given in its place."""

DEPTH = 6  # objects within objects whose contents are looked at
ASKED = 8  # clients whose samples are looked at
COUNTED = 1_000  # up to so many clients, all their sizes are
LONG = 100  # characters of an object that a file shows

_PLAIN = (bool, int, float, str, tuple)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, eq=False)
class Given:
    """An object in the place of a section; from a file, all that is known of it but itself.

    | field | meaning |
    |---|---|
    | `name` | its class, "module:Class" |
    | `values` | those of its fields that a file can hold |
    | `thing` | the object; None if a file said that there was one |
    | `said` | what that file said of it: `about` and `fingerprint` |

    >>> given = Given("__main__:Mine", {"power": 2.0}, thing=slice(3))
    >>> given.about, given.fingerprint == Given("__main__:Mine", {}, thing=slice(3)).fingerprint
    ('slice(None, 3, None)', True)
    """

    name: str
    values: Mapping[str, Any]
    thing: Any = None
    said: Mapping[str, Any] | None = None

    @property
    def about(self) -> str:
        """The object in a line."""
        return str(self.to_dict()["about"])

    @property
    def fingerprint(self) -> str:
        """Of its code and its contents: another one for another object."""
        return str(self.to_dict()["fingerprint"])

    def to_dict(self) -> dict[str, str]:
        """What a file says of it."""
        return self._known

    @cached_property
    def _known(self) -> dict[str, str]:
        said = self.said
        if said is None:
            said = {"about": _about(self.thing), "fingerprint": fingerprint(self.thing)}
        return {name: str(said.get(name, "unknown")) for name in ("about", "fingerprint")}


def fingerprint(thing: Any) -> str:
    """Of an object's code and contents: parameters, samples, or the values of its attributes.

    Of a federation these are the sizes of its clients, and the samples of a few and of the test
    set; those that are others each time they are read are left out.

    >>> fingerprint(partial(max, 1)) == fingerprint(partial(max, 1)) != fingerprint(partial(max, 2))
    True
    """
    digest = hashlib.sha256()
    for part in _contents(thing):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:10]


def code_of(thing: Any) -> str:
    """The source of a function, or of a class and those it derives from, but for libraries' own.

    Where there is no source to be had, as of what was typed in, it is the compiled code.
    """
    if not isinstance(thing, type):
        return _source(thing)
    classes = [cls for cls in thing.__mro__ if is_own(f"{cls.__module__}:{cls.__qualname__}")]
    known = ("builtins", "torch", "numpy", "abc", "typing")
    own = [cls for cls in classes if cls.__module__.partition(".")[0] not in known]
    return "\n".join([thing.__qualname__, *map(_source, own)])


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        pass
    if isinstance(thing, type):
        members = sorted(vars(thing).items())
        texts = [f"{name} {_source(found)}" for name, one in members if (found := _function(one))]
        values = {name: one for name, one in members if isinstance(one, _PLAIN)}
        plain = {name: one for name, one in values.items() if not name.startswith("__")}
        return "\n".join([*texts, _ADDRESS.sub("", repr(plain))])
    code = getattr(thing, "__code__", None)
    return _compiled(code) if code else getattr(thing, "__qualname__", type(thing).__qualname__)


def _function(member: Any) -> FunctionType | None:
    """The function behind a method, a static one or a property; None for anything else."""
    inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return inner if isinstance(inner, FunctionType) else None


def _compiled(code: CodeType) -> str:
    inner = [c if not isinstance(c, CodeType) else _compiled(c) for c in code.co_consts]
    return repr((code.co_code, code.co_names, inner))


def _contents(value: Any, depth: int = DEPTH) -> Iterator[bytes]:
    """What an object consists of, always in one order."""
    yield type(value).__qualname__.encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif hasattr(value, "state_dict") and hasattr(value, "named_parameters"):
        yield from _module(value, depth)
    elif hasattr(value, "detach"):
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield _bytes(flat)
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        yield repr(value).encode() if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            yield from _contents(key, depth)
            yield from _contents(inner, depth)
    elif isinstance(value, list | tuple):
        for inner in cast("list[Any]", value):
            yield from _contents(inner, depth)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, cast("set[Any]", value)))).encode()
    elif isinstance(value, FunctionType):
        yield code_of(value).encode()
        yield from _contents(value.__defaults__, depth)
        for cell in value.__closure__ or ():
            yield from _contents(cell.cell_contents, depth - 1) if depth else ()
    elif isinstance(value, MethodType):
        yield from _contents(value.__func__, depth)
        yield from _contents(value.__self__, depth - 1) if depth else ()
    elif isinstance(value, partial):
        parts = cast("partial[Any]", value)
        yield from _contents([parts.func, parts.args, parts.keywords], depth)
    elif isinstance(value, type):
        yield code_of(value).encode()
    elif hasattr(value, "client") and hasattr(value, "size"):
        yield code_of(type(value)).encode()
        yield from _federation(value)
    else:
        yield code_of(type(value)).encode()
        if is_dataclass(value):
            held = {f.name: getattr(value, f.name) for f in fields(value)}
        else:
            held = dict(getattr(value, "__dict__", {}))
        yield from _contents(held or _plain(value), depth - 1) if depth else ()


def _module(module: Any, depth: int) -> Iterator[bytes]:
    """A module's classes, its settings as it shows them, and all that it starts from."""
    classes = {type(inner) for inner in module.modules()}
    yield from sorted(code_of(cls).encode() for cls in classes)
    yield _ADDRESS.sub("", repr(module)).encode()
    for name, tensor in module.state_dict().items():
        yield name.encode()
        yield from _contents(tensor, depth)
    yield repr([name for name, p in module.named_parameters() if p.requires_grad]).encode()


def _federation(data: Any) -> Iterator[bytes]:
    """Its sizes and some samples. What is wrong with it is said when it is tried, not here."""
    count = data.clients if isinstance(getattr(data, "clients", None), int) else 0
    yield f"{count} clients".encode()
    places = range(min(count, COUNTED))
    some = {round(k * (count - 1) / max(1, ASKED - 1)) for k in range(ASKED)} if count else ()
    for read in [
        lambda: [int(data.size(k)) for k in places],
        lambda: data.test(),
        *(partial(data.client, k) for k in sorted(some)),
    ]:
        try:
            once, again = (list(_contents(read())) for _ in range(2))
        except Exception:
            continue
        yield b"".join(hashlib.sha256(part).digest() for part in once if once == again)


def _bytes(flat: Any) -> bytes:
    import torch

    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _plain(thing: Any) -> str:
    """How an object shows itself, if it does."""
    return "" if type(thing).__repr__ is object.__repr__ else _ADDRESS.sub("", repr(thing))


def _about(thing: Any) -> str:
    kind = type(thing).__name__
    if hasattr(thing, "state_dict") and hasattr(thing, "named_parameters"):
        sizes = [p.numel() for p in thing.parameters()]
        return f"{kind}, {len(sizes)} tensors, {sum(sizes)} parameters"
    if isinstance(count := getattr(thing, "clients", None), int) and hasattr(thing, "client"):
        return f"{kind}, {count} clients"
    if isinstance(thing, FunctionType):
        return thing.__qualname__
    line = " ".join((_plain(thing) or kind).split())
    return line if len(line) <= LONG else f"{line[: LONG - 1]}…"
