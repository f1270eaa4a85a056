"""A dataclass from plain values: pydantic checks their types, a mistake becomes a sentence."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, make_dataclass
from functools import lru_cache, partial
from typing import Any, get_type_hints

KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
    "missing": "a longer list",
    "too": "a shorter list",
}
"""What pydantic's kinds of errors ask for, by their first word: float_parsing, too_long, …"""

PLAIN = (bool, int, float, str, tuple, list, dict, type(None))


def build(cls: type, given: Mapping[str, Any], section: str) -> Any:
    """The object; ValueError names the key within its section, the value and what it must be."""
    from pydantic import ValidationError
    from pydantic.errors import PydanticUserError

    try:
        return _adapter(cls).validate_python(given)
    except ValidationError as error:
        raise ValueError(_sentence(section, given, error.errors())) from None
    except PydanticUserError as error:
        reason = error.message.partition("\n")[0]
        raise ValueError(f"[{section}] {cls.__qualname__} cannot be set: {reason}") from None


@lru_cache(256)  # a configuration asks for fourteen, and folders of runs for the same ones again
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def settings_of(factory: Callable[..., Any], method: str, source: str) -> type:
    """A dataclass whose fields are a function's arguments, and whose `method` calls it.

    An argument whose default no file can hold, such as a class, keeps it. `source` is the name it
    was asked for by, "package.module:function".
    """
    parameters = inspect.signature(factory).parameters.values()
    settable = [
        p
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.default is p.empty or isinstance(p.default, PLAIN))
    ]
    for p in settable:
        if p.kind is p.POSITIONAL_ONLY:
            raise TypeError(f"its argument {p.name!r} has no name that could be set")
        if p.name in ("name", "own_function", method):
            raise TypeError(f"its argument {p.name!r} has a name that is taken: call it otherwise")
    target = factory.__init__ if isinstance(factory, type) else factory
    hints = get_type_hints(target, include_extras=True)
    fields_ = [(p.name, _settable(hints.get(p.name, Any)), _default(p)) for p in settable]

    def call(self: Any) -> Any:
        return factory(**{p.name: getattr(self, p.name) for p in settable})

    doc = inspect.getdoc(factory) or source
    namespace = {method: call, "__doc__": doc, "own_function": source}
    return make_dataclass("Own", fields_, namespace=namespace, frozen=True, kw_only=True)


def _settable(hint: Any) -> Any:
    """The type, or any if pydantic cannot check it."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        TypeAdapter(hint)
    except PydanticUserError:
        return Any
    return hint


def _default(parameter: inspect.Parameter) -> Any:
    value: Any = parameter.default
    if isinstance(value, list | dict):
        return field(default_factory=partial(copy.copy, value))
    return field(default=MISSING if value is parameter.empty else value)


def _sentence(section: str, given: Mapping[str, Any], errors: Sequence[Any]) -> str:
    """About the first wrong value; of a value that may be of several types, there are several."""
    first, loc = errors[0], errors[0]["loc"]
    if first["type"] == "value_error":
        return f"[{section}] {first['msg'].removeprefix('Value error, ')}"
    value, depth = given, 0
    while depth < len(loc) and _has(value, loc[depth]):  # what follows are names of types
        value, depth = value[loc[depth]], depth + 1
    if not depth:
        return f"{section}.{loc[0]} is missing: it has no default"
    same = [error for error in errors if error["loc"][:depth] == loc[:depth]]
    kinds = [_kind(error) for error in same if error["type"] != "callable_type"]
    plain = " or ".join(dict.fromkeys(kinds)) if all(kinds) else ""
    must = f"must be {plain}" if plain else first["msg"].lower()
    return f"{'.'.join([section, *map(str, loc[:depth])])} = {value!r}: {must}"


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)


def _kind(error: Any) -> str:
    """What is asked for; empty where only pydantic has words for it."""
    if error["type"] == "literal_error":
        choices = error["ctx"]["expected"].replace(" or ", ", ")
        return f"one of {choices}" if "," in choices else choices
    return KINDS.get(error["type"].partition("_")[0], "")
