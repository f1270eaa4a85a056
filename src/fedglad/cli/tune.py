"""`fedglad tune`: settings chosen by the training loss of the first rounds, or another score."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedglad.cli.console import (
    console,
    error,
    escape,
    mistakes,
    note,
    print_json,
    print_wide,
    say,
    table,
)
from fedglad.cli.options import (
    AsJson,
    Jobs,
    Quiet,
    Settings,
    Source,
    TrustCode,
    cores,
    given,
    one_of,
)
from fedglad.cli.sweep import STOPPED

if TYPE_CHECKING:
    from fedglad.runs.folder import Run
    from fedglad.runs.tuning import Tuning

app = typer.Typer()


@app.command()
def tune(
    source: Source,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2", help="Values to try: server.lr=0.5,1, or server.lr=paper."
        ),
    ] = None,
    set_: Settings = None,
    share: Annotated[float, typer.Option(help="Which share of the rounds is run.")] = 0.2,
    trials: Annotated[
        int | None, typer.Option(min=1, help="How many to try; by default the whole grid.")
    ] = None,
    metric: Annotated[
        str | None,
        one_of(
            "fedglad.runs.tuning:METRICS",
            "What judges: train_loss, or a score such as last10_validation_accuracy, which is the "
            "default where there is a validation set.",
        ),
    ] = None,
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(help="The folder of the runs' folders.")] = Path("runs/tune"),
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose settings by the first rounds: their training loss, or a validation set's score."""
    from fedglad.cli.fetching import fetch_for
    from fedglad.cli.progress import ShowSweep, follow
    from fedglad.config.schema import load
    from fedglad.runs import tuning
    from fedglad.studies.paper.settings import written_out

    with mistakes(stopped=STOPPED):
        settings = given(set_)
        grids = written_out(grid or [], load(source, settings)[1].to_dict())
        search = tuning.combinations(
            source, grids, settings, out, share=share, trust_code=trust_code
        )
        metric = tuning.check_metric(search, metric)
        chosen = search.first(trials)
        for task in chosen:
            fetch_for(task.config)
        show = ShowSweep(chosen, quiet=as_json or quiet, result=partial(scored, metric=metric))
        ends = follow(tuning.tune(search, trials=trials, jobs=cores(jobs)), show)
        result = tuning.result(search, ends, metric=metric)
    if as_json:
        print_json(result.to_dict())
    else:
        console.print()
        show_tuning(result)
    from fedglad.config.keys import label

    failed = [trial for trial in result.trials if trial.status == "failed"]
    for trial in failed:
        error(f"{label(trial.settings)}: {trial.reason}  (log: {trial.folder}/log.txt)")
    if result.best is None:
        error("no trial has a score: all diverged or failed")
    if failed or result.best is None:
        raise typer.Exit(1)


def scored(run: "Run", metric: str) -> str:
    """What a trial came to."""
    from fedglad.runs.tuning import METRIC, value_of

    value, reason = value_of(run, metric)
    name = "training loss" if metric == METRIC else metric
    return f"diverged: {reason}" if reason else f"{name} {_figure(value)}"


def _figure(value: float) -> str:
    """
    >>> _figure(0.8125), _figure(0.00012345)
    ('0.8125', '0.0001234')
    """
    return f"{value:.4f}" if not value or abs(value) >= 0.01 else f"{value:.4g}"


def show_tuning(tuning: "Tuning") -> None:
    """The trials, the best first, and its settings as arguments."""
    from fedglad.config.keys import label, shown

    made = table("score", *map(escape, tuning.grid))
    made.add_column("run", overflow="fold")
    for trial in tuning.trials:
        figure = _figure(trial.score) if trial.score is not None else trial.status
        values = (escape(shown(trial.settings[key])) for key in tuning.grid)
        made.add_row(figure, *values, escape(str(trial.folder)))
    print_wide(made)
    what = "the mean training loss" if tuning.metric == "train_loss" else tuning.metric
    less = (
        "" if tuning.score.higher or tuning.metric == "train_loss" else ", of which less is better,"
    )
    say(
        f"\nThe score is {what}{less} over the first {tuning.rounds} of "
        f"{tuning.full_rounds} rounds. The runs are shortened to these: no result of theirs stands "
        "for a whole run."
    )
    for trial in tuning.trials:
        if trial.status == "diverged":
            say(f"Diverged: {label(trial.settings)}: {trial.reason}.")
    if tuning.best:
        console.print(f"Best: [bold]{escape(tuning.best.arguments)}[/]", soft_wrap=True)
    note(tuning.notes)
