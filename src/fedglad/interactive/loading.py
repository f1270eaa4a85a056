"""`fedglad.load_runs`: runs that are there, finished or not, as data frames. It loads no torch."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from fedglad.analysis import frames
from fedglad.interactive.handle import RunHandle, write_page
from fedglad.runs.reader import RunError, RunView, is_run, run_folders

if TYPE_CHECKING:
    from fedglad.analysis.frames import DataFrame

Source = str | Path | RunHandle


class Runs(Sequence[RunHandle]):
    """Some runs, in an order; each is a `RunHandle`.

    Before the columns of each data frame stand `run`, the folder, `seed`, and the settings in which
    the runs differ.

    >>> import fedglad
    >>> several = Runs(fedglad.run(overrides={"rounds": 1, "seed": seed}) for seed in (1, 2))
    >>> len(several), several.rounds()["seed"].tolist()
    (2, [1, 2])
    """

    def __init__(self, runs: Iterable[RunHandle]) -> None:
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, index: int) -> RunHandle: ...

    @overload
    def __getitem__(self, index: slice) -> Runs: ...

    def __getitem__(self, index: int | slice) -> RunHandle | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"<{len(self)} run{'s' if len(self) != 1 else ''}: {', '.join(map(repr, self))}>"

    def _repr_html_(self) -> str:
        return "".join(run._repr_html_() for run in self)  # pyright: ignore[reportPrivateUsage]

    def where(self, condition: Callable[[RunHandle], bool]) -> Runs:
        """Those of which something is true: `runs.where(lambda run: run.finished)`."""
        return Runs(filter(condition, self))

    def rounds(self) -> DataFrame:
        """A row for each round of each run: scores, losses, GSI, seconds."""
        return frames.rounds(self._views())

    def groups(self) -> DataFrame:
        """A row for each round and group of tensors: GSI, baseline, factor."""
        return frames.groups(self._views())

    def clients(self) -> DataFrame:
        """A row for each round and client of its cohort: weight, loss, trust, why rejected."""
        return frames.clients(self._views())

    def client_scores(self) -> DataFrame:
        """A row for each round and client that was tested on its own samples."""
        return frames.client_scores(self._views())

    def summary(self) -> DataFrame:
        """A row for each run: whether it is finished, and its result so far."""
        return frames.summary(self._views())

    def report(self, path: str | Path = "report.html") -> Path:
        """Writes one HTML page of all of them; its path."""
        return write_page(self._views(), Path(path))

    def _views(self) -> list[RunView]:
        return [run.view for run in self]


def load_runs(runs: Source | Iterable[Source] = "runs/*") -> Runs:
    """The same as `fedglad.load_runs`, which says what it does."""
    given = [runs] if isinstance(runs, Source) else [*runs]
    opened = Runs(handle for one in given for handle in _opened(one))
    for run in opened:
        for sentence in run.view.missing:
            if "label distributions" not in sentence:  # which no data frame has
                warnings.warn(f"{run.folder or run.name}: {sentence}", stacklevel=3)
    return opened


def _opened(source: Source) -> Iterator[RunHandle]:
    if isinstance(source, RunHandle):
        yield source
        return
    pattern = str(Path(source).expanduser())
    folders = [Path(pattern)]
    if glob.has_magic(pattern) and not folders[0].exists():
        folders = [Path(path) for path in sorted(glob.glob(pattern)) if _holds_runs(Path(path))]
        if not folders:
            raise RunError(f"{pattern!r} matches no run")
    yield from map(RunHandle, run_folders(folders))


def _holds_runs(path: Path) -> bool:
    return path.is_dir() and (is_run(path) or any(is_run(one) for one in path.iterdir()))
