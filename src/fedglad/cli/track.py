"""`fedglad track`: a run in TensorBoard, MLflow or W&B."""

import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedglad.cli.console import console, mistakes, say
from fedglad.cli.options import Runs, one_of

if TYPE_CHECKING:
    from fedglad.report.trackers import Tracking

app = typer.Typer()


@app.command()
def track(
    runs: Runs,
    to: Annotated[str, one_of("fedglad.report.trackers:REGISTRY", "tensorboard, mlflow, wandb.")],
    out: Annotated[
        Path | None, typer.Option(help="The tracker's folder; by default tracked/TRACKER.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the runs are finished.")
    ] = False,
) -> None:
    """Write runs into the files of TensorBoard, MLflow or W&B; nothing is sent anywhere."""
    from fedglad.report import trackers
    from fedglad.runs.reader import run_folders

    waits = count()

    def wait() -> None:
        """Between two looks at the runs; says once that there will be more of them."""
        if next(waits) == 0:
            console.print("Following the runs; Ctrl-C ends that, and not the runs.")
        time.sleep(trackers.POLL)

    trackings: list[Tracking] = []
    with mistakes(stopped=""):
        try:
            trackings = [trackers.Tracking(folder, to=to, out=out) for folder in run_folders(runs)]
            trackers.follow(trackings, wait=wait if follow else None)
        except KeyboardInterrupt:
            _show(trackings)
            raise
    _show(trackings)


def _show(trackings: "list[Tracking]") -> None:
    """What was written, and how to see it."""
    for tracking in trackings:
        state = "finished" if tracking.finished else "not finished: call again for the rest"
        say(f"{tracking.source.view.name}: {tracking.rounds} rounds, {state}")
        for note in tracking.source.view.missing:
            say(f"  Note: {note}")
    commands = [tracking.writer.command for tracking in trackings if tracking.writer]
    for command in dict.fromkeys(commands):
        say(f"See it: {command}")
