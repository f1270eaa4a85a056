"""The same Server inside Flower: a strategy, a monitor for other strategies, a mod for clients.

    from fedglad.flower import FedGLAD, Monitor      # in a ServerApp
    from fedglad.flower import report_norms          # in a ClientApp

Nothing is loaded before it is used: `report_norms` needs NumPy alone, the others torch and flwr.
Knows server, samplers and runs; nothing of the library but the command line may import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedglad.flower.mods import report_norms
    from fedglad.flower.monitor import Monitor
    from fedglad.flower.strategy import FedGLAD, NothingTrained

__all__ = ["FedGLAD", "Monitor", "NothingTrained", "report_norms"]

_HOMES = {
    "FedGLAD": "strategy",
    "Monitor": "monitor",
    "NothingTrained": "strategy",
    "report_norms": "mods",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ImportError(
            f"fedglad.flower.{name} needs Flower: pip install 'fedglad[flower]'"
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
