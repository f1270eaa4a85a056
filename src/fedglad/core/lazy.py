"""Names that are loaded when they are first used, so that a package costs nothing to import."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` for names that live in its modules.

    `homes` says which: {"Uniform": "uniform"}. Where a type checker should know them too, they are
    imported a second time under `if TYPE_CHECKING`.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(package)
        found = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(module, name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *homes})

    return load, names
