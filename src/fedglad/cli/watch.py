"""`fedglad watch`: the report's page, live while a run goes on."""

import threading
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import console, mistakes

app = typer.Typer()

POLL = 0.5  # seconds between looks at whether a folder is there


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Or the next free one; 0 is any.")
    ] = 8756,
    host: Annotated[
        str, typer.Option(help="Where to listen; to other machines only with a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str,
        typer.Option(
            envvar="FEDGLAD_WATCH_TOKEN", help="With --host: what is asked for; else a new one."
        ),
    ] = "",
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only say where the page is.")
    ] = False,
) -> None:
    """Show the same page live while a run goes on; /metrics is for Prometheus."""
    from fedglad.report.watch import serve

    with mistakes():
        _wait_for(run)
        server = serve(run, port, host, token)
    with server:
        try:
            console.print(f"{server.url}  (Ctrl-C ends it)", soft_wrap=True)
            if not no_browser:  # which may take its time
                threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
            server.serve_forever()
        except KeyboardInterrupt:
            pass


def _wait_for(run: Path) -> None:
    """Until the folder is there and has begun to be a run's."""
    from fedglad.runs.reader import FILES

    if not run.exists():
        console.print(f"{run} is not there yet: waiting for it  (Ctrl-C ends it)", soft_wrap=True)
        while not any((run / name).exists() for name in FILES):
            time.sleep(POLL)
