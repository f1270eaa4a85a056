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
    from fedglad.interactive.handle import RunHandle
    from fedglad.interactive.loading import Runs
    from fedglad.records import Record as Record
    from fedglad.records import Round as Round
    from fedglad.records import Statistics as Statistics
    from fedglad.records import Update as Update
    from fedglad.server.server import Server as Server

__all__ = [
    "Glad",
    "Guard",
    "Record",
    "Round",
    "Server",
    "Statistics",
    "Update",
    "load_runs",
    "run",
    "simulate",
]

# A Flower client without torch can import `fedglad`.
__getattr__, __dir__ = lazily(__name__)

__path__ = [*__path__, f"{__path__[0]}/moved"]  # names of 0.1 that have moved


def run(
    config: Any = "digits",
    overrides: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: Any = None,
    out: Any = None,
    resume: bool = False,
    force: bool = False,
    callbacks: Any = (),
    progress: Any = "auto",
    trust_code: bool = False,
    accept_old: bool = False,
    keep_state: bool | None = None,
    **others: Any,
) -> "RunHandle":
    """Runs a preset, a TOML file, a dict or a Config to its end, and gives the run.

    | argument | meaning |
    |---|---|
    | `overrides` | dotted keys: {"rounds": 20, "adapter.name": "none"} |
    | `model`, `data`, `task` | a module, a federation, a task or a loss function |
    | `adapter`, `server`, … | any other section: an object, or a name; also `rounds` and `seed` |
    | `out` | the run's folder; True: runs/NAME-HASH; None: it is kept nowhere |
    | `resume`, `force` | go on with the unfinished run in `out`; replace the one that is there |
    | `callbacks` | functions of (round, server) after each round, or objects with `round_end`; |
    | | True or a text from one ends the run, with everything saved |
    | `progress` | a bar: True, False, or "auto", in a terminal and in a notebook |
    | `trust_code` | run code that a run's own config.toml names |
    | `accept_old` | take a run that was made with other own code than today's |
    | `keep_state` | keep what it takes to go on, whatever its size; None: where it is small |

    What is finished already is not run again. Ctrl-C ends it after the round, with everything
    saved; that exception, as any on the way, has the run so far as `run`.

    >>> from fedglad.optimizers import Adam
    >>> done = run("digits", {"client.epochs": 1}, server=Adam(lr=0.01), rounds=2)
    >>> done.rounds["status"].tolist(), type(done.model).__name__
    (['stepped', 'stepped'], 'Small')
    """
    from fedglad.interactive.running import run

    return run(
        config,
        overrides,
        model=model,
        data=data,
        task=task,
        out=out,
        resume=resume,
        force=force,
        callbacks=callbacks,
        progress=progress,
        trust_code=trust_code,
        accept_old=accept_old,
        keep_state=keep_state,
        **others,
    )


def load_runs(runs: Any = "runs/*") -> "Runs":
    """Opens runs, finished or not: a folder, a pattern, or several of them.

    What is missing or damaged is warned of, and the rest is there. It needs pandas for its data
    frames, and no torch.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for gamma in (0.02, 0.1):
    ...     done = run(overrides={"rounds": 1, "adapter.gamma": gamma}, out=folder / f"{gamma}")
    >>> load_runs(folder).summary()[["adapter.gamma", "seed", "rounds"]].values.tolist()
    [[0.02, 1.0, 1.0], [0.1, 1.0, 1.0]]
    """
    from fedglad.interactive.loading import load_runs

    return load_runs(runs)


def simulate(
    config: Any,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: Any = None,
    callbacks: Any = (),
) -> "Iterator[Round]":
    """Runs a preset, a TOML file or a Config, and yields each round as it is done.

    >>> for round in simulate("digits", {"rounds": 2, "adapter.name": "none"}):
    ...     print(round.t, len(round.cohort), round.record.status)  # and test_accuracy, seconds, …
    0 5 stepped
    1 5 stepped
    >>> sorted(round.server.state)[:2]  # the server as it is now
    ['conv1.bias', 'conv1.weight']

    With own objects, `model` is a module, and `data` has `clients`, `size(k)`, `client(k)` and
    `test()`, the last two giving (x, y); `task` has `loss(model, batch)` and
    `metrics(model, batch)`. `callbacks` are those of `fedglad.run`.
    """
    from fedglad.config.schema import simulate

    return simulate(config, overrides, model=model, data=data, task=task, callbacks=callbacks)
