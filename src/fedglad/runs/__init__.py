"""Runs on disk: a run's folder and its one reader, running and resuming, many at a time, tuning.

May import config and simulation.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.runs.checking import check as check
    from fedglad.runs.evaluating import Evaluation as Evaluation
    from fedglad.runs.evaluating import evaluate as evaluate
    from fedglad.runs.exporting import Exported as Exported
    from fedglad.runs.exporting import export as export
    from fedglad.runs.folder import Interrupted as Interrupted
    from fedglad.runs.pruning import Prunable as Prunable
    from fedglad.runs.pruning import prunable as prunable
    from fedglad.runs.pruning import prune as prune
    from fedglad.runs.reader import Run as Run
    from fedglad.runs.reader import RunError as RunError
    from fedglad.runs.running import execute as execute
    from fedglad.runs.sweeping import Task as Task
    from fedglad.runs.sweeping import sweep as sweep
    from fedglad.runs.sweeping import tasks as tasks
    from fedglad.runs.tuning import tune as tune

__getattr__, __dir__ = lazily(__name__)
