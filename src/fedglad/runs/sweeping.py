"""Many runs: every combination of some grids, each in a process with one thread; resumable."""

import multiprocessing
import os
import signal
import threading
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from fedglad.config.keys import label
from fedglad.config.presets import PRESETS
from fedglad.config.schema import Config, ConfigError, load, parse_value
from fedglad.core.interruptible import interruptible, on_interrupt
from fedglad.records import Round
from fedglad.runs.folder import Interrupted, Run, RunError
from fedglad.runs.own_code import code_of, folder_of, other_code
from fedglad.runs.trusted_code import load_trusted
from fedglad.runs.twins import KINDS, replaces
from fedglad.simulation.engines.settings import Local, Serial


@dataclass(frozen=True)
class Task:
    """One configuration of a sweep, its folder, what the grids set; of a control, kind and rule.

    >>> from pathlib import Path
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
    what: Literal["started", "waiting", "round", "kept", "finished", "failed", "stopped"]
    round: Round | None = None
    reason: str = ""


Message = tuple[str, Round | None, str]
"""What a job's process sends: an Event without its task, in which the data may have been loaded."""

STDOUT, STDERR = 1, 2
SAFE_PATH = "PYTHONSAFEPATH"
DONE = ("kept", "finished")
ENDS = (*DONE, "failed", "stopped")

Then = Callable[[Event], Iterable[Task | Event]]
"""Called at each task's end: what is to be run because of it, or cannot be."""


def first_rounds(config: Config, rounds: int) -> Config:
    """A run's first rounds as a run; rates fall as they would in the whole run."""
    config.require_loaded("server", "client")
    falling = {name: config.sections[name].within(config.rounds) for name in ("server", "client")}
    sections = {**config.sections, **falling}
    return replace(config, rounds=rounds, sections=sections)


def tasks(
    source: str | Path,
    grids: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    *,
    trust_code: bool = False,
    defaults: Mapping[str, Any] | None = None,
    accept_old: bool = False,
    keep_state: bool | None = None,
) -> list[Task]:
    """Every combination of "KEY=V1,V2" grids, checked; the last grid changes fastest.

    Configurations that are the same, apart from the engine, are one task. `trust_code` is needed
    for a run folder's config.toml that names code, as for `execute`. `defaults` are keys of
    sections that neither the source nor the settings name. A run that is there with other own code
    stays, and the task gets a folder beside it, unless it is asked for with `accept_old`.

    >>> from pathlib import Path
    >>> grids = ["adapter.name=none,glad", "seed=1,2"]
    >>> [task.label for task in tasks("digits", grids, {"rounds": 5}, Path("runs"))][:3]
    ['adapter.name=none seed=1', 'adapter.name=none seed=2', 'adapter.name=glad seed=1']
    """
    if not grids:
        raise ConfigError("a sweep needs a grid: --grid seed=1,2,3")
    made: dict[Path, Task] = {}
    for settings in combinations(grids, overrides):
        try:
            chosen = {**overrides, **settings}
            name, config = load_trusted(source, chosen, trust_code=trust_code)
            if more := _unnamed(defaults or {}, source, chosen):
                config = load_trusted(source, {**more, **chosen}, trust_code=trust_code)[1]
        except ConfigError as error:
            raise ConfigError(f"{error}  (with {label(settings)})") from None
        folder = out / f"{name}-{config.hash()}" if accept_old else folder_of(name, config, out)
        task = Task(name, config, folder, settings, accept_old=accept_old, keep_state=keep_state)
        made.setdefault(folder, task)
    return list(made.values())


