"""FedGLAD: federated learning that knows when to trust its aggregated gradients.

    from fedglad import Glad, Server
    from fedglad.optimizers import Adam

    server = Server(model, optimizer=Adam(lr=5e-3), adapter=Glad())
    record = server.step(updates)
    model.load_state_dict(server.state)

Importing it loads nothing. The first use of a name loads torch and numpy; safetensors is loaded by
`Server.save` and `Server.load`.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedglad.adapters import Glad
    from fedglad.records import Record, Round, Statistics, Update
    from fedglad.server import Server
    from fedglad.validate import Guard

__all__ = ["Glad", "Guard", "Record", "Round", "Server", "Statistics", "Update", "simulate"]

_HOMES = {
    "Glad": "adapters",
    "Guard": "validate",
    "Record": "records",
    "Round": "records",
    "Server": "server",
    "Statistics": "records",
    "Update": "records",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for, so that a Flower client without torch can import `fedglad`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def simulate(
    config: Any, overrides: Mapping[str, Any] | None = None, *, model: Any = None, data: Any = None
) -> "Iterator[Round]":
    """Runs a preset, a TOML file or a Config, and yields each round as it is done.

    >>> for round in simulate("digits", {"rounds": 2, "adapter.name": "none"}):  # doctest: +SKIP
    ...     print(round.t, round.test_accuracy, round.record.gsi_all)

    With own objects, `model` is a module, and `data` has `clients`, `size(k)`, `client(k)` and
    `test()`, the last two giving (x, y).
    """
    from fedglad.config import simulate

    return simulate(config, overrides, model=model, data=data)
