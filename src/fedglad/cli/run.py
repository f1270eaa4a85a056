"""`fedglad run`: a federated experiment in its folder."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import console, escape, mistakes, print_json, say, warn
from fedglad.cli.options import (
    AcceptOld,
    KeepState,
    Quiet,
    Settings,
    TrustCode,
    complete_source,
    given,
)

CLIENTS = 5  # to look at, that a line names

app = typer.Typer()


@app.command()
def run(
    source: Annotated[
        str,
        typer.Argument(
            help="A preset or a TOML file. Or a run's folder.", autocompletion=complete_source
        ),
    ] = "digits",
    set_: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run: an unfinished one, or for more rounds."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is there.")] = False,
    accept_old: AcceptOld = False,
    keep_state: KeepState = None,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON only.")
    ] = False,
) -> None:
    """Run a federated experiment and keep its records."""
    from fedglad.analysis.per_client import clients, worst
    from fedglad.cli.fetching import fetch_for
    from fedglad.cli.progress import (
        ShowRun,
        distrusted,
        last_tests,
        results,
        single_clients,
        validation,
    )
    from fedglad.privacy import text
    from fedglad.runs.extending import place_of
    from fedglad.runs.running import execute
    from fedglad.runs.trusted_code import load_trusted

    with mistakes(stopped="stopped at once; go on from the last checkpoint with --resume"):
        folder = Path(source) if Path(source).is_dir() else None
        named = folder / "config.toml" if folder else source
        name, config = load_trusted(named, given(set_), trust_code=trust_code)
        extend = None
        if folder and out is None:
            out, extend = place_of(folder, config, resume=resume)
        fetch_for(config)
        with ShowRun(config.rounds, quiet=as_json or quiet) as show:
            done = execute(
                name,
                config,
                out=out,
                resume=resume,
                force=force,
                accept_old=accept_old,
                keep_state=keep_state,
                extend=extend,
                on_round=show.round,
                on_lost=warn,
            )
    summary = done.summary
    assert summary is not None
    if as_json:
        print_json({"folder": str(done.folder), **summary})
    elif not quiet:
        if not show.seen:
            console.print(f"This run is finished already: {escape(str(done.folder))}")
        score = done.score
        last10, final = results(summary, score)
        console.print(
            f"{score.title} over {last_tests(done)} [bold]{last10}[/], final {final}, "
            f"{summary['rounds']} rounds in {summary['seconds']:.1f} s.\n"
            f"Records: {escape(str(done.folder))}",
            soft_wrap=True,
        )
        if validated := validation(summary, score):
            say(f"On the validation set, {score.words}: {validated.removeprefix('validation ')}.")
        if own := single_clients(summary, score):
            say(f"On their own held-out samples, {score.words}: {own}.")
        if (epsilon := summary.get("epsilon")) is not None:
            delta = config.sections["privacy"].delta
            say(f"Its models are differentially private: ε = {text(epsilon)} at δ = {delta:g}.")
        if flagged := distrusted(done.rounds()):
            say(flagged)
        if named := worst(clients(done), CLIENTS):
            say(f"clients to look at: {named}")
        say(f"See it: fedglad report {shlex.quote(str(done.folder))}")
        if stopped := summary.get("stopped"):
            say(f"Stopped after {summary['rounds']} of {config.rounds} rounds: {stopped}")
        if not show.seen and (warning := summary.get("warning")):
            warn(warning)
    if skipped := done.skipped:
        warn(skipped)
    if summary.get("skipped") == summary["rounds"]:
        raise typer.Exit(1)
