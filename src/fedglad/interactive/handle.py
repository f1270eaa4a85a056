"""A run in Python's hands: its models, its tables, its page, and going on with it."""

from __future__ import annotations

import html
import os
import shutil
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedglad.analysis import frames
from fedglad.config.schema import Config, as_section, changed, load
from fedglad.core.given import Given
from fedglad.runs import extending, trusted_code
from fedglad.runs.folder import Interrupted
from fedglad.runs.reader import Run, RunError, RunView
from fedglad.runs.scores import Number

if TYPE_CHECKING:
    from torch import nn

    from fedglad.analysis.frames import DataFrame
    from fedglad.interactive.progress import Progress
    from fedglad.records import Round, Score
    from fedglad.server.server import Server

WORDS = {
    "--resume": "resume=True",
    "--force": "force=True",
    "--out": "out=",
    "--accept-old": "accept_old=True",
    "--keep-state": "keep_state=True",
}
"""How Python says what the command line calls so."""


class RunHandle:
    """A run: what `fedglad.run` gives, and what `fedglad.load_runs` opens.

    | member | meaning |
    |---|---|
    | `model`, `averaged` | modules with the trained model and the average of past models, to use |
    | `rounds`, `groups`, `clients` | data frames: a row a round, a group of tensors, a client |
    | `summary`, `finished`, `stopped` | the result, once there is one; why it ended early |
    | `config`, `folder`, `score` | its settings; where it is kept, or None; its task's score |
    | `server` | the server itself, where this process has trained the run |
    | `report()`, `export()`, `keep()` | its page, one of its models, its folder, as files |
    | `resume()` | goes on with it |

    >>> import fedglad, torch
    >>> run = fedglad.run("digits", {"rounds": 2, "client.epochs": 1})
    >>> run.finished, len(run.rounds), run.folder
    (True, 2, None)
    >>> run.model(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """

    def __init__(
        self, folder: Path, *, name: str = "", config: Config | None = None, kept: bool = True
    ) -> None:
        """`kept`: the folder stays when the handle goes; else it is removed with it."""
        self.name = name or folder.resolve().name
        self._run, self._config = Run(folder), config
        self._modules: dict[str, nn.Module] = {}
        self._server: Server | None = None
        self._end = None if kept else weakref.finalize(self, _remove, folder, os.getpid())

    # ------------------------------------------------------------------------------ what it is

    @property
    def folder(self) -> Path | None:
        """The run's folder; None if it is kept nowhere, and is gone with this object."""
        return None if self._end else self._run.folder

    @property
    def view(self) -> RunView:
        """All that can be read of it now, with sentences on what is missing or damaged."""
        return self._run.read()

    @property
    def config(self) -> dict[str, Any]:
        """Its settings, as config.toml has them."""
        return self._run.config or {}

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, as summary.json has it; None as long as the run is not finished."""
        return self._run.summary

    @property
    def finished(self) -> bool:
        """Whether it has come to its end, the last round or an earlier one."""
        return self.summary is not None

    @property
    def stopped(self) -> str:
        """Why it ended before its last round; empty if it did not."""
        return str((self.summary or {}).get("stopped", ""))

    @property
    def score(self) -> Score:
        """The metric that its task is judged by."""
        return self._run.score

    @property
    def server(self) -> Server:
        """The server as the last round has left it; RunError for a run that was only opened."""
        if self._server is None:
            raise RunError(
                f"this process has not trained {self._where}, so it has no server of it: `model` "
                "is the trained model"
            )
        return self._server

    # ---------------------------------------------------------------------------- its tables

    @property
    def rounds(self) -> DataFrame:
        """A data frame with a row for each round; rounds count from 0."""
        return frames.rounds([self.view], named=False)

    @property
    def groups(self) -> DataFrame:
        """A data frame with a row for each round and group of tensors: GSI, baseline, factor."""
        return frames.groups([self.view], named=False)

    @property
    def clients(self) -> DataFrame:
        """A data frame with a row for each round and client of its cohort."""
        return frames.clients([self.view], named=False)

    @property
    def client_scores(self) -> DataFrame:
        """A data frame with a row for each round and client whose own score was measured."""
        return frames.client_scores([self.view], named=False)

    # ---------------------------------------------------------------------------- its models

    @property
    def model(self) -> nn.Module:
        """The model after the last round, as `load()` gives it."""
        return self.load()

    @property
    def averaged(self) -> nn.Module:
        """The average of past models; RunError for a run that keeps none."""
        return self.load("averaged")

    def load(self, which: str = "model", into: nn.Module | None = None) -> nn.Module:
        """One of the run's models, ready to be used: in evaluation mode, on the CPU.

        `which` is model, averaged, best or best_averaged; of an unfinished run it is that of the
        last checkpoint. The module is a new one: that which was given to the run, or is given here
        as `into`, is copied and stays as it is. It is the same one each time until the run goes on.
        """
        from fedglad.runs.exporting import state_of

        if into is None and which in self._modules:
            return self._modules[which]
        state, _, source = state_of(self._run.folder, which)
        module = _fresh(self._loaded(), into)
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        try:
            lacking = module.load_state_dict(dict(state), strict=False)
        except RuntimeError as error:
            first = " ".join(str(error).split("\n\t")[1:2]) or str(error)
            raise RunError(f"{source} is of another model: {first}") from None
        if wrong := [*lacking.unexpected_keys, *(set(lacking.missing_keys) - frozen)]:
            raise RunError(f"{source} is of another model: {sorted(wrong)[0]!r} is not in both")
        module.eval()
        if into is None:
            self._modules[which] = module
        return module

    def export(
        self, to: str | Path, *, averaged: bool = False, best: bool = False, force: bool = False
    ) -> Path:
        """Writes one of its models to a file, as `fedglad.runs.export` does; the file's path."""
        from fedglad.runs.exporting import export

        return export(self._run, to, averaged=averaged, best=best, force=force).path

    # ------------------------------------------------------------------------------ its files

    def report(self, path: str | Path | None = None) -> Path:
        """Writes the run's HTML page, by default report.html in its folder, or here; its path."""
        default = (self.folder or Path()) / "report.html"
        return write_page([self.view], Path(path or default))

    def keep(self, folder: str | Path) -> Path:
        """Copies the run into a folder that stays, from which it can be opened again."""
        to = Path(folder)
        if to.exists():
            raise RunError(f"{to} is there already: choose another folder")
        try:
            shutil.copytree(self._run.folder, to)
        except OSError as error:
            raise RunError(f"{to} could not be written: {error}") from None
        if self._config:
            trusted_code.remember(self._config, to)
        if self._end:
            self._end()
        self._run, self._end = Run(to), None
        return to

    # ------------------------------------------------------------------------------- going on

    def resume(
        self,
        *,
        rounds: int | None = None,
        callbacks: Any = (),
        progress: Progress = "auto",
        trust_code: bool = False,
        accept_old: bool = False,
        keep_state: bool | None = None,
        **objects: Any,
    ) -> Self:
        """Goes on with the run from its last checkpoint, to its end.

        That is one that was interrupted, or that a callback has ended; with `rounds` also a
        finished one, up to so many rounds. Callbacks are those of now. Of a run that was opened,
        objects that were given to it are given again by their section, `adapter=Mine()`.

        A folder that is named by its settings, as with `out=True`, stays what it is when there are
        more rounds: then this is the longer run beside it.
        """
        config = self._loaded(trust_code=trust_code)
        if objects:
            config = changed(config, {key: as_section(key, one) for key, one in objects.items()})
        if rounds is not None:
            config = replace(config, rounds=rounds)
        config.require_loaded(
            *(section for section, one in config.sections.items() if isinstance(one, Given))
        )
        before, extend = self._run, None
        if not self._end:
            with in_python():
                folder, extend = extending.place_of(before.folder, config, resume=True)
            self._run = Run(folder) if extend else before
        if not extend and self.stopped:  # to the summary, this is the end
            if not any((self._run.folder / "checkpoints").glob("*.json")):
                raise RunError(f"{self._where} has no checkpoint left to go on from")
            (self._run.folder / "summary.json").unlink()
        try:
            self.play(
                config,
                callbacks,
                progress,
                resume=True,
                extend=extend,
                trust_code=trust_code,
                accept_old=accept_old,
                keep_state=keep_state,
            )
        finally:
            if not self._begun:
                self._run = before
        return self

    def play(
        self,
        config: Config,
        callbacks: Any = (),
        progress: Progress = "auto",
        *,
        resume: bool = False,
        extend: Path | None = None,
        force: bool = False,
        trust_code: bool = False,
        accept_old: bool = False,
        keep_state: bool | None = None,
    ) -> None:
        """Trains the run in its folder; an exception on the way has it as `run`."""
        from fedglad.interactive.progress import display_of
        from fedglad.runs.running import execute
        from fedglad.simulation.callbacks import Callbacks

        calls, folder = Callbacks(callbacks), self._run.folder
        if not force:
            _refuse_others(config, folder)
        self._config = config
        with display_of(config.rounds, progress) as shown:

            def on_round(played: Round) -> str:
                self._server = played.server
                shown.round(played)
                return calls.round_end(played, played.server)

            try:
                execute(
                    self.name,
                    config,
                    out=folder,
                    resume=resume,
                    extend=extend,
                    force=force,
                    trust_code=trust_code,
                    accept_old=accept_old,
                    # What is kept nowhere is gone with this object, so it costs nothing for long.
                    keep_state=True if self._end else keep_state,
                    on_round=on_round,
                    on_lost=lambda lost: warnings.warn(lost, stacklevel=2),
                )
            except Interrupted:
                done = self._run.count()
                text = f"stopped after {done} of {config.rounds} rounds, all saved: {self._way_on}"
                raise self._on(Interrupted(text)) from None
            except RunError as error:
                raise self._on(RunError(_as_python(str(error)))) from error
            except BaseException as error:
                if self._begun:
                    error.add_note(f"What was done is saved: {self._way_on}.")
                self._on(error)
                raise
            finally:
                self._modules.clear()
        if skipped := self._run.skipped:
            warnings.warn(skipped, stacklevel=4)

    @property
    def _begun(self) -> bool:
        return (self._run.folder / "config.toml").is_file()

    @property
    def _way_on(self) -> str:
        again = f", or fedglad.run(…, out={str(self.folder)!r}, resume=True)" if self.folder else ""
        return f"this exception's `run` goes on with resume(){again}"

    def _on(self, error: BaseException) -> BaseException:
        """An exception that has the run so far, if there is one."""
        if self._begun:
            vars(error)["run"] = self
        return error

    def _loaded(self, *, trust_code: bool = False) -> Config:
        """The configuration, with its code, if that was trusted for this folder before."""
        if not self._begun:
            raise RunError(f"{self._where} has no config.toml, so its settings are not known")
        if self._config is None:
            self._config = load(self._run.folder / "config.toml")[1]
        return trusted_code.trusted(self._config, self._run.folder, trust_code=trust_code)

    # ------------------------------------------------------------------------------ how it looks

    @property
    def _where(self) -> str:
        return f"the run in {self.folder}" if self.folder else "this run"

    def __repr__(self) -> str:
        return f"<run {'; '.join([self.name, *self._facts().values()])}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in {"run": self.name, **self._facts()}.items()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        view = self.view
        of = f" of {total}" if (total := view.config.get("rounds")) else ""
        facts = {"rounds": f"{len(view.rounds)}{of} rounds"}
        for words, readout in {view.score.words: "test", "averaged": "averaged"}.items():
            field = Number("final", readout, view.score.name).field
            tested = [one[field] for one in view.rounds if one.get(field) is not None]
            if tested:
                facts[words] = f"{words} {view.score.text(tested[-1], 2)}"
        if skipped := sum(one.get("status") == "skipped" for one in view.rounds):
            facts["skipped"] = f"{skipped} skipped"
        if stopped := (view.summary or {}).get("stopped"):
            facts["stopped"] = f"stopped: {stopped}"
        elif view.summary is None:
            facts["state"] = "not finished"
        return {**facts, **({"folder": str(self.folder)} if self.folder else {})}


