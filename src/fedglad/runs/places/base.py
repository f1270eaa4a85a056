"""What a sweep knows of the place where its runs happen, and what it says of each run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fedglad.config.keys import label
from fedglad.config.schema import Config, load
from fedglad.records import Round
from fedglad.runs.folder import Run, RunError
from fedglad.runs.own_code import other_code
from fedglad.runs.twins import KINDS, replaces
from fedglad.simulation.engines.settings import Batched, Local, Serial


@dataclass(frozen=True)
class Task:
    """One configuration of a sweep, its folder, what the grids set; of a control, kind and rule.

    >>> from pathlib import Path
    >>> from fedglad.runs import tasks
    >>> [task] = tasks("digits", ["seed=7"], {"rounds": 5}, Path("runs"))
    >>> task.label, task.config.rounds
    ('seed=7', 5)
    """

    name: str
    config: Config
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rule: "Task | None" = None
    kind: str = "mean"
    accept_old: bool = False  # a run with other own code that is there already
    keep_state: bool | None = None  # as `execute` has it

    @property
    def label(self) -> str:
        """Its settings in one line: `seed=1 control of adapter.name=glad`."""
        if self.rule is None:
            return label(self.settings)
        if self.kind != "mean":
            settings = self.rule.settings.items()
            plain = {key: value for key, value in settings if not replaces(self.kind, key)}
            value = self.settings.get("adapter.value", "")
            return f"{label(plain)} {KINDS[self.kind].words} {value}".strip()
        name = self.rule.config.to_dict()["adapter"]["name"]
        parts: list[dict[str, Any]] = [{}, {"adapter.name": name}]
        for key, value in self.rule.settings.items():
            parts[key.startswith("adapter.")][key] = value
        return f"{label(parts[0])} control of {label(parts[1])}".lstrip()

    @property
    def finished(self) -> bool:
        """Whether it is there already."""
        config = self.folder / "config.toml"
        try:
            done = config.is_file() and Run(self.folder).summary is not None
            known = self.config.own_names().values()
            same = done and load(config, trust_code=known)[1].hash() == self.config.hash()
            return same and (self.accept_old or not other_code(self.folder, self.config))
        except (ValueError, RunError):  # something is broken: running it says what
            return False


@dataclass(frozen=True)
class Event:
    """What happened to a task; one of the last four is its end."""

    task: Task
    what: Literal["started", "waiting", "again", "round", "kept", "finished", "failed", "stopped"]
    round: Round | None = None
    reason: str = ""


Message = tuple[str, Round | None, str]
"""What a run's process sends: an Event without its task, in which the data may have been loaded."""

DONE = ("kept", "finished")
ENDS = (*DONE, "failed", "stopped")
CUT = "stopped before its end, saved"
"""The reason of an end that is "stopped"."""


class Running(Protocol):
    """A task that a place has been given."""

    task: Task

    def events(self) -> Iterable[Event]:
        """What has happened since the last call; the last event of all is its end."""
        ...

    def stop(self) -> None:
        """Lets it finish its round and save; may be called again."""
        ...

    def end(self, seconds: float = 5.0) -> None:
        """Ends it for good after so long; what it has saved is intact."""
        ...


class Place(Protocol):
    """Where runs happen. It is closed in the end, when each of its runs has ended."""

    @property
    def room(self) -> int:
        """How many runs it takes at a time, as things are now."""
        ...

    def start(self, task: Task) -> Running:
        """Begins with a task, or goes on with it."""
        ...

    def ready(self, running: Sequence[Any]) -> Sequence[Running]:
        """Those of its runs that have events, after a moment at most."""
        ...

    def close(self) -> None:
        """Leaves nothing behind."""
        ...


def alone(config: Config) -> Config:
    """The same with one process, whose result has the same bits; other engines stay."""
    engine = config.sections["engine"]
    if not isinstance(engine, Local):
        return config
    # Only another process can give up a client that hangs.
    engine = replace(engine, workers=1) if engine.client_timeout else Serial()
    return replace(config, sections={**config.sections, "engine": engine})


def as_asked(config: Config) -> Config:
    """The same with as many processes as it names, and with one if it leaves that open."""
    engine = config.sections["engine"]
    named = isinstance(engine, Local) and engine.workers not in ("auto", 1)
    return config if named else alone(config)


def cpus_of(config: Config) -> int:
    """How many CPUs a run `as_asked` keeps busy."""
    engine = config.sections["engine"]
    if isinstance(engine, Local) and engine.workers != "auto":
        return engine.workers
    return engine.threads if isinstance(engine, Batched) else 1
