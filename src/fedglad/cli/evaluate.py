"""`fedglad evaluate`: the models of a run, tested on its own data or on others."""

from pathlib import Path
from typing import Annotated

import typer

from fedglad.cli.console import console, escape, mistakes, print_json, print_wide, say, table
from fedglad.cli.options import AsJson, Settings, TrustCode, complete_source, given

app = typer.Typer()


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Other data: the section [data] of a preset or a TOML file.",
            autocompletion=complete_source,
        ),
    ] = None,
    set_: Settings = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Test the models of a run, without training: the last, the average and the best."""
    from fedglad.cli.fetching import fetch_for
    from fedglad.runs.evaluating import config_of
    from fedglad.runs.evaluating import evaluate as evaluated
    from fedglad.runs.reader import require_run

    with mistakes(stopped=""):
        require_run(run)
        overrides = given(set_, "data.partition=iid")
        fetch_for(config_of(run, data=data, overrides=overrides, trust_code=trust_code))
        done = evaluated(run, data=data, overrides=overrides, trust_code=trust_code)
    if as_json:
        print_json(done.to_dict())
        return
    names = list(dict.fromkeys(name for one in done.models for name in one.test))
    shown = table("", *names)
    for one in done.models:
        for words, metrics in ((one.words, one.test), ("  on the validation set", one.validation)):
            if metrics is not None:
                values = (done.text(name, metrics.get(name)) for name in names)
                shown.add_row(escape(words), *values)
    head = f"{escape(str(done.folder))} on {escape(done.data)}, {done.samples} test samples"
    console.print(head, soft_wrap=True)
    print_wide(shown)
    if done.note:
        say(f"Note: {done.note}.")