def write_page(views: list[RunView], path: Path) -> Path:
    """The page of some runs."""
    from fedglad.report import page
    from fedglad.report.figures import payload

    page.write(payload(views), path)
    return path


def _fresh(config: Config, into: nn.Module | None) -> nn.Module:
    """A module of the run's model that nobody else has."""
    import copy

    import torch

    if into is not None:
        return copy.deepcopy(into)
    given = config.sections["model"]
    if isinstance(given, Given) and given.thing is None:
        raise RunError(
            f"the model of this run was an object that was given from Python, {given.about}: give "
            "a module of its kind, run.load(into=module)"
        )
    with torch.random.fork_rng(devices=[]):
        built = config.build_model()
    return copy.deepcopy(built) if isinstance(given, Given) else built


def _refuse_others(config: Config, folder: Path) -> None:
    """Raises if an object is not the one that the run in a folder was begun with."""
    begun = Run(folder).config or {}
    for section, given in config.sections.items():
        if not isinstance(given, Given) or given.thing is None:
            continue
        theirs: Any = begun.get(section, {})
        said = theirs.get("from_python", {}) if isinstance(theirs, dict) else {}
        if begun and said.get("fingerprint") != given.fingerprint:
            was = said.get("about") or theirs.get("name", "another")
            raise RunError(
                f"{folder} was begun with another {section}: it was {was}, and now it is "
                f"{given.about}, or its code or contents are others. Give the same one, choose "
                "another out=, or replace the run with force=True"
            )


@contextmanager
def in_python() -> Generator[None]:
    """Says in Python's words what is wrong with a run."""
    try:
        yield
    except RunError as error:
        raise RunError(_as_python(str(error))) from error


def _as_python(text: str) -> str:
    for word, ours in WORDS.items():
        text = text.replace(word, ours)
    return text


def _remove(folder: Path, process: int) -> None:
    """Removes the folder of a run that nobody keeps; never by a worker, which is a copy of us."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        trusted_code.forget(folder)
