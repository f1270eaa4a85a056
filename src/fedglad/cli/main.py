"""The command line: one thin command per verb."""

import json
import os
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedglad.analysis import comparison as comparing
from fedglad.cli.console import (
    ShowRun,
    ShowSweep,
    complain,
    console,
    distrusted,
    error,
    show_comparison,
    show_tuning,
    training_loss,
    warn,
)
from fedglad.cli.data import app as data_app
from fedglad.cli.data import bring
from fedglad.cli.flower import app as flower_app
from fedglad.cli.paper import app as paper_app
from fedglad.cli.replay import app as replay_app
from fedglad.cli.report import app as report_app
from fedglad.cli.track import app as track_app
from fedglad.config.catalogue import rows
from fedglad.config.keys import CompareError, label
from fedglad.config.presets import PRESETS
from fedglad.config.schema import ConfigError, find, load, parse_value
from fedglad.data import partition as partitions
from fedglad.runs import sweeping, tuning
from fedglad.runs.folder import Interrupted, Run, RunError, make_folder
from fedglad.runs.running import execute
from fedglad.studies.paper.experiments import EXPERIMENTS
from fedglad.studies.paper.settings import written_out

app = typer.Typer(
    help="Federated learning that knows when to trust a round.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")
app.add_typer(flower_app, name="flower")
for verbs in (report_app, replay_app, track_app):  # without a name of their own
    app.add_typer(verbs)

LISTS = {
    "presets": "",
    "datasets": "data",
    "partitions": "",
    "models": "model",
    "clients": "client",
    "samplers": "sampler",
    "optimizers": "server",
    "adapters": "adapter",
    "filters": "filter",
    "weights": "weighting",
    "engines": "engine",
    "experiments": "",
}


def _complete_source(incomplete: str) -> list[str]:
    """Presets, and what leads to a TOML file."""
    head = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(head or ".")
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [f"{head}{path.name}{'/' if path.is_dir() else ''}" for path in paths]
    found = [*PRESETS, *(f for f in files if f.endswith(("/", ".toml")))]
    return [name for name in found if name.startswith(incomplete)]


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in LISTS if kind.startswith(incomplete)]


Source = Annotated[
    str, typer.Argument(help="A preset or a TOML file.", autocompletion=_complete_source)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key: server.lr=0.5"),
]
Grids = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="KEY=V1,V2", help="Values to go through: server.lr=0.5,1"),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one a core.")]


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
    source: Source = "digits",
    set_: Settings = None,
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
        bring(config)
        with ShowRun(config.rounds, quiet=as_json) as show:
            done = execute(name, config, out=out, resume=resume, force=force, on_round=show.round)
    except Interrupted as stopped:
        complain.print(escape(str(stopped)))
        raise typer.Exit(130) from None
    except (ConfigError, RunError, ValueError, OSError) as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        complain.print("stopped at once; go on from the last checkpoint with --resume")
        raise typer.Exit(130) from None
    _finish(done, as_json=as_json, new=show.seen > 0)


@app.command("config")
def show_config(
    source: Source = "digits",
    set_: Settings = None,
) -> None:
    """Print the complete configuration, every field with its meaning."""
    try:
        sys.stdout.write(load(source, _settings(set_ or []))[1].to_toml())
    except ConfigError as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None


