"""The trust report: what a run's folder tells, as a page, live, as plots and for trackers.

It reads folders and never trains. `folder` reads a run in any state (`record` a line of it),
`groups` puts repetitions together, `figures` makes the numbers of every chart, `headline` the
result and the verdict, `page` the file, `watch` the live server; `plots` draws for papers and
`trackers` writes to other tools. Only the command line imports it.
"""
