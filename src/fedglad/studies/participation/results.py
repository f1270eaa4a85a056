"""What was run of the study: one small file a cell, to which any machine adds its draws."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglad.analysis.statistics import last_mean
from fedglad.core.files import write_text
from fedglad.runs.reader import BULK, Run, RunError
from fedglad.runs.sweeping import Task
from fedglad.studies.participation.cells import Cell, StudyError

DIGITS = 5  # of a score
READOUTS = {"raw": "test", "averaged": "averaged"}
"""The two models of a run, the newest and the average, and what a record calls each."""


@dataclass(frozen=True)
class Draw:
    """One run: the score of both models after every tested round."""

    hash: str
    raw: list[float]
    averaged: list[float]
    seconds: float
    skipped: int

    def last10(self, readout: str) -> float:
        """The mean score over the last 10 tested rounds."""
        return last_mean(getattr(self, readout))


def tasks(chosen: Sequence[Cell], draws: Sequence[int], out: Path) -> list[Task]:
    """The runs of some cells, draw by draw, so that what is there can always be paired."""
    made: list[Task] = []
    for draw in draws or range(1, 1 + max((cell.problem.draws for cell in chosen), default=0)):
        for cell in chosen:
            if draws or draw <= cell.problem.draws:
                config = cell.config(draw)
                folder = out / f"{cell.name}.{draw}"
                settings = {"cell": cell.name, "draw": draw}
                made.append(Task(cell.problem.preset, config, folder, settings))
    return made


def kept(cell: Cell, folder: Path) -> dict[int, Draw]:
    """The draws that the cell's file has; those of another configuration do not count."""
    path = folder / f"{cell.name}.json"
    try:
        tree: Any = json.loads(path.read_text("utf-8"))
        there = {int(draw): Draw(**one) for draw, one in tree["draws"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise StudyError(f"{path} cannot be read: {error}: mend it or remove it") from None
    return {draw: one for draw, one in there.items() if one.hash == cell.config(draw).hash()}


def finished(task: Task) -> Draw | None:
    """What is kept of a run's folder; None if it is not finished."""
    if not task.finished:
        return None
    try:
        run = Run(task.folder)
        rounds, summary = run.rounds(without=BULK), run.summary or {}
        fields = {name: f"{readout}_{run.score.name}" for name, readout in READOUTS.items()}
        columns = {
            name: [round(r[field], DIGITS) for r in rounds if r.get(field) is not None]
            for name, field in fields.items()
        }
        seconds, skipped = round(summary["seconds"], 1), summary["skipped"]
    except (RunError, KeyError, TypeError) as error:
        raise StudyError(f"{task.folder} cannot be read: {error}") from None
    return Draw(task.config.hash(), **columns, seconds=seconds, skipped=skipped)


def export(chosen: Sequence[Cell], out: Path, to: Path) -> list[Path]:
    """Adds the finished runs to the cells' files; those that have changed."""
    written: list[Path] = []
    for cell in chosen:
        there = kept(cell, to)
        folders = sorted(out.glob(f"{cell.name}.*"))
        draws = [int(f.suffix[1:]) for f in folders if f.suffix[1:].isdecimal()]
        new = {task.settings["draw"]: finished(task) for task in tasks([cell], draws, out)}
        every = there | {draw: one for draw, one in new.items() if one}
        if every != there:
            path = to / f"{cell.name}.json"
            to.mkdir(parents=True, exist_ok=True)
            write_text(path, _text(cell, dict(sorted(every.items()))))
            written.append(path)
    return written


def _text(cell: Cell, draws: Mapping[int, Draw]) -> str:
    """JSON with a line for each draw."""
    lines = [f'  "{draw}": {json.dumps(vars(one))}' for draw, one in draws.items()]
    config = json.dumps(cell.config(min(draws)).to_dict())
    body = ",\n".join(lines)
    return f'{{\n "config": {config},\n "draws": {{\n{body}\n }}\n}}\n'