@app.command("list")
def show_list(
    kind: Annotated[str, typer.Argument(help=", ".join(LISTS), autocompletion=_complete_kind)],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what there is to choose from."""
    if kind not in LISTS:
        error(f"unknown list {kind!r}: choose from {', '.join(LISTS)}")
        raise typer.Exit(2)
    told = _listed(kind)
    sizes = {name: _parameters(name) for name in told} if kind == "models" else {}
    if as_json:
        found: dict[str, Any] = dict(told)
        for name, size in sizes.items():
            found[name] = {"about": told[name], "parameters": size}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for name, text in told.items():
        size = f" ({sizes[name]:,} parameters)" if sizes else ""
        console.print(f"[bold]{name:<18}[/]{escape(text + size)}", soft_wrap=True)


@app.command()
def sweep(
    source: Source,
    grid: Grids = None,
    set_: Settings = None,
    jobs: Jobs = None,
    control: Annotated[
        bool,
        typer.Option("--control", help="Run each adaptive rule also at its constant mean factor."),
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder of the runs' folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Run every combination of the grids that is missing, and compare them."""
    with _mistakes():
        tasks = sweeping.tasks(source, grid or [], _settings(set_ or []), out)
        for task in tasks:  # before they wait for each other
            bring(task.config)
        make_folder(out)
        if control and not any(map(sweeping.has_control, tasks)):
            warn("--control adds nothing: no run has an adaptive rule")
        start = sweeping.controlled if control else sweeping.sweep
        show = ShowSweep(tasks, quiet=as_json, control=control)
        ends = _follow(start(tasks, jobs=jobs or os.cpu_count() or 1), show)
    order = [task.folder for task in tasks]
    ends.sort(key=lambda event: order.index((event.task.rule or event.task).folder))
    _conclude(ends, as_json=as_json)


@app.command()
def tune(
    source: Source,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2", help="Values to try: server.lr=0.5,1, or server.lr=paper."
        ),
    ] = None,
    set_: Settings = None,
    share: Annotated[float, typer.Option(help="Which share of the rounds is run.")] = tuning.SHARE,
    trials: Annotated[
        int | None, typer.Option(min=1, help="How many to try; by default the whole grid.")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[Path, typer.Option(help="The folder of the study and its runs.")] = Path(
        "runs/tune"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Choose settings by the mean training loss of the first rounds, as the paper does."""
    with _mistakes():
        settings = _settings(set_ or [])
        grids = written_out(grid or [], load(source, settings)[1].to_dict())
        plan = tuning.plan(source, grids, settings, out, share=share)
        for task in plan.tasks:
            bring(task.config)
        wanted = min(trials or len(plan.tasks), len(plan.tasks))
        show = ShowSweep(plan.tasks, quiet=as_json, runs=wanted, result=training_loss)
        _follow(tuning.tune(plan, trials=trials, jobs=jobs or os.cpu_count() or 1), show)
        found = tuning.result(plan)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
    else:
        console.print()
        show_tuning(found)
    failed = [trial for trial in found.trials if trial.status == "failed"]
    for trial in failed:
        error(f"{label(trial.settings)}: {trial.reason}  (log: {trial.folder}/log.txt)")
    if found.best is None:
        error("no trial has a score: all diverged or failed")
    if failed or found.best is None:
        raise typer.Exit(1)


@app.command("compare")
def show_compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders, or folders of them.")],
    metric: Annotated[str, typer.Option(help="Which number of summary.json.")] = comparing.METRIC,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The label to compare with, or a part; by default the first without an adapter, "
            "else the first."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw accuracy and GSI by round to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Compare finished runs: mean and spread over the seeds, and paired differences."""
    try:
        found = comparing.compare(runs, metric=metric, baseline=baseline)
        if plot:
            found.plot(plot)
    except CompareError as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
    else:
        show_comparison(found)
        if plot:
            console.print(f"Picture: {escape(str(plot))}", soft_wrap=True)


def _listed(kind: str) -> dict[str, str]:
    """Everything of a kind in a line, with its reference."""
    if kind == "presets":
        return {name: preset.about for name, preset in PRESETS.items()}
    if kind == "experiments":
        return {name: found.about for name, found in EXPERIMENTS.items()}
    if kind == "partitions":
        return {n: (c.__doc__ or "").splitlines()[0] for n, c in partitions.REGISTRY.items()}
    return {row.name: row.line for row in rows(LISTS[kind])}


def _parameters(name: str) -> int:
    settings = find("model", name)
    if told := getattr(settings, "parameters", 0):  # nothing is fetched for a list
        return told
    return sum(p.numel() for p in settings().build().parameters())


def _settings(given: list[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in given]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--set {key!r}: write it as KEY=VALUE, for example server.lr=0.5")
    return {key.strip(): parse_value(value.strip()) for key, _, value in pairs}


def _finish(run: Run, *, as_json: bool, new: bool) -> None:
    summary = run.summary
    assert summary is not None
    if as_json:
        sys.stdout.write(json.dumps({"folder": str(run.folder), **summary}, indent=2) + "\n")
    else:
        if not new:
            console.print(f"This run is finished already: {escape(str(run.folder))}")
        console.print(
            f"Accuracy over the last 10 rounds [bold]{100 * summary['last10_accuracy']:.2f} %[/], "
            f"final {100 * summary['final_accuracy']:.2f} %, {summary['rounds']} rounds in "
            f"{summary['seconds']:.1f} s.\nRecords: {escape(str(run.folder))}",
            soft_wrap=True,
        )
        if told := distrusted(run.rounds()):
            console.print(told, soft_wrap=True)
    if skipped := run.skipped:
        warn(skipped)
    if summary.get("skipped") == summary["rounds"]:
        raise typer.Exit(1)


@contextmanager
def _mistakes() -> Generator[None]:
    """A user's mistake, or second Ctrl-C, is a message and an exit code."""
    try:
        yield
    except (ConfigError, RunError, OSError) as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        complain.print("stopped at once; go on from the last checkpoints with the same command")
        raise typer.Exit(130) from None


def _follow(events: Generator[sweeping.Event], show: ShowSweep) -> list[sweeping.Event]:
    """Shows what happens, to the end; how each run ended."""
    ends: list[sweeping.Event] = []
    try:
        with show, closing(events):
            for event in events:
                show.event(event)
                ends += [event] if event.what in sweeping.ENDS else []
    except Interrupted as stopped:
        done = sum(event.what in sweeping.DONE for event in ends)
        complain.print(f"{done} of {show.runs} runs are finished; {escape(str(stopped))}")
        raise typer.Exit(130) from None
    return ends


def _conclude(ends: list[sweeping.Event], *, as_json: bool) -> None:
    """The table of what is finished, what failed and why; exit code 1 if anything did."""
    good = [event.task.folder for event in ends if event.what in sweeping.DONE]
    bad = [event for event in ends if event.what not in sweeping.DONE]
    try:
        found = comparing.compare(good) if good else None
    except CompareError as broken:
        error(str(broken))
        raise typer.Exit(1) from None
    if as_json:
        told = {
            "runs": [_told(event) for event in ends],
            "comparison": found.to_dict() if found else None,
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    elif found:
        console.print()
        show_comparison(found)
    for event in bad:
        where = f"  (log: {_log(event)})" if _log(event) else ""
        error(f"{event.task.label}: {event.reason}{where}")
    if bad:
        raise typer.Exit(1)


def _told(event: sweeping.Event) -> dict[str, Any]:
    task = event.task
    told = {"folder": str(task.folder), "settings": task.settings, "status": event.what}
    if task.rule:
        told |= {"label": task.label, "control_of": str(task.rule.folder)}
    return told | ({"reason": event.reason, "log": _log(event)} if event.reason else {})


def _log(event: sweeping.Event) -> str | None:
    path = event.task.folder / "log.txt"
    return str(path) if path.is_file() else None
