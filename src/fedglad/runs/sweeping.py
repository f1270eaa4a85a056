"""Many runs: every combination of some grids, at a place that takes some at a time; resumable."""

import tomllib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fedglad.config.keys import label
from fedglad.config.presets import PRESETS
from fedglad.config.schema import Config, ConfigError, parse_value
from fedglad.core.interruptible import interruptible
from fedglad.runs.folder import Interrupted
from fedglad.runs.own_code import folder_of
from fedglad.runs.places.base import DONE as DONE
from fedglad.runs.places.base import ENDS, Event, Place, Running, Task
from fedglad.runs.places.processes import Processes
from fedglad.runs.trusted_code import load_trusted

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


def sweep(
    tasks: Sequence[Task], *, jobs: int = 1, then: Then | None = None, place: Place | None = None
) -> Generator[Event]:
    """Runs what is missing, in order and at most `jobs` at a time, and yields what happens.

    They run in processes of this machine, or at a `place` of `fedglad.runs.places`, which then
    says how many it takes, and is closed by whoever has opened it. Finished runs are kept,
    unfinished ones go on from their checkpoint, and a run that fails does not stop the others.
    After Ctrl-C the running ones finish their round and save; then Interrupted is raised. A second
    one ends them at once.

    >>> import pathlib, tempfile
    >>> from fedglad.runs import execute
    >>> [task] = tasks("digits", ["seed=7"], {"rounds": 1}, pathlib.Path(tempfile.mkdtemp()))
    >>> run = execute(task.name, task.config, out=task.folder)
    >>> [event.what for event in sweep([task])]  # it is there already
    ['kept']
    """
    missing, running, cut = deque[Task](), list[Running](), False
    place = place or Processes(jobs)

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
                while missing and len(running) < place.room and not asked_to_stop():
                    running.append(place.start(missing.popleft()))
                    yield Event(running[-1].task, "started")
                for event in _listen(place, running, stop=asked_to_stop()):
                    cut = cut or event.what == "stopped"
                    more = then(event) if then and event.what in ENDS else ()
                    yield event
                    yield from take(more)
        finally:
            for run in running:
                run.end(seconds=0)
        if asked_to_stop() and (missing or cut):
            raise Interrupted("stopped, all saved: go on with the same command")


def _listen(place: Place, running: list[Running], *, stop: bool) -> Iterator[Event]:
    """The events of the next moment; runs that have ended are taken off the list."""
    if stop:
        for run in running:
            run.stop()
    for run in place.ready(running):
        for event in run.events():
            if event.what in ENDS:
                running.remove(run)
                run.end()
            yield event


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
