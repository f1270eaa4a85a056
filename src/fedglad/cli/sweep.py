"""`fedglad sweep`: every combination of some grids, and their comparison."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedglad.cli.console import console, error, mistakes, print_json, warn
from fedglad.cli.options import (
    AcceptOld,
    AsJson,
    Grids,
    Jobs,
    KeepState,
    Quiet,
    RunsOut,
    Settings,
    Source,
    TrustCode,
    cores,
    given,
)

if TYPE_CHECKING:
    from fedglad.runs.places.base import Place
    from fedglad.runs.sweeping import Event, Task

app = typer.Typer()

Where = Literal["ray", "slurm"]
On = Annotated[
    Where | None, typer.Option("--on", help="Run them on a Ray cluster, or as jobs of Slurm.")
]
Address = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="With --on ray: of the cluster, or auto."),
]
SlurmOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="With --on slurm: partition=gpu, timeout_min=600, …"),
]

STOPPED = "stopped at once; go on from the last checkpoints with the same command"


@app.command()
def sweep(
    source: Source,
    grid: Grids = None,
    set_: Settings = None,
    jobs: Jobs = None,
    on: On = None,
    address: Address = "",
    slurm: SlurmOptions = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Beside each rule: its mean factor, the best constant, a linear decay.",
        ),
    ] = False,
    factors: Annotated[
        str, typer.Option(help="With --control: among which the constant is chosen.")
    ] = "0.4,0.6,0.8,1.0,1.25,1.5,2.0",
    out: RunsOut = Path("runs"),
    accept_old: AcceptOld = False,
    keep_state: KeepState = None,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run every combination of the grids that is missing, and compare them."""
    from fedglad.cli.fetching import fetch_for
    from fedglad.cli.progress import ShowSweep, follow
    from fedglad.runs import sweeping
    from fedglad.runs.control import AVERAGE, Controls, has_control
    from fedglad.runs.folder import make_folder
    from fedglad.runs.own_code import said_of_all

    with mistakes(stopped=STOPPED):
        grids, settings = grid or [], given(set_)
        tasks_of = partial(
            sweeping.tasks,
            trust_code=trust_code,
            accept_old=accept_old,
            keep_state=keep_state,
        )
        tasks = tasks_of(source, grids, settings, out)
        controls = None
        if control and any(map(has_control, tasks)):
            tasks = tasks_of(source, grids, settings, out, defaults=AVERAGE)
            controls = Controls(tasks, _numbers(factors))
        for task in tasks:  # before they wait for each other
            fetch_for(task.config)
        if beside := said_of_all((task.folder, task.config) for task in tasks):
            warn(beside)
        make_folder(out)
        if control and not controls:
            warn("--control adds nothing: no run has an adaptive rule")
        show = ShowSweep(tasks, quiet=as_json or quiet, controls=controls)
        then = controls.then if controls else None
        with closing(_place_of(on, address, slurm or [], jobs, out)) as place:
            ends = follow(sweeping.sweep(tasks, then=then, place=place), show)
    order = [task.folder for task in tasks]
    ends.sort(key=lambda event: _order(event.task, order))
    _conclude(ends, as_json=as_json, quiet=quiet)


def _place_of(
    on: Where | None, address: str, slurm: list[str], jobs: int | None, out: Path
) -> "Place":
    """Where the runs happen."""
    if address and on != "ray":
        raise ValueError(f"--address {address!r} is that of a Ray cluster: add --on ray")
    if slurm and on != "slurm":
        raise ValueError(f"--slurm {slurm[0]!r}: add --on slurm")
    if on == "ray":
        from fedglad.runs.places.ray import OnRay

        return OnRay(address, jobs)
    if on == "slurm":
        from fedglad.runs.places.slurm import OnSlurm

        return OnSlurm(out, jobs, given(slurm, "partition=gpu", "--slurm"))
    from fedglad.runs.places.processes import Processes

    return Processes(cores(jobs))


def _order(task: "Task", order: list[Path]) -> tuple[int, int]:
    """Where a run stands among the others: a control after its rule."""
    from fedglad.runs.twins import KINDS

    rule = task.rule
    return order.index((rule or task).folder), [*KINDS].index(task.kind) if rule else -1


def _numbers(text: str) -> list[float]:
    try:
        return [float(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(f"--factors {text!r}: write it as 0.5,1,2") from None


def _conclude(ends: "list[Event]", *, as_json: bool, quiet: bool) -> None:
    """The table of what is finished, what failed and why; exit code 1 if anything did."""
    from fedglad.analysis.comparison import compare
    from fedglad.cli.compare import show_comparison
    from fedglad.runs.sweeping import DONE

    good = [event.task.folder for event in ends if event.what in DONE]
    bad = [event for event in ends if event.what not in DONE]
    try:
        comparison = compare(good) if good else None
    except ValueError as broken:
        error(str(broken))
        raise typer.Exit(1) from None
    if as_json:
        rows = [_row(event) for event in ends]
        print_json({"runs": rows, "comparison": comparison.to_dict() if comparison else None})
    elif comparison and not quiet:
        console.print()
        show_comparison(comparison)
    for event in bad:
        where = f"  (log: {_log(event)})" if _log(event) else ""
        error(f"{event.task.label}: {event.reason}{where}")
    if bad:
        raise typer.Exit(1)


def _row(event: "Event") -> dict[str, Any]:
    task = event.task
    row = {"folder": str(task.folder), "settings": task.settings, "status": event.what}
    if task.rule:
        row |= {"label": task.label, "control_of": str(task.rule.folder), "control": task.kind}
    return row | ({"reason": event.reason, "log": _log(event)} if event.reason else {})


def _log(event: "Event") -> str | None:
    path = event.task.folder / "log.txt"
    return str(path) if path.is_file() else None
