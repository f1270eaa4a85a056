"""Runs in a script or a notebook: begun, gone on with, opened again, and read as data frames.

`running` has `fedglad.run`, `handle` what it gives, `loading` has `fedglad.load_runs`, and
`progress` the bar. May import everything; nothing imports it but `fedglad` itself.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.interactive.handle import RunHandle as RunHandle
    from fedglad.interactive.loading import Runs as Runs

__getattr__, __dir__ = lazily(__name__)
