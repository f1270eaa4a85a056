"""Runs on disk: a run's folder, running and resuming one, many at a time, tuning.

    from fedglad.runs import Run, execute

May import config and simulation.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.runs.folder import Interrupted, Run, RunError
    from fedglad.runs.running import execute
    from fedglad.runs.sweeping import Task, sweep, tasks
    from fedglad.runs.tuning import tune

__all__ = ["Interrupted", "Run", "RunError", "Task", "execute", "sweep", "tasks", "tune"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Interrupted": "folder",
        "Run": "folder",
        "RunError": "folder",
        "Task": "sweeping",
        "execute": "running",
        "sweep": "sweeping",
        "tasks": "sweeping",
        "tune": "tuning",
    },
)
