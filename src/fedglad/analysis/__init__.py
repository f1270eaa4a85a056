"""Finished runs: compared by seed, their curves, and replays of another rule.

>>> import tempfile, pathlib
>>> from fedglad.adapters import Fixed
>>> from fedglad.analysis import compare, replay
>>> from fedglad.config import load
>>> from fedglad.runs import execute
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> for adapter in ("none", "glad"):
...     settings = {"rounds": 2, "client.epochs": 1, "adapter.name": adapter}
...     run = execute(*load("digits", settings), out=folder / adapter)
>>> [group.label for group in compare([folder]).groups]
['adapter.name=none', 'adapter.name=glad']
>>> replay(folder / "glad", Fixed(value=0.5)).replayed.mean  # what another rule would have done
0.5

Reads runs' folders and never trains. May import runs and config.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.analysis.comparison import Comparison as Comparison
    from fedglad.analysis.comparison import compare as compare
    from fedglad.analysis.replaying import Replayed as Replayed
    from fedglad.analysis.replaying import replay as replay

__getattr__, __dir__ = lazily(__name__)