def _unnamed(
    defaults: Mapping[str, Any], source: str | Path, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """The defaults of sections that are not in the preset or file, nor among the settings."""
    if not defaults:
        return {}
    preset = PRESETS.get(str(source))
    tree = preset.tree if preset else tomllib.loads(Path(source).read_text("utf-8"))
    named = {key.partition(".")[0] for key in (*tree, *chosen)}
    return {key: v for key, v in defaults.items() if key.partition(".")[0] not in named}


def sweep(tasks: Sequence[Task], *, jobs: int = 1, then: Then | None = None) -> Generator[Event]:
    """Runs what is missing, in order and at most `jobs` at a time, and yields what happens.

    Finished runs are kept, unfinished ones go on from their checkpoint, and a run that fails does
    not stop the others. After Ctrl-C the running ones finish their round and save; then Interrupted
    is raised. A second one ends them at once.

    >>> import pathlib, tempfile
    >>> from fedglad.runs import execute
    >>> [task] = tasks("digits", ["seed=7"], {"rounds": 1}, pathlib.Path(tempfile.mkdtemp()))
    >>> run = execute(task.name, task.config, out=task.folder)
    >>> [event.what for event in sweep([task])]  # it is there already
    ['kept']
    """
    missing, running, cut = deque[Task](), list[_Job](), False

    def take(new: Iterable[Task | Event]) -> Iterator[Event]:
        """Yields events, also of the tasks that are finished; the other tasks are missing."""
        waiting = deque(new)
        while waiting:
            task = waiting.popleft()
            if isinstance(task, Event):
                yield task
            elif task.finished:
                event = Event(task, "kept")
                waiting.extend(then(event) if then else ())
                yield event
            else:
                missing.append(task)

    yield from take(tasks)
    with interruptible() as asked_to_stop:
        try:
            while running or (missing and not asked_to_stop()):
                while missing and len(running) < jobs and not asked_to_stop():
                    running.append(_Job(missing.popleft()))
                    yield Event(running[-1].task, "started")
                for event in _listen(running, stop=asked_to_stop()):
                    cut = cut or event.what == "stopped"
                    more = then(event) if then and event.what in ENDS else ()
                    yield event
                    yield from take(more)
        finally:
            for job in running:
                job.end(seconds=0)
        if asked_to_stop() and (missing or cut):
            raise Interrupted("stopped, all saved: go on with the same command")


class _Job:
    """A task in a process of its own, started from one that has all modules loaded."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "fedglad.runs.running", "pydantic"])
        with on_interrupt(signal.SIG_IGN), _safe_path():  # it inherits both while it imports
            forkserver.ensure_running()
        self.task, self.stopping = task, False
        code = code_of(task.config)
        self.pipe, theirs = context.Pipe()
        safe = os.environ.get(SAFE_PATH)
        self.process = context.Process(target=_work, args=(task, theirs, safe, code))
        self.process.start()
        theirs.close()

    def receive(self) -> Event:
        """The next event of its task; of a process that is gone, how it ended."""
        try:
            return Event(self.task, *self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
            how = killed or f"ended with exit code {code}"
            return Event(self.task, "failed", reason=f"its process {how}")

    def stop(self) -> None:
        """Lets it finish its round and save."""
        with suppress(OSError):  # it is gone already
            if not self.stopping:
                self.pipe.send("stop")
        self.stopping = True

    def end(self, seconds: float = 5.0) -> None:
        """Ends it for good after so long; what it has saved is intact."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def _safe_path() -> Generator[None]:
    """Python processes that are started meanwhile do not look for modules in the working folder."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        _set_safe_path(before)


def _set_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(SAFE_PATH, None)
    else:
        os.environ[SAFE_PATH] = value


def _listen(running: list[_Job], *, stop: bool) -> Iterator[Event]:
    """The events of the next moment; jobs that have ended are taken off the list."""
    if stop:
        for job in running:
            job.stop()
    ready = wait([job.pipe for job in running], timeout=0.2)
    for job in [job for job in running if job.pipe in ready]:
        event = job.receive()
        if event.what in ENDS:
            running.remove(job)
            job.end()
        yield event


# ---------------------------------------------------------------------------- in the job's process


def _work(task: Task, pipe: Connection, safe_path: str | None, code: Mapping[str, str]) -> None:
    """Runs the task; leaves Ctrl-C to the parent process, and ends with it."""
    _set_safe_path(safe_path)  # of the user's own code, which may start Python too
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    try:
        # Whatever is printed goes to the run's log, not between the lines of the terminal.
        task.folder.mkdir(parents=True, exist_ok=True)
        with open(task.folder / "log.txt", "a") as log:
            for stream in (STDOUT, STDERR):
                os.dup2(log.fileno(), stream)
    except OSError as error:
        end = ("failed", None, f"its folder cannot be written: {error}")
    else:
        end = _run(task, pipe, code)
    with suppress(OSError):
        pipe.send(end)


def _run(task: Task, pipe: Connection, code: Mapping[str, str]) -> Message:
    waiting = [("waiting",)]

    def on_round(done: Round) -> None:
        pipe.send(("round", done))
        if pipe.poll():
            signal.raise_signal(signal.SIGINT)  # which runs.py takes for: after this round

    def busy() -> None:
        """Waits while another process is at this run."""
        if waiting:
            pipe.send(waiting.pop())
        if pipe.poll(0.5):
            raise Interrupted("stopped while waiting")

    from fedglad.runs.running import execute

    config = _alone(task.config)
    try:
        if code_of(config) != code:
            raise RunError("its own code was changed since the sweep began: start it again")
        execute(
            task.name,
            config,
            out=task.folder,
            resume=True,
            accept_old=task.accept_old,
            keep_state=task.keep_state,
            on_round=on_round,
            busy=busy,
        )
    except (Interrupted, KeyboardInterrupt):
        return "stopped", None, "stopped before its end, saved"
    except Exception as error:
        traceback.print_exc()
        plain = type(error) in (ValueError, ConfigError, RunError)
        return "failed", None, str(error) if plain else f"{type(error).__name__}: {error}"
    return "finished", None, ""


def _alone(config: Config) -> Config:
    """The same with one process, whose result has the same bits; other engines stay."""
    engine = config.sections["engine"]
    if not isinstance(engine, Local):
        return config
    # Only another process can give up a client that hangs.
    engine = replace(engine, workers=1) if engine.client_timeout else Serial()
    return replace(config, sections={**config.sections, "engine": engine})


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


# ----------------------------------------------------------------------------------------- grids


def combinations(grids: Sequence[str], overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of every combination; no key may be among the overrides too."""
    values = parse_grids(grids)
    if both := sorted(values.keys() & overrides.keys()):
        raise ConfigError(f"{both[0]!r} is both set and in a grid: leave one of them out")
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def parse_grids(grids: Sequence[str], option: str = "--grid") -> dict[str, list[Any]]:
    """{key: values} of "KEY=V1,V2" texts, which were given with an option.

    >>> parse_grids(["seed=1,2", "adapter.name=glad"])
    {'seed': [1, 2], 'adapter.name': ['glad']}
    """
    values: dict[str, list[Any]] = {}
    for text in grids:
        key, equals, rest = (part.strip() for part in text.partition("="))
        pieces = [piece.strip() for piece in _split(rest)]
        if not (key and equals and all(pieces)):
            raise ConfigError(f"{option} {text!r}: write it as KEY=V1,V2, for example seed=1,2,3")
        if key in values:
            raise ConfigError(f"{option} {key!r} is there twice: give all its values at once")
        values[key] = [parse_value(piece) for piece in pieces]
    return values


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket and no quotation."""
    pieces, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote and not pieces[-1].endswith("\\") else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0 and not quote:
            pieces.append("")
        else:
            pieces[-1] += char
    return pieces
