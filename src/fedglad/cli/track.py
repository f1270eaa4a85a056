"""`fedglad track`: a run in TensorBoard, MLflow or W&B."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedglad.cli.console import console, error
from fedglad.report import trackers
from fedglad.report.folder import ReportError, expand
from fedglad.report.trackers import REGISTRY, TrackError, Tracking

app = typer.Typer()


def _complete(incomplete: str) -> list[str]:
    return [name for name in REGISTRY if name.startswith(incomplete)]


@app.command()
def track(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Runs' folders, or folders of them.")
    ],
    to: Annotated[str, typer.Option(help=f"{', '.join(REGISTRY)}.", autocompletion=_complete)],
    out: Annotated[
        Path | None, typer.Option(help="The tracker's folder; by default tracked/TRACKER.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the runs are finished.")
    ] = False,
) -> None:
    """Write runs into the files of TensorBoard, MLflow or W&B; nothing is sent anywhere."""
    trackings: list[Tracking] = []
    try:
        trackings = [Tracking(folder, to=to, out=out) for folder in expand(runs)]
        if follow:
            trackers.follow(trackings, wait=_Wait())
        else:
            trackers.write(trackings)
    except (TrackError, ReportError) as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _tell(trackings)
        raise typer.Exit(130) from None
    _tell(trackings)


class _Wait:
    """Between two looks at the runs; says once that there will be more of them."""

    said = False

    def __call__(self) -> None:
        if not self.said:
            console.print("Following the runs; Ctrl-C ends that, and not the runs.")
            self.said = True
        time.sleep(trackers.POLL)


def _tell(trackings: list[Tracking]) -> None:
    """What was written, and how to see it."""
    for tracking in trackings:
        state = "finished" if tracking.finished else "not finished: call again for the rest"
        line = f"{tracking.source.story.name}: {tracking.rounds} rounds, {state}"
        console.print(escape(line), soft_wrap=True)
        for note in tracking.source.story.missing:
            console.print(escape(f"  Note: {note}"), soft_wrap=True)
    commands = [tracking.writer.command for tracking in trackings if tracking.writer]
    for command in dict.fromkeys(commands):
        console.print(f"See it: {escape(command)}", soft_wrap=True)
