"""FedGLAD: federated learning that knows when to trust its aggregated gradients.

>>> import torch
>>> from fedglad import Glad, Server
>>> from fedglad.optimizers import Adam
>>> model = torch.nn.Linear(2, 1)
>>> server = Server(model, optimizer=Adam(lr=5e-3), adapter=Glad())
>>> updates = [{name: k * value for name, value in server.params.items()} for k in (0.1, 0.2)]
>>> record = server.step(updates)
>>> model.load_state_dict(server.state)
<All keys matched successfully>

Importing it loads nothing. The first use of a name loads torch and numpy; safetensors is loaded by
`Server.save` and `Server.load`.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.adapters import Glad as Glad
    from fedglad.core.guard import Guard as Guard
    from fedglad.records import Record as Record
    from fedglad.records import Round as Round
    from fedglad.records import Statistics as Statistics
    from fedglad.records import Update as Update
    from fedglad.server.server import Server as Server

__all__ = ["Glad", "Guard", "Record", "Round", "Server", "Statistics", "Update", "simulate"]

# A Flower client without torch can import `fedglad`.
__getattr__, __dir__ = lazily(__name__)

__path__ = [*__path__, f"{__path__[0]}/moved"]  # names of 0.1 that have moved


def simulate(
    config: Any,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: Any = None,
) -> "Iterator[Round]":
    """Runs a preset, a TOML file or a Config, and yields each round as it is done.

    >>> for round in simulate("digits", {"rounds": 2, "adapter.name": "none"}):
    ...     print(round.t, len(round.cohort), round.record.status)  # and test_accuracy, seconds, …
    0 5 stepped
    1 5 stepped

    With own objects, `model` is a module, and `data` has `clients`, `size(k)`, `client(k)` and
    `test()`, the last two giving (x, y); `task` has `loss(model, batch)` and
    `metrics(model, batch)`.
    """
    from fedglad.config.schema import simulate

    return simulate(config, overrides, model=model, data=data, task=task)
