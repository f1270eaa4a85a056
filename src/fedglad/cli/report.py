"""`fedglad report`: a page that shows which rounds to trust."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedglad.cli.console import console, escape, mistakes, say
from fedglad.cli.options import BASELINE, one_of

app = typer.Typer()


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
    baseline: Annotated[str | None, typer.Option(metavar="TEXT", help=BASELINE)] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also draw plots for a paper, to here.")
    ] = None,
    form: Annotated[
        str, one_of("fedglad.report.plots:FORMATS", "Of the plots: png, svg, pdf.", "--format")
    ] = "png",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the page's figures as JSON only.")
    ] = False,
) -> None:
    """Make one HTML page of runs: is training healthy, and which rounds can be trusted?"""
    from fedglad.report import ReportError, page
    from fedglad.report import plots as charts
    from fedglad.report.figures import payload
    from fedglad.runs.reader import Run, run_folders

    drawn, undrawn = list[Path](), list[str]()
    with mistakes(ModuleNotFoundError):
        if form not in charts.FORMATS:
            raise ReportError(f"unknown format {form!r}: choose from {', '.join(charts.FORMATS)}")
        folders = run_folders(runs)
        figures = payload([Run(folder).read() for folder in folders], baseline=baseline)
        path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        if out or not as_json:
            page.write(figures, path)
        if plots:
            try:
                plots.mkdir(parents=True, exist_ok=True)
                drawn, undrawn = charts.write(figures, plots, form), charts.left_out(figures)
            except OSError as mistake:
                where = mistake.filename or plots
                raise ReportError(
                    f"{where} cannot be written: {mistake.strerror or mistake}"
                ) from None
    if as_json:
        sys.stdout.write(page.data(figures) + "\n")
        return
    _show(figures)
    say(f"Page: {path}")
    for plot in drawn:
        say(f"Plot: {plot}")
    for reason in undrawn:
        say(f"Not drawn: {reason}")


def _show(figures: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(figures['verdict'])}[/]", soft_wrap=True)
    for tile in figures["headline"]:
        detail = f"  ({tile['detail']})" if tile["detail"] else ""
        say(f"  {tile['label']}: {tile['value']}{detail}")
    for text in figures["notes"]:
        say(f"Note: {text}")
