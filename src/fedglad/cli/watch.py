"""`fedglad watch`: the report's page, live while a run goes on."""

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import console, mistakes

app = typer.Typer()


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Or the next free one; 0 is any.")
    ] = 8756,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only say where the page is.")
    ] = False,
) -> None:
    """Show the same page live while a run goes on, to this machine alone."""
    from fedglad.report.watch import serve

    with mistakes():
        server = serve(run, port)
    with server:
        try:
            console.print(f"{server.url}  (Ctrl-C ends it)", soft_wrap=True)
            if not no_browser:  # which may take its time
                threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
            server.serve_forever()
        except KeyboardInterrupt:
            pass
