"""The trust report: what is in a run's folder, as a page, live, as plots and for trackers.

It reads folders and never trains. `groups` puts repetitions together, `figures` makes the numbers
of every chart, `clients` those of the table of clients, `headline` the result and the verdict,
`page` the file, `watch` the live server; `plots` draws every picture of the project and `trackers`
writes to other tools. May import analysis and runs.
"""

from typing import Any

from fedglad.runs.reader import RunError

RunFigures = dict[str, Any]
"""One run's numbers as the page shows them, made by `figures`."""


class ReportError(RunError):
    """What no report can be made of; the message says what is wrong with it."""
