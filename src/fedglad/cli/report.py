"""`fedglad report` and `fedglad watch`: a page that shows which rounds to trust."""

import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedglad.cli.console import console, error
from fedglad.report import page, watch
from fedglad.report.figures import payload
from fedglad.report.folder import ReportError, expand, read
from fedglad.report.plots import FORMATS
from fedglad.report.record import text

app = typer.Typer()


def _complete_format(incomplete: str) -> list[str]:
    return [name for name in FORMATS if name.startswith(incomplete)]


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Runs' folders, or folders of them, in any state."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page's file; by default report.html in the run, or here."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The label to compare with, or a part; by default the first without an adapter, "
            "else the first.",
        ),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also draw plots for a paper, to here.")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format", help=f"Of the plots: {', '.join(FORMATS)}.", autocompletion=_complete_format
        ),
    ] = "png",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the page's figures as JSON only.")
    ] = False,
) -> None:
    """Make one HTML page of runs: is training healthy, and which rounds can be trusted?"""
    drawn, undrawn = list[Path](), list[str]()
    try:
        if form not in FORMATS:
            raise ReportError(f"unknown format {form!r}: choose from {', '.join(FORMATS)}")
        folders = expand(runs)
        told = payload([read(folder) for folder in folders], baseline=baseline)
        path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        if out or not as_json:
            page.write(told, path)
        if plots:
            drawn, undrawn = _draw(told, plots, form)
    except (ReportError, ModuleNotFoundError) as mistake:
        error(_line(mistake))
        raise typer.Exit(2) from None
    if as_json:
        sys.stdout.write(page.data(told) + "\n")
        return
    _show(told)
    console.print(f"Page: {escape(_line(path))}", soft_wrap=True)
    for one in drawn:
        console.print(f"Plot: {escape(_line(one))}", soft_wrap=True)
    for reason in undrawn:
        console.print(escape(f"Not drawn: {reason}"), soft_wrap=True)


@app.command("watch")
def show_watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Or the next free one; 0 is any.")
    ] = watch.PORT,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only say where the page is.")
    ] = False,
) -> None:
    """Show the same page live while a run goes on, to this machine alone."""
    try:
        server = watch.serve(run, port)
    except ReportError as mistake:
        error(_line(mistake))
        raise typer.Exit(2) from None
    with server:
        try:
            console.print(f"{server.url}  (Ctrl-C ends it)", soft_wrap=True)
            if not no_browser:  # which may take its time
                threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
            server.serve_forever()
        except KeyboardInterrupt:
            pass


def _draw(told: dict[str, Any], folder: Path, form: str) -> tuple[list[Path], list[str]]:
    from fedglad.report import plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return plots.write(told, folder, form), plots.left_out(told)
    except OSError as mistake:
        path = mistake.filename or folder
        raise ReportError(f"{path} cannot be written: {mistake.strerror or mistake}") from None


def _show(told: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(told['verdict'])}[/]", soft_wrap=True)
    for tile in told["headline"]:
        detail = f"  ({tile['detail']})" if tile["detail"] else ""
        console.print(escape(f"  {tile['label']}: {tile['value']}{detail}"), soft_wrap=True)
    for note in told["notes"]:
        console.print(escape(f"Note: {note}"), soft_wrap=True)


def _line(found: object) -> str:
    """A path may have bytes that no terminal shows."""
    return text(str(found), 2000)
