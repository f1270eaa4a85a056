"""Names that are loaded when they are first used, so that a package costs nothing to import."""

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_IMPORT = re.compile(r"^    from (fedglad[\w.]*) import (\w+) as \2$", re.M)


def lazily(
    package: str, needs: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`, for the names that it imports for type checkers.

        if TYPE_CHECKING:
            from fedglad.samplers.uniform import Uniform as Uniform

        __getattr__, __dir__ = lazily(__name__)

    So every name stands there once, and its module is loaded when somebody asks for it. `needs`
    says what to do about a library that is not installed: {"flwr": "Flower: pip install …"}.
    """
    module = sys.modules[package]
    assert module.__loader__
    source: str = getattr(module.__loader__, "get_source")(package)  # noqa: B009
    homes = {name: home for home, name in _IMPORT.findall(source)}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = import_module(homes[name])
        except ModuleNotFoundError as error:
            lacking = (error.name or "").partition(".")[0]
            if lacking not in (needs or {}):
                raise
            raise ImportError(f"{package}.{name} needs {(needs or {})[lacking]}") from error
        setattr(module, name, getattr(home, name))
        return getattr(module, name)

    return load, lambda: sorted({*vars(module), *homes})
