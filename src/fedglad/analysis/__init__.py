"""Runs: compared by seed, their curves, their clients, and replays of another rule.

Reads runs' folders and never trains. May import runs and config.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.analysis.comparison import Comparison as Comparison
    from fedglad.analysis.comparison import compare as compare
    from fedglad.analysis.per_client import ClientSummary as ClientSummary
    from fedglad.analysis.per_client import clients as clients
    from fedglad.analysis.replaying import Replayed as Replayed
    from fedglad.analysis.replaying import replay as replay

__getattr__, __dir__ = lazily(__name__)
