"""`fedglad compare`: finished runs side by side."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedglad.cli.console import (
    console,
    escape,
    mistakes,
    note,
    print_json,
    print_wide,
    say,
    table,
    warn,
)
from fedglad.cli.options import BASELINE, AsJson, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedglad.analysis.comparison import Comparison

app = typer.Typer()


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders, or folders of them.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Which number of summary.json; by default the score, last10_accuracy."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help=BASELINE)] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A score: show the rounds and MB to it. 0.8 or 80%; for MAE 2.5."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2", help="Only the runs with these values: data.alpha=0.1,1.0"
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,KEY",
            help="What makes blocks, each with its baseline: sections or keys, such as data.alpha; "
            "none: one block. By default data, task, model and sampler, if methods are in several.",
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL:NAME",
            help="Another name for a label, or for a key or word in it: adapter.name=glad:FedGLAD",
        ),
    ] = None,
    averaged: Annotated[
        bool,
        typer.Option(
            "--averaged/--no-averaged", help="With or without a row for each averaged model."
        ),
    ] = True,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Of n, score, mean, std, final, best, rounds, bytes, difference, interval.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        one_of(
            "fedglad.analysis.tables:SHOWN",
            "table, latex, markdown, csv or json; by default as FILE ends, or a table.",
            "--format",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file: .tex, .md, .csv …")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the score and GSI by round to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs: mean and spread over the seeds, and paired differences.

    Methods on several data sets or models come in blocks, side by side in LaTeX and Markdown:

    fedglad compare runs --where seed=1,2,3 --alias adapter.name=glad:FedGLAD --to table.tex
    """
    from fedglad.analysis import tables
    from fedglad.analysis.comparison import compare

    with mistakes(ModuleNotFoundError):
        form = _format(form, to, as_json=as_json)
        comparison = compare(
            runs,
            metric=metric,
            baseline=baseline,
            target=target,
            where=_where(where),
            by=_names(by),
            alias=_aliases(alias),
            averaged=averaged,
        )
        names = _names(columns) or None
        tables.columns(comparison, names)
        text = _written(comparison, form, names) if to or form in tables.FORMATS else ""
        if to:
            _write(to, text)
        if plot:
            from fedglad.report.plots import comparison as plots

            plots.write(comparison, plot)
    if to:
        say(f"Table: {to}")
    elif form == "table":
        show_comparison(comparison, names)
    elif form == "json":
        print_json(comparison.to_dict())
    else:
        typer.echo(text, nl=False)
    if form == "csv":  # the other formats say it themselves
        for one in comparison.notes:
            warn(one)
    if plot and (to or form == "table"):
        say(f"Picture: {plot}")


def _format(form: str | None, to: Path | None, *, as_json: bool) -> str:
    """The format that is asked for, or that of a file's name."""
    from fedglad.analysis.tables import ENDINGS, SHOWN

    if as_json and form not in (None, "json"):
        raise ValueError(f"--json is --format json: leave it or --format {form} out")
    if form is None:
        form = "json" if as_json else ENDINGS.get(to.suffix, "") if to else "table"
    if not form:
        raise ValueError(f"the ending of {to} names no format: give one, --format latex")
    if form not in SHOWN:
        raise ValueError(f"unknown format {form!r}: choose from {', '.join(SHOWN)}")
    return form


def _where(texts: list[str] | None) -> dict[str, list[Any]]:
    from fedglad.runs.sweeping import parse_grids

    return parse_grids(texts or [], "--where")


def _names(text: str | None) -> list[str] | None:
    """The pieces of a list; `none` is an empty one."""
    if text is None:
        return None
    return [piece.strip() for piece in text.split(",") if piece.strip() not in ("", "none")]


def _aliases(texts: list[str] | None) -> dict[str, str]:
    """{label: name}; the last colon separates, as a user's own class has one in its name."""
    pairs = [text.rpartition(":") for text in texts or []]
    for label, _, name in pairs:
        if not label.strip() or not name.strip():
            raise ValueError(
                f"--alias {f'{label}:{name}'.strip(':')!r}: write it as LABEL:NAME, for example "
                "adapter.name=glad:FedGLAD"
            )
    return {label.strip(): name.strip() for label, _, name in pairs}


def _written(comparison: Comparison, form: str, columns: Sequence[str] | None) -> str:
    """The comparison as a file of this format has it."""
    from fedglad.analysis import tables

    if form in tables.FORMATS:
        return tables.FORMATS[form](comparison, columns)
    text = io.StringIO()
    with redirect_stdout(text):
        if form == "json":
            print_json(comparison.to_dict())
        else:
            show_comparison(comparison, columns)
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    from fedglad.core.files import write_text

    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        write_text(path, text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def show_comparison(comparison: Comparison, names: Sequence[str] | None = None) -> None:
    """The table, the differences by seed, and the notes; of several blocks one below the other."""
    from fedglad.analysis import tables

    columns = tables.columns(comparison, names)
    made = table("", *(column.head for column in columns))
    if text := tables.caption(comparison):
        made.caption = escape(text)
        made.caption_justify, made.caption_style = "left", "none"
    for k, group in enumerate(comparison.groups):
        if k == 0 or group.block != comparison.groups[k - 1].block:
            _head_of_block(made, group.block, first=k == 0)
        indent = "  " if group.block else ""
        cells = (escape(column.texts[k]) for column in columns)
        made.add_row(f"{indent}{escape(group.label)}", *cells)
    print_wide(made)
    for title, lines in tables.differences(comparison):
        say(f"\n{title}")
        for line in lines:
            say(f"  {line}")
    _show_stability(comparison)
    _show_clients(comparison)
    note(comparison.notes)


def _head_of_block(made: Any, label: str, *, first: bool) -> None:
    """A row with the block's label alone, below an empty one; nothing where there is but one."""
    if label:
        if not first:
            made.add_row("")
        made.add_row(f"[bold]{escape(label)}[/]")


def _show_stability(comparison: Comparison) -> None:
    from fedglad.analysis.tables import called

    steady = [(called(group), group.stability) for group in comparison.groups if group.stability]
    if steady and (score := comparison.tested):
        console.print(f"\nTest {score.words} in the second half of the rounds, mean over the runs:")
        unit = " %" if score.share else ""
        made = table("", *(f"{head}{unit}" for head in ("std", "worst round")))
        for name, its in steady:
            made.add_row(escape(name), score.figure(its.std), score.figure(its.worst))
        print_wide(made)


def _show_clients(comparison: Comparison) -> None:
    from fedglad.analysis.tables import called

    of_clients = [(called(group), group.clients) for group in comparison.groups if group.clients]
    if not of_clients:
        return
    score = of_clients[0][1].score
    unit = " %" if score.share else ""
    console.print(f"\n{score.title} of single clients when tested last, mean over the runs:")
    made = table("", *(f"{head}{unit}" for head in ("mean", "worst tenth", "std")))
    for name, its in of_clients:
        figures = (its.mean, its.worst_decile, its.std)
        whose = " (own models)" if its.personal else ""
        made.add_row(escape(name) + whose, *(its.score.figure(figure) for figure in figures))
    print_wide(made)
