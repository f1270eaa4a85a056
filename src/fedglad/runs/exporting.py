"""Taking a model out of a run's folder, finished or not, of today or of an older version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedglad.core import checkpoint, files
from fedglad.runs.checkpoints import newest
from fedglad.runs.models import apart
from fedglad.runs.reader import BEST, Run, RunError, no_folder, require_run

if TYPE_CHECKING:
    from torch import Tensor

    from fedglad.runs.models import State

KINDS = (".safetensors", ".pt", ".pth")

WORDS = {
    "model": "model",
    "averaged": "average",
    "best": "best model",
    "best_averaged": "best average",
}


@dataclass(frozen=True)
class Exported:
    """A model that was taken out of a run.

    | field | meaning |
    |---|---|
    | `path` | the file that was written |
    | `which` | model, averaged, best or best_averaged |
    | `round` | after how many rounds it is |
    | `source` | the file in the run's folder that it comes from |

    >>> from pathlib import Path
    >>> Exported(Path("mine.pt"), "averaged", 50, Path("runs/a/averaged.safetensors")).words
    'the average after round 50'
    """

    path: Path
    which: str
    round: int
    source: Path

    @property
    def words(self) -> str:
        """What it is, for a person."""
        return f"the {WORDS[self.which]} after round {self.round}"


def export(
    run: str | Path | Run,
    to: str | Path,
    *,
    averaged: bool = False,
    best: bool = False,
    force: bool = False,
) -> Exported:
    """Copies a run's model into a file that `model.load_state_dict` can be given.

    It is θ after the last round, or the average of past models (`averaged`); with `best` that
    after the round which was best on the validation set. A run that is not finished, or is from
    before runs kept their models, gives that of its newest checkpoint. A name that ends in
    .safetensors makes a safetensors file, .pt or .pth a state_dict of `torch.save`. A file that is
    there is replaced only with `force`.

    >>> import pathlib, tempfile
    >>> from safetensors.torch import load_file
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> name, config = load("digits", {"rounds": 2, "client.epochs": 1})
    >>> run = execute(name, config, out=folder / "run")
    >>> export(run, folder / "mine.safetensors").words
    'the model after round 2'
    >>> model = config.sections["model"].build()
    >>> model.load_state_dict(load_file(folder / "mine.safetensors"))
    <All keys matched successfully>
    """
    folder, path = Path(run.folder if isinstance(run, Run) else run), Path(to)
    _require_free(path, force=force)
    which = "_".join([*(["best"] if best else []), *(["averaged"] if averaged else [])]) or "model"
    state, meta, source = state_of(folder, which)
    try:
        if path.suffix == ".safetensors":
            checkpoint.write(path, apart(state), meta)
        else:
            import torch

            with files.replacing(path) as temporary:
                torch.save(apart(state), temporary)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error}") from None
    return Exported(path, which, meta["round"], source)


def state_of(folder: Path, which: str = "model") -> tuple[State, dict[str, Any], Path]:
    """One of the models of a run, finished or not: by names, its header, and the file it is in.

    RunError for a name that is not in WORDS, and for a run that has no such model.
    """
    require_run(folder)
    if which not in WORDS:
        raise RunError(f"no run has a model {which!r}: choose from {', '.join(WORDS)}")
    return _best(folder, which) if which.startswith("best") else _last(folder, which)


def _require_free(path: Path, *, force: bool) -> None:
    if path.suffix not in KINDS:
        raise RunError(f"{path} has no kind that is known: end it in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise RunError(f"{path} cannot be written: {no_folder(path.parent)}")
    if path.is_dir():
        raise RunError(f"{path} is a folder: name a file")
    if path.exists() and not force:
        raise RunError(f"{path} is there already: choose another name, or replace it with --force")


def _last(folder: Path, which: str) -> tuple[State, dict[str, Any], Path]:
    """The model or the average: the finished run's, else that of its newest checkpoint."""
    path = folder / f"{which}.safetensors"
    if (folder / "summary.json").exists() and path.exists():
        return (*_read(path, "remove it, and its newest checkpoint is taken"), path)
    tensors, saved, source = newest(folder)
    if which == "averaged" and not any(name.startswith("average/params/") for name in tensors):
        raise RunError(
            f"{folder} keeps no average of its models: only average.name = ema, or another, does"
        )
    try:
        state = _as_state("" if which == "model" else "average/", tensors, saved)
        # The server's own number leaves out the rounds that were skipped.
        meta = {"version": checkpoint.VERSION, "which": which, "round": int(source.stem)}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{source} cannot be used: {error!r}") from None
    return state, meta, source


def _as_state(part: str, tensors: dict[str, Tensor], saved: dict[str, Any]) -> State:
    """A model by the names of its state_dict, of a server's state, which has it in parts."""
    import torch

    from fedglad.core.layout import rounded

    state: dict[str, Tensor] = {}
    for name, _, dtype, kind in saved["layout"]:
        tensor = tensors[f"{part}{'params' if kind == 'parameter' else 'buffers'}/{name}"]
        state[name] = rounded(tensor, getattr(torch, dtype)) if kind == "parameter" else tensor
    tied = {alias: state[name] for alias, name in saved.get("aliases", {}).items()}
    return {**state, **tied}


def _best(folder: Path, which: str) -> tuple[State, dict[str, Any], Path]:
    """The best model: the finished run's, else that of the newest checkpoint."""
    path = folder / f"{which}.safetensors"
    if (folder / "summary.json").exists() and path.exists():
        return (*_read(path, f"remove it, and the copy in {BEST}/ is taken"), path)
    there = (folder / BEST).glob(f"{which}-[0-9]*.safetensors")
    # A later one is better, or it would not have been kept.
    path = max(there, key=lambda one: one.stem.rpartition("-")[2].zfill(20), default=None)
    if path is None:
        tested = ", whose average is tested" if which == "best_averaged" else ""
        raise RunError(
            f"{folder} has no {WORDS[which]}: it is kept by runs with a validation set{tested} "
            "(data.validation = 0.1), from their first checkpoint on"
        )
    return (*_read(path, "--resume makes it anew"), path)


def _read(path: Path, way_out: str) -> tuple[State, dict[str, Any]]:
    try:
        state, meta = checkpoint.read(path)
        checkpoint.whole_number(meta["round"])
    except (ValueError, OSError, LookupError, TypeError) as error:
        text = str(error).replace(", use an earlier one", "")
        raise RunError(f"{text}; {way_out}") from None
    return state, meta
