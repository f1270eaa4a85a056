"""The trust report: what a run's folder tells, as a page, live, as plots and for trackers.

It reads folders and never trains. `groups` puts repetitions together, `figures` makes the numbers
of every chart, `headline` the result and the verdict, `page` the file, `watch` the live server;
`plots` draws every picture of the project and `trackers` writes to other tools. May import analysis
and runs.
"""

from fedglad.runs.reader import RunError


class ReportError(RunError):
    """What no report can be made of; the message says what is wrong with it."""
