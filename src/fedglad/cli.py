"""The command line: one thin command per verb."""

import json
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fedglad import config as configuration
from fedglad.config import ConfigError, find, load, parse_value
from fedglad.records import Round
from fedglad.runs import Interrupted, Run, RunError, execute

app = typer.Typer(
    help="Federated learning that knows when to trust a round.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
complain = Console(stderr=True, highlight=False, soft_wrap=True)

LISTS = {
    "presets": None,
    "datasets": "data",
    "models": "model",
    "clients": "client",
    "samplers": "sampler",
    "optimizers": "server",
    "adapters": "adapter",
    "filters": "filter",
    "weights": "weighting",
}


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fedglad {installed('fedglad')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    if "" not in sys.path:  # an own class, model.name=mine:Own, is looked for here first
        sys.path.insert(0, "")


@app.command()
def run(
    source: Annotated[str, typer.Argument(help="A preset or a TOML file.")] = "digits",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: server.lr=0.5"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is there.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON only.")
    ] = False,
) -> None:
    """Run a federated experiment and keep its records."""
    try:
        name, config = load(source, _settings(set_ or []))
        with _Show(config.rounds, quiet=as_json) as show:
            done = execute(name, config, out=out, resume=resume, force=force, on_round=show.round)
    except Interrupted as stopped:
        complain.print(escape(str(stopped)))
        raise typer.Exit(130) from None
    except (ConfigError, RunError, ValueError, OSError) as error:
        complain.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        complain.print("stopped at once; go on from the last checkpoint with --resume")
        raise typer.Exit(130) from None
    _finish(done, as_json=as_json, new=show.seen > 0)


@app.command("config")
def show_config(
    source: Annotated[str, typer.Argument(help="A preset or a TOML file.")] = "digits",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
) -> None:
    """Print the complete configuration, every field with its meaning."""
    try:
        sys.stdout.write(load(source, _settings(set_ or []))[1].to_toml())
    except ConfigError as error:
        complain.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None


@app.command("list")
def show_list(
    kind: Annotated[str, typer.Argument(help=", ".join(LISTS))],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what there is to choose from."""
    if kind not in LISTS:
        complain.print(f"[red]error:[/] unknown list {kind!r}: choose from {', '.join(LISTS)}")
        raise typer.Exit(2)
    section = LISTS[kind]
    if section is None:
        rows = {name: load(name)[1].to_dict()["data"]["name"] for name in configuration.PRESETS}
    else:
        rows = {
            name: (find(section, name).__doc__ or "").strip().splitlines()[0]
            for name in configuration.REGISTRIES[section]
        }
    sizes = {name: _parameters(name) for name in rows} if section == "model" else {}
    if as_json:
        found: dict[str, Any] = dict(rows)
        for name, size in sizes.items():
            found[name] = {"about": rows[name], "parameters": size}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for name, text in rows.items():
        size = f" ({sizes[name]:,} parameters)" if sizes else ""
        console.print(f"[bold]{name:<18}[/]{escape(text + size)}", soft_wrap=True)


def _parameters(name: str) -> int:
    return sum(p.numel() for p in find("model", name)().build().parameters())


def _settings(given: list[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in given]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--set {key!r}: write it as KEY=VALUE, for example server.lr=0.5")
    return {key.strip(): parse_value(value.strip()) for key, _, value in pairs}


class _Show:
    """Live progress in a terminal; a line every tenth of the run elsewhere."""

    def __init__(self, rounds: int, *, quiet: bool) -> None:
        self.rounds, self.quiet, self.seen = rounds, quiet, 0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.live = console.is_terminal and not quiet

    def __enter__(self) -> "_Show":
        if self.live:
            self.progress.start()
            self.task = self.progress.add_task("starting", total=self.rounds)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.progress.stop()

    def round(self, done: Round) -> None:
        self.seen += 1
        line = _line(done, self.rounds)
        if self.live:
            self.progress.update(self.task, completed=done.t + 1, description=line)
        elif not self.quiet and (done.t + 1) % max(1, self.rounds // 10) == 0:
            console.print(line)


def _line(done: Round, rounds: int) -> str:
    record = done.record
    parts = [f"round {done.t + 1}/{rounds}"]
    if done.test_accuracy is not None and done.test_loss is not None:
        parts.append(f"accuracy {100 * done.test_accuracy:5.1f} %  loss {done.test_loss:.3f}")
    if record.gsi_all is not None:
        parts.append(f"GSI {record.gsi_all:.2f}")
    if record.rejected:
        parts.append(f"{len(record.rejected)} rejected")
    if not record.stepped:
        parts.append(f"skipped: {record.reason}")
    rate = len(done.cohort) / max(done.seconds.get("train", 0), 1e-9)
    return escape("  ".join([*parts, f"{rate:.0f} clients/s"]))


def _finish(run: Run, *, as_json: bool, new: bool) -> None:
    summary = run.summary
    assert summary is not None
    if as_json:
        sys.stdout.write(json.dumps({"folder": str(run.folder), **summary}, indent=2) + "\n")
        return
    if not new:
        console.print(f"This run is finished already: {escape(str(run.folder))}")
    console.print(
        f"Accuracy over the last 10 rounds [bold]{100 * summary['last10_accuracy']:.2f} %[/], "
        f"final {100 * summary['final_accuracy']:.2f} %, {summary['rounds']} rounds in "
        f"{summary['seconds']:.1f} s.\nRecords: {escape(str(run.folder))}",
        soft_wrap=True,
    )
