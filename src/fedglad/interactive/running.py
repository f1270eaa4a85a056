"""`fedglad.run`: an experiment from Python, kept in a folder or nowhere."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedglad.config.schema import REGISTRIES, Config, ConfigError, as_section, changed
from fedglad.core.given import Given
from fedglad.interactive.handle import RunHandle, in_python
from fedglad.interactive.progress import Progress, shows
from fedglad.runs import extending, own_code
from fedglad.runs.trusted_code import load_trusted

if TYPE_CHECKING:
    from torch import nn

RUNS = Path("runs")


def run(
    config: str | Path | Mapping[str, Any] | Config = "digits",
    overrides: Mapping[str, Any] | None = None,
    *,
    model: nn.Module | Any = None,
    data: Any = None,
    task: Any = None,
    out: str | Path | Literal[True] | None = None,
    resume: bool = False,
    force: bool = False,
    callbacks: Any = (),
    progress: Progress = "auto",
    trust_code: bool = False,
    accept_old: bool = False,
    keep_state: bool | None = None,
    **others: Any,
) -> RunHandle:
    """The same as `fedglad.run`, which says what it does."""
    objects = {"model": model, "data": data, "task": task, **others}
    name, checked = configured(config, overrides or {}, objects, trust_code=trust_code)
    if out is None and (resume or force):
        raise ConfigError("resume and force are for a run that is kept: say where, out=…")
    fetches = not isinstance(checked.sections["data"], Given)
    if shows(progress) and fetches:
        from fedglad.cli.fetching import fetch_for

        fetch_for(checked)
    extend = None
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="fedglad-run-"))
    elif out is True or out == "auto":
        with in_python():
            folder, extend = extending.place_among(
                name, checked, resume=resume, force=force, accept_old=accept_old, root=RUNS
            )
        if beside := own_code.said_of(folder, checked):
            warnings.warn(beside, stacklevel=3)
    else:
        folder = Path(out)
    handle = RunHandle(folder, name=name, kept=out is not None)
    handle.play(
        checked,
        callbacks,
        progress,
        resume=resume,
        extend=extend,
        force=force,
        trust_code=trust_code,
        accept_old=accept_old,
        keep_state=keep_state,
    )
    return handle


def configured(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Mapping[str, Any],
    objects: Mapping[str, Any],
    *,
    trust_code: bool = False,
) -> tuple[str, Config]:
    """The name and the configuration of a run, of which sections may be objects.

    >>> from fedglad.adapters import Glad
    >>> configured({"rounds": 3}, {}, {"adapter": Glad(gamma=0.1)})[1].sections["adapter"].gamma
    0.1
    """
    made = dict(overrides)
    for section, thing in objects.items():
        if thing is None:
            continue
        if section in overrides or f"{section}.name" in overrides:
            raise ConfigError(f"{section} is given twice: as an argument, and in the overrides")
        if section not in REGISTRIES or isinstance(thing, Mapping):
            made[section] = thing  # a key outside of all sections, or one that is not known
        elif isinstance(thing, str):
            made[f"{section}.name"] = thing
        else:
            made[section] = as_section(section, thing)
    if isinstance(config, Config):
        return "run", changed(config, made)
    if isinstance(config, Mapping):
        return "run", changed(Config.of(config), made)
    return load_trusted(config, made, trust_code=trust_code)
